// Generated from kernels/assignment.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/assignment.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `inertia` of `kernels/assignment.cu`.
pub(super) const INERTIA: Kernel = Kernel {
    name: "inertia",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4],
};

/// The arguments of the kernel `inertia` of `kernels/assignment.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Inertia<'b> {
    pub distances: Ptr<'b, f32>,
    pub out: Ptr<'b, f64>,
    pub n: usize,
}

impl Inertia<'_> {
    pub const KERNEL: &'static Kernel = &INERTIA;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [self.distances.into(), self.out.into(), Arg::u32(self.n)];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `count_codes` of `kernels/assignment.cu`.
pub(super) const COUNT_CODES: Kernel = Kernel {
    name: "count_codes",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4],
};

/// The arguments of the kernel `count_codes` of `kernels/assignment.cu`.
#[derive(Clone, Copy)]
pub(crate) struct CountCodes<'b> {
    pub codes: Ptr<'b, u32>,
    pub counts: Ptr<'b, u32>,
    pub n: usize,
    pub size: usize,
}

impl CountCodes<'_> {
    pub const KERNEL: &'static Kernel = &COUNT_CODES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.codes.into(),
            self.counts.into(),
            Arg::u32(self.n),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `hand_over` of `kernels/assignment.cu`.
pub(super) const HAND_OVER: Kernel = Kernel {
    name: "hand_over",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `hand_over` of `kernels/assignment.cu`.
#[derive(Clone, Copy)]
pub(crate) struct HandOver<'b> {
    pub pairs: Ptr<'b, u32>,
    pub codes: Ptr<'b, u32>,
    pub changed: Ptr<'b, u32>,
    pub count: usize,
    pub head: usize,
    pub n: usize,
}

impl HandOver<'_> {
    pub const KERNEL: &'static Kernel = &HAND_OVER;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.pairs.into(),
            self.codes.into(),
            self.changed.into(),
            Arg::u32(self.count),
            Arg::u32(self.head),
            Arg::u32(self.n),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `gather_rows` of `kernels/assignment.cu`.
pub(super) const GATHER_ROWS: Kernel = Kernel {
    name: "gather_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 8, 4],
};

/// The arguments of the kernel `gather_rows` of `kernels/assignment.cu`.
#[derive(Clone, Copy)]
pub(crate) struct GatherRows<'b> {
    pub x: Ptr<'b, f32>,
    pub rows: Ptr<'b, u32>,
    pub out: Ptr<'b, f32>,
    pub count: usize,
    pub first: usize,
    pub w: usize,
}

impl GatherRows<'_> {
    pub const KERNEL: &'static Kernel = &GATHER_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.rows.into(),
            self.out.into(),
            Arg::u32(self.count),
            Arg::u64(self.first),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
