//! SnapKV: a choice made once, by the attention of the last prompt queries, arXiv 2404.14469.
//!
//! After prefill, every prompt position has a vote: its softmax weights, summed over the last 32 queries and over the
//! query group, and then averaged over 7 neighbouring positions. The best positions are chosen at the first decode step
//! and kept until the next prompt. Generated tokens are attended only while they are in the window.

use super::declaration::{Declaration, InVerdict};
use super::{Place, Prompt, Reads, Retriever, Selection, Step, everything};
use crate::compute::simd;

/// The declaration of `snapkv`.
pub static METHOD: Declaration = Declaration {
    name: "snapkv",
    help: "Positions that the last prompt queries attended most, chosen once after prefill (SnapKV, arXiv 2404.14469)",
    section: None,
    verdict: InVerdict::IfCalibrated,
    prepare: |_| Ok(Box::new(|place: &Place| SnapKv::new(place.limits.model_window))),
    bench: None,
};

/// How many last prompt queries vote.
pub const QUERIES: usize = 32;
/// How many neighbouring positions are averaged.
pub const POOL: usize = 7;

/// The choice of one KV head.
#[derive(Clone)]
pub struct SnapKv {
    window: Option<usize>,
    /// The pooled vote of each prompt position.
    votes: Vec<f32>,
    chosen: Option<Vec<u32>>,
}

impl SnapKv {
    /// Makes an empty head of a layer with this sliding window.
    pub fn new(window: Option<usize>) -> Self {
        Self {
            window,
            votes: Vec::new(),
            chosen: None,
        }
    }
}

impl Retriever for SnapKv {
    fn prefill(&mut self, prompt: &Prompt) {
        let (r, m, _) = prompt.q_rope.dim();
        let mut votes = vec![0.0f32; prompt.keys.nrows()];
        for i in m.saturating_sub(QUERIES)..m {
            for a in 0..r {
                let (seen, weights) = prompt.weights(a, i, self.window);
                simd::axpy(1.0, &weights, &mut votes[seen]);
            }
        }
        self.chosen = None;
        self.votes = pooled(&votes);
    }

    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let votes = &self.votes;
        let chosen = self.chosen.get_or_insert_with(|| {
            // Positions that were generated before the choice have no votes.
            let vote = |p: u32| votes.get(p as usize).copied().unwrap_or(0.0);
            let mut order: Vec<u32> = step.candidates.clone().map(|p| p as u32).collect();
            order.sort_unstable_by(|a, b| vote(*b).total_cmp(&vote(*a)).then(a.cmp(b)));
            order.truncate(step.budget);
            order.sort_unstable();
            order
        });
        let visible = |p: &u32| step.candidates.contains(&(*p as usize));
        chosen.iter().copied().filter(visible).collect::<Vec<_>>().into()
    }

    fn reads(&self, _: &Step, selection: &Selection, reads: &mut Reads) {
        reads.array(4 * selection.positions.len());
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        // A vote for every position, and a list that is cut from all of them.
        (size_of::<f32>() + size_of::<u32>()) * positions
    }

    fn state_bytes(&self) -> usize {
        self.votes.capacity() * 4 + self.chosen.as_ref().map_or(0, |c| c.capacity() * 4)
    }
}

/// Averages over the `POOL` positions around each position; votes beyond the ends count as zero.
fn pooled(votes: &[f32]) -> Vec<f32> {
    (0..votes.len())
        .map(|i| {
            let around = i.saturating_sub(POOL / 2)..(i + POOL / 2 + 1).min(votes.len());
            votes[around].iter().sum::<f32>() / POOL as f32
        })
        .collect()
}
