//! The section `sign`: centroids of sign patterns per KV head.

use half::f16;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fit::{SignFit, SignFitParams};
use super::groups::{GROUP, PATTERNS, SECTION};
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, SectionKind, SectionView, parse, table,
};
use crate::error::{Error, Result};
use crate::kv::packed::Center;
use crate::model::Sizes;
use crate::parameters::{ParameterSet, Parameters};
use crate::store::Spec;

/// Mean, per pattern, of the four channels over the keys that have the pattern.
pub const CENTROID: &str = "sign.centroid";
/// Number of keys per pattern; describes the head, no method reads it.
pub const COUNT: &str = "sign.count";
/// 99.9th percentile of the centered key's magnitude; describes the head, no method reads it.
pub const ALPHA: &str = "sign.alpha";
/// Mean key before rotation; describes the head, no method reads it.
pub const MEAN_PRE: &str = "sign.mean_pre";

/// The parameters of the section that are read again.
#[derive(Deserialize)]
struct CenterParams {
    center: String,
}

/// Returns the center around which a section's signs were taken.
pub fn calibrated_center(params: &Map<String, Value>) -> Result<Center> {
    let params: CenterParams = parse("sections.sign", params)?;
    Center::named(&params.center).ok_or_else(|| Error::damaged("`sections.sign.center` is not valid"))
}

/// How many heads are listed at most.
const LISTED: usize = 5;

/// The quality report of a KV head, as docs/reference/artifact.md defines it.
#[derive(Serialize, Deserialize)]
pub(super) struct SignQuality {
    pub sign_entropy_bits: f64,
    pub pattern_entropy_bits: f64,
    pub empty_patterns: usize,
    pub keys: usize,
}

const COLUMNS: [Column<SignQuality>; 3] = [
    Column::new(
        "sign entropy/bits",
        |v| format!("{v:.3}"),
        |q| Some(q.sign_entropy_bits),
    ),
    Column::new(
        "pattern entropy/bits",
        |v| format!("{v:.2}"),
        |q| Some(q.pattern_entropy_bits),
    ),
    Column::new(
        "empty patterns",
        |v| format!("{v:.1}"),
        |q| Some(q.empty_patterns as f64),
    ),
];
const LEGEND: &str = "(means over each layer's KV heads; at most 1 bit per sign, 4 bits per pattern)\n";

/// The declaration of the section.
#[derive(Debug)]
pub struct SignSection;

impl SectionKind for SignSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: "signs",
            about: "Compute the sign-pattern centroids of a dump's keys",
            stage: "signs",
            moments: MomentsRead::Nothing,
            reads_queries: false,
            reads_values: false,
            cpu_only: false,
            position_bound: false,
            on_request: false,
        }
    }

    fn parameters(&self) -> ParameterSet {
        SignFitParams::set()
    }

    fn fit(&self, values: Map<String, Value>, _: &FitInput) -> Result<Box<dyn Fit>> {
        let SignFitParams { center } = SignFitParams::from_values(values)?;
        Ok(Box::new(SignFit { center }))
    }

    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        calibrated_center(params)?;
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        Ok(vec![
            Spec::new::<f16>(CENTROID, &[l, g, d / GROUP, PATTERNS, GROUP]),
            Spec::new::<u64>(COUNT, &[l, g, d / GROUP, PATTERNS]),
            Spec::new::<f32>(ALPHA, &[l, g, d]),
            Spec::new::<f32>(MEAN_PRE, &[l, g, d]),
        ])
    }

    /// Checks that scales are not negative, and that the counts of each group add up to the number of kept keys.
    fn check(&self, section: &SectionView) -> Result<()> {
        let d = section.artifact.sizes.head_dim;
        if let Some(i) = section.read::<f32>(ALPHA)?.iter().position(|v| *v < 0.0) {
            let head = section.kv_head(i / d);
            return Err(section.damaged(format!("`{ALPHA}` of {head} has a value below zero")));
        }
        let kept = section.kept_keys();
        let counts: Vec<u64> = section.read(COUNT)?;
        // A sum of arbitrary numbers may overflow.
        let differs = |group: &[u64]| group.iter().try_fold(0u64, |a, b| a.checked_add(*b)) != Some(kept);
        if let Some(i) = counts.chunks(PATTERNS).position(differs) {
            let head = section.kv_head(i / (d / GROUP));
            return Err(section.damaged(format!("`{COUNT}` of {head} does not add up to {kept} keys")));
        }
        Ok(())
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let center = calibrated_center(&section.manifest.params)?;
        Ok(format!("signs relative to the {} of each block", center.as_str()))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads with sign patterns that no calibration key has.
    fn weak_heads(&self, section: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let mut empty = Vec::new();
        for head in reports {
            let quality: SignQuality = parse("quality.sign", head.report)?;
            if quality.empty_patterns > 0 {
                empty.push((quality.empty_patterns, head));
            }
        }
        if empty.is_empty() {
            return Ok(String::new());
        }
        empty.sort_by_key(|head| std::cmp::Reverse(head.0));
        let all = section.artifact.sizes.head_dim / GROUP * PATTERNS;
        let mut out = format!("\nsign, heads with patterns that no key has (of {all} patterns)\n");
        for (count, head) in empty.into_iter().take(LISTED) {
            out += &format!("  layer {}  head {}  {count}\n", head.layer, head.head);
        }
        Ok(out)
    }
}
