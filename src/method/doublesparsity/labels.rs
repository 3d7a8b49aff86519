//! The label cache: a few channels of every key in 4 bits each.

use std::ops::Range;

use half::f16;
use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis};

use crate::kv::lines::AlignedVec;

/// The largest code of a channel.
const LAST: f32 = 15.0;

/// The labels of the keys of one KV head.
///
/// A label holds two codes per byte, the first in the low bits, then a little-endian step and minimum in f16. A channel of
/// a key is about `minimum + step code`.
#[derive(Clone)]
pub(super) struct Labels {
    /// Number of channels per label, c.
    channels: usize,
    rows: AlignedVec<u8>,
}

impl Labels {
    /// Makes an empty cache of labels of `channels` channels.
    pub fn new(channels: usize) -> Self {
        Self {
            channels,
            rows: AlignedVec::with_capacity(0),
        }
    }

    /// Returns the bytes of a label.
    pub fn width(&self) -> usize {
        self.code_bytes() + 2 * size_of::<f16>()
    }

    fn code_bytes(&self) -> usize {
        self.channels.div_ceil(2)
    }

    /// Quantises the channels of a key, `[c]`, and appends the label.
    ///
    /// # Numerics
    /// f32. A code is computed with the step and the minimum before they are rounded to f16. Values beyond the range of
    /// f16 become its largest. If all channels are equal, the codes are 0.
    ///
    /// # Source
    /// The authors' code: between the smallest and the largest value of the key's channels, in 15 equal steps.
    pub fn push(&mut self, key: ArrayView1<f32>) {
        let low = key.iter().copied().fold(f32::INFINITY, f32::min);
        let high = key.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let step = (high - low) / LAST;
        let (width, code_bytes) = (self.width(), self.code_bytes());
        let (codes, scale) = self.rows.add(width).split_at_mut(code_bytes);
        if step > 0.0 {
            for (i, x) in key.iter().enumerate() {
                let code = ((x - low) / step).round().clamp(0.0, LAST) as u8;
                codes[i / 2] |= code << (4 * (i % 2));
            }
        }
        let half = |x: f32| f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()));
        scale.copy_from_slice(bytemuck::bytes_of(&[step, low].map(half)));
    }

    /// Writes the products of queries with the labels of some keys to `out`, `[r,keys]`; the queries hold the channels of
    /// labels, `[r,c]`.
    ///
    /// # Numerics
    /// f32: `minimum (sum of q_i) + step (sum of q_i code_i)`.
    pub fn products(&self, queries: ArrayView2<f32>, keys: Range<usize>, mut out: ArrayViewMut2<f32>) {
        let sums: Vec<f32> = queries.outer_iter().map(|query| query.sum()).collect();
        let mut codes = vec![0.0; self.channels];
        let rows = self.rows[keys.start * self.width()..keys.end * self.width()].chunks_exact(self.width());
        for (row, mut out) in rows.zip(out.columns_mut()) {
            let (packed, scale) = row.split_at(self.code_bytes());
            for (i, code) in codes.iter_mut().enumerate() {
                *code = f32::from(packed[i / 2] >> (4 * (i % 2)) & 15);
            }
            let [step, low] = scale.as_chunks::<2>().0 else {
                continue;
            };
            let [step, low] = [step, low].map(|half| f16::from_le_bytes(*half).to_f32());
            for ((out, query), sum) in out.iter_mut().zip(queries.outer_iter()).zip(&sums) {
                let product: f32 = query.iter().zip(&codes).map(|(q, code)| q * code).sum();
                *out = low * sum + step * product;
            }
        }
    }

    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        self.rows.bytes()
    }
}

/// Picks channels of rows `[n,d]`: `[n,c]`.
pub(super) fn pick(rows: ArrayView2<f32>, channels: &[usize]) -> Array2<f32> {
    rows.select(Axis(1), channels)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    #[test]
    fn labels_have_half_a_byte_per_channel_and_a_scale() {
        let widths = [1, 2, 7, 8, 16].map(|channels| Labels::new(channels).width());
        assert_eq!(widths, [5, 5, 8, 8, 12]);
    }

    /// Products with unit queries read the channels back.
    #[test]
    fn channels_are_within_half_a_step() {
        for channels in [1, 3, 8, 16] {
            let n = 50;
            let keys = Array2::from_shape_vec((n, channels), values(n * channels, 3)).unwrap() * 7.0;
            let mut labels = Labels::new(channels);
            keys.outer_iter().for_each(|key| labels.push(key));
            let mut read = Array2::zeros((channels, n - 10));
            labels.products(Array2::eye(channels).view(), 10..n, read.view_mut());
            for (i, key) in keys.outer_iter().skip(10).enumerate() {
                let range = key.fold(f32::MIN, |m, x| m.max(*x)) - key.fold(f32::MAX, |m, x| m.min(*x));
                // Minimum and range are rounded to f16.
                let bound = range / 30.0 + 14.0 * 2f32.powi(-11);
                for (x, read) in key.iter().zip(read.column(i)) {
                    assert!((x - read).abs() <= bound, "{x} {read} {bound}");
                }
            }
        }
    }

    #[test]
    fn what_half_precision_cannot_hold_saturates() {
        let mut labels = Labels::new(2);
        for key in [[1e6, 1e6], [-1e9, 1e9], [3.0, 3.0], [0.0, 1e-12]] {
            labels.push(ArrayView1::from(&key));
        }
        let mut read = Array2::zeros((2, 4));
        labels.products(Array2::eye(2).view(), 0..4, read.view_mut());
        let largest = f16::MAX.to_f32();
        let expected = [
            [largest, largest],
            [-largest, 14.0 * largest],
            [3.0, 3.0],
            [0.0, 0.0],
        ];
        for (read, expected) in read.columns().into_iter().zip(expected) {
            assert_eq!(read.to_vec(), expected);
        }
    }
}
