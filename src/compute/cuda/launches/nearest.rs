// Generated from kernels/nearest.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/nearest.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `centroid_biases` of `kernels/nearest.cu`.
pub(super) const CENTROID_BIASES: Kernel = Kernel {
    name: "centroid_biases",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `centroid_biases` of `kernels/nearest.cu`.
#[derive(Clone, Copy)]
pub(crate) struct CentroidBiases<'b> {
    pub centroids: Ptr<'b, f32>,
    pub ranges: Ptr<'b, u32>,
    pub biases: Ptr<'b, f32>,
    pub w: usize,
    pub size: usize,
}

impl CentroidBiases<'_> {
    pub const KERNEL: &'static Kernel = &CENTROID_BIASES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.centroids.into(),
            self.ranges.into(),
            self.biases.into(),
            Arg::u32(self.w),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `nearest_listed` of `kernels/nearest.cu`.
pub(super) const NEAREST_LISTED: Kernel = Kernel {
    name: "nearest_listed",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `nearest_listed` of `kernels/nearest.cu`.
#[derive(Clone, Copy)]
pub(crate) struct NearestListed<'b> {
    pub x: Ptr<'b, f32>,
    pub centroids: Ptr<'b, f32>,
    pub biases: Ptr<'b, f32>,
    pub ranges: Ptr<'b, u32>,
    pub list: Option<Ptr<'b, u32>>,
    pub listed: Option<Ptr<'b, u32>>,
    pub scores: Option<Ptr<'b, f32>>,
    pub codes: Ptr<'b, u32>,
    pub next: Ptr<'b, u32>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
}

impl NearestListed<'_> {
    pub const KERNEL: &'static Kernel = &NEAREST_LISTED;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.centroids.into(),
            self.biases.into(),
            self.ranges.into(),
            self.list.into(),
            self.listed.into(),
            self.scores.into(),
            self.codes.into(),
            self.next.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `settle` of `kernels/nearest.cu`.
pub(super) const SETTLE: Kernel = Kernel {
    name: "settle",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `settle` of `kernels/nearest.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Settle<'b> {
    pub x: Ptr<'b, f32>,
    pub centroids: Ptr<'b, f32>,
    pub biases: Ptr<'b, f32>,
    pub ranges: Ptr<'b, u32>,
    pub candidates: Ptr<'b, u64>,
    pub scores: Option<Ptr<'b, f32>>,
    pub codes: Ptr<'b, u32>,
    pub next: Ptr<'b, u32>,
    pub list: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
}

impl Settle<'_> {
    pub const KERNEL: &'static Kernel = &SETTLE;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.centroids.into(),
            self.biases.into(),
            self.ranges.into(),
            self.candidates.into(),
            self.scores.into(),
            self.codes.into(),
            self.next.into(),
            self.list.into(),
            self.listed.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `start_rows` of `kernels/nearest.cu`.
pub(super) const START_ROWS: Kernel = Kernel {
    name: "start_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `start_rows` of `kernels/nearest.cu`.
#[derive(Clone, Copy)]
pub(crate) struct StartRows<'b> {
    pub x: Ptr<'b, f32>,
    pub centroids: Ptr<'b, f32>,
    pub biases: Ptr<'b, f32>,
    pub codes: Ptr<'b, u32>,
    pub scores: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
}

impl StartRows<'_> {
    pub const KERNEL: &'static Kernel = &START_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.centroids.into(),
            self.biases.into(),
            self.codes.into(),
            self.scores.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `take_over` of `kernels/nearest.cu`.
pub(super) const TAKE_OVER: Kernel = Kernel {
    name: "take_over",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `take_over` of `kernels/nearest.cu`.
#[derive(Clone, Copy)]
pub(crate) struct TakeOver<'b> {
    pub x: Ptr<'b, f32>,
    pub centroids: Ptr<'b, f32>,
    pub next: Ptr<'b, u32>,
    pub codes: Ptr<'b, u32>,
    pub distances: Ptr<'b, f32>,
    pub changed: Ptr<'b, u32>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
    pub all: usize,
}

impl TakeOver<'_> {
    pub const KERNEL: &'static Kernel = &TAKE_OVER;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.centroids.into(),
            self.next.into(),
            self.codes.into(),
            self.distances.into(),
            self.changed.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
            Arg::u32(self.all),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
