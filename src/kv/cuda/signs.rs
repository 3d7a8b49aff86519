//! The sign bits of one layer's cached keys on the GPU.

use super::{Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::packed::sign_bytes;

/// Most full-precision tokens per KV head: a 2-bit cache keeps them in f16, and selfindex chooses among
/// them first.
pub const FULL: usize = 64;

/// The signs of one KV head's keys, computed on the CPU.
pub struct HeadSigns<'a> {
    /// `sign_bytes(d)` per position, from [`crate::kv::packed::extend_signs`].
    pub signs: &'a [u8],
    /// Centre of each channel, `[d]`.
    pub centre: &'a [f32],
    /// Positions of the full-precision tokens, ascending; at most [`FULL`].
    pub full: &'a [u32],
}

/// The contents of [`Signs`], on the host.
#[derive(Clone, Debug, PartialEq)]
pub struct HeldSigns {
    /// Centres, `[b,g,d]`.
    pub centre: Vec<f32>,
    /// `[b,g,capacity,d / 32 rounded up]`; the lowest bit belongs to the first channel.
    pub signs: Vec<u32>,
    /// Positions of the full-precision tokens, ascending, per KV head.
    pub full: Vec<Vec<u32>>,
}

/// The signs of one layer's cached keys on the device.
pub struct Signs<'d> {
    pub(crate) driver: &'d dyn Driver,
    pub(crate) shape: Shape,
    /// Sign bits, `[b,g,capacity,pitch / 4]`.
    pub(crate) signs: Buffer<'d, u32>,
    /// Centre of each channel, `[b,g,d]`.
    pub(crate) centre: Buffer<'d, f32>,
    /// Positions of the full-precision tokens, `[b,g,FULL]`, ascending.
    pub(crate) full: Buffer<'d, u32>,
    /// Number of full-precision tokens, `[b,g]`.
    pub(crate) full_count: Buffer<'d, u32>,
}

impl<'d> Signs<'d> {
    /// Copies signs computed on the CPU, one set per KV head of every sequence.
    ///
    /// # Errors
    /// Channels that are no multiple of 4; more positions than the capacity; out of memory.
    pub fn of(driver: &'d dyn Driver, shape: Shape, heads: &[HeadSigns<'_>]) -> Result<Self> {
        let to = Self::new(driver, shape)?;
        let shape = to.shape;
        let (d, words) = (shape.head_dim, words(&shape));
        let bytes = sign_bytes(d);
        let fits = |head: &HeadSigns| {
            let longest = shape.capacity * bytes;
            head.signs.len() <= longest && head.full.len() <= FULL && head.centre.len() == d
        };
        if heads.len() != shape.heads() || !heads.iter().all(fits) {
            return Err(Error::failed(format!(
                "CUDA: signs of {} heads do not fit {shape:?}",
                heads.len()
            )));
        }
        let mut signs = vec![0u32; shape.heads() * shape.capacity * words];
        for (to, head) in signs.chunks_mut(shape.capacity * words).zip(heads) {
            for (to, row) in to.chunks_mut(words).zip(head.signs.chunks(bytes)) {
                for (i, byte) in row.iter().enumerate() {
                    to[i / 4] |= u32::from(*byte) << (8 * (i % 4));
                }
            }
        }
        let mut full = vec![0; shape.heads() * FULL];
        for (to, head) in full.chunks_mut(FULL).zip(heads) {
            to.iter_mut().zip(head.full).for_each(|(to, p)| *to = *p);
        }
        let counts: Vec<u32> = heads.iter().map(|head| head.full.len() as u32).collect();
        let centre: Vec<f32> = heads.iter().flat_map(|head| head.centre).copied().collect();
        to.signs.write(&signs)?;
        to.centre.write(&centre)?;
        to.full.write(&full)?;
        to.full_count.write(&counts)?;
        Ok(to)
    }

    /// Allocates space for the signs of a prompt.
    ///
    /// # Errors
    /// Channels that are no multiple of 4; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let (d, heads) = (shape.head_dim, shape.heads());
        if !d.is_multiple_of(4) {
            return Err(Error::failed(format!(
                "CUDA: signs need a head dimension that is a multiple of 4, not {d}"
            )));
        }
        Ok(Self {
            driver,
            shape,
            signs: Buffer::zeros(driver, "signs", heads * shape.capacity * words(&shape))?,
            centre: Buffer::zeros(driver, "centres", heads * d)?,
            full: Buffer::zeros(driver, "positions that come first", heads * FULL)?,
            full_count: Buffer::zeros(driver, "their numbers", heads)?,
        })
    }

    /// Copies the contents to the host; waits for the device.
    pub fn read(&self) -> Result<HeldSigns> {
        let (full, counts) = (self.full.read()?, self.full_count.read()?);
        let full = full.chunks(FULL).zip(counts);
        Ok(HeldSigns {
            centre: self.centre.read()?,
            signs: self.signs.read()?,
            full: full
                .map(|(full, n)| full[..FULL.min(n as usize)].to_vec())
                .collect(),
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
        let shape = &self.shape;
        let blocks = (m * words(shape)).div_ceil(256);
        kernels::AppendSigns {
            rows: keys.ptr(),
            centre: self.centre.ptr(),
            lens: positions.lens.ptr(),
            signs: self.signs.ptr(),
            m,
            d: shape.head_dim,
            w: shape.head_dim,
            pitch: self.pitch(),
            capacity: shape.capacity,
        }
        .launch(self.driver, [blocks, shape.kv_heads, shape.sequences])
    }
}

/// Returns the number of 32-bit words in a row of signs.
pub(crate) fn words(shape: &Shape) -> usize {
    shape.head_dim.div_ceil(32)
}
