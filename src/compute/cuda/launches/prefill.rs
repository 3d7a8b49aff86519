// Generated from kernels/prefill.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/prefill.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, no_kernel, start};
use crate::error::Result;
use crate::float::Float;

/// The kernel `prefill_half_64` of `kernels/prefill.cu`.
pub(super) const PREFILL_HALF_64: Kernel = Kernel {
    name: "prefill_half_64",
    threads: 128,
    blocks: 2,
    shared_bytes: 55296,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_half_80` of `kernels/prefill.cu`.
pub(super) const PREFILL_HALF_80: Kernel = Kernel {
    name: "prefill_half_80",
    threads: 128,
    blocks: 2,
    shared_bytes: 67584,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_half_96` of `kernels/prefill.cu`.
pub(super) const PREFILL_HALF_96: Kernel = Kernel {
    name: "prefill_half_96",
    threads: 128,
    blocks: 2,
    shared_bytes: 79872,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_half_128` of `kernels/prefill.cu`.
pub(super) const PREFILL_HALF_128: Kernel = Kernel {
    name: "prefill_half_128",
    threads: 128,
    blocks: 2,
    shared_bytes: 104448,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_bfloat_64` of `kernels/prefill.cu`.
pub(super) const PREFILL_BFLOAT_64: Kernel = Kernel {
    name: "prefill_bfloat_64",
    threads: 128,
    blocks: 2,
    shared_bytes: 55296,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_bfloat_80` of `kernels/prefill.cu`.
pub(super) const PREFILL_BFLOAT_80: Kernel = Kernel {
    name: "prefill_bfloat_80",
    threads: 128,
    blocks: 2,
    shared_bytes: 67584,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_bfloat_96` of `kernels/prefill.cu`.
pub(super) const PREFILL_BFLOAT_96: Kernel = Kernel {
    name: "prefill_bfloat_96",
    threads: 128,
    blocks: 2,
    shared_bytes: 79872,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_bfloat_128` of `kernels/prefill.cu`.
pub(super) const PREFILL_BFLOAT_128: Kernel = Kernel {
    name: "prefill_bfloat_128",
    threads: 128,
    blocks: 2,
    shared_bytes: 104448,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernels `prefill_*`, one for each type and width, of `kernels/prefill.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Prefill<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, u16>,
    pub values: Ptr<'b, u16>,
    pub out: Ptr<'b, f32>,
    pub scale: f32,
    pub m: usize,
    pub d: usize,
    pub r: usize,
    pub capacity: usize,
    pub head_at: usize,
    pub first: usize,
    pub window: usize,
}

impl Prefill<'_> {
    /// Returns the kernel for a type and width.
    pub fn kernel(float: Float, width: usize) -> Result<&'static Kernel> {
        match (float, width) {
            (Float::F16, 64) => Ok(&PREFILL_HALF_64),
            (Float::F16, 80) => Ok(&PREFILL_HALF_80),
            (Float::F16, 96) => Ok(&PREFILL_HALF_96),
            (Float::F16, 128) => Ok(&PREFILL_HALF_128),
            (Float::Bf16, 64) => Ok(&PREFILL_BFLOAT_64),
            (Float::Bf16, 80) => Ok(&PREFILL_BFLOAT_80),
            (Float::Bf16, 96) => Ok(&PREFILL_BFLOAT_96),
            (Float::Bf16, 128) => Ok(&PREFILL_BFLOAT_128),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("prefill", (float, width))),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, float: Float, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(float, width)?;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.values.into(),
            self.out.into(),
            Arg::f32(self.scale),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
            Arg::u32(self.head_at),
            Arg::u32(self.first),
            Arg::u32(self.window),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `prefill_narrow_half_128` of `kernels/prefill.cu`.
pub(super) const PREFILL_NARROW_HALF_128: Kernel = Kernel {
    name: "prefill_narrow_half_128",
    threads: 128,
    blocks: 2,
    shared_bytes: 69632,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The kernel `prefill_narrow_bfloat_128` of `kernels/prefill.cu`.
pub(super) const PREFILL_NARROW_BFLOAT_128: Kernel = Kernel {
    name: "prefill_narrow_bfloat_128",
    threads: 128,
    blocks: 2,
    shared_bytes: 69632,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernels `prefill_narrow_*`, one for each type and width, of `kernels/prefill.cu`.
#[derive(Clone, Copy)]
pub(crate) struct PrefillNarrow<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, u16>,
    pub values: Ptr<'b, u16>,
    pub out: Ptr<'b, f32>,
    pub scale: f32,
    pub m: usize,
    pub d: usize,
    pub r: usize,
    pub capacity: usize,
    pub head_at: usize,
    pub first: usize,
    pub window: usize,
}

impl PrefillNarrow<'_> {
    /// Returns the kernel for a type and width.
    pub fn kernel(float: Float, width: usize) -> Result<&'static Kernel> {
        match (float, width) {
            (Float::F16, 128) => Ok(&PREFILL_NARROW_HALF_128),
            (Float::Bf16, 128) => Ok(&PREFILL_NARROW_BFLOAT_128),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("prefill_narrow", (float, width))),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, float: Float, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(float, width)?;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.values.into(),
            self.out.into(),
            Arg::f32(self.scale),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
            Arg::u32(self.head_at),
            Arg::u32(self.first),
            Arg::u32(self.window),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `prefill_float` of `kernels/prefill.cu`.
pub(super) const PREFILL_FLOAT: Kernel = Kernel {
    name: "prefill_float",
    threads: 256,
    blocks: 2,
    shared_bytes: 84992,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `prefill_float` of `kernels/prefill.cu`.
#[derive(Clone, Copy)]
pub(crate) struct PrefillFloat<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, f32>,
    pub values: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub scale: f32,
    pub m: usize,
    pub d: usize,
    pub r: usize,
    pub capacity: usize,
    pub head_at: usize,
    pub first: usize,
    pub window: usize,
    pub w: usize,
}

impl PrefillFloat<'_> {
    pub const KERNEL: &'static Kernel = &PREFILL_FLOAT;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.values.into(),
            self.out.into(),
            Arg::f32(self.scale),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
            Arg::u32(self.head_at),
            Arg::u32(self.first),
            Arg::u32(self.window),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}
