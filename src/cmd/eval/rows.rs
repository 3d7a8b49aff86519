//! What `eval` measured as JSON: a row per method and budget, and the differences between methods.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::super::merge;
use super::args::Args;
use super::plan::{BudgetOf, Entry, Planned};
use crate::artifact::Artifact;
use crate::error::Result;
use crate::kv::Budget;
use crate::method::plan::Plan;
use crate::method::registry::constant_bytes;
use crate::method::tail;
use crate::runner::eval::{Bootstrap, Evaluation, StepMetrics, VariantReport};

/// A metric over some blocks of text, with its name.
type TextMetric = (&'static str, fn(&StepMetrics) -> f64);

/// The metrics of text that have intervals: those of choices, then those of losses.
const TEXT_METRICS: [TextMetric; 8] = [
    ("recall", |of| of.choices.recall.into()),
    ("mass", |of| of.choices.mass.into()),
    ("output_error", |of| of.choices.output_error.into()),
    ("kl", |of| of.losses.kl),
    ("kl_median", |of| of.losses.kl_median),
    ("kl_p99", |of| of.losses.kl_p99),
    ("top1_equal", |of| of.losses.top1_equal),
    ("perplexity_ratio", |of| of.losses.perplexity_ratio),
];

/// How many of them are of choices.
const OF_CHOICES: usize = 3;

/// The results in the order of the plan.
pub struct Measurements<'a> {
    /// The arguments of the command.
    pub args: &'a Args,
    /// Every row; the rows with a budget were evaluated.
    pub plan: &'a [Planned],
    /// One report per row with a budget.
    pub evaluation: &'a Evaluation<'a>,
    /// The methods that are measured.
    pub entries: &'a [Entry],
    /// The head plan, if there is one.
    pub head_plan: Option<&'a Plan>,
    /// The artifacts given.
    pub artifacts: &'a [Artifact],
    /// Resamples of blocks or lines, if there are enough of them.
    pub intervals: Option<&'a Bootstrap>,
}

impl Measurements<'_> {
    /// Returns the rows.
    pub fn rows(&self) -> Result<Vec<Value>> {
        let mut reports = (0..self.evaluation.reports.len()).map(Some);
        let row =
            |planned: &Planned| self.row(planned, planned.budget.and_then(|_| reports.next().flatten()));
        self.plan.iter().map(row).collect()
    }

    fn row(&self, planned: &Planned, variant: Option<usize>) -> Result<Value> {
        let entry = &self.entries[planned.entry];
        let head_plan = self.head_plan.filter(|_| entry.is_plan);
        let budget = head_plan.map_or(planned.budget, Plan::budget);
        let mut row = json!({
            "method": entry.name(),
            "budget": budget.map(Budget::value),
        });
        if let Some(head_plan) = head_plan {
            row["head_plan"] = head_plan.json();
        }
        if let Some(artifact) = self.artifact_of(planned) {
            row["artifact"] = json!(artifact);
        }
        if let Some(flags) = self.flags_of(planned) {
            row["flags"] = json!(flags);
        }
        if let Some(kv) = entry.kv {
            row["kv"] = json!(kv);
        }
        if let Some([target, sampled]) = planned.reads {
            row["reads_target"] = json!(target);
            row["reads_sample"] = json!(sampled);
        }
        let Some(variant) = variant else {
            return Ok(row);
        };
        let report = &self.evaluation.reports[variant];
        let shares = report.shares();
        let [read, moved] = self.evaluation.uncompressed_fractions(variant);
        let more = json!({
            "needle_accuracy": report.answers.accuracy(),
            "bytes_read_fraction": self.evaluation.bytes_fraction(variant),
            "bytes_moved_fraction": self.evaluation.moved_fraction(variant),
            "uncompressed_read_fraction": read,
            "uncompressed_moved_fraction": moved,
            "scratch_bytes_fraction": self.evaluation.scratch_fraction(variant),
            "kv_read_fraction": shares.read,
            "exact_dot_fraction": shares.products,
            "bypass_fraction": shares.bypassed,
            "index_bits_per_token": report.index_bits_per_token(),
            "constant_bytes": self.constant_bytes(planned)?,
            "intervals": self.intervals(report),
        });
        merge(&mut row, &more);
        if self.args.needles.is_some() {
            let none = json!({ "recall": null, "mass": null, "output_error": null, "kl": null });
            merge(&mut row, &none);
            row["needle_accuracy_by_turn"] = json!(report.answers.by_turn());
            row["scores_by_line"] = json!(report.answers.by_line());
            row["by_task"] = json!(report.answers.by_task());
        } else {
            merge(&mut row, &json!(report.whole()));
            if !self.args.losses_only {
                merge(&mut row, &json!(report.layer_errors()));
            }
            let blocks = 0..report.blocks();
            row["kl_by_block"] = blocks.map(|block| report.kl_of_blocks(&[block])).collect();
            row["by_turn"] = json!(report.by_turn());
            row["by_position"] = json!(report.by_position());
        }
        if self.args.per_head && self.args.needles.is_none() {
            row["per_head"] = per_head(report);
        }
        Ok(row)
    }

    /// Returns the bytes that a method needs whatever the context: those of its sections of the artifact.
    fn constant_bytes(&self, planned: &Planned) -> Result<usize> {
        let entry = &self.entries[planned.entry];
        let artifact = self.artifacts.get(entry.artifact);
        let (methods, has_tail) = match self.head_plan.filter(|_| entry.is_plan) {
            Some(plan) => (plan.methods(), plan.heads().any(|(_, _, head)| head.method.tail)),
            None => (vec![entry.named.method], entry.named.tail),
        };
        let tail = artifact.filter(|_| has_tail);
        let sections = methods.into_iter().map(|method| constant_bytes(method, artifact));
        sections
            .sum::<Result<usize>>()
            .and_then(|bytes| Ok(bytes + tail.map_or(Ok(0), tail::constant_bytes)?))
    }

    /// Returns the file of a row's artifact if there are several artifacts.
    fn artifact_of(&self, planned: &Planned) -> Option<&Path> {
        let index = self.entries[planned.entry].artifact;
        let path = self
            .args
            .artifacts()
            .nth(index)
            .filter(|_| self.artifacts.len() > 1);
        path.map(PathBuf::as_path)
    }

    /// Returns the flags of a row of `--also` or `--also-kv`.
    fn flags_of(&self, planned: &Planned) -> Option<String> {
        let Entry { also, kv, .. } = self.entries[planned.entry];
        let also = also.map(|also| self.args.also[also].to_string());
        let flags: Vec<String> = also
            .into_iter()
            .chain(kv.map(|kv| format!("--kv {kv}")))
            .collect();
        (!flags.is_empty()).then(|| flags.join(" "))
    }

    /// Returns the 95% interval of each metric; null with too few blocks or lines.
    fn intervals(&self, report: &VariantReport) -> Value {
        let Some(bootstrap) = self.intervals else {
            return Value::Null;
        };
        if self.args.needles.is_some() {
            let accuracy = bootstrap.interval(|lines| report.answers.accuracy_of(lines));
            return json!({ "needle_accuracy": accuracy });
        }
        let intervals = bootstrap.intervals(|blocks| {
            let metrics = report.of_blocks(blocks);
            TEXT_METRICS.map(|(_, of)| of(&metrics))
        });
        let missing = if self.args.losses_only { OF_CHOICES } else { 0 };
        let named = TEXT_METRICS.iter().zip(intervals).skip(missing);
        let named: Map<String, Value> = named
            .map(|((key, _), interval)| ((*key).to_owned(), json!(interval)))
            .collect();
        Value::Object(named)
    }

    /// Lists every pair of methods at the same budget or share, with the difference of their results. If each method has
    /// budgets of its own, those at the same place of two methods are a pair.
    pub fn differences(&self) -> Vec<Value> {
        let mut out = Vec::new();
        let evaluated: Vec<&Planned> = self.plan.iter().filter(|p| p.budget.is_some()).collect();
        for (a, left) in evaluated.iter().enumerate() {
            for (b, right) in evaluated.iter().enumerate().skip(a + 1) {
                if self.is_comparable(left, right) {
                    out.push(self.difference([a, b], left, right));
                }
            }
        }
        out
    }

    /// Tells whether two rows belong to different methods, artifacts or flags and to the same share or budget, or to
    /// budgets that are a pair.
    fn is_comparable(&self, a: &Planned, b: &Planned) -> bool {
        let share = |p: &Planned| p.reads.map(|[target, _]| target);
        let are_own = self.args.budgets.iter().all(BudgetOf::is_named);
        let are_paired = a.budget == b.budget || are_own && a.place == b.place;
        a.entry != b.entry && share(a) == share(b) && (a.reads.is_some() || are_paired)
    }

    fn difference(&self, variants: [usize; 2], left: &Planned, right: &Planned) -> Value {
        let [a, b] = variants.map(|variant| &self.evaluation.reports[variant]);
        let name = |p: &Planned| self.entries[p.entry].name();
        let (key, of): (_, fn(&VariantReport, &[usize]) -> f64) = if self.args.needles.is_some() {
            ("needle_accuracy", |report, lines| {
                report.answers.accuracy_of(lines)
            })
        } else {
            ("kl", |report, blocks| report.kl_of_blocks(blocks))
        };
        let units = if self.args.needles.is_some() {
            self.evaluation.full.lines()
        } else {
            a.blocks()
        };
        let difference = |units: &[usize]| of(a, units) - of(b, units);
        let all: Vec<usize> = (0..units).collect();
        let budget = |p: &Planned| p.budget.map(|budget| budget.value());
        let budgets = budget(left).zip(budget(right)).filter(|_| left.reads.is_none());
        let budgets = budgets.map(|(left, right)| [left, right]);
        let mut out = json!({
            "methods": [name(left), name(right)],
            "budget": budgets.filter(|[left, right]| left == right).map(|[budget, _]| budget),
            "reads_target": left.reads.map(|[target, _]| target),
            "metric": key,
            "difference": difference(&all),
            "interval": self.intervals.map(|bootstrap| bootstrap.interval(difference)),
        });
        if let Some(budgets) = budgets.filter(|[left, right]| left != right) {
            out["budgets"] = json!(budgets);
        }
        if self.artifacts.len() > 1 {
            out["artifacts"] = json!([left, right].map(|of| self.artifact_of(of)));
        }
        if !self.args.also.is_empty() || !self.args.also_kv.is_empty() {
            out["flags"] = json!([left, right].map(|of| self.flags_of(of)));
        }
        out
    }
}

/// Lists the metrics of each layer and KV head.
fn per_head(report: &VariantReport) -> Value {
    let heads = report.heads.iter().enumerate().flat_map(|(layer, heads)| {
        heads.iter().enumerate().map(move |(head, of)| {
            let mut row = json!({ "layer": layer, "kv_head": head });
            merge(&mut row, &json!(of));
            row
        })
    });
    heads.collect()
}
