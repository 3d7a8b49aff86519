//! Dot products of cached rows with the queries of a query group.

use ndarray::{Array2, ArrayView2};

use super::attention::{CachedRows, GroupQueries, Run};
use super::layout::elements_mut;

/// Rows per call of the kernels.
pub(crate) const TILE: usize = 256;

/// Calls `each` once per position with the index of the position in the ascending list and the products `[r]` of its
/// row with `scale` times the queries `[r,d]`.
///
/// # Numerics
/// See [`CachedRows::scores`].
pub fn products(
    queries: ArrayView2<f32>,
    scale: f32,
    rows: &dyn CachedRows,
    positions: &[u32],
    mut each: impl FnMut(usize, &[f32]),
) {
    let r = queries.nrows();
    let queries = GroupQueries::new(queries, scale);
    rows.prefetch(positions);
    let mut tile = vec![0.0; r * TILE];
    let mut of_row = vec![0.0; r];
    for first in (0..positions.len()).step_by(TILE) {
        let n = TILE.min(positions.len() - first);
        rows.scores(&queries, &Run::new(&positions[first..], n), &mut tile, TILE);
        for j in 0..n {
            for (to, scores) in of_row.iter_mut().zip(tile.chunks_exact(TILE)) {
                *to = scores[j];
            }
            each(first + j, &of_row);
        }
    }
}

/// Returns the products of `scale` times the queries `[r,d]` with the rows at all (ascending) positions:
/// `[r, positions]`.
///
/// # Numerics
/// See [`CachedRows::scores`].
pub fn all_products(
    queries: ArrayView2<f32>,
    scale: f32,
    rows: &dyn CachedRows,
    positions: &[u32],
) -> Array2<f32> {
    let n = positions.len();
    let mut out = Array2::zeros((queries.nrows(), n));
    let queries = GroupQueries::new(queries, scale);
    rows.prefetch(positions);
    for first in (0..n).step_by(TILE) {
        let run = Run::new(&positions[first..], TILE.min(n - first));
        rows.scores(&queries, &run, &mut elements_mut(&mut out)[first..], n);
    }
    out
}
