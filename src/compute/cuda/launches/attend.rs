// Generated from kernels/attend.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/attend.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, no_kernel, start};
use crate::error::Result;
use crate::float::Float;

/// The kernel `attend_half_64` of `kernels/attend.cu`.
pub(super) const ATTEND_HALF_64: Kernel = Kernel {
    name: "attend_half_64",
    threads: 128,
    blocks: 2,
    shared_bytes: 36864,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `attend_half_80` of `kernels/attend.cu`.
pub(super) const ATTEND_HALF_80: Kernel = Kernel {
    name: "attend_half_80",
    threads: 128,
    blocks: 2,
    shared_bytes: 45056,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `attend_half_96` of `kernels/attend.cu`.
pub(super) const ATTEND_HALF_96: Kernel = Kernel {
    name: "attend_half_96",
    threads: 128,
    blocks: 2,
    shared_bytes: 53248,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `attend_half_128` of `kernels/attend.cu`.
pub(super) const ATTEND_HALF_128: Kernel = Kernel {
    name: "attend_half_128",
    threads: 128,
    blocks: 2,
    shared_bytes: 69632,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `attend_bfloat_64` of `kernels/attend.cu`.
pub(super) const ATTEND_BFLOAT_64: Kernel = Kernel {
    name: "attend_bfloat_64",
    threads: 128,
    blocks: 2,
    shared_bytes: 36864,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `attend_bfloat_80` of `kernels/attend.cu`.
pub(super) const ATTEND_BFLOAT_80: Kernel = Kernel {
    name: "attend_bfloat_80",
    threads: 128,
    blocks: 2,
    shared_bytes: 45056,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `attend_bfloat_96` of `kernels/attend.cu`.
pub(super) const ATTEND_BFLOAT_96: Kernel = Kernel {
    name: "attend_bfloat_96",
    threads: 128,
    blocks: 2,
    shared_bytes: 53248,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `attend_bfloat_128` of `kernels/attend.cu`.
pub(super) const ATTEND_BFLOAT_128: Kernel = Kernel {
    name: "attend_bfloat_128",
    threads: 128,
    blocks: 2,
    shared_bytes: 69632,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernels `attend_*`, one for each type and width, of `kernels/attend.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Attend<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, u16>,
    pub values: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub lists: Option<Ptr<'b, u32>>,
    pub listed: Option<Ptr<'b, u32>>,
    pub outs: Ptr<'b, f32>,
    pub sums: Ptr<'b, f32>,
    pub scale: f32,
    pub r: usize,
    pub capacity: usize,
    pub most: usize,
}

impl Attend<'_> {
    /// Returns the kernel for a type and width.
    pub fn kernel(float: Float, width: usize) -> Result<&'static Kernel> {
        match (float, width) {
            (Float::F16, 64) => Ok(&ATTEND_HALF_64),
            (Float::F16, 80) => Ok(&ATTEND_HALF_80),
            (Float::F16, 96) => Ok(&ATTEND_HALF_96),
            (Float::F16, 128) => Ok(&ATTEND_HALF_128),
            (Float::Bf16, 64) => Ok(&ATTEND_BFLOAT_64),
            (Float::Bf16, 80) => Ok(&ATTEND_BFLOAT_80),
            (Float::Bf16, 96) => Ok(&ATTEND_BFLOAT_96),
            (Float::Bf16, 128) => Ok(&ATTEND_BFLOAT_128),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("attend", (float, width))),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, float: Float, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(float, width)?;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.values.into(),
            self.spans.into(),
            self.lists.into(),
            self.listed.into(),
            self.outs.into(),
            self.sums.into(),
            Arg::f32(self.scale),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `merge_parts` of `kernels/attend.cu`.
pub(super) const MERGE_PARTS: Kernel = Kernel {
    name: "merge_parts",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `merge_parts` of `kernels/attend.cu`.
#[derive(Clone, Copy)]
pub(crate) struct MergeParts<'b> {
    pub outs: Ptr<'b, f32>,
    pub sums: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub lse: Ptr<'b, f32>,
    pub parts: usize,
    pub r: usize,
    pub w: usize,
}

impl MergeParts<'_> {
    pub const KERNEL: &'static Kernel = &MERGE_PARTS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.outs.into(),
            self.sums.into(),
            self.out.into(),
            self.lse.into(),
            Arg::u32(self.parts),
            Arg::u32(self.r),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `join_rest` of `kernels/attend.cu`.
pub(super) const JOIN_REST: Kernel = Kernel {
    name: "join_rest",
    threads: 128,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `join_rest` of `kernels/attend.cu`.
#[derive(Clone, Copy)]
pub(crate) struct JoinRest<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, c_void>,
    pub values: Ptr<'b, c_void>,
    pub spans: Ptr<'b, u32>,
    pub marked: Ptr<'b, u32>,
    pub rest: Ptr<'b, f32>,
    pub sums: Ptr<'b, f64>,
    pub out: Ptr<'b, f32>,
    pub lse: Ptr<'b, f32>,
    pub scale: f32,
    pub kind: usize,
    pub g: usize,
    pub r: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
    pub sinks: usize,
}

impl JoinRest<'_> {
    pub const KERNEL: &'static Kernel = &JOIN_REST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.values.into(),
            self.spans.into(),
            self.marked.into(),
            self.rest.into(),
            self.sums.into(),
            self.out.into(),
            self.lse.into(),
            Arg::f32(self.scale),
            Arg::u32(self.kind),
            Arg::u32(self.g),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
            Arg::u32(self.sinks),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
