// Generated from kernels/prompt.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/prompt.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `widen_rows` of `kernels/prompt.cu`.
pub(super) const WIDEN_ROWS: Kernel = Kernel {
    name: "widen_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `widen_rows` of `kernels/prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct WidenRows<'b> {
    pub rows: Ptr<'b, c_void>,
    pub centers: Option<Ptr<'b, f32>>,
    pub x: Ptr<'b, f32>,
    pub kind: usize,
    pub stride: usize,
    pub pitch: usize,
    pub n: usize,
    pub d: usize,
    pub w: usize,
}

impl WidenRows<'_> {
    pub const KERNEL: &'static Kernel = &WIDEN_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.centers.into(),
            self.x.into(),
            Arg::u32(self.kind),
            Arg::u32(self.stride),
            Arg::u32(self.pitch),
            Arg::u32(self.n),
            Arg::u32(self.d),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `store_channels` of `kernels/prompt.cu`.
pub(super) const STORE_CHANNELS: Kernel = Kernel {
    name: "store_channels",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4, 4],
};

/// The arguments of the kernel `store_channels` of `kernels/prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct StoreChannels<'b> {
    pub from: Ptr<'b, f32>,
    pub to: Ptr<'b, f32>,
    pub instead: f32,
    pub d: usize,
    pub w: usize,
}

impl StoreChannels<'_> {
    pub const KERNEL: &'static Kernel = &STORE_CHANNELS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.from.into(),
            self.to.into(),
            Arg::f32(self.instead),
            Arg::u32(self.d),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `query_keys` of `kernels/prompt.cu`.
pub(super) const QUERY_KEYS: Kernel = Kernel {
    name: "query_keys",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `query_keys` of `kernels/prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct QueryKeys<'b> {
    pub queries: Ptr<'b, f32>,
    pub x: Ptr<'b, f32>,
    pub spans: Ptr<'b, u32>,
    pub keys: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub r: usize,
    pub m: usize,
    pub n: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
}

impl QueryKeys<'_> {
    pub const KERNEL: &'static Kernel = &QUERY_KEYS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.x.into(),
            self.spans.into(),
            self.keys.into(),
            self.histograms.into(),
            Arg::u32(self.r),
            Arg::u32(self.m),
            Arg::u32(self.n),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `clear_rows` of `kernels/prompt.cu`.
pub(super) const CLEAR_ROWS: Kernel = Kernel {
    name: "clear_rows",
    threads: 128,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `clear_rows` of `kernels/prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ClearRows<'b> {
    pub x: Ptr<'b, f32>,
    pub full: Ptr<'b, u32>,
    pub full_count: Ptr<'b, u32>,
    pub n: usize,
    pub w: usize,
}

impl ClearRows<'_> {
    pub const KERNEL: &'static Kernel = &CLEAR_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.full.into(),
            self.full_count.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `sign_centroids` of `kernels/prompt.cu`.
pub(super) const SIGN_CENTROIDS: Kernel = Kernel {
    name: "sign_centroids",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `sign_centroids` of `kernels/prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SignCentroids<'b> {
    pub sums: Ptr<'b, u64>,
    pub counts: Ptr<'b, u32>,
    pub largest: Ptr<'b, u32>,
    pub full_count: Ptr<'b, u32>,
    pub centroids: Ptr<'b, f32>,
    pub n: usize,
    pub d: usize,
}

impl SignCentroids<'_> {
    pub const KERNEL: &'static Kernel = &SIGN_CENTROIDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.sums.into(),
            self.counts.into(),
            self.largest.into(),
            self.full_count.into(),
            self.centroids.into(),
            Arg::u32(self.n),
            Arg::u32(self.d),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `keep_full` of `kernels/prompt.cu`.
pub(super) const KEEP_FULL: Kernel = Kernel {
    name: "keep_full",
    threads: 128,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `keep_full` of `kernels/prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct KeepFull<'b> {
    pub x: Ptr<'b, f32>,
    pub centers: Option<Ptr<'b, f32>>,
    pub full: Ptr<'b, u32>,
    pub full_count: Ptr<'b, u32>,
    pub out: Ptr<'b, u16>,
    pub n: usize,
    pub d: usize,
    pub w: usize,
}

impl KeepFull<'_> {
    pub const KERNEL: &'static Kernel = &KEEP_FULL;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.centers.into(),
            self.full.into(),
            self.full_count.into(),
            self.out.into(),
            Arg::u32(self.n),
            Arg::u32(self.d),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
