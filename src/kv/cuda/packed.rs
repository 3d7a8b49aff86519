//! The 2-bit cache on the GPU: the rows of [`crate::kv::packed`], dequantised when they are attended.

use half::f16;

use super::signs::{FULL, Signs};
use super::{Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::packed::QUANT_GROUP;

/// The cached keys and values of one layer in 2 bits. In arrays of two, keys come first, then values.
pub struct PackedLayer<'d> {
    /// Signs, center and full-precision tokens; the index of selfindex uses them too.
    pub signs: Signs<'d>,
    /// Quantised values, `[b,g,capacity,d/4]` bytes each.
    pub bits: [Buffer<'d, u8>; 2],
    /// Scales and zero points, `[b,g,capacity,groups,2]` each.
    pub params: [Buffer<'d, f16>; 2],
    /// Largest centered magnitude per channel, `[b,g,d]`.
    pub alpha: Buffer<'d, f32>,
    /// Full-precision rows, `[b,g,FULL,d]` each.
    pub full: [Buffer<'d, f16>; 2],
    /// Whether keys are stored as signs and magnitudes.
    pub is_signed: bool,
}

impl<'d> PackedLayer<'d> {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// Channels that are no multiple of 8; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let (d, heads) = (shape.head_dim, shape.heads());
        if !d.is_multiple_of(8) {
            return Err(Error::unsupported(format!(
                "CUDA: a 2-bit cache needs a head dimension that is a multiple of 8, not {d}"
            ))
            .hint("use ⟨device=cpu⟩"));
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
            alpha: Buffer::from_slice(driver, "scales of channels", &vec![1.0; heads * d])?,
            full: [full()?, full()?],
            is_signed: true,
        })
    }

    /// Stores the rows of the last `m` positions, `[b,g,m,d]` each, with the center and the scale of the
    /// prompt; `positions` counts them already.
    ///
    /// # Numerics
    /// Finite values give the same bits as [`Packed::extend`](crate::kv::packed::Packed::extend).
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
            centers: channel(&self.signs.centers),
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
}
