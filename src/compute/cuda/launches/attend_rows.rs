// Generated from kernels/attend_rows.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/attend_rows.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `attend_rows` of `kernels/attend_rows.cu`.
pub(super) const ATTEND_ROWS: Kernel = Kernel {
    name: "attend_rows",
    threads: 128,
    blocks: 1,
    shared_bytes: 45312,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `attend_rows` of `kernels/attend_rows.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AttendRows<'b> {
    pub queries: Ptr<'b, f32>,
    pub keys: Ptr<'b, c_void>,
    pub key_scales: Option<Ptr<'b, u16>>,
    pub values: Ptr<'b, c_void>,
    pub value_scales: Option<Ptr<'b, u16>>,
    pub spans: Ptr<'b, u32>,
    pub lists: Option<Ptr<'b, u32>>,
    pub listed: Option<Ptr<'b, u32>>,
    pub outs: Ptr<'b, f32>,
    pub sums: Ptr<'b, f32>,
    pub scale: f32,
    pub key_kind: usize,
    pub value_kind: usize,
    pub r: usize,
    pub d: usize,
    pub capacity: usize,
    pub most: usize,
    pub w: usize,
}

impl AttendRows<'_> {
    pub const KERNEL: &'static Kernel = &ATTEND_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.keys.into(),
            self.key_scales.into(),
            self.values.into(),
            self.value_scales.into(),
            self.spans.into(),
            self.lists.into(),
            self.listed.into(),
            self.outs.into(),
            self.sums.into(),
            Arg::f32(self.scale),
            Arg::u32(self.key_kind),
            Arg::u32(self.value_kind),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
            Arg::u32(self.w),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}
