//! The parameters of selfindex and of the 2-bit cache, as flags.

use crate::kv::packed::{Center, FULL};

/// Where the centroids come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CentroidSource {
    /// One pass over the prompt, as in the paper.
    OnePass,
    /// The artifact alone.
    Offline,
    /// The prompt's, with the artifact's as 32 keys more.
    Hybrid,
    /// None: a channel counts by its sign alone (ablation).
    Signs,
}

/// The parameters of selfindex and of the 2-bit cache.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method selfindex, and 2-bit caches")]
pub struct SelfIndexParams {
    /// Where centroids come from; offline and hybrid need an artifact
    #[arg(long, value_enum, default_value_t = CentroidSource::OnePass)]
    pub sign_centroids: CentroidSource,
    /// selfindex and --kv 2bit: what signs are taken around (default: as in the artifact, else median)
    #[arg(long, value_enum)]
    pub center: Option<Center>,
    /// --kv 2bit: maximum number of positions kept in f16; for every 38 positions of its budget, selfindex attends one of
    /// these first
    #[arg(long, value_name = "N", default_value_t = FULL, value_parser = crate::flags::parse_count)]
    pub sign_full: usize,
    /// --kv 2bit: quantise keys as values are, without their signs (ablation)
    #[arg(long)]
    pub plain_keys: bool,
}

impl Default for SelfIndexParams {
    fn default() -> Self {
        Self {
            sign_centroids: CentroidSource::OnePass,
            center: None,
            sign_full: FULL,
            plain_keys: false,
        }
    }
}
