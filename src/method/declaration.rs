//! How a method declares itself: its name, its help and the functions that make it.

use super::Method;
use super::bench::Bench;
use super::params::MethodParams;
use crate::artifact::Artifact;
use crate::error::Result;
use crate::model::Sizes;
use crate::model::rope::Ropes;

/// The declaration of a method. Each method's file has one, and the registry lists it.
pub struct Declaration {
    /// Name on the command line and in results.
    pub name: &'static str,
    /// One line of help, with the paper.
    pub help: &'static str,
    /// The artifact section that the method reads, if any.
    pub section: Option<&'static str>,
    /// When a verdict measures the method.
    pub verdict: InVerdict,
    /// Prepares the method for a model, reading its section of the artifact.
    pub prepare: fn(&Ask) -> Result<Box<dyn Method>>,
    /// How the method is benchmarked on random data; `None` if it is not.
    pub bench: Option<&'static dyn Bench>,
}

/// When a verdict that names no methods measures a method.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InVerdict {
    /// If the artifact has its section.
    IfCalibrated,
    /// Always, although it has no section.
    Always,
    /// Always, as a bound for the others: it ranks by exact scores without paying for them.
    Oracle,
    /// Always, as what an index has to gain from: it chooses nothing besides the static set and the last positions.
    Plain,
}

/// What a method is prepared from.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// The artifact with calibrated sections, if one was given.
    pub artifact: Option<&'a Artifact>,
    /// The rotary embeddings of the model's layers.
    pub ropes: &'a Ropes,
    /// The sizes of the model.
    pub sizes: Sizes,
    /// The parameters of the run.
    pub params: &'a MethodParams,
    /// The seed of random choices.
    pub seed: u64,
}
