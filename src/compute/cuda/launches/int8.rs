// Generated from kernels/int8.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/int8.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `append_int8` of `kernels/int8.cu`.
pub(super) const APPEND_INT8: Kernel = Kernel {
    name: "append_int8",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4],
};

/// The arguments of the kernel `append_int8` of `kernels/int8.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AppendInt8<'b> {
    pub rows: Ptr<'b, f32>,
    pub lens: Ptr<'b, u32>,
    pub codes: Ptr<'b, u8>,
    pub scales: Ptr<'b, u16>,
    pub m: usize,
    pub d: usize,
    pub capacity: usize,
}

impl AppendInt8<'_> {
    pub const KERNEL: &'static Kernel = &APPEND_INT8;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.lens.into(),
            self.codes.into(),
            self.scales.into(),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
