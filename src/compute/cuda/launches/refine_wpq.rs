// Generated from kernels/refine_wpq.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/refine_wpq.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, no_kernel, start};
use crate::error::Result;

/// The kernel `refined_parts_16` of `kernels/refine_wpq.cu`.
pub(super) const REFINED_PARTS_16: Kernel = Kernel {
    name: "refined_parts_16",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The kernel `refined_parts_256` of `kernels/refine_wpq.cu`.
pub(super) const REFINED_PARTS_256: Kernel = Kernel {
    name: "refined_parts_256",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernels `refined_parts_*`, one for each width, of `kernels/refine_wpq.cu`.
#[derive(Clone, Copy)]
pub(crate) struct RefinedParts<'b> {
    pub codes: Ptr<'b, u8>,
    pub tables: Ptr<'b, c_void>,
    pub lines: Ptr<'b, f32>,
    pub paths: Option<Ptr<'b, f32>>,
    pub totals: Ptr<'b, f32>,
    pub items: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub scores: Ptr<'b, f32>,
    pub parts: Ptr<'b, f32>,
    pub groups: usize,
    pub width: usize,
    pub r: usize,
    pub room: usize,
    pub capacity: usize,
}

impl RefinedParts<'_> {
    /// Returns the kernel for a width.
    pub fn kernel(width: usize) -> Result<&'static Kernel> {
        match width {
            16 => Ok(&REFINED_PARTS_16),
            256 => Ok(&REFINED_PARTS_256),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("refined_parts", width)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(width)?;
        let arguments = [
            self.codes.into(),
            self.tables.into(),
            self.lines.into(),
            self.paths.into(),
            self.totals.into(),
            self.items.into(),
            self.listed.into(),
            self.scores.into(),
            self.parts.into(),
            Arg::u32(self.groups),
            Arg::u32(self.width),
            Arg::u32(self.r),
            Arg::u32(self.room),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `refined_keys` of `kernels/refine_wpq.cu`.
pub(super) const REFINED_KEYS: Kernel = Kernel {
    name: "refined_keys",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `refined_keys` of `kernels/refine_wpq.cu`.
#[derive(Clone, Copy)]
pub(crate) struct RefinedKeys<'b> {
    pub scores: Ptr<'b, f32>,
    pub totals: Ptr<'b, f32>,
    pub parts: Ptr<'b, f32>,
    pub item_spans: Ptr<'b, u32>,
    pub keys: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub r: usize,
    pub room: usize,
}

impl RefinedKeys<'_> {
    pub const KERNEL: &'static Kernel = &REFINED_KEYS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.scores.into(),
            self.totals.into(),
            self.parts.into(),
            self.item_spans.into(),
            self.keys.into(),
            self.histograms.into(),
            Arg::u32(self.r),
            Arg::u32(self.room),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
