//! Scores of rows of a cache for the queries of a group.

use ndarray::{Array2, ArrayView2};

use super::attention::{Queries, Rows, Run};

/// Rows whose products are taken before they are used.
const TILE: usize = 256;

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
    if let Some(out) = out.as_slice_mut() {
        for first in (0..n).step_by(TILE) {
            let run = Run::new(&positions[first..], TILE.min(n - first));
            rows.scores(&queries, &run, &mut out[first..], n);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::runner::kv::{Float, RowStore};

    /// Every place once, in order, with its own products: against f64, within the rounding of d fused sums.
    #[test]
    fn products_are_those_of_the_rows() {
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 * 0.004 - 2.0;
        for (d, r) in [(1, 1), (63, 4), (64, 5), (80, 3), (128, 16)] {
            let n = 2 * TILE + 7;
            let keys = Array2::from_shape_fn((n, d), |(i, c)| bf16::from_f32(value(i * d + c)).to_f32());
            let queries = Array2::from_shape_fn((r, d), |(a, c)| value(a * 131 + c * 7));
            let mut rows = RowStore::new(Float::Bf16, d, n);
            rows.extend(keys.view());
            let positions: Vec<u32> = (0..n as u32).filter(|p| p % 3 != 1).collect();
            let all = all_products(queries.view(), 0.5, &rows, &positions);
            assert_eq!(all.dim(), (r, positions.len()));
            let mut next = 0;
            products(queries.view(), 0.5, &rows, &positions, |place, products| {
                assert_eq!(place, next);
                assert_eq!(all.column(place).to_vec(), products);
                next += 1;
                let key = keys.row(positions[place] as usize);
                for (query, product) in queries.rows().into_iter().zip(products) {
                    let terms = query
                        .iter()
                        .zip(key)
                        .map(|(q, k)| f64::from(*q) * 0.5 * f64::from(*k));
                    let size: f64 = terms.clone().map(f64::abs).sum();
                    let error = (f64::from(*product) - terms.sum::<f64>()).abs();
                    assert!(
                        error <= (d as f64 + 2.0) * 2f64.powi(-24) * size,
                        "{d} {r} {place}: {error}"
                    );
                }
            });
            assert_eq!(next, positions.len());
        }
    }
}
