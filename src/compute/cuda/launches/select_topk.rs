// Generated from kernels/select_topk.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/select_topk.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `topk_scores` of `kernels/select_topk.cu`.
pub(super) const TOPK_SCORES: Kernel = Kernel {
    name: "topk_scores",
    threads: 256,
    blocks: 2,
    shared_bytes: 24576,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `topk_scores` of `kernels/select_topk.cu`.
#[derive(Clone, Copy)]
pub(crate) struct TopkScores<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, c_void>,
    pub items: Option<Ptr<'b, u32>>,
    pub spans: Ptr<'b, u32>,
    pub scores: Ptr<'b, f32>,
    pub parts: Ptr<'b, f32>,
    pub histograms: Ptr<'b, u32>,
    pub scale: f32,
    pub kind: usize,
    pub r: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
    pub rows: usize,
    pub shared_rows: usize,
}

impl TopkScores<'_> {
    pub const KERNEL: &'static Kernel = &TOPK_SCORES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.items.into(),
            self.spans.into(),
            self.scores.into(),
            self.parts.into(),
            self.histograms.into(),
            Arg::f32(self.scale),
            Arg::u32(self.kind),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
            Arg::u32(self.rows),
            Arg::u32(self.shared_rows),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `weight_keys` of `kernels/select_topk.cu`.
pub(super) const WEIGHT_KEYS: Kernel = Kernel {
    name: "weight_keys",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `weight_keys` of `kernels/select_topk.cu`.
#[derive(Clone, Copy)]
pub(crate) struct WeightKeys<'b> {
    pub scores: Ptr<'b, f32>,
    pub parts: Ptr<'b, f32>,
    pub spans: Ptr<'b, u32>,
    pub keys: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub r: usize,
    pub n_parts: usize,
    pub capacity: usize,
    pub largest: usize,
}

impl WeightKeys<'_> {
    pub const KERNEL: &'static Kernel = &WEIGHT_KEYS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.scores.into(),
            self.parts.into(),
            self.spans.into(),
            self.keys.into(),
            self.histograms.into(),
            Arg::u32(self.r),
            Arg::u32(self.n_parts),
            Arg::u32(self.capacity),
            Arg::u32(self.largest),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
