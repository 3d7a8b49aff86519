//! The centroids of a prompt: chosen queries, and the positions with the largest weights over all that those see.

use std::ops::Range;

use super::{Ctkvr, PIECE};
use crate::compute::attention::visible;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::cuda::attend::LayerRows;
use crate::kv::cuda::{Limits, Positions, Shape};
use crate::method::topk::cuda::{BestByWeight, Weighed};

/// Scores that are held at once, at most, where one query has no more; and queries.
const MOST_SCORES: usize = 1 << 26;
const MOST_QUERIES: usize = 32;

/// Where the lists of one prompt of one sequence are built, for all layers.
pub struct Lists<'d> {
    sequence: usize,
    prompt: Range<usize>,
    /// Queries that are worked on at once, n.
    at_once: usize,
    /// `[n]`: their rows, and `[n,h,d]`.
    at: Buffer<'d, u32>,
    queries: Buffer<'d, f32>,
    /// `[n,4]` and `[n]`: what each sees and may list, and how much it lists.
    spans: Buffer<'d, u32>,
    wants: Buffer<'d, u32>,
    /// Every query is a sequence.
    weights: BestByWeight<'d>,
}

impl<'d> Lists<'d> {
    /// For the positions `prompt` of a sequence; `like` is the index of one of the layers.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        driver: &'d dyn Driver,
        like: &Ctkvr<'_>,
        sequence: usize,
        prompt: Range<usize>,
    ) -> Result<Self> {
        let shape = &like.shape;
        let (h, capacity) = (shape.kv_heads * shape.group, shape.capacity);
        let at_once = (MOST_SCORES / (h * capacity)).clamp(1, MOST_QUERIES);
        let shape = Shape {
            sequences: at_once,
            ..*shape
        };
        // Layers with a sliding window have no longer ones.
        let longest = like.space.sizes.list_len(capacity).max(1);
        Ok(Self {
            sequence,
            prompt,
            at_once,
            at: Buffer::new(driver, "rows of queries", at_once)?,
            queries: Buffer::new(driver, "queries", at_once * h * shape.head_dim)?,
            spans: Buffer::new(driver, "spans", at_once * 4)?,
            wants: Buffer::new(driver, "lengths of lists", at_once)?,
            weights: BestByWeight::new(driver, shape, longest)?,
        })
    }

    /// What the query at position `p` sees and may list: the first visible position, how many before the first listed
    /// one, the end of what is listed, the end.
    fn span(&self, p: usize, limits: &Limits) -> [u32; 4] {
        let own = visible(p, limits.model_window);
        let start = own.start.max(limits.sinks).min(own.end);
        let end = own.end.min(self.prompt.end.saturating_sub(limits.window));
        [own.start, start - own.start, end.max(start), own.end].map(|n| n as u32)
    }
}

impl Ctkvr<'_> {
    /// Whether a prompt's queries become centroids.
    fn takes(&self, lists: &Lists<'_>) -> bool {
        lists.prompt.start == 0 || !self.space.sizes.params.ct_keep
    }

    /// Takes in rotated queries `[h,m,d]`, those of the last `m` positions of a part of the prompt; `rows` hold what they
    /// see. After the last part, [`Ctkvr::end_of_prompt`].
    ///
    /// # Numerics
    /// f32; the lower position on ties.
    ///
    /// # Source
    /// Algorithm 1.
    pub fn extend(
        &self,
        queries: &Buffer<'_, f32>,
        m: usize,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        lists: &Lists<'_>,
    ) -> Result<()> {
        if !self.takes(lists) {
            return Ok(());
        }
        let prompt = &lists.prompt;
        let chosen = self.space.sizes.centroid_rows(prompt.len(), prompt.end);
        let end = positions.known().get(lists.sequence).copied().unwrap_or(0);
        let part = end.saturating_sub(m)..end;
        let is_here = |i: &usize| part.contains(&(prompt.start + chosen[*i]));
        let numbers: Vec<usize> = (0..chosen.len()).filter(is_here).collect();
        if numbers.is_empty() {
            return Ok(());
        }
        let [oldest, count] = self.ring_of(lists)?;
        for numbers in numbers.chunks(lists.at_once) {
            let places: Vec<usize> = numbers.iter().map(|i| prompt.start + chosen[*i]).collect();
            let slot = (oldest + count + numbers[0]) % self.space.slots;
            self.take_queries(queries, &places, [part.start, m, slot], lists)?;
            self.list(rows, lists)?;
            self.keep_lists(places.len(), slot, lists)?;
        }
        Ok(())
    }

    /// The slot of the oldest centroid and how many there are, before the prompt.
    fn ring_of(&self, lists: &Lists<'_>) -> Result<[usize; 2]> {
        if lists.prompt.start == 0 {
            return Ok([0, 0]);
        }
        let state = self.ring.read_part(4 * lists.sequence, 2)?;
        Ok([state[0] as usize, state[1] as usize])
    }

    /// The queries at `places`, their spans, and the centroids in the slots from `slot` on.
    fn take_queries(
        &self,
        queries: &Buffer<'_, f32>,
        places: &[usize],
        [first, m, slot]: [usize; 3],
        lists: &Lists<'_>,
    ) -> Result<()> {
        let (shape, slots) = (&self.shape, self.space.slots);
        let at: Vec<u32> = places.iter().map(|p| (p - first) as u32).collect();
        lists.at.write(&at)?;
        // What is not there sees nothing.
        let mut spans = vec![[0; 4]; lists.at_once];
        let mut wants = vec![1; lists.at_once];
        for ((span, want), p) in spans.iter_mut().zip(&mut wants).zip(places) {
            *span = lists.span(*p, &self.limits);
            *want = self.space.sizes.list_len((span[3] - span[0]) as usize) as u32;
        }
        lists.spans.write(spans.as_flattened())?;
        lists.wants.write(&wants)?;
        let values = shape.kv_heads * slots * shape.group * shape.head_dim;
        let grid = [places.len(), shape.kv_heads, 1];
        kernels::TakeQueries {
            queries: queries.ptr(),
            at: lists.at.ptr(),
            out: lists.queries.ptr(),
            centroids: self.centroids.ptr_at(lists.sequence * values),
            slot,
            m,
            r: shape.group,
            d: shape.head_dim,
            slots,
        }
        .launch(self.driver, grid, self.query_bytes())
    }

    /// The lists of the queries that were taken.
    fn list(&self, rows: &LayerRows<'_>, lists: &Lists<'_>) -> Result<()> {
        let best = &lists.weights.best;
        let head_bytes = rows.shape.capacity * rows.bytes_per_position() / 2;
        let first = lists.sequence * self.shape.kv_heads * head_bytes;
        lists.weights.rank(&Weighed {
            queries: lists.queries.ptr(),
            keys: rows.keys.ptr_at(first).cast(),
            items: None,
            spans: lists.spans.ptr(),
            rows,
            share_rows: true,
            by_largest: true,
        })?;
        let to = [best.selection.lists.ptr(), best.selection.listed.ptr()];
        best.choose_into(lists.spans.ptr(), lists.wants.ptr(), to, self.space.longest)
    }

    /// The first `n` of them go into the slots from `slot` on.
    fn keep_lists(&self, n: usize, slot: usize, lists: &Lists<'_>) -> Result<()> {
        let (space, from) = (&self.space, &lists.weights.best.selection);
        let slots = lists.sequence * self.shape.kv_heads * space.slots;
        let grid = [space.longest.div_ceil(PIECE), self.shape.kv_heads, n];
        kernels::KeepLists {
            chosen: from.lists.ptr(),
            chosen_count: from.listed.ptr(),
            lists: self.lists.ptr_at(slots * space.longest),
            lens: self.lens.ptr_at(slots),
            slot,
            slots: space.slots,
            longest: space.longest,
        }
        .launch(self.driver, grid)
    }

    /// The queries that were taken in are centroids from here on, and the oldest go; waits for the device.
    pub fn end_of_prompt(&self, lists: &Lists<'_>) -> Result<()> {
        if !self.takes(lists) {
            return Ok(());
        }
        let (prompt, slots) = (&lists.prompt, self.space.slots);
        let sizes = &self.space.sizes;
        let new = sizes.centroid_rows(prompt.len(), prompt.end).len();
        let most = sizes.capacity(prompt.end);
        let ring = self.ring.part(4 * lists.sequence, 4);
        let [oldest, count] = self.ring_of(lists)?;
        let mut state = ring.read()?;
        let held = (count + new).min(most);
        state[0] = ((oldest + count + new - held) % slots) as u32;
        state[1] = held as u32;
        // A short later prompt leaves what the older centroids have not seen to the fresh positions.
        if prompt.start == 0 || prompt.len() >= most {
            state[2] = prompt.end.saturating_sub(self.limits.window) as u32;
        }
        ring.write(&state)
    }
}
