// Generated from kernels/linear.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/linear.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, no_kernel, start};
use crate::error::Result;
use crate::float::Float;

/// The kernel `linear_half` of `kernels/linear.cu`.
pub(super) const LINEAR_HALF: Kernel = Kernel {
    name: "linear_half",
    threads: 256,
    blocks: 2,
    shared_bytes: 81920,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `linear_bfloat` of `kernels/linear.cu`.
pub(super) const LINEAR_BFLOAT: Kernel = Kernel {
    name: "linear_bfloat",
    threads: 256,
    blocks: 2,
    shared_bytes: 81920,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernels `linear_*`, one for each type, of `kernels/linear.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Linear<'b> {
    pub x: Ptr<'b, u16>,
    pub weight: Ptr<'b, u16>,
    pub bias: Option<Ptr<'b, f32>>,
    pub out: Ptr<'b, f32>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub accumulate: usize,
}

impl Linear<'_> {
    /// Returns the kernel for a type.
    pub fn kernel(float: Float) -> Result<&'static Kernel> {
        match float {
            Float::F16 => Ok(&LINEAR_HALF),
            Float::Bf16 => Ok(&LINEAR_BFLOAT),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("linear", float)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, float: Float, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(float)?;
        let arguments = [
            self.x.into(),
            self.weight.into(),
            self.bias.into(),
            self.out.into(),
            Arg::u32(self.m),
            Arg::u32(self.n),
            Arg::u32(self.k),
            Arg::u32(self.accumulate),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `round_rows` of `kernels/linear.cu`.
pub(super) const ROUND_ROWS: Kernel = Kernel {
    name: "round_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4],
};

/// The arguments of the kernel `round_rows` of `kernels/linear.cu`.
#[derive(Clone, Copy)]
pub(crate) struct RoundRows<'b> {
    pub x: Ptr<'b, f32>,
    pub out: Ptr<'b, u16>,
    pub n: usize,
    pub bfloat: usize,
}

impl RoundRows<'_> {
    pub const KERNEL: &'static Kernel = &ROUND_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.out.into(),
            Arg::u64(self.n),
            Arg::u32(self.bfloat),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `linear_float_float` of `kernels/linear.cu`.
pub(super) const LINEAR_FLOAT_FLOAT: Kernel = Kernel {
    name: "linear_float_float",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `linear_float_half` of `kernels/linear.cu`.
pub(super) const LINEAR_FLOAT_HALF: Kernel = Kernel {
    name: "linear_float_half",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `linear_float_bfloat` of `kernels/linear.cu`.
pub(super) const LINEAR_FLOAT_BFLOAT: Kernel = Kernel {
    name: "linear_float_bfloat",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernels `linear_float_*`, one for each type, of `kernels/linear.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LinearFloat<'b> {
    pub x: Ptr<'b, f32>,
    pub weight: Ptr<'b, c_void>,
    pub bias: Option<Ptr<'b, f32>>,
    pub out: Ptr<'b, f32>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub accumulate: usize,
}

impl LinearFloat<'_> {
    /// Returns the kernel for a type.
    pub fn kernel(float: Float) -> Result<&'static Kernel> {
        match float {
            Float::F32 => Ok(&LINEAR_FLOAT_FLOAT),
            Float::F16 => Ok(&LINEAR_FLOAT_HALF),
            Float::Bf16 => Ok(&LINEAR_FLOAT_BFLOAT),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("linear_float", float)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, float: Float, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(float)?;
        let arguments = [
            self.x.into(),
            self.weight.into(),
            self.bias.into(),
            self.out.into(),
            Arg::u32(self.m),
            Arg::u32(self.n),
            Arg::u32(self.k),
            Arg::u32(self.accumulate),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `linear_few_float` of `kernels/linear.cu`.
pub(super) const LINEAR_FEW_FLOAT: Kernel = Kernel {
    name: "linear_few_float",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The kernel `linear_few_half` of `kernels/linear.cu`.
pub(super) const LINEAR_FEW_HALF: Kernel = Kernel {
    name: "linear_few_half",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The kernel `linear_few_bfloat` of `kernels/linear.cu`.
pub(super) const LINEAR_FEW_BFLOAT: Kernel = Kernel {
    name: "linear_few_bfloat",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernels `linear_few_*`, one for each type, of `kernels/linear.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LinearFew<'b> {
    pub x: Ptr<'b, f32>,
    pub weight: Ptr<'b, c_void>,
    pub bias: Option<Ptr<'b, f32>>,
    pub out: Ptr<'b, f32>,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub accumulate: usize,
    pub split: usize,
}

impl LinearFew<'_> {
    /// Returns the kernel for a type.
    pub fn kernel(float: Float) -> Result<&'static Kernel> {
        match float {
            Float::F32 => Ok(&LINEAR_FEW_FLOAT),
            Float::F16 => Ok(&LINEAR_FEW_HALF),
            Float::Bf16 => Ok(&LINEAR_FEW_BFLOAT),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("linear_few", float)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, float: Float, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(float)?;
        let arguments = [
            self.x.into(),
            self.weight.into(),
            self.bias.into(),
            self.out.into(),
            Arg::u32(self.m),
            Arg::u32(self.n),
            Arg::u32(self.k),
            Arg::u32(self.accumulate),
            Arg::u32(self.split),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}
