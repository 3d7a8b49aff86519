//! The estimates of the bypass test.

use std::ops::Range;

use crate::kv::KvHead;

/// The running sums of keys and values over a range of positions that moves.
#[derive(Clone, Default)]
pub(super) struct RunningMean {
    range: Range<usize>,
    /// Sums of the keys, `[d]`.
    pub(super) keys: Vec<f64>,
    /// Sums of the values, `[d]`.
    pub(super) values: Vec<f64>,
}

impl RunningMean {
    /// Moves the range of the sums to `range`.
    pub(super) fn cover(&mut self, range: Range<usize>, kv: &KvHead, d: usize) {
        let mut scratch = vec![0.0; d];
        let (start, end) = (self.range.start, self.range.end);
        if self.keys.is_empty() || range.start < start || range.start > end || range.end < end {
            (self.keys, self.values) = (vec![0.0; d], vec![0.0; d]);
            self.range = range.start..range.start;
        }
        for p in self.range.end..range.end {
            self.add(p, 1.0, kv, &mut scratch);
        }
        for p in self.range.start..range.start {
            self.add(p, -1.0, kv, &mut scratch);
        }
        self.range = range;
    }

    fn add(&mut self, p: usize, sign: f64, kv: &KvHead, scratch: &mut [f32]) {
        for (sums, rows) in [(&mut self.keys, kv.keys()), (&mut self.values, kv.values())] {
            for (sum, x) in sums.iter_mut().zip(rows.row(p, scratch)) {
                *sum += sign * f64::from(*x);
            }
        }
    }
}

/// Returns the log-sum-exp of values.
pub(super) fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return max;
    }
    max + x.iter().map(|v| (v - max).exp()).sum::<f64>().ln()
}

/// Returns the sinks' share of the attention, and the log mass of the other positions, both estimated.
///
/// # Source
/// Eq. 6: the other positions' log mass is the larger of a global (log-normal) and a local estimate.
pub fn sparsity(sink: f64, global: f64, local: f64) -> (f64, f64) {
    let rest = global.max(local);
    (1.0 / (1.0 + (rest - sink).exp()), rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bypass_golden_example() {
        let (share, rest) = sparsity(5.0, 2.0, 1.0);
        assert!((share - 0.952_574).abs() < 1e-6 && rest == 2.0);
    }
}
