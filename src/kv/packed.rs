//! The 2-bit cache of Self-Indexing KVCache, arXiv 2603.14224: signs that are index and storage at once,
//! 2-bit magnitudes, 2-bit values, and a few positions in half precision.
//!
//! A key is stored as the signs of its centered channels and their magnitudes, relative to the channel's
//! largest; a value is stored directly. Magnitudes and values take 2 bits, with a scale and a zero point per
//! 32 channels. A position takes 7 d bits per KV head; in half precision it would take 32 d.
//!
//! Differences from the authors' code: rows are in position order; positions in half precision have a 2-bit
//! row as well, so that a later prompt may demote them; rows are read with the center added, so that every
//! method can use them; a group of equal values is exact to f16. Center and scale come from the first
//! prompt, or from all rows while few are cached.

mod attend;
mod two_bit;

use std::ops::Range;

use half::f16;
use ndarray::{Array1, ArrayView1, ArrayView2, ArrayView3, Axis, s};
use rayon::prelude::*;

pub use super::layout::{Center, FULL, Layout};
use super::lines::AlignedVec;
use super::map::RowMap;
use super::qkv::Part;
use super::rows::{Format, Prompted, RowCache, Signs};
use crate::compute::attention::{self, CachedRows, GroupQueries, OutputSums, Run};
use crate::compute::simd;
use crate::float::saturating_f16;
use crate::parameters::Word;
use two_bit::TwoBit;

/// A prompt that finds fewer cached positions recomputes center and scale from all of them.
pub const REFIT: usize = 128;
/// Channels that share a scale and a zero point.
pub const QUANT_GROUP: usize = 32;

/// Returns the positions (rows of `keys`) with the largest dot products with `query`: at most `most`,
/// ascending; ties go to the lower position.
///
/// # Source
/// The authors' code: the tokens with the highest raw score of the prompt's last query, averaged over
/// the group. Centring is omitted, since it shifts every score equally.
pub fn best_scored(
    query: &[f32],
    positions: impl Iterator<Item = usize>,
    keys: ArrayView2<f32>,
    most: usize,
) -> Vec<u32> {
    let mut row = vec![0.0; keys.ncols()];
    let mut score = |p: usize| {
        row.iter_mut().zip(keys.row(p)).for_each(|(r, k)| *r = *k);
        (simd::dot(query, &row), p as u32)
    };
    let mut scored: Vec<(f32, u32)> = positions.map(&mut score).collect();
    if scored.len() > most {
        scored.select_nth_unstable_by(most, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    }
    let mut best: Vec<u32> = scored.iter().take(most).map(|(_, p)| *p).collect();
    best.sort_unstable();
    best
}

/// Returns the last query of a prompt, `[r,m,d]`, averaged over the query heads: `[d]`.
pub fn last_query(q_rope: ArrayView3<f32>) -> Vec<f32> {
    let last = q_rope.index_axis(Axis(1), q_rope.len_of(Axis(1)) - 1);
    last.mean_axis(Axis(0)).expect("a group of query heads").to_vec()
}

/// The rows of a few positions in f16.
#[derive(Clone, Default)]
struct FullRows {
    /// Ascending.
    positions: Vec<u32>,
    rows: Vec<f16>,
}

impl FullRows {
    /// Returns the row of `position`, if it is kept.
    fn get(&self, position: usize, d: usize) -> Option<&[f16]> {
        let i = self.positions.binary_search(&(position as u32)).ok()?;
        Some(&self.rows[i * d..(i + 1) * d])
    }

    /// Keeps the rows of the positions `full`. Those before `first` have theirs already; `row` returns the others.
    fn keep(&mut self, full: Vec<u32>, first: usize, d: usize, row: impl Fn(usize) -> Array1<f16>) {
        let mut rows = Vec::with_capacity(full.len() * d);
        for p in full.iter().map(|p| *p as usize) {
            if p < first {
                rows.extend(self.get(p, d).expect("a position that kept half precision"));
            } else {
                rows.extend(row(p));
            }
        }
        (self.positions, self.rows) = (full, rows);
    }

    fn bytes(&self) -> usize {
        self.positions.capacity() * 4 + self.rows.capacity() * 2
    }
}

/// Keys and values in 2 bits.
pub(super) struct TwoBits;

impl Format for TwoBits {
    fn word(&self) -> Word {
        Word {
            name: "2bit",
            help: "Signs, 2-bit magnitudes and 2-bit values, and up to 64 positions in f16 (Self-Indexing KVCache)",
        }
    }

    fn arrays(&self, part: Part, d: usize) -> [Option<usize>; 2] {
        let signs = (part == Part::Keys).then(|| sign_bytes(d));
        [Some(two_bit::width(d)), signs]
    }

    fn has_signs(&self) -> bool {
        true
    }

    fn keeps_rows(&self) -> bool {
        false
    }

    fn shares_rows(&self) -> bool {
        false
    }

    fn cache(&self, part: Part, d: usize, capacity: usize, layout: Layout, _: &RowMap) -> Box<dyn RowCache> {
        match part {
            Part::Keys => Box::new(SignRows::new(d, layout, capacity)),
            Part::Values => Box::new(ValueRows::new(d, layout, capacity)),
        }
    }
}

/// Keys in 2 bits: signs and magnitudes around a center.
#[derive(Clone)]
pub struct SignRows {
    d: usize,
    layout: Layout,
    /// Center per channel, from the first prompt; zero before.
    centers: Vec<f32>,
    /// Largest centered magnitude per channel, from the first prompt; one before.
    alpha: Vec<f32>,
    /// d / 8 bytes per row; bit i of byte b is set if channel 8 b + i is above its center.
    signs: AlignedVec<u8>,
    magnitudes: TwoBit,
    full: FullRows,
}

impl SignRows {
    fn new(d: usize, layout: Layout, capacity: usize) -> Self {
        Self {
            d,
            layout,
            centers: vec![0.0; d],
            alpha: vec![1.0; d],
            signs: AlignedVec::with_capacity(capacity * sign_bytes(d)),
            magnitudes: TwoBit::new(d, capacity),
            full: FullRows::default(),
        }
    }

    /// Computes center and scale from keys, `[n,d]`. The scale ignores the rows in `full`, unless fewer
    /// than [`FULL`] others remain.
    ///
    /// # Source
    /// Eq. 5 and Eq. 12: alpha is the channel's largest centered magnitude; zero becomes one.
    fn fit(&mut self, keys: ArrayView2<f32>, full: &[u32]) {
        self.centers = self.layout.center.of_channels(keys);
        let mut counted = compressed(0..keys.nrows(), full);
        if counted.len() < FULL {
            counted = (0..keys.nrows()).collect();
        }
        let largest = |(channel, center): (ArrayView1<f32>, &f32)| {
            let rows = counted.iter().map(|i| (channel[*i] - center).abs());
            match rows.fold(0.0, f32::max) {
                0.0 => 1.0,
                alpha => alpha,
            }
        };
        self.alpha = keys
            .axis_iter(Axis(1))
            .into_par_iter()
            .zip(&self.centers)
            .map(largest)
            .collect();
    }

    /// Reads a row as f32, with the center added.
    ///
    /// # Source
    /// Eq. 13: sign (Q s + z) alpha; plus the center.
    fn read(&self, position: usize, out: &mut [f32]) {
        if let Some(row) = self.full.get(position, self.d) {
            for ((s, x), c) in out.iter_mut().zip(row).zip(&self.centers) {
                *s = x.to_f32() + c;
            }
            return;
        }
        self.magnitudes.read(position, out);
        let signs = &self.signs[position * sign_bytes(self.d)..];
        let scale = self.alpha.iter().zip(&self.centers);
        for (i, (x, (alpha, center))) in out.iter_mut().zip(scale).enumerate() {
            let magnitude = *x * alpha;
            let positive = !self.layout.signed || signs[i / 8] >> (i % 8) & 1 == 1;
            *x = center + if positive { magnitude } else { -magnitude };
        }
    }

    /// Returns the center of each channel.
    pub fn centers(&self) -> &[f32] {
        &self.centers
    }

    /// Returns the sign bytes of all rows, [`sign_bytes`] each.
    pub fn signs(&self) -> &[u8] {
        &self.signs
    }

    /// Returns the positions in half precision, ascending.
    pub fn full_positions(&self) -> &[u32] {
        &self.full.positions
    }
}

impl RowCache for SignRows {
    /// Appends keys, `[m,d]`, with the present center and scale.
    fn extend(&mut self, keys: ArrayView2<f32>) {
        extend_signs(&mut self.signs, keys, &self.centers);
        let mut relative = vec![0.0; self.d];
        for key in keys.rows() {
            let scale = self.centers.iter().zip(&self.alpha);
            for ((x, k), (center, alpha)) in relative.iter_mut().zip(key).zip(scale) {
                let relative = (k - center) / alpha;
                *x = if self.layout.signed {
                    relative.abs()
                } else {
                    relative
                };
            }
            self.magnitudes.push(&relative);
        }
    }

    /// If fewer than [`REFIT`] positions are cached, center and scale are computed anew from all rows.
    fn prompt(&mut self, _: Part, prompted: &Prompted) {
        let (first, keys) = (self.len(), prompted.keys);
        let full = kept_full(prompted, &self.full, first, self.layout.full);
        let start = restart(first);
        if first < REFIT {
            self.fit(keys, &full);
            self.signs.clear();
            self.magnitudes.clear();
        }
        self.extend(keys.slice(s![start.., ..]));
        let centers = ArrayView1::from(&self.centers);
        let row = |p: usize| (keys.row(p).to_owned() - centers).mapv(saturating_f16);
        self.full.keep(full, start, self.d, row);
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        self.copy()
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(self.clone())
    }

    fn len(&self) -> usize {
        self.signs.len() / sign_bytes(self.d)
    }

    fn bytes(&self) -> usize {
        let fixed = (self.centers.capacity() + self.alpha.capacity()) * 4;
        self.signs.bytes() + self.magnitudes.bytes() + self.full.bytes() + fixed
    }

    fn signs(&self) -> Option<Signs<'_>> {
        Some(Signs {
            centers: &self.centers,
            rows: &self.signs,
            full: &self.full.positions,
        })
    }
}

/// Returns the bytes of a key and a value of d channels: 7 d / 8 if d is a multiple of 32.
pub fn row_bytes(d: usize) -> usize {
    sign_bytes(d) + 2 * two_bit::width(d)
}

/// Returns the bytes of a row's signs.
pub fn sign_bytes(d: usize) -> usize {
    d.div_ceil(8)
}

/// Appends the sign bits of keys, `[m,d]`: bit i of a row's byte b is set if channel 8 b + i is above its
/// center.
///
/// # Source
/// Eq. 2; zero counts as negative.
pub fn extend_signs(signs: &mut AlignedVec<u8>, keys: ArrayView2<f32>, centers: &[f32]) {
    signs.grow(keys.nrows() * sign_bytes(keys.ncols()));
    for key in keys.rows() {
        let mut byte = 0;
        for (i, (k, c)) in key.iter().zip(centers).enumerate() {
            byte |= u8::from(k - c > 0.0) << (i % 8);
            if i % 8 == 7 || i + 1 == centers.len() {
                signs.push(std::mem::take(&mut byte));
            }
        }
    }
}

/// Returns the positions that are not in `full` (ascending).
pub fn compressed(positions: Range<usize>, full: &[u32]) -> Vec<usize> {
    positions
        .filter(|i| full.binary_search(&(*i as u32)).is_err())
        .collect()
}

impl CachedRows for SignRows {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.read(position, scratch);
        scratch
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        if attend::in_groups(self.d) {
            attend::scores(self, queries, run, out, stride)
        } else {
            attention::widened_scores(self, queries, run, out, stride)
        }
    }
}

/// Values in 2 bits.
#[derive(Clone)]
pub struct ValueRows {
    values: TwoBit,
    full: FullRows,
    /// Most positions that keep half precision.
    most: usize,
}

impl ValueRows {
    fn new(d: usize, layout: Layout, capacity: usize) -> Self {
        Self {
            values: TwoBit::new(d, capacity),
            full: FullRows::default(),
            most: layout.full,
        }
    }
}

impl CachedRows for ValueRows {
    fn dim(&self) -> usize {
        self.values.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        match self.full.get(position, self.values.d) {
            Some(row) => scratch.iter_mut().zip(row).for_each(|(o, x)| *o = x.to_f32()),
            None => self.values.read(position, scratch),
        }
        scratch
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        if attend::in_groups(self.values.d) {
            attend::add(self, weights, stride, run, sums)
        } else {
            attention::widened_add(self, weights, stride, run, sums)
        }
    }
}

impl RowCache for ValueRows {
    fn extend(&mut self, rows: ArrayView2<f32>) {
        let mut row = vec![0.0; self.values.d];
        for value in rows.rows() {
            row.iter_mut().zip(value).for_each(|(r, v)| *r = *v);
            self.values.push(&row);
        }
    }

    fn prompt(&mut self, _: Part, prompted: &Prompted) {
        let first = self.len();
        let full = kept_full(prompted, &self.full, first, self.most);
        let start = restart(first);
        if start < first {
            self.values.clear();
        }
        self.extend(prompted.values.slice(s![start.., ..]));
        let row = |p: usize| prompted.values.row(p).mapv(saturating_f16);
        self.full.keep(full, start, self.values.d, row);
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        self.copy()
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(self.clone())
    }

    fn len(&self) -> usize {
        self.values.len()
    }

    fn bytes(&self) -> usize {
        self.values.bytes() + self.full.bytes()
    }
}

/// Returns the positions that keep half precision after a prompt: the best-scored ones ([`best_scored`], at most `most`) among
/// those that have it and those from `first` on.
fn kept_full(prompted: &Prompted, full: &FullRows, first: usize, most: usize) -> Vec<u32> {
    let kept = full.positions.iter().map(|p| *p as usize);
    let candidates = kept.chain(first..prompted.keys.nrows());
    let seen = candidates.filter(|p| prompted.visible.contains(p));
    best_scored(prompted.query, seen, prompted.keys, most)
}

/// Returns the first row that a prompt stores if `cached` rows are cached: all of them if there are fewer than [`REFIT`].
fn restart(cached: usize) -> usize {
    if cached < REFIT { 0 } else { cached }
}

/// The data of 2-bit keys and values besides signs, center and the positions in half precision. In arrays of two,
/// keys come first, then values.
pub struct Parts<'a> {
    /// Whether keys are stored as signs and magnitudes.
    pub signed: bool,
    /// Largest centered magnitude per channel, `[d]`.
    pub alpha: &'a [f32],
    /// `[n,d/4]` bytes; the first channel is in the lowest bits.
    pub bits: [Vec<u8>; 2],
    /// Scales and zero points, `[n,groups]`.
    pub params: [Vec<[f16; 2]>; 2],
    /// Rows in half precision; keys less the center.
    pub full: [&'a [f16]; 2],
}

/// Keys and values of one KV head in 2 bits, for those who look at how they are stored.
#[derive(Clone)]
pub struct Packed {
    /// Keys.
    pub keys: SignRows,
    /// Values.
    pub values: ValueRows,
}

impl Packed {
    /// Makes an empty cache with space for `capacity` positions.
    pub fn new(d: usize, layout: impl Into<Layout>, capacity: usize) -> Self {
        let layout = layout.into();
        Self {
            keys: SignRows::new(d, layout, capacity),
            values: ValueRows::new(d, layout, capacity),
        }
    }

    /// Appends the rows of a prompt; the arguments are the fields of [`Prompted`].
    pub fn prompt(
        &mut self,
        keys: ArrayView2<f32>,
        values: ArrayView2<f32>,
        query: &[f32],
        visible: Range<usize>,
    ) {
        let prompted = Prompted {
            keys: keys.reborrow(),
            values: values.reborrow(),
            query,
            visible,
        };
        self.keys.prompt(Part::Keys, &prompted);
        self.values.prompt(Part::Values, &prompted);
    }

    /// Appends keys and values, `[m,d]` each, with the center and the scale of the prompt.
    pub fn extend(&mut self, keys: ArrayView2<f32>, values: ArrayView2<f32>) {
        self.keys.extend(keys);
        self.values.extend(values);
    }

    /// Returns the arrays that a device needs besides the signs.
    pub fn parts(&self) -> Parts<'_> {
        let (keys, values) = (&self.keys, &self.values);
        Parts {
            signed: keys.layout.signed,
            alpha: &keys.alpha,
            bits: [keys.magnitudes.bits(), values.values.bits()],
            params: [keys.magnitudes.params(), values.values.params()],
            full: [&keys.full.rows, &values.full.rows],
        }
    }

    /// Counts the positions.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Says whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes()
    }
}

#[cfg(test)]
mod tests;
