//! Determines the candidates that the tables propose: thresholds and neighbours, arXiv 2506.15704, Eq. 7-9.

use crate::parameters::choices;

choices! {
    /// How the thresholds of the tables are set.
    pub enum Threshold {
        /// Mean + alpha deviations, weighted so that the table with the larger kurtosis gets the lower threshold.
        Kurtosis = "kurtosis",
        /// The threshold that gives the share of candidates the paper reports for this length and alpha.
        Budget = "budget",
    }
}

/// Offsets of the neighbours of a position. A neighbour becomes a candidate with the position if a table has it above
/// its mean.
pub const OFFSETS: [isize; 4] = [-1, 0, 1, 2];
/// The largest share of exact scores that the paper reports, by alpha and context length (its Table 4).
const SHARES: [(f64, [f64; 6]); 4] = [
    (0.1, [0.080, 0.062, 0.050, 0.043, 0.026, 0.020]),
    (0.2, [0.060, 0.046, 0.041, 0.034, 0.020, 0.017]),
    (0.3, [0.048, 0.041, 0.037, 0.030, 0.017, 0.014]),
    (0.4, [0.042, 0.036, 0.032, 0.025, 0.015, 0.012]),
];
/// The context length of the first column, as a power of two; each further column doubles the length.
const FIRST_LOG2: f64 = 12.0;

/// Interpolates the paper's share for a context of `n` positions, linearly in log2 n and in alpha.
fn paper_share(n: usize, alpha: f64) -> f64 {
    let between = |x: f64, len: usize| {
        let x = x.clamp(0.0, (len - 1) as f64);
        let i = (x.floor() as usize).min(len - 2);
        (i, x - i as f64)
    };
    let (column, x) = between((n.max(1) as f64).log2() - FIRST_LOG2, 6);
    let (row, y) = between((alpha - SHARES[0].0) / 0.1, 4);
    let at = |row: usize| SHARES[row].1[column] * (1.0 - x) + SHARES[row].1[column + 1] * x;
    at(row) * (1.0 - y) + at(row + 1) * y
}

/// The mean, deviation and kurtosis of a table's entries.
#[derive(Clone, Copy, Debug)]
pub(super) struct TableStats {
    pub(super) mean: f64,
    pub(super) deviation: f64,
    /// m4 / m2^2, or 3 (the kurtosis of a normal distribution) if all values are equal.
    pub(super) kurtosis: f64,
}

impl TableStats {
    /// Computes the statistics of values in two passes.
    pub(super) fn from_values(values: &[f64]) -> Self {
        let n = values.len().max(1) as f64;
        let mean = values.iter().sum::<f64>() / n;
        let (mut m2, mut m4) = (0.0, 0.0);
        for v in values {
            let square = (v - mean) * (v - mean);
            m2 += square;
            m4 += square * square;
        }
        Self::new(mean, m2 / n, m4 / n)
    }

    /// Computes the statistics of values from the means of their first four powers; `None` if the central moments come
    /// out so small that cancellation has left them too inaccurate.
    ///
    /// # Numerics
    /// Relative to the second and the fourth moment, the errors of the means count at most 100 and 10^4 times.
    pub(super) fn of_powers([mean, p2, p3, p4]: [f64; 4]) -> Option<Self> {
        let m2 = p2 - mean * mean;
        let m4 = p4 - 4.0 * mean * p3 + 6.0 * mean * mean * p2 - 3.0 * mean.powi(4);
        // Every comparison with NaN is false, so NaN gives `None`.
        (m2 > 1e-2 * p2 && m4 > 1e-4 * p4).then(|| Self::new(mean, m2, m4))
    }

    fn new(mean: f64, m2: f64, m4: f64) -> Self {
        let kurtosis = m4 / (m2 * m2);
        Self {
            mean,
            deviation: m2.sqrt(),
            kurtosis: if kurtosis.is_finite() { kurtosis } else { 3.0 },
        }
    }

    /// Returns the value that lies `deviations` standard deviations above the mean.
    fn above(self, deviations: f64) -> f64 {
        self.mean + deviations * self.deviation
    }
}

/// Returns the thresholds of the vertical and the slash table; the table with the larger kurtosis has the lower one.
///
/// # Source
/// Eq. 8, whose wording in the paper is not fully known; this form is ours.
pub(super) fn balanced(vertical: TableStats, slash: TableStats, alpha: f64) -> (f64, f64) {
    let both = vertical.kurtosis + slash.kurtosis;
    (
        vertical.above(alpha * 2.0 * slash.kurtosis / both),
        slash.above(alpha * 2.0 * vertical.kurtosis / both),
    )
}

/// Chooses the thresholds of the vertical and the slash table. `count` returns the number of candidates that a pair of
/// thresholds gives.
///
/// # Source
/// Eq. 7 and 8.
pub(super) fn thresholds(
    vertical: TableStats,
    slash: TableStats,
    rule: Threshold,
    alpha: f64,
    n_visible: usize,
    count: impl Fn((f64, f64)) -> usize,
) -> (f64, f64) {
    let even = |c: f64| (vertical.above(c), slash.above(c));
    match rule {
        Threshold::Kurtosis => balanced(vertical, slash, alpha),
        Threshold::Budget => {
            let wanted = ((paper_share(n_visible, alpha) * n_visible as f64) as usize).max(1);
            // More deviations give fewer candidates, so a bisection finds the smallest number of deviations that fits.
            // None of n values is more than sqrt(n) deviations above their mean.
            let (mut low, mut high) = (0.0, (n_visible as f64).sqrt() + 1.0);
            if count(even(low)) <= wanted {
                return even(low);
            }
            for _ in 0..40 {
                let c = (low + high) / 2.0;
                if count(even(c)) > wanted {
                    low = c;
                } else {
                    high = c;
                }
            }
            even(high)
        }
    }
}

/// Marks the positions above a threshold, and those of their neighbours that are above a mean.
///
/// # Source
/// Eq. 9.
pub(super) fn expanded(vertical: &[f64], slash: &[f64], limits: (f64, f64), means: (f64, f64)) -> Vec<bool> {
    let n = vertical.len();
    let mut marks = vec![false; n];
    for i in 0..n {
        if vertical[i] > limits.0 || slash[i] > limits.1 {
            let near = OFFSETS.iter().filter_map(|o| i.checked_add_signed(*o));
            for j in near.filter(|j| *j < n) {
                marks[j] |= vertical[j] > means.0 || slash[j] > means.1;
            }
        }
    }
    marks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_papers_table() {
        assert!((paper_share(4096, 0.1) - 0.08).abs() < 1e-12);
        assert!((paper_share(1 << 17, 0.4) - 0.012).abs() < 1e-12);
        assert!((paper_share(1 << 20, 0.9) - 0.012).abs() < 1e-12);
        assert!((paper_share(64, 0.0) - 0.08).abs() < 1e-12);
        assert!((paper_share(8192, 0.25) - (0.046 + 0.041) / 2.0).abs() < 1e-12);
    }
}
