//! Cached rows in 4 and 2 bits, rotated by a Hadamard matrix: a scale and an offset in f16 per 64 channels. Sinks and window stay
//! in bf16 (`ends`).
//!
//! Few channels of keys are much larger than the others, and would take all of the codes' range. A Hadamard matrix spreads them
//! over all channels, and changes no product: `(q H) . (k H) = q . k`. Queries are rotated once per run of rows, and sums of
//! values are rotated back once per run.

use half::f16;
use ndarray::{Array2, ArrayView1, ArrayView2};

use super::ends::WithEnds;
use super::layout::Layout;
use super::rows::{Format, Part, RowCache, RowForm, RowStore};
use crate::compute::attention::codes::{CodeRows, GROUP, code_bytes, place, width};
use crate::compute::attention::{CachedRows, GroupQueries, LANES, OutputSums, Run, Segment};
use crate::float::{f16_at_least, saturating_f16};
use crate::parameters::Word;

/// A format of rows in few bits.
pub(super) struct LowBits {
    bits: usize,
    word: Word,
}

/// Rows in 4 bits.
pub(super) static INT4: LowBits = LowBits {
    bits: 4,
    word: Word {
        name: "int4",
        help: "4 bits after a Hadamard rotation, and a scale and an offset in f16 per 64 channels; sinks and window in bf16",
    },
};

/// Rows in 2 bits.
pub(super) static INT2: LowBits = LowBits {
    bits: 2,
    word: Word {
        name: "int2",
        help: "2 bits after a Hadamard rotation, and a scale and an offset in f16 per 64 channels; sinks and window in bf16",
    },
};

impl Format for LowBits {
    fn word(&self) -> Word {
        self.word
    }

    fn arrays(&self, _: Part, d: usize) -> [Option<usize>; 2] {
        [Some(width(self.bits, d)), None]
    }

    fn keeps_rows(&self) -> bool {
        false
    }

    fn end_bytes(&self, d: usize) -> Option<usize> {
        Some(2 * d)
    }

    fn cache(&self, _: Part, d: usize, capacity: usize, layout: Layout) -> Box<dyn RowCache> {
        let packed: Box<dyn RowCache> = if self.bits == 4 {
            Box::new(Rotated(RowStore::<Codes<4>>::new(d, capacity)))
        } else {
            Box::new(Rotated(RowStore::<Codes<2>>::new(d, capacity)))
        };
        Box::new(WithEnds::new(d, layout, packed))
    }
}

/// Rotates a row by the Hadamard matrix of its length, whose inverse it is itself. A length that is no power of two is cut into
/// powers of two, the largest first.
pub(super) fn rotate(row: &mut [f32]) {
    let mut rest = row;
    while !rest.is_empty() {
        let (block, others) = rest.split_at_mut(1 << rest.len().ilog2());
        let mut half = 1;
        while half < block.len() {
            for pair in block.chunks_exact_mut(2 * half) {
                let (low, high) = pair.split_at_mut(half);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        let scale = 1.0 / (block.len() as f32).sqrt();
        block.iter_mut().for_each(|x| *x *= scale);
        rest = others;
    }
}

/// A row as [`CodeRows`] describes it.
///
/// # Numerics
/// The offset is the least value of the group, rounded to f16, and the scale s the least f16 with which the codes reach the
/// largest value. A channel x is stored as `round((x - offset) / s)`, and read as the code times s, plus the offset, each rounded
/// to f32.
pub(super) struct Codes<const BITS: usize>;

impl<const BITS: usize> Codes<BITS> {
    /// The largest code.
    const MOST: f32 = ((1 << BITS) - 1) as f32;
}

impl<const BITS: usize> RowForm for Codes<BITS> {
    type Unit = u8;
    type Rows<'a> = CodeRows<'a, BITS>;
    // Rows whose weights are rounded together.
    const WHOLE_RUNS: bool = true;

    fn width(d: usize) -> usize {
        width(BITS, d)
    }

    fn is_chunked(d: usize) -> bool {
        d.is_multiple_of(LANES)
    }

    fn store(row: ArrayView1<f32>, to: &mut [u8]) {
        let d = row.len();
        let (codes, scales) = to.split_at_mut(code_bytes(BITS, d));
        for (first, pair) in (0..d).step_by(GROUP).zip(scales.as_chunks_mut::<4>().0) {
            let group = || row.iter().skip(first).take(GROUP);
            let least = group().copied().fold(f32::INFINITY, f32::min);
            let most = group().copied().fold(f32::NEG_INFINITY, f32::max);
            let offset = saturating_f16(least);
            let step = f16_at_least(((most - offset.to_f32()) / Self::MOST).max(0.0));
            *pair = bytemuck::cast([step, offset]);
            if step == f16::ZERO {
                continue;
            }
            let (step, offset) = (step.to_f32(), offset.to_f32());
            for (i, x) in group().enumerate() {
                let code = ((x - offset) / step).round().clamp(0.0, Self::MOST) as u8;
                let (byte, bit) = place(BITS, first + i);
                codes[byte] |= code << bit;
            }
        }
    }

    fn read<'o>(row: &'o [u8], scratch: &'o mut [f32]) -> &'o [f32] {
        let (codes, scales) = row.split_at(code_bytes(BITS, scratch.len()));
        for (first, (group, pair)) in (0..)
            .step_by(GROUP)
            .zip(scratch.chunks_mut(GROUP).zip(scales.as_chunks::<4>().0))
        {
            let [step, offset] = bytemuck::cast::<_, [f16; 2]>(*pair).map(f16::to_f32);
            for (i, x) in group.iter_mut().enumerate() {
                let (byte, bit) = place(BITS, first + i);
                let code = codes[byte] >> bit & Self::MOST as u8;
                *x = f32::from(code) * step + offset;
            }
        }
        scratch
    }

    fn rows<'a>(segments: &'a [Segment<'a, u8>], d: usize) -> CodeRows<'a, BITS> {
        CodeRows::new(segments, d)
    }
}

/// Rows that are rotated when they are stored, and rotated back when they are read.
struct Rotated<F: RowForm>(RowStore<F>);

impl<F: RowForm> RowCache for Rotated<F> {
    fn extend(&mut self, rows: ArrayView2<f32>) {
        let mut rotated: Array2<f32> = rows.as_standard_layout().into_owned();
        for mut row in rotated.rows_mut() {
            rotate(row.as_slice_mut().expect("a row in standard layout"));
        }
        self.0.extend(rotated.view());
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        Box::new(Self(self.0.forked()))
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(Self(self.0.clone()))
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl<F: RowForm> CachedRows for Rotated<F> {
    fn dim(&self) -> usize {
        self.0.dim()
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        let row = self.0.row(position, scratch).to_vec();
        scratch.copy_from_slice(&row);
        rotate(scratch);
        scratch
    }

    fn prefetch(&self, positions: &[u32]) {
        self.0.prefetch(positions);
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        let rotated = queries.mapped(self.dim(), rotate);
        self.0.scores(&rotated, run, out, stride);
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        let d = self.dim();
        let mut own = vec![[0.0; LANES]; sums.values.len()];
        let mut rotated = OutputSums {
            r: sums.r,
            values: &mut own,
        };
        self.0.add(weights, stride, run, &mut rotated);
        let chunks = own.len() / sums.r;
        for (of_head, to) in own.chunks_mut(chunks).zip(sums.values.chunks_mut(chunks)) {
            rotate(&mut of_head.as_flattened_mut()[..d]);
            let to = to.as_flattened_mut().iter_mut();
            to.zip(of_head.as_flattened()).for_each(|(to, x)| *to += x);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Center;
    use super::super::rows::checks;
    use super::*;
    use crate::testing::values;

    #[test]
    fn a_rotation_keeps_products_and_is_its_own_inverse() {
        for d in [1, 2, 16, 64, 80, 96, 100, 128] {
            let (a, b) = (values(d, 1), values(d, 2));
            let (mut x, mut y) = (a.clone(), b.clone());
            rotate(&mut x);
            rotate(&mut y);
            let product = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            assert!((product(&a, &b) - product(&x, &y)).abs() < 1e-4 * d as f64, "{d}");
            rotate(&mut x);
            assert!(a.iter().zip(&x).all(|(a, x)| (a - x).abs() < 1e-5), "{d}");
        }
        let mut row = [1.0, 0.0, 0.0, 0.0];
        rotate(&mut row);
        assert_eq!(row, [0.5; 4]);
    }

    fn read_back<const BITS: usize>(row: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut units = vec![0; width(BITS, row.len())];
        Codes::<BITS>::store(ArrayView1::from(row), &mut units);
        let mut out = vec![0.0; row.len()];
        Codes::<BITS>::read(&units, &mut out);
        (units, out)
    }

    #[test]
    fn small_rows_have_these_bytes() {
        let row: Vec<f32> = (0..16).map(|i| i as f32 - 3.0).collect();
        let (units, out) = read_back::<4>(&row);
        assert_eq!(units[..8], [0x80, 0x91, 0xa2, 0xb3, 0xc4, 0xd5, 0xe6, 0xf7]);
        assert_eq!(units[8..], [0x00, 0x3c, 0x00, 0xc2]);
        assert_eq!(out, row);
        let row: Vec<f32> = (0..16).map(|i| (i % 4) as f32).collect();
        let (units, out) = read_back::<2>(&row);
        assert_eq!(units[..], [0xe4, 0xe4, 0xe4, 0xe4, 0x00, 0x3c, 0x00, 0x00]);
        assert_eq!(out, row);
        assert_eq!([width(4, 64), width(2, 64), width(4, 128)], [36, 20, 72]);
    }

    #[test]
    fn an_error_is_at_most_half_a_step_and_extremes_stay_finite() {
        for d in [1, 20, 64, 65, 128] {
            let row: Vec<f32> = values(d, 3).iter().map(|x| 10.0 * x - 4.0).collect();
            let check = |out: &[f32], most: f32| {
                for (group, read) in row.chunks(GROUP).zip(out.chunks(GROUP)) {
                    let [low, high] = [f32::min, f32::max].map(|of| group.iter().copied().fold(group[0], of));
                    // The offset is rounded to 11 bits; channels below it are read as the offset. The scale is rounded up to 11 bits,
                    // or to a multiple of 2^-24.
                    let offset = low.abs() * 2f32.powi(-11);
                    let step = (high - low + offset) / most * (1.0 + 2f32.powi(-10)) + 2f32.powi(-24);
                    // What f32 rounds when it takes the offset away and adds it again.
                    let rounding = 2.0 * low.abs().max(high.abs()) * f32::EPSILON;
                    let off = group.iter().zip(read).map(|(x, y)| (x - y).abs());
                    assert!(
                        off.fold(0.0, f32::max) <= f32::max(0.5 * step, offset) + rounding,
                        "{d}"
                    );
                }
            };
            check(&read_back::<4>(&row).1, 15.0);
            check(&read_back::<2>(&row).1, 3.0);
        }
        for extreme in [1e30, -1e30, f32::MAX, 1e-30] {
            for out in [
                read_back::<4>(&[extreme, 0.0]).1,
                read_back::<2>(&[extreme, 0.0]).1,
            ] {
                assert!(out.iter().all(|x| x.is_finite()), "{extreme}");
            }
        }
        assert_eq!(read_back::<4>(&[2.5; 70]).1, [2.5; 70]);
    }

    #[test]
    fn rows_are_attended_as_they_are_read() {
        for (format, d) in [(&INT4, 64), (&INT2, 128), (&INT4, 80), (&INT4, 20)] {
            let error =
                checks::error_of_attention(d, |d| format.cache(Part::Keys, d, 0, Center::Median.into()));
            // Scores and sums are rounded in each of the log2(d) steps of a rotation, and twice more; all are below 1. Queries and
            // weights in integers are off by up to 2^-16 of the largest, at random: of d channels of keys, whose codes span about 2,
            // and of 32 rows of values.
            let in_integers = 2.0 * (d as f32).sqrt() * 2f32.powi(-16);
            let bound = (d.ilog2() + 2) as f32 * f32::EPSILON + in_integers;
            assert!(error <= bound, "{d}: {error}");
        }
    }
}
