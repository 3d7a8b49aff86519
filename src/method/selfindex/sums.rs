//! Sums of centered keys by sign pattern, and the centroids that follow from them.

use super::fit::pattern;
use super::groups::{GROUP, PATTERNS, sign};
use crate::compute::device::SignSums;

/// The sums that a pass over keys collects.
#[derive(Clone)]
pub(super) struct PatternSums {
    /// Sums of the channels by pattern, `[d/4,16,4]`.
    sums: Vec<f64>,
    /// Number of keys by pattern, `[d/4,16]`.
    pub(super) counts: Vec<u64>,
    /// Sums of the channels' magnitudes, `[d]`.
    magnitude: Vec<f64>,
    keys: u64,
}

impl PatternSums {
    pub(super) fn new(d: usize) -> Self {
        Self {
            sums: vec![0.0; d * PATTERNS],
            counts: vec![0; d / GROUP * PATTERNS],
            magnitude: vec![0.0; d],
            keys: 0,
        }
    }

    /// Adds a centered key.
    pub(super) fn add(&mut self, centered: &[f32]) {
        for (g, x) in centered.chunks_exact(GROUP).enumerate() {
            let cell = g * PATTERNS + pattern(x);
            self.counts[cell] += 1;
            for (e, v) in x.iter().enumerate() {
                self.sums[cell * GROUP + e] += f64::from(*v);
                self.magnitude[g * GROUP + e] += f64::from(v.abs());
            }
        }
        self.keys += 1;
    }

    /// Returns the centroids, `[d/4,16,4]`. A pattern that no key has gets plus or minus the mean magnitude of its
    /// channels.
    pub(super) fn centroids(&self) -> Vec<f64> {
        let cell = |i: usize| {
            let (cell, e) = (i / GROUP, i % GROUP);
            let (group, p) = (cell / PATTERNS, cell % PATTERNS);
            match self.counts[cell] {
                0 => sign(p, e) * self.magnitude[group * GROUP + e] / self.keys.max(1) as f64,
                count => self.sums[i] / count as f64,
            }
        };
        (0..self.sums.len()).map(cell).collect()
    }
}

impl From<SignSums> for PatternSums {
    fn from(of: SignSums) -> Self {
        let mut magnitude = vec![0.0; of.sums.len() / PATTERNS];
        for (i, sum) in of.sums.iter().enumerate() {
            let (group, pattern, e) = (i / GROUP / PATTERNS, i / GROUP % PATTERNS, i % GROUP);
            magnitude[group * GROUP + e] += sign(pattern, e) * sum;
        }
        Self {
            magnitude,
            keys: of.counts.iter().take(PATTERNS).sum(),
            sums: of.sums,
            counts: of.counts,
        }
    }
}
