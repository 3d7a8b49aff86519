//! Retrieval methods: which positions a decode step attends besides the static set.
//!
//! The runner owns the static set (sinks and window), the budget, the disjointness of the two sets
//! and the softmax; a method only chooses. This file is the one registry.

pub mod a2ats;
pub mod full;
pub mod lfps;
pub mod quest;
pub mod random;
pub mod selfindex;
pub mod snapkv;
pub mod streaming;
pub mod topk;

use std::ops::Range;
use std::sync::Arc;

use ndarray::{ArrayView2, ArrayView3};
use serde_json::Value;

use self::lfps::priors;
use crate::artifact::Artifact;
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::model::rope::Rope;
use crate::runner::kv::KvHead;
use crate::store::Spec;

/// The methods by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum MethodName {
    /// Exact attention over everything visible.
    Full,
    /// The oracle: the positions with the largest true probability.
    Topk,
    /// Positions drawn uniformly.
    Random,
    /// The most recent positions.
    Streaming,
    /// Pages of 16 keys by an upper bound of their scores (Quest, arXiv 2406.10774).
    Quest,
    /// Chosen once after prefill by what the last queries attended (SnapKV, arXiv 2404.14469).
    Snapkv,
    /// Codebook scores of windowed-RoPE queries (A2ATS, arXiv 2502.12665).
    A2ats,
}

impl MethodName {
    /// Name on the command line and in results.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Topk => "topk",
            Self::Random => "random",
            Self::Streaming => "streaming",
            Self::Quest => "quest",
            Self::Snapkv => "snapkv",
            Self::A2ats => "a2ats",
        }
    }
}

/// A method with what it was made from, for all heads of a model.
pub enum Method {
    /// See [`full`].
    Full,
    /// See [`topk`].
    Topk,
    /// See [`random`]; the seed of its draws.
    Random(u64),
    /// See [`streaming`].
    Streaming,
    /// See [`quest`].
    Quest,
    /// See [`snapkv`].
    Snapkv,
    /// See [`a2ats`]; its calibrated codebooks.
    A2ats(a2ats::Codebooks),
}

impl Method {
    /// Prepares `name`; methods with calibrated parts take them from `artifact`.
    pub fn new(name: MethodName, artifact: Option<&Artifact>, rope: &Rope, seed: u64) -> Result<Self> {
        Ok(match name {
            MethodName::Full => Self::Full,
            MethodName::Topk => Self::Topk,
            MethodName::Random => Self::Random(seed),
            MethodName::Streaming => Self::Streaming,
            MethodName::Quest => Self::Quest,
            MethodName::Snapkv => Self::Snapkv,
            MethodName::A2ats => {
                let artifact = artifact.ok_or_else(|| {
                    Error::usage("--method a2ats needs --artifact")
                        .hint("make one with `kvsmith calibrate --model DIR --text FILE -o ART.safetensors`")
                })?;
                Self::A2ats(a2ats::Codebooks::load(artifact, rope)?)
            }
        })
    }

    /// The state of one KV head of a layer with this sliding window.
    pub fn head(&self, layer: usize, kv_head: usize, window: Option<usize>) -> Box<dyn Retriever> {
        match self {
            Self::Full => Box::new(full::Full),
            Self::Topk => Box::new(topk::TopK),
            Self::Random(seed) => Box::new(random::Random::new(*seed, layer, kv_head)),
            Self::Streaming => Box::new(streaming::Streaming),
            Self::Quest => Box::new(quest::Quest::default()),
            Self::Snapkv => Box::new(snapkv::SnapKv::new(window)),
            Self::A2ats(codebooks) => Box::new(a2ats::A2ats::new(Arc::clone(codebooks.head(layer, kv_head)))),
        }
    }
}

/// The tensors of an artifact's section.
///
/// # Errors
/// A section that no method knows, or parameters that are not valid.
pub fn section_specs(section: &str, params: &Value, sizes: Sizes) -> Result<Vec<Spec>> {
    match section {
        a2ats::SECTION => Ok(a2ats::specs(sizes, a2ats::codebook_size(params)?)),
        selfindex::SECTION => Ok(selfindex::specs(sizes)),
        priors::SECTION => priors::specs(sizes, params),
        other => Err(Error::failed(format!("unknown section `{other}`"))
            .hint("the file was made by a newer version of kvsmith")),
    }
}

/// Checks the values of an artifact's section.
pub fn check_section(section: &str, artifact: &Artifact) -> Result<()> {
    match section {
        a2ats::SECTION => a2ats::check_values(artifact),
        selfindex::SECTION => selfindex::check_values(artifact),
        priors::SECTION => priors::check_values(artifact),
        _ => Ok(()),
    }
}

/// The positions of a prompt, for one KV head.
pub struct Prompt<'a> {
    /// Keys before rotation: `[m,d]`.
    pub k_pre: ArrayView2<'a, f32>,
    /// Queries after rotation: `[r,m,d]`.
    pub q_rope: ArrayView3<'a, f32>,
    /// The cache of this head, which already holds the new rows.
    pub kv: &'a KvHead,
}

/// One decode step of one KV head.
pub struct Step<'a> {
    /// Index of the step, from 0.
    pub step: usize,
    /// Everything visible to the current token, which is the last of it.
    pub visible: Range<usize>,
    /// What may be chosen: visible and not in the static set.
    pub candidates: Range<usize>,
    /// Most positions that may be chosen, B.
    pub budget: usize,
    /// Queries before rotation: `[r,d]`.
    pub q_pre: ArrayView2<'a, f32>,
    /// Queries after rotation: `[r,d]`.
    pub q_rope: ArrayView2<'a, f32>,
    /// The cache of this head, the current token included.
    pub kv: &'a KvHead,
}

/// The retrieval state of one KV head of one layer.
pub trait Retriever: Send + Sync {
    /// Takes in the rows of a prompt.
    fn prefill(&mut self, prompt: &Prompt) {
        let _ = prompt;
    }

    /// Takes in the key of one generated token, before it is attended: `[1,d]`.
    fn append(&mut self, k_pre: ArrayView2<f32>) {
        let _ = k_pre;
    }

    /// Chooses at most `step.budget` of `step.candidates`: ascending, no duplicates.
    fn select(&mut self, step: &Step) -> Vec<u32>;

    /// Bytes of the index: what grows with the context.
    fn state_bytes(&self) -> usize {
        0
    }
}

/// All candidates, when the budget covers them.
fn everything(step: &Step) -> Vec<u32> {
    step.candidates.clone().map(|p| p as u32).collect()
}
