// Generated from kernels/draw.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/draw.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `distance_sums` of `kernels/draw.cu`.
pub(super) const DISTANCE_SUMS: Kernel = Kernel {
    name: "distance_sums",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4],
};

/// The arguments of the kernel `distance_sums` of `kernels/draw.cu`.
#[derive(Clone, Copy)]
pub(crate) struct DistanceSums<'b> {
    pub distances: Ptr<'b, f32>,
    pub out: Ptr<'b, f64>,
    pub n: usize,
}

impl DistanceSums<'_> {
    pub const KERNEL: &'static Kernel = &DISTANCE_SUMS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [self.distances.into(), self.out.into(), Arg::u32(self.n)];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `draw` of `kernels/draw.cu`.
pub(super) const DRAW: Kernel = Kernel {
    name: "draw",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `draw` of `kernels/draw.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Draw<'b> {
    pub x: Ptr<'b, f32>,
    pub distances: Ptr<'b, f32>,
    pub runs: Ptr<'b, f64>,
    pub uniforms: Ptr<'b, f64>,
    pub batch: Ptr<'b, u32>,
    pub fresh: Ptr<'b, u32>,
    pub ranges: Ptr<'b, u32>,
    pub used: Ptr<'b, u32>,
    pub n: usize,
    pub w: usize,
    pub n_runs: usize,
    pub n_uniforms: usize,
    pub most: usize,
}

impl Draw<'_> {
    pub const KERNEL: &'static Kernel = &DRAW;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.distances.into(),
            self.runs.into(),
            self.uniforms.into(),
            self.batch.into(),
            self.fresh.into(),
            self.ranges.into(),
            self.used.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.n_runs),
            Arg::u32(self.n_uniforms),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `place_centroids` of `kernels/draw.cu`.
pub(super) const PLACE_CENTROIDS: Kernel = Kernel {
    name: "place_centroids",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `place_centroids` of `kernels/draw.cu`.
#[derive(Clone, Copy)]
pub(crate) struct PlaceCentroids<'b> {
    pub x: Ptr<'b, f32>,
    pub fresh: Ptr<'b, u32>,
    pub ranges: Ptr<'b, u32>,
    pub centroids: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
    pub most: usize,
}

impl PlaceCentroids<'_> {
    pub const KERNEL: &'static Kernel = &PLACE_CENTROIDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.fresh.into(),
            self.ranges.into(),
            self.centroids.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
