// Generated from kernels/attend_packed.cu by `make launches`; do not edit.

//! The launches of the kernels of `kernels/attend_packed.cu`.

use crate::compute::cuda::buffer::Ptr;
use crate::compute::cuda::driver::{Arg, Driver};
use crate::compute::cuda::start::{Kernel, no_kernel, start};
use crate::error::Result;

/// The kernel `attend_packed_64` of `kernels/attend_packed.cu`.
pub(super) const ATTEND_PACKED_64: Kernel = Kernel {
    name: "attend_packed_64",
    threads: 128,
    blocks: 2,
    shared_bytes: 36864,
    argument_bytes: &[
        8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4,
    ],
};

/// The kernel `attend_packed_80` of `kernels/attend_packed.cu`.
pub(super) const ATTEND_PACKED_80: Kernel = Kernel {
    name: "attend_packed_80",
    threads: 128,
    blocks: 2,
    shared_bytes: 45056,
    argument_bytes: &[
        8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4,
    ],
};

/// The kernel `attend_packed_96` of `kernels/attend_packed.cu`.
pub(super) const ATTEND_PACKED_96: Kernel = Kernel {
    name: "attend_packed_96",
    threads: 128,
    blocks: 2,
    shared_bytes: 53248,
    argument_bytes: &[
        8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4,
    ],
};

/// The kernel `attend_packed_128` of `kernels/attend_packed.cu`.
pub(super) const ATTEND_PACKED_128: Kernel = Kernel {
    name: "attend_packed_128",
    threads: 128,
    blocks: 2,
    shared_bytes: 69632,
    argument_bytes: &[
        8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4, 4, 4, 4, 4, 4,
    ],
};

/// The arguments of the kernels `attend_packed_*`, one for each width, of `kernels/attend_packed.cu`.
#[derive(Clone, Copy)]
pub(crate) struct AttendPacked<'b> {
    pub queries: Ptr<'b, f32>,
    pub signs: Ptr<'b, u32>,
    pub key_bits: Ptr<'b, u16>,
    pub value_bits: Ptr<'b, u16>,
    pub key_params: Ptr<'b, u32>,
    pub value_params: Ptr<'b, u32>,
    pub centers: Ptr<'b, f32>,
    pub alpha: Ptr<'b, f32>,
    pub full: Ptr<'b, u32>,
    pub full_count: Ptr<'b, u32>,
    pub full_keys: Ptr<'b, u16>,
    pub full_values: Ptr<'b, u16>,
    pub spans: Ptr<'b, u32>,
    pub lists: Option<Ptr<'b, u32>>,
    pub listed: Option<Ptr<'b, u32>>,
    pub outs: Ptr<'b, f32>,
    pub sums: Ptr<'b, f32>,
    pub scale: f32,
    pub r: usize,
    pub d: usize,
    pub pitch: usize,
    pub capacity: usize,
    pub most: usize,
    pub is_signed: usize,
}

impl AttendPacked<'_> {
    /// Returns the kernel for a width.
    pub fn kernel(width: usize) -> Result<&'static Kernel> {
        match width {
            64 => Ok(&ATTEND_PACKED_64),
            80 => Ok(&ATTEND_PACKED_80),
            96 => Ok(&ATTEND_PACKED_96),
            128 => Ok(&ATTEND_PACKED_128),
            #[allow(unreachable_patterns)]
            _ => Err(no_kernel("attend_packed", width)),
        }
    }

    /// Launches the kernel after all earlier launches; an empty grid launches nothing.
    pub fn launch(&self, driver: &dyn Driver, width: usize, grid: [usize; 3]) -> Result<()> {
        let kernel = Self::kernel(width)?;
        let arguments = [
            self.queries.into(),
            self.signs.into(),
            self.key_bits.into(),
            self.value_bits.into(),
            self.key_params.into(),
            self.value_params.into(),
            self.centers.into(),
            self.alpha.into(),
            self.full.into(),
            self.full_count.into(),
            self.full_keys.into(),
            self.full_values.into(),
            self.spans.into(),
            self.lists.into(),
            self.listed.into(),
            self.outs.into(),
            self.sums.into(),
            Arg::f32(self.scale),
            Arg::u32(self.r),
            Arg::u32(self.d),
            Arg::u32(self.pitch),
            Arg::u32(self.capacity),
            Arg::u32(self.most),
            Arg::u32(self.is_signed),
        ];
        // SAFETY: these are the arguments that the kernel declares.
        unsafe { start(driver, kernel, grid, kernel.shared_bytes, &arguments) }
    }
}
