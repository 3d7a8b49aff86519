//! The 2-bit cache on the GPU: the same rows as [`crate::kv::packed`], dequantised as they are attended.

use half::f16;

use super::signs::{FULL, HeadSigns, Signs};
use super::{Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::packed::{Packed, QUANT_GROUP};

/// The cached keys and values of one layer in 2 bits.
pub struct PackedLayer<'d> {
    /// Signs, centre, and the positions in half precision; they serve the index of selfindex too.
    pub signs: Signs<'d>,
    /// `[b,g,capacity,d/4]` bytes each, keys and values.
    pub(crate) bits: [Buffer<'d, u8>; 2],
    /// `[b,g,capacity,groups,2]` each: scale and zero point.
    pub(crate) params: [Buffer<'d, f16>; 2],
    /// `[b,g,d]`.
    pub(crate) alpha: Buffer<'d, f32>,
    /// `[b,g,FULL,d]` each.
    pub(crate) full: [Buffer<'d, f16>; 2],
    /// Whether keys are signs and magnitudes.
    pub(crate) is_signed: bool,
}

impl<'d> PackedLayer<'d> {
    /// Takes in the caches of prompts, one per KV head of every sequence.
    ///
    /// # Errors
    /// Channels that do not come in eights; more positions than there is room for; no memory.
    pub fn of(driver: &'d dyn Driver, shape: Shape, heads: &[&Packed]) -> Result<Self> {
        let shape = shape.checked()?;
        let d = shape.head_dim;
        let fits = |packed: &&Packed| packed.len() <= shape.capacity && packed.keys.centre().len() == d;
        if !d.is_multiple_of(8) || heads.len() != shape.heads() || !heads.iter().all(fits) {
            return Err(Error::failed(format!(
                "CUDA: 2-bit caches of {} heads do not fit {shape:?}",
                heads.len()
            )));
        }
        let parts: Vec<_> = heads.iter().map(|packed| packed.parts()).collect();
        let signs = heads.iter().map(|packed| HeadSigns {
            signs: packed.keys.signs(),
            centre: packed.keys.centre(),
            full: packed.keys.full_positions(),
        });
        let signs: Vec<_> = signs.collect();
        let bits = |i: usize| {
            let rows = parts.iter().map(|part| &part.bits[i][..]);
            Buffer::of(driver, "2-bit rows", &padded(rows, shape.capacity * d / 4, 0))
        };
        let params = |i: usize| {
            let rows = parts.iter().map(|part| part.params[i].as_flattened());
            let len = shape.capacity * d.div_ceil(32) * 2;
            Buffer::of(driver, "scales of 2-bit rows", &padded(rows, len, f16::ZERO))
        };
        let full = |i: usize| {
            let rows = parts.iter().map(|part| part.full[i]);
            Buffer::of(
                driver,
                "rows in half precision",
                &padded(rows, FULL * d, f16::ZERO),
            )
        };
        let alpha: Vec<f32> = parts.iter().flat_map(|part| part.alpha).copied().collect();
        Ok(Self {
            signs: Signs::of(driver, shape, &signs)?,
            bits: [bits(0)?, bits(1)?],
            params: [params(0)?, params(1)?],
            alpha: Buffer::of(driver, "scales of channels", &alpha)?,
            full: [full(0)?, full(1)?],
            is_signed: parts.iter().all(|part| part.signed),
        })
    }

    /// Room for the cache of a prompt.
    ///
    /// # Errors
    /// Channels that do not come in eights; no memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let (d, heads) = (shape.head_dim, shape.heads());
        if !d.is_multiple_of(8) {
            return Err(Error::failed(format!(
                "CUDA: a 2-bit cache needs a head dimension that is a multiple of 8, not {d}"
            )));
        }
        let rows = heads * shape.capacity;
        let bits = || Buffer::zeros(driver, "2-bit rows", rows * d / 4);
        let params = || {
            let groups = d.div_ceil(QUANT_GROUP);
            Buffer::zeros(driver, "scales of 2-bit rows", rows * groups * 2)
        };
        let full = || Buffer::zeros(driver, "rows in half precision", heads * FULL * d);
        Ok(Self {
            signs: Signs::new(driver, shape)?,
            bits: [bits()?, bits()?],
            params: [params()?, params()?],
            alpha: Buffer::of(driver, "scales of channels", &vec![1.0; heads * d])?,
            full: [full()?, full()?],
            is_signed: true,
        })
    }

    /// The last `m` positions' rows, `[b,g,m,d]` each, with the centre and the scale of the prompt; `positions` counts
    /// them already.
    ///
    /// # Numerics
    /// The rows of [`Packed::extend`] for finite values, bit for bit.
    pub fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        self.signs.append(keys, m, positions)?;
        let shape = &self.signs.shape;
        for (i, rows) in [keys, values].into_iter().enumerate() {
            let heads = [0, shape.kv_heads, shape.sequences];
            self.pack(i, rows.ptr(), heads, [m, shape.head_dim], positions.lens.ptr())?;
        }
        Ok(())
    }

    /// Keys (0) or values (1) of the last `m` positions, `[sequences,heads,m,w]`, of the KV heads from `first` on.
    pub(crate) fn pack(
        &self,
        i: usize,
        rows: Ptr<'_, f32>,
        [first, heads, sequences]: [usize; 3],
        [m, w]: [usize; 2],
        lens: Ptr<'_, u32>,
    ) -> Result<()> {
        let shape = &self.signs.shape;
        let (d, groups) = (shape.head_dim, shape.head_dim.div_ceil(QUANT_GROUP));
        let channel = |buffer| (i == 0).then(|| Buffer::ptr_at(buffer, first * d));
        let blocks = (m * groups).div_ceil(8);
        kernels::PackRows {
            rows,
            centre: channel(&self.signs.centre),
            alpha: channel(&self.alpha),
            lens,
            bits: self.bits[i].ptr_at(first * shape.capacity * (d / 4)),
            params: self.params[i].ptr_at(first * shape.capacity * groups * 2).cast(),
            is_signed: usize::from(self.is_signed),
            m,
            d,
            w,
            capacity: shape.capacity,
        }
        .launch(self.signs.driver, [blocks, heads, sequences])
    }

    /// Keys (0) or values (1) as they are held: bits `[b,g,capacity,d/4]` bytes, scales and zero points
    /// `[b,g,capacity,groups,2]`, and rows in half precision `[b,g,FULL,d]`; waits for the device.
    pub fn read(&self, i: usize) -> Result<(Vec<u8>, Vec<f16>, Vec<f16>)> {
        Ok((self.bits[i].read()?, self.params[i].read()?, self.full[i].read()?))
    }

    /// The largest magnitudes of the channels, `[b,g,d]`; waits for the device.
    pub fn alpha(&self) -> Result<Vec<f32>> {
        self.alpha.read()
    }
}

/// Each of the rows at the begin of `len` values.
fn padded<'a, T: Copy + 'a>(rows: impl Iterator<Item = &'a [T]>, len: usize, zero: T) -> Vec<T> {
    let mut out = Vec::new();
    for row in rows {
        let end = out.len() + len;
        out.extend_from_slice(row);
        out.resize(end, zero);
    }
    out
}
