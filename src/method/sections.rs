//! The sections of an artifact, one line each, in the order in which calibration makes them.

use serde::de::DeserializeOwned;

use super::a2ats::A2atsSection;
use super::lfps::priors::LfpsSection;
use super::selfindex::SignSection;
use super::tail::TailSection;
use super::wpq::WpqSection;
use super::{a2ats, lfps, selfindex, tail, wpq};
use crate::artifact::{HeadReport, SectionView, Sections, parse, worst_heads};
use crate::error::Result;

/// All sections.
pub const SECTIONS: Sections = &[
    &A2atsSection,
    &SignSection,
    &LfpsSection,
    &WpqSection,
    &TailSection,
];

/// Lists the heads that a section serves worst, for `inspect`; empty if no report has anything to say. It reads the
/// quality reports alone.
///
/// # Errors
/// A quality report or a hyper-parameter that is not valid.
pub fn weak_heads(section: &SectionView, reports: &[HeadReport]) -> Result<String> {
    match section.kind.name() {
        a2ats::SECTION => a2ats::weak_heads(section, reports),
        selfindex::SECTION => selfindex::weak_heads(reports, section.artifact.sizes.head_dim),
        lfps::priors::SECTION => lfps::priors::weak_heads(reports),
        wpq::SECTION => wpq::weak_heads(reports),
        tail::SECTION => tail::weak_heads(reports),
        _ => Ok(String::new()),
    }
}

/// A share that is shown as 0.0 %.
const NOTHING: f64 = 0.0005;

/// Lists the heads for which `of` is largest under a heading; leaves out heads for which it is shown as zero.
pub(super) fn worst_of<R: DeserializeOwned>(
    heading: &str,
    reports: &[HeadReport],
    of: fn(&R) -> Option<f64>,
) -> Result<String> {
    let mut told = Vec::new();
    for head in reports {
        let what = format!("quality, layer {}, KV head {}", head.layer, head.head);
        if of(&parse(&what, head.report)?).is_some_and(|value| value >= NOTHING) {
            let HeadReport { layer, head, report } = *head;
            told.push(HeadReport { layer, head, report });
        }
    }
    match told.is_empty() {
        true => Ok(String::new()),
        false => Ok(format!("\n{heading}\n{}", worst_heads(&told, of)?)),
    }
}
