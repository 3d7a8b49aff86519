//! The results of a measurement, as the artifact keeps them.

use super::measure::Row;
use crate::artifact::{Answered, FormatLoss, HeadLosses, Intervals, Measured, MethodLoss, OtherLosses};
use crate::numbers::five_digits;
use crate::runner::eval::{Bootstrap, Metrics, VariantReport};
use crate::runner::verdict::{Material, Score, Texts};

/// What the results of a row are computed from.
pub(super) struct Results<'a> {
    pub material: &'a Material,
    /// Resamples of the blocks of text, if there are enough blocks.
    pub bootstrap: Option<&'a Bootstrap>,
    /// The answers of full attention to the probe, if it counts.
    pub full: Option<&'a Score>,
}

impl Results<'_> {
    /// Returns the share of the bytes in bf16 that was read; of full attention over another format, this is its size.
    fn read(&self, report: &VariantReport) -> Option<f64> {
        report.counts.uncompressed_fraction()
    }

    /// Collects the results of a row.
    pub fn row(&self, row: &Row, name: &str) -> MethodLoss {
        let budget = row.planned.budget;
        let read = budget.and_then(|_| self.read(&row.text));
        MethodLoss {
            method: name.to_owned(),
            oracle: row.is_oracle,
            reads_target: row.planned.target,
            bytes_read_fraction: five_digits(read.unwrap_or(row.planned.least)),
            measured: budget.map(|budget| self.measured(row, budget)),
        }
    }

    /// Collects the results of a row of full attention over another format; `None` for a row of a method.
    pub fn format(&self, row: &Row) -> Option<FormatLoss> {
        Some(FormatLoss {
            kv: row.kv?.to_string(),
            size_fraction: five_digits(self.read(&row.text).unwrap_or(1.0)),
            measured: self.measured(row, 1.0),
        })
    }

    fn measured(&self, row: &Row, budget: f64) -> Measured {
        Measured {
            dropped_after: row.is_dropped.then_some(row.text.blocks()),
            intervals: self.intervals(row),
            others: self.others(row),
            probe: self.answered(row),
            ..measured(budget, &row.text)
        }
    }

    fn intervals(&self, row: &Row) -> Option<Intervals> {
        let bootstrap = self.bootstrap.filter(|_| row.is_live())?;
        let losses = |blocks: &[usize]| {
            let losses = row.text.of_blocks(blocks).losses;
            [losses.kl, losses.kl_p99, losses.top1_equal]
        };
        let [kl, kl_p99, top1_equal] = bootstrap.intervals(losses).map(|of| of.map(five_digits));
        Some(Intervals {
            kl,
            kl_p99,
            top1_equal,
        })
    }

    fn others(&self, row: &Row) -> Vec<OtherLosses> {
        let all = self.material.others.iter().zip(&row.others);
        let measured = all.filter(|(_, report)| report.blocks() > 0);
        let loss = |(texts, report): (&Texts, &VariantReport)| {
            let losses = report.whole().losses;
            OtherLosses {
                kind: texts.kind.to_owned(),
                length: texts.length,
                bytes_read_fraction: five_digits(self.read(report).unwrap_or(1.0)),
                kl: five_digits(losses.kl),
                kl_p99: five_digits(losses.kl_p99),
                top1_equal: five_digits(losses.top1_equal),
            }
        };
        measured.map(loss).collect()
    }

    fn answered(&self, row: &Row) -> Option<Answered> {
        let full = self.full.filter(|_| row.is_asked())?;
        let (points, interval) = row.score.points_below(full, self.bootstrap);
        Some(Answered {
            accuracy: five_digits(row.score.accuracy()),
            points_below: five_digits(points),
            interval: interval.unwrap_or([points; 2]).map(five_digits),
        })
    }
}

/// Collects the measurements of a report.
fn measured(budget: f64, report: &VariantReport) -> Measured {
    let whole = report.whole();
    let heads = |of: fn(&Metrics) -> f64| {
        let layer = |heads: &Vec<_>| heads.iter().map(|head| five_digits(of(head))).collect();
        report.heads.iter().map(layer).collect()
    };
    let losses = whole.losses;
    Measured {
        budget,
        kl: five_digits(losses.kl),
        kl_median: five_digits(losses.kl_median),
        kl_p99: five_digits(losses.kl_p99),
        top1_equal: five_digits(losses.top1_equal),
        perplexity_ratio: five_digits(losses.perplexity_ratio),
        recall: five_digits(whole.choices.recall.into()),
        mass: five_digits(whole.choices.mass.into()),
        output_error: five_digits(whole.choices.output_error.into()),
        index_bits_per_token: five_digits(report.index_bits_per_token()),
        heads: HeadLosses {
            recall: heads(|head| head.recall.into()),
            mass: heads(|head| head.mass.into()),
            output_error: heads(|head| head.output_error.into()),
        },
        dropped_after: None,
        intervals: None,
        others: Vec::new(),
        probe: None,
    }
}
