//! The artifact file: sections of tensors, a manifest that says what they were made from, and digests of everything.
//! `docs/reference/artifact.md` describes the format for readers in other languages.
//!
//! A section is declared by a [`SectionKind`] in the folder of the method that reads it; this module
//! knows sections only by their declarations. A section file (`kvsmith codebook -o`) has the same form
//! as an artifact, with one section; [`pack`] merges them.

mod file;
mod layer;
mod manifest;
mod section;
mod table;
mod verdict;
mod write;

pub use file::{Artifact, SectionView};
pub use layer::LayerStates;
pub use manifest::{FORMAT, Manifest, Quality, Report, SectionManifest, object, parse};
pub use section::{
    Facts, Fit, FitInput, FitText, HeadDone, LayerPart, LayerParts, MomentsRead, Notable, Section,
    SectionKind, Sections,
};
pub use table::{Column, HeadReport, share, table, worst_heads};
pub use verdict::{
    Answered, FormatLoss, HeadLosses, Intervals, LossLimits, Measured, MeasuredProbe, MeasuredTexts,
    MethodLoss, OtherLosses, USUAL_KL, Verdict,
};
pub use write::{Judged, pack, write, write_judged, write_with_verdict};

/// Shortens a digest for messages.
pub fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}
