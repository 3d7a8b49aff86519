//! Attention of one decode step.

use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use super::Decoded;
use super::lanes::LANES;
use super::rows::{Queries, Rows, Run, Sums};
use crate::compute::simd;

/// Positions whose weights and values are summed in f32 before they join a sum in f64.
const TILE: usize = 256;
/// Positions of one task.
const PIECE: usize = 32 * TILE;

/// Attention of one decode step over `positions` (ascending), for the r query heads of one KV head.
///
/// # Shapes
/// q `[r,d]` rotated; out `[r,d]`.
///
/// # Numerics
/// Scores and exponentials in f32; sums over positions in f32 up to 256 of them, beyond in f64, joined
/// in pieces of 8192. Products are fused with their sums: the same bytes for any number of threads and
/// on every instruction set. Each key and value row is read from memory once for the whole group. No
/// position gives zeros.
pub fn decode(
    q: ArrayView2<f32>,
    keys: &dyn Rows,
    values: &dyn Rows,
    positions: &[u32],
    mut out: ArrayViewMut2<f32>,
) -> Decoded {
    let (r, d) = q.dim();
    let mut weights = Array2::<f32>::zeros((r, positions.len()));
    let mut lse = vec![f32::NEG_INFINITY; r];
    out.fill(0.0);
    if positions.is_empty() {
        return Decoded { weights, lse };
    }
    let queries = Queries::new(q, 1.0 / (d as f32).sqrt());
    let tasks = (0..positions.len()).into_par_iter().step_by(PIECE);
    let pieces: Vec<_> = weights.axis_chunks_iter_mut(Axis(1), PIECE).collect();
    tasks
        .clone()
        .zip(pieces)
        .for_each(|(first, piece)| score(&queries, keys, &positions[first..], piece));
    let mut scales = vec![0.0; r];
    for ((mut row, lse), scale) in weights.rows_mut().into_iter().zip(&mut lse).zip(&mut scales) {
        if let Some(row) = row.as_slice_mut() {
            let max = simd::max(row);
            let sums = row.par_chunks_mut(PIECE).map(|piece| {
                let tiles = piece.chunks_mut(TILE);
                tiles.map(|tile| f64::from(simd::exp_shifted(tile, max))).sum()
            });
            let sums: Vec<f64> = sums.collect();
            let sum: f64 = sums.iter().sum();
            *scale = (1.0 / sum) as f32;
            *lse = (f64::from(max) + sum.ln()) as f32;
        }
    }
    let pieces: Vec<_> = weights.axis_chunks_iter_mut(Axis(1), PIECE).collect();
    let totals = tasks
        .zip(pieces)
        .map(|(first, piece)| sum(values, &positions[first..], &scales, piece, d));
    let totals: Vec<Array2<f64>> = totals.collect();
    let mut total = Array2::<f64>::zeros((r, d));
    for piece in &totals {
        total += piece;
    }
    out.zip_mut_with(&total, |o, x| *o = *x as f32);
    Decoded { weights, lse }
}

/// Scores of the first positions, as many as `piece`, `[r,m]`, has columns.
fn score(queries: &Queries, keys: &dyn Rows, positions: &[u32], mut piece: ArrayViewMut2<f32>) {
    let mut tile = vec![0.0; piece.nrows() * TILE];
    for (t, mut part) in piece.axis_chunks_iter_mut(Axis(1), TILE).enumerate() {
        let run = Run::new(&positions[t * TILE..], part.ncols());
        let n = part.ncols();
        keys.scores(queries, &run, &mut tile, n);
        for (mut to, from) in part.rows_mut().into_iter().zip(tile.chunks(n)) {
            to.assign(&ArrayView1::from(from));
        }
    }
}

/// Scales the weights `piece`, `[r,m]`, and sums the values of the first m positions under them.
fn sum(
    values: &dyn Rows,
    positions: &[u32],
    scales: &[f32],
    mut piece: ArrayViewMut2<f32>,
    d: usize,
) -> Array2<f64> {
    let r = piece.nrows();
    let mut total = Array2::zeros((r, d));
    let mut tile = vec![0.0; r * TILE];
    let chunks = d.div_ceil(LANES);
    let mut sums = vec![[0.0; LANES]; r * chunks];
    for (t, mut part) in piece.axis_chunks_iter_mut(Axis(1), TILE).enumerate() {
        let n = part.ncols();
        for ((mut row, scale), to) in part.rows_mut().into_iter().zip(scales).zip(tile.chunks_mut(n)) {
            row.zip_mut_with(&ArrayView1::from(&*to), |w, _| *w *= scale);
            to.iter_mut().zip(row).for_each(|(to, w)| *to = *w);
        }
        sums.fill([0.0; LANES]);
        let run = Run::new(&positions[t * TILE..], n);
        values.add(&tile, n, &run, Sums { r, values: &mut sums });
        for (mut total, sums) in total.rows_mut().into_iter().zip(sums.chunks(chunks)) {
            for (t, x) in total.iter_mut().zip(sums.as_flattened()) {
                *t += f64::from(*x);
            }
        }
    }
    total
}
