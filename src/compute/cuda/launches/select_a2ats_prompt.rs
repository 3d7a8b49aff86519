// Generated from kernels/select_a2ats_prompt.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/select_a2ats_prompt.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `whiten_last` of `kernels/select_a2ats_prompt.cu`.
pub(super) const WHITEN_LAST: Kernel = Kernel {
    name: "whiten_last",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4],
};

/// The arguments of the kernel `whiten_last` of `kernels/select_a2ats_prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct WhitenLast<'b> {
    pub keys: Ptr<'b, f32>,
    pub factors: Ptr<'b, f32>,
    pub means: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub d: usize,
}

impl WhitenLast<'_> {
    pub const KERNEL: &'static Kernel = &WHITEN_LAST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.keys.into(),
            self.factors.into(),
            self.means.into(),
            self.out.into(),
            Arg::u32(self.d),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `whiten_keys` of `kernels/select_a2ats_prompt.cu`.
pub(super) const WHITEN_KEYS: Kernel = Kernel {
    name: "whiten_keys",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `whiten_keys` of `kernels/select_a2ats_prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct WhitenKeys<'b> {
    pub keys: Ptr<'b, f32>,
    pub factors: Ptr<'b, f32>,
    pub means: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub first: usize,
    pub n: usize,
    pub m: usize,
    pub d: usize,
    pub w: usize,
}

impl WhitenKeys<'_> {
    pub const KERNEL: &'static Kernel = &WHITEN_KEYS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.keys.into(),
            self.factors.into(),
            self.means.into(),
            self.out.into(),
            Arg::u32(self.first),
            Arg::u32(self.n),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `nearest_codewords` of `kernels/select_a2ats_prompt.cu`.
pub(super) const NEAREST_CODEWORDS: Kernel = Kernel {
    name: "nearest_codewords",
    threads: 256,
    blocks: 2,
    shared_bytes: 98304,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `nearest_codewords` of `kernels/select_a2ats_prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct NearestCodewords<'b> {
    pub rows: Ptr<'b, u16>,
    pub norms: Ptr<'b, f32>,
    pub largest: Ptr<'b, u32>,
    pub codebook: Ptr<'b, u16>,
    pub biases: Ptr<'b, f32>,
    pub bounds: Ptr<'b, f32>,
    pub candidates: Ptr<'b, u64>,
    pub n: usize,
    pub w: usize,
    pub size: usize,
    pub padded: usize,
}

impl NearestCodewords<'_> {
    pub const KERNEL: &'static Kernel = &NEAREST_CODEWORDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.norms.into(),
            self.largest.into(),
            self.codebook.into(),
            self.biases.into(),
            self.bounds.into(),
            self.candidates.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.size),
            Arg::u32(self.padded),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `settle_codes` of `kernels/select_a2ats_prompt.cu`.
pub(super) const SETTLE_CODES: Kernel = Kernel {
    name: "settle_codes",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `settle_codes` of `kernels/select_a2ats_prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SettleCodes<'b> {
    pub z: Ptr<'b, f32>,
    pub codebook: Ptr<'b, u16>,
    pub norms: Ptr<'b, f32>,
    pub candidates: Ptr<'b, u64>,
    pub lens: Ptr<'b, u32>,
    pub codes: Ptr<'b, u16>,
    pub list: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub first: usize,
    pub n: usize,
    pub m: usize,
    pub size: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
}

impl SettleCodes<'_> {
    pub const KERNEL: &'static Kernel = &SETTLE_CODES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.z.into(),
            self.codebook.into(),
            self.norms.into(),
            self.candidates.into(),
            self.lens.into(),
            self.codes.into(),
            self.list.into(),
            self.listed.into(),
            Arg::u32(self.first),
            Arg::u32(self.n),
            Arg::u32(self.m),
            Arg::u32(self.size),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `encode_listed` of `kernels/select_a2ats_prompt.cu`.
pub(super) const ENCODE_LISTED: Kernel = Kernel {
    name: "encode_listed",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `encode_listed` of `kernels/select_a2ats_prompt.cu`.
#[derive(Clone, Copy)]
pub(crate) struct EncodeListed<'b> {
    pub z: Ptr<'b, f32>,
    pub codebook: Ptr<'b, u16>,
    pub norms: Ptr<'b, f32>,
    pub list: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub lens: Ptr<'b, u32>,
    pub codes: Ptr<'b, u16>,
    pub first: usize,
    pub n: usize,
    pub m: usize,
    pub size: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
}

impl EncodeListed<'_> {
    pub const KERNEL: &'static Kernel = &ENCODE_LISTED;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.z.into(),
            self.codebook.into(),
            self.norms.into(),
            self.list.into(),
            self.listed.into(),
            self.lens.into(),
            self.codes.into(),
            Arg::u32(self.first),
            Arg::u32(self.n),
            Arg::u32(self.m),
            Arg::u32(self.size),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
