// Generated from kernels/select_ctkvr.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/select_ctkvr.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `recall_centroids` of `kernels/select_ctkvr.cu`.
pub(super) const RECALL_CENTROIDS: Kernel = Kernel {
    name: "recall_centroids",
    threads: 256,
    blocks: 2,
    shared_bytes: 8192,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `recall_centroids` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct RecallCentroids<'b> {
    pub queries: Ptr<'b, f32>,
    pub ring: Ptr<'b, u32>,
    pub centroids: Ptr<'b, u16>,
    pub cosines: Ptr<'b, u32>,
    pub r: usize,
    pub d: usize,
    pub slots: usize,
}

impl RecallCentroids<'_> {
    pub const KERNEL: &'static Kernel = &RECALL_CENTROIDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.ring.into(),
            self.centroids.into(),
            self.cosines.into(),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.slots),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `rank_centroids` of `kernels/select_ctkvr.cu`.
pub(super) const RANK_CENTROIDS: Kernel = Kernel {
    name: "rank_centroids",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4],
};

/// The arguments of the kernel `rank_centroids` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct RankCentroids<'b> {
    pub ring: Ptr<'b, u32>,
    pub cosines: Ptr<'b, u32>,
    pub recalled: Ptr<'b, u32>,
    pub probes: usize,
    pub slots: usize,
}

impl RankCentroids<'_> {
    pub const KERNEL: &'static Kernel = &RANK_CENTROIDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.ring.into(),
            self.cosines.into(),
            self.recalled.into(),
            Arg::u32(self.probes),
            Arg::u32(self.slots),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `mark_union` of `kernels/select_ctkvr.cu`.
pub(super) const MARK_UNION: Kernel = Kernel {
    name: "mark_union",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `mark_union` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct MarkUnion<'b> {
    pub ring: Ptr<'b, u32>,
    pub recalled: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub lens: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub marks: Ptr<'b, u8>,
    pub probes: usize,
    pub slots: usize,
    pub longest: usize,
    pub capacity: usize,
}

impl MarkUnion<'_> {
    pub const KERNEL: &'static Kernel = &MARK_UNION;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.ring.into(),
            self.recalled.into(),
            self.lists.into(),
            self.lens.into(),
            self.spans.into(),
            self.budgets.into(),
            self.marks.into(),
            Arg::u32(self.probes),
            Arg::u32(self.slots),
            Arg::u32(self.longest),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `count_union` of `kernels/select_ctkvr.cu`.
pub(super) const COUNT_UNION: Kernel = Kernel {
    name: "count_union",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4],
};

/// The arguments of the kernel `count_union` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct CountUnion<'b> {
    pub marks: Ptr<'b, u8>,
    pub totals: Ptr<'b, u32>,
    pub capacity: usize,
}

impl CountUnion<'_> {
    pub const KERNEL: &'static Kernel = &COUNT_UNION;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [self.marks.into(), self.totals.into(), Arg::u32(self.capacity)];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `list_union` of `kernels/select_ctkvr.cu`.
pub(super) const LIST_UNION: Kernel = Kernel {
    name: "list_union",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `list_union` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ListUnion<'b> {
    pub marks: Ptr<'b, u8>,
    pub totals: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub limits: Ptr<'b, u32>,
    pub items: Ptr<'b, u32>,
    pub counts: Ptr<'b, u32>,
    pub item_spans: Ptr<'b, u32>,
    pub wants: Ptr<'b, u32>,
    pub ranked: Ptr<'b, u32>,
    pub room: usize,
    pub capacity: usize,
}

impl ListUnion<'_> {
    pub const KERNEL: &'static Kernel = &LIST_UNION;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.marks.into(),
            self.totals.into(),
            self.spans.into(),
            self.budgets.into(),
            self.limits.into(),
            self.items.into(),
            self.counts.into(),
            self.item_spans.into(),
            self.wants.into(),
            self.ranked.into(),
            Arg::u32(self.room),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `name_items` of `kernels/select_ctkvr.cu`.
pub(super) const NAME_ITEMS: Kernel = Kernel {
    name: "name_items",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `name_items` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct NameItems<'b> {
    pub items: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub room: usize,
    pub most: usize,
}

impl NameItems<'_> {
    pub const KERNEL: &'static Kernel = &NAME_ITEMS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.items.into(),
            self.lists.into(),
            self.listed.into(),
            self.histograms.into(),
            Arg::u32(self.room),
            Arg::u32(self.most),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `push_centroid` of `kernels/select_ctkvr.cu`.
pub(super) const PUSH_CENTROID: Kernel = Kernel {
    name: "push_centroid",
    threads: 256,
    blocks: 2,
    shared_bytes: 8192,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `push_centroid` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct PushCentroid<'b> {
    pub queries: Ptr<'b, f32>,
    pub ring: Ptr<'b, u32>,
    pub items: Ptr<'b, u32>,
    pub chosen: Ptr<'b, u32>,
    pub chosen_count: Ptr<'b, u32>,
    pub centroids: Ptr<'b, u16>,
    pub lists: Ptr<'b, u32>,
    pub lens: Ptr<'b, u32>,
    pub update: usize,
    pub r: usize,
    pub d: usize,
    pub slots: usize,
    pub longest: usize,
    pub room: usize,
}

impl PushCentroid<'_> {
    pub const KERNEL: &'static Kernel = &PUSH_CENTROID;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.ring.into(),
            self.items.into(),
            self.chosen.into(),
            self.chosen_count.into(),
            self.centroids.into(),
            self.lists.into(),
            self.lens.into(),
            Arg::u32(self.update),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.slots),
            Arg::u32(self.longest),
            Arg::u32(self.room),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `advance_ring` of `kernels/select_ctkvr.cu`.
pub(super) const ADVANCE_RING: Kernel = Kernel {
    name: "advance_ring",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `advance_ring` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AdvanceRing<'b> {
    pub ring: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub limits: Ptr<'b, u32>,
    pub update: usize,
    pub slots: usize,
    pub b: usize,
}

impl AdvanceRing<'_> {
    pub const KERNEL: &'static Kernel = &ADVANCE_RING;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.ring.into(),
            self.spans.into(),
            self.limits.into(),
            Arg::u32(self.update),
            Arg::u32(self.slots),
            Arg::u32(self.b),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `take_queries` of `kernels/select_ctkvr.cu`.
pub(super) const TAKE_QUERIES: Kernel = Kernel {
    name: "take_queries",
    threads: 256,
    blocks: 2,
    shared_bytes: 8192,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `take_queries` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct TakeQueries<'b> {
    pub queries: Ptr<'b, f32>,
    pub at: Ptr<'b, u32>,
    pub out: Ptr<'b, f32>,
    pub centroids: Ptr<'b, u16>,
    pub slot: usize,
    pub m: usize,
    pub r: usize,
    pub d: usize,
    pub slots: usize,
}

impl TakeQueries<'_> {
    pub const KERNEL: &'static Kernel = &TAKE_QUERIES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.at.into(),
            self.out.into(),
            self.centroids.into(),
            Arg::u32(self.slot),
            Arg::u32(self.m),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.slots),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `keep_lists` of `kernels/select_ctkvr.cu`.
pub(super) const KEEP_LISTS: Kernel = Kernel {
    name: "keep_lists",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `keep_lists` of `kernels/select_ctkvr.cu`.
#[derive(Clone, Copy)]
pub(crate) struct KeepLists<'b> {
    pub chosen: Ptr<'b, u32>,
    pub chosen_count: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub lens: Ptr<'b, u32>,
    pub slot: usize,
    pub slots: usize,
    pub longest: usize,
}

impl KeepLists<'_> {
    pub const KERNEL: &'static Kernel = &KEEP_LISTS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.chosen.into(),
            self.chosen_count.into(),
            self.lists.into(),
            self.lens.into(),
            Arg::u32(self.slot),
            Arg::u32(self.slots),
            Arg::u32(self.longest),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
