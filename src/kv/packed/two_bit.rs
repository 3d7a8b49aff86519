//! Rows quantised to 2 bits per value.

use half::f16;

use super::QUANT_GROUP;
use crate::float::saturating_f16;
use crate::kv::lines::AlignedVec;
use crate::prefetch::prefetch_row;

/// A smaller step counts as zero: the values of the group are taken as equal.
const LEAST_STEP: f32 = 1e-8;

/// Rows in 2 bits per value, with a scale and a zero point in f16 per [`QUANT_GROUP`] channels.
///
/// A row holds four values per byte, the first in the lowest bits, then a little-endian scale and zero
/// point per group; the last group may be shorter.
#[derive(Clone)]
pub(super) struct TwoBit {
    pub(super) d: usize,
    /// Bytes of a row.
    width: usize,
    rows: AlignedVec<u8>,
}

impl TwoBit {
    pub(super) fn new(d: usize, capacity: usize) -> Self {
        let width = width(d);
        let rows = AlignedVec::with_capacity(capacity * width);
        Self { d, width, rows }
    }

    /// Quantises and appends a row.
    ///
    /// # Source
    /// Eq. 9-11: z = min x, s = (max x - min x) / 3, Q = round((x - z) / s). Codes are computed with the
    /// scale and zero point before their rounding to f16.
    pub(super) fn push(&mut self, row: &[f32]) {
        let (bits, params) = self.rows.add(self.width).split_at_mut(self.d.div_ceil(4));
        let groups = row.chunks(QUANT_GROUP).zip(params.as_chunks_mut::<4>().0);
        for (g, (group, params)) in groups.enumerate() {
            let low = group.iter().copied().fold(f32::INFINITY, f32::min);
            let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let step = match (high - low) / 3.0 {
                step if step < LEAST_STEP => 0.0,
                step => step,
            };
            *params = bytemuck::cast([step, low].map(saturating_f16));
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

    /// Returns the bytes of a row.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> &[u8] {
        &self.rows[row * self.width..][..self.width]
    }

    /// Prefetches a row.
    #[inline(always)]
    pub(super) fn prefetch(&self, row: usize) {
        prefetch_row(&self.rows, row, self.width);
    }

    /// Dequantises a row: Q s + z for every channel.
    pub(super) fn read(&self, row: usize, out: &mut [f32]) {
        let (bits, params) = self.row(row).split_at(self.d.div_ceil(4));
        let groups = out.chunks_mut(QUANT_GROUP).zip(params.as_chunks::<4>().0);
        for (g, (group, params)) in groups.enumerate() {
            let [step, zero] = pair(*params).map(f16::to_f32);
            for (i, x) in group.iter_mut().enumerate() {
                let channel = g * QUANT_GROUP + i;
                let code = bits[channel / 4] >> (2 * (channel % 4)) & 3;
                *x = f32::from(code) * step + zero;
            }
        }
    }

    /// Returns the quantised values of all rows, without scales and zero points.
    pub(super) fn bits(&self) -> Vec<u8> {
        let rows = self.rows.chunks_exact(self.width);
        rows.flat_map(|row| &row[..self.d.div_ceil(4)]).copied().collect()
    }

    /// Returns the scales and zero points of all rows.
    pub(super) fn params(&self) -> Vec<[f16; 2]> {
        let rows = self.rows.chunks_exact(self.width);
        let params = rows.flat_map(|row| row[self.d.div_ceil(4)..].as_chunks::<4>().0);
        params.map(|params| pair(*params)).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len() / self.width
    }

    pub(super) fn clear(&mut self) {
        self.rows.clear();
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.bytes()
    }
}

/// Returns the bytes of a row of d values.
pub(super) fn width(d: usize) -> usize {
    d.div_ceil(4) + 4 * d.div_ceil(QUANT_GROUP)
}

/// Decodes a scale and a zero point.
#[inline(always)]
pub(super) fn pair(params: [u8; 4]) -> [f16; 2] {
    bytemuck::cast(params)
}
