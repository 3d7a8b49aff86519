//! The section `triattention`: the mean query of each query head before rotation.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fit::{MAX_ROWS, TriAttentionFit};
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, SectionKind, SectionView, parse, table,
};
use crate::error::Result;
use crate::method::weak::worst_of;
use crate::model::Sizes;
use crate::stats::sampling::kept_rows;
use crate::store::Spec;

/// Name of the section in an artifact.
pub const SECTION: &str = "triattention";

/// Mean of the queries before rotation, per pair of channels: its first and its second channel.
pub const Q_MEAN: &str = "triattention.q_mean";
/// Mean of the magnitudes of the pairs.
pub const Q_ABS: &str = "triattention.q_abs";

/// How much longer than the mean magnitude a stored mean may be, because both are rounded to f32.
const ROUNDED: f64 = 1e-6;

/// The parameters of a fit that are read again.
#[derive(Deserialize)]
struct FitParams {
    max_rows: usize,
}

/// The quality report of a KV head, as docs/reference/artifact.md defines it.
#[derive(Serialize, Deserialize)]
pub(super) struct TriAttentionQuality {
    pub concentration: Vec<f64>,
    pub keys: usize,
}

impl TriAttentionQuality {
    /// Returns the mean over the query heads.
    pub fn mean(&self) -> Option<f64> {
        let n = self.concentration.len();
        (n > 0).then(|| self.concentration.iter().sum::<f64>() / n as f64)
    }
}

const COLUMNS: [Column<TriAttentionQuality>; 1] = [Column::new(
    "concentration",
    |v| format!("{v:.3}"),
    TriAttentionQuality::mean,
)];
const LEGEND: &str = "(mean over each layer's query heads; concentration = magnitudes of the mean query
over the mean magnitudes of the queries; 1 = all queries have one direction)\n";

/// The declaration of the section.
#[derive(Debug)]
pub struct TriAttentionSection;

impl SectionKind for TriAttentionSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: SECTION,
            about: "Average the queries of each head for TriAttention, from a dump with queries",
            stage: "mean queries",
            moments: MomentsRead::Nothing,
            reads_queries: true,
            reads_values: false,
            cpu_only: true,
            position_bound: false,
            on_request: true,
        }
    }

    fn fit(&self, _: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>> {
        Ok(Box::new(TriAttentionFit {
            rows: kept_rows(input.kept, MAX_ROWS),
        }))
    }

    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        parse::<FitParams>("sections.triattention", params)?;
        let (l, h, pairs) = (sizes.n_layers, sizes.n_heads, sizes.head_dim / 2);
        Ok(vec![
            Spec::new::<f32>(Q_MEAN, &[l, h, pairs, 2]),
            Spec::new::<f32>(Q_ABS, &[l, h, pairs]),
        ])
    }

    /// Checks that no mean is longer than the mean magnitude.
    fn check(&self, section: &SectionView) -> Result<()> {
        let (means, magnitudes) = (section.read::<f32>(Q_MEAN)?, section.read::<f32>(Q_ABS)?);
        let pairs = means.as_chunks::<2>().0.iter().zip(&magnitudes);
        for (i, ([re, im], abs)) in pairs.enumerate() {
            let (length, abs) = (f64::from(*re).hypot(f64::from(*im)), f64::from(*abs));
            if length > abs * (1.0 + ROUNDED) + f64::from(f32::MIN_POSITIVE) {
                let sizes = section.artifact.sizes;
                let head = i / (sizes.head_dim / 2);
                let layer = section.artifact.layers.start + head / sizes.n_heads;
                return Err(section.damaged(format!(
                    "layer {layer}, query head {}: a value of `{Q_MEAN}` exceeds that of `{Q_ABS}`",
                    head % sizes.n_heads
                )));
            }
        }
        Ok(())
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let params: FitParams = section.params()?;
        Ok(format!(
            "mean queries before rotation, over at most {} rows",
            params.max_rows
        ))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads whose queries are farthest from their mean.
    fn weak_heads(&self, _: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let heading = "triattention, worst heads (1 - concentration of the queries)";
        worst_of(heading, reports, |of: &TriAttentionQuality| {
            Some(1.0 - of.mean()?)
        })
    }
}
