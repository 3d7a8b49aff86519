// Generated from kernels/int8.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/int8.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `append_int8` of `kernels/int8.cu`.
pub(super) const APPEND_INT8: Kernel = Kernel {
    name: "append_int8",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `append_int8` of `kernels/int8.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AppendInt8<'b> {
    pub rows: Ptr<'b, f32>,
    pub lens: Ptr<'b, u32>,
    pub codes: Ptr<'b, u8>,
    pub scales: Ptr<'b, u16>,
    pub m: usize,
    pub d: usize,
    pub capacity: usize,
}

impl AppendInt8<'_> {
    pub const KERNEL: &'static Kernel = &APPEND_INT8;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.lens.into(),
            self.codes.into(),
            self.scales.into(),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `attend_int8` of `kernels/int8.cu`.
pub(super) const ATTEND_INT8: Kernel = Kernel {
    name: "attend_int8",
    threads: 128,
    blocks: 1,
    shared_bytes: 45312,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `attend_int8` of `kernels/int8.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AttendInt8<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, u8>,
    pub key_scales: Ptr<'b, u16>,
    pub values: Ptr<'b, u8>,
    pub value_scales: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub lists: Option<Ptr<'b, u32>>,
    pub listed: Option<Ptr<'b, u32>>,
    pub outs: Ptr<'b, f32>,
    pub sums: Ptr<'b, f32>,
    pub scale: f32,
    pub r: usize,
    pub d: usize,
    pub capacity: usize,
    pub most: usize,
    pub w: usize,
}

impl AttendInt8<'_> {
    pub const KERNEL: &'static Kernel = &ATTEND_INT8;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.key_scales.into(),
            self.values.into(),
            self.value_scales.into(),
            self.spans.into(),
            self.lists.into(),
            self.listed.into(),
            self.outs.into(),
            self.sums.into(),
            Arg::f32(self.scale),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `static_scores_int8` of `kernels/int8.cu`.
pub(super) const STATIC_SCORES_INT8: Kernel = Kernel {
    name: "static_scores_int8",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `static_scores_int8` of `kernels/int8.cu`.
#[derive(Clone, Copy)]
pub(crate) struct StaticScoresInt8<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, u8>,
    pub key_scales: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f32>,
    pub scale: f32,
    pub r: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
    pub n_parts: usize,
}

impl StaticScoresInt8<'_> {
    pub const KERNEL: &'static Kernel = &STATIC_SCORES_INT8;

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
