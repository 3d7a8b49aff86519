//! Cached rows in two layers of 4 bits, after a linear map ([`RowMap`]): reads of the upper layer give 4 bits of a number, reads of
//! both layers 8. A step reads both layers of the rows that matter most, and the upper one of the others. Sinks and window stay
//! in bf16 (`ends`).
//!
//! Every channel has one range for all rows, so that a row has no bytes but its codes. Where keys and values are both in this
//! format, those of a position lie side by side: with 64 channels, each layer of them is one cache line.

use bytemuck::TransparentWrapper;
use half::{bf16, f16};
use ndarray::{Array2, ArrayView1, ArrayView2, Axis};

use super::ends::Ends;
use super::layout::Layout;
use super::map::{HeadMaps, RowMap};
use super::rows::{Format, Part, RowCache, RowForm, RowStore};
use crate::compute::attention::codes::{CodeRows, code_bytes, place};
use crate::compute::attention::{self, CachedRows, GroupQueries, LANES, OutputSums, Run, Segment, StepRows};
use crate::compute::simd;
use crate::float::{f16_at_least, saturating_f16};
use crate::parameters::Word;

/// Rows that fix the first ranges. Until as many have left the window, they wait in bf16.
pub const FIRST: usize = 256;
/// The range of a channel, over that of its numbers in the rows seen so far: the rows to come exceed what was seen. Chosen on
/// development text of SmolLM2 (docs/dev/caches.md).
const SPAN: f32 = 1.2;
/// The largest code of both layers.
const MOST: f32 = 255.0;
/// Codes per code of the upper layer.
const FINER: f32 = 16.0;
/// The mean of the codes of the lower layer, for which a row stands whose lower layer is not read.
const MIDDLE: f32 = 7.5;
/// How far beyond the range of its channel, in codes, a number may be that is moved to the end of the range: an eighth of the
/// range. A number beyond that gives all channels new ranges, from its row on.
const BEYOND: f32 = 32.0;
/// Bits of a layer.
const BITS: usize = 4;

/// The format of rows in layers.
pub(super) struct Layers;

impl Format for Layers {
    fn word(&self) -> Word {
        Word {
            name: "int4+4",
            help: "two layers of 4 bits after a rotation, with a range per channel: steps read both layers of the best of the chosen rows, and the upper layer of the rest; sinks and window in bf16",
        }
    }

    fn arrays(&self, _: Part, d: usize) -> [Option<usize>; 2] {
        [Some(code_bytes(BITS, d)); 2]
    }

    fn is_layered(&self) -> bool {
        true
    }

    fn first_packed(&self) -> usize {
        FIRST
    }

    /// The first ranges; few texts have several.
    fn shared_bytes(&self, d: usize) -> usize {
        2 * d * size_of::<f16>()
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
        Box::new(Layered::new(d, capacity, layout, [map]))
    }
}

/// A layer of the rows of a position: codes of 4 bits in the order of [`CodeRows`], of keys or values, or of both.
struct Plane;

impl RowForm for Plane {
    type Unit = u8;
    type Rows<'a> = CodeRows<'a, BITS>;
    const WHOLE_RUNS: bool = true;

    /// `d` counts the channels of all parts, in whole chunks.
    fn width(d: usize) -> usize {
        code_bytes(BITS, d)
    }

    fn is_chunked(_: usize) -> bool {
        true
    }

    fn store(row: ArrayView1<f32>, to: &mut [u8]) {
        for (channel, code) in row.iter().enumerate() {
            let (byte, bit) = place(BITS, channel);
            to[byte] |= (*code as u8) << bit;
        }
    }

    fn read<'o>(row: &'o [u8], scratch: &'o mut [f32]) -> &'o [f32] {
        for (channel, x) in scratch.iter_mut().enumerate() {
            let (byte, bit) = place(BITS, channel);
            *x = f32::from(row[byte] >> bit & 15);
        }
        scratch
    }

    fn rows<'a>(segments: &'a [Segment<'a, u8>], d: usize) -> CodeRows<'a, BITS> {
        CodeRows::plane(segments, d, code_bytes(BITS, d), 0)
    }
}

/// The ranges of all channels, from a row on.
///
/// # Numerics
/// A channel x has the code `round((x - least) / step)`, within 0 and 255. Its upper 4 bits are in the upper layer. It is read as
/// the code times the step, plus the least; without its lower layer, as if its lower 4 bits were 7.5.
#[derive(Clone)]
struct Ranges {
    /// The row, counted from the first packed one.
    first: usize,
    least: Vec<f16>,
    step: Vec<f16>,
}

impl Ranges {
    /// Makes ranges for rows from `first` on, from the least and the largest number seen in each channel.
    fn new(first: usize, seen: &[[f32; 2]]) -> Self {
        let of = |[low, high]: &[f32; 2]| {
            // Halves, because the range of two floats may be no float.
            let (middle, reach) = (0.5 * low + 0.5 * high, (0.5 * high - 0.5 * low) * SPAN);
            let least = saturating_f16(middle - reach);
            let step = f16_at_least(((middle + reach - least.to_f32()) / MOST).max(0.0));
            (least, step)
        };
        let (least, step) = seen.iter().map(of).unzip();
        Self { first, least, step }
    }

    /// Returns the least and the step of each channel.
    fn channels(&self) -> impl Iterator<Item = [f32; 2]> {
        let pairs = self.least.iter().zip(&self.step);
        pairs.map(|(least, step)| [least.to_f32(), step.to_f32()])
    }

    /// Returns whether a number of a row is far beyond its range.
    fn is_left(&self, row: &[f32]) -> bool {
        let is_far = |(x, [least, step]): (&f32, [f32; 2])| {
            *x < least - BEYOND * step || *x > least + (MOST + BEYOND) * step
        };
        row.iter().zip(self.channels()).any(is_far)
    }

    /// Returns the codes of a row.
    fn codes(&self, row: &[f32]) -> impl Iterator<Item = u8> {
        row.iter().zip(self.channels()).map(|(x, [least, step])| {
            let code = if step > 0.0 { (x - least) / step } else { 0.0 };
            code.round().clamp(0.0, MOST) as u8
        })
    }

    /// Returns the steps in chunks, with zeros beyond the last channel.
    fn steps(&self) -> Vec<[f32; LANES]> {
        let mut chunks = vec![[0.0; LANES]; self.step.len().div_ceil(LANES)];
        let channels = chunks.as_flattened_mut().iter_mut();
        channels
            .zip(&self.step)
            .for_each(|(to, step)| *to = step.to_f32());
        chunks
    }
}

/// What a layered cache holds for keys or for values, besides the layers.
#[derive(Clone)]
struct LayeredPart {
    ends: Ends,
    map: RowMap,
    /// Rows that left the window and wait for the first ranges.
    waiting: RowStore<bf16>,
    /// The least and the largest number of each channel in the rows that left the window, after the map.
    seen: Vec<[f32; 2]>,
    /// Empty as long as rows wait.
    ranges: Vec<Ranges>,
    /// Number of packed rows.
    packed: usize,
}

impl LayeredPart {
    fn new(d: usize, layout: Layout, map: &RowMap) -> Self {
        Self {
            ends: Ends::new(d, layout),
            map: map.clone(),
            waiting: RowStore::new(d, 0),
            seen: vec![[f32::INFINITY, f32::NEG_INFINITY]; d],
            ranges: Vec::new(),
            packed: 0,
        }
    }

    /// Appends rows, and appends the codes of those that are packed now, `[m,d]`, to `codes`.
    fn extend(&mut self, rows: ArrayView2<f32>, codes: &mut Vec<u8>) {
        let Self {
            ends,
            map,
            waiting,
            ranges,
            ..
        } = self;
        let mut packer = Packer {
            map,
            ranges,
            seen: &mut self.seen,
            packed: &mut self.packed,
            codes,
        };
        ends.extend(rows, |rows| {
            let missing = if packer.ranges.is_empty() {
                FIRST - waiting.len()
            } else {
                0
            };
            let (first, rest) = rows.split_at(Axis(0), rows.nrows().min(missing));
            waiting.extend(first);
            if waiting.len() == FIRST {
                packer.first(&waiting.drain());
            }
            rest.rows().into_iter().for_each(|row| packer.next(row));
        });
    }

    /// Returns whether rows wait for ranges, so that none is packed.
    fn is_waiting(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Cuts ascending packed rows where the ranges change: each part comes with its ranges and with the place of its first row.
    fn by_ranges<'a>(&'a self, rows: &'a [u32]) -> impl Iterator<Item = (&'a Ranges, usize, &'a [u32])> {
        let within = |end: usize| rows.partition_point(|p| (*p as usize) < end);
        let ends = self.ranges.iter().skip(1).map(|next| next.first);
        let mut at = 0;
        let parts = self.ranges.iter().zip(ends.chain([usize::MAX]));
        let parts = parts.map(move |(ranges, end)| {
            let first = std::mem::replace(&mut at, within(end));
            (ranges, first, &rows[first..at])
        });
        parts.filter(|(_, _, rows)| !rows.is_empty())
    }

    /// Returns the ranges of a packed row.
    fn ranges_of(&self, row: usize) -> &Ranges {
        let next = self.ranges.partition_point(|ranges| ranges.first <= row);
        &self.ranges[next - 1]
    }

    fn bytes(&self) -> usize {
        let ranges = self.ranges.len() * self.seen.len() * 2 * size_of::<f16>();
        self.ends.bytes() + self.waiting.bytes() + ranges
    }
}

/// Packs rows that left the window.
struct Packer<'a> {
    map: &'a RowMap,
    seen: &'a mut [[f32; 2]],
    ranges: &'a mut Vec<Ranges>,
    packed: &'a mut usize,
    codes: &'a mut Vec<u8>,
}

impl Packer<'_> {
    /// Fixes the first ranges by rows, `[FIRST,d]`, and packs them.
    fn first(&mut self, rows: &Array2<f32>) {
        let rows: Vec<Vec<f32>> = rows.rows().into_iter().map(|row| self.see(row)).collect();
        self.ranges.push(Ranges::new(0, self.seen));
        rows.iter().for_each(|row| self.pack(row));
    }

    /// Packs a later row.
    fn next(&mut self, row: ArrayView1<f32>) {
        let row = self.see(row);
        if let Some(ranges) = self.ranges.last().filter(|ranges| ranges.is_left(&row)) {
            let new = Ranges::new(*self.packed, self.seen);
            // Rounding may leave a number outside whatever the ranges are.
            if (&new.least, &new.step) != (&ranges.least, &ranges.step) {
                self.ranges.push(new);
            }
        }
        self.pack(&row);
    }

    /// Maps a row, and notes its numbers.
    fn see(&mut self, row: ArrayView1<f32>) -> Vec<f32> {
        let mut row = row.to_vec();
        self.map.apply(&mut row);
        // A number that is not finite would spoil the ranges of all later rows.
        let finite = self.seen.iter_mut().zip(&row).filter(|(_, x)| x.is_finite());
        for ([low, high], x) in finite {
            (*low, *high) = (low.min(*x), high.max(*x));
        }
        row
    }

    fn pack(&mut self, row: &[f32]) {
        if let Some(ranges) = self.ranges.last() {
            self.codes.extend(ranges.codes(row));
            *self.packed += 1;
        }
    }
}

/// The keys or the values of a KV head in layers, or both.
#[derive(Clone)]
pub struct Layered {
    d: usize,
    /// The share of the chosen rows of which a step reads both layers.
    whole: f64,
    /// Keys or values, or keys and values.
    parts: Vec<LayeredPart>,
    /// The upper and the lower layer. A row has the codes of all parts, of each in whole chunks of channels.
    layers: [RowStore<Plane>; 2],
}

impl Layered {
    /// Makes an empty cache with a part for each map.
    pub fn new<'a>(
        d: usize,
        capacity: usize,
        layout: Layout,
        maps: impl IntoIterator<Item = &'a RowMap>,
    ) -> Self {
        let parts: Vec<_> = maps
            .into_iter()
            .map(|map| LayeredPart::new(d, layout, map))
            .collect();
        let channels = parts.len() * d.next_multiple_of(LANES);
        Self {
            d,
            whole: layout.whole,
            parts,
            layers: std::array::from_fn(|_| RowStore::new(channels, capacity)),
        }
    }

    /// Makes an empty cache of keys and values.
    pub fn pair(d: usize, capacity: usize, layout: Layout, maps: &HeadMaps) -> Self {
        Self::new(d, capacity, layout, [&maps.keys, &maps.values])
    }

    /// Appends rows, `[m,d]` for each part.
    pub fn append(&mut self, rows: &[ArrayView2<f32>]) {
        let mut codes = vec![Vec::new(); self.parts.len()];
        for ((part, rows), codes) in self.parts.iter_mut().zip(rows).zip(&mut codes) {
            part.extend(rows.reborrow(), codes);
        }
        let (d, chunked) = (self.d, self.d.next_multiple_of(LANES));
        for (layer, shift) in self.layers.iter_mut().zip([BITS, 0]) {
            let n = codes[0].len() / d;
            let width = code_bytes(BITS, chunked * codes.len());
            for (i, row) in layer.add_rows(n).chunks_exact_mut(width).enumerate() {
                for (part, codes) in codes.iter().enumerate() {
                    for (channel, code) in codes[i * d..(i + 1) * d].iter().enumerate() {
                        let (byte, bit) = place(BITS, part * chunked + channel);
                        row[byte] |= (code >> shift & 15) << bit;
                    }
                }
            }
        }
    }

    /// Returns a cache that starts with the rows of this cache and shares them.
    pub fn forked(&mut self) -> Self {
        Self {
            layers: self.layers.each_mut().map(RowStore::forked),
            parts: self.parts.clone(),
            ..*self
        }
    }

    /// Returns how many of the rows that a step chooses it reads whole; `None` for all of them.
    pub fn whole_rows(&self, chosen: usize) -> Option<usize> {
        (self.whole < 1.0).then(|| (self.whole * chosen as f64).ceil() as usize)
    }

    /// Returns the rows of a part of which only those at `whole` (ascending) are read in both layers, or all of them.
    pub fn part<'a>(&'a self, part: usize, whole: Option<&'a [u32]>) -> LayeredRows<'a> {
        LayeredRows {
            packed: Packed {
                of: self,
                part,
                whole,
            },
        }
    }

    /// Returns the second part.
    pub fn second(&self) -> &Second {
        Second::wrap_ref(self)
    }
}

impl RowCache for Layered {
    fn extend(&mut self, rows: ArrayView2<f32>) {
        self.append(&[rows]);
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        Box::new(self.forked())
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(self.clone())
    }

    fn len(&self) -> usize {
        self.parts[0].ends.len()
    }

    fn bytes(&self) -> usize {
        let parts: usize = self.parts.iter().map(LayeredPart::bytes).sum();
        parts + self.layers.iter().map(RowStore::bytes).sum::<usize>()
    }

    fn layered(&self) -> Option<&Layered> {
        Some(self)
    }
}

/// The second part of a layered cache, as rows of its own.
#[repr(transparent)]
pub struct Second(Layered);

// SAFETY: `Second` is a transparent wrapper.
unsafe impl TransparentWrapper<Layered> for Second {}

/// Implements [`CachedRows`] by the rows of a part, all of them read whole.
macro_rules! rows_of_part {
    ($cache:ty, $part:literal, |$own:ident| $layered:expr) => {
        impl $cache {
            fn rows(&self) -> LayeredRows<'_> {
                let $own = self;
                $layered.part($part, None)
            }
        }

        impl CachedRows for $cache {
            fn dim(&self) -> usize {
                self.rows().dim()
            }

            fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
                self.rows().read(position, scratch)
            }

            fn prefetch(&self, positions: &[u32]) {
                self.rows().prefetch(positions);
            }

            fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
                self.rows().scores(queries, run, out, stride);
            }

            fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
                self.rows().add(weights, stride, run, sums);
            }

            fn add_piece(&self, weights: &[f32], stride: usize, positions: &[u32], total: &mut Array2<f64>) {
                self.rows().add_piece(weights, stride, positions, total);
            }
        }
    };
}

rows_of_part!(Layered, 0, |cache| cache);
rows_of_part!(Second, 1, |cache| &cache.0);

/// The rows of a part as a step reads them.
pub struct LayeredRows<'a> {
    packed: Packed<'a>,
}

impl LayeredRows<'_> {
    fn ends(&self) -> &Ends {
        &self.packed.part().ends
    }

    /// Returns the row of `position`, which is put into `scratch`.
    fn read<'o>(&self, position: usize, scratch: &'o mut [f32]) -> &'o [f32] {
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
struct Packed<'a> {
    of: &'a Layered,
    part: usize,
    /// The positions, sinks included, of the rows that are read in both layers; `None` for all.
    whole: Option<&'a [u32]>,
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

#[cfg(test)]
mod tests {
    use super::super::KvHead;
    use super::super::layout::Center;
    use super::*;
    use crate::kv::{KvType, RowFormat};
    use crate::testing::{numbers, values};

    const SINKS: usize = 4;
    const WINDOW: usize = 16;

    fn layout() -> Layout {
        Layout {
            sinks: SINKS,
            window: WINDOW,
            ..Center::Median.into()
        }
    }

    /// Rows `[n,d]` that are floats of bf16; each channel has a size and a middle of its own.
    fn rows(n: usize, d: usize, seed: u32) -> Array2<f32> {
        let noise = Array2::from_shape_vec((n, d), values(n * d, seed)).unwrap();
        let of = |(c, x): (usize, f32)| (1.0 + c as f32 * 0.3) * x + 0.1 * c as f32;
        let mut rows = noise;
        for mut row in rows.rows_mut() {
            for (c, x) in row.iter_mut().enumerate() {
                *x = bf16::from_f32(of((c, *x))).to_f32();
            }
        }
        rows
    }

    fn cache(d: usize, map: &RowMap) -> Layered {
        Layered::new(d, 0, layout(), [map])
    }

    fn read(rows: &dyn CachedRows, position: usize) -> Vec<f32> {
        let mut scratch = vec![0.0; rows.dim()];
        rows.row(position, &mut scratch).to_vec()
    }

    /// Codes and what is read of them, computed anew from the rows that fix the ranges.
    #[test]
    fn a_number_is_read_by_one_layer_or_by_both() {
        let (n, d) = (400, 20);
        let rows = rows(n, d, 3);
        let mut cache = cache(d, &RowMap::Identity);
        cache.extend(rows.view());
        let upper = cache.part(0, Some(&[]));
        for channel in 0..d {
            let first = rows.slice(ndarray::s![SINKS..SINKS + FIRST, channel]);
            let [low, high] = [f32::min, f32::max].map(|of| first.fold(first[0], |a, b| of(a, *b)));
            let span = f64::from(high - low) * f64::from(SPAN);
            let least = f64::from(low + high) * 0.5 - span * 0.5;
            // Least and step are rounded to 11 bits.
            let (step, rounding) = (span / 255.0, (span + least.abs()) * 2f64.powi(-10));
            for position in [SINKS, 100, SINKS + FIRST + 5, n - WINDOW - 1] {
                let x = f64::from(rows[[position, channel]]);
                let inside = x.clamp(least, least + span);
                let [both, one] =
                    [read(&cache, position), read(&upper, position)].map(|row| f64::from(row[channel]));
                assert!(
                    (both - inside).abs() <= 0.5 * step + rounding,
                    "{channel} {position}"
                );
                assert!(
                    (one - inside).abs() <= 8.0 * step + rounding,
                    "{channel} {position}"
                );
                // The rest of the code is between -7.5 and 7.5, and a number and a half.
                let rest = (both - one) / step;
                assert!(
                    (rest - rest.floor() - 0.5).abs() < 0.05,
                    "{channel} {position}: {rest}"
                );
            }
            for position in [0, SINKS - 1, n - WINDOW, n - 1] {
                assert_eq!(read(&upper, position)[channel], rows[[position, channel]]);
            }
        }
    }

    /// However many rows are appended at a time, and whatever forks there are, rows are read alike.
    #[test]
    fn rows_do_not_depend_on_how_they_arrive() {
        let (n, d) = (700, 16);
        let mut all = rows(n, d, 5);
        // Rows with numbers far beyond all earlier ones.
        for (position, channel, factor) in [(300, 2, 3.0), (500, 7, -4.0), (501, 7, -4.1)] {
            all[[position, channel]] *= factor;
            all[[position, channel]] += 10.0 * factor;
        }
        let all = all.mapv(|x| bf16::from_f32(x).to_f32());
        let mut whole = cache(d, &RowMap::Hadamard);
        whole.extend(all.view());
        let mut number = numbers(5);
        for most in [1, 7, 300] {
            let mut parts = cache(d, &RowMap::Hadamard);
            while parts.len() < n {
                let more = (1 + number() as usize % most).min(n - parts.len());
                let first = parts.len();
                parts.extend(all.slice(ndarray::s![first..first + more, ..]));
                if number().is_multiple_of(9) {
                    parts = parts.forked();
                }
                let packed = parts.len().saturating_sub(SINKS + WINDOW);
                let in_bf16 = if packed < FIRST { parts.len() } else { SINKS };
                assert_eq!(read(&parts, in_bf16 - 1), all.row(in_bf16 - 1).to_vec());
            }
            for position in 0..n {
                assert_eq!(
                    read(&parts, position),
                    read(&whole, position),
                    "{most} {position}"
                );
            }
        }
    }

    #[test]
    fn numbers_beyond_the_range_are_cut_or_begin_new_ranges() {
        let (n, d) = (SINKS + FIRST + WINDOW, 16);
        let mut cache = cache(d, &RowMap::Identity);
        let first = rows(n, d, 8);
        cache.extend(first.view());
        let before: Vec<Vec<f32>> = (0..n).map(|p| read(&cache, p)).collect();
        assert_eq!(cache.parts[0].ranges.len(), 1);
        let [least, step] = cache.parts[0].ranges[0].channels().next().unwrap();
        let mut add = |x: f32| {
            let mut more = first.slice(ndarray::s![..WINDOW + 1, ..]).to_owned();
            more[[0, 0]] = bf16::from_f32(x).to_f32();
            // The window holds the rows after the first one of these.
            cache.extend(more.view());
            let at = cache.len() - WINDOW - 1;
            (more[[0, 0]], read(&cache, at)[0], cache.parts[0].ranges.len())
        };
        let (_, cut, ranges) = add(least + 270.0 * step);
        assert_eq!((cut, ranges), (MOST * step + least, 1));
        let far = least + 400.0 * step;
        let (x, own, ranges) = add(far);
        assert_eq!(ranges, 2);
        // The new range has everything that was seen.
        assert!((x - own).abs() <= 1.2 * step, "{x} {own}");
        let (x, own, ranges) = add(least - 10.0 * step);
        assert!(ranges == 2 && (x - own).abs() <= 1.2 * step, "{x} {own}");
        for (p, row) in before.iter().enumerate().take(n - WINDOW) {
            assert_eq!(read(&cache, p), *row);
        }
    }

    /// Channels that never change, and numbers that are not finite, neither begin ranges without end nor spoil later rows.
    #[test]
    fn odd_rows_leave_the_others_as_they_are() {
        let (n, d) = (SINKS + FIRST + WINDOW + 50, 32);
        for x in [0.5, 0.703125, 1.0, 1.1015625] {
            let mut cache = cache(d, &RowMap::Hadamard);
            // Only the first channel of the map is not zero. It is no float of 16 bits, so that its least may be above it.
            let same = Array2::from_elem((n, d), x);
            cache.extend(same.view());
            assert_eq!(cache.parts[0].ranges.len(), 1);
            let error = |cache: &Layered| (read(cache, cache.len() - WINDOW - 1)[3] - x).abs();
            assert!(error(&cache) < 1e-3);
            let mut odd = same.slice(ndarray::s![..40, ..]).to_owned();
            odd[[2, 1]] = f32::INFINITY;
            odd[[4, 1]] = f32::NAN;
            cache.extend(odd.view());
            assert_eq!(cache.parts[0].ranges.len(), 1);
            assert!(error(&cache) < 1e-3);
        }
    }

    /// Keys and values side by side, keys or values alone: attention is that over the rows as they are read.
    #[test]
    fn rows_are_attended_as_they_are_read() {
        let layered = KvType::both(RowFormat::INT4_4);
        let keys_only = KvType {
            values: RowFormat::BF16,
            ..layered
        };
        let values_only = KvType {
            keys: RowFormat::INT8,
            ..layered
        };
        let (n, r) = (600, 5);
        for (kind, d) in [
            (layered, 64),
            (layered, 80),
            (layered, 20),
            (layered, 128),
            (keys_only, 64),
            (values_only, 64),
        ] {
            let (mut keys, values) = (rows(n, d, 1) * 0.1, rows(n, d, 2));
            keys[[400, 3]] = 20.0;
            let mut kv = KvHead::new(kind, d, 0, layout());
            kv.extend(
                keys.slice(ndarray::s![..550, ..]),
                values.slice(ndarray::s![..550, ..]),
            );
            let mut kv = kv.fork();
            kv.extend(
                keys.slice(ndarray::s![550.., ..]),
                values.slice(ndarray::s![550.., ..]),
            );
            let q = rows(r, d, 4) * 0.05;
            let positions: Vec<u32> = (0..n as u32).filter(|p| p % 3 != 1).collect();
            let some: Vec<u32> = positions.iter().copied().filter(|p| p % 4 == 0).collect();
            let mut outputs = Vec::new();
            for whole in [&positions[..], &some, &[]] {
                let part = |part| kv.in_layers(part, whole);
                let (own_keys, own_values) = (part(Part::Keys), part(Part::Values));
                assert_eq!(own_keys.is_some(), kind.keys.is_layered());
                let keys: &dyn CachedRows = own_keys.as_ref().map_or(kv.keys(), |keys| keys);
                let values: &dyn CachedRows = own_values.as_ref().map_or(kv.values(), |values| values);
                let mut out = Array2::zeros((r, d));
                attention::decode(q.view(), keys, values, &positions, out.view_mut());
                for (head, found) in out.rows().into_iter().enumerate() {
                    let scale = 1.0 / (d as f64).sqrt();
                    let score = |p: &u32| -> f64 {
                        let key = read(keys, *p as usize);
                        let products = q.row(head).into_iter().zip(key);
                        products.map(|(q, k)| f64::from(*q) * f64::from(k)).sum::<f64>() * scale
                    };
                    let powers: Vec<f64> = positions.iter().map(|p| score(p).exp()).collect();
                    let sum: f64 = powers.iter().sum();
                    let mut expected = vec![0.0; d];
                    for (p, power) in positions.iter().zip(&powers) {
                        let row = read(values, *p as usize);
                        expected
                            .iter_mut()
                            .zip(row)
                            .for_each(|(to, x)| *to += power / sum * f64::from(x));
                    }
                    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                    for (x, y) in found.iter().zip(&expected) {
                        // Queries and weights are rounded to 16 bits: of up to 128 channels whose steps differ tenfold, and
                        // of runs of 32 rows.
                        let error = (f64::from(*x) - y).abs() / largest;
                        assert!(error < 1e-3, "{kind} {d} {head}: {x} {y} of {largest}");
                    }
                }
                outputs.push(out);
            }
            assert!(outputs[0] != outputs[1] && outputs[1] != outputs[2]);
            // What is read of all rows is what is read without a choice.
            let mut out = Array2::zeros((r, d));
            attention::decode(q.view(), kv.keys(), kv.values(), &positions, out.view_mut());
            assert_eq!(out, outputs[0]);
        }
    }

    /// With 64 channels, a layer of a key and its value is a line of 64 bytes.
    #[test]
    fn keys_and_values_lie_side_by_side() {
        let d = 64;
        let mut cache = Layered::pair(d, 0, layout(), &HeadMaps::HADAMARD);
        let rows = rows(SINKS + FIRST + WINDOW + 3, d, 6);
        cache.append(&[rows.view(), rows.view()]);
        for layer in &cache.layers {
            let lines = layer.units();
            assert_eq!(lines.len(), 64 * (FIRST + 3));
            assert_eq!(lines[..32], lines[32..64]);
            assert_ne!(lines[..32], lines[64..96]);
        }
    }
}
