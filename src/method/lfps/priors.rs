//! What LFPS can know of a query head before it sees a prompt: the artifact's section `lfps`.
//!
//! Captured queries and keys are rotated at their true positions, and every quantity is taken over
//! rows of softmax weights of the non-sink positions alone (4 and up), which sum to one.
//!
//! # Source
//! LFPS, arXiv 2506.15704, for tables, thresholds, expansion and the bypass test; that they are
//! calibrated at all is ours, the paper has no offline stage.

mod anchors;
mod fit;
mod sample;

use std::sync::Arc;

use serde_json::{Value, json};

use super::{GAMMA, LOCAL, OFFSETS};
use crate::artifact::Artifact;
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::store::Spec;

pub use fit::fit_layer;
pub use sample::Sample;

/// Name of the section in an artifact.
pub const SECTION: &str = "lfps";
/// First positions that every step attends and no table holds.
pub const SINKS: usize = 4;
/// Rows before an anchor that fill its tables.
pub const HISTORY: usize = 32;
/// Values of the decay, in the order in which ties are decided.
pub const GAMMAS: [f64; 6] = [0.95, 0.80, 0.85, 0.90, 0.97, 0.99];
/// Values of the threshold's alpha, ascending.
pub const ALPHAS: [f64; 10] = [0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50];
/// Values of theta for which the bypass rate is kept.
pub const THETAS: [f64; 6] = [0.70, 0.75, 0.80, 0.85, 0.90, 0.95];
/// Lags of the overlap of top sets.
pub const LAGS: [usize; 3] = [1, 8, 32];
/// Share of the top-k mass that alpha must keep, and of all mass for `k_fraction`.
const SHARE: f64 = 0.95;
/// A top set has one in so many positions.
const TOP_DIVISOR: usize = 50;
/// Least k of the top-k that alpha is judged by.
const MIN_TOP_K: usize = 64;

/// Offsets with a bucket of their own.
const EXACT: usize = 512;
/// Buckets per doubling of the offset beyond them.
const PER_OCTAVE: usize = 8;
/// log2 of the offset where the last bucket ends in name; it takes everything beyond too.
const END_LOG2: usize = 20;
/// Offset buckets, NB.
pub const SLASH: usize = EXACT + PER_OCTAVE * (END_LOG2 - EXACT.ilog2() as usize);
/// Positions from here on are structural by their share of the current position.
const STRUCTURAL_END: usize = 64;
/// Buckets of that share.
const RELATIVE: usize = 8;
/// Structural buckets, NV.
pub const VERT: usize = STRUCTURAL_END - SINKS + RELATIVE;

/// Names of a head's scalars, in order.
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

/// The bucket of an offset: 0..511 exact, then eight buckets of equal width per doubling up to 2^20;
/// the last takes everything beyond.
pub fn slash_bucket(delta: usize) -> usize {
    if delta < EXACT {
        return delta;
    }
    let octave = delta.ilog2() - EXACT.ilog2();
    let within = (delta - (EXACT << octave)) / ((EXACT / PER_OCTAVE) << octave);
    (EXACT + PER_OCTAVE * octave as usize + within).min(SLASH - 1)
}

/// The first offset of a bucket.
fn slash_start(bucket: usize) -> usize {
    if bucket < EXACT {
        return bucket;
    }
    let (octave, within) = ((bucket - EXACT) / PER_OCTAVE, (bucket - EXACT) % PER_OCTAVE);
    (EXACT << octave) + within * ((EXACT / PER_OCTAVE) << octave)
}

/// Offsets of a bucket; of the last one those up to 2^20.
pub fn slash_width(bucket: usize) -> usize {
    slash_start(bucket + 1) - slash_start(bucket)
}

/// The section's parameters in the manifest.
pub fn manifest() -> Value {
    json!({
        "sinks": SINKS,
        "rope_space": "post",
        "granularity": "query-head",
        "row_rule": "kept rows from min(1024, L/2) of their block on that see a non-sink, evenly spaced",
        "max_rows": sample::MAX_ROWS,
        "max_anchors": sample::MAX_ANCHORS,
        "history_rows": HISTORY,
        "slash_exact": EXACT,
        "slash_edges": (EXACT..SLASH).map(slash_start).collect::<Vec<_>>(),
        "vert_exact": [SINKS, STRUCTURAL_END],
        "vert_edges": (0..RELATIVE).map(|b| 0.5f64.powi(b as i32)).collect::<Vec<_>>(),
        "scalars": SCALARS,
        "top_fraction": 1.0 / TOP_DIVISOR as f64,
        "min_top_k": MIN_TOP_K,
        "local": LOCAL,
        "gammas": GAMMAS,
        "gamma_floor": anchors::MASS_FLOOR,
        "alphas": ALPHAS,
        "alpha_decay": GAMMA,
        "alpha_share": SHARE,
        "k_share": SHARE,
        "threshold": "kurt_balanced",
        "expansion": OFFSETS,
        "thetas": THETAS,
        "lags": LAGS,
    })
}

/// Tensors of the section.
///
/// # Errors
/// Parameters of another version, whose buckets or scalars may mean something else.
pub fn specs(sizes: Sizes, params: &Value) -> Result<Vec<Spec>> {
    let expected = manifest();
    for (name, value) in expected.as_object().into_iter().flatten() {
        if params.get(name) != Some(value) {
            return Err(Error::failed(format!("`sections.lfps.{name}` is not valid"))
                .hint("make the section again with this version of kvsmith"));
        }
    }
    Ok(tensors(sizes))
}

fn tensors(sizes: Sizes) -> Vec<Spec> {
    let (l, h) = (sizes.n_layers, sizes.n_heads);
    vec![
        Spec::new::<f32>("lfps.slash", &[l, h, SLASH]),
        Spec::new::<f32>("lfps.vert", &[l, h, VERT]),
        Spec::new::<f32>("lfps.scalars", &[l, h, SCALARS.len()]),
    ]
}

/// Checks the values of the section: finite, mass that sums to one, probabilities within 0 and 1.
pub fn check_values(artifact: &Artifact) -> Result<()> {
    let specs = tensors(artifact.sizes);
    let wrong = |what: String| {
        Error::failed(format!("{}: {what}", artifact.store.path().display()))
            .hint("the file is damaged; make it again")
    };
    for (spec, width) in [(&specs[0], SLASH), (&specs[1], VERT)] {
        for mass in artifact.f32s(spec)?.chunks_exact(width) {
            let sum: f64 = mass.iter().map(|m| f64::from(*m)).sum();
            // The comparison is false for a NaN.
            let whole = (sum - 1.0).abs() <= 1e-3;
            if !whole || mass.iter().any(|m| *m < 0.0) {
                return Err(wrong(format!("`{}` is not a share of mass", spec.name)));
            }
        }
    }
    for head in artifact.f32s(&specs[2])?.chunks_exact(SCALARS.len()) {
        for (name, value) in SCALARS.iter().zip(head) {
            let valid = match *name {
                "glob_bias" => value.is_finite(),
                "rho0" | "rho_std" => value.is_finite() && *value >= 0.0,
                "gamma" => *value > 0.0 && *value < 1.0,
                "alpha" => value.is_finite() && *value > 0.0,
                _ => (0.0..=1.0).contains(value),
            };
            if !valid {
                return Err(wrong(format!("`lfps.scalars` has {name} = {value}")));
            }
        }
    }
    Ok(())
}

/// The priors of one query head.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadPrior {
    /// Mean mass per offset bucket: `[NB]`, see [`slash_bucket`].
    pub slash: Vec<f32>,
    /// Mean mass per structural bucket: `[NV]`, positions 4..63, then shares of the current position.
    pub vert: Vec<f32>,
    /// Share of the vertical table.
    pub lambda: f32,
    /// Mean mass of the full softmax on the sinks.
    pub sink_mean: f32,
    /// Mean of the true log mass of the non-sinks less its log-normal estimate.
    pub glob_bias: f32,
    /// Mean over rows of the scores' variance over the query's squared norm.
    pub rho0: f32,
    /// Its standard deviation over rows.
    pub rho_std: f32,
    /// Decay of the tables.
    pub gamma: f32,
    /// Factor of the thresholds.
    pub alpha: f32,
    /// Mean share of the non-sink positions that hold 95 % of their mass.
    pub k_fraction: f32,
    /// Share of rows with a sparsity above each of [`THETAS`].
    pub p_bypass: [f32; THETAS.len()],
    /// Overlap of top sets at each of [`LAGS`].
    pub persist: [f32; LAGS.len()],
}

impl HeadPrior {
    /// Of a row of each tensor.
    fn new(slash: &[f32], vert: &[f32], scalars: [f32; SCALARS.len()]) -> Self {
        let [
            lambda,
            sink_mean,
            _,
            _,
            _,
            _,
            _,
            _,
            glob_bias,
            rho0,
            rho_std,
            rest @ ..,
        ] = scalars;
        let [gamma, alpha, k_fraction, rest @ ..] = rest;
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

    /// Share of rows whose sparsity exceeded `theta`, by the largest of [`THETAS`] that is not above it;
    /// one below all of them.
    pub fn bypass_rate(&self, theta: f64) -> f32 {
        let below = THETAS.partition_point(|t| *t <= theta + 1e-9);
        below.checked_sub(1).map_or(1.0, |i| self.p_bypass[i])
    }

    /// Mean mass at one offset: that of its bucket spread evenly.
    pub fn slash_at(&self, delta: usize) -> f32 {
        let bucket = slash_bucket(delta);
        self.slash[bucket] / slash_width(bucket) as f32
    }

    /// Mean mass on one of the structural positions 4..63.
    pub fn vert_at(&self, position: usize) -> Option<f32> {
        (SINKS..STRUCTURAL_END)
            .contains(&position)
            .then(|| self.vert[position - SINKS])
    }
}

/// The priors of every query head.
pub struct Priors {
    n_heads: usize,
    heads: Vec<Arc<HeadPrior>>,
}

impl Priors {
    /// Reads the section, checking its digests and values.
    pub fn load(artifact: &Artifact) -> Result<Self> {
        let specs = specs(artifact.sizes, artifact.section(SECTION)?)?;
        for spec in &specs {
            artifact.check_digest(SECTION, &spec.name)?;
        }
        check_values(artifact)?;
        let values = |i: usize| artifact.f32s(&specs[i]);
        let (slash, vert, scalars) = (values(0)?, values(1)?, values(2)?);
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

    /// The prior of one query head.
    pub fn head(&self, layer: usize, query_head: usize) -> &Arc<HeadPrior> {
        &self.heads[layer * self.n_heads + query_head]
    }
}
