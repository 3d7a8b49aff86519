// Generated from kernels/rank_lfps.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/rank_lfps.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `lfps_entries` of `kernels/rank_lfps.cu`.
pub(super) const LFPS_ENTRIES: Kernel = Kernel {
    name: "lfps_entries",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4],
};

/// The arguments of the kernel `lfps_entries` of `kernels/rank_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsEntries<'b> {
    pub scores: Ptr<'b, u32>,
    pub counts: Ptr<'b, u32>,
    pub entries: Ptr<'b, u64>,
    pub listed: Ptr<'b, u32>,
    pub capacity: usize,
}

impl LfpsEntries<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_ENTRIES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.scores.into(),
            self.counts.into(),
            self.entries.into(),
            self.listed.into(),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_sort` of `kernels/rank_lfps.cu`.
pub(super) const LFPS_SORT: Kernel = Kernel {
    name: "lfps_sort",
    threads: 512,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `lfps_sort` of `kernels/rank_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsSort<'b> {
    pub entries: Ptr<'b, u64>,
    pub other: Ptr<'b, u64>,
    pub listed: Ptr<'b, u32>,
    pub joins: Ptr<'b, u32>,
    pub r: usize,
    pub capacity: usize,
}

impl LfpsSort<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_SORT;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.entries.into(),
            self.other.into(),
            self.listed.into(),
            self.joins.into(),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_limit` of `kernels/rank_lfps.cu`.
pub(super) const LFPS_LIMIT: Kernel = Kernel {
    name: "lfps_limit",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `lfps_limit` of `kernels/rank_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsLimit<'b> {
    pub entries: Ptr<'b, u64>,
    pub listed: Ptr<'b, u32>,
    pub joins: Ptr<'b, u32>,
    pub scores: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub choice: Ptr<'b, u32>,
    pub r: usize,
    pub capacity: usize,
}

impl LfpsLimit<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_LIMIT;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.entries.into(),
            self.listed.into(),
            self.joins.into(),
            self.scores.into(),
            self.budgets.into(),
            self.choice.into(),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_count` of `kernels/rank_lfps.cu`.
pub(super) const LFPS_COUNT: Kernel = Kernel {
    name: "lfps_count",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4],
};

/// The arguments of the kernel `lfps_count` of `kernels/rank_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsCount<'b> {
    pub joins: Ptr<'b, u32>,
    pub choice: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub totals: Ptr<'b, u32>,
    pub capacity: usize,
}

impl LfpsCount<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_COUNT;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.joins.into(),
            self.choice.into(),
            self.spans.into(),
            self.budgets.into(),
            self.totals.into(),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_list` of `kernels/rank_lfps.cu`.
pub(super) const LFPS_LIST: Kernel = Kernel {
    name: "lfps_list",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `lfps_list` of `kernels/rank_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsList<'b> {
    pub joins: Ptr<'b, u32>,
    pub choice: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub totals: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub capacity: usize,
    pub most: usize,
}

impl LfpsList<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_LIST;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.joins.into(),
            self.choice.into(),
            self.spans.into(),
            self.budgets.into(),
            self.totals.into(),
            self.lists.into(),
            self.listed.into(),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
