//! The loops of a decode step over rows of keys and values: every row is read once for a group of query
//! heads, whose products with it are formed in registers.
//!
//! The order of every sum is fixed by the lanes, not by the tiles: the same bits on every instruction set.

use half::{bf16, f16};
use multiversion::multiversion;
use multiversion::target::match_target;

#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512};
use super::lanes::{LANES, Lanes, Plain};
use super::rows::{Coming, Queries, Run, Sums, prefetch};

/// Query heads that share a tile.
pub const GROUP: usize = 4;
/// Rows that stay in the first cache while every group of heads and every tile of channels meets them.
const BLOCK: usize = 32;

/// A stored value.
pub trait Element: Copy + Sync {
    /// Exactly, as f32.
    fn widen<S: Lanes>(simd: S, from: &[Self; LANES]) -> S::Vector;
}

impl Element for f32 {
    #[inline(always)]
    fn widen<S: Lanes>(simd: S, from: &[f32; LANES]) -> S::Vector {
        simd.load(from)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn widen<S: Lanes>(simd: S, from: &[bf16; LANES]) -> S::Vector {
        simd.widen_bf16(from)
    }
}

impl Element for f16 {
    #[inline(always)]
    fn widen<S: Lanes>(simd: S, from: &[f16; LANES]) -> S::Vector {
        simd.widen_f16(from)
    }
}

/// Rows that the kernels read chunk by chunk.
pub trait Source: Copy {
    /// Whether two chunks have in common what it takes to widen them.
    const PAIRS: bool;
    /// A row.
    type Row: Copy;

    /// Chunks of a row.
    fn chunks(self) -> usize;

    fn row(self, position: u32) -> Self::Row;

    /// Asks for a row that is read soon.
    fn prefetch(self, position: u32);

    /// N chunks of a row from `at` on, exactly; where [`Source::PAIRS`] and N is even, so is `at`.
    ///
    /// # Safety
    /// The row has these chunks.
    unsafe fn widen<S: Lanes, const N: usize>(self, simd: S, row: Self::Row, at: usize) -> [S::Vector; N];
}

/// Rows of whole chunks, one after the other.
#[derive(Clone, Copy)]
pub struct Stored<'a, E> {
    /// `[n, chunks, LANES]`.
    pub rows: &'a [[E; LANES]],
    /// Chunks of a row.
    pub chunks: usize,
}

impl<'a, E: Element> Source for Stored<'a, E> {
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
        prefetch(self.row(position));
    }

    #[inline(always)]
    unsafe fn widen<S: Lanes, const N: usize>(self, simd: S, row: Self::Row, at: usize) -> [S::Vector; N] {
        let mut wide = [simd.splat(0.0); N];
        for (i, wide) in wide.iter_mut().enumerate() {
            // SAFETY: as the caller says. The checks would keep the pointers from staying in registers, at
            // twice the time.
            *wide = E::widen(simd, unsafe { row.get_unchecked(at + i) });
        }
        wide
    }
}

/// Asks for the next of the rows that are read soon.
#[inline(always)]
fn prefetch_next(rows: impl Source, coming: &mut Coming) {
    if let Some(&position) = coming.next() {
        rows.prefetch(position);
    }
}

/// No rows: they have been asked for.
fn nothing<'a>() -> Coming<'a> {
    [].iter().chain(&[])
}

/// [`super::Rows::scores`] of `rows`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+fma+f16c",
    "aarch64+neon"
))]
pub fn scores<K: Source>(queries: &Queries, rows: K, run: &Run, out: &mut [f32], stride: usize) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => unsafe { scores_of::<_, K, 8, 4>(Avx512::new(), queries, rows, run, out, stride) },
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => unsafe { scores_of::<_, K, 4, 1>(Avx2::new(), queries, rows, run, out, stride) },
        "aarch64+neon" => scores_of::<_, K, 2, 1>(Plain::<true>, queries, rows, run, out, stride),
        _ => scores_of::<_, K, 1, 1>(Plain::<false>, queries, rows, run, out, stride),
    }
}

/// [`scores`] in tiles of `FEW` rows with one or two heads and of `MANY` rows with three or four.
#[inline(always)]
pub fn scores_of<S: Lanes, K: Source, const FEW: usize, const MANY: usize>(
    simd: S,
    queries: &Queries,
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
                1 => score_heads::<S, K, FEW, 1>(simd, q, rows, positions, coming, out, stride),
                2 => score_heads::<S, K, FEW, 2>(simd, q, rows, positions, coming, out, stride),
                3 => score_heads::<S, K, MANY, 3>(simd, q, rows, positions, coming, out, stride),
                _ => score_heads::<S, K, MANY, GROUP>(simd, q, rows, positions, coming, out, stride),
            }
        }
    }
}

#[inline(always)]
fn score_heads<S: Lanes, K: Source, const J: usize, const R: usize>(
    simd: S,
    q: &[[f32; LANES]],
    rows: K,
    positions: &[u32],
    coming: &mut Coming,
    out: &mut [f32],
    stride: usize,
) {
    let (q, _) = q.as_chunks::<R>();
    let (tiles, rest) = positions.as_chunks::<J>();
    for (t, tile) in tiles.iter().enumerate() {
        let mut keys = [rows.row(tile[0]); J];
        for j in 0..J {
            prefetch_next(rows, coming);
            keys[j] = rows.row(tile[j]);
        }
        let scores = score_tile::<S, K, J, R>(simd, q, rows, keys);
        for a in 0..R {
            out[a * stride + t * J..][..J].copy_from_slice(&scores[a * J..(a + 1) * J]);
        }
    }
    for (j, p) in rest.iter().enumerate() {
        prefetch_next(rows, coming);
        let scores = score_tile::<S, K, 1, R>(simd, q, rows, [rows.row(*p)]);
        for a in 0..R {
            out[a * stride + tiles.len() * J + j] = scores[a];
        }
    }
}

/// Scores of J keys for R heads, that of head a and key j at `a J + j`; at most [`LANES`] of them.
#[inline(always)]
fn score_tile<S: Lanes, K: Source, const J: usize, const R: usize>(
    simd: S,
    q: &[[[f32; LANES]; R]],
    rows: K,
    keys: [K::Row; J],
) -> [f32; LANES] {
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
    let mut all = [simd.splat(0.0); LANES];
    for a in 0..R {
        for j in 0..J {
            all[a * J + j] = sums[a][j];
        }
    }
    simd.sums(&all)
}

/// Adds the products of N chunks.
#[inline(always)]
fn score_chunks<S: Lanes, K: Source, const J: usize, const R: usize, const N: usize>(
    simd: S,
    q: &[[[f32; LANES]; R]; N],
    rows: K,
    keys: &[K::Row; J],
    at: usize,
    sums: &mut [[S::Vector; J]; R],
) {
    let mut k = [[simd.splat(0.0); N]; J];
    for j in 0..J {
        // SAFETY: keys have as many chunks as queries, as `scores_of` makes sure.
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

/// [`super::Rows::add`] of `rows`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+fma+f16c",
    "aarch64+neon"
))]
pub fn add<V: Source>(weights: &[f32], stride: usize, rows: V, run: &Run, sums: Sums) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => unsafe { add_of::<_, V, 4>(Avx512::new(), weights, stride, rows, run, sums) },
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => unsafe { add_of::<_, V, 1>(Avx2::new(), weights, stride, rows, run, sums) },
        "aarch64+neon" => add_of::<_, V, 1>(Plain::<true>, weights, stride, rows, run, sums),
        _ => add_of::<_, V, 1>(Plain::<false>, weights, stride, rows, run, sums),
    }
}

/// [`add`] in tiles of `CHUNKS` chunks.
#[inline(always)]
pub fn add_of<S: Lanes, V: Source, const CHUNKS: usize>(
    simd: S,
    weights: &[f32],
    stride: usize,
    rows: V,
    run: &Run,
    sums: Sums,
) {
    let chunks = sums.values.len() / sums.r;
    assert_eq!(chunks, rows.chunks(), "sums have the channels of the values");
    let mut coming = run.coming();
    for (b, positions) in run.now.chunks(BLOCK).enumerate() {
        for (g, sums) in sums.values.chunks_mut(GROUP * chunks).enumerate() {
            let weights = &weights[g * GROUP * stride + b * BLOCK..];
            let coming = if g == 0 { &mut coming } else { &mut nothing() };
            match sums.len() / chunks {
                1 => add_heads::<S, V, 1, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
                2 => add_heads::<S, V, 2, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
                3 => add_heads::<S, V, 3, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
                _ => add_heads::<S, V, GROUP, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
            }
        }
    }
}

#[inline(always)]
fn add_heads<S: Lanes, V: Source, const R: usize, const CHUNKS: usize>(
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

/// The chunks from `at` of the sums of R heads.
#[inline(always)]
fn add_tile<S: Lanes, V: Source, const R: usize, const CHUNKS: usize>(
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
        // SAFETY: values have as many chunks as sums, as `add_of` makes sure.
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
