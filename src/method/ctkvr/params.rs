//! The parameters of ctkvr.

use rand::SeedableRng;
use rand::seq::index;
use rand_chacha::ChaCha8Rng;

use crate::parameters::{AT_LEAST_ONE, Choice, MULTIPLE, SWITCH, Values, choices, parameters};

choices! {
    /// Which prompt queries become centroids.
    pub enum Choose {
        /// The last queries of the prompt, as in the paper.
        Last = "last",
        /// Queries evenly spaced over the prompt (ablation).
        Even = "even",
        /// The first queries of the prompt (ablation).
        First = "first",
        /// Queries drawn at random, the same for every head (ablation).
        Random = "random",
    }
}

impl Choose {
    /// Returns `count` of `m` rows, ascending.
    pub(super) fn rows(self, m: usize, count: usize) -> Vec<usize> {
        let count = count.min(m);
        match self {
            Self::Last => (m - count..m).collect(),
            Self::Even => (0..count).map(|i| (i + 1) * m / count - 1).collect(),
            Self::First => (0..count).collect(),
            Self::Random => {
                let mut rng = ChaCha8Rng::seed_from_u64(m as u64);
                let mut rows = index::sample(&mut rng, m, count).into_vec();
                rows.sort_unstable();
                rows
            }
        }
    }
}

parameters! {
    /// The parameters of ctkvr.
    pub struct CtkvrParams, "Method ctkvr" {
        /// Number of query centroids, as far as the index is not larger than the KV cache (default: one per 16 positions, at
        /// least --ct-probes and at most 2048, as far as the index takes at most a tenth of the bytes of the cache in its own
        /// type (--kv))
        ct_centroids: Option<usize> = None, "C" in AT_LEAST_ONE;
        /// Number of query centroids whose lists a step recalls
        ct_probes: usize = 4, "N" in AT_LEAST_ONE;
        /// Turn the query of every Nth decode step into a query centroid; 0 = never
        ct_update: usize = 1, "N" in Values::Whole(0, u64::MAX);
        /// Prompt queries that become query centroids
        ct_choose: Choose = Choose::Last, "NAME" in Values::OneOf(Choose::WORDS);
        /// Length of each query centroid's list, as a multiple of the budget (at least 1)
        ct_list: f64 = 2.5, "F" in MULTIPLE;
        /// Keep the query centroids of the first prompt: queries of later prompts do not become centroids (ablation)
        ct_keep: bool = false, "" in SWITCH;
    }
}
