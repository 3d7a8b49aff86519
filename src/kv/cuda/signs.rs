//! The sign bits of one layer's cached keys on the GPU.

use super::{Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};

/// Most full-precision tokens per KV head: a 2-bit cache keeps them in f16, and selfindex chooses some of them first.
pub const FULL: usize = 64;

/// The signs of one layer's cached keys on the device.
pub struct Signs<'d> {
    pub(crate) driver: &'d dyn Driver,
    pub(crate) shape: Shape,
    /// Sign bits, `[b,g,capacity,pitch / 4]`.
    pub signs: Buffer<'d, u32>,
    /// Center of each channel, `[b,g,d]`.
    pub centers: Buffer<'d, f32>,
    /// Positions of the full-precision tokens, `[b,g,FULL]`, ascending.
    pub full: Buffer<'d, u32>,
    /// Number of full-precision tokens, `[b,g]`.
    pub full_count: Buffer<'d, u32>,
}

impl<'d> Signs<'d> {
    /// Allocates space for the signs of a prompt.
    ///
    /// # Errors
    /// Channels that are no multiple of 4; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let (d, heads) = (shape.head_dim, shape.heads());
        check_channels(d)?;
        Ok(Self {
            driver,
            shape,
            signs: Buffer::zeros(driver, "signs", heads * shape.capacity * words(&shape))?,
            centers: Buffer::zeros(driver, "centers", heads * d)?,
            full: Buffer::zeros(driver, "positions that come first", heads * FULL)?,
            full_count: Buffer::zeros(driver, "their numbers", heads)?,
        })
    }

    /// Returns the bytes of all signs.
    pub fn bytes(&self) -> usize {
        4 * self.signs.len()
    }

    /// Fills the cache with random signs, for a benchmark; d must be a multiple of 32.
    pub fn fill(&self, seed: u32) -> Result<()> {
        fill(self.driver, &self.signs, self.signs.len(), Random::Bits, seed)
    }

    /// Returns the bytes of a row.
    pub(crate) fn pitch(&self) -> usize {
        4 * words(&self.shape)
    }

    /// Stores the signs of the last `m` rotated keys, `[b,g,m,d]`; `positions` counts them already.
    pub fn append(&self, keys: &Buffer<'_, f32>, m: usize, positions: &Positions<'_>) -> Result<()> {
        let (rows, shape) = (keys.ptr(), &self.shape);
        let heads = [0, shape.kv_heads, shape.sequences];
        self.store(rows, heads, [m, shape.head_dim], positions.lens.ptr())
    }

    /// Stores the signs of the last `m` keys, `[sequences,heads,m,w]`, of the KV heads from `first` on.
    pub(crate) fn store(
        &self,
        rows: Ptr<'_, f32>,
        [first, heads, sequences]: [usize; 3],
        [m, w]: [usize; 2],
        lens: Ptr<'_, u32>,
    ) -> Result<()> {
        let (shape, words) = (&self.shape, words(&self.shape));
        kernels::AppendSigns {
            rows,
            centers: self.centers.ptr_at(first * shape.head_dim),
            lens,
            signs: self.signs.ptr_at(first * shape.capacity * words),
            m,
            d: shape.head_dim,
            w,
            pitch: self.pitch(),
            capacity: shape.capacity,
        }
        .launch(self.driver, [(m * words).div_ceil(256), heads, sequences])
    }
}

/// Checks that channels have signs in groups of 4.
pub(super) fn check_channels(d: usize) -> Result<()> {
    if d.is_multiple_of(4) {
        Ok(())
    } else {
        Err(Error::unsupported(format!(
            "CUDA: signs need a head dimension that is a multiple of 4, not {d}"
        ))
        .hint("use ⟨device=cpu⟩"))
    }
}

/// Returns the number of 32-bit words in a row of signs.
pub(crate) fn words(shape: &Shape) -> usize {
    shape.head_dim.div_ceil(32)
}
