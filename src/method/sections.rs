//! The sections of an artifact, one line each, in the order in which calibration makes them.

use super::a2ats::A2atsSection;
use super::doublesparsity::DoubleSparsitySection;
use super::lfps::priors::LfpsSection;
use super::selfindex::SignSection;
use super::tail::TailSection;
use super::triattention::TriAttentionSection;
use super::wpq::WpqSection;
use super::{a2ats, doublesparsity, lfps, selfindex, tail, triattention, wpq};
use crate::artifact::{HeadReport, SectionView, Sections};
use crate::error::Result;

/// All sections.
pub const SECTIONS: Sections = &[
    &A2atsSection,
    &SignSection,
    &LfpsSection,
    &WpqSection,
    &TailSection,
    &DoubleSparsitySection,
    &TriAttentionSection,
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
        doublesparsity::SECTION => doublesparsity::weak_heads(reports),
        triattention::SECTION => triattention::weak_heads(reports),
        _ => Ok(String::new()),
    }
}
