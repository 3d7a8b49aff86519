// Generated from kernels/best.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/best.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `narrow_keys` of `kernels/best.cu`.
pub(super) const NARROW_KEYS: Kernel = Kernel {
    name: "narrow_keys",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `narrow_keys` of `kernels/best.cu`.
#[derive(Clone, Copy)]
pub(crate) struct NarrowKeys<'b> {
    pub keys: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub found: Ptr<'b, u32>,
    pub pass: usize,
    pub capacity: usize,
}

impl NarrowKeys<'_> {
    pub const KERNEL: &'static Kernel = &NARROW_KEYS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.keys.into(),
            self.spans.into(),
            self.budgets.into(),
            self.histograms.into(),
            self.found.into(),
            Arg::u32(self.pass),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `count_best` of `kernels/best.cu`.
pub(super) const COUNT_BEST: Kernel = Kernel {
    name: "count_best",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4],
};

/// The arguments of the kernel `count_best` of `kernels/best.cu`.
#[derive(Clone, Copy)]
pub(crate) struct CountBest<'b> {
    pub keys: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub found: Ptr<'b, u32>,
    pub totals: Ptr<'b, u32>,
    pub capacity: usize,
}

impl CountBest<'_> {
    pub const KERNEL: &'static Kernel = &COUNT_BEST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.keys.into(),
            self.spans.into(),
            self.histograms.into(),
            self.found.into(),
            self.totals.into(),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `list_best` of `kernels/best.cu`.
pub(super) const LIST_BEST: Kernel = Kernel {
    name: "list_best",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `list_best` of `kernels/best.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ListBest<'b> {
    pub keys: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub found: Ptr<'b, u32>,
    pub totals: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub capacity: usize,
    pub most: usize,
}

impl ListBest<'_> {
    pub const KERNEL: &'static Kernel = &LIST_BEST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.keys.into(),
            self.spans.into(),
            self.found.into(),
            self.totals.into(),
            self.lists.into(),
            self.listed.into(),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
