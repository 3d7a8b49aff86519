// Generated from kernels/nearest_fast.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/nearest_fast.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `halve_rows` of `kernels/nearest_fast.cu`.
pub(super) const HALVE_ROWS: Kernel = Kernel {
    name: "halve_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `halve_rows` of `kernels/nearest_fast.cu`.
#[derive(Clone, Copy)]
pub(crate) struct HalveRows<'b> {
    pub x: Ptr<'b, f32>,
    pub largest: Ptr<'b, u32>,
    pub halves: Ptr<'b, u16>,
    pub norms: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
}

impl HalveRows<'_> {
    pub const KERNEL: &'static Kernel = &HALVE_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.largest.into(),
            self.halves.into(),
            self.norms.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `halve_centroids` of `kernels/nearest_fast.cu`.
pub(super) const HALVE_CENTROIDS: Kernel = Kernel {
    name: "halve_centroids",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `halve_centroids` of `kernels/nearest_fast.cu`.
#[derive(Clone, Copy)]
pub(crate) struct HalveCentroids<'b> {
    pub centroids: Ptr<'b, f32>,
    pub ranges: Ptr<'b, u32>,
    pub largest: Ptr<'b, u32>,
    pub largest_centroid: Ptr<'b, u32>,
    pub halves: Ptr<'b, u16>,
    pub biases: Ptr<'b, f32>,
    pub bounds: Ptr<'b, u32>,
    pub w: usize,
    pub size: usize,
    pub capacity: usize,
}

impl HalveCentroids<'_> {
    pub const KERNEL: &'static Kernel = &HALVE_CENTROIDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.centroids.into(),
            self.ranges.into(),
            self.largest.into(),
            self.largest_centroid.into(),
            self.halves.into(),
            self.biases.into(),
            self.bounds.into(),
            Arg::u32(self.w),
            Arg::u32(self.size),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `nearest_fast` of `kernels/nearest_fast.cu`.
pub(super) const NEAREST_FAST: Kernel = Kernel {
    name: "nearest_fast",
    threads: 256,
    blocks: 2,
    shared_bytes: 131072,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `nearest_fast` of `kernels/nearest_fast.cu`.
#[derive(Clone, Copy)]
pub(crate) struct NearestFast<'b> {
    pub rows: Ptr<'b, u16>,
    pub norms: Ptr<'b, f32>,
    pub centroids: Ptr<'b, u16>,
    pub biases: Ptr<'b, f32>,
    pub bounds: Ptr<'b, u32>,
    pub ranges: Ptr<'b, u32>,
    pub largest: Ptr<'b, u32>,
    pub largest_centroid: Ptr<'b, u32>,
    pub scores: Option<Ptr<'b, f32>>,
    pub candidates: Ptr<'b, u64>,
    pub n: usize,
    pub w: usize,
    pub capacity: usize,
}

impl NearestFast<'_> {
    pub const KERNEL: &'static Kernel = &NEAREST_FAST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.norms.into(),
            self.centroids.into(),
            self.biases.into(),
            self.bounds.into(),
            self.ranges.into(),
            self.largest.into(),
            self.largest_centroid.into(),
            self.scores.into(),
            self.candidates.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}
