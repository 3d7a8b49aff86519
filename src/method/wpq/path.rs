//! The path of the mean: where rotation takes the mean of the keys before rotation.
//!
//! A key at position i is `R_i k`, and the mean m of the keys before rotation becomes `R_i m`. In most heads this path is
//! the largest part of the keys' variance, although it is the same for every text. Codes that describe `R_i (k - m)`
//! need not spend bits on it, because a step computes the score of `R_i m` for every position: `q . R_i m` depends only
//! on the query and the distance.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayViewMut2};

use super::waves::{LEFT_OUT, Walks, Waves};
use crate::compute::layout::elements_mut;
use crate::model::rope::{Rope, Ropes};

/// Consecutive positions for which rotated means are stored; those of later positions are rotated further.
pub(super) const ARC: usize = 64;

/// The path of the mean of one KV head.
pub struct MeanPath {
    mean: Array1<f32>,
    rope: Rope,
    /// The mean at the first [`ARC`] positions, `[ARC,d]`.
    arc: Array2<f32>,
    /// The waves of the rotation.
    waves: Arc<Waves>,
}

impl MeanPath {
    /// Makes the path of a mean, `[d]`.
    pub fn new(mean: Array1<f32>, rope: &Rope) -> Self {
        Self::with(mean, rope, &Arc::new(Waves::new(rope)))
    }

    /// Makes the paths of the means of all heads, `[layers g,d]`.
    pub(super) fn each(means: ArrayView2<f32>, ropes: &Ropes, g: usize) -> Vec<Self> {
        let waves = ropes.map(|rope| Arc::new(Waves::new(rope)));
        let path = |(i, mean): (usize, ArrayView1<f32>)| {
            let layer = i / g;
            Self::with(mean.to_owned(), ropes.layer(layer), waves.layer(layer))
        };
        means.rows().into_iter().enumerate().map(path).collect()
    }

    fn with(mean: Array1<f32>, rope: &Rope, waves: &Arc<Waves>) -> Self {
        let mut arc = Array2::zeros((ARC, mean.len()));
        let table = rope.table(0..ARC);
        for (position, mut row) in arc.rows_mut().into_iter().enumerate() {
            row.assign(&mean);
            table.rotate(elements_mut(&mut row), position);
        }
        Self {
            mean,
            rope: rope.clone(),
            arc,
            waves: Arc::clone(waves),
        }
    }

    /// Returns the mean of the keys before rotation, `[d]`.
    pub fn mean(&self) -> &Array1<f32> {
        &self.mean
    }

    /// Returns the mean at the first [`ARC`] positions, `[ARC,d]`.
    pub(super) fn arc(&self) -> &Array2<f32> {
        &self.arc
    }

    /// Returns the rotation to the start of each of `n` arcs, `[n,d]`: its cosines, then its sines.
    pub(super) fn turns(&self, n: usize) -> Vec<f32> {
        let turn = |arc: usize| self.rope.turns(arc * ARC).parts().concat();
        (0..n).flat_map(turn).collect()
    }

    /// Subtracts from rotated keys, `[n,d]`, the mean at their positions, of which `first` is the first.
    ///
    /// # Numerics
    /// f32. The mean at position c + j is `R_c (R_j m)`.
    pub fn subtract(&self, mut keys: ArrayViewMut2<f32>, first: usize) {
        let mut turn = None;
        for (i, mut key) in keys.rows_mut().into_iter().enumerate() {
            let (arc, place) = ((first + i) / ARC, (first + i) % ARC);
            let turn = match place {
                0 => turn.insert(self.rope.turns(arc * ARC)),
                _ => turn.get_or_insert_with(|| self.rope.turns(arc * ARC)),
            };
            let mut mean = self.arc.row(place).to_vec();
            turn.rotate(&mut mean, 0);
            key.iter_mut().zip(mean).for_each(|(x, m)| *x -= m);
        }
    }

    /// Returns the scores of rotated queries, `[r,d]`, with the mean at consecutive positions, times `scale`. They are off by
    /// at most [`LEFT_OUT`] and the rounding.
    pub(super) fn scores(&self, q_rope: ArrayView2<f32>, scale: f32, positions: Range<usize>) -> Walks<'_> {
        Walks::new(&self.waves, q_rope, scale, self.mean.view(), positions, LEFT_OUT)
    }
}

#[cfg(test)]
mod tests {
    use super::super::waves::{LINE, LINES_AT_ONCE, rows};
    use super::*;
    use crate::compute::blocks::Row;
    use crate::model::rope::{RopeConfig, RopeScaling};
    use crate::testing::values;

    /// Another length of the rotated vectors than 1, to tell the two rotations of a score from one.
    fn rope(d: usize) -> Rope {
        let scaling = RopeScaling::Default;
        Rope::new(&RopeConfig { theta: 1e4, scaling }, d).with_factor(1.25)
    }

    #[test]
    fn a_step_scores_what_encoding_subtracts() {
        let (d, r) = (16, 3);
        let mut largest = 0.0f32;
        for (first, n) in [(0, 1), (4, 64), (5, 300), (1000, 129), (7, 5000)] {
            let path = MeanPath::new(values(d, 1).into(), &rope(d));
            let queries = Array2::from_shape_vec((r, d), values(r * d, 2)).unwrap();
            let mut subtracted = Array2::zeros((n, d));
            path.subtract(subtracted.view_mut(), first);
            let expected = -queries.dot(&subtracted.t()) * 0.25;
            let walks = path.scores(queries.view(), 0.25, first..first + n);
            for (a, expected) in expected.rows().into_iter().enumerate() {
                let mut scores = vec![Row::ZERO; rows(n)];
                let parts = scores.chunks_mut(LINES_AT_ONCE).enumerate();
                parts.for_each(|(part, scores)| walks.scores(a, part, scores));
                for (i, (score, expected)) in Row::values(&scores).iter().zip(expected).enumerate() {
                    // Encoding rounds the angle of the arc's start and one below 64, and rotates twice; both sides
                    // round a sum over the channels; the bound of the waves is that of their own test.
                    let waves = 3.0 * (4.4 * (i / (LINES_AT_ONCE * LINE) + 1) as f64 + 18.0 + 45.0);
                    let units = |w: &f32| (first + i) as f64 * f64::from(*w) + 64.0 + waves + 2.0 * d as f64;
                    let size = |x: ArrayView1<f32>, pair: usize| f64::from(x[pair].hypot(x[pair + d / 2]));
                    let pairs = path.rope.frequencies().iter().enumerate();
                    let off = pairs.map(|(pair, w)| {
                        size(queries.row(a), pair) * size(path.mean.view(), pair) * units(w)
                    });
                    let bound = f64::from(LEFT_OUT) + 0.25 * 1.25 * off.sum::<f64>() / (1 << 24) as f64;
                    let off = f64::from((score - expected).abs());
                    assert!(off <= bound, "{first} {n} {i}: {off} over {bound}");
                }
            }
            largest = expected.iter().fold(largest, |a, x| a.max(x.abs()));
        }
        assert!(largest > 0.3, "{largest}");
    }

    #[test]
    fn positions_are_those_of_the_rotation() {
        let d = 8;
        let path = MeanPath::new(values(d, 3).into(), &rope(d));
        let n = 3 * ARC;
        let mut keys = Array2::zeros((n, d));
        path.subtract(keys.view_mut(), 7);
        for i in 0..n {
            let mut mean = values(d, 3);
            rope(d).table(7 + i..8 + i).rotate(&mut mean, 0);
            for (x, m) in keys.row(i).iter().zip(mean) {
                // Angles up to 200 are rounded to 8e-6 in f32.
                assert!((x + m).abs() < 3e-5, "{i}: {x} {m}");
            }
        }
    }
}
