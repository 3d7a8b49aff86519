//! LFPS: learns where a head will look from where it has looked, arXiv 2506.15704.
//!
//! Every query head keeps two decayed tables of its attention: the vertical table, by position, and the slash table, by
//! distance from the query. The positions that either table marks, and their neighbours, are candidates. Only the
//! candidates are scored exactly; the best of them are attended, and their weights are added to the tables. A head that
//! gives nearly all of its attention to the sinks is bypassed: its output is estimated without reading the rest of the
//! cache.
//!
//! The paper's equations are reconstructed from its prose. Our decisions: the slash table is kept by distance, so that
//! nothing is shifted; the tables learn from all attended positions except the sinks, the window included; the final
//! sets of a group are the largest top-k sets whose union fits the budget; the last rows of a later prompt update the
//! tables as decode steps do.

mod bench;
mod bypass;
mod constants;
pub mod cuda;
mod entries;
mod head;
mod marks;
pub mod params;
pub mod priors;
mod table;
mod threshold;

use std::ops::Range;
use std::sync::Arc;

use ndarray::{ArrayView1, ArrayView2, Axis, s};

use super::best::Places;
use super::cuda::CudaMethod;
use super::declaration::{Declaration, InVerdict};
use super::union::union_within;
use super::{Method, Place, Prompt, Reads, Retriever, Selection, Step, everything, except, softmax};
use crate::artifact::Artifact;
use crate::compute::attention::{Partial, visible};
use crate::compute::layout::elements;
use crate::compute::products::products as products_of;
use crate::compute::simd;
use crate::error::{Error, Result};
pub use bypass::sparsity;
use bypass::{RunningMean, log_sum_exp};
pub use constants::{GAMMA, LOCAL};
pub use head::{Constants, QueryHead};
use marks::marks;
pub use params::LfpsParams;
use priors::Priors;
pub use table::Table;
pub use threshold::{OFFSETS, Threshold};

/// The declaration of `lfps`.
pub static METHOD: Declaration = Declaration {
    name: "lfps",
    help: "Candidates from where the head attended before, ranked by exact scores (LFPS, arXiv 2506.15704)",
    section: Some(priors::SECTION),
    verdict: InVerdict::IfCalibrated,
    prepare: |ask| Ok(Box::new(LfpsMethod::new(&ask.params.lfps, ask.artifact)?)),
    bench: Some(&bench::LfpsBench),
};

/// LFPS prepared for a model: its parameters and the priors of every head.
pub struct LfpsMethod {
    params: LfpsParams,
    priors: Option<Priors>,
}

impl LfpsMethod {
    /// Reads the priors if the artifact has them.
    ///
    /// # Errors
    /// The parameters take no prompt rows and there are no priors: the tables would stay empty.
    pub fn new(params: &LfpsParams, artifact: Option<&Artifact>) -> Result<Self> {
        let artifact = artifact.filter(|a| a.has(priors::SECTION));
        if artifact.is_none() && params.lfps_rows == 0 {
            return Err(
                Error::usage("⟨lfps_rows=0⟩ needs an artifact with the section `lfps`")
                    .hint("make an artifact with `kvsmith calibrate`, and pass it with ⟨artifact⟩"),
            );
        }
        Ok(Self {
            params: params.clone(),
            priors: artifact.map(Priors::load).transpose()?,
        })
    }

    /// Returns the empty state of a KV head.
    pub fn head(&self, place: &Place) -> Lfps {
        let heads = (0..place.group).map(|a| {
            let head = place.kv_head * place.group + a;
            let prior = self.priors.as_ref();
            let prior = prior.map(|p| Arc::clone(p.head(place.layer, head)));
            QueryHead::new(&self.params, prior, place.limits.sinks)
        });
        Lfps {
            place: *place,
            params: self.params.clone(),
            heads: heads.collect(),
            mean: RunningMean::default(),
            wanted: 0,
        }
    }
}

impl Method for LfpsMethod {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        Box::new(Self::head(self, place))
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

/// The state of one KV head.
#[derive(Clone)]
pub struct Lfps {
    place: Place,
    params: LfpsParams,
    heads: Vec<QueryHead>,
    mean: RunningMean,
    /// How many keys the query heads wanted to rank in the last step, summed over the heads.
    wanted: usize,
}

impl Lfps {
    /// Returns the state of the query heads.
    pub fn heads(&self) -> &[QueryHead] {
        &self.heads
    }

    /// Returns the sum of the keys and the sum of the values over all non-sinks that the last position sees, `[d]`
    /// each; both are empty before a prompt.
    pub fn sums(&self) -> [&[f64]; 2] {
        [&self.mean.keys, &self.mean.values]
    }

    /// Fills the tables from a first prompt whose last queries alone are known; these must include the queries that the
    /// tables learn from. `last.first` is the position of the first known query; keys and values are those of all
    /// positions.
    pub fn fill(&mut self, last: &Prompt) {
        self.take_in(last, true);
    }

    /// Returns the visible positions without the sinks.
    fn rest(&self, visible: &Range<usize>) -> Range<usize> {
        visible.start.max(self.place.limits.sinks).min(visible.end)..visible.end
    }

    /// Tests every query head for the bypass. Returns the results of the bypassed heads, and the positions besides the
    /// sinks that the test read.
    fn bypass(&mut self, step: &Step) -> (Vec<Option<Partial>>, Range<usize>) {
        let rest = self.rest(&step.visible);
        let local = rest.start.max(rest.end.saturating_sub(LOCAL))..rest.end;
        let r = self.heads.len();
        self.heads.iter_mut().for_each(|h| h.bypassed = false);
        let sinks = step.visible.start..step.candidates.start;
        if step.is_exact() || sinks.is_empty() || !self.heads.iter().any(|h| h.constants.is_tested) {
            return (Vec::new(), local.end..local.end);
        }
        self.mean.cover(rest.clone(), step.kv, step.q_rope.ncols());
        let n = rest.len() as f64;
        let scale = 1.0 / (step.q_rope.ncols() as f64).sqrt();
        let mut scratch = vec![0.0; step.q_rope.ncols()];
        let mut bypassed = vec![None; r];
        let heads = self.heads.iter_mut().enumerate();
        for (a, head) in heads.filter(|(_, head)| head.constants.is_tested) {
            let q = step.q_rope.row(a);
            let mut scores = |range: &Range<usize>| -> Vec<f64> {
                let rows = range
                    .clone()
                    .map(|p| simd::dot(elements(&q), step.kv.keys().row(p, &mut scratch)));
                rows.map(|s| scale * f64::from(s)).collect()
            };
            let (sink, local) = (log_sum_exp(&scores(&sinks)), log_sum_exp(&scores(&local)));
            let parts = q.iter().zip(&self.mean.keys).map(|(q, k)| f64::from(*q) * k / n);
            let (norm, mean) = (squared_norm(q), parts.sum::<f64>());
            // ln n plus the log of E[exp x] for a normal x, plus the calibrated correction.
            let global = n.ln() + scale * mean + head.constants.rho * norm / 2.0 + head.constants.bias;
            let (share, rest) = sparsity(sink, global, local);
            if share > self.params.lfps_theta {
                head.bypassed = true;
                bypassed[a] = Some(Partial {
                    output: self.mean.values.iter().map(|v| (v / n) as f32).collect(),
                    lse: rest as f32,
                });
            }
        }
        if bypassed.iter().all(Option::is_none) {
            bypassed.clear();
        }
        (bypassed, local)
    }

    /// Returns the candidates of query head `a`.
    fn candidates(&mut self, a: usize, step: &Step) -> Places {
        let (c, t) = (step.candidates.clone(), step.visible.end - 1);
        let population = self.rest(&step.visible);
        let head = &mut self.heads[a];
        let distances = |positions: &Range<usize>| t + 1 - positions.end..t + 1 - positions.start;
        let slash = head.slash.entries(distances(&c), distances(&population), true);
        let vertical = head.vertical.entries(c.clone(), population, false);
        let rule = self.params.lfps_threshold;
        let marks = marks(&vertical, &slash, rule, head.constants.alpha, step.visible.len());
        let mut places = Places::from(marks);
        head.touched = [vertical, slash].map(|entries| entries.touched.into_inner());
        for i in c.start.max((t + 1).saturating_sub(LOCAL))..c.end {
            places.insert(i - c.start);
        }
        places
    }

    /// Learns from the rows of the first prompt or of a later one.
    fn take_in(&mut self, prompt: &Prompt, is_first: bool) {
        let m = prompt.q_rope.len_of(Axis(1));
        let (n, rows) = (prompt.keys.nrows(), m.saturating_sub(self.params.lfps_rows)..m);
        for a in 0..self.heads.len() {
            let mut learnt = 0;
            for i in rows.clone() {
                let (seen, mut scores) = prompt.scores(a, i, self.place.limits.model_window);
                let rest = self.rest(&seen);
                // The softmax is over the non-sinks alone; with the sinks, their weights would nearly vanish.
                let weights = &mut scores[rest.start - seen.start..];
                if weights.is_empty() {
                    continue;
                }
                softmax(weights);
                learnt += 1;
                let entries = rest.zip(weights.iter().map(|w| f64::from(*w)));
                if is_first {
                    self.heads[a].learn(prompt.first + i, entries)
                } else {
                    self.heads[a].update(prompt.first + i, entries)
                }
            }
            if is_first {
                self.heads[a].fill(learnt, self.params.lfps_prior, n, &self.place);
            }
        }
        self.observe_variance(prompt);
        // A prompt may change which rows a 2-bit cache keeps as full-precision tokens, so the sums start anew.
        if !prompt.kv.kind().keeps_rows() {
            self.mean = RunningMean::default();
        }
        let rest = self.rest(&visible(n - 1, self.place.limits.model_window));
        self.mean.cover(rest, prompt.kv, prompt.keys.ncols());
    }

    /// Measures the variance of the scores of the last prompt query, per query head.
    fn observe_variance(&mut self, prompt: &Prompt) {
        let last = prompt.q_rope.len_of(Axis(1)) - 1;
        for (a, head) in self.heads.iter_mut().enumerate() {
            let (seen, scores) = prompt.scores(a, last, self.place.limits.model_window);
            let rest = &scores[self
                .place
                .limits
                .sinks
                .saturating_sub(seen.start)
                .min(scores.len())..];
            let norm = squared_norm(prompt.q_rope.slice(s![a, last, ..]));
            if rest.is_empty() || norm == 0.0 {
                continue;
            }
            let n = rest.len() as f64;
            let mean = rest.iter().map(|x| f64::from(*x)).sum::<f64>() / n;
            let variance = rest.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / n;
            let observed = variance / norm;
            head.constants.rho = match &head.prior {
                Some(prior) => (f64::from(prior.rho0) + observed) / 2.0,
                None => observed,
            };
        }
    }
}

/// Returns the squared length of a query.
fn squared_norm(q: ArrayView1<f32>) -> f64 {
    q.iter().map(|x| f64::from(*x).powi(2)).sum()
}

impl Retriever for Lfps {
    fn prefill(&mut self, prompt: &Prompt) {
        self.take_in(prompt, prompt.first == 0);
    }

    fn select(&mut self, step: &Step) -> Selection {
        let (r, d) = step.q_rope.dim();
        let (bypassed, local) = self.bypass(step);
        if step.is_exact() {
            return everything(step).into();
        }
        let tested = self.heads.iter().filter(|h| h.constants.is_tested).count();
        let mut products = tested * (local.len() + step.candidates.start - step.visible.start);
        // Each key is read once for all heads that want it.
        let active: Vec<usize> = (0..r).filter(|a| !self.heads[*a].bypassed).collect();
        let wanted: Vec<Places> = active.iter().map(|a| self.candidates(*a, step)).collect();
        self.wanted = wanted.iter().map(Places::len).sum();
        products += self.wanted;
        let mut union = Places::new(step.candidates.len());
        wanted.iter().for_each(|places| union.join(places));
        let start = step.candidates.start;
        let union = union.ascending(start as u32);
        // If all proposed candidates fit the budget, their scores are not needed.
        let positions = if union.len() <= step.budget {
            union.clone()
        } else {
            let scale = 1.0 / (d as f32).sqrt();
            let queries = step.q_rope.select(Axis(0), &active);
            let mut lists = vec![Vec::new(); active.len()];
            let keep = |place: usize, products: &[f32]| {
                let p = union[place];
                for ((list, wanted), product) in lists.iter_mut().zip(&wanted).zip(products) {
                    if wanted.contains(p as usize - start) {
                        list.push((*product, p));
                    }
                }
            };
            products_of(queries.view(), scale, step.kv.keys(), &union, keep);
            union_within(&lists, step.budget)
        };
        let all = self.heads.iter().all(|h| h.bypassed);
        Selection {
            whole: None,
            // If every head is bypassed, only the keys of the local estimate have been read.
            ranked: if all {
                local.map(|p| p as u32).collect()
            } else {
                except(&union, &positions)
            },
            products,
            positions,
            bypassed,
        }
    }

    /// Of the tables of a query head, a step reads the maximum of every 16 entries, all entries of the blocks whose maximum
    /// is above a threshold, and single entries elsewhere.
    fn reads(&self, step: &Step, selection: &Selection, reads: &mut Reads) {
        let active = || self.heads.iter().filter(|head| !head.bypassed);
        active().for_each(|head| head.touched.iter().for_each(|table| table.add_to(reads)));
        if self.heads.iter().any(|head| head.constants.is_tested) {
            reads.array(size_of_val(&self.mean.keys[..]));
            reads.array(size_of_val(&self.mean.values[..]));
        }
        reads.ranked(selection);
        if active().count() > 0 {
            // A bit per candidate for each query head and for their union, and the list of the union.
            reads.scratch(8 * step.candidates.len().div_ceil(64) * (active().count() + 1));
            reads.scratch(4 * (selection.ranked.len() + selection.positions.len()));
        }
        // Unless the budget covers the union, a score with its position for each head that wants the key.
        if active().count() > 0 && !selection.ranked.is_empty() {
            reads.scratch(self.wanted * size_of::<(f32, u32)>());
        }
    }

    fn observes(&self, _: &Step) -> bool {
        true
    }

    fn observe(&mut self, step: &Step, positions: &[u32], weights: ArrayView2<f32>) {
        let rest = self.rest(&step.visible);
        let first = positions.partition_point(|p| (*p as usize) < rest.start);
        for (head, weights) in self.heads.iter_mut().zip(weights.rows()) {
            let weights = weights.iter().skip(first).map(|w| f64::from(*w));
            let sum: f64 = weights.clone().sum();
            if head.bypassed || sum <= 0.0 {
                continue;
            }
            let entries = positions[first..].iter().map(|p| *p as usize);
            head.update(step.visible.end - 1, entries.zip(weights.map(|w| w / sum)));
        }
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        self.heads.len() * 2 * Table::bytes_for(positions)
    }

    fn state_bytes(&self) -> usize {
        let of = |h: &QueryHead| h.vertical.bytes() + h.slash.bytes();
        self.heads.iter().map(of).sum()
    }
}
