//! The centroids of a prompt: chosen queries, and for each a list of the visible positions with the largest weights.

use std::ops::Range;

use super::{Ctkvr, PIECE};
use crate::compute::attention::visible;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::Limits;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::{Positions, Shape};
use crate::method::topk::cuda::{BestByWeight, Weighed};

/// The most scores that are held at once, unless a single query has more; `MOST_QUERIES` is the most queries.
const MOST_SCORES: usize = 1 << 26;
const MOST_QUERIES: usize = 32;

/// The buffers that build the lists of a sequence's prompt; all layers share them.
pub struct Lists<'d> {
    sequence: usize,
    prompt: Range<usize>,
    /// The number of queries per pass, n.
    at_once: usize,
    /// The rows of the queries in the prompt, `[n]`.
    at: Buffer<'d, u32>,
    /// The queries, `[n,h,d]`.
    queries: Buffer<'d, f32>,
    /// The positions that each query sees and may list, `[n,4]`: see `span`.
    spans: Buffer<'d, u32>,
    /// The length of each query's list, `[n]`.
    wants: Buffer<'d, u32>,
    /// Ranks the positions; each query counts as a sequence.
    weights: BestByWeight<'d>,
}

impl<'d> Lists<'d> {
    /// Allocates the buffers for the positions `prompt` of a sequence; `like` is the index of any one layer.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(like: &Ctkvr<'d>, sequence: usize, prompt: Range<usize>) -> Result<Self> {
        let (driver, shape) = (like.driver, &like.shape);
        let (h, capacity) = (shape.kv_heads * shape.group, shape.capacity);
        let at_once = (MOST_SCORES / (h * capacity)).clamp(1, MOST_QUERIES);
        let shape = Shape {
            sequences: at_once,
            ..*shape
        };
        // Lists in layers with a sliding window are no longer than this.
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

    /// Returns, for the query at position `p`: the first visible position, the number of visible positions before the
    /// first one that may be listed, the end of the positions that may be listed, and the end of the visible positions.
    fn span(&self, p: usize, limits: &Limits) -> [u32; 4] {
        let own = visible(p, limits.model_window);
        let start = own.start.max(limits.sinks).min(own.end);
        let end = own.end.min(self.prompt.end.saturating_sub(limits.window));
        [own.start, start - own.start, end.max(start), own.end].map(|n| n as u32)
    }
}

impl Ctkvr<'_> {
    /// Returns whether the prompt's queries become centroids.
    fn takes(&self, lists: &Lists<'_>) -> bool {
        lists.prompt.start == 0 || !self.space.sizes.params.ct_keep
    }

    /// Adds the rotated queries `[h,m,d]` of the last `m` positions; `rows` must hold all positions that they see.
    /// After the last queries, [`Ctkvr::end_of_prompt`] must follow.
    ///
    /// # Numerics
    /// f32; the lower position wins a tie.
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

    /// Returns the slot of the oldest centroid and the number of centroids, both before the prompt.
    fn ring_of(&self, lists: &Lists<'_>) -> Result<[usize; 2]> {
        if lists.prompt.start == 0 {
            return Ok([0, 0]);
        }
        let state = self.ring.read_part(4 * lists.sequence, 2)?;
        Ok([state[0] as usize, state[1] as usize])
    }

    /// Copies the queries at `places` and their spans, and stores the queries as centroids in the slots from `slot` on.
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
        // Unused entries have a span in which nothing is visible.
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

    /// Builds the lists of the copied queries.
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

    /// Stores the first `n` lists in the slots from `slot` on.
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

    /// Makes the added queries count as centroids, and drops the oldest beyond the capacity; waits for the device.
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
        // After a later prompt that is too short to replace all centroids, the positions that the older centroids'
        // lists lack stay fresh.
        if prompt.start == 0 || prompt.len() >= most {
            state[2] = prompt.end.saturating_sub(self.limits.window) as u32;
        }
        ring.write(&state)
    }
}
