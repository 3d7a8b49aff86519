// Generated from kernels/select_wpq.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/select_wpq.cu`.

use std::ffi::c_void;

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, no_kernel, start};
use crate::error::Result;

/// The kernel `word_tables_16` of `kernels/select_wpq.cu`.
pub(super) const WORD_TABLES_16: Kernel = Kernel {
    name: "word_tables_16",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `word_tables_256` of `kernels/select_wpq.cu`.
pub(super) const WORD_TABLES_256: Kernel = Kernel {
    name: "word_tables_256",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernels `word_tables_*`, one for each width, of `kernels/select_wpq.cu`.
#[derive(Clone, Copy)]
pub(crate) struct WordTables<'b> {
    pub queries: Ptr<'b, f32>,
    pub query_maps: Ptr<'b, u16>,
    pub means: Ptr<'b, f32>,
    pub words: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub budgets: Ptr<'b, u32>,
    pub tables: Ptr<'b, c_void>,
    pub lines: Ptr<'b, f32>,
    pub histograms: Ptr<'b, u32>,
    pub refined_histograms: Ptr<'b, u32>,
    pub wants: Ptr<'b, u32>,
    pub item_spans: Ptr<'b, u32>,
    pub scale: f32,
    pub groups: usize,
    pub dim: usize,
    pub d: usize,
}

impl WordTables<'_> {
    /// Returns the kernel for a width.
    pub fn kernel(width: usize) -> Result<&'static Kernel> {
        match width {
            16 => Ok(&WORD_TABLES_16),
            256 => Ok(&WORD_TABLES_256),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("word_tables", width)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(width)?;
        let arguments = [
            self.queries.into(),
            self.query_maps.into(),
            self.means.into(),
            self.words.into(),
            self.spans.into(),
            self.budgets.into(),
            self.tables.into(),
            self.lines.into(),
            self.histograms.into(),
            self.refined_histograms.into(),
            self.wants.into(),
            self.item_spans.into(),
            Arg::f32(self.scale),
            Arg::u32(self.groups),
            Arg::u32(self.dim),
            Arg::u32(self.d),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `word_parts_16` of `kernels/select_wpq.cu`.
pub(super) const WORD_PARTS_16: Kernel = Kernel {
    name: "word_parts_16",
    threads: 256,
    blocks: 3,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The kernel `word_parts_256` of `kernels/select_wpq.cu`.
pub(super) const WORD_PARTS_256: Kernel = Kernel {
    name: "word_parts_256",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4, 4, 4],
};

/// The arguments of the kernels `word_parts_*`, one for each width, of `kernels/select_wpq.cu`.
#[derive(Clone, Copy)]
pub(crate) struct WordParts<'b> {
    pub codes: Ptr<'b, u8>,
    pub tables: Ptr<'b, c_void>,
    pub lines: Ptr<'b, f32>,
    pub paths: Option<Ptr<'b, f32>>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f32>,
    pub groups: usize,
    pub width: usize,
    pub r: usize,
    pub capacity: usize,
}

impl WordParts<'_> {
    /// Returns the kernel for a width.
    pub fn kernel(width: usize) -> Result<&'static Kernel> {
        match width {
            16 => Ok(&WORD_PARTS_16),
            256 => Ok(&WORD_PARTS_256),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("word_parts", width)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(width)?;
        let arguments = [
            self.codes.into(),
            self.tables.into(),
            self.lines.into(),
            self.paths.into(),
            self.spans.into(),
            self.parts.into(),
            Arg::u32(self.groups),
            Arg::u32(self.width),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}

/// The kernel `word_keys_16` of `kernels/select_wpq.cu`.
pub(super) const WORD_KEYS_16: Kernel = Kernel {
    name: "word_keys_16",
    threads: 256,
    blocks: 3,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 8, 8, 8],
};

/// The kernel `word_keys_256` of `kernels/select_wpq.cu`.
pub(super) const WORD_KEYS_256: Kernel = Kernel {
    name: "word_keys_256",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 8, 8, 8],
};

/// The arguments of the kernels `word_keys_*`, one for each width, of `kernels/select_wpq.cu`.
#[derive(Clone, Copy)]
pub(crate) struct WordKeys<'b> {
    pub codes: Ptr<'b, u8>,
    pub tables: Ptr<'b, c_void>,
    pub lines: Ptr<'b, f32>,
    pub paths: Option<Ptr<'b, f32>>,
    pub spans: Ptr<'b, u32>,
    pub parts: Ptr<'b, f32>,
    pub groups: usize,
    pub width: usize,
    pub r: usize,
    pub capacity: usize,
    pub totals: Ptr<'b, f32>,
    pub keys: Ptr<'b, u32>,
    pub histograms: Ptr<'b, u32>,
}

impl WordKeys<'_> {
    /// Returns the kernel for a width.
    pub fn kernel(width: usize) -> Result<&'static Kernel> {
        match width {
            16 => Ok(&WORD_KEYS_16),
            256 => Ok(&WORD_KEYS_256),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("word_keys", width)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(width)?;
        let arguments = [
            self.codes.into(),
            self.tables.into(),
            self.lines.into(),
            self.paths.into(),
            self.spans.into(),
            self.parts.into(),
            Arg::u32(self.groups),
            Arg::u32(self.width),
            Arg::u32(self.r),
            Arg::u32(self.capacity),
            self.totals.into(),
            self.keys.into(),
            self.histograms.into(),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}
