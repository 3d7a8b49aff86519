//! The 2-bit cache on the GPU: the rows of [`crate::kv::packed`], dequantised when they are attended.

use half::f16;

use super::signs::{FULL, HeadSigns, Signs};
use super::{Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::packed::{Packed, QUANT_GROUP};

/// The cached keys and values of one layer in 2 bits. In arrays of two, keys come first, then values.
pub struct PackedLayer<'d> {
    /// Signs, centre and full-precision tokens; the index of selfindex uses them too.
    pub signs: Signs<'d>,
    /// Quantised values, `[b,g,capacity,d/4]` bytes each.
    pub(crate) bits: [Buffer<'d, u8>; 2],
    /// Scales and zero points, `[b,g,capacity,groups,2]` each.
    pub(crate) params: [Buffer<'d, f16>; 2],
    /// Largest centred magnitude per channel, `[b,g,d]`.
    pub(crate) alpha: Buffer<'d, f32>,
    /// Full-precision rows, `[b,g,FULL,d]` each.
    pub(crate) full: [Buffer<'d, f16>; 2],
    /// Whether keys are stored as signs and magnitudes.
    pub(crate) is_signed: bool,
}

impl<'d> PackedLayer<'d> {
    /// Copies caches built on the CPU, one per KV head of every sequence.
    ///
    /// # Errors
    /// Channels that are no multiple of 8; more positions than the capacity; out of memory.
    pub fn of(driver: &'d dyn Driver, shape: Shape, heads: &[&Packed]) -> Result<Self> {
        let mut layer = Self::new(driver, shape)?;
        let shape = layer.signs.shape;
        let d = shape.head_dim;
        let fits = |packed: &&Packed| packed.len() <= shape.capacity && packed.keys.centre().len() == d;
        if heads.len() != shape.heads() || !heads.iter().all(fits) {
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
        layer.signs = Signs::of(driver, shape, &signs)?;
        let params_len = shape.capacity * d.div_ceil(QUANT_GROUP) * 2;
        for i in 0..2 {
            let bits = parts.iter().map(|part| &part.bits[i][..]);
            let params = parts.iter().map(|part| part.params[i].as_flattened());
            let full = parts.iter().map(|part| part.full[i]);
            layer.bits[i].write(&padded(bits, shape.capacity * d / 4, 0))?;
            layer.params[i].write(&padded(params, params_len, f16::ZERO))?;
            layer.full[i].write(&padded(full, FULL * d, f16::ZERO))?;
        }
        let alpha: Vec<f32> = parts.iter().flat_map(|part| part.alpha).copied().collect();
        layer.alpha.write(&alpha)?;
        layer.is_signed = parts.iter().all(|part| part.signed);
        Ok(layer)
    }

    /// Allocates an empty cache.
    ///
    /// # Errors
    /// Channels that are no multiple of 8; out of memory.
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

    /// Stores the rows of the last `m` positions, `[b,g,m,d]` each, with the centre and the scale of the
    /// prompt; `positions` counts them already.
    ///
    /// # Numerics
    /// Finite values give the same bits as [`Packed::extend`].
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

    /// Quantises keys (`i` = 0) or values (1) of the last `m` positions, `[sequences,heads,m,w]`, of the KV heads
    /// from `first` on.
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

    /// Copies keys (`i` = 0) or values (1) as stored to the host: quantised values `[b,g,capacity,d/4]` bytes,
    /// scales and zero points `[b,g,capacity,groups,2]`, full-precision rows `[b,g,FULL,d]`; waits for the
    /// device.
    pub fn read(&self, i: usize) -> Result<(Vec<u8>, Vec<f16>, Vec<f16>)> {
        Ok((self.bits[i].read()?, self.params[i].read()?, self.full[i].read()?))
    }

    /// Copies the largest centred magnitudes of the channels, `[b,g,d]`, to the host; waits for the device.
    pub fn alpha(&self) -> Result<Vec<f32>> {
        self.alpha.read()
    }
}

/// Concatenates the rows, each padded with `zero` to `len` values.
fn padded<'a, T: Copy + 'a>(rows: impl Iterator<Item = &'a [T]>, len: usize, zero: T) -> Vec<T> {
    let mut out = Vec::new();
    for row in rows {
        let end = out.len() + len;
        out.extend_from_slice(row);
        out.resize(end, zero);
    }
    out
}
