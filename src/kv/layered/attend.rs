//! What a step reads of rows in layers, and its attention over them.

use ndarray::Array2;

use super::{BITS, Layered, LayeredPart};
use crate::compute::attention::codes::{CodeRows, code_bytes};
use crate::compute::attention::{self, CachedRows, GroupQueries, LANES, OutputSums, Run, Segment, StepRows};
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

    /// Calls `f` with the codes of this part in a layer.
    fn with_layer<T>(&self, layer: usize, f: impl FnOnce(&PlaneRows) -> T) -> T {
        let layer = &self.of.layers[layer];
        let segments = layer.segments(layer.len());
        let chunked = self.of.d.next_multiple_of(LANES);
        f(&PlaneRows {
            segments: &segments,
            d: self.of.d,
            stride: code_bytes(BITS, chunked * self.of.parts.len()),
            at: code_bytes(BITS, chunked * self.part),
        })
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
        let mut codes = [vec![0.0; scratch.len()], vec![MIDDLE; scratch.len()]];
        let is_whole = !self.whole_places(&[row as u32]).is_empty();
        for (layer, codes) in codes.iter_mut().enumerate().take(1 + usize::from(is_whole)) {
            self.with_layer(layer, |rows| {
                rows.row(row, codes);
            });
        }
        let codes = codes[0].iter().zip(&codes[1]);
        let channels = part.ranges_of(row).channels();
        for ((x, (upper, lower)), [least, step]) in scratch.iter_mut().zip(codes).zip(channels) {
            *x = (FINER * upper + lower) * step + least;
        }
        part.map.undo(scratch);
        scratch
    }

    fn prefetch(&self, rows: &[u32]) {
        let part = self.part();
        if part.is_waiting() {
            part.waiting.prefetch(rows);
        } else {
            self.with_layer(0, |upper| upper.prefetch(rows));
        }
    }

    /// # Numerics
    /// Queries are multiplied by the steps of the channels and then, as with other rows of codes, rounded to 16 bits. The products
    /// with the two layers are added in f32.
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
            self.with_layer(0, |upper| {
                upper.scores(&scaled, &Run { now: rows, next }, out, stride);
            });
            let least: Vec<f32> = ranges.channels().map(|[least, _]| least).collect();
            let of_middle: Vec<f32> = (0..queries.heads())
                .map(|head| MIDDLE * simd::sum(&scaled.row(head)) as f32)
                .collect();
            for (head, scores) in out.chunks_mut(stride).enumerate() {
                let constant = part.map.constant(&queries.row(head)[..d])
                    + simd::dot(&mapped.row(head)[..d], &least)
                    + of_middle[head];
                for score in &mut scores[..rows.len()] {
                    *score = FINER * *score + constant;
                }
            }
            let places = self.whole_places(rows);
            let whole: Vec<u32> = places.iter().map(|place| rows[*place]).collect();
            let n = whole.len();
            if n == 0 {
                continue;
            }
            let mut finer = vec![0.0; queries.heads() * n];
            self.with_layer(1, |lower| {
                lower.prefetch(&whole);
                lower.scores(&scaled, &Run::new(&whole, n), &mut finer, n);
            });
            for (head, finer) in finer.chunks(n).enumerate() {
                for (place, finer) in places.iter().zip(finer) {
                    out[head * stride + place] += finer - of_middle[head];
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
            let mut upper = Array2::zeros((r, d));
            self.with_layer(0, |layer| layer.add_piece(weights, stride, rows, &mut upper));
            let places = self.whole_places(rows);
            let n = places.len();
            let whole: Vec<u32> = places.iter().map(|place| rows[*place]).collect();
            let own = |head: usize| places.iter().map(move |place| weights[head * stride + place]);
            let own: Vec<f32> = (0..r).flat_map(own).collect();
            let mut lower = Array2::zeros((r, d));
            if n > 0 {
                self.with_layer(1, |layer| layer.add_piece(&own, n, &whole, &mut lower));
            }
            for head in 0..r {
                let all = simd::sum(&weights[head * stride..][..rows.len()]);
                let middle = f64::from(MIDDLE) * (all - simd::sum(&own[head * n..][..n]));
                weight[head] += all;
                let codes = upper.row(head).into_iter().zip(lower.row(head));
                let each = mapped.row_mut(head).into_iter().zip(codes).zip(ranges.channels());
                for ((to, (upper, lower)), [least, step]) in each {
                    let code = f64::from(FINER) * upper + lower + middle;
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

/// The codes of a part in a layer, as rows of numbers from 0 to 15.
struct PlaneRows<'a> {
    segments: &'a [Segment<'a, u8>],
    d: usize,
    /// The bytes from one row to the next, and where those of the part begin.
    stride: usize,
    at: usize,
}

impl<'a> PlaneRows<'a> {
    fn codes(&self) -> CodeRows<'a, BITS> {
        CodeRows::plane(self.segments, self.d, self.stride, self.at)
    }
}

impl CachedRows for PlaneRows<'_> {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, row: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.codes().read(row as u32, scratch);
        scratch
    }

    fn prefetch(&self, rows: &[u32]) {
        attention::prefetch_first(self.codes(), rows);
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        if self.d.is_multiple_of(LANES) {
            self.codes().scores(queries, run, out, stride);
        } else {
            attention::widened_scores(self, queries, run, out, stride);
        }
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        if self.d.is_multiple_of(LANES) {
            self.codes().add(weights, stride, run, sums);
        } else {
            attention::widened_add(self, weights, stride, run, sums);
        }
    }
}
