//! The loops of a decode step over rows of keys and values. Each row is read once for a group of query heads, and its
//! products with all of their queries are formed in registers.
//!
//! The lanes alone fix the order of every sum, whatever the tile size, so the results have the same bits on every
//! instruction set.

use half::{bf16, f16};
use multiversion::multiversion;
use multiversion::target::match_target;

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{LANES, Plain, Simd};
use super::rows::{AHEAD, Coming, GroupQueries, OutputSums, Run};
use crate::prefetch::prefetch_later;

/// Query heads that are processed together in one tile.
pub const GROUP: usize = 4;
/// Rows that stay in the first-level cache while all heads and channels are processed.
const BLOCK: usize = 32;

/// A type in which keys and values are stored.
pub trait Widen: Copy + Sync {
    /// Widens values to f32, exactly.
    fn widen<S: Simd>(simd: S, from: &[Self; LANES]) -> S::Vector;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[f32; LANES]) -> S::Vector {
        simd.load(from)
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[bf16; LANES]) -> S::Vector {
        simd.widen_bf16(from)
    }
}

impl Widen for f16 {
    #[inline(always)]
    fn widen<S: Simd>(simd: S, from: &[f16; LANES]) -> S::Vector {
        simd.widen_f16(from)
    }
}

/// Rows that the kernels read in chunks of [`LANES`] channels.
pub trait ChunkedRows: Copy {
    /// Whether every two chunks share one set of scales, so that chunks are widened in pairs.
    const PAIRS: bool;
    /// A row.
    type Row: Copy;

    /// Returns the number of chunks of a row.
    fn chunks(self) -> usize;

    fn row(self, position: u32) -> Self::Row;

    /// Prefetches a row.
    fn prefetch(self, position: u32);

    /// Widens N chunks of a row, starting at chunk number `at`, exactly. With [`ChunkedRows::PAIRS`], `at` must be even
    /// if N is.
    ///
    /// # Safety
    /// The row has the chunks `at..at + N`.
    unsafe fn widen<S: Simd, const N: usize>(self, simd: S, row: Self::Row, at: usize) -> [S::Vector; N];
}

/// Rows that decode steps score and add up.
pub trait StepRows: Copy {
    /// Prefetches a row.
    fn prefetch_at(self, position: u32);

    /// Computes [`super::CachedRows::scores`].
    fn scores(self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize);

    /// Computes [`super::CachedRows::add`].
    fn add(self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums);
}

impl<R: ChunkedRows> StepRows for R {
    fn prefetch_at(self, position: u32) {
        self.prefetch(position);
    }

    fn scores(self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        scores(queries, self, run, out, stride);
    }

    fn add(self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        add(weights, stride, self, run, sums);
    }
}

/// Rows of whole chunks, stored one after the other.
#[derive(Clone, Copy)]
pub struct StoredRows<'a, E> {
    /// `[n, chunks, LANES]`.
    pub rows: &'a [[E; LANES]],
    /// Chunks per row.
    pub chunks: usize,
}

impl<'a, E: Widen> ChunkedRows for StoredRows<'a, E> {
    const PAIRS: bool = false;
    type Row = &'a [[E; LANES]];

    #[inline(always)]
    fn chunks(self) -> usize {
        self.chunks
    }

    #[inline(always)]
    fn row(self, position: u32) -> &'a [[E; LANES]] {
        &self.rows[position as usize * self.chunks..][..self.chunks]
    }

    #[inline(always)]
    fn prefetch(self, position: u32) {
        prefetch_later(self.row(position));
    }

    #[inline(always)]
    unsafe fn widen<S: Simd, const N: usize>(self, simd: S, row: Self::Row, at: usize) -> [S::Vector; N] {
        let mut wide = [simd.splat(0.0); N];
        for (i, wide) in wide.iter_mut().enumerate() {
            // SAFETY: the caller guarantees that the row has these chunks. With bounds checks, the pointers do not stay
            // in registers and the loop takes twice as long.
            *wide = E::widen(simd, unsafe { row.get_unchecked(at + i) });
        }
        wide
    }
}

/// Prefetches the first rows of some positions.
pub fn prefetch_first(rows: impl StepRows, positions: &[u32]) {
    positions.iter().take(AHEAD).for_each(|p| rows.prefetch_at(*p));
}

/// Prefetches the next row of `coming`, if there is one.
#[inline(always)]
fn prefetch_next(rows: impl ChunkedRows, coming: &mut Coming) {
    if let Some(&position) = coming.next() {
        rows.prefetch(position);
    }
}

/// Returns no coming rows, for a pass over rows that an earlier pass has already prefetched.
fn nothing<'a>() -> Coming<'a> {
    [].iter().chain(&[])
}

/// Computes [`super::CachedRows::scores`] of `rows`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+fma+f16c",
    "aarch64+neon"
))]
pub fn scores<K: ChunkedRows>(queries: &GroupQueries, rows: K, run: &Run, out: &mut [f32], stride: usize) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => unsafe { scores_of::<_, K, 8, 4, 4>(Avx512::new(), queries, rows, run, out, stride) },
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => unsafe { scores_of::<_, K, 4, 2, 1>(Avx2::new(), queries, rows, run, out, stride) },
        "aarch64+neon" => scores_of::<_, K, 2, 1, 1>(Plain::<true>, queries, rows, run, out, stride),
        _ => scores_of::<_, K, 1, 1, 1>(Plain::<false>, queries, rows, run, out, stride),
    }
}

/// Computes [`scores`] in tiles of `ROWS_2` rows for one or two heads, of `ROWS_3` for three and of `ROWS_4` for four.
#[inline(always)]
pub fn scores_of<S: Simd, K: ChunkedRows, const ROWS_2: usize, const ROWS_3: usize, const ROWS_4: usize>(
    simd: S,
    queries: &GroupQueries,
    rows: K,
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    let chunks = queries.chunks;
    assert_eq!(chunks, rows.chunks(), "queries have the channels of the keys");
    let mut coming = run.coming();
    for (b, positions) in run.now.chunks(BLOCK).enumerate() {
        for (g, q) in queries.packed.chunks(GROUP * chunks).enumerate() {
            let out = &mut out[g * GROUP * stride + b * BLOCK..];
            let coming = if g == 0 { &mut coming } else { &mut nothing() };
            match q.len() / chunks {
                1 => score_heads::<S, K, ROWS_2, 1>(simd, q, rows, positions, coming, out, stride),
                2 => score_heads::<S, K, ROWS_2, 2>(simd, q, rows, positions, coming, out, stride),
                3 => score_heads::<S, K, ROWS_3, 3>(simd, q, rows, positions, coming, out, stride),
                _ => score_heads::<S, K, ROWS_4, GROUP>(simd, q, rows, positions, coming, out, stride),
            }
        }
    }
}

#[inline(always)]
fn score_heads<S: Simd, K: ChunkedRows, const J: usize, const R: usize>(
    simd: S,
    q: &[[f32; LANES]],
    rows: K,
    positions: &[u32],
    coming: &mut Coming,
    out: &mut [f32],
    stride: usize,
) {
    let (q, _) = q.as_chunks::<R>();
    // The lanes of sixteen sums are added at once: as many tiles as fill them share that work.
    let at_once = LANES / (J * R);
    let mut all = [simd.splat(0.0); LANES];
    for (b, batch) in positions.chunks(at_once * J).enumerate() {
        let (tiles, rest) = batch.as_chunks::<J>();
        for (t, tile) in tiles.iter().enumerate() {
            // With a constant place, one tile's sums stay in registers.
            let t = if at_once == 1 { 0 } else { t };
            let mut keys = [rows.row(tile[0]); J];
            for j in 0..J {
                prefetch_next(rows, coming);
                keys[j] = rows.row(tile[j]);
            }
            let sums = score_tile::<S, K, J, R>(simd, q, rows, keys);
            for a in 0..R {
                for j in 0..J {
                    all[(t * R + a) * J + j] = sums[a][j];
                }
            }
        }
        if !tiles.is_empty() {
            let scores = simd.sums(&all);
            for (t, scores) in scores.chunks_exact(R * J).take(tiles.len()).enumerate() {
                for a in 0..R {
                    let at = a * stride + (b * at_once + t) * J;
                    out[at..at + J].copy_from_slice(&scores[a * J..(a + 1) * J]);
                }
            }
        }
        for (j, p) in rest.iter().enumerate() {
            prefetch_next(rows, coming);
            let sums = score_tile::<S, K, 1, R>(simd, q, rows, [rows.row(*p)]);
            for a in 0..R {
                all[a] = sums[a][0];
            }
            let scores = simd.sums(&all);
            for a in 0..R {
                out[a * stride + (b * at_once + tiles.len()) * J + j] = scores[a];
            }
        }
    }
}

/// Returns the lanes whose sums are the scores of J keys for R heads.
#[inline(always)]
fn score_tile<S: Simd, K: ChunkedRows, const J: usize, const R: usize>(
    simd: S,
    q: &[[[f32; LANES]; R]],
    rows: K,
    keys: [K::Row; J],
) -> [[S::Vector; J]; R] {
    let mut sums = [[simd.splat(0.0); J]; R];
    if K::PAIRS {
        let (pairs, rest) = q.as_chunks::<2>();
        for (i, q) in pairs.iter().enumerate() {
            score_chunks(simd, q, rows, &keys, 2 * i, &mut sums);
        }
        if let [q] = rest {
            score_chunks(simd, &[*q], rows, &keys, 2 * pairs.len(), &mut sums);
        }
    } else {
        for (c, q) in q.as_chunks::<1>().0.iter().enumerate() {
            score_chunks(simd, q, rows, &keys, c, &mut sums);
        }
    }
    sums
}

/// Adds the products of N chunks of each key with the queries to the sums.
#[inline(always)]
fn score_chunks<S: Simd, K: ChunkedRows, const J: usize, const R: usize, const N: usize>(
    simd: S,
    q: &[[[f32; LANES]; R]; N],
    rows: K,
    keys: &[K::Row; J],
    at: usize,
    sums: &mut [[S::Vector; J]; R],
) {
    let mut k = [[simd.splat(0.0); N]; J];
    for j in 0..J {
        // SAFETY: keys have as many chunks as queries, which `scores_of` checks.
        k[j] = unsafe { rows.widen(simd, keys[j], at) };
    }
    for i in 0..N {
        for a in 0..R {
            let q = simd.load(&q[i][a]);
            for j in 0..J {
                sums[a][j] = simd.mul_add(k[j][i], q, sums[a][j]);
            }
        }
    }
}

/// Computes [`super::CachedRows::add`] of `rows`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+fma+f16c",
    "aarch64+neon"
))]
pub fn add<V: ChunkedRows>(weights: &[f32], stride: usize, rows: V, run: &Run, sums: &mut OutputSums) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => unsafe { add_of::<_, V, 4, 4>(Avx512::new(), weights, stride, rows, run, sums) },
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => unsafe { add_of::<_, V, 2, 1>(Avx2::new(), weights, stride, rows, run, sums) },
        "aarch64+neon" => add_of::<_, V, 1, 1>(Plain::<true>, weights, stride, rows, run, sums),
        _ => add_of::<_, V, 1, 1>(Plain::<false>, weights, stride, rows, run, sums),
    }
}

/// Computes [`add`] in tiles of `CHUNKS_3` chunks for up to three heads, and of `CHUNKS_4` for four.
#[inline(always)]
pub fn add_of<S: Simd, V: ChunkedRows, const CHUNKS_3: usize, const CHUNKS_4: usize>(
    simd: S,
    weights: &[f32],
    stride: usize,
    rows: V,
    run: &Run,
    sums: &mut OutputSums,
) {
    let chunks = sums.values.len() / sums.r;
    assert_eq!(chunks, rows.chunks(), "sums have the channels of the values");
    let mut coming = run.coming();
    for (b, positions) in run.now.chunks(BLOCK).enumerate() {
        for (g, sums) in sums.values.chunks_mut(GROUP * chunks).enumerate() {
            let weights = &weights[g * GROUP * stride + b * BLOCK..];
            let coming = if g == 0 { &mut coming } else { &mut nothing() };
            match sums.len() / chunks {
                1 => add_heads::<S, V, 1, CHUNKS_3>(simd, weights, stride, rows, positions, coming, sums),
                2 => add_heads::<S, V, 2, CHUNKS_3>(simd, weights, stride, rows, positions, coming, sums),
                3 => add_heads::<S, V, 3, CHUNKS_3>(simd, weights, stride, rows, positions, coming, sums),
                _ => add_heads::<S, V, GROUP, CHUNKS_4>(simd, weights, stride, rows, positions, coming, sums),
            }
        }
    }
}

#[inline(always)]
fn add_heads<S: Simd, V: ChunkedRows, const R: usize, const CHUNKS: usize>(
    simd: S,
    weights: &[f32],
    stride: usize,
    rows: V,
    positions: &[u32],
    coming: &mut Coming,
    sums: &mut [[f32; LANES]],
) {
    let chunks = sums.len() / R;
    let mut w: [&[f32]; R] = [&[]; R];
    for a in 0..R {
        w[a] = &weights[a * stride..][..positions.len()];
    }
    let mut at = 0;
    while at + CHUNKS <= chunks {
        let coming = if at == 0 { &mut *coming } else { &mut nothing() };
        add_tile::<S, V, R, CHUNKS>(simd, &w, rows, at, positions, coming, sums);
        at += CHUNKS;
    }
    while at < chunks {
        let coming = if at == 0 { &mut *coming } else { &mut nothing() };
        add_tile::<S, V, R, 1>(simd, &w, rows, at, positions, coming, sums);
        at += 1;
    }
}

/// Adds weighted rows to the sums of R heads, for the `CHUNKS` chunks from chunk number `at` on.
#[inline(always)]
fn add_tile<S: Simd, V: ChunkedRows, const R: usize, const CHUNKS: usize>(
    simd: S,
    weights: &[&[f32]; R],
    rows: V,
    at: usize,
    positions: &[u32],
    coming: &mut Coming,
    out: &mut [[f32; LANES]],
) {
    let chunks = out.len() / R;
    let mut sums = [[simd.splat(0.0); CHUNKS]; R];
    for a in 0..R {
        for c in 0..CHUNKS {
            sums[a][c] = simd.load(&out[a * chunks + at + c]);
        }
    }
    for (j, p) in positions.iter().enumerate() {
        prefetch_next(rows, coming);
        // SAFETY: values have as many chunks as sums, which `add_of` checks.
        let v: [S::Vector; CHUNKS] = unsafe { rows.widen(simd, rows.row(*p), at) };
        for a in 0..R {
            let weight = simd.splat(weights[a][j]);
            for c in 0..CHUNKS {
                sums[a][c] = simd.mul_add(v[c], weight, sums[a][c]);
            }
        }
    }
    for a in 0..R {
        for c in 0..CHUNKS {
            out[a * chunks + at + c] = simd.store(sums[a][c]);
        }
    }
}
