//! Cached rows in two layers of 4 bits, after a linear map ([`RowMap`]): reads of the upper layer give 4 bits of a number, reads of
//! both layers 8. A step reads both layers of the rows that matter most, and the upper one of the others. Sinks and window stay
//! in bf16 (`ends`).
//!
//! Every channel has one range for all rows, so that a row has no bytes but its codes. Where keys and values are both in this
//! format, those of a position lie side by side: with 64 channels, each layer of them is one cache line.

mod attend;
mod ranges;
#[cfg(test)]
mod tests;

use bytemuck::TransparentWrapper;
use half::{bf16, f16};
use ndarray::{Array2, ArrayView2, Axis};

use super::ends::Ends;
use super::layout::Layout;
use super::map::{HeadMaps, RowMap};
use super::qkv::Part;
use super::rows::{Format, LayeredCache, RowCache, RowStore, RowUnits};
use crate::compute::attention::codes::{code_bytes, place};
use crate::compute::attention::{CachedRows, GroupQueries, LANES, OutputSums, Run};
use crate::parameters::Word;
use attend::{LayeredRows, Packed};
use ranges::{Packer, Ranges};

/// Rows that fix the first ranges. Until as many have left the window, they wait in bf16.
const FIRST: usize = 256;
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

    /// Those of the first ranges; later ones are not counted.
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

/// A layer of the rows of a position: codes of 4 bits in the order of [`CodeRows`](crate::compute::attention::codes::CodeRows), of keys
/// or values, or of both.
struct Plane;

impl RowUnits for Plane {
    type Unit = u8;

    /// `d` counts the channels of all parts, in whole chunks.
    fn width(d: usize) -> usize {
        code_bytes(BITS, d)
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

    fn layered(&self) -> Option<&dyn LayeredCache> {
        Some(self)
    }
}

impl LayeredCache for Layered {
    fn reading<'a>(&'a self, whole: &'a [u32]) -> Box<dyn CachedRows + 'a> {
        Box::new(self.part(0, Some(whole)))
    }

    fn whole_rows(&self, chosen: usize) -> Option<usize> {
        (self.whole < 1.0).then(|| (self.whole * chosen as f64).ceil() as usize)
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
