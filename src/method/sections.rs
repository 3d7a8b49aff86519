//! The sections of an artifact, one line each, in the order in which calibration makes them.

use super::a2ats::A2atsSection;
use super::doublesparsity::DoubleSparsitySection;
use super::lfps::priors::LfpsSection;
use super::rotation::RotationSection;
use super::selfindex::SignSection;
use super::tail::TailSection;
use super::triattention::TriAttentionSection;
use super::wpq::WpqSection;
use crate::artifact::Sections;

/// All sections.
pub const SECTIONS: Sections = &[
    &A2atsSection,
    &SignSection,
    &LfpsSection,
    &WpqSection,
    &RotationSection,
    &TailSection,
    &DoubleSparsitySection,
    &TriAttentionSection,
];
