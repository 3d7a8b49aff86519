//! Retrieval methods: which positions a decode step attends besides the static set.
//!
//! The runner owns the static set (sinks and window), the budget and the softmax; a method only chooses positions. This
//! file has the traits of a method and their arguments. Each method declares itself in its own file, and [`registry`]
//! lists all of them.

pub mod a2ats;
pub mod bench;
mod best;
pub mod ctkvr;
pub mod cuda;
pub mod declaration;
pub mod doublesparsity;
pub mod full;
pub mod h2o;
mod late_rows;
pub mod lfps;
pub mod named;
pub mod params;
mod per_head;
pub mod plan;
pub mod pqcache;
pub mod quest;
pub mod random;
pub mod randsign;
pub mod reads;
pub mod registry;
pub mod rotation;
pub mod sections;
pub mod selfindex;
pub mod snapkv;
pub mod streaming;
pub mod tail;
pub mod topk;
pub mod triattention;
mod union;
mod weak;
pub mod wpq;

use std::ops::Range;

use multiversion::multiversion;
use ndarray::{Array2, ArrayView2, ArrayView3, s};

use self::best::{Key, largest};
use self::cuda::CudaMethod;
pub use self::reads::{CPU_GRANULE, CUDA_GRANULE, Reads};
use self::tail::Tail;
use crate::compute::attention::{Partial, visible};
use crate::compute::gemm;
use crate::compute::layout::{elements, elements_mut};
use crate::compute::simd;
use crate::kv::{Budget, KvHead, KvType, Limits};
use crate::parameters::choices;

/// A method prepared for all heads of a model.
pub trait Method: Send + Sync {
    /// Returns the empty state of a KV head.
    fn head(&self, place: &Place) -> Box<dyn Retriever>;

    /// Returns the method's implementation on an NVIDIA GPU, if it has one.
    fn cuda(&self) -> Option<&dyn CudaMethod> {
        None
    }

    /// Lists, as (layer, KV head), the heads that full attention serves in place of the method.
    fn full_heads(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Returns the budget and the formats of a KV head if they come before those of the session, as with a head plan.
    fn own(&self, _layer: usize, _kv_head: usize) -> Option<(Budget, KvType)> {
        None
    }

    /// Lists the parts of the model's KV heads that are served in different ways, if there are several; empty if this method
    /// serves all of them alike.
    fn parts(&self) -> Vec<MethodPart<'_>> {
        Vec::new()
    }

    /// Returns the tail of a KV head; by default, steps do not estimate what they leave out, so there is none.
    fn tail(&self, _place: &Place) -> Option<Tail> {
        None
    }
}

/// A function that makes heads is a method without a GPU index.
impl<R: Retriever + 'static, F: Fn(&Place) -> R + Send + Sync> Method for F {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        Box::new(self(place))
    }
}

/// A method whose heads all start as copies of one state.
struct Alike<R>(R);

impl<R: Retriever + CudaMethod + Clone + 'static> Method for Alike<R> {
    fn head(&self, _: &Place) -> Box<dyn Retriever> {
        self.0.fork()
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(&self.0)
    }
}

/// KV heads that are served in the same way.
pub struct MethodPart<'m> {
    /// Their method, which has no parts.
    pub method: &'m dyn Method,
    /// The budget and the formats of each; `None` for those of the session.
    pub own: Option<(Budget, KvType)>,
    /// The heads of each layer, ascending.
    pub heads: Vec<Vec<usize>>,
}

/// The place of a KV head in the model, and the settings of its run.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Index of the layer.
    pub layer: usize,
    /// Index of the KV head in the layer.
    pub kv_head: usize,
    /// Query heads of the group, r.
    pub group: usize,
    /// Channels, d.
    pub head_dim: usize,
    /// The static set and the budget.
    pub limits: Limits,
    /// The formats of the cache.
    pub kv: KvType,
}

/// The rows of a prompt, for one KV head.
pub struct Prompt<'a> {
    /// Position of the first row; above zero for later prompts.
    pub first: usize,
    /// Keys before rotation: `[m,d]`.
    pub k_pre: ArrayView2<'a, f32>,
    /// Queries after rotation: `[r,m,d]`.
    pub q_rope: ArrayView3<'a, f32>,
    /// Rotated keys of every position, `[first + m, d]`; keys before `first` are as the cache gives them back.
    pub keys: ArrayView2<'a, f32>,
    /// Values of every position, `[first + m, d]`.
    pub values: ArrayView2<'a, f32>,
    /// The cache of this head, which already holds the new rows.
    pub kv: &'a KvHead,
}

impl Prompt<'_> {
    /// Returns the positions that row `i` of the prompt sees, and the scaled scores of query head `a` with them.
    fn scores(&self, a: usize, i: usize, model_window: Option<usize>) -> (Range<usize>, Vec<f32>) {
        let seen = visible(self.first + i, model_window);
        let scale = 1.0 / (self.keys.ncols() as f32).sqrt();
        let query = self.q_rope.slice(s![a, i, ..]);
        let query: Vec<f32> = query.iter().map(|x| x * scale).collect();
        let keys = self.keys.slice(s![seen.clone(), ..]);
        let scores = keys.outer_iter().map(|key| simd::dot(&query, elements(&key)));
        (seen, scores.collect())
    }

    /// Returns a range of positions, and the softmax weights of some rows of query head `a` over that range,
    /// `[rows,positions]`. A weight is zero where a row does not see the position.
    fn weights_of(
        &self,
        a: usize,
        rows: Range<usize>,
        model_window: Option<usize>,
    ) -> (Range<usize>, Array2<f32>) {
        let seen = |i: usize| visible(self.first + i, model_window);
        let span = seen(rows.start).start..self.first + rows.end;
        let scale = 1.0 / (self.keys.ncols() as f32).sqrt();
        let queries = self.q_rope.slice(s![a, rows.clone(), ..]).mapv(|x| x * scale);
        let mut weights = Array2::zeros((rows.len(), span.len()));
        gemm(
            weights.view_mut(),
            false,
            queries.view(),
            self.keys.slice(s![span.clone(), ..]).t(),
        );
        for (mut row, i) in weights.rows_mut().into_iter().zip(rows) {
            let row = elements_mut(&mut row);
            let (start, end) = (seen(i).start - span.start, seen(i).end - span.start);
            softmax(&mut row[start..end]);
            row[..start].fill(0.0);
            row[end..].fill(0.0);
        }
        (span, weights)
    }

    /// Returns the positions that row `i` of the prompt sees, and the softmax weights of query head `a` over them.
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

/// Adds the softmax probabilities of a query head's scores to `mass`. What the scores hold is lost.
///
/// # Numerics
/// Powers in f32, their sum and the mass in f64.
fn add_probabilities(scores: &mut [f32], mass: &mut [f64]) {
    let max = simd::max(scores);
    simd::exp_shifted(scores, max);
    add_shares(scores, simd::sum(scores), mass);
}

/// Adds `x[i] / sum` to `mass[i]`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn add_shares(x: &[f32], sum: f64, mass: &mut [f64]) {
    for (m, x) in mass.iter_mut().zip(x) {
        *m += f64::from(*x) / sum;
    }
}

/// A decode step of one KV head.
pub struct Step<'a> {
    /// Index of the step, from 0.
    pub step: usize,
    /// The positions visible to the current token, whose own position is the last.
    pub visible: Range<usize>,
    /// The positions that may be chosen: the visible ones outside the static set.
    pub candidates: Range<usize>,
    /// The most positions that may be chosen, B.
    pub budget: usize,
    /// Queries before rotation: `[r,d]`.
    pub q_pre: ArrayView2<'a, f32>,
    /// Queries after rotation: `[r,d]`.
    pub q_rope: ArrayView2<'a, f32>,
    /// The cache of this head, which already holds the current token.
    pub kv: &'a KvHead,
}

impl Step<'_> {
    /// Returns whether the budget covers all candidates. Every method then equals full attention.
    pub fn is_exact(&self) -> bool {
        self.budget >= self.candidates.len()
    }

    /// Returns how many of the chosen rows a step reads whole, if rows are in layers and the others are not.
    pub fn whole_rows(&self) -> Option<usize> {
        self.kv.whole_rows(self.budget)
    }
}

/// The selection of a method for one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Selection {
    /// The chosen candidates, at most B: ascending, no duplicates.
    pub positions: Vec<u32>,
    /// The chosen positions, ascending, whose rows are read whole where rows are in layers ([`Step::whole_rows`]); `None` for all.
    pub whole: Option<Vec<u32>>,
    /// The positions, ascending, whose cached keys were read for ranking and which are not attended.
    pub ranked: Vec<u32>,
    /// Number of exact query-key products computed for ranking, over all query heads.
    pub products: usize,
    /// For each bypassed query head, its estimated attention over all positions except the sinks. The runner attends
    /// the sinks and merges the two. Empty if no head is bypassed, else one entry per query head.
    pub bypassed: Vec<Option<Partial>>,
}

impl Selection {
    /// Chooses the candidates with the largest estimated mass, `[candidates]`; the best of them are read whole. The lower position
    /// wins a tie.
    fn of_mass<K: Key>(step: &Step, mass: &[K]) -> Self {
        let best = |count| {
            let places = largest(mass, count).into_iter();
            places.map(|p| p + step.candidates.start as u32).collect()
        };
        Self {
            positions: best(step.budget),
            whole: step.whole_rows().map(best),
            ..Self::default()
        }
    }
}

impl From<Vec<u32>> for Selection {
    fn from(positions: Vec<u32>) -> Self {
        Self {
            positions,
            ..Self::default()
        }
    }
}

impl Reads {
    /// Adds the cached keys that a selection ranked.
    pub fn ranked(&mut self, selection: &Selection) {
        self.keys += selection.ranked.len() + selection.positions.len();
        self.unattended_keys += selection.ranked.len();
    }
}

choices! {
    /// How a method searches for the best positions; both ways find the same ones.
    pub enum Ranking {
        /// The method's fastest algorithm, such as tables in registers or lists of positions.
        Fast = "fast",
        /// One f32 score per position: the reference for `fast`.
        Plain = "plain",
    }
}

/// Copies a [`Retriever`]; implemented for every retriever that is `Clone`.
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
    /// Adds the rows of a prompt, the first or a later one, to the index.
    fn prefill(&mut self, _prompt: &Prompt) {}

    /// Adds the key of a generated token, `[1,d]` before and after rotation, before a step attends it.
    fn append(&mut self, _k_pre: ArrayView2<f32>, _k_rope: ArrayView2<f32>) {}

    /// Chooses the positions that a step attends besides the static set.
    fn select(&mut self, step: &Step) -> Selection;

    /// Returns whether the step ranks candidates, which a step whose budget covers all of them need not do.
    fn ranks(&self, step: &Step) -> bool {
        !step.is_exact()
    }

    /// Adds what the step read to make `selection`. Called after `select` if the step ranked candidates; by default it read
    /// nothing.
    fn reads(&self, _step: &Step, _choice: &Selection, _reads: &mut Reads) {}

    /// Returns whether [`Retriever::observe`] needs the attention of this step. Called after `select`.
    fn observes(&self, _step: &Step) -> bool {
        false
    }

    /// Learns from the attention weights `[r, positions]` of a step. The positions include the static set. A bypassed
    /// query head has weights of zero, and the tail's weight is not counted.
    fn observe(&mut self, _step: &Step, _positions: &[u32], _weights: ArrayView2<f32>) {}

    /// Returns whether the index itself, and not only the choice, depends on the budget of the run ([`Limits::budget`]).
    fn depends_on_budget(&self) -> bool {
        false
    }

    /// Estimates [`Retriever::state_bytes`] for a context of `positions` positions.
    fn bytes_for(&self, _place: &Place, _positions: usize) -> usize {
        0
    }

    /// Returns the bytes of the index that grow with the context.
    fn state_bytes(&self) -> usize {
        0
    }
}

/// Returns the positions of a list that are not in `chosen`; both ascend.
fn except(listed: &[u32], chosen: &[u32]) -> Vec<u32> {
    let mut chosen = chosen.iter().peekable();
    let is_other = |p: &u32| chosen.next_if_eq(&p).is_none();
    listed.iter().copied().filter(is_other).collect()
}

/// Returns all candidates, for a step whose budget covers them.
fn everything(step: &Step) -> Vec<u32> {
    step.candidates.clone().map(|p| p as u32).collect()
}
