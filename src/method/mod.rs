//! Retrieval methods: which positions a decode step attends besides the static set.
//!
//! The runner owns the static set (sinks and window), the budget, the disjointness of the two sets
//! and the softmax; a method only chooses. Here are the traits and what passes through them; each method
//! declares itself in its own file, and [`registry`] lists them.

pub mod a2ats;
pub mod bench;
mod best;
pub mod ctkvr;
pub mod cuda;
pub mod declaration;
pub mod full;
pub mod h2o;
pub mod lfps;
pub mod params;
pub mod quest;
pub mod random;
pub mod registry;
pub mod sections;
pub mod selfindex;
pub mod snapkv;
pub mod streaming;
pub mod topk;
mod union;

use std::ops::Range;

use ndarray::{ArrayView2, ArrayView3, s};

use self::cuda::CudaMethod;
use crate::compute::attention::{Partial, visible};
use crate::compute::layout::elements;
use crate::compute::simd;
use crate::kv::{Budget, KvHead, KvType};

/// A method prepared for all heads of a model.
pub trait Method: Send + Sync {
    /// Returns the empty state of a KV head.
    fn head(&self, place: &Place) -> Box<dyn Retriever>;

    /// Returns the method's form on an NVIDIA GPU.
    fn cuda(&self) -> Option<&dyn CudaMethod> {
        None
    }
}

/// A method of the CPU alone can be the function that makes its heads.
impl<R: Retriever + 'static, F: Fn(&Place) -> R + Send + Sync> Method for F {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        Box::new(self(place))
    }
}

/// A method whose heads all begin as copies of one state.
struct Alike<R>(R);

impl<R: Retriever + CudaMethod + Clone + 'static> Method for Alike<R> {
    fn head(&self, _: &Place) -> Box<dyn Retriever> {
        self.0.fork()
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(&self.0)
    }
}

/// The place of a KV head in the model, and the settings of its run.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its layer.
    pub layer: usize,
    /// Its index in the layer.
    pub kv_head: usize,
    /// Query heads of the group, r.
    pub group: usize,
    /// Channels, d.
    pub head_dim: usize,
    /// The model's own sliding window in this layer.
    pub model_window: Option<usize>,
    /// First positions that are always attended.
    pub sinks: usize,
    /// Last positions that are always attended.
    pub window: usize,
    /// The budget of positions that may be chosen besides.
    pub budget: Budget,
    /// Element type of the cache.
    pub kv: KvType,
}

/// The rows of a prompt, for one KV head.
pub struct Prompt<'a> {
    /// Position of its first row; not zero for a later turn.
    pub first: usize,
    /// Keys before rotation: `[m,d]`.
    pub k_pre: ArrayView2<'a, f32>,
    /// Queries after rotation: `[r,m,d]`.
    pub q_rope: ArrayView3<'a, f32>,
    /// Rotated keys of every position, `[first + m, d]`; earlier ones as the cache gives them.
    pub keys: ArrayView2<'a, f32>,
    /// Values of every position, `[first + m, d]`.
    pub values: ArrayView2<'a, f32>,
    /// The cache of this head, which already holds the new rows.
    pub kv: &'a KvHead,
}

impl Prompt<'_> {
    /// Returns the positions that row `i` of query head `a` sees, and its scaled scores with them.
    fn scores(&self, a: usize, i: usize, model_window: Option<usize>) -> (Range<usize>, Vec<f32>) {
        let seen = visible(self.first + i, model_window);
        let scale = 1.0 / (self.keys.ncols() as f32).sqrt();
        let query = self.q_rope.slice(s![a, i, ..]);
        let query: Vec<f32> = query.iter().map(|x| x * scale).collect();
        let keys = self.keys.slice(s![seen.clone(), ..]);
        let scores = keys.outer_iter().map(|key| simd::dot(&query, elements(&key)));
        (seen, scores.collect())
    }

    /// Returns the positions that row `i` of query head `a` sees, and its softmax weights over them.
    fn weights(&self, a: usize, i: usize, model_window: Option<usize>) -> (Range<usize>, Vec<f32>) {
        let (seen, mut scores) = self.scores(a, i, model_window);
        softmax(&mut scores);
        (seen, scores)
    }
}

/// Turns scores into softmax weights, in place.
fn softmax(scores: &mut [f32]) {
    let max = simd::max(scores);
    simd::exp_shifted(scores, max);
    simd::scale(scores, (1.0 / simd::sum(scores)) as f32);
}

/// A decode step of one KV head.
pub struct Step<'a> {
    /// Index of the step, from 0.
    pub step: usize,
    /// The positions visible to the current token, whose own is the last.
    pub visible: Range<usize>,
    /// The positions that may be chosen: visible and not in the static set.
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

impl Step<'_> {
    /// Returns whether the budget covers all candidates, so that every method equals full attention.
    pub fn is_exact(&self) -> bool {
        self.budget >= self.candidates.len()
    }
}

/// The choice of a method for one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Ascending, no duplicates, at most B of the candidates.
    pub positions: Vec<u32>,
    /// Cached keys that were read for ranking and are not attended.
    pub ranked_rows: usize,
    /// Exact products of a query with a key that were computed for ranking, summed over the query heads.
    pub products: usize,
    /// For each bypassed query head its estimated attention over everything but the sinks; the head attends the sinks
    /// alone, and both are joined. Empty, or one entry per query head.
    pub bypassed: Vec<Option<Partial>>,
}

impl From<Vec<u32>> for Choice {
    fn from(positions: Vec<u32>) -> Self {
        Self {
            positions,
            ..Self::default()
        }
    }
}

/// What a KV head reads in one step in order to choose, besides what it then attends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Bytes of the index.
    pub index_bytes: usize,
    /// Cached keys that are ranked exactly.
    pub keys: usize,
    /// Those of them that are not attended, so that attention does not read them.
    pub unattended_keys: usize,
}

impl Reads {
    /// An index that is read instead of keys.
    pub fn index(bytes: usize) -> Self {
        Self {
            index_bytes: bytes,
            ..Self::default()
        }
    }

    /// An index, and the keys that a choice ranked.
    pub fn ranked(index_bytes: usize, choice: &Choice) -> Self {
        Self {
            index_bytes,
            keys: choice.ranked_rows + choice.positions.len(),
            unattended_keys: choice.ranked_rows,
        }
    }
}

/// How a method looks for the best positions; both ways find the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Ranking {
    /// Whatever is fastest: tables in registers, lists of positions.
    #[default]
    Fast,
    /// Every position's score in f32, one by one: the reference of what is faster.
    Plain,
}

/// Copies the state of a KV head; every [`Retriever`] that can be cloned has this.
pub trait Fork {
    /// Returns a copy for another trajectory.
    fn fork(&self) -> Box<dyn Retriever>;
}

impl<R: Retriever + Clone + 'static> Fork for R {
    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}

/// The retrieval state of one KV head of one layer.
pub trait Retriever: Fork + Send + Sync {
    /// Adds the rows of a prompt, the first one or that of a later turn, to the index.
    fn prefill(&mut self, prompt: &Prompt) {
        let _ = prompt;
    }

    /// Adds the key of one generated token, before it is attended: `[1,d]` before and after rotation.
    fn append(&mut self, k_pre: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        let _ = (k_pre, k_rope);
    }

    /// Chooses the positions that a step attends besides the static set.
    fn select(&mut self, step: &Step) -> Choice;

    /// Returns what choosing that read; by default nothing.
    fn reads(&self, step: &Step, choice: &Choice) -> Reads {
        let _ = (step, choice);
        Reads::default()
    }

    /// Returns whether [`Retriever::observe`] needs this step's attention; called after the choice.
    fn observes(&self, step: &Step) -> bool {
        let _ = step;
        false
    }

    /// Learns from the attention of a step: `weights` `[r, positions]` over `positions`, the static set included; a
    /// bypassed head has zeros.
    fn observe(&mut self, step: &Step, positions: &[u32], weights: ArrayView2<f32>) {
        let _ = (step, positions, weights);
    }

    /// Returns the bytes of the index, which grow with the context.
    fn state_bytes(&self) -> usize {
        0
    }
}

/// Returns all candidates, which the budget covers.
fn everything(step: &Step) -> Vec<u32> {
    step.candidates.clone().map(|p| p as u32).collect()
}
