// Generated from kernels/means.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/means.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `sum_rows` of `kernels/means.cu`.
pub(super) const SUM_ROWS: Kernel = Kernel {
    name: "sum_rows",
    threads: 256,
    blocks: 4,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `sum_rows` of `kernels/means.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SumRows<'b> {
    pub x: Ptr<'b, f32>,
    pub codes: Ptr<'b, u32>,
    pub sums: Ptr<'b, u64>,
    pub counts: Ptr<'b, u32>,
    pub largest: Ptr<'b, u32>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
}

impl SumRows<'_> {
    pub const KERNEL: &'static Kernel = &SUM_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.codes.into(),
            self.sums.into(),
            self.counts.into(),
            self.largest.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `move_centroids` of `kernels/means.cu`.
pub(super) const MOVE_CENTROIDS: Kernel = Kernel {
    name: "move_centroids",
    threads: 256,
    blocks: 4,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `move_centroids` of `kernels/means.cu`.
#[derive(Clone, Copy)]
pub(crate) struct MoveCentroids<'b> {
    pub centroids: Ptr<'b, f32>,
    pub sums: Ptr<'b, u64>,
    pub counts: Ptr<'b, u32>,
    pub largest: Ptr<'b, u32>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
}

impl MoveCentroids<'_> {
    pub const KERNEL: &'static Kernel = &MOVE_CENTROIDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.centroids.into(),
            self.sums.into(),
            self.counts.into(),
            self.largest.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
