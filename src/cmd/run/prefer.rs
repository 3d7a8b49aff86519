//! `run --prefer time`: of the settings that lose little enough, the one whose steps are fastest on this CPU.

use std::collections::BTreeMap;

use clap::{ValueEnum, builder::PossibleValue};

use crate::artifact::{Artifact, Measured, MethodLoss, Verdict};
use crate::cmd::args::Global;
use crate::cmd::named::Named;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::bench::BenchParams;
use crate::method::registry::{FULL, MethodName, bench_params_like};
use crate::model::ModelConfig;
use crate::timing::QuickLayer;

/// The longest context that is timed; beyond it, all methods are compared at this length.
const LONGEST: usize = 32_768;

/// What a run without `--method` and `--budget` prefers among the settings that lose little enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// The one that reads the fewest bytes.
    #[default]
    Bytes,
    /// The one whose steps are fastest on this machine.
    Time,
}

impl ValueEnum for Prefer {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Bytes, Self::Time]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Bytes => PossibleValue::new("bytes").help("The setting that reads the fewest bytes"),
            Self::Time => PossibleValue::new("time")
                .help("The setting whose steps are fastest on this CPU: a few of each are timed first; full attention if none is faster"),
        })
    }
}

/// A row of a verdict with its measurements.
type Row<'v> = (&'v MethodLoss, &'v Measured);

/// The fastest setting, and the times that say so.
pub struct Fastest<'v> {
    /// The verdict's row; `None` for full attention.
    pub row: Option<Row<'v>>,
    /// The length of the contexts that were timed.
    context: usize,
    /// Seconds that attention takes in a step, the choice included: with the setting, and with full attention.
    attention_s: [f64; 2],
    /// The methods within the limits that were timed, and those that cannot be.
    methods: [Vec<String>; 2],
}

impl<'v> Fastest<'v> {
    /// Chooses among rows, each with the seconds of a step, or `None` if they cannot be timed.
    fn among(rows: Vec<(Row<'v>, Option<f64>)>, full_s: f64, context: usize) -> Self {
        let mut methods = [Vec::new(), Vec::new()];
        let mut best: Option<(Row<'v>, f64)> = None;
        for (row, seconds) in rows {
            methods[usize::from(seconds.is_none())].push(row.0.method.clone());
            if let Some(seconds) = seconds.filter(|s| *s < best.map_or(full_s, |(_, least)| least)) {
                best = Some((row, seconds));
            }
        }
        Self {
            row: best.map(|(row, _)| row),
            context,
            attention_s: [best.map_or(full_s, |(_, seconds)| seconds), full_s],
            methods,
        }
    }

    /// Says why this setting.
    pub fn text(&self) -> String {
        let [own, full] = self.attention_s.map(|seconds| 1e3 * seconds);
        let (context, [timed, untimed]) = (self.context, &self.methods);
        let mut said = match self.row {
            Some(_) => format!(
                "the fastest here within the artifact's limits: at {context} positions, its attention takes {own:.1} ms a step, and full attention {full:.1} ms"
            ),
            None if timed.is_empty() => {
                "no setting of the artifact that can be timed is within its limits".to_owned()
            }
            None => format!(
                "at {context} positions, full attention takes {full:.1} ms a step, and none of the methods within the artifact's limits ({}) is faster here",
                timed.join(", ")
            ),
        };
        if !untimed.is_empty() {
            said += &format!("; not timed: {}", untimed.join(", "));
        }
        said
    }
}

/// Times a step with every setting of a verdict that is within its limits, and with full attention, in a context of
/// `length` positions and a cache of type `kv`.
///
/// # Errors
/// Heads that cannot be timed; a setting whose step fails; an interrupt.
pub fn fastest<'v>(
    verdict: &'v Verdict,
    artifact: &Artifact,
    config: &ModelConfig,
    length: usize,
    kv: KvType,
    global: &Global,
) -> Result<Fastest<'v>> {
    if !QuickLayer::can_be_timed(config) {
        return Err(Error::usage(format!(
            "--prefer time cannot time heads of {} channels",
            config.head_dim
        ))
        .hint("their number must be a multiple of 32; omit --prefer"));
    }
    let context = length.clamp(1, LONGEST);
    let timer = Timer {
        config,
        length: context,
        params: bench_params_like(artifact)?,
        kv,
        seed: global.seed,
    };
    let rows: Vec<Row> = verdict.smallest_within(verdict.limit()).collect();
    if rows.is_empty() {
        return Ok(Fastest::among(Vec::new(), f64::INFINITY, context));
    }
    let full_s = timer.seconds(FULL, Budget::Fraction(1.0))?;
    let full_s = full_s.ok_or_else(|| Error::internal("internal: full attention is not timed"))?;
    let mut timed = Vec::new();
    for row in rows {
        let named = Named::parse(&row.0.method).filter(|named| !named.tail);
        let seconds = named.map(|named| timer.seconds(named.method, Budget::Fraction(row.1.budget)));
        timed.push((row, seconds.transpose()?.flatten()));
    }
    Ok(Fastest::among(timed, full_s, context))
}

/// What all timed steps have in common.
struct Timer<'a> {
    config: &'a ModelConfig,
    /// The length of the context.
    length: usize,
    params: BenchParams,
    kv: KvType,
    seed: u64,
}

impl Timer<'_> {
    /// Returns the seconds of attention in a decode step, over all layers; `None` if the method cannot be timed.
    fn seconds(&self, method: MethodName, budget: Budget) -> Result<Option<f64>> {
        // The number of layers by the positions that they see.
        let mut layers: BTreeMap<usize, usize> = BTreeMap::new();
        for window in self.config.windows() {
            let sees = window.map_or(self.length, |window| window.min(self.length));
            *layers.entry(sees).or_default() += 1;
        }
        let mut sum = 0.0;
        for (context, count) in layers {
            let layer = QuickLayer {
                config: self.config,
                context,
                params: self.params.clone(),
                budget,
                kv: self.kv,
                seed: self.seed,
            };
            let Some(step) = layer.fastest(method)? else {
                return Ok(None);
            };
            sum += count as f64 * step.seconds;
        }
        Ok(Some(sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(method: &str) -> (MethodLoss, Measured) {
        let none = Vec::<Vec<f64>>::new();
        let measured = serde_json::json!({
            "budget": 0.1, "kl": 0.01, "kl_median": 0.01, "kl_p99": 0.01, "top1_equal": 1.0, "perplexity_ratio": 1.0, "recall": 1.0,
            "mass": 1.0, "output_error": 0.0, "index_bits_per_token": 0.0,
            "heads": { "recall": none, "mass": none, "output_error": none },
        });
        let loss = serde_json::json!({ "method": method, "reads_target": 0.1, "bytes_read_fraction": 0.1 });
        let loss: MethodLoss = serde_json::from_value(loss).expect("a row");
        (loss, serde_json::from_value(measured).expect("measurements"))
    }

    #[test]
    fn the_fastest_setting_is_taken_if_it_is_faster_than_full_attention() {
        let rows = ["wpq", "selfindex", "doublesparsity"].map(row);
        let among = |seconds: [Option<f64>; 3], full: f64| {
            let timed = rows.iter().map(|(a, b)| (a, b)).zip(seconds).collect();
            let found = Fastest::among(timed, full, 4096);
            (found.row.map(|(row, _)| row.method.clone()), found.text())
        };
        let (method, said) = among([Some(2e-3), Some(1e-3), None], 3e-3);
        assert_eq!(method.as_deref(), Some("selfindex"));
        assert!(
            said.contains("4096 positions")
                && said.contains("takes 1.0 ms")
                && said.contains("full attention 3.0 ms"),
            "{said}"
        );
        assert!(said.ends_with("not timed: doublesparsity"), "{said}");
        let (method, said) = among([Some(2e-3), Some(3e-3), None], 2e-3);
        assert_eq!(method, None);
        assert!(said.contains("(wpq, selfindex) is faster"), "{said}");
        let (method, said) = among([None, None, None], 2e-3);
        assert_eq!(method, None);
        assert!(said.starts_with("no setting"), "{said}");
    }
}
