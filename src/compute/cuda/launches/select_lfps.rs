// Generated from kernels/select_lfps.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/select_lfps.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `lfps_begin` of `kernels/select_lfps.cu`.
pub(super) const LFPS_BEGIN: Kernel = Kernel {
    name: "lfps_begin",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `lfps_begin` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsBegin<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, c_void>,
    pub values: Ptr<'b, c_void>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub constants: Ptr<'b, f64>,
    pub sums: Ptr<'b, f64>,
    pub bypassed: Ptr<'b, u32>,
    pub rest: Ptr<'b, f32>,
    pub counters: Ptr<'b, u32>,
    pub scale: f64,
    pub theta: f64,
    pub kind: usize,
    pub r: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
    pub sinks: usize,
    pub model_window: usize,
}

impl LfpsBegin<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_BEGIN;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.values.into(),
            self.spans.into(),
            self.budgets.into(),
            self.constants.into(),
            self.sums.into(),
            self.bypassed.into(),
            self.rest.into(),
            self.counters.into(),
            Arg::f64(self.scale),
            Arg::f64(self.theta),
            Arg::u32(self.kind),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
            Arg::u32(self.sinks),
            Arg::u32(self.model_window),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_sums` of `kernels/select_lfps.cu`.
pub(super) const LFPS_SUMS: Kernel = Kernel {
    name: "lfps_sums",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `lfps_sums` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsSums<'b> {
    pub tables: Ptr<'b, f32>,
    pub factors: Ptr<'b, f64>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f64>,
    pub capacity: usize,
    pub sinks: usize,
}

impl LfpsSums<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_SUMS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.tables.into(),
            self.factors.into(),
            self.spans.into(),
            self.parts.into(),
            Arg::u32(self.capacity),
            Arg::u32(self.sinks),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_moments` of `kernels/select_lfps.cu`.
pub(super) const LFPS_MOMENTS: Kernel = Kernel {
    name: "lfps_moments",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `lfps_moments` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsMoments<'b> {
    pub tables: Ptr<'b, f32>,
    pub factors: Ptr<'b, f64>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f64>,
    pub moments: Ptr<'b, f64>,
    pub capacity: usize,
    pub sinks: usize,
}

impl LfpsMoments<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_MOMENTS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.tables.into(),
            self.factors.into(),
            self.spans.into(),
            self.parts.into(),
            self.moments.into(),
            Arg::u32(self.capacity),
            Arg::u32(self.sinks),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_thresholds` of `kernels/select_lfps.cu`.
pub(super) const LFPS_THRESHOLDS: Kernel = Kernel {
    name: "lfps_thresholds",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `lfps_thresholds` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsThresholds<'b> {
    pub constants: Ptr<'b, f64>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f64>,
    pub moments: Ptr<'b, f64>,
    pub thresholds: Ptr<'b, f64>,
    pub blocks: usize,
    pub sinks: usize,
}

impl LfpsThresholds<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_THRESHOLDS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.constants.into(),
            self.spans.into(),
            self.parts.into(),
            self.moments.into(),
            self.thresholds.into(),
            Arg::u32(self.blocks),
            Arg::u32(self.sinks),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_marks` of `kernels/select_lfps.cu`.
pub(super) const LFPS_MARKS: Kernel = Kernel {
    name: "lfps_marks",
    threads: 256,
    blocks: 1,
    shared_bytes: 8192,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `lfps_marks` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsMarks<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, c_void>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub tables: Ptr<'b, f32>,
    pub factors: Ptr<'b, f64>,
    pub thresholds: Ptr<'b, f64>,
    pub bypassed: Ptr<'b, u32>,
    pub scores: Ptr<'b, u32>,
    pub joins: Ptr<'b, u32>,
    pub counts: Ptr<'b, u32>,
    pub counters: Ptr<'b, u32>,
    pub scale: f32,
    pub kind: usize,
    pub r: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
}

impl LfpsMarks<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_MARKS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.spans.into(),
            self.budgets.into(),
            self.tables.into(),
            self.factors.into(),
            self.thresholds.into(),
            self.bypassed.into(),
            self.scores.into(),
            self.joins.into(),
            self.counts.into(),
            self.counters.into(),
            Arg::f32(self.scale),
            Arg::u32(self.kind),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `lfps_attended` of `kernels/select_lfps.cu`.
pub(super) const LFPS_ATTENDED: Kernel = Kernel {
    name: "lfps_attended",
    threads: 256,
    blocks: 1,
    shared_bytes: 8192,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `lfps_attended` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsAttended<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, c_void>,
    pub spans: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub scores: Ptr<'b, f32>,
    pub scale: f32,
    pub kind: usize,
    pub r: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
    pub most: usize,
    pub room: usize,
    pub sinks: usize,
}

impl LfpsAttended<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_ATTENDED;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.spans.into(),
            self.lists.into(),
            self.listed.into(),
            self.scores.into(),
            Arg::f32(self.scale),
            Arg::u32(self.kind),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
            Arg::u32(self.room),
            Arg::u32(self.sinks),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `lfps_update` of `kernels/select_lfps.cu`.
pub(super) const LFPS_UPDATE: Kernel = Kernel {
    name: "lfps_update",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `lfps_update` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsUpdate<'b> {
    pub scores: Ptr<'b, f32>,
    pub constants: Ptr<'b, f64>,
    pub bypassed: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub lists: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub tables: Ptr<'b, f32>,
    pub factors: Ptr<'b, f64>,
    pub r: usize,
    pub capacity: usize,
    pub most: usize,
    pub room: usize,
}

impl LfpsUpdate<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_UPDATE;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.scores.into(),
            self.constants.into(),
            self.bypassed.into(),
            self.spans.into(),
            self.lists.into(),
            self.listed.into(),
            self.tables.into(),
            self.factors.into(),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
            Arg::u32(self.room),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `lfps_tally` of `kernels/select_lfps.cu`.
pub(super) const LFPS_TALLY: Kernel = Kernel {
    name: "lfps_tally",
    threads: 32,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `lfps_tally` of `kernels/select_lfps.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LfpsTally<'b> {
    pub spans: Ptr<'b, u32>,
    pub listed: Ptr<'b, u32>,
    pub counters: Ptr<'b, u32>,
    pub sums: Ptr<'b, f64>,
    pub b: usize,
    pub g: usize,
    pub r: usize,
}

impl LfpsTally<'_> {
    pub const KERNEL: &'static Kernel = &LFPS_TALLY;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.spans.into(),
            self.listed.into(),
            self.counters.into(),
            self.sums.into(),
            Arg::u32(self.b),
            Arg::u32(self.g),
            Arg::u32(self.r),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
