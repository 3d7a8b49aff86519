// Generated from kernels/sign_sums.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/sign_sums.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `sign_sums` of `kernels/sign_sums.cu`.
pub(super) const SIGN_SUMS: Kernel = Kernel {
    name: "sign_sums",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `sign_sums` of `kernels/sign_sums.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SignSums<'b> {
    pub x: Ptr<'b, f32>,
    pub sums: Ptr<'b, u64>,
    pub counts: Ptr<'b, u32>,
    pub largest: Ptr<'b, u32>,
    pub n: usize,
    pub d: usize,
    pub w: usize,
    pub run_rows: usize,
}

impl SignSums<'_> {
    pub const KERNEL: &'static Kernel = &SIGN_SUMS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.sums.into(),
            self.counts.into(),
            self.largest.into(),
            Arg::u32(self.n),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.run_rows),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `fixed_sums` of `kernels/sign_sums.cu`.
pub(super) const FIXED_SUMS: Kernel = Kernel {
    name: "fixed_sums",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `fixed_sums` of `kernels/sign_sums.cu`.
#[derive(Clone, Copy)]
pub(crate) struct FixedSums<'b> {
    pub sums: Ptr<'b, u64>,
    pub out: Ptr<'b, f64>,
    pub largest: Ptr<'b, u32>,
    pub n: usize,
    pub per_head: usize,
}

impl FixedSums<'_> {
    pub const KERNEL: &'static Kernel = &FIXED_SUMS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.sums.into(),
            self.out.into(),
            self.largest.into(),
            Arg::u32(self.n),
            Arg::u32(self.per_head),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
