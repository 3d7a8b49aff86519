//! TriAttention as a ranking: keys scored by a head's mean query at future distances, arXiv 2604.04921.
//!
//! Calibration: queries before rotation are close to a mean that depends on the head alone. For each query head and pair
//! of channels, taken as a complex number, the section has the mean of the queries and the mean of their magnitudes.
//!
//! Decoding: a key is scored with the mean query at the distances that it will have from queries 1, 2, 4, ... 65,536
//! positions after the current one, plus a part that grows with the magnitudes of the key where queries are far from
//! their mean. The score depends on the key and the distance alone, not on the query of a step. Each query head's scores
//! are normalised to mean 0 and deviation 1, and a key has the largest of its query heads' scores.
//!
//! Scores are computed after a prompt, from all keys that are visible then except the sinks, and again in the first step
//! that finds 128 or more positions added since; in between, the order stays. A step takes the best candidates in this
//! order. Candidates that were added after the order was made come before all others, the last of them first.
//!
//! Where we differ from the paper: it evicts, for good, what does not fit its budget whenever 128 tokens were generated;
//! here nothing is evicted, a key may come back when scores are computed again, and the budget is that of all methods. It
//! keeps the tokens generated since in addition to its budget; here they count. The authors' code measures distances
//! from the position after the last one; here, from the last one, so that the offset 1 is the next query. It never
//! evicts prompts by default; here they are ranked like everything else.

mod fit;
mod section;
mod series;

use std::sync::Arc;

use ndarray::{Array2, ArrayView2, s};

use super::declaration::{Ask, Declaration, InVerdict};
use super::{Method, Place, Prompt, Reads, Retriever, Selection, Step, everything, except};
use crate::artifact::Artifact;
use crate::compute::attention::visible;
use crate::error::{Error, Result};
use crate::model::rope::Ropes;
pub use section::{Q_ABS, Q_MEAN, SECTION, TriAttentionSection};
use series::largest_normalised;
pub use series::{MeanQueries, OFFSETS};

/// The declaration of `triattention`.
pub static METHOD: Declaration = Declaration {
    name: "triattention",
    help: "Positions ranked by the attention of the head's mean query at future distances (TriAttention, arXiv 2604.04921)",
    section: Some(SECTION),
    verdict: InVerdict::IfCalibrated,
    prepare,
    bench: None,
};

/// Positions that are added before scores are computed again.
///
/// # Source
/// The paper's interval between two evictions.
pub const ROUND: usize = 128;

fn prepare(ask: &Ask) -> Result<Box<dyn Method>> {
    let with = ask.artifact.filter(|artifact| artifact.has(SECTION));
    let artifact = with.ok_or_else(|| {
        Error::usage("⟨method=triattention⟩ needs ⟨artifact⟩ with the section `triattention`").hint(
            "make an artifact with `kvsmith calibrate ⟨peers⟩ ⟨model=DIR⟩ ⟨text=FILE⟩ ⟨output=ART.safetensors⟩`",
        )
    })?;
    Ok(Box::new(AllMeanQueries::load(artifact, ask.ropes)?))
}

/// The mean queries of every head.
struct AllMeanQueries {
    n_kv_heads: usize,
    heads: Vec<Arc<MeanQueries>>,
}

impl AllMeanQueries {
    /// Reads the section, and checks its digests and values.
    fn load(artifact: &Artifact, ropes: &Ropes) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let (means, magnitudes) = (section.read::<f32>(Q_MEAN)?, section.read::<f32>(Q_ABS)?);
        let sizes = artifact.sizes;
        let values = sizes.group() * sizes.head_dim / 2;
        let heads = means
            .chunks_exact(2 * values)
            .zip(magnitudes.chunks_exact(values));
        Ok(Self {
            n_kv_heads: sizes.n_kv_heads,
            heads: heads
                .enumerate()
                .map(|(i, (mean, abs))| {
                    Arc::new(MeanQueries::new(mean, abs, ropes.layer(i / sizes.n_kv_heads)))
                })
                .collect(),
        })
    }
}

impl Method for AllMeanQueries {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        let queries = &self.heads[place.layer * self.n_kv_heads + place.kv_head];
        Box::new(TriAttention::new(place, Arc::clone(queries)))
    }
}

/// The order of the positions of one KV head.
#[derive(Clone)]
pub struct TriAttention {
    place: Place,
    queries: Arc<MeanQueries>,
    /// The positions that were scored, by falling score.
    order: Vec<u32>,
    /// Number of cached positions when they were scored.
    scored: usize,
}

impl TriAttention {
    /// Makes an empty head.
    pub fn new(place: &Place, queries: Arc<MeanQueries>) -> Self {
        Self {
            place: *place,
            queries,
            order: Vec::new(),
            scored: 0,
        }
    }

    /// Returns the first position that is scored when `n` are cached.
    fn first(&self, n: usize) -> usize {
        let seen = visible(n - 1, self.place.limits.model_window);
        seen.start.max(self.place.limits.sinks).min(n)
    }

    /// Orders the last positions of `n` by the scores of their keys, `[m,d]`. The lower position wins a tie.
    fn score(&mut self, n: usize, keys: ArrayView2<f32>) {
        let scores = largest_normalised(&self.queries.scores(keys, n - 1));
        let mut places: Vec<usize> = (0..scores.len()).collect();
        places.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        let first = n - scores.len();
        self.order = places.into_iter().map(|place| (first + place) as u32).collect();
        self.scored = n;
    }

    /// Computes the scores from the cached keys if enough positions were added since they were computed last.
    fn update(&mut self, step: &Step) {
        let n = step.visible.end;
        if n - self.scored < ROUND {
            return;
        }
        let first = self.first(n);
        let mut keys = Array2::zeros((n - first, self.place.head_dim));
        let mut scratch = vec![0.0; self.place.head_dim];
        for (position, mut key) in (first..n).zip(keys.outer_iter_mut()) {
            let cached = step.kv.keys().row(position, &mut scratch);
            key.iter_mut().zip(cached).for_each(|(to, x)| *to = *x);
        }
        self.score(n, keys.view());
    }

    /// Returns the best candidates, ascending, and how many entries of the order were read to find them.
    fn best(&self, step: &Step) -> (Vec<u32>, usize) {
        let c = &step.candidates;
        let new = self.scored.clamp(c.start, c.end)..c.end;
        let new = new.start.max(new.end.saturating_sub(step.budget))..new.end;
        let need = step.budget - new.len();
        let (mut chosen, mut read) = (Vec::with_capacity(step.budget), 0);
        for position in &self.order {
            if chosen.len() == need {
                break;
            }
            read += 1;
            if c.contains(&(*position as usize)) {
                chosen.push(*position);
            }
        }
        chosen.sort_unstable();
        chosen.extend(new.map(|position| position as u32));
        (chosen, read)
    }

    /// Tells whether the scores were computed in this step.
    fn scored_in(&self, step: &Step) -> bool {
        self.scored == step.visible.end
    }
}

impl Retriever for TriAttention {
    fn prefill(&mut self, prompt: &Prompt) {
        let n = prompt.keys.nrows();
        let first = self.first(n);
        self.score(n, prompt.keys.slice(s![first.., ..]));
    }

    fn select(&mut self, step: &Step) -> Selection {
        self.update(step);
        if step.is_exact() {
            return everything(step).into();
        }
        let (positions, _) = self.best(step);
        let ranked = if self.scored_in(step) {
            except(&everything(step), &positions)
        } else {
            Vec::new()
        };
        Selection {
            positions,
            ranked,
            ..Selection::default()
        }
    }

    fn reads(&self, step: &Step, selection: &Selection, reads: &mut Reads) {
        let (_, read) = self.best(step);
        reads.array(read * size_of::<u32>());
        if self.scored_in(step) {
            let (n, r, d) = (self.order.len(), self.place.group, self.place.head_dim);
            reads.array_held(self.queries.bytes(), self.queries.held_bytes());
            reads.keys += n;
            reads.unattended_keys += selection.ranked.len();
            // The keys, the scores of every query head, the largest of these, and the places that are sorted.
            reads.scratch(n * (d * size_of::<f32>() + (r + 1) * size_of::<f64>() + size_of::<usize>()));
        }
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        size_of::<u32>() * (positions - self.first(positions.max(1)).min(positions))
    }

    fn state_bytes(&self) -> usize {
        self.order.capacity() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::packed::Center;
    use crate::kv::{Budget, KvHead, KvType, Limits, StaticSet};
    use crate::model::rope::{Rope, RopeConfig, RopeScaling};
    use crate::testing::values;

    /// Every 128 steps, all keys; in between, the numbers of positions as far as they are needed.
    #[test]
    fn a_round_reads_all_keys_once() {
        let (r, d, n, budget) = (2, 8, 200, 20);
        let place = Place {
            layer: 0,
            kv_head: 0,
            group: r,
            head_dim: d,
            limits: Limits {
                window: 16,
                ..Limits::new(Budget::Count(budget))
            },
            kv: KvType::F32,
        };
        let config = RopeConfig {
            theta: 1e4,
            scaling: RopeScaling::Default,
        };
        let (mean, abs) = (values(r * d, 1), vec![2.0; r * d / 2]);
        let queries = Arc::new(MeanQueries::new(&mean, &abs, &Rope::new(&config, d)));
        let keys = Array2::from_shape_vec((n + 300, d), values((n + 300) * d, 2)).unwrap();
        let prompt = keys.slice(s![..n, ..]);
        let mut kv = KvHead::new(KvType::F32, d, n, Center::Median);
        kv.extend(prompt, prompt);
        let mut head = TriAttention::new(&place, queries);
        let q = Array2::zeros((r, d));
        head.prefill(&Prompt {
            first: 0,
            k_pre: prompt,
            q_rope: prompt.insert_axis(ndarray::Axis(0)),
            keys: prompt,
            values: prompt,
            kv: &kv,
        });
        let mut rounds = 0;
        for t in n..n + 300 {
            let key = keys.slice(s![t..t + 1, ..]);
            kv.extend(key, key);
            let set = StaticSet::at(t, None, 4, 16);
            let step = Step {
                step: t - n,
                visible: set.visible(),
                candidates: set.candidates.clone(),
                budget,
                q_pre: q.view(),
                q_rope: q.view(),
                kv: &kv,
            };
            let selection = head.select(&step);
            let mut reads = Reads::new(64);
            head.reads(&step, &selection, &mut reads);
            let is_due = (t + 1 - n).is_multiple_of(ROUND);
            rounds += usize::from(is_due);
            let place = |p: &u32| head.order.iter().position(|q| p == q);
            let last = selection.positions.iter().filter_map(place).max();
            let tables = if is_due { 6 * r * d } else { 0 };
            let order = 4 * last.map_or(0, |last| last + 1);
            assert_eq!(reads.index_bytes, Some(order + tables));
            let held = order.next_multiple_of(64) + (2 * tables).next_multiple_of(64);
            assert_eq!(reads.moved_bytes, Some(held));
            let left = step.candidates.len() - budget;
            let (keys, unattended) = if is_due { (t + 1 - 4, left) } else { (0, 0) };
            assert_eq!((reads.keys, reads.unattended_keys), (keys, unattended));
            assert_eq!(selection.ranked.len(), unattended);
            assert_eq!(selection.positions.len(), budget);
        }
        assert_eq!(rounds, 2);
    }
}
