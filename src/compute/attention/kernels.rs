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

/// Rows of whole chunks, one after the other.
#[derive(Clone, Copy)]
struct Stored<'a, E> {
    rows: &'a [[E; LANES]],
    chunks: usize,
}

impl<'a, E> Stored<'a, E> {
    #[inline(always)]
    fn row(&self, position: u32) -> &'a [[E; LANES]] {
        &self.rows[position as usize * self.chunks..][..self.chunks]
    }

    /// Asks for the next of the rows that are read soon.
    #[inline(always)]
    fn prefetch_next(&self, coming: &mut Coming) {
        if let Some(&position) = coming.next() {
            prefetch(self.row(position));
        }
    }
}

/// No rows: they have been asked for.
fn nothing<'a>() -> Coming<'a> {
    [].iter().chain(&[])
}

/// [`super::Rows::scores`] of `rows`, `[n, chunks, LANES]`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+fma+f16c",
    "aarch64+neon"
))]
pub fn scores<E: Element>(queries: &Queries, rows: &[[E; LANES]], run: &Run, out: &mut [f32], stride: usize) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => unsafe { scores_of::<_, E, 8, 4>(Avx512::new(), queries, rows, run, out, stride) },
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => unsafe { scores_of::<_, E, 4, 1>(Avx2::new(), queries, rows, run, out, stride) },
        "aarch64+neon" => scores_of::<_, E, 2, 1>(Plain::<true>, queries, rows, run, out, stride),
        _ => scores_of::<_, E, 1, 1>(Plain::<false>, queries, rows, run, out, stride),
    }
}

/// [`scores`] in tiles of `FEW` rows with one or two heads and of `MANY` rows with three or four.
#[inline(always)]
pub(super) fn scores_of<S: Lanes, E: Element, const FEW: usize, const MANY: usize>(
    simd: S,
    queries: &Queries,
    rows: &[[E; LANES]],
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    let chunks = queries.chunks;
    let rows = Stored { rows, chunks };
    let mut coming = run.coming();
    for (b, positions) in run.now.chunks(BLOCK).enumerate() {
        for (g, q) in queries.packed.chunks(GROUP * chunks).enumerate() {
            let out = &mut out[g * GROUP * stride + b * BLOCK..];
            let coming = if g == 0 { &mut coming } else { &mut nothing() };
            match q.len() / chunks {
                1 => score_heads::<S, E, FEW, 1>(simd, q, rows, positions, coming, out, stride),
                2 => score_heads::<S, E, FEW, 2>(simd, q, rows, positions, coming, out, stride),
                3 => score_heads::<S, E, MANY, 3>(simd, q, rows, positions, coming, out, stride),
                _ => score_heads::<S, E, MANY, GROUP>(simd, q, rows, positions, coming, out, stride),
            }
        }
    }
}

#[inline(always)]
fn score_heads<S: Lanes, E: Element, const J: usize, const R: usize>(
    simd: S,
    q: &[[f32; LANES]],
    rows: Stored<E>,
    positions: &[u32],
    coming: &mut Coming,
    out: &mut [f32],
    stride: usize,
) {
    let (q, _) = q.as_chunks::<R>();
    let (tiles, rest) = positions.as_chunks::<J>();
    for (t, tile) in tiles.iter().enumerate() {
        let mut keys: [&[[E; LANES]]; J] = [&[]; J];
        for j in 0..J {
            rows.prefetch_next(coming);
            keys[j] = rows.row(tile[j]);
        }
        let scores = score_tile::<S, E, J, R>(simd, q, &keys);
        for a in 0..R {
            out[a * stride + t * J..][..J].copy_from_slice(&scores[a * J..(a + 1) * J]);
        }
    }
    for (j, p) in rest.iter().enumerate() {
        rows.prefetch_next(coming);
        let scores = score_tile::<S, E, 1, R>(simd, q, &[rows.row(*p)]);
        for a in 0..R {
            out[a * stride + tiles.len() * J + j] = scores[a];
        }
    }
}

/// Scores of J keys for R heads, that of head a and key j at `a J + j`; at most [`LANES`] of them.
#[inline(always)]
fn score_tile<S: Lanes, E: Element, const J: usize, const R: usize>(
    simd: S,
    q: &[[[f32; LANES]; R]],
    keys: &[&[[E; LANES]]; J],
) -> [f32; LANES] {
    let mut sums = [[simd.splat(0.0); J]; R];
    for (c, q) in q.iter().enumerate() {
        let mut k = [simd.splat(0.0); J];
        for j in 0..J {
            // SAFETY: `score_heads` gives every key as many chunks as `q` has. The checks would keep
            // the pointers from staying in registers, at twice the time.
            k[j] = E::widen(simd, unsafe { keys[j].get_unchecked(c) });
        }
        for a in 0..R {
            let q = simd.load(&q[a]);
            for j in 0..J {
                sums[a][j] = simd.mul_add(k[j], q, sums[a][j]);
            }
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

/// [`super::Rows::add`] of `rows`, `[n, chunks, LANES]`.
#[multiversion(targets(
    "x86_64+avx512f+avx512bw+avx512dq+avx512vl",
    "x86_64+avx2+fma+f16c",
    "aarch64+neon"
))]
pub fn add<E: Element>(weights: &[f32], stride: usize, rows: &[[E; LANES]], run: &Run, sums: Sums) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => unsafe { add_of::<_, E, 4>(Avx512::new(), weights, stride, rows, run, sums) },
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => unsafe { add_of::<_, E, 1>(Avx2::new(), weights, stride, rows, run, sums) },
        "aarch64+neon" => add_of::<_, E, 1>(Plain::<true>, weights, stride, rows, run, sums),
        _ => add_of::<_, E, 1>(Plain::<false>, weights, stride, rows, run, sums),
    }
}

/// [`add`] in tiles of `CHUNKS` chunks.
#[inline(always)]
pub(super) fn add_of<S: Lanes, E: Element, const CHUNKS: usize>(
    simd: S,
    weights: &[f32],
    stride: usize,
    rows: &[[E; LANES]],
    run: &Run,
    sums: Sums,
) {
    let chunks = sums.values.len() / sums.r;
    let rows = Stored { rows, chunks };
    let mut coming = run.coming();
    for (b, positions) in run.now.chunks(BLOCK).enumerate() {
        for (g, sums) in sums.values.chunks_mut(GROUP * chunks).enumerate() {
            let weights = &weights[g * GROUP * stride + b * BLOCK..];
            let coming = if g == 0 { &mut coming } else { &mut nothing() };
            match sums.len() / chunks {
                1 => add_heads::<S, E, 1, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
                2 => add_heads::<S, E, 2, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
                3 => add_heads::<S, E, 3, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
                _ => add_heads::<S, E, GROUP, CHUNKS>(simd, weights, stride, rows, positions, coming, sums),
            }
        }
    }
}

#[inline(always)]
fn add_heads<S: Lanes, E: Element, const R: usize, const CHUNKS: usize>(
    simd: S,
    weights: &[f32],
    stride: usize,
    rows: Stored<E>,
    positions: &[u32],
    coming: &mut Coming,
    sums: &mut [[f32; LANES]],
) {
    let mut w: [&[f32]; R] = [&[]; R];
    for a in 0..R {
        w[a] = &weights[a * stride..][..positions.len()];
    }
    let mut at = 0;
    while at + CHUNKS <= rows.chunks {
        let coming = if at == 0 { &mut *coming } else { &mut nothing() };
        add_tile::<S, E, R, CHUNKS>(simd, &w, rows, at, positions, coming, sums);
        at += CHUNKS;
    }
    while at < rows.chunks {
        let coming = if at == 0 { &mut *coming } else { &mut nothing() };
        add_tile::<S, E, R, 1>(simd, &w, rows, at, positions, coming, sums);
        at += 1;
    }
}

/// The chunks from `at` of the sums of R heads.
#[inline(always)]
fn add_tile<S: Lanes, E: Element, const R: usize, const CHUNKS: usize>(
    simd: S,
    weights: &[&[f32]; R],
    rows: Stored<E>,
    at: usize,
    positions: &[u32],
    coming: &mut Coming,
    out: &mut [[f32; LANES]],
) {
    let mut sums = [[simd.splat(0.0); CHUNKS]; R];
    for a in 0..R {
        for c in 0..CHUNKS {
            sums[a][c] = simd.load(&out[a * rows.chunks + at + c]);
        }
    }
    for (j, p) in positions.iter().enumerate() {
        rows.prefetch_next(coming);
        let row = &rows.rows[*p as usize * rows.chunks + at..][..CHUNKS];
        let mut v = [simd.splat(0.0); CHUNKS];
        for c in 0..CHUNKS {
            v[c] = E::widen(simd, &row[c]);
        }
        for a in 0..R {
            let weight = simd.splat(weights[a][j]);
            for c in 0..CHUNKS {
                sums[a][c] = simd.mul_add(v[c], weight, sums[a][c]);
            }
        }
    }
    for a in 0..R {
        for c in 0..CHUNKS {
            out[a * rows.chunks + at + c] = simd.store(sums[a][c]);
        }
    }
}
