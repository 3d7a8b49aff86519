// Generated from kernels/path_wpq.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/path_wpq.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `path_scores` of `kernels/path_wpq.cu`.
pub(super) const PATH_SCORES: Kernel = Kernel {
    name: "path_scores",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `path_scores` of `kernels/path_wpq.cu`.
#[derive(Clone, Copy)]
pub(crate) struct PathScores<'b> {
    pub queries: Ptr<'b, f32>,
    pub arcs: Ptr<'b, u16>,
    pub turns: Ptr<'b, f32>,
    pub spans: Ptr<'b, u32>,
    pub paths: Ptr<'b, f32>,
    pub scale: f32,
    pub r: usize,
    pub d: usize,
    pub k: usize,
    pub capacity: usize,
    pub passes: usize,
}

impl PathScores<'_> {
    pub const KERNEL: &'static Kernel = &PATH_SCORES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.arcs.into(),
            self.turns.into(),
            self.spans.into(),
            self.paths.into(),
            Arg::f32(self.scale),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.k),
            Arg::u32(self.capacity),
            Arg::u32(self.passes),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
