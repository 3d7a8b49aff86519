// Generated from kernels/second_moment.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/second_moment.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `second_moment` of `kernels/second_moment.cu`.
pub(super) const SECOND_MOMENT: Kernel = Kernel {
    name: "second_moment",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4, 4],
};

/// The arguments of the kernel `second_moment` of `kernels/second_moment.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SecondMoment<'b> {
    pub q_rope: Ptr<'b, f32>,
    pub runs: Ptr<'b, f64>,
    pub m: usize,
    pub d: usize,
    pub run_rows: usize,
}

impl SecondMoment<'_> {
    pub const KERNEL: &'static Kernel = &SECOND_MOMENT;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.q_rope.into(),
            self.runs.into(),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.run_rows),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `add_runs` of `kernels/second_moment.cu`.
pub(super) const ADD_RUNS: Kernel = Kernel {
    name: "add_runs",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4],
};

/// The arguments of the kernel `add_runs` of `kernels/second_moment.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AddRuns<'b> {
    pub runs: Ptr<'b, f64>,
    pub sums: Ptr<'b, f64>,
    pub size: usize,
    pub count: usize,
}

impl AddRuns<'_> {
    pub const KERNEL: &'static Kernel = &ADD_RUNS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.runs.into(),
            self.sums.into(),
            Arg::u64(self.size),
            Arg::u32(self.count),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
