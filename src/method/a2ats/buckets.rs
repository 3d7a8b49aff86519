//! Buckets of distances between a query and a key, each with one mean rotation of the query.
//!
//! Ours, not the paper's: windowed RoPE scores every key as if it were at one fixed distance b from the query.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::rope::{Rope, RopeTable};

/// Number of buckets.
pub const BUCKETS: usize = 8;
/// The end of the first bucket, for texts of at least `FIRST_SHARE` times this length. It equals the default window, so
/// that the other seven buckets are for candidates.
const FIRST: usize = 64;
/// In shorter texts, the first bucket ends at the text's length divided by this.
const FIRST_SHARE: usize = 32;
/// The largest possible end of the last bucket.
const MOST: usize = 1 << 30;

/// The edges of the buckets: bucket i holds the distances `edges[i]..edges[i + 1]`; the last bucket also holds all
/// larger distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Edges(pub [u32; BUCKETS + 1]);

/// The buckets of a section, as the manifest stores them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DistanceBuckets {
    /// The edges, ascending from 0.
    pub edges: Edges,
    /// The weight of each bucket in the metric, per layer.
    pub weights: Vec<[f64; BUCKETS]>,
}

/// The candidates that lie in one bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// The bucket; 0 if the head has no buckets.
    pub bucket: usize,
    /// The positions.
    pub positions: Range<usize>,
}

impl fmt::Display for Edges {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let edges: Vec<String> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&edges.join(", "))
    }
}

impl Edges {
    /// Makes edges for texts of `seq_len` tokens: 0, then a geometric series that ends there.
    pub fn new(seq_len: usize) -> Self {
        let end = seq_len.clamp(1, MOST);
        let first = (end / FIRST_SHARE).clamp(1, FIRST) as f64;
        let ratio = end as f64 / first;
        let mut edges = [0; BUCKETS + 1];
        for i in 1..=BUCKETS {
            let edge = first * ratio.powf((i - 1) as f64 / (BUCKETS - 1) as f64);
            edges[i] = (edge.round() as u32).max(edges[i - 1] + 1);
        }
        Self(edges)
    }

    /// Computes the mean rotation of every bucket. For the last bucket, it is the mean over the distances up to the
    /// last edge.
    pub fn rotations(&self, rope: &Rope) -> RopeTable {
        rope.mean_table(&self.0)
    }

    /// Divides the candidates by bucket, for the query at position `end - 1`. The runs are in ascending order of
    /// position; buckets without candidates are left out.
    pub fn runs(&self, end: usize, candidates: &Range<usize>) -> Vec<Run> {
        let place = |bucket: usize| {
            // Distance 0 is at position `end - 1`.
            let first = if bucket == BUCKETS - 1 {
                0
            } else {
                end.saturating_sub(self.0[bucket + 1] as usize)
            };
            let last = end.saturating_sub(self.0[bucket] as usize);
            let positions = first.max(candidates.start)..last.min(candidates.end);
            Run { bucket, positions }
        };
        let runs = (0..BUCKETS).rev().map(place);
        runs.filter(|run| !run.positions.is_empty()).collect()
    }

    /// Counts the distances below `end` in each bucket.
    fn distances_below(&self, end: usize) -> [u64; BUCKETS] {
        let below = |edge: u32| end.min(edge as usize);
        std::array::from_fn(|i| {
            let to = if i == BUCKETS - 1 {
                end
            } else {
                below(self.0[i + 1])
            };
            (to - below(self.0[i])) as u64
        })
    }
}

impl DistanceBuckets {
    /// Makes the buckets of a calibration whose blocks have at most `seq_len` tokens.
    ///
    /// The weight of a bucket is its share of all pairs of a kept query and a key that the query sees. The metric is
    /// then the mean over these pairs, which is what a uniform choice among the visible positions would meet.
    ///
    /// # Shapes
    /// `block_start` has the first row of each block, then n; `kept` `[n]`; `windows` has each layer's sliding window.
    pub fn new(seq_len: usize, block_start: &[u32], kept: &[bool], windows: &[Option<usize>]) -> Self {
        let edges = Edges::new(seq_len);
        let weights = |window: &Option<usize>| {
            let mut pairs = [0u64; BUCKETS];
            for block in block_start.windows(2) {
                let rows = &kept[block[0] as usize..block[1] as usize];
                for (position, _) in rows.iter().enumerate().filter(|(_, kept)| **kept) {
                    let seen = window.map_or(position + 1, |window| window.min(position + 1));
                    let more = edges.distances_below(seen);
                    pairs
                        .iter_mut()
                        .zip(more)
                        .for_each(|(pairs, more)| *pairs += more);
                }
            }
            let all: u64 = pairs.iter().sum();
            pairs.map(|pairs| pairs as f64 / all.max(1) as f64)
        };
        Self {
            weights: windows.iter().map(weights).collect(),
            edges,
        }
    }

    /// Fails if no calibration of a model with `n_layers` layers could have made the edges or weights.
    pub fn check(&self, n_layers: usize) -> Result<()> {
        let Edges(edges) = &self.edges;
        if edges[0] != 0 || !edges.windows(2).all(|pair| pair[0] < pair[1]) {
            return Err(Error::damaged(
                "`sections.a2ats.distance_buckets.edges` do not ascend from 0",
            ));
        }
        let is_share = |of: &[f64; BUCKETS]| {
            of.iter().all(|weight| *weight >= 0.0) && (of.iter().sum::<f64>() - 1.0).abs() < 1e-9
        };
        if self.weights.len() == n_layers && self.weights.iter().all(is_share) {
            Ok(())
        } else {
            Err(Error::damaged(
                "`sections.a2ats.distance_buckets.weights` are not one set of shares per layer",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bucket of a distance by comparing it with every edge.
    fn bucket(edges: &Edges, distance: usize) -> usize {
        let is_in = |i: &usize| distance < edges.0[i + 1] as usize;
        (0..BUCKETS).find(is_in).unwrap_or(BUCKETS - 1)
    }

    #[test]
    fn edges_ascend_to_the_length() {
        assert_eq!(Edges::new(2048).0, [0, 64, 105, 172, 283, 464, 761, 1248, 2048]);
        for seq_len in [0, 1, 2, 7, 9, 40, 128, 2047, 16_384, 131_072, 1 << 30, usize::MAX] {
            let Edges(edges) = Edges::new(seq_len);
            assert!(edges[0] == 0 && edges.windows(2).all(|pair| pair[0] < pair[1]));
            assert!(seq_len > MOST || edges[BUCKETS] as usize >= seq_len, "{seq_len}");
        }
    }

    #[test]
    fn every_candidate_is_in_the_run_of_its_distance() {
        let edges = Edges([0, 1, 3, 4, 9, 20, 21, 40, 60]);
        for end in [1usize, 2, 5, 22, 41, 59, 60, 61, 200] {
            for (start, stop) in [(0, end), (3, end.saturating_sub(2)), (end / 2, end - 1), (4, 4)] {
                let candidates = start..stop.max(start);
                let mut next = candidates.start;
                for run in edges.runs(end, &candidates) {
                    assert_eq!(run.positions.start, next, "{run:?}");
                    for position in run.positions.clone() {
                        assert_eq!(bucket(&edges, end - 1 - position), run.bucket);
                    }
                    next = run.positions.end;
                }
                assert_eq!(next, candidates.end);
            }
        }
    }

    #[test]
    fn weights_are_the_shares_of_the_visible_pairs() {
        let (starts, windows) = ([0, 5, 90, 91], [None, Some(7), Some(1)]);
        let kept: Vec<bool> = (0..91).map(|i| i % 3 > 0).collect();
        let found = DistanceBuckets::new(20, &starts, &kept, &windows);
        found.check(3).unwrap();
        for (weights, window) in found.weights.iter().zip(windows) {
            let (mut pairs, mut all) = ([0.0; BUCKETS], 0.0);
            for block in starts.windows(2) {
                for row in (block[0]..block[1]).filter(|row| kept[*row as usize]) {
                    for key in block[0]..=row {
                        let distance = (row - key) as usize;
                        if distance < window.unwrap_or(usize::MAX) {
                            pairs[bucket(&found.edges, distance)] += 1.0;
                            all += 1.0;
                        }
                    }
                }
            }
            assert_eq!(weights, &pairs.map(|pairs| pairs / all));
        }
    }
}
