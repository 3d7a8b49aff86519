//! The priors of query heads, calibrated before any prompt: the artifact's section `lfps`.
//!
//! Captured queries and keys are rotated at their true positions. Every quantity is taken over rows of softmax weights
//! of the non-sinks alone (positions 4 and up), which sum to one.
//!
//! # Source
//! LFPS, arXiv 2506.15704, for tables, thresholds, expansion and the bypass test. Their calibration is ours, because
//! the paper has no offline stage.

mod anchors;
mod fit;
mod sample;
mod section;

use std::sync::Arc;

use super::threshold::OFFSETS;
use crate::artifact::Artifact;
use crate::error::Result;
use crate::kv::static_set::SINKS;
pub use section::LfpsSection;

/// Name of the section in an artifact.
pub const SECTION: &str = "lfps";
/// The rows before an anchor that fill its tables.
pub const HISTORY: usize = 32;
/// The values of the decay that are tried; on ties the earlier one wins.
pub const GAMMAS: [f64; 6] = [0.95, 0.80, 0.85, 0.90, 0.97, 0.99];
/// The values of the threshold's alpha that are tried, ascending.
pub const ALPHAS: [f64; 10] = [0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50];
/// The values of theta for which the bypass rate is kept.
pub const THETAS: [f64; 6] = [0.70, 0.75, 0.80, 0.85, 0.90, 0.95];
/// The lags, in rows, at which the overlap of top sets is measured.
pub const LAGS: [usize; 3] = [1, 8, 32];
/// The share of the top-k mass that alpha must keep; also the share of all mass that `k_fraction` is about.
const SHARE: f64 = 0.95;
/// A top set has one in this many positions.
const TOP_DIVISOR: usize = 50;
/// The smallest k of the top-k sets by which alpha is chosen.
const MIN_TOP_K: usize = 64;

/// The number of offsets, from 0, that have a bucket each.
const EXACT: usize = 512;
/// Buckets per doubling of the offset beyond these.
const PER_OCTAVE: usize = 8;
/// log2 of the nominal end of the last bucket, which also holds all larger offsets.
const END_LOG2: usize = 20;
/// Number of offset buckets, NB.
pub const SLASH: usize = EXACT + PER_OCTAVE * (END_LOG2 - EXACT.ilog2() as usize);
/// Positions from here on are put into buckets by their share of the current position.
const STRUCTURAL_END: usize = 64;
/// Number of buckets for these shares.
const RELATIVE: usize = 8;
/// Number of structural buckets, NV.
pub const VERT: usize = STRUCTURAL_END - SINKS + RELATIVE;

/// The names of a head's scalars, in the order in which they are stored.
pub const SCALARS: [&str; 23] = [
    "lambda",
    "sink_mean",
    "sink_std",
    "sink_q05",
    "sink_q25",
    "sink_q50",
    "sink_q75",
    "sink_q95",
    "glob_bias",
    "rho0",
    "rho_std",
    "gamma",
    "alpha",
    "k_fraction",
    "p_bypass_0.70",
    "p_bypass_0.75",
    "p_bypass_0.80",
    "p_bypass_0.85",
    "p_bypass_0.90",
    "p_bypass_0.95",
    "persist_1",
    "persist_8",
    "persist_32",
];

/// Returns the bucket of an offset. Offsets 0..511 have a bucket each; beyond, each doubling up to 2^20 has eight
/// buckets of equal width. The last bucket also holds all larger offsets.
pub fn slash_bucket(delta: usize) -> usize {
    if delta < EXACT {
        return delta;
    }
    let octave = delta.ilog2() - EXACT.ilog2();
    let within = (delta - (EXACT << octave)) / ((EXACT / PER_OCTAVE) << octave);
    (EXACT + PER_OCTAVE * octave as usize + within).min(SLASH - 1)
}

/// Returns the first offset of a bucket.
fn slash_start(bucket: usize) -> usize {
    if bucket < EXACT {
        return bucket;
    }
    let (octave, within) = ((bucket - EXACT) / PER_OCTAVE, (bucket - EXACT) % PER_OCTAVE);
    (EXACT << octave) + within * ((EXACT / PER_OCTAVE) << octave)
}

/// Returns the number of offsets in a bucket; for the last bucket, only offsets below 2^20 count.
pub fn slash_width(bucket: usize) -> usize {
    slash_start(bucket + 1) - slash_start(bucket)
}

/// The priors of one query head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadPrior {
    /// Mean mass per offset bucket: `[NB]`, see [`slash_bucket`].
    pub slash: Vec<f32>,
    /// Mean mass per structural bucket, `[NV]`: first one bucket each for positions 4..63, then buckets by share of the
    /// current position. The latter describe the head; no method reads them.
    pub vert: Vec<f32>,
    /// The vertical table's share of an update.
    pub lambda: f32,
    /// Mean mass of the full softmax on the sinks; describes the head, no method reads it.
    pub sink_mean: f32,
    /// Mean of the true log mass of the non-sinks minus its log-normal estimate.
    pub glob_bias: f32,
    /// Mean over rows of the variance of the scores, divided by the squared norm of the query.
    pub rho0: f32,
    /// Standard deviation over rows of the quantity in `rho0`; describes the head, no method reads it.
    pub rho_std: f32,
    /// Decay of the tables per step.
    pub gamma: f32,
    /// Factor of the deviation in the thresholds.
    pub alpha: f32,
    /// Mean share of the non-sink positions that hold 95% of their mass; describes the head, no method reads it.
    pub k_fraction: f32,
    /// Share of rows whose sparsity exceeds each of [`THETAS`].
    pub p_bypass: [f32; THETAS.len()],
    /// Overlap of top sets at each of [`LAGS`]; describes the head, no method reads it.
    pub persist: [f32; LAGS.len()],
}

impl HeadPrior {
    /// Makes a prior from one head's row of each tensor.
    fn new(slash: &[f32], vert: &[f32], scalars: [f32; SCALARS.len()]) -> Self {
        let [lambda, sink_mean, _, _, _, _, _, _, rest @ ..] = scalars;
        let [glob_bias, rho0, rho_std, gamma, alpha, k_fraction, rest @ ..] = rest;
        Self {
            slash: slash.to_vec(),
            vert: vert.to_vec(),
            lambda,
            sink_mean,
            glob_bias,
            rho0,
            rho_std,
            gamma,
            alpha,
            k_fraction,
            p_bypass: std::array::from_fn(|i| rest[i]),
            persist: std::array::from_fn(|i| rest[THETAS.len() + i]),
        }
    }

    /// Returns the share of rows whose sparsity exceeded the largest of [`THETAS`] that is not above `theta`; 1 if
    /// `theta` is below all of them.
    pub fn bypass_rate(&self, theta: f64) -> f32 {
        let below = THETAS.partition_point(|t| *t <= theta + 1e-9);
        below.checked_sub(1).map_or(1.0, |i| self.p_bypass[i])
    }

    /// Returns the mean mass at an offset: the mass of its bucket, spread evenly over the bucket.
    pub fn slash_at(&self, delta: usize) -> f32 {
        let bucket = slash_bucket(delta);
        self.slash[bucket] / slash_width(bucket) as f32
    }

    /// Returns the mean mass on a position, if it is one of the structural positions 4..63.
    pub fn vert_at(&self, position: usize) -> Option<f32> {
        let is_structural = (SINKS..STRUCTURAL_END).contains(&position);
        is_structural.then(|| self.vert[position - SINKS])
    }
}

/// The priors of every query head.
pub struct Priors {
    n_heads: usize,
    heads: Vec<Arc<HeadPrior>>,
}

impl Priors {
    /// Reads the section and checks its digests and values.
    pub fn load(artifact: &Artifact) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let slash: Vec<f32> = section.read(section::SLASH)?;
        let vert: Vec<f32> = section.read(section::VERT)?;
        let scalars: Vec<f32> = section.read(section::SCALARS)?;
        let heads = slash
            .chunks_exact(SLASH)
            .zip(vert.chunks_exact(VERT))
            .zip(scalars.as_chunks().0)
            .map(|((slash, vert), scalars)| Arc::new(HeadPrior::new(slash, vert, *scalars)))
            .collect();
        Ok(Self {
            n_heads: artifact.sizes.n_heads,
            heads,
        })
    }

    /// Returns the prior of a query head.
    pub fn head(&self, layer: usize, query_head: usize) -> &Arc<HeadPrior> {
        &self.heads[layer * self.n_heads + query_head]
    }
}
