//! Attention over 2-bit rows that are dequantised in registers, for rows of whole quantisation groups.

#![expect(clippy::needless_range_loop, reason = "iterators keep it from vectorising")]

use super::two_bit::{TwoBit, pair};
use super::{FullRows, QUANT_GROUP, SignRows, ValueRows, sign_bytes};
use crate::compute::attention::lanes::Simd;
use crate::compute::attention::{self, ChunkedRows, GroupQueries, LANES, OutputSums, Run};
use crate::prefetch::prefetch;

/// Chunks of [`LANES`] channels in a quantisation group.
const CHUNKS: usize = QUANT_GROUP / LANES;

/// Says whether rows of d channels consist of whole quantisation groups.
pub(super) fn in_groups(d: usize) -> bool {
    d.is_multiple_of(QUANT_GROUP)
}

/// Implements [`attention::CachedRows::scores`] if [`in_groups`].
pub(super) fn scores(rows: &SignRows, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
    for (at, run, is_full) in parts(run, &rows.full) {
        let out = &mut out[at..];
        match is_full {
            true => attention::widened_scores(rows, queries, &run, out, stride),
            false => attention::scores(queries, Keys::of(rows), &run, out, stride),
        }
    }
}

/// Implements [`attention::CachedRows::add`] if [`in_groups`].
pub(super) fn add(rows: &ValueRows, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
    for (at, run, is_full) in parts(run, &rows.full) {
        let weights = &weights[at..];
        match is_full {
            true => attention::widened_add(rows, weights, stride, &run, sums),
            false => attention::add(weights, stride, Values::of(rows), &run, sums),
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
        let run = match at < now.len() {
            true => Run::new(rest, at - start),
            false => Run { now: rest, next },
        };
        Some((start, run, is_full))
    })
}

/// Keys in 2 bits, for the kernels.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    rows: &'a SignRows,
    /// The largest centred magnitude per channel, `[chunks, LANES]`.
    alpha: &'a [[f32; LANES]],
    /// The centre per channel, `[chunks, LANES]`.
    centre: &'a [[f32; LANES]],
    /// Bits to set in the signs of every chunk: none, or all of them if keys are stored without signs.
    unsigned: u16,
}

impl<'a> Keys<'a> {
    pub fn of(rows: &'a SignRows) -> Self {
        Self {
            rows,
            alpha: rows.alpha.as_chunks().0,
            centre: rows.centre.as_chunks().0,
            unsigned: if rows.layout.signed { 0 } else { u16::MAX },
        }
    }

    #[inline(always)]
    fn signs(self, position: u32) -> &'a [u8] {
        let width = sign_bytes(self.rows.d);
        &self.rows.signs[position as usize * width..][..width]
    }
}

impl<'a> ChunkedRows for Keys<'a> {
    const PAIRS: bool = true;
    /// The bytes of a row's magnitudes, and those of its signs.
    type Row = (&'a [u8], &'a [u8]);

    #[inline(always)]
    fn chunks(self) -> usize {
        self.alpha.len().min(self.centre.len())
    }

    #[inline(always)]
    fn row(self, position: u32) -> Self::Row {
        (self.rows.magnitudes.row(position as usize), self.signs(position))
    }

    #[inline(always)]
    fn prefetch(self, position: u32) {
        self.rows.magnitudes.prefetch(position as usize);
        prefetch(self.signs(position));
    }

    /// # Source
    /// Eq. 13: sign (Q s + z) alpha; plus the centre.
    #[inline(always)]
    unsafe fn widen<S: Simd, const N: usize>(self, simd: S, row: Self::Row, at: usize) -> [S::Vector; N] {
        let (magnitudes, signs) = row;
        // SAFETY: the caller guarantees that the row has these chunks.
        let mut wide = unsafe { widen::<S, N>(simd, self.rows.d, magnitudes, at) };
        for i in 0..N {
            let c = at + i;
            // SAFETY: as above; alpha and centre have as many chunks, and a chunk has two bytes of signs.
            let (alpha, centre, signs) = unsafe {
                (
                    self.alpha.get_unchecked(c),
                    self.centre.get_unchecked(c),
                    u16::from_le_bytes(bytes(signs, 2 * c)),
                )
            };
            let magnitude = simd.mul(wide[i], simd.load(alpha));
            let centred = simd.flip(magnitude, !(signs | self.unsigned));
            wide[i] = simd.add(simd.load(centre), centred);
        }
        wide
    }
}

/// Values in 2 bits, for the kernels.
#[derive(Clone, Copy)]
pub(super) struct Values<'a>(&'a TwoBit);

impl<'a> Values<'a> {
    pub fn of(rows: &'a ValueRows) -> Self {
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
        // An even number of chunks starts with a group, so two chunks each share a scale, widened once.
        let group = if N.is_multiple_of(CHUNKS) {
            at / CHUNKS + i / CHUNKS
        } else {
            (at + i) / CHUNKS
        };
        // SAFETY: the row has these chunks; a chunk takes four bytes, and a group four more after all chunks.
        let (codes, params) = unsafe { (bytes(row, 4 * (at + i)), bytes(row, d / 4 + 4 * group)) };
        let [step, zero] = simd.widen_pair(pair(params));
        wide[i] = simd.two_bits(u32::from_le_bytes(codes), step, zero);
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
