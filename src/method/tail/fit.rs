//! The fit of the shifts of a layer.

use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::choices::{Errors, RULES, Row};
use super::section::{SHIFT, SHIFTS, TailParams, TailSection, USED};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, Report, SectionKind, object};
use crate::compute::layout::elements;
use crate::env;
use crate::error::{Error, Result};
use crate::kv::StaticSet;
use crate::kv::static_set::{SINKS, WINDOW};
use crate::method::late_rows::LateRows;
use crate::model::rope::RopeTable;
use crate::stats::seeds::head_seed;

/// The fit of the section `tail`.
///
/// For each rule, the ratio of a shift is the error with that shift divided by the error without a tail. Shifts for
/// which any rule's ratio exceeds 1 are excluded. Of the others, a query head gets the shift with the smallest sum of
/// ratios over the rules, if this sum is lower than without a tail; the lowest shift wins a tie.
pub(super) struct TailFit {
    pub sample: LateRows,
    pub seed: u64,
}

impl Fit for TailFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &TailSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        object(&TailParams::new(self.seed))
    }

    fn query_rows(&self) -> &[usize] {
        &self.sample.rows
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let (d, r, float) = (text.sizes.head_dim, text.sizes.group(), size_of::<f32>());
        let rows = 2 * text.n * d * float + r * self.sample.rows.len() * d * float + text.query_read_bytes;
        let rotations = text.longest_block * d * float;
        // Of one row: the weights, scores and products of one head at a time, and the noise, factors, masses and
        // positions.
        let row = text.longest_block * (2 * r + 10) * size_of::<f64>();
        let errors = self.sample.rows.len() * r * RULES.len() * size_of::<Errors>();
        rows + rotations + text.threads * row + errors
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        let table = states.rope.table(0..self.sample.blocks.longest());
        for kv_head in 0..states.sizes.n_kv_heads {
            env::check()?;
            let rows = self.errors(states, &table, kv_head)?;
            let fits = (0..states.sizes.group()).map(|a| self.fit_head(&rows, a));
            let fits: Vec<HeadFit> = fits.collect();
            for fit in &fits {
                part.put(SHIFT, &[fit.shift.unwrap_or(0.0) as f32]);
                part.put(USED, &[u8::from(fit.shift.is_some())]);
            }
            let off = fits.iter().filter(|fit| fit.shift.is_none()).count();
            part.quality.push(self.report(&fits));
            done(
                kv_head,
                Some(format!("{off} of {} query heads without a tail", fits.len())),
            );
        }
        Ok(part)
    }
}

/// The shift of one query head, and for each rule the summed error with this shift divided by that without a tail.
struct HeadFit {
    shift: Option<f64>,
    ratios: [f64; RULES.len()],
    held_out_ratios: [f64; RULES.len()],
}

impl TailFit {
    /// Returns the errors of every sampled row of a KV head's group, `[rows][rules][r]`.
    fn errors(
        &self,
        states: &LayerStates,
        table: &RopeTable,
        kv_head: usize,
    ) -> Result<Vec<Vec<Vec<Errors>>>> {
        let d = states.sizes.head_dim;
        let mut keys = (states.read.k)(kv_head)?;
        states.rope.rotate_blocks(&mut keys, states.block_start)?;
        let values = (states.read.v)(kv_head)?;
        if keys.dim() != values.dim() {
            return Err(Error::internal(
                "internal: a fit reads values that it did not ask for",
            ));
        }
        let queries = self.sample.queries(states, table, kv_head)?;
        let (keys, values) = (elements(&keys), elements(&values));
        let (window, seed) = (states.window, head_seed(self.seed, states.layer, kv_head));
        let of_row = |(i, row): (usize, &usize)| {
            let block = self.sample.blocks.containing(*row);
            let rows = block.start * d..(row + 1) * d;
            let row = Row {
                set: StaticSet::at(row - block.start, window, SINKS, WINDOW),
                keys: &keys[rows.clone()],
                values: &values[rows],
                queries: queries.iter().map(|q| &elements(q)[i * d..(i + 1) * d]).collect(),
                seed: head_seed(seed, 0, *row),
            };
            row.errors()
        };
        Ok(self.sample.rows.par_iter().enumerate().map(of_row).collect())
    }

    /// Chooses the shift of query head `a` of the query group.
    fn fit_head(&self, rows: &[Vec<Vec<Errors>>], a: usize) -> HeadFit {
        let ratios = |shift: Option<f64>, kept: bool| -> [f64; RULES.len()] {
            let sampled = rows.iter().zip(&self.sample.kept);
            let of = |rule: usize, shift: Option<f64>| -> f64 {
                let own = sampled.clone().filter(|(_, k)| **k == kept);
                own.map(|(row, _)| row[rule][a].at(shift)).sum()
            };
            std::array::from_fn(|rule| ratio(of(rule, shift), of(rule, None)))
        };
        let mut best = (RULES.len() as f64, None);
        for shift in SHIFTS {
            let ratios = ratios(Some(shift), true);
            let sum = ratios.iter().sum::<f64>();
            if ratios.iter().all(|ratio| *ratio <= 1.0) && sum < best.0 {
                best = (sum, Some(shift));
            }
        }
        HeadFit {
            shift: best.1,
            ratios: ratios(best.1, true),
            held_out_ratios: ratios(best.1, false),
        }
    }

    /// Makes the quality report of a KV head; each quantity is an array over its query heads.
    fn report(&self, fits: &[HeadFit]) -> Report {
        let kept = self.sample.n_kept();
        let held_out = self.sample.rows.len() - kept;
        let mut report: Report = [
            ("rows".to_owned(), json!(kept)),
            ("held_out_rows".to_owned(), json!(held_out)),
            (
                "shift".to_owned(),
                fits.iter().map(|fit| json!(fit.shift)).collect(),
            ),
        ]
        .into_iter()
        .collect();
        for (i, rule) in RULES.iter().enumerate() {
            let ratios = fits.iter().map(|fit| fit.ratios[i]).collect();
            report.insert(format!("ratio_{}", rule.name), ratios);
            if held_out > 0 {
                let ratios = fits.iter().map(|fit| fit.held_out_ratios[i]).collect();
                report.insert(format!("held_out_ratio_{}", rule.name), ratios);
            }
        }
        report
    }
}

/// Divides the error with a tail by the error without one; 1 if both are zero.
fn ratio(with: f64, without: f64) -> f64 {
    match without > 0.0 {
        true => with / without,
        false if with > 0.0 => f64::MAX,
        false => 1.0,
    }
}
