//! The 2-bit cache on the GPU: the same rows as [`crate::runner::packed`], dequantised as they are attended.

use half::f16;

use super::super::buffer::Buffer;
use super::super::driver::Driver;
use super::Shape;
use super::signs::{FULL, HeadSigns, Signs};
use crate::error::{Error, Result};
use crate::runner::packed::Packed;

/// The cached keys and values of one layer in 2 bits.
pub struct PackedLayer<'d> {
    /// Signs, centre, and the positions in half precision; they serve the index of selfindex too.
    pub signs: Signs<'d>,
    /// `[b,g,capacity,d/4]` bytes each, keys and values.
    pub(super) bits: [Buffer<'d, u8>; 2],
    /// `[b,g,capacity,groups,2]` each: scale and zero point.
    pub(super) params: [Buffer<'d, f16>; 2],
    /// `[b,g,d]`.
    pub(super) alpha: Buffer<'d, f32>,
    /// `[b,g,FULL,d]` each.
    pub(super) full: [Buffer<'d, f16>; 2],
    /// Whether keys are signs and magnitudes.
    pub(super) is_signed: bool,
}

impl<'d> PackedLayer<'d> {
    /// Takes in the caches of prompts, one per KV head of every sequence.
    ///
    /// # Errors
    /// Channels that do not come in eights; more positions than there is room for; no memory.
    pub fn of(driver: &'d dyn Driver, shape: Shape, heads: &[&Packed]) -> Result<Self> {
        let shape = shape.checked()?;
        let d = shape.head_dim;
        let fits = |packed: &&Packed| packed.len() <= shape.capacity && packed.parts().d == d;
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
            let rows = parts.iter().map(|part| part.bits[i]);
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
