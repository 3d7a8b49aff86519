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

mod widen;

use std::ops::Range;

use half::f16;
use ndarray::{ArrayView1, ArrayView2, Axis, s};
use rayon::prelude::*;

use super::kv::grow;
use crate::compute::attention::{self, LANES, Rows};
use crate::compute::simd;

/// Positions that keep half precision.
pub const FULL: usize = 64;
/// A prompt that finds fewer positions cached fixes centre and scale anew, from all of them.
pub const REFIT: usize = 128;
/// Channels that share a scale and a zero point.
pub const QUANT_GROUP: usize = 32;
/// A step below this is taken for zero: the group's values are equal.
const LEAST_STEP: f32 = 1e-8;

/// What is taken off every channel before its signs are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Center {
    /// The lower median: half of the signs are positive.
    Median,
    /// The mean.
    Mean,
}

impl Center {
    /// Centre of some values; zero if there are none.
    ///
    /// # Source
    /// Eq. 5 has the mean; the authors' code takes the lower median.
    pub fn of(self, values: &mut [f32]) -> f32 {
        if values.is_empty() {
            return 0.0;
        }
        match self {
            Self::Median => {
                let middle = (values.len() - 1) / 2;
                *values.select_nth_unstable_by(middle, f32::total_cmp).1
            }
            Self::Mean => {
                let sum: f64 = values.iter().map(|v| f64::from(*v)).sum();
                (sum / values.len() as f64) as f32
            }
        }
    }

    /// Centre of every channel of `rows`, `[n,d]`.
    pub fn of_channels(self, rows: ArrayView2<f32>) -> Vec<f32> {
        rows.axis_iter(Axis(1))
            .into_par_iter()
            .map(|channel| self.of(&mut channel.to_vec()))
            .collect()
    }

    /// Its name in the manifest and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Median => "median",
            Self::Mean => "mean",
        }
    }
}

/// How the 2-bit cache holds its rows; what is not the default is for ablations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// What signs are taken around.
    pub center: Center,
    /// Most positions that keep half precision.
    pub full: usize,
    /// Whether a key's signs are stored and its magnitudes quantised; else the keys themselves are
    /// quantised, as values are, and signs serve the index alone.
    pub signed: bool,
}

impl From<Center> for Layout {
    fn from(center: Center) -> Self {
        Self {
            center,
            full: FULL,
            signed: true,
        }
    }
}

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

/// Rows of values in 2 bits, with a scale and a zero point in f16 per [`QUANT_GROUP`] channels.
#[derive(Clone)]
struct TwoBit {
    d: usize,
    /// Four values a byte, the first in the lowest bits; every row starts a byte.
    bits: Vec<u8>,
    /// Scale and zero point; the last group of a row may be shorter.
    params: Vec<[f16; 2]>,
}

impl TwoBit {
    fn new(d: usize, capacity: usize) -> Self {
        Self {
            d,
            bits: Vec::with_capacity(capacity * d.div_ceil(4)),
            params: Vec::with_capacity(capacity * d.div_ceil(QUANT_GROUP)),
        }
    }

    /// Appends a row.
    ///
    /// # Source
    /// Eq. 9-11: z = min x, s = (max x - min x) / 3, Q = round((x - z) / s). The codes come from the
    /// unrounded scale and zero point.
    fn push(&mut self, row: &[f32]) {
        let start = self.bits.len();
        let bytes = self.d.div_ceil(4);
        grow(&mut self.bits, bytes).resize(start + bytes, 0);
        grow(&mut self.params, self.d.div_ceil(QUANT_GROUP));
        for (g, group) in row.chunks(QUANT_GROUP).enumerate() {
            let low = group.iter().copied().fold(f32::INFINITY, f32::min);
            let high = group.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let step = match (high - low) / 3.0 {
                step if step < LEAST_STEP => 0.0,
                step => step,
            };
            self.params.push([saturating_f16(step), saturating_f16(low)]);
            if step == 0.0 {
                continue;
            }
            for (i, x) in group.iter().enumerate() {
                let code = ((x - low) / step).round().clamp(0.0, 3.0) as u8;
                let channel = g * QUANT_GROUP + i;
                self.bits[start + channel / 4] |= code << (2 * (channel % 4));
            }
        }
    }

    /// Q s + z of every channel.
    fn read(&self, row: usize, out: &mut [f32]) {
        let bits = &self.bits[row * self.d.div_ceil(4)..];
        let groups = self.d.div_ceil(QUANT_GROUP);
        let params = &self.params[row * groups..(row + 1) * groups];
        for (g, (group, [step, zero])) in out.chunks_mut(QUANT_GROUP).zip(params).enumerate() {
            let (step, zero) = (step.to_f32(), zero.to_f32());
            for (i, x) in group.iter_mut().enumerate() {
                let channel = g * QUANT_GROUP + i;
                let code = bits[channel / 4] >> (2 * (channel % 4)) & 3;
                *x = f32::from(code) * step + zero;
            }
        }
    }

    fn bytes(&self) -> usize {
        self.bits.capacity() + self.params.capacity() * size_of::<[f16; 2]>()
    }
}

/// The nearest f16, the largest one for values beyond.
fn saturating_f16(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
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
    signs: Vec<u8>,
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
            signs: Vec::with_capacity(capacity * sign_bytes(d)),
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
        self.signs.capacity() + self.magnitudes.bytes() + self.full.bytes() + fixed
    }
}

/// Bytes of a key and a value: 7 d / 8 where d is a multiple of 32.
pub fn row_bytes(d: usize) -> usize {
    sign_bytes(d) + 2 * (d.div_ceil(4) + 4 * d.div_ceil(QUANT_GROUP))
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
pub fn extend_signs(signs: &mut Vec<u8>, keys: ArrayView2<f32>, centre: &[f32]) {
    grow(signs, keys.nrows() * sign_bytes(keys.ncols()));
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

impl Rows for SignRows {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.read(position, scratch);
        scratch
    }

    fn widen(&self, positions: &[u32], out: &mut [[f32; LANES]]) {
        if widen::in_groups(self.d) {
            widen::keys(self, positions, out);
        } else {
            attention::widen_rows(self, positions, out);
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

impl Rows for ValueRows {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.read(position, scratch);
        scratch
    }

    fn widen(&self, positions: &[u32], out: &mut [[f32; LANES]]) {
        if widen::in_groups(self.d) {
            widen::values(self, positions, out);
        } else {
            attention::widen_rows(self, positions, out);
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
    pub d: usize,
    /// Whether keys are signs and magnitudes.
    pub signed: bool,
    /// `[d]`.
    pub alpha: &'a [f32],
    /// `[n,d/4]` bytes, the first channel in the lowest bits.
    pub bits: [&'a [u8]; 2],
    /// Scale and zero point, `[n,groups]`.
    pub params: [&'a [[f16; 2]]; 2],
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
                rows.0.extend(self.keys.full.get(p, d).unwrap_or(&[]));
                rows.1.extend(self.values.full.get(p, d).unwrap_or(&[]));
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
        for rows in [&mut self.keys.magnitudes, &mut self.values.values] {
            rows.bits.clear();
            rows.params.clear();
        }
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

    /// The arrays themselves, for a device.
    pub(crate) fn parts(&self) -> Parts<'_> {
        let (keys, values) = (&self.keys, &self.values);
        Parts {
            d: keys.d,
            signed: keys.layout.signed,
            alpha: &keys.alpha,
            bits: [&keys.magnitudes.bits, &values.values.bits],
            params: [&keys.magnitudes.params, &values.values.params],
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
mod tests {
    use super::*;
    use ndarray::Array2;

    #[test]
    fn two_bit_golden_example() {
        let mut rows = TwoBit::new(4, 1);
        rows.push(&[0.1, 0.4, 0.75, 1.0]);
        assert_eq!(rows.bits, [0xe4]);
        let mut out = [0.0; 4];
        rows.read(0, &mut out);
        for (x, expected) in out.iter().zip([0.1, 0.4, 0.7, 1.0]) {
            // Scale and zero point have 11 bits.
            assert!((x - expected).abs() < 1e-3, "{out:?}");
        }
    }

    #[test]
    fn sign_golden_example() {
        let mut signs = Vec::new();
        let key = ndarray::array![[0.5, -1.0, 2.0, -0.25, -3.0, 0.0, 1.5, 4.0]];
        extend_signs(&mut signs, key.view(), &[0.0; 8]);
        assert_eq!(signs, [0xc5]);
    }

    #[test]
    fn equal_values_and_extremes_survive() {
        let mut rows = TwoBit::new(40, 1);
        let mut row = vec![2.5; 40];
        row[39] = 1e30;
        rows.push(&row);
        let mut out = vec![0.0; 40];
        rows.read(0, &mut out);
        assert_eq!(out[..32], row[..32], "a constant group is exact");
        assert!(out.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn a_position_takes_seven_bits_per_channel() {
        for (d, bytes) in [(128, 112), (64, 56)] {
            let mut packed = Packed::new(d, Center::Median, 1000);
            let rows = Array2::from_shape_fn((1000, d), |(i, j)| ((i * d + j) as f32 * 0.7).sin());
            packed.prompt(rows.view(), rows.view(), &vec![1.0; d], 0..1000);
            let full = 2 * FULL * (2 * d + 4);
            assert_eq!(packed.bytes(), 1000 * bytes + full + 2 * 4 * d, "d {d}");
        }
    }

    /// Keys whose channels have very different sizes and centres.
    fn keys(first: usize, n: usize, d: usize) -> Array2<f32> {
        Array2::from_shape_fn((n, d), |(i, j)| {
            let x = (((first + i) * d + j) as f32 * 0.7).sin() + (((first + i) * 7 + j) as f32 * 0.31).cos();
            x * (1.0 + (j % 5) as f32) + (j % 3) as f32 * 10.0
        })
    }

    /// Mean over rows and channels of the squared error, in squared channel sizes.
    fn error(packed: &Packed, exact: &Array2<f32>) -> f64 {
        let d = exact.ncols();
        let mut scratch = vec![0.0; d];
        let mut sum = 0.0;
        for (p, row) in exact.rows().into_iter().enumerate() {
            let read = packed.keys.row(p, &mut scratch);
            for (j, (x, y)) in read.iter().zip(row).enumerate() {
                sum += f64::from((x - y) / (1.0 + (j % 5) as f32)).powi(2);
            }
        }
        sum / exact.len() as f64
    }

    #[test]
    fn widened_rows_are_the_rows() {
        for (d, signed) in [(32, true), (64, false), (80, true), (128, true), (128, false)] {
            let layout = Layout {
                center: Center::Mean,
                full: 5,
                signed,
            };
            let mut packed = Packed::new(d, layout, 0);
            let mut exact = keys(0, 200, d);
            exact.row_mut(7).fill(3.0);
            exact[[9, d - 1]] = 1e30;
            packed.prompt(exact.view(), exact.view(), &vec![1.0; d], 0..200);
            let some = packed.keys.full_positions()[1];
            let chosen: Vec<u32> = (0..200).filter(|p| p % 3 != 1 || *p == some).collect();
            let chunks = d.div_ceil(LANES);
            for rows in [&packed.keys as &dyn Rows, &packed.values] {
                for positions in [&chosen[..], &chosen[20..37], &[some], &[]] {
                    let mut wide = vec![[0.0; LANES]; positions.len() * chunks];
                    rows.widen(positions, &mut wide);
                    for (wide, p) in wide.chunks(chunks).zip(positions) {
                        let mut scratch = vec![0.0; d];
                        let row = rows.row(*p as usize, &mut scratch);
                        assert_eq!(wide.as_flattened()[..d], *row, "d {d}, signed {signed}, row {p}");
                    }
                }
            }
        }
    }

    #[test]
    fn short_prompts_are_held_as_well_as_long_ones() {
        let d = 64;
        let after = |lengths: &[usize]| {
            let mut packed = Packed::new(d, Center::Median, 0);
            let all = keys(0, lengths.iter().sum(), d);
            let mut end = 0;
            for m in lengths {
                end += m;
                // Earlier rows as the cache gives them.
                let mut known = all.slice(s![..end, ..]).to_owned();
                let mut scratch = vec![0.0; d];
                for (p, mut row) in known.rows_mut().into_iter().take(end - m).enumerate() {
                    row.assign(&ArrayView1::from(packed.keys.row(p, &mut scratch)));
                }
                packed.prompt(known.view(), known.view(), &vec![1.0; d], 0..end);
            }
            error(&packed, &all)
        };
        let long = after(&[1000]);
        assert!(long < 0.1, "{long}");
        // One more token than keeps full precision; a conversation that begins with a word or two.
        for lengths in [
            &[65][..],
            &[66],
            &[80],
            &[130],
            &[1, 600],
            &[3, 70, 600],
            &[20, 40, 300],
        ] {
            let error = after(lengths);
            assert!(error < 1.5 * long, "{lengths:?}: {error}, long {long}");
        }
    }

    #[test]
    fn the_ablations_hold_what_they_say() {
        let (n, d) = (400, 64);
        let exact = keys(0, n, d);
        let held = |full: usize, signed: bool| {
            let layout = Layout {
                center: Center::Mean,
                full,
                signed,
            };
            let mut packed = Packed::new(d, layout, n);
            packed.prompt(exact.view(), exact.view(), &vec![1.0; d], 0..n);
            assert_eq!(packed.keys.full_positions().len(), full);
            (error(&packed, &exact), packed.keys.signs().to_vec())
        };
        let (signed, signs) = held(0, true);
        let (plain, same) = held(0, false);
        assert_eq!(signs, same, "the index does not change");
        // Two bits over the whole range instead of two over the magnitude and one for the sign: steps of
        // up to twice the size, so up to four times the squared error.
        assert!(plain > 1.5 * signed && plain < 6.0 * signed, "{plain} {signed}");
        let (some, _) = held(64, true);
        assert!(some < signed, "{some} {signed}");
    }
}
