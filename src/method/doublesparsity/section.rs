//! The section `doublesparsity`: the channels of each KV head, the most important first.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fit::{DoubleSparsityFit, MAX_ROWS};
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, SectionKind, SectionView, parse, share, table,
};
use crate::error::Result;
use crate::method::weak::worst_of;
use crate::model::Sizes;
use crate::stats::sampling::{TextBlocks, kept_rows};
use crate::store::Spec;

/// Name of the section in an artifact.
pub const SECTION: &str = "doublesparsity";

/// The channels by falling sum of |q_i k_i|.
pub const CHANNELS: &str = "doublesparsity.channels";

/// The parameters of a fit that are read again.
#[derive(Deserialize)]
struct FitParams {
    max_rows: usize,
}

/// The quality report of a KV head, as docs/reference/artifact.md defines it.
#[derive(Serialize, Deserialize)]
pub(super) struct DoubleSparsityQuality {
    pub share_eighth: f64,
    pub share_quarter: f64,
    pub keys: usize,
}

const COLUMNS: [Column<DoubleSparsityQuality>; 2] = [
    Column::new("in d/8", share, |q| Some(q.share_eighth)),
    Column::new("in d/4", share, |q| Some(q.share_quarter)),
];
const LEGEND: &str = "(means over each layer's KV heads; in d/8 and in d/4 = share of the sum of |q k|
that one eighth and one quarter of the channels have)\n";

/// The declaration of the section.
#[derive(Debug)]
pub struct DoubleSparsitySection;

impl SectionKind for DoubleSparsitySection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: SECTION,
            about: "Order the channels of each head for Double Sparsity, from a dump with queries",
            stage: "channels",
            moments: MomentsRead::Nothing,
            reads_queries: true,
            reads_values: false,
            cpu_only: true,
            position_bound: false,
            on_request: true,
        }
    }

    fn fit(&self, _: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>> {
        Ok(Box::new(DoubleSparsityFit {
            rows: kept_rows(input.kept, MAX_ROWS),
            blocks: TextBlocks::new(input.block_start),
        }))
    }

    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        parse::<FitParams>("sections.doublesparsity", params)?;
        let shape = [sizes.n_layers, sizes.n_kv_heads, sizes.head_dim];
        Ok(vec![Spec::new::<u32>(CHANNELS, &shape)])
    }

    /// Checks that each head has every channel once.
    fn check(&self, section: &SectionView) -> Result<()> {
        let d = section.artifact.sizes.head_dim;
        for (head, channels) in section.read::<u32>(CHANNELS)?.chunks_exact(d).enumerate() {
            let mut sorted = channels.to_vec();
            sorted.sort_unstable();
            if !sorted.into_iter().eq(0..d as u32) {
                let head = section.kv_head(head);
                return Err(
                    section.damaged(format!("`{CHANNELS}` of {head} does not have every channel once"))
                );
            }
        }
        Ok(())
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let params: FitParams = section.params()?;
        Ok(format!(
            "channels by the sum of |q k| over at most {} rows",
            params.max_rows
        ))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads in which one eighth of the channels has the smallest share of the products.
    fn weak_heads(&self, _: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let heading = "doublesparsity, worst heads (share of |q k| outside one eighth of the channels)";
        worst_of(heading, reports, |of: &DoubleSparsityQuality| {
            Some(1.0 - of.share_eighth)
        })
    }
}
