//! The section `tail`: a shift per query head.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::choices::RULES;
use super::fit::TailFit;
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, SectionKind, SectionView, parse, share, table,
};
use crate::error::{Error, Result};
use crate::kv::static_set::{SINKS, WINDOW};
use crate::method::late_rows::LateRows;
use crate::method::weak::worst_of;
use crate::model::Sizes;
use crate::store::Spec;

/// Name of the section in an artifact.
pub const SECTION: &str = "tail";

/// The shift of each query head; 0 where it has no tail.
pub const SHIFT: &str = "tail.shift";
/// Whether each query head has a tail: 1 or 0.
pub const USED: &str = "tail.used";

/// The most rows that a fit takes.
const MAX_ROWS: usize = 512;
/// The most held-out rows on which quality is reported.
const MAX_HELD_OUT_ROWS: usize = 256;

/// The shifts that a fit tries, ascending.
pub(super) const SHIFTS: [f64; 13] = [
    -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0,
];

/// The parameters of a fit, as the manifest stores them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TailParams {
    /// The names of the rules by which the fit chose positions.
    rules: Vec<String>,
    /// The shifts that were tried, ascending.
    shifts: Vec<f64>,
    sinks: usize,
    window: usize,
    max_rows: usize,
    max_held_out_rows: usize,
    /// The seed of the rules' noise, per layer, KV head and row.
    seed: u64,
}

impl TailParams {
    pub fn new(seed: u64) -> Self {
        Self {
            rules: RULES.iter().map(|rule| rule.name.to_owned()).collect(),
            shifts: SHIFTS.to_vec(),
            sinks: SINKS,
            window: WINDOW,
            max_rows: MAX_ROWS,
            max_held_out_rows: MAX_HELD_OUT_ROWS,
            seed,
        }
    }
}

/// The values of a KV head's quality report that are shown, one per query head; docs/reference/artifact.md defines the report.
#[derive(Deserialize)]
struct TailQuality {
    rows: usize,
    shift: Vec<Option<f64>>,
    ratio_static: Vec<f64>,
    ratio_top_05: Vec<f64>,
    ratio_top_20: Vec<f64>,
    ratio_noisy_1_05: Vec<f64>,
    ratio_noisy_2_05: Vec<f64>,
    held_out_ratio_top_05: Option<Vec<f64>>,
}

impl TailQuality {
    /// Returns the share of the query heads without a tail.
    fn off(&self) -> Option<f64> {
        let off = self.shift.iter().filter(|shift| shift.is_none()).count();
        (!self.shift.is_empty()).then(|| off as f64 / self.shift.len() as f64)
    }

    /// Returns the mean shift of the query heads that have a tail.
    fn mean_shift(&self) -> Option<f64> {
        mean(&self.shift.iter().flatten().copied().collect::<Vec<_>>())
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

const COLUMNS: [Column<TailQuality>; 9] = [
    Column::new("rows", |v| format!("{v:.0}"), |q| Some(q.rows as f64)),
    Column::new("off", share, TailQuality::off),
    Column::new("shift", |v| format!("{v:.2}"), TailQuality::mean_shift),
    Column::new("static", share, |q| mean(&q.ratio_static)),
    Column::new("top 5%", share, |q| mean(&q.ratio_top_05)),
    Column::new("held", share, |q| mean(q.held_out_ratio_top_05.as_deref()?)),
    Column::new("top 20%", share, |q| mean(&q.ratio_top_20)),
    Column::new("noise 1", share, |q| mean(&q.ratio_noisy_1_05)),
    Column::new("noise 2", share, |q| mean(&q.ratio_noisy_2_05)),
];
const LEGEND: &str = "(tails: means over each layer's query heads; off = share of query heads without
a tail; last columns: squared output error with the tail as a share of the error
without it, if a step reads the static set alone, the best 5% (held: on
held-out rows) or 20% of the positions, or the best 5% by scores with noise of
1 and 2)
";

/// The declaration of the section.
#[derive(Debug)]
pub struct TailSection;

impl SectionKind for TailSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: "tail",
            about: "Fit the tails (for ⟨tail⟩) to a dump with queries and values",
            stage: "tails",
            moments: MomentsRead::Nothing,
            reads_queries: true,
            reads_values: true,
            cpu_only: true,
            position_bound: false,
            on_request: false,
        }
    }

    fn marks_constant_heads(&self) -> bool {
        false
    }

    fn fit(&self, _: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>> {
        let sample = LateRows::new(input.block_start, input.kept, [MAX_ROWS, MAX_HELD_OUT_ROWS]);
        if sample.n_kept() == 0 {
            input.reporter.warn(&format!(
                "the blocks are too short for tails, so no head gets one; give documents of more than {} tokens, or a larger ⟨seq_len⟩",
                SINKS + WINDOW
            ));
        }
        Ok(Box::new(TailFit {
            sample,
            seed: input.seed,
        }))
    }

    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        let params: TailParams = parse("sections.tail", params)?;
        if params.shifts.is_empty() || !params.shifts.is_sorted() {
            return Err(Error::damaged("`sections.tail.shifts` is invalid")
                .hint("recreate the section with this version of kvsmith"));
        }
        let shape = [sizes.n_layers, sizes.n_heads];
        Ok(vec![
            Spec::new::<f32>(SHIFT, &shape),
            Spec::new::<u8>(USED, &shape),
        ])
    }

    /// Checks that each head has a tail or none, and that its shift is one of those tried, or 0 if it has no tail.
    fn check(&self, section: &SectionView) -> Result<()> {
        let params: TailParams = section.params()?;
        let heads = section.read::<f32>(SHIFT)?.into_iter();
        for (shift, used) in heads.zip(section.read::<u8>(USED)?) {
            let was_tried = || params.shifts.iter().any(|s| *s as f32 == shift);
            let is_valid = match used {
                0 => shift == 0.0,
                1 => was_tried(),
                _ => return Err(section.damaged(format!("`{USED}` has {used}"))),
            };
            if !is_valid {
                return Err(section.damaged(format!("`{SHIFT}` has {shift} where `{USED}` is {used}")));
            }
        }
        Ok(())
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let params: TailParams = section.params()?;
        let used = section.read::<u8>(USED)?;
        let with = used.iter().filter(|used| **used == 1).count();
        Ok(format!(
            "a shift for {with} of {} query heads, at most {} rows, {} rules, seed {}",
            used.len(),
            params.max_rows,
            params.rules.len(),
            params.seed
        ))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads with query heads that have no tail.
    fn weak_heads(&self, _: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let heading = "tail, heads without an estimate (share of their query heads)";
        worst_of(heading, reports, TailQuality::off)
    }
}
