//! Cached rows in 4 and 2 bits, after a linear map ([`RowMap`]): a scale and an offset in f16 per 64 channels. Sinks and window
//! stay in bf16 (`ends`).
//!
//! Few channels of keys are much larger than the others, and would take all of the codes' range. A Hadamard rotation spreads them
//! over all channels; a map that calibration fitted also gives the directions that queries look along a smaller error. Queries
//! are mapped once per run of rows, and sums of values are mapped back once per run.

use half::f16;
use ndarray::{Array2, ArrayView1, ArrayView2};

use super::ends::WithEnds;
use super::layout::Layout;
use super::map::RowMap;
use super::qkv::Part;
use super::rows::{Format, RowCache, RowForm, RowStore, RowUnits};
use crate::compute::attention::codes::{CodeRows, GROUP, code_bytes, place, width};
use crate::compute::attention::{CachedRows, GroupQueries, LANES, OutputSums, Run, Segment};
use crate::compute::simd;
use crate::float::{f16_at_least, saturating_f16};
use crate::parameters::Word;

/// The part of the range of a group of channels, around its middle, that codes of some bits span; values beyond it are moved to
/// its ends. Most values are near the middle, and get a smaller error. Chosen on development text of SmolLM2, for keys and
/// values alike (docs/dev/caches.md); smaller parts cut the keys that attention needs most.
const fn span(bits: usize) -> f32 {
    if bits == 4 { 0.97 } else { 0.8 }
}

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
        help: "4 bits after a rotation, and a scale and an offset in f16 per 64 channels; sinks and window in bf16",
    },
};

/// Rows in 2 bits.
pub(super) static INT2: LowBits = LowBits {
    bits: 2,
    word: Word {
        name: "int2",
        help: "2 bits after a rotation, and a scale and an offset in f16 per 64 channels; sinks and window in bf16",
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

    fn maps_rows(&self) -> bool {
        true
    }

    fn cache(&self, _: Part, d: usize, capacity: usize, layout: Layout, map: &RowMap) -> Box<dyn RowCache> {
        let packed: Box<dyn RowCache> = if self.bits == 4 {
            Box::new(Mapped::<Codes<4>>::new(d, capacity, map, 4))
        } else {
            Box::new(Mapped::<Codes<2>>::new(d, capacity, map, 2))
        };
        Box::new(WithEnds::new(d, layout, packed))
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

impl<const BITS: usize> RowUnits for Codes<BITS> {
    type Unit = u8;

    fn width(d: usize) -> usize {
        width(BITS, d)
    }
}

impl<const BITS: usize> RowForm for Codes<BITS> {
    type Rows<'a> = CodeRows<'a, BITS>;
    // Rows whose weights are rounded together.
    const WHOLE_RUNS: bool = true;

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

/// Rounds a row to what a cache in `int4` (4 bits) or `int2` (2 bits) returns for it, sinks and window aside.
pub fn round(row: &mut [f32], map: &RowMap, bits: usize) {
    prepare(row, map, bits);
    let mut units = vec![0; width(bits, row.len())];
    let values = ArrayView1::from(&*row);
    if bits == 4 {
        Codes::<4>::store(values, &mut units);
        Codes::<4>::read(&units, row);
    } else {
        Codes::<2>::store(values, &mut units);
        Codes::<2>::read(&units, row);
    }
    map.undo(row);
}

/// Maps a row, and moves it into the range of its codes.
fn prepare(row: &mut [f32], map: &RowMap, bits: usize) {
    map.apply(row);
    row.chunks_mut(GROUP).for_each(|group| clamp(group, span(bits)));
}

/// Moves the values of a group of channels into a part of their range, around its middle.
fn clamp(group: &mut [f32], part: f32) {
    let least = group.iter().copied().fold(f32::INFINITY, f32::min);
    let most = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Halves, because the range of two floats may be no float.
    let (middle, reach) = (0.5 * least + 0.5 * most, (0.5 * most - 0.5 * least) * part);
    for x in group {
        *x = x.max(middle - reach).min(middle + reach);
    }
}

/// Rows that pass a map when they are stored, and pass it back when they are read.
struct Mapped<F: RowForm> {
    rows: RowStore<F>,
    map: RowMap,
    bits: usize,
}

impl<F: RowForm> Mapped<F> {
    fn new(d: usize, capacity: usize, map: &RowMap, bits: usize) -> Self {
        Self {
            rows: RowStore::new(d, capacity),
            map: map.clone(),
            bits,
        }
    }

    /// Returns how often a sum of rows with these weights has the mean of the map.
    fn weight(&self, weights: &[f32]) -> f32 {
        if self.map.has_mean() {
            simd::sum(weights) as f32
        } else {
            0.0
        }
    }
}

impl<F: RowForm> RowCache for Mapped<F> {
    fn extend(&mut self, rows: ArrayView2<f32>) {
        let mut mapped: Array2<f32> = rows.as_standard_layout().into_owned();
        for mut row in mapped.rows_mut() {
            let row = row.as_slice_mut().expect("a row in standard layout");
            prepare(row, &self.map, self.bits);
        }
        self.rows.extend(mapped.view());
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        Box::new(Self {
            rows: self.rows.forked(),
            map: self.map.clone(),
            ..*self
        })
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(Self {
            rows: self.rows.clone(),
            map: self.map.clone(),
            ..*self
        })
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn bytes(&self) -> usize {
        self.rows.bytes()
    }
}

impl<F: RowForm> CachedRows for Mapped<F> {
    fn dim(&self) -> usize {
        self.rows.dim()
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        let row = self.rows.row(position, scratch).to_vec();
        scratch.copy_from_slice(&row);
        self.map.undo(scratch);
        scratch
    }

    fn prefetch(&self, positions: &[u32]) {
        self.rows.prefetch(positions);
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        let d = self.dim();
        let mapped = queries.mapped(d, |query| self.map.apply_to_query(query));
        self.rows.scores(&mapped, run, out, stride);
        if self.map.has_mean() {
            for (head, scores) in out.chunks_mut(stride).enumerate() {
                let constant = self.map.constant(&queries.row(head)[..d]);
                scores[..run.now.len()].iter_mut().for_each(|s| *s += constant);
            }
        }
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        let d = self.dim();
        let mut own = vec![[0.0; LANES]; sums.values.len()];
        let mut mapped = OutputSums {
            r: sums.r,
            values: &mut own,
        };
        self.rows.add(weights, stride, run, &mut mapped);
        let chunks = own.len() / sums.r;
        let heads = own.chunks_mut(chunks).zip(sums.values.chunks_mut(chunks));
        for (head, (own, to)) in heads.enumerate() {
            let weight = self.weight(&weights[head * stride..][..run.now.len()]);
            self.map.undo_sum(&mut own.as_flattened_mut()[..d], weight);
            let to = to.as_flattened_mut().iter_mut();
            to.zip(own.as_flattened()).for_each(|(to, x)| *to += x);
        }
    }

    /// Maps the sums of the whole piece back at once.
    fn add_piece(&self, weights: &[f32], stride: usize, positions: &[u32], total: &mut Array2<f64>) {
        let mut mapped = Array2::zeros(total.dim());
        self.rows.add_piece(weights, stride, positions, &mut mapped);
        for (head, (mapped, to)) in mapped.rows().into_iter().zip(total.rows_mut()).enumerate() {
            let mut own: Vec<f32> = mapped.iter().map(|x| *x as f32).collect();
            self.map.undo_sum(
                &mut own,
                self.weight(&weights[head * stride..][..positions.len()]),
            );
            to.into_iter().zip(own).for_each(|(to, x)| *to += f64::from(x));
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::layout::Center;
    use super::super::rows::checks;
    use super::*;
    use crate::kv::map::FittedMap;
    use crate::stats::linalg;
    use crate::testing::values;

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
    fn values_are_moved_into_a_part_of_their_range() {
        let mut group = [-1.0, 0.0, 2.5, 3.0];
        clamp(&mut group, 0.5);
        assert_eq!(group, [0.0, 0.0, 2.0, 2.0]);
        clamp(&mut group, 1.0);
        assert_eq!(group, [0.0, 0.0, 2.0, 2.0]);
        let mut extreme = [f32::MAX, f32::MIN];
        clamp(&mut extreme, 0.9);
        assert!(extreme.iter().all(|x| x.is_finite()));
    }

    /// A map that changes lengths, with a mean.
    fn fitted(d: usize) -> RowMap {
        let noise = Array2::from_shape_vec((d, d), values(d * d, 8)).unwrap();
        let forward = Array2::<f64>::eye(d) + noise.mapv(|x| f64::from(x) / d as f64);
        let back = linalg::inverse(forward.view()).unwrap().unwrap();
        let [forward, back] = [forward, back].map(|map| map.iter().map(|x| *x as f32).collect());
        RowMap::Fitted(FittedMap::new(forward, back, values(d, 9)).into())
    }

    #[test]
    fn rows_are_attended_as_they_are_read() {
        for (format, d) in [(&INT4, 64), (&INT2, 128), (&INT4, 80), (&INT4, 20)] {
            for map in [RowMap::Identity, RowMap::Hadamard, fitted(d)] {
                let error = checks::error_of_attention(d, |d| {
                    format.cache(Part::Keys, d, 0, Center::Median.into(), &map)
                });
                // A fitted map adds up d products for every channel, at random; other maps add in log2(d) steps. Scores and sums are
                // rounded twice more; all are below 1. Queries and weights in integers are off by up to 2^-16 of the largest, at
                // random: of d channels of keys, whose codes span about 2, and of 32 rows of values.
                let steps = match map {
                    RowMap::Fitted(_) => 2.0 * (d as f32).sqrt(),
                    _ => d.ilog2() as f32,
                };
                let in_integers = 2.0 * (d as f32).sqrt() * 2f32.powi(-16);
                let bound = (steps + 2.0) * f32::EPSILON + in_integers;
                assert!(error <= bound, "{d} {map:?}: {error}");
            }
        }
    }

    /// A row is read as [`round`] says.
    #[test]
    fn a_cache_rounds_rows_as_told() {
        for (format, bits) in [(&INT4, 4), (&INT2, 2)] {
            for map in [RowMap::Identity, RowMap::Hadamard, fitted(64)] {
                let row: Vec<f32> = values(64, 6)
                    .iter()
                    .map(|x| bf16::from_f32(*x).to_f32())
                    .collect();
                let layout = Layout {
                    sinks: 0,
                    window: 0,
                    ..Center::Median.into()
                };
                let mut cache = format.cache(Part::Keys, 64, 0, layout, &map);
                cache.extend(ArrayView2::from_shape((1, 64), &row).unwrap());
                let (mut expected, mut scratch) = (row.clone(), vec![0.0; 64]);
                round(&mut expected, &map, bits);
                assert_eq!(cache.row(0, &mut scratch), expected);
                assert!(expected.iter().zip(&row).any(|(a, b)| a != b));
            }
        }
    }
}
