// Generated from kernels/sample.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/sample.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, start};
use crate::error::Result;

/// The kernel `largest_of_parts` of `kernels/sample.cu`.
pub(super) const LARGEST_OF_PARTS: Kernel = Kernel {
    name: "largest_of_parts",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4],
};

/// The arguments of the kernel `largest_of_parts` of `kernels/sample.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LargestOfParts<'b> {
    pub x: Ptr<'b, f32>,
    pub tops: Ptr<'b, f32>,
    pub places: Ptr<'b, u32>,
    pub width: usize,
}

impl LargestOfParts<'_> {
    pub const KERNEL: &'static Kernel = &LARGEST_OF_PARTS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.tops.into(),
            self.places.into(),
            Arg::u32(self.width),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `largest_of_rows` of `kernels/sample.cu`.
pub(super) const LARGEST_OF_ROWS: Kernel = Kernel {
    name: "largest_of_rows",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4],
};

/// The arguments of the kernel `largest_of_rows` of `kernels/sample.cu`.
#[derive(Clone, Copy)]
pub(crate) struct LargestOfRows<'b> {
    pub tops: Ptr<'b, f32>,
    pub places: Ptr<'b, u32>,
    pub out: Ptr<'b, u32>,
    pub parts: usize,
}

impl LargestOfRows<'_> {
    pub const KERNEL: &'static Kernel = &LARGEST_OF_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.tops.into(),
            self.places.into(),
            self.out.into(),
            Arg::u32(self.parts),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `draw_masses` of `kernels/sample.cu`.
pub(super) const DRAW_MASSES: Kernel = Kernel {
    name: "draw_masses",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 4, 8],
};

/// The arguments of the kernel `draw_masses` of `kernels/sample.cu`.
#[derive(Clone, Copy)]
pub(crate) struct DrawMasses<'b> {
    pub x: Ptr<'b, f32>,
    pub ids: Ptr<'b, u32>,
    pub parts: Ptr<'b, u64>,
    pub width: usize,
    pub temperature: f64,
}

impl DrawMasses<'_> {
    pub const KERNEL: &'static Kernel = &DRAW_MASSES;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.ids.into(),
            self.parts.into(),
            Arg::u32(self.width),
            Arg::f64(self.temperature),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}

/// The kernel `draw_of_rows` of `kernels/sample.cu`.
pub(super) const DRAW_OF_ROWS: Kernel = Kernel {
    name: "draw_of_rows",
    threads: 1024,
    blocks: 1,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 4, 4, 8, 8],
};

/// The arguments of the kernel `draw_of_rows` of `kernels/sample.cu`.
#[derive(Clone, Copy)]
pub(crate) struct DrawOfRows<'b> {
    pub x: Ptr<'b, f32>,
    pub uniforms: Ptr<'b, f64>,
    pub masses: Ptr<'b, u64>,
    pub ids: Ptr<'b, u32>,
    pub width: usize,
    pub parts: usize,
    pub temperature: f64,
    pub top_p: f64,
}

impl DrawOfRows<'_> {
    pub const KERNEL: &'static Kernel = &DRAW_OF_ROWS;

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::KERNEL;
        let arguments = [
            self.x.into(),
            self.uniforms.into(),
            self.masses.into(),
            self.ids.into(),
            Arg::u32(self.width),
            Arg::u32(self.parts),
            Arg::f64(self.temperature),
            Arg::f64(self.top_p),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, 0, &arguments) }
    }
}
