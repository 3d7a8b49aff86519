//! How far rounding may move the attention of a query on the device: the bound of its tests, and of the check of a GPU.

use crate::compute::comparison::{Comparison, UNIT};
use crate::float::Float;

/// What rounding does besides f32 sums.
#[derive(Clone, Debug)]
pub struct Precision {
    /// Relative errors of softmax weights, and of values.
    weights: f64,
    values: f64,
    /// Absolute error of a small weight.
    tiny: f64,
    /// Relative error of the product of a query's and a centered key's channel.
    products: f64,
    /// Absolute error of a query's channel, relative to the largest one as scaled, times the largest key's.
    queries: f64,
    /// What keys are centered around, and their largest distance from it; empty for keys that are not.
    centers: Vec<f32>,
    alpha: Vec<f32>,
}

/// A key and a value.
pub type Pair = (Vec<f32>, Vec<f32>);

impl Precision {
    /// Returns the precision of rows of a type.
    pub fn plain(float: Float) -> Self {
        Self {
            weights: match float {
                Float::F32 => 0.0,
                Float::F16 => 0.5f64.powi(11),
                Float::Bf16 => 0.5f64.powi(8),
            },
            values: 0.0,
            tiny: if float == Float::F16 { 0.5f64.powi(25) } else { 0.0 },
            products: 0.0,
            queries: 0.0,
            centers: Vec::new(),
            alpha: Vec::new(),
        }
    }

    /// Returns the precision of the 2-bit cache: everything is rounded to f16, keys and queries relative to the scale of
    /// the channel.
    pub fn packed(centers: &[f32], attended: &[Pair]) -> Self {
        let distance = |c: usize| {
            let keys = attended.iter().map(|(key, _)| (key[c] - centers[c]).abs());
            keys.fold(0.0, f32::max)
        };
        Self {
            weights: 0.5f64.powi(11),
            values: 0.5f64.powi(11),
            tiny: 0.5f64.powi(25),
            products: 2.1 * 0.5f64.powi(11),
            queries: 0.5f64.powi(25),
            alpha: (0..centers.len()).map(distance).collect(),
            centers: centers.to_vec(),
        }
    }

    /// Returns how far rounding moves a score, before the factor 1 / sqrt(d).
    fn score_error(&self, query: &[f32], key: &[f32]) -> f64 {
        let mut error = 0.0;
        let (mut largest, mut channels) = (0.0f64, 0.0);
        for (c, center) in self.centers.iter().enumerate() {
            let centered = f64::from(key[c]) - f64::from(*center);
            error += self.products * (f64::from(query[c]) * centered).abs();
            largest = largest.max(f64::from(query[c] * self.alpha[c]).abs());
            channels += 1.0;
        }
        error + self.queries * largest * channels
    }
}

/// Compares the output `[d]` of a query head, and the log-sum-exp of its scores, with softmax attention in f64 over the
/// keys and values that it attends.
///
/// Scores are sums of d products in f32, of numbers that were rounded before, so they are off by at most `delta`, and
/// weights by exp(2 delta) - 1. A weight is then rounded (in f16 with an absolute error of 2^-25 where it is small), and
/// the sum over n of them is one in f32.
pub fn attended(
    all: &mut Comparison,
    precision: &Precision,
    query: &[f32],
    attended: &[Pair],
    out: &[f32],
    lse: Option<f32>,
) {
    let (d, n) = (query.len() as f64, attended.len() as f64);
    if attended.is_empty() {
        let is_empty = out.iter().all(|x| *x == 0.0) && lse.is_none_or(|lse| lse == f32::NEG_INFINITY);
        all.holds(is_empty, &(out, lse), "zeros", || {
            "output of a head that attends nothing".to_owned()
        });
        return;
    }
    let mut scores = Vec::new();
    let (mut size, mut rounding) = (0.0f64, 0.0f64);
    for (key, _) in attended {
        rounding = rounding.max(precision.score_error(query, key) / d.sqrt());
        let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
        scores.push(products.clone().sum::<f64>() / d.sqrt());
        size = size.max(products.map(f64::abs).sum::<f64>() / d.sqrt());
    }
    let delta = 2.0 * (d + 8.0) * UNIT * size + rounding;
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
    let sum: f64 = weights.iter().sum();
    if let Some(lse) = lse {
        let exact = top + sum.ln();
        let bound = delta + (n + 16.0) * 2.0 * UNIT + 4.0 * UNIT * exact.abs();
        all.close(f64::from(lse), exact, bound, || "log-sum-exp".to_owned());
    }
    for (j, out) in out.iter().enumerate() {
        let (mut exact, mut magnitude, mut largest) = (0.0, 0.0, 0.0f64);
        for (weight, (_, value)) in weights.iter().zip(attended) {
            let weight = weight / sum;
            let value = f64::from(value[j]);
            exact += weight * value;
            magnitude += weight * value.abs();
            largest = largest.max(value.abs());
        }
        let tiny = precision.tiny * n / sum * largest;
        let rounding = precision.weights + precision.values;
        let bound = magnitude * (rounding + 4.0 * delta + 2.0 * (n + 32.0) * UNIT) + tiny;
        let says_something = bound <= 0.05 * largest + 1e-6;
        all.holds(says_something, &bound, "a bound that says something", || {
            format!("bound of channel {j}")
        });
        all.close(f64::from(*out), exact, bound, || format!("channel {j}"));
    }
}
