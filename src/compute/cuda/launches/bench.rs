// Generated from kernels/bench.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/bench.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `fill_random` of `kernels/bench.cu`.
pub(super) const FILL_RANDOM: Kernel = Kernel {
    name: "fill_random",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 4, 4, 4],
};

/// The arguments of the kernel `fill_random` of `kernels/bench.cu`.
#[derive(Clone, Copy)]
pub(crate) struct FillRandom<'b> {
    pub out: Ptr<'b, c_void>,
    pub n: usize,
    pub kind: usize,
    pub below: usize,
    pub seed: usize,
}

impl FillRandom<'_> {
    pub const KERNEL: &'static Kernel = &FILL_RANDOM;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.out.into(),
            Arg::u64(self.n),
            Arg::u32(self.kind),
            Arg::u32(self.below),
            Arg::u32(self.seed),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `read_all` of `kernels/bench.cu`.
pub(super) const READ_ALL: Kernel = Kernel {
    name: "read_all",
    threads: 256,
    blocks: 4,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8],
};

/// The arguments of the kernel `read_all` of `kernels/bench.cu`.
#[derive(Clone, Copy)]
pub(crate) struct ReadAll<'b> {
    pub from: Ptr<'b, [u32; 4]>,
    pub n: usize,
    pub sums: Ptr<'b, u32>,
}

impl ReadAll<'_> {
    pub const KERNEL: &'static Kernel = &READ_ALL;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [self.from.into(), Arg::u64(self.n), self.sums.into()];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
