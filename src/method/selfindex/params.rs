//! The parameters of selfindex and of the 2-bit cache, as flags.

use crate::kv::packed::{Center, FULL};

/// Where the centroids come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CentroidSource {
    /// From one pass over the prompt, as in the paper.
    OnePass,
    /// From the artifact alone.
    Offline,
    /// No centroids: only the sign of each channel counts (ablation).
    Signs,
}

/// The parameters of selfindex and of the 2-bit cache.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
#[command(next_help_heading = "Method selfindex, and 2-bit caches")]
pub struct SelfIndexParams {
    /// Source of the centroids; offline needs an artifact with the section `sign`
    #[arg(long, value_enum, default_value_t = CentroidSource::OnePass)]
    pub sign_centroids: CentroidSource,
    /// For selfindex and --kv 2bit: value that is subtracted from each channel of the keys before their signs are
    /// taken (default: as in the artifact, else median)
    #[arg(long, value_enum)]
    pub center: Option<Center>,
    /// For --kv 2bit: maximum number of positions that are also kept in f16. selfindex always attends some of them:
    /// one for every 38 positions of its budget, before the ranked positions
    #[arg(long, value_name = "N", default_value_t = FULL, value_parser = crate::flags::parse_count)]
    pub sign_full: usize,
    /// For --kv 2bit: quantise keys like values, without their signs (ablation)
    #[arg(long)]
    pub plain_keys: bool,
}

impl SelfIndexParams {
    /// Returns these parameters with those of `other` that describe the caches.
    pub fn with_caches_of(self, other: &Self) -> Self {
        Self {
            sign_centroids: self.sign_centroids,
            ..other.clone()
        }
    }
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
