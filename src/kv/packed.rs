//! The 2-bit cache of Self-Indexing KVCache, arXiv 2603.14224: signs that are index and storage at
//! once, 2-bit magnitudes, 2-bit values, and a few tokens in half precision.
//!
//! A key is stored as the signs of its centred channels and their magnitudes relative to the largest
//! of the channel, a value as it is; both in 2 bits with a scale and a zero point per 32 channels. That
//! is 7 d bits per position and KV head, against 32 d in half precision.
//!
//! Where we differ from the authors' code: rows stand in position order, the full-precision tokens
//! have a 2-bit row as well (so a later prompt may demote them), rows are given back with the centre
//! added (so every method can read them), and a group of equal values is exact to f16. Centre and scale are
//! those of the first prompt, or of all rows as long as few are cached.

mod attend;
mod layout;
mod two_bit;

use std::ops::Range;

use half::f16;
use ndarray::{ArrayView1, ArrayView2, ArrayView3, Axis, s};
use rayon::prelude::*;

use super::lines::Lines;
use crate::compute::attention::{self, CachedRows, GroupQueries, OutputSums, Run};
use crate::compute::simd;
pub use layout::{Center, Layout};
use two_bit::{TwoBit, saturating_f16};

/// Positions that keep half precision.
pub const FULL: usize = 64;
/// A prompt that finds fewer positions cached fixes centre and scale anew, from all of them.
pub const REFIT: usize = 128;
/// Channels that share a scale and a zero point.
pub const QUANT_GROUP: usize = 32;

/// The positions whose keys, rows of `keys`, have the largest products with `query`: at most `most`,
/// ascending, the lower position on ties.
///
/// # Source
/// The authors' code: the tokens with the highest raw score of the last prompt query, averaged over
/// the group. Centring moves every score by the same amount and is left out.
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
    /// The row of `position`, if it is one of them.
    fn get(&self, position: usize, d: usize) -> Option<&[f16]> {
        let i = self.positions.binary_search(&(position as u32)).ok()?;
        Some(&self.rows[i * d..(i + 1) * d])
    }

    fn bytes(&self) -> usize {
        self.positions.capacity() * 4 + self.rows.capacity() * 2
    }
}

/// Keys as signs and 2-bit magnitudes around a centre.
#[derive(Clone)]
pub struct SignRows {
    d: usize,
    layout: Layout,
    /// Per channel, from the first prompt; zero before.
    centre: Vec<f32>,
    /// Largest magnitude per channel, from the first prompt; one before.
    alpha: Vec<f32>,
    /// d / 8 bytes a row; bit i of byte b is set where channel 8 b + i is above its centre.
    signs: Lines<u8>,
    magnitudes: TwoBit,
    full: FullRows,
}

impl SignRows {
    fn new(d: usize, layout: Layout, capacity: usize) -> Self {
        Self {
            d,
            layout,
            centre: vec![0.0; d],
            alpha: vec![1.0; d],
            signs: Lines::with_capacity(capacity * sign_bytes(d)),
            magnitudes: TwoBit::new(d, capacity),
            full: FullRows::default(),
        }
    }

    /// Centre and scale of keys, `[n,d]`; rows in `full` do not count for the scale, unless there are
    /// fewer than [`FULL`] others.
    ///
    /// # Source
    /// Eq. 5 and Eq. 12: alpha is the largest centred magnitude of the channel; zero becomes one.
    fn fit(&mut self, keys: ArrayView2<f32>, full: &[u32]) {
        self.centre = self.layout.center.of_channels(keys);
        let mut counted = compressed(0..keys.nrows(), full);
        if counted.len() < FULL {
            counted = (0..keys.nrows()).collect();
        }
        let largest = |(channel, centre): (ndarray::ArrayView1<f32>, &f32)| {
            let rows = counted.iter().map(|i| (channel[*i] - centre).abs());
            match rows.fold(0.0, f32::max) {
                0.0 => 1.0,
                alpha => alpha,
            }
        };
        self.alpha = keys
            .axis_iter(Axis(1))
            .into_par_iter()
            .zip(&self.centre)
            .map(largest)
            .collect();
    }

    /// Appends keys, `[m,d]`.
    fn extend(&mut self, keys: ArrayView2<f32>) {
        extend_signs(&mut self.signs, keys, &self.centre);
        let mut relative = vec![0.0; self.d];
        for key in keys.rows() {
            let scale = self.centre.iter().zip(&self.alpha);
            for ((x, k), (centre, alpha)) in relative.iter_mut().zip(key).zip(scale) {
                let relative = (k - centre) / alpha;
                *x = if self.layout.signed {
                    relative.abs()
                } else {
                    relative
                };
            }
            self.magnitudes.push(&relative);
        }
    }

    /// # Source
    /// Eq. 13: sign (Q s + z) alpha, and the centre.
    fn read(&self, position: usize, out: &mut [f32]) {
        if let Some(row) = self.full.get(position, self.d) {
            for ((s, x), c) in out.iter_mut().zip(row).zip(&self.centre) {
                *s = x.to_f32() + c;
            }
            return;
        }
        self.magnitudes.read(position, out);
        let signs = &self.signs[position * sign_bytes(self.d)..];
        let scale = self.alpha.iter().zip(&self.centre);
        for (i, (x, (alpha, centre))) in out.iter_mut().zip(scale).enumerate() {
            let magnitude = *x * alpha;
            let positive = !self.layout.signed || signs[i / 8] >> (i % 8) & 1 == 1;
            *x = centre + if positive { magnitude } else { -magnitude };
        }
    }

    /// What was taken off each channel.
    pub fn centre(&self) -> &[f32] {
        &self.centre
    }

    /// Sign bytes of all rows, [`sign_bytes`] each.
    pub fn signs(&self) -> &[u8] {
        &self.signs
    }

    /// Positions in half precision, ascending.
    pub fn full_positions(&self) -> &[u32] {
        &self.full.positions
    }

    fn bytes(&self) -> usize {
        let fixed = (self.centre.capacity() + self.alpha.capacity()) * 4;
        self.signs.bytes() + self.magnitudes.bytes() + self.full.bytes() + fixed
    }
}

/// Bytes of a key and a value: 7 d / 8 where d is a multiple of 32.
pub fn row_bytes(d: usize) -> usize {
    sign_bytes(d) + 2 * two_bit::width(d)
}

/// Bytes of a row's signs.
pub fn sign_bytes(d: usize) -> usize {
    d.div_ceil(8)
}

/// Appends the sign bits of keys, `[m,d]`: bit i of a row's byte b is set where channel 8 b + i is above
/// its centre.
///
/// # Source
/// Eq. 2, with zero as a negative sign.
pub fn extend_signs(signs: &mut Lines<u8>, keys: ArrayView2<f32>, centre: &[f32]) {
    signs.grow(keys.nrows() * sign_bytes(keys.ncols()));
    for key in keys.rows() {
        let mut byte = 0;
        for (i, (k, c)) in key.iter().zip(centre).enumerate() {
            byte |= u8::from(k - c > 0.0) << (i % 8);
            if i % 8 == 7 || i + 1 == centre.len() {
                signs.push(std::mem::take(&mut byte));
            }
        }
    }
}

/// The positions that are not in `full` (ascending).
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
        match attend::in_groups(self.d) {
            true => attend::scores(self, queries, run, out, stride),
            false => attention::widened_scores(self, queries, run, out, stride),
        }
    }
}

/// Values in 2 bits.
#[derive(Clone)]
pub struct ValueRows {
    d: usize,
    values: TwoBit,
    full: FullRows,
}

impl CachedRows for ValueRows {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.read(position, scratch);
        scratch
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: OutputSums) {
        match attend::in_groups(self.d) {
            true => attend::add(self, weights, stride, run, sums),
            false => attention::widened_add(self, weights, stride, run, sums),
        }
    }
}

impl ValueRows {
    fn read(&self, position: usize, out: &mut [f32]) {
        match self.full.get(position, self.d) {
            Some(row) => out.iter_mut().zip(row).for_each(|(o, x)| *o = x.to_f32()),
            None => self.values.read(position, out),
        }
    }
}

/// What a [`Packed`] holds besides signs, centre and the positions in half precision; keys, then values.
pub(crate) struct Parts<'a> {
    /// Whether keys are signs and magnitudes.
    pub signed: bool,
    /// `[d]`.
    pub alpha: &'a [f32],
    /// `[n,d/4]` bytes, the first channel in the lowest bits.
    pub bits: [Vec<u8>; 2],
    /// Scale and zero point, `[n,groups]`.
    pub params: [Vec<[f16; 2]>; 2],
    /// Rows in half precision, keys around the centre.
    pub full: [&'a [f16]; 2],
}

/// Keys and values of one KV head in 2 bits.
#[derive(Clone)]
pub struct Packed {
    /// Keys.
    pub keys: SignRows,
    /// Values.
    pub values: ValueRows,
}

impl Packed {
    /// An empty cache with room for `capacity` positions.
    pub fn new(d: usize, layout: impl Into<Layout>, capacity: usize) -> Self {
        Self {
            keys: SignRows::new(d, layout.into(), capacity),
            values: ValueRows {
                d,
                values: TwoBit::new(d, capacity),
                full: FullRows::default(),
            },
        }
    }

    /// Appends the rows of a prompt. Keys and values `[n,d]` are those of every position, earlier ones as
    /// the cache gives them; `query` `[d]` is the last prompt query averaged over the group, and
    /// `visible` what it sees.
    ///
    /// Centre and scale are those of all rows at the last prompt that found fewer than [`REFIT`]
    /// positions. The [`FULL`] best-scored positions, of the prompt and of those that were in full
    /// precision before, keep half precision.
    pub fn prompt(
        &mut self,
        keys: ArrayView2<f32>,
        values: ArrayView2<f32>,
        query: &[f32],
        visible: Range<usize>,
    ) {
        let first = self.len();
        let kept = self.keys.full.positions.iter().map(|p| *p as usize);
        let candidates = kept.chain(first..keys.nrows());
        let full = best_scored(
            query,
            candidates.filter(|p| visible.contains(p)),
            keys,
            self.keys.layout.full,
        );
        let mut start = first;
        if first < REFIT {
            start = 0;
            self.keys.fit(keys, &full);
            self.clear();
        }
        let new = s![start.., ..];
        self.extend(keys.slice(new), values.slice(new));
        self.keep_full(full, keys, values, start);
    }

    /// Keeps half precision for the positions `full`, rows of `keys` and `values`; those before `first`
    /// have it already.
    fn keep_full(&mut self, full: Vec<u32>, keys: ArrayView2<f32>, values: ArrayView2<f32>, first: usize) {
        let d = self.keys.d;
        let room = full.len() * d;
        let mut rows = (Vec::with_capacity(room), Vec::with_capacity(room));
        for &p in &full {
            let p = p as usize;
            if p < first {
                let kept = "a position that kept half precision";
                rows.0.extend(self.keys.full.get(p, d).expect(kept));
                rows.1.extend(self.values.full.get(p, d).expect(kept));
                continue;
            }
            let centred = keys.row(p).to_owned() - ArrayView1::from(&self.keys.centre);
            rows.0.extend(centred.iter().copied().map(saturating_f16));
            rows.1.extend(values.row(p).iter().copied().map(saturating_f16));
        }
        self.keys.full = FullRows {
            positions: full.clone(),
            rows: rows.0,
        };
        self.values.full = FullRows {
            positions: full,
            rows: rows.1,
        };
    }

    /// Forgets every row.
    fn clear(&mut self) {
        self.keys.signs.clear();
        self.keys.magnitudes.clear();
        self.values.values.clear();
    }

    /// Appends rows, `[m,d]`, with the centre and the scale of the prompt.
    pub fn extend(&mut self, keys: ArrayView2<f32>, values: ArrayView2<f32>) {
        self.keys.extend(keys);
        let mut row = vec![0.0; self.keys.d];
        for value in values.rows() {
            row.iter_mut().zip(value).for_each(|(r, v)| *r = *v);
            self.values.values.push(&row);
        }
    }

    /// What a device takes up, array by array.
    pub(crate) fn parts(&self) -> Parts<'_> {
        let (keys, values) = (&self.keys, &self.values);
        Parts {
            signed: keys.layout.signed,
            alpha: &keys.alpha,
            bits: [keys.magnitudes.bits(), values.values.bits()],
            params: [keys.magnitudes.params(), values.values.params()],
            full: [&keys.full.rows, &values.full.rows],
        }
    }

    /// Number of positions.
    pub fn len(&self) -> usize {
        self.keys.signs.len() / sign_bytes(self.keys.d)
    }

    /// Whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes really held.
    pub fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.values.bytes() + self.values.full.bytes()
    }
}

#[cfg(test)]
mod tests;
