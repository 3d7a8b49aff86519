// Generated from kernels/select_a2ats.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/select_a2ats.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `map_rows` of `kernels/select_a2ats.cu`.
pub(super) const MAP_ROWS: Kernel = Kernel {
    name: "map_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `map_rows` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct MapRows<'b> {
    pub x: Ptr<'b, f32>,
    pub matrices: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub r: usize,
    pub d: usize,
}

impl MapRows<'_> {
    pub const KERNEL: &'static Kernel = &MAP_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.matrices.into(),
            self.out.into(),
            Arg::u32(self.r),
            Arg::u32(self.d),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `count_candidates` of `kernels/select_a2ats.cu`.
pub(super) const COUNT_CANDIDATES: Kernel = Kernel {
    name: "count_candidates",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `count_candidates` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct CountCandidates<'b> {
    pub codes: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub counts: Ptr<'b, u32>,
    pub counted: Ptr<'b, u32>,
    pub capacity: usize,
    pub size: usize,
}

impl CountCandidates<'_> {
    pub const KERNEL: &'static Kernel = &COUNT_CANDIDATES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.codes.into(),
            self.spans.into(),
            self.counts.into(),
            self.counted.into(),
            Arg::u32(self.capacity),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `codeword_scores` of `kernels/select_a2ats.cu`.
pub(super) const CODEWORD_SCORES: Kernel = Kernel {
    name: "codeword_scores",
    threads: 256,
    blocks: 2,
    shared_bytes: 8192,
    argument_bytes: &[8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `codeword_scores` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct CodewordScores<'b> {
    pub y_w: Ptr<'b, f32>,
    pub codebook: Ptr<'b, u16>,
    pub scores: Ptr<'b, f32>,
    pub r: usize,
    pub size: usize,
    pub d: usize,
    pub w: usize,
}

impl CodewordScores<'_> {
    pub const KERNEL: &'static Kernel = &CODEWORD_SCORES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.y_w.into(),
            self.codebook.into(),
            self.scores.into(),
            Arg::u32(self.r),
            Arg::u32(self.size),
            Arg::u32(self.d),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `rank_codewords` of `kernels/select_a2ats.cu`.
pub(super) const RANK_CODEWORDS: Kernel = Kernel {
    name: "rank_codewords",
    threads: 1024,
    blocks: 1,
    shared_bytes: 98304,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `rank_codewords` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct RankCodewords<'b> {
    pub scores: Ptr<'b, f32>,
    pub counts: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub ranks: Ptr<'b, u32>,
    pub r: usize,
    pub size: usize,
}

impl RankCodewords<'_> {
    pub const KERNEL: &'static Kernel = &RANK_CODEWORDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.scores.into(),
            self.counts.into(),
            self.budgets.into(),
            self.ranks.into(),
            Arg::u32(self.r),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `take_codewords` of `kernels/select_a2ats.cu`.
pub(super) const TAKE_CODEWORDS: Kernel = Kernel {
    name: "take_codewords",
    threads: 1024,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `take_codewords` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct TakeCodewords<'b> {
    pub ranks: Ptr<'b, u32>,
    pub counts: Ptr<'b, u32>,
    pub scores: Ptr<'b, f32>,
    pub codes: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub marks: Ptr<'b, u8>,
    pub parts: Ptr<'b, u32>,
    pub r: usize,
    pub size: usize,
    pub capacity: usize,
    pub per_query_head: usize,
}

impl TakeCodewords<'_> {
    pub const KERNEL: &'static Kernel = &TAKE_CODEWORDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.ranks.into(),
            self.counts.into(),
            self.scores.into(),
            self.codes.into(),
            self.spans.into(),
            self.budgets.into(),
            self.marks.into(),
            self.parts.into(),
            Arg::u32(self.r),
            Arg::u32(self.size),
            Arg::u32(self.capacity),
            Arg::u32(self.per_query_head),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `count_taken` of `kernels/select_a2ats.cu`.
pub(super) const COUNT_TAKEN: Kernel = Kernel {
    name: "count_taken",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `count_taken` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct CountTaken<'b> {
    pub codes: Ptr<'b, u16>,
    pub marks: Ptr<'b, u8>,
    pub spans: Ptr<'b, u32>,
    pub totals: Ptr<'b, u32>,
    pub capacity: usize,
    pub size: usize,
}

impl CountTaken<'_> {
    pub const KERNEL: &'static Kernel = &COUNT_TAKEN;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.codes.into(),
            self.marks.into(),
            self.spans.into(),
            self.totals.into(),
            Arg::u32(self.capacity),
            Arg::u32(self.size),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `list_taken` of `kernels/select_a2ats.cu`.
pub(super) const LIST_TAKEN: Kernel = Kernel {
    name: "list_taken",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `list_taken` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ListTaken<'b> {
    pub codes: Ptr<'b, u16>,
    pub marks: Ptr<'b, u8>,
    pub parts: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub totals: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub capacity: usize,
    pub size: usize,
    pub most: usize,
}

impl ListTaken<'_> {
    pub const KERNEL: &'static Kernel = &LIST_TAKEN;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.codes.into(),
            self.marks.into(),
            self.parts.into(),
            self.spans.into(),
            self.totals.into(),
            self.lists.into(),
            self.listed.into(),
            Arg::u32(self.capacity),
            Arg::u32(self.size),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `encode_last` of `kernels/select_a2ats.cu`.
pub(super) const ENCODE_LAST: Kernel = Kernel {
    name: "encode_last",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `encode_last` of `kernels/select_a2ats.cu`.
#[derive(Clone, Copy)]
pub(crate) struct EncodeLast<'b> {
    pub scores: Ptr<'b, f32>,
    pub norms: Ptr<'b, f32>,
    pub lens: Ptr<'b, u32>,
    pub codes: Ptr<'b, u16>,
    pub size: usize,
    pub capacity: usize,
}

impl EncodeLast<'_> {
    pub const KERNEL: &'static Kernel = &ENCODE_LAST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.scores.into(),
            self.norms.into(),
            self.lens.into(),
            self.codes.into(),
            Arg::u32(self.size),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
