// Generated from kernels/channel_statistic.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/channel_statistic.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `channel_mean` of `kernels/channel_statistic.cu`.
pub(super) const CHANNEL_MEAN: Kernel = Kernel {
    name: "channel_mean",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `channel_mean` of `kernels/channel_statistic.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ChannelMean<'b> {
    pub x: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
    pub first: usize,
    pub count: usize,
}

impl ChannelMean<'_> {
    pub const KERNEL: &'static Kernel = &CHANNEL_MEAN;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.out.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.first),
            Arg::u32(self.count),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `channel_ranked` of `kernels/channel_statistic.cu`.
pub(super) const CHANNEL_RANKED: Kernel = Kernel {
    name: "channel_ranked",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `channel_ranked` of `kernels/channel_statistic.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ChannelRanked<'b> {
    pub x: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
    pub first: usize,
    pub count: usize,
    pub rank: usize,
    pub magnitude: usize,
}

impl ChannelRanked<'_> {
    pub const KERNEL: &'static Kernel = &CHANNEL_RANKED;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.out.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.first),
            Arg::u32(self.count),
            Arg::u32(self.rank),
            Arg::u32(self.magnitude),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `subtract` of `kernels/channel_statistic.cu`.
pub(super) const SUBTRACT: Kernel = Kernel {
    name: "subtract",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `subtract` of `kernels/channel_statistic.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Subtract<'b> {
    pub x: Ptr<'b, f32>,
    pub centers: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
    pub first: usize,
    pub count: usize,
}

impl Subtract<'_> {
    pub const KERNEL: &'static Kernel = &SUBTRACT;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.centers.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.first),
            Arg::u32(self.count),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `square_sums` of `kernels/channel_statistic.cu`.
pub(super) const SQUARE_SUMS: Kernel = Kernel {
    name: "square_sums",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8],
};

/// The arguments of the kernel `square_sums` of `kernels/channel_statistic.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SquareSums<'b> {
    pub x: Ptr<'b, f32>,
    pub out: Ptr<'b, f64>,
    pub size: usize,
}

impl SquareSums<'_> {
    pub const KERNEL: &'static Kernel = &SQUARE_SUMS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [self.x.into(), self.out.into(), Arg::u64(self.size)];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `largest` of `kernels/channel_statistic.cu`.
pub(super) const LARGEST: Kernel = Kernel {
    name: "largest",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `largest` of `kernels/channel_statistic.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Largest<'b> {
    pub rows: Ptr<'b, f32>,
    pub out: Ptr<'b, u32>,
    pub ranges: Option<Ptr<'b, u32>>,
    pub n: usize,
    pub stride: usize,
    pub w: usize,
}

impl Largest<'_> {
    pub const KERNEL: &'static Kernel = &LARGEST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.out.into(),
            self.ranges.into(),
            Arg::u32(self.n),
            Arg::u32(self.stride),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
