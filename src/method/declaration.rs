//! What a method says of itself: see [`Declaration`].

use super::Method;
use super::bench::Bench;
use super::params::MethodParams;
use crate::artifact::Artifact;
use crate::error::Result;
use crate::model::rope::Rope;

/// What a method is called, and how it is prepared. Each method's file has one, and the registry lists it.
pub struct Declaration {
    /// Name on the command line and in results.
    pub name: &'static str,
    /// One line of help.
    pub help: &'static str,
    /// The section of an artifact that it reads.
    pub section: Option<&'static str>,
    /// Prepares it for a model; a method with calibrated parts takes them from the artifact.
    pub prepare: fn(&Ask) -> Result<Box<dyn Method>>,
    /// What of it is timed with random contents.
    pub bench: Option<&'static dyn Bench>,
}

/// What a method is prepared for.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// Calibrated parts.
    pub artifact: Option<&'a Artifact>,
    /// The model's rotation.
    pub rope: &'a Rope,
    /// Channels, d.
    pub head_dim: usize,
    /// What the run sets.
    pub params: &'a MethodParams,
    /// Seed of random choices.
    pub seed: u64,
}
