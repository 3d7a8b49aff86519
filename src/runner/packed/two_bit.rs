//! Values in 2 bits.

use half::f16;

use super::QUANT_GROUP;
use crate::runner::lines::Lines;

/// A step below this is taken for zero: the group's values are equal.
const LEAST_STEP: f32 = 1e-8;

/// Rows of values in 2 bits, with a scale and a zero point in f16 per [`QUANT_GROUP`] channels.
#[derive(Clone)]
pub(super) struct TwoBit {
    pub(super) d: usize,
    /// Four values a byte, the first in the lowest bits; every row starts a byte.
    pub(super) bits: Lines<u8>,
    /// Scale and zero point; the last group of a row may be shorter.
    pub(super) params: Lines<[f16; 2]>,
}

impl TwoBit {
    pub(super) fn new(d: usize, capacity: usize) -> Self {
        Self {
            d,
            bits: Lines::with_capacity(capacity * d.div_ceil(4)),
            params: Lines::with_capacity(capacity * d.div_ceil(QUANT_GROUP)),
        }
    }

    /// Appends a row.
    ///
    /// # Source
    /// Eq. 9-11: z = min x, s = (max x - min x) / 3, Q = round((x - z) / s). The codes come from the
    /// unrounded scale and zero point.
    pub(super) fn push(&mut self, row: &[f32]) {
        let bits = self.bits.add(self.d.div_ceil(4));
        for (g, group) in row.chunks(QUANT_GROUP).enumerate() {
            let low = group.iter().copied().fold(f32::INFINITY, f32::min);
            let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let step = match (high - low) / 3.0 {
                step if step < LEAST_STEP => 0.0,
                step => step,
            };
            self.params.push([saturating_f16(step), saturating_f16(low)]);
            if step == 0.0 {
                continue;
            }
            for (i, x) in group.iter().enumerate() {
                let code = ((x - low) / step).round().clamp(0.0, 3.0) as u8;
                let channel = g * QUANT_GROUP + i;
                bits[channel / 4] |= code << (2 * (channel % 4));
            }
        }
    }

    /// Q s + z of every channel.
    pub(super) fn read(&self, row: usize, out: &mut [f32]) {
        let bits = &self.bits[row * self.d.div_ceil(4)..];
        let groups = self.d.div_ceil(QUANT_GROUP);
        let params = &self.params[row * groups..(row + 1) * groups];
        for (g, (group, [step, zero])) in out.chunks_mut(QUANT_GROUP).zip(params).enumerate() {
            let (step, zero) = (step.to_f32(), zero.to_f32());
            for (i, x) in group.iter_mut().enumerate() {
                let channel = g * QUANT_GROUP + i;
                let code = bits[channel / 4] >> (2 * (channel % 4)) & 3;
                *x = f32::from(code) * step + zero;
            }
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.bits.bytes() + self.params.bytes()
    }
}

/// The nearest f16, the largest one for values beyond.
pub(super) fn saturating_f16(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}
