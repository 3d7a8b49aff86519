//! Softmax attention on the CPU: blocked causal attention of a prompt, and one decode step over
//! chosen positions.

mod causal;
mod decode;
pub(crate) mod kernels;
pub(crate) mod lanes;
mod rows;
mod softmax;
#[cfg(test)]
mod tests;

use std::ops::Range;

pub use causal::causal;
pub use decode::{decode, decode_with_weights};
pub(crate) use kernels::{Source, Stored, add, scores};
pub use lanes::LANES;
pub(crate) use lanes::{fused, widen_f16};
pub(crate) use rows::{AHEAD, prefetch, widened_add, widened_scores};
pub use rows::{Queries, Rows, Run, Sums};

/// The positions that the token at `t` sees: the last `window` ones, itself included; `None` = all.
pub fn visible(t: usize, window: Option<usize>) -> Range<usize> {
    window.map_or(0, |w| (t + 1).saturating_sub(w))..t + 1
}

/// Attention over a part of the keys, which [`merge`] joins with that over other parts.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    /// Softmax-weighted values of the part: `[d]`.
    pub output: Vec<f32>,
    /// Log of the sum of the exponentials of the part's scaled scores.
    pub lse: f32,
}

/// Joins the attention over two disjoint sets of keys: `out` over a set with `lse`, and `other`.
///
/// Returns the joint log-sum-exp. An empty set has negative infinity and contributes nothing.
///
/// # Numerics
/// The two weights in f64.
///
/// # Source
/// `o = sum w_A o_A / sum w_A`, `w_A = exp(LSE_A - max LSE)`.
pub fn merge(out: &mut [f32], lse: f32, other: &Partial) -> f32 {
    let max = f64::from(lse.max(other.lse));
    if max == f64::NEG_INFINITY {
        return f32::NEG_INFINITY;
    }
    let (own, theirs) = ((f64::from(lse) - max).exp(), (f64::from(other.lse) - max).exp());
    let sum = own + theirs;
    for (o, x) in out.iter_mut().zip(&other.output) {
        *o = ((own * f64::from(*o) + theirs * f64::from(*x)) / sum) as f32;
    }
    (max + sum.ln()) as f32
}
