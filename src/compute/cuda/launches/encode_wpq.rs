// Generated from kernels/encode_wpq.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/encode_wpq.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, no_kernel, start};
use crate::error::Result;

/// The kernel `encode_keys_16` of `kernels/encode_wpq.cu`.
pub(super) const ENCODE_KEYS_16: Kernel = Kernel {
    name: "encode_keys_16",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The kernel `encode_keys_256` of `kernels/encode_wpq.cu`.
pub(super) const ENCODE_KEYS_256: Kernel = Kernel {
    name: "encode_keys_256",
    threads: 256,
    blocks: 2,
    shared_bytes: 0,
    argument_bytes: &[8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4],
};

/// The arguments of the kernels `encode_keys_*`, one for each width, of `kernels/encode_wpq.cu`.
#[derive(Clone, Copy)]
pub(crate) struct EncodeKeys<'b> {
    pub keys: Ptr<'b, f32>,
    pub key_maps: Ptr<'b, f32>,
    pub means: Ptr<'b, f32>,
    pub arcs: Option<Ptr<'b, f32>>,
    pub turns: Option<Ptr<'b, f32>>,
    pub words: Ptr<'b, u16>,
    pub norms: Ptr<'b, f32>,
    pub lens: Ptr<'b, u32>,
    pub codes: Ptr<'b, u8>,
    pub groups: usize,
    pub dim: usize,
    pub n: usize,
    pub d: usize,
    pub capacity: usize,
}

impl EncodeKeys<'_> {
    /// Returns the kernel for a width.
    pub fn kernel(width: usize) -> Result<&'static Kernel> {
        match width {
            16 => Ok(&ENCODE_KEYS_16),
            256 => Ok(&ENCODE_KEYS_256),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("encode_keys", width)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(width)?;
        let arguments = [
            self.keys.into(),
            self.key_maps.into(),
            self.means.into(),
            self.arcs.into(),
            self.turns.into(),
            self.words.into(),
            self.norms.into(),
            self.lens.into(),
            self.codes.into(),
            Arg::u32(self.groups),
            Arg::u32(self.dim),
            Arg::u32(self.n),
            Arg::u32(self.d),
            Arg::u32(self.capacity),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}
