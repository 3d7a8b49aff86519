//! Softmax attention on the CPU: blocked causal attention of a prompt, and attention of a decode step over the chosen
//! positions.

mod causal;
pub(crate) mod codes;
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
pub(crate) use kernels::{ChunkedRows, StepRows, StoredRows, add, prefetch_first, scores};
pub use lanes::LANES;
pub(crate) use lanes::widen_f16;
pub(crate) use rows::{AHEAD, widened_add, widened_scores};
pub use rows::{CachedRows, GroupQueries, OutputSums, Run, Segment};

/// Returns the positions visible to the token at position `t`: the last `window` positions up to and including `t`;
/// `None` = all up to `t`.
pub fn visible(t: usize, window: Option<usize>) -> Range<usize> {
    window.map_or(0, |w| (t + 1).saturating_sub(w))..t + 1
}

/// Attention over a part of the keys. [`merge`] joins it with the attention over another part.
#[derive(Clone, Debug, PartialEq)]
pub struct Partial {
    /// The softmax-weighted sum of the part's values: `[d]`.
    pub output: Vec<f32>,
    /// The log-sum-exp of the part's scaled scores.
    pub lse: f32,
}

/// Merges the attention over two disjoint sets of keys and returns the joint log-sum-exp. `out`, with the log-sum-exp
/// `lse`, is the first set's attention and receives the result; `other` is the second set's. An empty set has a
/// log-sum-exp of negative infinity and contributes nothing.
///
/// # Numerics
/// The two weights are computed in f64.
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
