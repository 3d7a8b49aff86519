// Generated from kernels/pack_rows.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/pack_rows.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `pack_rows` of `kernels/pack_rows.cu`.
pub(super) const PACK_ROWS: Kernel = Kernel {
    name: "pack_rows",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `pack_rows` of `kernels/pack_rows.cu`.
#[derive(Clone, Copy)]
pub(crate) struct PackRows<'b> {
    pub rows: Ptr<'b, f32>,
    pub centers: Option<Ptr<'b, f32>>,
    pub alpha: Option<Ptr<'b, f32>>,
    pub lens: Ptr<'b, u32>,
    pub bits: Ptr<'b, u8>,
    pub params: Ptr<'b, u32>,
    pub is_signed: usize,
    pub m: usize,
    pub d: usize,
    pub w: usize,
    pub capacity: usize,
}

impl PackRows<'_> {
    pub const KERNEL: &'static Kernel = &PACK_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.centers.into(),
            self.alpha.into(),
            self.lens.into(),
            self.bits.into(),
            self.params.into(),
            Arg::u32(self.is_signed),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
