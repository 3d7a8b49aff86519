//! The parameters of ctkvr, as flags.

use rand::SeedableRng;
use rand::seq::index;
use rand_chacha::ChaCha8Rng;

/// Length of a list by default, in budgets.
const LIST_PER_BUDGET: f64 = 2.5;

/// Parses the length of a list as a multiple of the budget; a step must rank at least one budget of positions.
fn list_per_budget(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x >= 1.0 => Ok(x),
        _ => Err("expected a number of at least 1".to_string()),
    }
}

/// Which prompt queries become centroids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Choose {
    /// The last queries of the prompt, as in the paper.
    Last,
    /// Queries evenly spaced over the prompt (ablation).
    Even,
    /// The first queries of the prompt (ablation).
    First,
    /// Queries drawn at random, the same for every head (ablation).
    Random,
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

/// The parameters of ctkvr.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method ctkvr")]
pub struct CtkvrParams {
    /// Number of query centroids, as far as the index is not larger than the KV cache (default: one per 16 positions, at
    /// least --ct-probes and at most 2048, as far as the index takes at most a tenth of the bytes of the cache in its own
    /// type (--kv))
    #[arg(long, value_name = "C", value_parser = crate::flags::at_least_one)]
    pub ct_centroids: Option<usize>,
    /// Number of query centroids whose lists a step recalls
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = crate::flags::at_least_one)]
    pub ct_probes: usize,
    /// Turn the query of every Nth decode step into a query centroid; 0 = never
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub ct_update: usize,
    /// Prompt queries that become query centroids
    #[arg(long, value_enum, default_value_t = Choose::Last)]
    pub ct_choose: Choose,
    /// Length of each query centroid's list, as a multiple of the budget (at least 1)
    #[arg(long, value_name = "F", default_value_t = LIST_PER_BUDGET, value_parser = list_per_budget)]
    pub ct_list: f64,
    /// Keep the query centroids of the first prompt: queries of later prompts do not become centroids (ablation)
    #[arg(long)]
    pub ct_keep: bool,
}

impl Default for CtkvrParams {
    fn default() -> Self {
        Self {
            ct_centroids: None,
            ct_probes: 4,
            ct_update: 1,
            ct_choose: Choose::Last,
            ct_list: LIST_PER_BUDGET,
            ct_keep: false,
        }
    }
}
