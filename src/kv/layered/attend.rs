//! What a step reads of rows in layers, and its attention over them.

use ndarray::Array2;

use super::{BITS, Layered, LayeredPart};
use crate::compute::attention::codes::{CodeRows, code_bytes};
use crate::compute::attention::{self, CachedRows, GroupQueries, LANES, OutputSums, Run, StepRows};
use crate::compute::simd;
use crate::kv::ends::Ends;

/// Codes per code of the upper layer.
const FINER: f32 = 16.0;
/// The mean of the codes of the lower layer, for which a row stands whose lower layer is not read.
const MIDDLE: f32 = 7.5;

/// The rows of a part as a step reads them.
pub struct LayeredRows<'a> {
    pub(super) packed: Packed<'a>,
}

impl LayeredRows<'_> {
    fn ends(&self) -> &Ends {
        &self.packed.part().ends
    }

    /// Returns the row of `position`, which is put into `scratch`.
    pub(super) fn read<'o>(&self, position: usize, scratch: &'o mut [f32]) -> &'o [f32] {
        let mut own = scratch.to_vec();
        let row = self.ends().row(&self.packed, position, &mut own);
        scratch.copy_from_slice(row);
        scratch
    }
}

impl CachedRows for LayeredRows<'_> {
    fn dim(&self) -> usize {
        self.packed.dim()
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.read(position, scratch)
    }

    fn prefetch(&self, positions: &[u32]) {
        self.ends().prefetch(&self.packed, positions);
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        self.ends().scores(&self.packed, queries, run, out, stride);
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        self.ends().add(&self.packed, weights, stride, run, sums);
    }

    fn add_piece(&self, weights: &[f32], stride: usize, positions: &[u32], total: &mut Array2<f64>) {
        self.ends()
            .add_piece(&self.packed, weights, stride, positions, total);
    }
}

/// The packed rows of a part. Positions are counted from the first of them.
#[derive(Clone, Copy)]
pub(super) struct Packed<'a> {
    pub of: &'a Layered,
    pub part: usize,
    /// The positions, sinks included, of the rows that are read in both layers; `None` for all.
    pub whole: Option<&'a [u32]>,
}

impl<'a> Packed<'a> {
    fn part(&self) -> &'a LayeredPart {
        &self.of.parts[self.part]
    }

    /// Calls `f` with the codes of this part: those of both layers joined, or the upper ones.
    fn with_codes<T>(&self, whole: bool, f: impl FnOnce(&dyn CachedRows) -> T) -> T {
        let layers = &self.of.layers;
        let [upper, lower] = [&layers[0], &layers[1]].map(|layer| layer.segments(layer.len()));
        let chunked = self.of.d.next_multiple_of(LANES);
        let (stride, at) = (
            code_bytes(BITS, chunked * self.of.parts.len()),
            code_bytes(BITS, chunked * self.part),
        );
        if whole {
            f(&Codes(
                CodeRows::joined([&upper, &lower], self.of.d, stride, at),
                self.of.d,
            ))
        } else {
            f(&Codes(
                CodeRows::<BITS>::plane(&upper, self.of.d, stride, at),
                self.of.d,
            ))
        }
    }

    /// Returns the places of rows, those that are read whole and then the others; no places for one of them if it has all rows.
    fn sorted(&self, rows: &[u32]) -> [Option<Vec<usize>>; 2] {
        let whole = self.whole_places(rows);
        if whole.len() == rows.len() {
            return [None, Some(Vec::new())];
        }
        if whole.is_empty() {
            return [Some(whole), None];
        }
        let mut next = whole.iter().copied().peekable();
        let others = (0..rows.len()).filter(|place| next.next_if_eq(place).is_none());
        let others = others.collect();
        [Some(whole), Some(others)]
    }

    /// Returns the places, in `rows`, of the rows that are read in both layers.
    fn whole_places(&self, rows: &[u32]) -> Vec<usize> {
        let Some(whole) = self.whole else {
            return (0..rows.len()).collect();
        };
        let sinks = self.part().ends.sinks() as u32;
        let from = whole.partition_point(|p| *p < rows[0] + sinks);
        let mut whole = whole[from..].iter().map(|p| p - sinks).peekable();
        let is_whole = |row: u32| {
            while whole.next_if(|p| *p < row).is_some() {}
            whole.next_if_eq(&row).is_some()
        };
        let places = rows.iter().copied().map(is_whole).enumerate();
        places.filter_map(|(i, is_whole)| is_whole.then_some(i)).collect()
    }
}

impl CachedRows for Packed<'_> {
    fn dim(&self) -> usize {
        self.of.d
    }

    fn row<'a>(&'a self, row: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        let part = self.part();
        if part.is_waiting() {
            return part.waiting.row(row, scratch);
        }
        let is_whole = !self.whole_places(&[row as u32]).is_empty();
        self.with_codes(is_whole, |rows| {
            rows.row(row, scratch);
        });
        for (x, [least, step]) in scratch.iter_mut().zip(part.ranges_of(row).channels()) {
            *x = whole_code(is_whole, *x) * step + least;
        }
        part.map.undo(scratch);
        scratch
    }

    fn prefetch(&self, rows: &[u32]) {
        let part = self.part();
        if part.is_waiting() {
            part.waiting.prefetch(rows);
        } else {
            self.with_codes(false, |upper| upper.prefetch(rows));
        }
    }

    /// # Numerics
    /// Queries are multiplied by the steps of the channels and then, as with other rows of codes, rounded to 16 bits.
    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        let (part, d) = (self.part(), self.of.d);
        if part.is_waiting() {
            return part.waiting.scores(queries, run, out, stride);
        }
        let mapped = queries.mapped(d, |query| part.map.apply_to_query(query));
        for (ranges, at, rows) in part.by_ranges(run.now) {
            let out = &mut out[at..];
            let scaled = mapped.times(&ranges.steps());
            let rest = &run.now[at + rows.len()..];
            let next = if rest.is_empty() { run.next } else { rest };
            let least: Vec<f32> = ranges.channels().map(|[least, _]| least).collect();
            let constant: Vec<f32> = (0..queries.heads())
                .map(|head| {
                    part.map.constant(&queries.row(head)[..d]) + simd::dot(&mapped.row(head)[..d], &least)
                })
                .collect();
            let of_middle: Vec<f32> = (0..queries.heads())
                .map(|head| MIDDLE * simd::sum(&scaled.row(head)) as f32)
                .collect();
            for (places, is_whole) in self.sorted(rows).into_iter().zip([true, false]) {
                let score = |score: f32, head: usize| {
                    if is_whole {
                        score + constant[head]
                    } else {
                        FINER * score + (of_middle[head] + constant[head])
                    }
                };
                let Some(places) = places else {
                    self.with_codes(is_whole, |codes| {
                        codes.scores(&scaled, &Run { now: rows, next }, out, stride);
                    });
                    for (head, scores) in out.chunks_mut(stride).enumerate() {
                        scores[..rows.len()]
                            .iter_mut()
                            .for_each(|own| *own = score(*own, head));
                    }
                    continue;
                };
                let n = places.len();
                if n == 0 {
                    continue;
                }
                let own: Vec<u32> = places.iter().map(|place| rows[*place]).collect();
                let mut scores = vec![0.0; queries.heads() * n];
                let next = if is_whole { &[] } else { next };
                self.with_codes(is_whole, |codes| {
                    if is_whole {
                        codes.prefetch(&own);
                    }
                    codes.scores(&scaled, &Run { now: &own, next }, &mut scores, n);
                });
                for (head, scores) in scores.chunks(n).enumerate() {
                    for (place, own) in places.iter().zip(scores) {
                        out[head * stride + place] = score(*own, head);
                    }
                }
            }
        }
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        let (d, r) = (self.of.d, sums.r);
        let mut total = Array2::zeros((r, d));
        self.add_piece(weights, stride, run.now, &mut total);
        let heads = sums.values.chunks_mut(d.div_ceil(LANES));
        for (to, total) in heads.zip(total.rows()) {
            let to = to.as_flattened_mut().iter_mut();
            to.zip(total).for_each(|(to, x)| *to += *x as f32);
        }
    }

    /// Sums codes, and maps the sums of the whole piece back at once.
    fn add_piece(&self, weights: &[f32], stride: usize, rows: &[u32], total: &mut Array2<f64>) {
        let part = self.part();
        if part.is_waiting() {
            return part.waiting.add_piece(weights, stride, rows, total);
        }
        let (r, d) = total.dim();
        let (mut mapped, mut weight) = (Array2::<f64>::zeros((r, d)), vec![0.0; r]);
        for (ranges, at, rows) in part.by_ranges(rows) {
            let weights = &weights[at..];
            let mut codes = Array2::<f64>::zeros((r, d));
            for (places, is_whole) in self.sorted(rows).into_iter().zip([true, false]) {
                let mut sums = Array2::zeros((r, d));
                // The sum of the weights of these rows, per head.
                let all: Vec<f64> = if let Some(places) = places {
                    let n = places.len();
                    if n == 0 {
                        continue;
                    }
                    let own: Vec<u32> = places.iter().map(|place| rows[*place]).collect();
                    let of = |head: usize| places.iter().map(move |place| weights[head * stride + place]);
                    let of: Vec<f32> = (0..r).flat_map(of).collect();
                    self.with_codes(is_whole, |rows| rows.add_piece(&of, n, &own, &mut sums));
                    of.chunks(n).map(simd::sum).collect()
                } else {
                    self.with_codes(is_whole, |codes| {
                        codes.add_piece(weights, stride, rows, &mut sums)
                    });
                    let of = |head: usize| simd::sum(&weights[head * stride..][..rows.len()]);
                    (0..r).map(of).collect()
                };
                for ((mut to, sums), all) in codes.rows_mut().into_iter().zip(sums.rows()).zip(all) {
                    let middle = f64::from(MIDDLE) * all;
                    let each = to.iter_mut().zip(sums);
                    each.for_each(|(to, sum)| {
                        *to += if is_whole {
                            *sum
                        } else {
                            f64::from(FINER) * sum + middle
                        };
                    });
                }
            }
            for head in 0..r {
                let all = simd::sum(&weights[head * stride..][..rows.len()]);
                weight[head] += all;
                let each = mapped
                    .row_mut(head)
                    .into_iter()
                    .zip(codes.row(head))
                    .zip(ranges.channels());
                for ((to, code), [least, step]) in each {
                    *to += code * f64::from(step) + all * f64::from(least);
                }
            }
        }
        for ((mapped, weight), to) in mapped.rows().into_iter().zip(weight).zip(total.rows_mut()) {
            let mut own: Vec<f32> = mapped.iter().map(|x| *x as f32).collect();
            part.map.undo_sum(&mut own, weight as f32);
            to.into_iter().zip(own).for_each(|(to, x)| *to += f64::from(x));
        }
    }
}

/// Returns the number from 0 to 255 for which a code stands, that of both layers or of the upper one.
fn whole_code(is_whole: bool, code: f32) -> f32 {
    if is_whole { code } else { FINER * code + MIDDLE }
}

/// The codes of a part, as rows of numbers, of d channels.
struct Codes<'a, const OF: usize>(CodeRows<'a, OF>, usize);

impl<const OF: usize> CachedRows for Codes<'_, OF> {
    fn dim(&self) -> usize {
        self.1
    }

    fn row<'a>(&'a self, row: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.0.read(row as u32, scratch);
        scratch
    }

    fn prefetch(&self, rows: &[u32]) {
        attention::prefetch_first(self.0, rows);
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        if self.1.is_multiple_of(LANES) {
            self.0.scores(queries, run, out, stride);
        } else {
            attention::widened_scores(self, queries, run, out, stride);
        }
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        if self.1.is_multiple_of(LANES) {
            self.0.add(weights, stride, run, sums);
        } else {
            attention::widened_add(self, weights, stride, run, sums);
        }
    }
}
