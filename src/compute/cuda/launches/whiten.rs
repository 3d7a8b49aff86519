// Generated from kernels/whiten.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/whiten.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `whiten` of `kernels/whiten.cu`.
pub(super) const WHITEN: Kernel = Kernel {
    name: "whiten",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `whiten` of `kernels/whiten.cu`.
#[derive(Clone, Copy)]
pub(crate) struct Whiten<'b> {
    pub x: Ptr<'b, f32>,
    pub chol: Ptr<'b, f32>,
    pub out: Ptr<'b, f32>,
    pub n: usize,
    pub d: usize,
    pub w: usize,
}

impl Whiten<'_> {
    pub const KERNEL: &'static Kernel = &WHITEN;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.chol.into(),
            self.out.into(),
            Arg::u32(self.n),
            Arg::u32(self.d),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
