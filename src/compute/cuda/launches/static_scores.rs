// Generated from kernels/static_scores.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/static_scores.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `static_scores` of `kernels/static_scores.cu`.
pub(super) const STATIC_SCORES: Kernel = Kernel {
    name: "static_scores",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `static_scores` of `kernels/static_scores.cu`.
#[derive(Clone, Copy)]
pub(crate) struct StaticScores<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, c_void>,
    pub key_scales: Option<Ptr<'b, u16>>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f32>,
    pub scale: f32,
    pub kind: usize,
    pub r: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
    pub n_parts: usize,
}

impl StaticScores<'_> {
    pub const KERNEL: &'static Kernel = &STATIC_SCORES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.key_scales.into(),
            self.spans.into(),
            self.parts.into(),
            Arg::f32(self.scale),
            Arg::u32(self.kind),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
            Arg::u32(self.n_parts),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `static_scores_packed` of `kernels/static_scores.cu`.
pub(super) const STATIC_SCORES_PACKED: Kernel = Kernel {
    name: "static_scores_packed",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `static_scores_packed` of `kernels/static_scores.cu`.
#[derive(Clone, Copy)]
pub(crate) struct StaticScoresPacked<'b> {
    pub queries: Ptr<'b, f32>,
    pub signs: Ptr<'b, u32>,
    pub key_bits: Ptr<'b, u16>,
    pub key_params: Ptr<'b, u32>,
    pub centers: Ptr<'b, f32>,
    pub alpha: Ptr<'b, f32>,
    pub full: Ptr<'b, u32>,
    pub full_count: Ptr<'b, u32>,
    pub full_keys: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f32>,
    pub scale: f32,
    pub r: usize,
    pub d: usize,
    pub pitch: usize,
    pub capacity: usize,
    pub n_parts: usize,
    pub is_signed: usize,
}

impl StaticScoresPacked<'_> {
    pub const KERNEL: &'static Kernel = &STATIC_SCORES_PACKED;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.signs.into(),
            self.key_bits.into(),
            self.key_params.into(),
            self.centers.into(),
            self.alpha.into(),
            self.full.into(),
            self.full_count.into(),
            self.full_keys.into(),
            self.spans.into(),
            self.parts.into(),
            Arg::f32(self.scale),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.pitch),
            Arg::u32(self.capacity),
            Arg::u32(self.n_parts),
            Arg::u32(self.is_signed),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
