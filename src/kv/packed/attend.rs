//! Attention over 2-bit rows that are dequantised in registers, for rows of whole quantisation groups.

#![expect(clippy::needless_range_loop, reason = "iterators keep it from vectorising")]

use super::two_bit::{TwoBit, pair};
use super::{FullRows, QUANT_GROUP, SignRows, ValueRows, sign_bytes};
use crate::compute::attention::lanes::Simd;
use crate::compute::attention::{self, ChunkedRows, GroupQueries, LANES, OutputSums, Run, StoredRows};
use crate::prefetch::prefetch_row;

/// Chunks of [`LANES`] channels in a quantisation group.
const CHUNKS: usize = QUANT_GROUP / LANES;

/// Says whether rows of d channels consist of whole quantisation groups.
pub(super) fn in_groups(d: usize) -> bool {
    d.is_multiple_of(QUANT_GROUP)
}

/// Implements [`attention::CachedRows::scores`] if [`in_groups`].
///
/// # Numerics
/// A key is `c + alpha x`, per channel, with the same center c and scale alpha for all keys. Its score is therefore
/// `q . c + (q alpha) . x`: the queries are scaled once, instead of every key.
pub(super) fn scores(rows: &SignRows, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
    if rows.layout.signed {
        scores_of(Keys::<true>::new(rows), queries, run, out, stride)
    } else {
        scores_of(Keys::<false>::new(rows), queries, run, out, stride)
    }
}

fn scores_of<const SIGNED: bool>(
    keys: Keys<SIGNED>,
    queries: &GroupQueries,
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    let (scaled, of_centers) = (keys.scaled(queries), keys.center_scores(queries));
    for (at, run, is_full) in parts(run, &keys.rows.full) {
        let out = &mut out[at..];
        if is_full {
            attention::widened_scores(keys.rows, queries, &run, out, stride);
            continue;
        }
        attention::scores(&scaled, keys, &run, out, stride);
        for (out, of_centers) in out.chunks_mut(stride).zip(&of_centers) {
            out[..run.now.len()]
                .iter_mut()
                .for_each(|score| *score += of_centers);
        }
    }
}

/// Implements [`attention::CachedRows::add`] if [`in_groups`].
pub(super) fn add(rows: &ValueRows, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
    for (at, run, is_full) in parts(run, &rows.full) {
        let weights = &weights[at..];
        if is_full {
            attention::widened_add(rows, weights, stride, &run, sums)
        } else {
            attention::add(weights, stride, Values::new(rows), &run, sums)
        }
    }
}

/// Splits a run where precision changes; yields each part's first index in the run, its positions, and
/// whether they are in half precision.
fn parts<'a>(run: &Run<'a>, full: &FullRows) -> impl Iterator<Item = (usize, Run<'a>, bool)> {
    let Run { now, next } = *run;
    let mut at = 0;
    let first = now.first().copied().unwrap_or(0);
    let full = &full.positions[full.positions.partition_point(|p| *p < first)..];
    let mut full = full.iter().peekable();
    std::iter::from_fn(move || {
        let start = at;
        let rest = now.get(start..).filter(|rest| !rest.is_empty())?;
        while full.next_if(|p| **p < rest[0]).is_some() {}
        let is_full = full.peek() == Some(&&rest[0]);
        // Up to the next attended position in half precision.
        at += match full.peek() {
            Some(_) if is_full => 1,
            Some(p) => rest.partition_point(|q| q < *p),
            None => rest.len(),
        };
        let run = if at < now.len() {
            Run::new(rest, at - start)
        } else {
            Run { now: rest, next }
        };
        Some((start, run, is_full))
    })
}

/// Keys in 2 bits, for the kernels: without center and scale, and with the other sign if they have signs.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a, const SIGNED: bool> {
    rows: &'a SignRows,
    /// Bytes of a row's signs.
    width: usize,
}

impl<'a, const SIGNED: bool> Keys<'a, SIGNED> {
    pub fn new(rows: &'a SignRows) -> Self {
        let width = sign_bytes(rows.d);
        Self { rows, width }
    }

    /// Returns queries whose products with these rows are those with the centered keys.
    pub fn scaled(self, queries: &GroupQueries) -> GroupQueries {
        let sign = if SIGNED { -1.0 } else { 1.0 };
        let factors: Vec<f32> = self.rows.alpha.iter().map(|alpha| sign * alpha).collect();
        queries.times(factors.as_chunks().0)
    }

    /// Returns the product of each query with the center.
    fn center_scores(self, queries: &GroupQueries) -> Vec<f32> {
        let rows = self.rows.centers.as_chunks().0;
        let mut out = vec![0.0; queries.heads()];
        let chunks = rows.len();
        attention::scores(
            queries,
            StoredRows { rows, chunks },
            &Run::new(&[0], 1),
            &mut out,
            1,
        );
        out
    }
}

impl<'a, const SIGNED: bool> ChunkedRows for Keys<'a, SIGNED> {
    const PAIRS: bool = true;
    /// The bytes of a row's magnitudes, and those of its signs.
    type Row = (&'a [u8], &'a [u8]);

    #[inline(always)]
    fn chunks(self) -> usize {
        self.rows.d / LANES
    }

    #[inline(always)]
    fn row(self, position: u32) -> Self::Row {
        let position = position as usize;
        let signs = &self.rows.signs[position * self.width..][..self.width];
        (self.rows.magnitudes.row(position), signs)
    }

    #[inline(always)]
    fn prefetch(self, position: u32) {
        self.rows.magnitudes.prefetch(position as usize);
        prefetch_row(&self.rows.signs, position as usize, self.width);
    }

    /// # Source
    /// Eq. 13: - sign (Q s + z), whose other sign is in the queries.
    #[inline(always)]
    unsafe fn widen<S: Simd, const N: usize>(self, simd: S, row: Self::Row, at: usize) -> [S::Vector; N] {
        let (magnitudes, signs) = row;
        // SAFETY: the caller guarantees that the row has these chunks.
        let mut wide = unsafe { widen::<S, N>(simd, self.rows.d, magnitudes, at) };
        if SIGNED {
            for i in 0..N {
                // SAFETY: as above; a chunk has two bytes of signs.
                let signs = u16::from_le_bytes(unsafe { bytes(signs, 2 * (at + i)) });
                wide[i] = simd.flip(wide[i], signs);
            }
        }
        wide
    }
}

/// Values in 2 bits, for the kernels.
#[derive(Clone, Copy)]
pub(super) struct Values<'a>(&'a TwoBit);

impl<'a> Values<'a> {
    pub fn new(rows: &'a ValueRows) -> Self {
        Self(&rows.values)
    }
}

impl<'a> ChunkedRows for Values<'a> {
    const PAIRS: bool = true;
    type Row = &'a [u8];

    #[inline(always)]
    fn chunks(self) -> usize {
        self.0.d / LANES
    }

    #[inline(always)]
    fn row(self, position: u32) -> &'a [u8] {
        self.0.row(position as usize)
    }

    #[inline(always)]
    fn prefetch(self, position: u32) {
        self.0.prefetch(position as usize);
    }

    #[inline(always)]
    unsafe fn widen<S: Simd, const N: usize>(self, simd: S, row: &'a [u8], at: usize) -> [S::Vector; N] {
        // SAFETY: the caller guarantees that the row has these chunks.
        unsafe { widen(simd, self.0.d, row, at) }
    }
}

/// Dequantises N chunks, from chunk `at` on, of a [`TwoBit`] row of d channels.
///
/// # Safety
/// The row has these chunks.
#[inline(always)]
unsafe fn widen<S: Simd, const N: usize>(simd: S, d: usize, row: &[u8], at: usize) -> [S::Vector; N] {
    let mut wide = [simd.splat(0.0); N];
    for i in 0..N {
        // An even number of chunks starts with a group, so two chunks each share their levels.
        let group = if N.is_multiple_of(CHUNKS) {
            at / CHUNKS + i / CHUNKS
        } else {
            (at + i) / CHUNKS
        };
        // SAFETY: the row has these chunks; a chunk takes four bytes, and a group four more after all chunks.
        let (codes, params) = unsafe { (bytes(row, 4 * (at + i)), bytes(row, d / 4 + 4 * group)) };
        wide[i] = simd.two_bits(u32::from_le_bytes(codes), simd.levels(pair(params)));
    }
    wide
}

/// Reads N bytes of a row, from byte `at` on.
///
/// # Safety
/// The row has these bytes.
#[inline(always)]
unsafe fn bytes<const N: usize>(row: &[u8], at: usize) -> [u8; N] {
    debug_assert!(at + N <= row.len());
    // SAFETY: the caller guarantees the length; byte arrays need no alignment.
    unsafe { row.as_ptr().add(at).cast::<[u8; N]>().read() }
}
