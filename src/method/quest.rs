//! Quest: pages of keys, ranked by an upper bound of their scores, arXiv 2406.10774.
//!
//! A page keeps the smallest and the largest value of each channel of its rotated keys. The score of a query with any
//! key of the page is at most the sum over channels of the larger of the query's products with these two values. Pages
//! are ranked by the sum of their bounds over the query group, and whole pages are chosen. A page has 16 keys, as in the
//! paper, or 32 or 64, whose bounds are looser and take fewer bytes.
//!
//! Pages stay whole, so a step may choose fewer positions than its budget: the remainder of the budget by the page,
//! none at all if the budget is below a page, and, where a chosen page reaches into the sinks or the window, fewer by
//! the positions it shares with them.
//!
//! Where we differ from the paper: it ranks per query head; we rank per KV head, so that the budget bounds the keys
//! that are read.

pub mod params;

use std::ops::Range;

use ndarray::{Array2, ArrayView1, ArrayView2};

use super::best::best_positions;
use super::declaration::{Declaration, InVerdict};
use super::{Place, Prompt, Reads, Retriever, Selection, Step, everything};
use crate::compute::layout::elements;
use crate::float::Float;
use crate::kv::{KvHead, RowCache, float};
pub use params::{PAGE, QuestParams};

/// The declaration of `quest`.
pub static METHOD: Declaration = Declaration {
    name: "quest",
    help: "Whole pages of positions, ranked by an upper bound on their scores (Quest, arXiv 2406.10774)",
    section: None,
    verdict: InVerdict::IfCalibrated,
    prepare: |ask| {
        let QuestParams { page } = ask.params.quest;
        Ok(Box::new(move |_: &Place| Quest::new(page)))
    },
    bench: None,
};

/// The page bounds of one KV head.
#[derive(Clone)]
pub struct Quest {
    /// Positions per page; pages start at multiples of this.
    page: usize,
    /// For each full page, the smallest value of every channel, then the largest. They are stored in the type of the
    /// cached rows, in which they are exact, or in f32 if that is no float type.
    full: Option<Box<dyn RowCache>>,
    /// The bounds of the last page while it is not full, `[2,d]`.
    last: Array2<f32>,
    /// Number of positions that the bounds cover.
    len: usize,
}

/// Returns the type in which the bounds are stored.
fn float_of(kv: &KvHead) -> Float {
    kv.kind().keys.float().unwrap_or(Float::F32)
}

impl Default for Quest {
    /// Makes an empty head with pages of [`PAGE`] positions.
    fn default() -> Self {
        Self::new(PAGE)
    }
}

impl Quest {
    /// Makes an empty head with pages of `page` positions.
    pub fn new(page: usize) -> Self {
        Self {
            page,
            full: None,
            last: Array2::default((0, 0)),
            len: 0,
        }
    }

    /// Returns the pages in which candidates lie.
    fn pages(&self, candidates: &Range<usize>) -> Range<usize> {
        candidates.start / self.page..candidates.end.div_ceil(self.page)
    }

    /// Returns the candidates that lie within a page.
    fn inside(&self, page: usize, candidates: &Range<usize>) -> Range<u32> {
        let start = (page * self.page).max(candidates.start);
        let end = ((page + 1) * self.page).min(candidates.end);
        start as u32..end as u32
    }

    /// Extends the bounds up to the end of the cache.
    fn update(&mut self, kv: &KvHead, d: usize) {
        let full = self.full.get_or_insert_with(|| float::cache(float_of(kv), d, 0));
        let mut scratch = vec![0.0; d];
        for position in self.len..kv.len() {
            let key = kv.keys().row(position, &mut scratch);
            if position.is_multiple_of(self.page) {
                self.last = Array2::from_shape_fn((2, d), |(_, channel)| key[channel]);
            }
            for (mut bounds, k) in self.last.columns_mut().into_iter().zip(key) {
                bounds[0] = bounds[0].min(*k);
                bounds[1] = bounds[1].max(*k);
            }
            if (position + 1).is_multiple_of(self.page) {
                full.extend(self.last.view());
            }
        }
        self.len = kv.len();
    }

    /// Returns the bound of the scores of queries `[r,d]` with a page, summed over the queries. A query's bound is the
    /// sum over channels of max(q low, q high). `scratch` has space for both rows of a page's bounds.
    fn bound(&self, page: usize, queries: ArrayView2<f32>, scratch: &mut [f32]) -> f32 {
        let (low, high) = scratch.split_at_mut(queries.ncols());
        let (low, high) = match &self.full {
            Some(full) if 2 * page < full.len() => (full.row(2 * page, low), full.row(2 * page + 1, high)),
            _ => elements(&self.last).split_at(queries.ncols()),
        };
        let of = |query: ArrayView1<f32>| -> f32 {
            let channels = query.into_iter().zip(low).zip(high);
            channels.map(|((q, low), high)| (q * low).max(q * high)).sum()
        };
        queries.outer_iter().map(of).sum()
    }
}

impl Retriever for Quest {
    fn prefill(&mut self, prompt: &Prompt) {
        // A prompt may change which rows a 2-bit cache keeps as full-precision tokens, so the bounds start anew.
        if !prompt.kv.kind().keys.keeps_rows() {
            *self = Self::new(self.page);
        }
        self.update(prompt.kv, prompt.k_pre.ncols());
    }

    fn select(&mut self, step: &Step) -> Selection {
        self.update(step.kv, step.q_rope.ncols());
        let candidates = step.candidates.clone();
        if step.is_exact() {
            return everything(step).into();
        }
        let pages = self.pages(&candidates);
        let mut scratch = vec![0.0; 2 * step.q_rope.ncols()];
        let bounds = pages.map(|page| (self.bound(page, step.q_rope, &mut scratch), page as u32));
        let ranked: Vec<(f32, u32)> = bounds.collect();
        let pages = best_positions(ranked, step.budget / self.page).into_iter();
        let inside = pages.flat_map(|page| self.inside(page as usize, &candidates));
        inside.collect::<Vec<_>>().into()
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let pages = self.pages(&step.candidates);
        let width = 2 * float_of(step.kv).bytes() * step.q_rope.ncols();
        reads.range(pages.start * width..pages.end * width);
        reads.scratch(pages.len() * size_of::<(f32, u32)>());
    }

    fn bytes_for(&self, place: &Place, positions: usize) -> usize {
        let value = place.kv.keys.float().unwrap_or(Float::F32).bytes();
        2 * value * place.head_dim * positions.div_ceil(self.page)
    }

    fn state_bytes(&self) -> usize {
        self.full.as_ref().map_or(0, |full| full.bytes()) + self.last.len() * 4
    }
}
