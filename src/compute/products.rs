//! Scores of rows of a cache for the queries of a group.

use ndarray::{Array2, ArrayView2};

use super::attention::{Queries, Rows, Run};
use super::layout::elements_mut;

/// Rows whose products are taken before they are used.
pub(crate) const TILE: usize = 256;

/// Calls `each` with the place of every position (ascending) and its products with `scale` times the queries `[r,d]`:
/// `[r]`.
///
/// # Numerics
/// See [`Rows::scores`].
pub fn products(
    queries: ArrayView2<f32>,
    scale: f32,
    rows: &dyn Rows,
    positions: &[u32],
    mut each: impl FnMut(usize, &[f32]),
) {
    let r = queries.nrows();
    let queries = Queries::new(queries, scale);
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

/// The products of `scale` times the queries `[r,d]` with the rows of all positions (ascending): `[r, positions]`.
///
/// # Numerics
/// See [`Rows::scores`].
pub fn all_products(queries: ArrayView2<f32>, scale: f32, rows: &dyn Rows, positions: &[u32]) -> Array2<f32> {
    let n = positions.len();
    let mut out = Array2::zeros((queries.nrows(), n));
    let queries = Queries::new(queries, scale);
    for first in (0..n).step_by(TILE) {
        let run = Run::new(&positions[first..], TILE.min(n - first));
        rows.scores(&queries, &run, &mut elements_mut(&mut out)[first..], n);
    }
    out
}
