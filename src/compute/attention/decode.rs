//! Attention of a decode step.

use ndarray::{Array1, Array2, ArrayView2, ArrayViewMut2, Axis, s};

use super::rows::{CachedRows, GroupQueries, Run, TILE};
use crate::compute::{simd, team};

/// Positions per task: few enough that threads share one KV head of a context of some thousand positions.
const PIECE: usize = 8 * TILE;

/// Computes the attention of a decode step over `positions` (ascending) for the r query heads of one KV head.
///
/// Returns the log-sum-exp of the scaled scores of each query head, which is negative infinity if there are no
/// positions.
///
/// # Shapes
/// q `[r,d]` rotated; out `[r,d]`.
///
/// # Numerics
/// Scores and exponentials are f32. Sums over positions are f32 within runs of 256 positions and f64 across runs. Each
/// piece of 2048 positions has its own softmax; the pieces are joined in f64 by their weights. Multiply-adds are fused,
/// so the result has the same bytes for any number of threads and on every instruction set. Each row of keys and values
/// is read from memory once for the whole group. With no positions, the output is zeros.
pub fn decode(
    q: ArrayView2<f32>,
    keys: &dyn CachedRows,
    values: &dyn CachedRows,
    positions: &[u32],
    out: ArrayViewMut2<f32>,
) -> Vec<f32> {
    attend(q, keys, values, positions, None, out)
}

/// Computes [`decode`], and also returns the softmax weights `[r, positions]`.
pub fn decode_with_weights(
    q: ArrayView2<f32>,
    keys: &dyn CachedRows,
    values: &dyn CachedRows,
    positions: &[u32],
    out: ArrayViewMut2<f32>,
) -> (Array2<f32>, Vec<f32>) {
    let mut weights = Array2::zeros((q.nrows(), positions.len()));
    let lse = attend(q, keys, values, positions, Some(weights.view_mut()), out);
    (weights, lse)
}

/// Computes [`decode`] piece by piece, and fills `weights` if it is given.
fn attend(
    q: ArrayView2<f32>,
    keys: &dyn CachedRows,
    values: &dyn CachedRows,
    positions: &[u32],
    mut weights: Option<ArrayViewMut2<f32>>,
    mut out: ArrayViewMut2<f32>,
) -> Vec<f32> {
    let (r, d) = q.dim();
    let queries = GroupQueries::new(q, 1.0 / (d as f32).sqrt());
    let kept: Vec<_> = match &mut weights {
        Some(weights) => weights.axis_chunks_iter_mut(Axis(1), PIECE).map(Some).collect(),
        None => (0..positions.len()).step_by(PIECE).map(|_| None).collect(),
    };
    let pieces: Vec<PieceAttention> = team::map(kept.into_iter().enumerate().collect(), |(i, kept)| {
        PieceAttention::attend(&queries, (r, d), keys, values, &positions[i * PIECE..], kept)
    });
    out.fill(0.0);
    let mut lse = vec![f32::NEG_INFINITY; r];
    for (a, lse) in lse.iter_mut().enumerate() {
        let maxima = pieces.iter().map(|piece| piece.max[a]);
        let max = maxima.fold(f32::NEG_INFINITY, f32::max);
        let size = |piece: &PieceAttention| piece.sum[a] * (f64::from(piece.max[a]) - f64::from(max)).exp();
        let sum: f64 = pieces.iter().map(size).sum();
        let mut total = Array1::<f64>::zeros(d);
        for (i, piece) in pieces.iter().enumerate() {
            let share = size(piece) / sum;
            total.scaled_add(share, &piece.total.row(a));
            if let Some(weights) = weights.as_mut().filter(|_| pieces.len() > 1) {
                let end = positions.len().min((i + 1) * PIECE);
                let mut of_piece = weights.slice_mut(s![a, i * PIECE..end]);
                of_piece.mapv_inplace(|w| (share * f64::from(w)) as f32);
            }
        }
        if !pieces.is_empty() {
            out.row_mut(a).assign(&total.mapv(|x| x as f32));
            *lse = (f64::from(max) + sum.ln()) as f32;
        }
    }
    lse
}

/// The attention over one piece of the positions.
struct PieceAttention {
    /// The largest score of each head.
    max: Vec<f32>,
    /// The sum of `exp(score - max)` over the piece's scores, per head.
    sum: Vec<f64>,
    /// The values weighted by the piece's own softmax, `[r,d]`.
    total: Array2<f64>,
}

impl PieceAttention {
    /// Attends the first [`PIECE`] of `positions` for r heads of d channels, and writes their weights to `kept`.
    fn attend(
        queries: &GroupQueries,
        (r, d): (usize, usize),
        keys: &dyn CachedRows,
        values: &dyn CachedRows,
        positions: &[u32],
        kept: Option<ArrayViewMut2<f32>>,
    ) -> Self {
        let positions = &positions[..positions.len().min(PIECE)];
        let n = positions.len();
        keys.prefetch(positions);
        let mut weights = vec![0.0; r * n];
        keys.scores(queries, &Run::new(positions, n), &mut weights, n);
        values.prefetch(positions);
        let (mut max, mut sum) = (Vec::with_capacity(r), Vec::with_capacity(r));
        for row in weights.chunks_mut(n) {
            let largest = simd::max(row);
            // If every score is minus infinity, so is the maximum. The clamp then makes all weights zero instead of
            // NaN.
            let shift = largest.max(f32::MIN);
            let tiles = row.chunks_mut(TILE);
            let total: f64 = tiles.map(|tile| f64::from(simd::exp_shifted(tile, shift))).sum();
            let scale = if total == 0.0 { 0.0 } else { (1.0 / total) as f32 };
            simd::scale(row, scale);
            max.push(largest);
            sum.push(total);
        }
        let mut total = Array2::zeros((r, d));
        values.add_piece(&weights, n, positions, &mut total);
        if let Some(mut kept) = kept {
            kept.iter_mut().zip(&weights).for_each(|(to, w)| *to = *w);
        }
        Self { max, sum, total }
    }
}
