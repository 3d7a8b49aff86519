// Generated from kernels/select_signs.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/select_signs.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `sign_tables` of `kernels/select_signs.cu`.
pub(super) const SIGN_TABLES: Kernel = Kernel {
    name: "sign_tables",
    threads: 256,
    blocks: 1,
    shared_bytes: 2048,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernel `sign_tables` of `kernels/select_signs.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SignTables<'b> {
    pub queries: Ptr<'b, f32>,
    pub centroids: Ptr<'b, f32>,
    pub signs: Ptr<'b, u32>,
    pub full: Ptr<'b, u32>,
    pub full_count: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub tables: Ptr<'b, f32>,
    pub first: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub r: usize,
    pub d: usize,
    pub pitch: usize,
    pub capacity: usize,
}

impl SignTables<'_> {
    pub const KERNEL: &'static Kernel = &SIGN_TABLES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.queries.into(),
            self.centroids.into(),
            self.signs.into(),
            self.full.into(),
            self.full_count.into(),
            self.spans.into(),
            self.budgets.into(),
            self.tables.into(),
            self.first.into(),
            self.histograms.into(),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.pitch),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `sign_keys` of `kernels/select_signs.cu`.
pub(super) const SIGN_KEYS: Kernel = Kernel {
    name: "sign_keys",
    threads: 256,
    blocks: 1,
    shared_bytes: 18432,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4],
};

/// The arguments of the kernel `sign_keys` of `kernels/select_signs.cu`.
#[derive(Clone, Copy)]
pub(crate) struct SignKeys<'b> {
    pub signs: Ptr<'b, u32>,
    pub tables: Ptr<'b, f32>,
    pub first: Ptr<'b, u32>,
    pub spans: Ptr<'b, u32>,
    pub keys: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
    pub pitch: usize,
    pub capacity: usize,
}

impl SignKeys<'_> {
    pub const KERNEL: &'static Kernel = &SIGN_KEYS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3], shared_bytes: usize) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.signs.into(),
            self.tables.into(),
            self.first.into(),
            self.spans.into(),
            self.keys.into(),
            self.histograms.into(),
            Arg::u32(self.pitch),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, shared_bytes, &arguments) }
    }
}

/// The kernel `append_signs` of `kernels/select_signs.cu`.
pub(super) const APPEND_SIGNS: Kernel = Kernel {
    name: "append_signs",
    threads: 256,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernel `append_signs` of `kernels/select_signs.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AppendSigns<'b> {
    pub rows: Ptr<'b, f32>,
    pub centers: Ptr<'b, f32>,
    pub lens: Ptr<'b, u32>,
    pub signs: Ptr<'b, u32>,
    pub m: usize,
    pub d: usize,
    pub w: usize,
    pub pitch: usize,
    pub capacity: usize,
}

impl AppendSigns<'_> {
    pub const KERNEL: &'static Kernel = &APPEND_SIGNS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.rows.into(),
            self.centers.into(),
            self.lens.into(),
            self.signs.into(),
            Arg::u32(self.m),
            Arg::u32(self.d),
            Arg::u32(self.w),
            Arg::u32(self.pitch),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
