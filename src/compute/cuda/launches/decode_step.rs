// Generated from kernels/decode_step.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/decode_step.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `begin_step` of `kernels/decode_step.cu`.
pub(super) const BEGIN_STEP: Kernel = Kernel {
    name: "begin_step",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `begin_step` of `kernels/decode_step.cu`.
#[derive(Clone, Copy)]
pub(crate) struct BeginStep<'b> {
    pub lens: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub fraction: f64,
    pub count: usize,
    pub tokens: usize,
    pub sinks: usize,
    pub window: usize,
    pub model_window: usize,
    pub b: usize,
}

impl BeginStep<'_> {
    pub const KERNEL: &'static Kernel = &BEGIN_STEP;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.lens.into(),
            self.spans.into(),
            self.budgets.into(),
            Arg::f64(self.fraction),
            Arg::u32(self.count),
            Arg::u32(self.tokens),
            Arg::u32(self.sinks),
            Arg::u32(self.window),
            Arg::u32(self.model_window),
            Arg::u32(self.b),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `append_rows` of `kernels/decode_step.cu`.
pub(super) const APPEND_ROWS: Kernel = Kernel {
    name: "append_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `append_rows` of `kernels/decode_step.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AppendRows<'b> {
    pub rows: Ptr<'b, f32>,
    pub cache: Ptr<'b, c_void>,
    pub lens: Ptr<'b, u32>,
    pub kind: usize,
    pub m: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
}

impl AppendRows<'_> {
    pub const KERNEL: &'static Kernel = &APPEND_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.cache.into(),
            self.lens.into(),
            Arg::u32(self.kind),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `pad_rows` of `kernels/decode_step.cu`.
pub(super) const PAD_ROWS: Kernel = Kernel {
    name: "pad_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4, 4],
};

/// The arguments of the kernel `pad_rows` of `kernels/decode_step.cu`.
#[derive(Clone, Copy)]
pub(crate) struct PadRows<'b> {
    pub rows: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub n: usize,
    pub d: usize,
    pub w: usize,
}

impl PadRows<'_> {
    pub const KERNEL: &'static Kernel = &PAD_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.out.into(),
            Arg::u32(self.n),
            Arg::u32(self.d),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `list_recent` of `kernels/decode_step.cu`.
pub(super) const LIST_RECENT: Kernel = Kernel {
    name: "list_recent",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4],
};

/// The arguments of the kernel `list_recent` of `kernels/decode_step.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ListRecent<'b> {
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub most: usize,
}

impl ListRecent<'_> {
    pub const KERNEL: &'static Kernel = &LIST_RECENT;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.spans.into(),
            self.budgets.into(),
            self.lists.into(),
            self.listed.into(),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
