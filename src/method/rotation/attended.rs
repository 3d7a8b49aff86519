//! How much calibration queries attend to each row: the weight of the row's error in the output of attention.

use ndarray::Array2;
use rayon::prelude::*;

use crate::compute::layout::elements;
use crate::compute::simd;
use crate::kv::StaticSet;
use crate::kv::static_set::{SINKS, WINDOW};
use crate::method::late_rows::LateRows;

/// The sums of squared attention that each row of a text gets.
pub(super) struct Attended {
    /// From the queries of the fit, `[n]`.
    pub fit: Vec<f64>,
    /// From the held-out queries, `[n]`.
    pub held_out: Vec<f64>,
}

impl Attended {
    /// Adds up the squared attention weights of the sampled queries, for the candidates of each: rows of the static set get
    /// nothing, since caches keep them in 16 bits.
    ///
    /// # Shapes
    /// `keys` `[n,d]`, rotated; `queries` `[rows,d]` for each query head, rotated and divided by sqrt(d).
    pub fn new(
        sample: &LateRows,
        window: Option<usize>,
        keys: &Array2<f32>,
        queries: &[Array2<f32>],
    ) -> Self {
        let (n, d) = keys.dim();
        let (keys, queries): (_, Vec<&[f32]>) = (elements(keys), queries.iter().map(elements).collect());
        let mut sums = Self {
            fit: vec![0.0; n],
            held_out: vec![0.0; n],
        };
        let of_row = |i: usize| {
            let row = sample.rows[i];
            let block = sample.blocks.containing(row);
            let set = StaticSet::at(row - block.start, window, SINKS, WINDOW);
            let own = queries.iter().map(|q| &q[i * d..(i + 1) * d]);
            (block.start, squared(&set, &keys[block.start * d..], own), set)
        };
        // Results of a few rows at a time are added in their order, so that the sums do not depend on the threads.
        let indices: Vec<usize> = (0..sample.rows.len()).collect();
        for some in indices.chunks(rows_at_once(rayon::current_num_threads())) {
            let found: Vec<_> = some.par_iter().map(|i| of_row(*i)).collect();
            for (i, (start, squares, set)) in some.iter().zip(found) {
                let into = if sample.kept[*i] {
                    &mut sums.fit
                } else {
                    &mut sums.held_out
                };
                let candidates = start + set.candidates.start..start + set.candidates.end;
                for (sum, square) in into[candidates].iter_mut().zip(squares) {
                    *sum += f64::from(square);
                }
            }
        }
        sums
    }
}

/// Returns how many rows are attended before their results are added.
pub(super) fn rows_at_once(threads: usize) -> usize {
    4 * threads
}

/// Returns the sum over queries of the squared attention that each candidate gets.
fn squared<'a>(set: &StaticSet, keys: &[f32], queries: impl Iterator<Item = &'a [f32]>) -> Vec<f32> {
    let visible = set.visible();
    let mut sums = vec![0.0; set.candidates.len()];
    for query in queries {
        let rows = keys.chunks_exact(query.len());
        let rows = rows.skip(visible.start).take(visible.len());
        let mut weights: Vec<f32> = rows.map(|key| simd::dot(query, key)).collect();
        let most = simd::max(&weights);
        let mass = simd::exp_shifted(&mut weights, most);
        let first = set.candidates.start - visible.start;
        for (sum, weight) in sums.iter_mut().zip(&weights[first..]) {
            *sum += (weight / mass) * (weight / mass);
        }
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    /// Two query heads, in f64 and one by one.
    #[test]
    fn weights_are_squared_attention_outside_the_static_set() {
        let (n, d) = (300, 8);
        let block_start = [0, 100, n as u32];
        let kept: Vec<bool> = (0..n).map(|row| row < 250).collect();
        let sample = LateRows::new(&block_start, &kept, [128, 64]);
        let rows = sample.rows.len();
        let array = |rows, seed| Array2::from_shape_vec((rows, d), values(rows * d, seed)).unwrap();
        let keys = array(n, 1);
        let queries = [array(rows, 2), array(rows, 3)];
        for window in [None, Some(90)] {
            let found = Attended::new(&sample, window, &keys, &queries);
            let mut expected = [vec![0.0f64; n], vec![0.0; n]];
            for (i, row) in sample.rows.iter().enumerate() {
                let start = if *row < 100 { 0 } else { 100 };
                let first = window.map_or(start, |w| start.max(row + 1 - w.min(row + 1)));
                for query in &queries {
                    let score = |j: usize| f64::from(query.row(i).dot(&keys.row(j))).exp();
                    let mass: f64 = (first..=*row).map(score).sum();
                    let candidates = first.max(start + SINKS)..row + 1 - WINDOW;
                    for j in candidates {
                        expected[usize::from(*row >= 250)][j] += (score(j) / mass).powi(2);
                    }
                }
            }
            for (found, expected) in [&found.fit, &found.held_out].into_iter().zip(&expected) {
                assert!(expected.iter().any(|x| *x > 0.0));
                for (a, b) in found.iter().zip(expected) {
                    assert!((a - b).abs() <= 1e-5 * b, "{a} {b}");
                }
            }
        }
    }
}
