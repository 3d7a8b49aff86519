//! Quest: pages of 16 keys, ranked by an upper bound of their scores, arXiv 2406.10774.
//!
//! A page keeps the smallest and the largest value of each channel of its rotated keys; the score of a
//! query with any of these keys is at most the sum over channels of the larger product. Pages are ranked
//! by the sum of their bounds over the query group, and whole pages are chosen.
//!
//! Pages stay whole, so that a step may choose fewer positions than its budget: up to 15 fewer where the budget is no
//! multiple of 16, none at all with a budget below 16, and as many fewer as sinks and window take from the chosen pages
//! at either end of the candidates.
//!
//! Where we differ from the paper: it ranks per query head, we rank per KV head, so that the budget
//! bounds the keys that are read.

use std::ops::Range;

use ndarray::{ArrayView1, Axis};

use super::best::best_positions;
use super::declaration::Declaration;
use super::{Choice, Place, Prompt, Reads, Retriever, Step, everything};
use crate::kv::KvHead;
use crate::kv::lines::grow;

/// The declaration of `quest`.
pub static METHOD: Declaration = Declaration {
    name: "quest",
    help: "Pages of 16 keys by an upper bound of their scores (Quest, arXiv 2406.10774)",
    section: None,
    prepare: |_| Ok(Box::new(|_: &Place| Quest::default())),
    bench: None,
};

/// Positions per page; pages start at multiples of this.
pub const PAGE: usize = 16;

/// The page bounds of one KV head.
#[derive(Clone, Default)]
pub struct Quest {
    d: usize,
    /// For each page the d smallest values, then the d largest.
    bounds: Vec<f32>,
    /// Positions that the bounds cover.
    len: usize,
}

impl Quest {
    /// Extends the bounds to the end of the cache.
    fn update(&mut self, kv: &KvHead, d: usize) {
        self.d = d;
        let mut scratch = vec![0.0; d];
        for position in self.len..kv.len() {
            let key = kv.keys().row(position, &mut scratch);
            if position.is_multiple_of(PAGE) {
                let bounds = grow(&mut self.bounds, 2 * d);
                bounds.extend_from_slice(key);
                bounds.extend_from_slice(key);
                continue;
            }
            let start = self.bounds.len() - 2 * d;
            let (low, high) = self.bounds[start..].split_at_mut(d);
            for ((low, high), k) in low.iter_mut().zip(high).zip(key) {
                *low = low.min(*k);
                *high = high.max(*k);
            }
        }
        self.len = kv.len();
    }

    /// Returns the bound of a query's scores with a page: the sum over channels of max(q low, q high).
    fn bound(&self, page: usize, query: ArrayView1<f32>) -> f32 {
        let (low, high) = self.bounds[2 * page * self.d..2 * (page + 1) * self.d].split_at(self.d);
        let channels = query.iter().zip(low).zip(high);
        channels.map(|((q, low), high)| (q * low).max(q * high)).sum()
    }
}

impl Retriever for Quest {
    fn prefill(&mut self, prompt: &Prompt) {
        // A prompt may change which rows a 2-bit cache keeps in half precision.
        if prompt.kv.signs().is_some() {
            self.bounds.clear();
            self.len = 0;
        }
        self.update(prompt.kv, prompt.k_pre.ncols());
    }

    fn select(&mut self, step: &Step) -> Choice {
        self.update(step.kv, step.q_rope.ncols());
        let candidates = step.candidates.clone();
        if step.is_exact() {
            return everything(step).into();
        }
        let pages = candidates.start / PAGE..candidates.end.div_ceil(PAGE);
        let queries = step.q_rope.axis_iter(Axis(0));
        let bound = |page| -> f32 { queries.clone().map(|q| self.bound(page, q)).sum() };
        let ranked: Vec<(f32, u32)> = pages.map(|page| (bound(page), page as u32)).collect();
        let pages = best_positions(ranked, step.budget / PAGE).into_iter();
        let inside = pages.flat_map(|page| inside(page as usize, &candidates));
        inside.collect::<Vec<_>>().into()
    }

    fn reads(&self, step: &Step, _: &Choice) -> Reads {
        let c = &step.candidates;
        let pages = c.end.div_ceil(PAGE) - c.start / PAGE;
        Reads::index(2 * 4 * self.d * pages)
    }

    fn state_bytes(&self) -> usize {
        self.bounds.capacity() * 4
    }
}

/// Returns the candidates within a page.
fn inside(page: usize, candidates: &Range<usize>) -> Range<u32> {
    let start = (page * PAGE).max(candidates.start);
    let end = ((page + 1) * PAGE).min(candidates.end);
    start as u32..end as u32
}
