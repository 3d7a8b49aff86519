// Generated from kernels/layer.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/layer.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `embed_rows` of `kernels/layer.cu`.
pub(super) const EMBED_ROWS: Kernel = Kernel {
    name: "embed_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `embed_rows` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct EmbedRows<'b> {
    pub ids: Ptr<'b, u32>,
    pub table: Ptr<'b, c_void>,
    pub out: Ptr<'b, f32>,
    pub kind: usize,
    pub width: usize,
}

impl EmbedRows<'_> {
    pub const KERNEL: &'static Kernel = &EMBED_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.ids.into(),
            self.table.into(),
            self.out.into(),
            Arg::u32(self.kind),
            Arg::u32(self.width),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `rms_rows` of `kernels/layer.cu`.
pub(super) const RMS_ROWS: Kernel = Kernel {
    name: "rms_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `rms_rows` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct RmsRows<'b> {
    pub x: Ptr<'b, f32>,
    pub weight: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub width: usize,
    pub eps: f32,
}

impl RmsRows<'_> {
    pub const KERNEL: &'static Kernel = &RMS_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.weight.into(),
            self.out.into(),
            Arg::u32(self.width),
            Arg::f32(self.eps),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `split_heads` of `kernels/layer.cu`.
pub(super) const SPLIT_HEADS: Kernel = Kernel {
    name: "split_heads",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `split_heads` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SplitHeads<'b> {
    pub flat: Ptr<'b, f32>,
    pub q_norm: Option<Ptr<'b, f32>>,
    pub k_norm: Option<Ptr<'b, f32>>,
    pub cosines: Ptr<'b, f32>,
    pub sines: Ptr<'b, f32>,
    pub lens: Option<Ptr<'b, u32>>,
    pub q_pre: Ptr<'b, f32>,
    pub q_rope: Ptr<'b, f32>,
    pub k_pre: Ptr<'b, f32>,
    pub k_rope: Ptr<'b, f32>,
    pub v: Ptr<'b, f32>,
    pub rows: usize,
    pub m: usize,
    pub h: usize,
    pub g: usize,
    pub d: usize,
    pub first: usize,
    pub apart: usize,
    pub eps: f32,
}

impl SplitHeads<'_> {
    pub const KERNEL: &'static Kernel = &SPLIT_HEADS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.flat.into(),
            self.q_norm.into(),
            self.k_norm.into(),
            self.cosines.into(),
            self.sines.into(),
            self.lens.into(),
            self.q_pre.into(),
            self.q_rope.into(),
            self.k_pre.into(),
            self.k_rope.into(),
            self.v.into(),
            Arg::u32(self.rows),
            Arg::u32(self.m),
            Arg::u32(self.h),
            Arg::u32(self.g),
            Arg::u32(self.d),
            Arg::u32(self.first),
            Arg::u32(self.apart),
            Arg::f32(self.eps),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `add_biases` of `kernels/layer.cu`.
pub(super) const ADD_BIASES: Kernel = Kernel {
    name: "add_biases",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4],
};

/// The arguments of the kernel `add_biases` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AddBiases<'b> {
    pub rows: Ptr<'b, f32>,
    pub bias: Ptr<'b, f32>,
    pub n: usize,
    pub width: usize,
}

impl AddBiases<'_> {
    pub const KERNEL: &'static Kernel = &ADD_BIASES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.bias.into(),
            Arg::u64(self.n),
            Arg::u32(self.width),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `silu_rows` of `kernels/layer.cu`.
pub(super) const SILU_ROWS: Kernel = Kernel {
    name: "silu_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4],
};

/// The arguments of the kernel `silu_rows` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SiluRows<'b> {
    pub gate_up: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub n: usize,
    pub width: usize,
}

impl SiluRows<'_> {
    pub const KERNEL: &'static Kernel = &SILU_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.gate_up.into(),
            self.out.into(),
            Arg::u64(self.n),
            Arg::u32(self.width),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `gather_heads` of `kernels/layer.cu`.
pub(super) const GATHER_HEADS: Kernel = Kernel {
    name: "gather_heads",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `gather_heads` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct GatherHeads<'b> {
    pub all: Ptr<'b, f32>,
    pub list: Ptr<'b, u32>,
    pub some: Ptr<'b, f32>,
    pub heads: usize,
    pub group: usize,
    pub values: usize,
}

impl GatherHeads<'_> {
    pub const KERNEL: &'static Kernel = &GATHER_HEADS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.all.into(),
            self.list.into(),
            self.some.into(),
            Arg::u32(self.heads),
            Arg::u32(self.group),
            Arg::u32(self.values),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `scatter_heads` of `kernels/layer.cu`.
pub(super) const SCATTER_HEADS: Kernel = Kernel {
    name: "scatter_heads",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `scatter_heads` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ScatterHeads<'b> {
    pub some: Ptr<'b, f32>,
    pub list: Ptr<'b, u32>,
    pub all: Ptr<'b, f32>,
    pub group: usize,
    pub d: usize,
    pub own: usize,
    pub width: usize,
}

impl ScatterHeads<'_> {
    pub const KERNEL: &'static Kernel = &SCATTER_HEADS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.some.into(),
            self.list.into(),
            self.all.into(),
            Arg::u32(self.group),
            Arg::u32(self.d),
            Arg::u32(self.own),
            Arg::u32(self.width),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `narrow_rows` of `kernels/layer.cu`.
pub(super) const NARROW_ROWS: Kernel = Kernel {
    name: "narrow_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `narrow_rows` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct NarrowRows<'b> {
    pub rows: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
    pub d: usize,
}

impl NarrowRows<'_> {
    pub const KERNEL: &'static Kernel = &NARROW_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.out.into(),
            Arg::u64(self.n),
            Arg::u32(self.w),
            Arg::u32(self.d),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `join_outputs` of `kernels/layer.cu`.
pub(super) const JOIN_OUTPUTS: Kernel = Kernel {
    name: "join_outputs",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `join_outputs` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct JoinOutputs<'b> {
    pub ours: Ptr<'b, f32>,
    pub ours_lse: Ptr<'b, f32>,
    pub others: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub n: usize,
    pub w: usize,
    pub d: usize,
}

impl JoinOutputs<'_> {
    pub const KERNEL: &'static Kernel = &JOIN_OUTPUTS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.ours.into(),
            self.ours_lse.into(),
            self.others.into(),
            self.out.into(),
            Arg::u32(self.n),
            Arg::u32(self.w),
            Arg::u32(self.d),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `note_not_finite` of `kernels/layer.cu`.
pub(super) const NOTE_NOT_FINITE: Kernel = Kernel {
    name: "note_not_finite",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4],
};

/// The arguments of the kernel `note_not_finite` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct NoteNotFinite<'b> {
    pub x: Ptr<'b, f32>,
    pub n: usize,
    pub noted: Ptr<'b, u32>,
    pub stage: usize,
}

impl NoteNotFinite<'_> {
    pub const KERNEL: &'static Kernel = &NOTE_NOT_FINITE;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            Arg::u64(self.n),
            self.noted.into(),
            Arg::u32(self.stage),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `tally_rows` of `kernels/layer.cu`.
pub(super) const TALLY_ROWS: Kernel = Kernel {
    name: "tally_rows",
    threads: 32,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `tally_rows` of `kernels/layer.cu`.
#[derive(Clone, Copy)]
pub(crate) struct TallyRows<'b> {
    pub spans: Ptr<'b, u32>,
    pub listed: Option<Ptr<'b, u32>>,
    pub ranked: Option<Ptr<'b, u32>>,
    pub sum: Ptr<'b, f64>,
    pub b: usize,
    pub g: usize,
}

impl TallyRows<'_> {
    pub const KERNEL: &'static Kernel = &TALLY_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.spans.into(),
            self.listed.into(),
            self.ranked.into(),
            self.sum.into(),
            Arg::u32(self.b),
            Arg::u32(self.g),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
