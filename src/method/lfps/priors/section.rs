//! The section `lfps`: the priors of every query head.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::super::constants::{GAMMA, LOCAL};
use super::fit::PriorsFit;
use super::sample::Sample;
use super::{
    ALPHAS, EXACT, GAMMAS, HISTORY, LAGS, MIN_TOP_K, OFFSETS, RELATIVE, SECTION, SHARE, STRUCTURAL_END,
    THETAS, TOP_DIVISOR, anchors, sample, slash_start,
};
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, Notable, SectionKind, SectionView, object, parse,
    share, table,
};
use crate::env::Reporter;
use crate::error::{Error, Result};
use crate::kv::static_set::SINKS;
use crate::method::weak::worst_of;
use crate::model::Sizes;
use crate::store::Spec;

/// Mean mass per offset bucket.
pub const SLASH: &str = "lfps.slash";
/// Mean mass per structural bucket.
pub const VERT: &str = "lfps.vert";
/// The named scalars.
pub const SCALARS: &str = "lfps.scalars";

/// A query head whose sinks have at least this share of its attention, on average, attends little else.
const SUNK: f64 = 0.95;

/// Returns the section's parameters for the manifest.
pub fn manifest() -> Result<Map<String, Value>> {
    object(&json!({
        "sinks": SINKS,
        "rope_space": "post",
        "granularity": "query-head",
        "row_rule": "kept rows from min(1024, L/2) of their block on that see a non-sink, evenly spaced",
        "max_rows": sample::MAX_ROWS,
        "max_anchors": sample::MAX_ANCHORS,
        "history_rows": HISTORY,
        "slash_exact": EXACT,
        "slash_edges": (EXACT..super::SLASH).map(slash_start).collect::<Vec<_>>(),
        "vert_exact": [SINKS, STRUCTURAL_END],
        "vert_edges": (0..RELATIVE).map(|b| 0.5f64.powi(b as i32)).collect::<Vec<_>>(),
        "scalars": super::SCALARS,
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
    }))
}

/// The values of a KV head's quality report that are shown, one per query head; docs/reference/artifact.md defines the report.
#[derive(Deserialize)]
struct PriorsQuality {
    rows: usize,
    lambda: Vec<f64>,
    sink_mean: Vec<f64>,
    p_bypass: Vec<f64>,
    alpha: Vec<f64>,
    gamma: Vec<f64>,
    k_fraction: Vec<f64>,
    persist_32: Vec<f64>,
}

/// Returns the mean over the query heads of a KV head.
fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

const COLUMNS: [Column<PriorsQuality>; 8] = [
    Column::new("rows", |v| format!("{v:.0}"), |q| Some(q.rows as f64)),
    Column::new("lambda", |v| format!("{v:.2}"), |q| mean(&q.lambda)),
    Column::new("sink mass", share, |q| mean(&q.sink_mean)),
    Column::new("bypassed", share, |q| mean(&q.p_bypass)),
    Column::new("95% in", share, |q| mean(&q.k_fraction)),
    Column::new("alpha", |v| format!("{v:.2}"), |q| mean(&q.alpha)),
    Column::new("gamma", |v| format!("{v:.3}"), |q| mean(&q.gamma)),
    Column::new("same +32", share, |q| mean(&q.persist_32)),
];
const LEGEND: &str = "(means over each layer's query heads; bypassed = share of rows with a sparsity
above 0.85; 95% in = share of the positions that hold 95% of the attention;
same +32 = overlap of the best 2% of positions after 32 steps; rows, sink mass,
95% in and same +32 describe the heads, no method uses them)\n";

/// Warns if the text is so short that the priors say nothing.
fn warn_if_short(sample: &Sample, reporter: &dyn Reporter) {
    let missing = match (sample.n_rows(), sample.n_anchors()) {
        (0, _) => "all LFPS priors are",
        (_, 0) => "the LFPS priors that need a history are",
        _ => return,
    };
    reporter.warn(&format!(
        "the blocks are too short for LFPS, so {missing} neutral; give longer documents or a larger ⟨seq_len⟩"
    ));
}

/// The declaration of the section.
#[derive(Debug)]
pub struct LfpsSection;

impl SectionKind for LfpsSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: "priors",
            about: "Measure the LFPS priors from a dump with queries",
            stage: "priors",
            moments: MomentsRead::Nothing,
            reads_queries: true,
            reads_values: false,
            cpu_only: true,
            position_bound: true,
            on_request: false,
        }
    }

    fn fit(&self, _: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>> {
        let sample = Sample::new(input.block_start, input.kept);
        warn_if_short(&sample, input.reporter);
        Ok(Box::new(PriorsFit { sample }))
    }

    /// Refuses parameters of another version, whose buckets or scalars may have another meaning.
    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        // Earlier versions could take mean and deviation over the candidates alone.
        if let Some(population) = params.get("population").filter(|of| **of != json!("all")) {
            return Err(self.removed("population", population));
        }
        for (name, value) in manifest()? {
            if params.get(&name) != Some(&value) {
                return Err(Error::damaged(format!("`sections.lfps.{name}` is not valid"))
                    .hint("recreate the section with this version of kvsmith"));
            }
        }
        let (l, h) = (sizes.n_layers, sizes.n_heads);
        Ok(vec![
            Spec::new::<f32>(SLASH, &[l, h, super::SLASH]),
            Spec::new::<f32>(VERT, &[l, h, super::VERT]),
            Spec::new::<f32>(SCALARS, &[l, h, super::SCALARS.len()]),
        ])
    }

    /// Checks that values are finite, masses sum to one, and probabilities are from 0 to 1.
    fn check(&self, section: &SectionView) -> Result<()> {
        for (name, width) in [(SLASH, super::SLASH), (VERT, super::VERT)] {
            for mass in section.read::<f32>(name)?.chunks_exact(width) {
                let sum: f64 = mass.iter().map(|m| f64::from(*m)).sum();
                // Written so that a NaN fails the check: every comparison with NaN is false.
                let whole = (sum - 1.0).abs() <= 1e-3;
                if !whole || mass.iter().any(|m| *m < 0.0) {
                    return Err(section.damaged(format!("`{name}` is not a share of mass")));
                }
            }
        }
        for head in section.read::<f32>(SCALARS)?.chunks_exact(super::SCALARS.len()) {
            for (name, value) in super::SCALARS.iter().zip(head) {
                let valid = match *name {
                    "glob_bias" => value.is_finite(),
                    "rho0" | "rho_std" => value.is_finite() && *value >= 0.0,
                    "gamma" => *value > 0.0 && *value < 1.0,
                    "alpha" => value.is_finite() && *value > 0.0,
                    _ => (0.0..=1.0).contains(value),
                };
                if !valid {
                    return Err(section.damaged(format!("`{SCALARS}` has {name} = {value}")));
                }
            }
        }
        Ok(())
    }

    fn describe(&self, _: &SectionView) -> Result<String> {
        let (rows, anchors) = (sample::MAX_ROWS, sample::MAX_ANCHORS);
        Ok(format!(
            "per query head, at most {rows} rows and {anchors} anchors"
        ))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads whose attention is spread most, so that a small budget misses much of it.
    fn weak_heads(&self, _: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let heading = "lfps, heads that attend most widely (share of the positions with 95% of it)";
        worst_of(heading, reports, |of: &PriorsQuality| mean(&of.k_fraction))
    }

    /// Lists the heads whose sinks hold nearly everything for every query head.
    fn notable_heads(&self, reports: &[HeadReport]) -> Result<Option<Notable>> {
        #[derive(Deserialize)]
        struct Sinks {
            sink_mean: Vec<f64>,
        }
        let mut sunk = Vec::new();
        for head in reports {
            let Sinks { sink_mean } = parse("quality.lfps", head.report)?;
            if sink_mean.iter().all(|share| *share >= SUNK) {
                sunk.push((head.layer, head.head));
            }
        }
        let what = "attending to sinks alone (95% of attention in every query head)";
        Ok(Some((what, sunk)))
    }
}
