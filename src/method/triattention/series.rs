//! The scores that mean queries give to keys, averaged over future distances.

use ndarray::{Array2, ArrayView2};

use crate::model::rope::Rope;

/// How far after the current position the queries are for which a key is scored: 1, 2, 4, ... 65,536.
///
/// # Source
/// Section 4 of the paper.
pub const OFFSETS: [u32; 17] = {
    let mut offsets = [1; 17];
    let mut i = 1;
    while i < offsets.len() {
        offsets[i] = 2 * offsets[i - 1];
        i += 1;
    }
    offsets
};

/// The mean queries of the query heads of one KV head.
pub struct MeanQueries {
    /// The frequency of each pair of channels, `[d/2]`.
    frequencies: Vec<f64>,
    /// The mean query before rotation, turned by every offset and averaged, as complex numbers: `[r,d/2]`.
    ahead: Array2<[f64; 2]>,
    /// How much longer queries are on average than their mean, `[r,d/2]`.
    spread: Array2<f64>,
}

impl MeanQueries {
    /// Makes the mean queries of a KV head from their means `[r,d/2,2]` and mean magnitudes `[r,d/2]`.
    ///
    /// # Numerics
    /// f64, with angles that are not rounded to f32.
    ///
    /// # Source
    /// The mean over the offsets of cos(w (D + o) + phi) is the real part of e^{i (w D + phi)} times the mean of
    /// e^{i w o}, so the offsets can be averaged once for all keys.
    pub fn new(q_mean: &[f32], q_abs: &[f32], rope: &Rope) -> Self {
        let frequencies: Vec<f64> = rope.frequencies().iter().map(|w| f64::from(*w)).collect();
        let half = frequencies.len();
        let turns: Vec<[f64; 2]> = frequencies.iter().map(|w| mean_turn(*w)).collect();
        let shape = (q_abs.len() / half, half);
        let mean = |(a, f): (usize, usize)| {
            let at = 2 * (a * half + f);
            [q_mean[at], q_mean[at + 1]].map(f64::from)
        };
        Self {
            ahead: Array2::from_shape_fn(shape, |at| times(mean(at), turns[at.1])),
            spread: Array2::from_shape_fn(shape, |(a, f)| {
                let [re, im] = mean((a, f));
                f64::from(q_abs[a * half + f]) - re.hypot(im)
            }),
            frequencies,
        }
    }

    /// Returns the bytes of both statistics, as f32.
    pub fn bytes(&self) -> usize {
        3 * self.spread.len() * size_of::<f32>()
    }

    /// Returns the bytes of both as they are held, in f64.
    pub fn held_bytes(&self) -> usize {
        3 * self.spread.len() * size_of::<f64>()
    }

    /// Scores rotated keys, `[n,d]`, for queries after position `t`: `[r,n]`.
    ///
    /// # Numerics
    /// f64. A factor on cos and sin multiplies all scores of a head alike.
    ///
    /// # Source
    /// The sum over the pairs f of |E q_f| |k_f| cos(w_f (D + o) + phi_f) + (E |q_f| - |E q_f|) |k_f|, averaged over the
    /// offsets o, where D is the distance from `t` to the key and phi_f the angle from k_f to E q_f before rotation. A
    /// rotated key already has the angle of its position, so the first part is a product with the mean query, rotated to
    /// `t`.
    pub fn scores(&self, keys: ArrayView2<f32>, t: usize) -> Array2<f64> {
        let half = self.frequencies.len();
        let turn = |w: &f64| {
            let (sin, cos) = (t as f64 * w).sin_cos();
            [cos, sin]
        };
        let turns: Vec<[f64; 2]> = self.frequencies.iter().map(turn).collect();
        let (r, _) = self.ahead.dim();
        let queries = Array2::from_shape_fn((r, half), |(a, f)| times(self.ahead[[a, f]], turns[f]));
        let mut scores = Array2::zeros((r, keys.nrows()));
        let mut pairs = vec![[0.0; 3]; half];
        for (key, mut scores) in keys.outer_iter().zip(scores.columns_mut()) {
            for (f, pair) in pairs.iter_mut().enumerate() {
                let (re, im) = (f64::from(key[f]), f64::from(key[f + half]));
                *pair = [re, im, (re * re + im * im).sqrt()];
            }
            let heads = queries.outer_iter().zip(self.spread.outer_iter());
            for (score, (query, spread)) in scores.iter_mut().zip(heads) {
                let terms = pairs.iter().zip(query).zip(spread);
                *score = terms
                    .map(|(([re, im, abs], query), spread)| query[0] * re + query[1] * im + spread * abs)
                    .sum();
            }
        }
        scores
    }
}

/// Returns the mean of e^{i w o} over the offsets o, as a complex number.
fn mean_turn(w: f64) -> [f64; 2] {
    let mut sum = [0.0; 2];
    for offset in OFFSETS {
        let (sin, cos) = (f64::from(offset) * w).sin_cos();
        sum = [sum[0] + cos, sum[1] + sin];
    }
    sum.map(|x| x / OFFSETS.len() as f64)
}

/// Multiplies complex numbers.
fn times([a, b]: [f64; 2], [c, d]: [f64; 2]) -> [f64; 2] {
    [a * c - b * d, a * d + b * c]
}

/// Turns the scores of each query head, `[r,n]`, into distances from their mean in standard deviations, and returns the
/// largest over the query heads for every key, `[n]`. A head whose scores are all equal gives 0.
///
/// # Source
/// Heads of a group have scores of different sizes; the paper normalises before it takes the maximum.
pub(super) fn largest_normalised(scores: &Array2<f64>) -> Vec<f64> {
    let n = scores.ncols().max(1) as f64;
    let mut largest = vec![f64::NEG_INFINITY; scores.ncols()];
    for scores in scores.outer_iter() {
        let mean = scores.sum() / n;
        let variance = scores.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / n;
        let scale = if variance > 0.0 {
            1.0 / variance.sqrt()
        } else {
            0.0
        };
        for (largest, score) in largest.iter_mut().zip(scores) {
            *largest = largest.max((score - mean) * scale);
        }
    }
    largest
}
