//! ctkvr on the GPU: a ring of past queries with lists of the positions that they attended. A step chooses from the
//! lists of the past queries most similar to its own.
//!
//! The contract is [`crate::method::ctkvr`]. The list of a prompt's query is made from all positions that the query
//! sees; the list of a step's query is made from the positions that the step ranked.

mod index;
pub mod prompt;

use std::rc::Rc;

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::Limits;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::{CudaSelection, KINDS, Positions, SCAN, Shape};
use crate::method::ctkvr::{self as cpu, CtkvrParams, FRESH};
use crate::method::cuda::OnDevice;
use crate::method::topk::cuda::{BestByWeight, Weighed};
pub use prompt::Lists;

/// Centroids per block of `recall_centroids`; `PIECE` is the number of list entries per block.
const RECALLED: usize = 64;
const PIECE: usize = 1024;

/// The index of one layer.
pub struct Ctkvr<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    limits: Limits,
    /// The queries of the centroids in f16, `[b,g,slots,r,d]`.
    pub centroids: Buffer<'d, u16>,
    /// The list of each centroid, `[b,g,slots,longest]`.
    pub lists: Buffer<'d, u32>,
    /// The length of each list, `[b,g,slots]`.
    pub lens: Buffer<'d, u32>,
    /// Per sequence: slot of the oldest centroid, number of centroids, first position that the lists do not cover,
    /// number of steps; `[b,4]`.
    pub ring: Buffer<'d, u32>,
    space: Rc<CtkvrWorkspace<'d>>,
}

/// The buffers of a step; all layers with the same sliding window share them.
pub struct CtkvrWorkspace<'d> {
    /// An empty head on the CPU, used to compute the number of centroids and the length of a list.
    sizes: cpu::Ctkvr,
    /// The most centroids.
    slots: usize,
    /// The most positions in a list.
    longest: usize,
    /// The most positions in a union of lists.
    room: usize,
    /// The most lists that a step recalls.
    probes: usize,
    /// For each number of cached positions, the number of centroids and the length of a list, `[capacity + 1,2]`.
    limits: Buffer<'d, u32>,
    /// The similarity of each centroid as a sort key, `[b,g,slots]`.
    cosines: Buffer<'d, u32>,
    /// The recalled centroids, `[b,g,probes]`.
    recalled: Buffer<'d, u32>,
    /// Which positions are in the union, `[b,g,capacity]`; zeros between steps.
    marks: Buffer<'d, u8>,
    totals: Buffer<'d, u32>,
    /// The positions of the union, `[b,g,room]`.
    items: Buffer<'d, u32>,
    /// The number of these positions, `[b,g]`.
    counts: Buffer<'d, u32>,
    /// The span of these positions, `[b,g,4]`.
    item_spans: Buffer<'d, u32>,
    /// How many of these positions the step and a new list take, `[2,b,g]`.
    wants: Buffer<'d, u32>,
    /// Ranks the union; each KV head counts as a sequence of `room` positions.
    weights: BestByWeight<'d>,
    /// The list of a new centroid, `[b,g,longest]`.
    chosen: Buffer<'d, u32>,
    /// The length of this list, `[b,g]`.
    chosen_count: Buffer<'d, u32>,
}

impl<'d> CtkvrWorkspace<'d> {
    /// Allocates the buffers of a step. The bytes of the cache limit the size of the index.
    ///
    /// # Errors
    /// Sizes or lists that the kernels do not support; out of memory.
    pub fn new(at: OnDevice<'d>, limits: &Limits, params: &CtkvrParams) -> Result<Self> {
        let (driver, shape) = (at.driver, at.shape.checked()?);
        let sizes = cpu::Ctkvr::new(&at.place(0, 0, limits), params);
        let (heads, capacity) = (shape.heads(), shape.capacity);
        let visible = |n: usize| limits.model_window.map_or(n, |w| w.min(n));
        let bound = |n| [sizes.capacity(n), sizes.list_len(visible(n))].map(|x| x as u32);
        let bounds: Vec<[u32; 2]> = (0..=capacity).map(bound).collect();
        let most = |i: usize| bounds.iter().map(|b| b[i] as usize).max().unwrap_or(0).max(1);
        let (slots, longest) = (most(0), most(1));
        let probes = sizes.params.ct_probes.min(slots);
        let room = longest.saturating_mul(probes).saturating_add(FRESH).min(capacity);
        let is_small = |count: usize| u32::try_from(count).is_ok();
        if heads > 65_535 || !is_small(slots) || !is_small(longest) || !is_small(heads * probes) {
            return Err(Error::internal(format!(
                "CUDA: sizes out of range: {slots} centroids with {longest} positions each for {heads} KV heads"
            )));
        }
        let items = Shape {
            sequences: heads,
            kv_heads: 1,
            capacity: room,
            ..shape
        };
        let mut weights = BestByWeight::new(driver, items, limits.most(capacity))?;
        let ranked = Buffer::zeros(driver, "numbers of ranked positions", heads)?;
        weights.best.selection.ranked = Some(ranked);
        let new = |what: &str, len: usize| Buffer::new(driver, what, len);
        Ok(Self {
            sizes,
            slots,
            longest,
            room,
            probes,
            limits: Buffer::from_slice(driver, "sizes of lists", bounds.as_flattened())?,
            cosines: new("cosines", heads * slots)?,
            recalled: new("recalled lists", heads * probes)?,
            marks: Buffer::zeros(driver, "marks", heads * capacity)?,
            totals: new("sums of the scan", heads * capacity.div_ceil(SCAN) * KINDS)?,
            items: new("ranked positions", heads * room)?,
            counts: new("numbers of positions", heads)?,
            item_spans: new("spans", heads * 4)?,
            wants: new("budgets", heads * 2)?,
            weights,
            chosen: new("a new list", heads * longest)?,
            chosen_count: new("its length", heads)?,
        })
    }
}

impl<'d> Ctkvr<'d> {
    /// Makes an empty index.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        space: Rc<CtkvrWorkspace<'d>>,
    ) -> Result<Self> {
        let shape = shape.checked()?;
        let slots = shape.heads() * space.slots;
        let values = slots * shape.group * shape.head_dim;
        Ok(Self {
            driver,
            shape,
            limits: *limits,
            centroids: Buffer::new(driver, "centroids", values)?,
            lists: Buffer::new(driver, "lists of positions", slots * space.longest)?,
            lens: Buffer::zeros(driver, "lengths of lists", slots)?,
            ring: Buffer::zeros(driver, "a ring", shape.sequences * 4)?,
            space,
        })
    }

    /// Chooses for rotated queries `[b,h,d]`, and makes a centroid of the queries if this step is one that becomes a
    /// centroid. `rows` must already hold the current token.
    ///
    /// # Numerics
    /// f32; the older centroid and the lower position win a tie.
    ///
    /// # Source
    /// Algorithm 2.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<&CudaSelection<'d>> {
        self.recall(queries)?;
        self.unite(positions)?;
        let space = &self.space;
        let spans = space.item_spans.ptr();
        space.weights.rank(&Weighed {
            queries: queries.ptr(),
            keys: rows.keys.ptr().cast(),
            items: Some(space.items.ptr()),
            spans,
            rows,
            share_rows: false,
            by_largest: true,
        })?;
        let (best, to) = (&space.weights.best, &space.weights.best.selection);
        let lists = [to.lists.ptr(), to.listed.ptr()];
        best.choose_into(spans, space.wants.ptr(), lists, to.most)?;
        kernels::NameItems {
            items: space.items.ptr(),
            lists: to.lists.ptr(),
            listed: to.listed.ptr(),
            histograms: best.histograms.ptr(),
            room: space.room,
            most: to.most,
        }
        .launch(self.driver, self.shape.grid(to.most.div_ceil(256)))?;
        self.update(queries, positions)?;
        Ok(to)
    }

    /// Returns the bytes of shared memory that a group's queries take.
    fn query_bytes(&self) -> usize {
        4 * self.shape.group * self.shape.head_dim
    }

    /// Finds the centroids most similar to the queries.
    fn recall(&self, queries: &Buffer<'_, f32>) -> Result<()> {
        let (space, shape, ring) = (&self.space, &self.shape, self.ring.ptr());
        let slots = space.slots;
        let blocks = space.slots.div_ceil(RECALLED);
        kernels::RecallCentroids {
            queries: queries.ptr(),
            ring,
            centroids: self.centroids.ptr(),
            cosines: space.cosines.ptr(),
            r: shape.group,
            d: shape.head_dim,
            slots,
        }
        .launch(self.driver, self.shape.grid(blocks), self.query_bytes())?;
        kernels::RankCentroids {
            ring,
            cosines: space.cosines.ptr(),
            recalled: space.recalled.ptr(),
            probes: space.probes,
            slots,
        }
        .launch(self.driver, self.shape.grid(space.slots.div_ceil(256)))
    }

    /// Lists the positions to rank: the recalled lists and the fresh positions.
    fn unite(&self, positions: &Positions<'_>) -> Result<()> {
        let (space, capacity) = (&self.space, self.shape.capacity);
        kernels::MarkUnion {
            ring: self.ring.ptr(),
            recalled: space.recalled.ptr(),
            lists: self.lists.ptr(),
            lens: self.lens.ptr(),
            spans: positions.spans.ptr(),
            budgets: positions.budgets.ptr(),
            marks: space.marks.ptr(),
            probes: space.probes,
            slots: space.slots,
            longest: space.longest,
            capacity,
        }
        .launch(self.driver, self.shape.grid(space.longest.div_ceil(PIECE)))?;
        let blocks = capacity.div_ceil(SCAN);
        kernels::CountUnion {
            marks: space.marks.ptr(),
            totals: space.totals.ptr(),
            capacity,
        }
        .launch(self.driver, self.shape.grid(blocks))?;
        let ranked = space.weights.best.selection.ranked.as_ref();
        let ranked =
            ranked.ok_or_else(|| Error::internal("CUDA: no room for the numbers of ranked positions"))?;
        kernels::ListUnion {
            marks: space.marks.ptr(),
            totals: space.totals.ptr(),
            spans: positions.spans.ptr(),
            budgets: positions.budgets.ptr(),
            limits: space.limits.ptr(),
            items: space.items.ptr(),
            counts: space.counts.ptr(),
            item_spans: space.item_spans.ptr(),
            wants: space.wants.ptr(),
            ranked: ranked.ptr(),
            room: space.room,
            capacity,
        }
        .launch(self.driver, self.shape.grid(blocks))
    }

    /// Makes a centroid of the step's queries if this step is one that becomes a centroid, and counts the step.
    fn update(&self, queries: &Buffer<'_, f32>, positions: &Positions<'_>) -> Result<()> {
        let (space, shape) = (&self.space, &self.shape);
        let every = space.sizes.params.ct_update.min(u32::MAX as usize);
        let (update, slots, ring) = (every, space.slots, self.ring.ptr());
        if every > 0 {
            let (chosen, count) = (space.chosen.ptr(), space.chosen_count.ptr());
            let wants = space.wants.ptr_at(shape.heads());
            let (best, spans) = (&space.weights.best, space.item_spans.ptr());
            best.choose_into(spans, wants, [chosen, count], space.longest)?;
            let blocks = space.longest.div_ceil(PIECE);
            kernels::PushCentroid {
                queries: queries.ptr(),
                ring,
                items: space.items.ptr(),
                chosen,
                chosen_count: count,
                centroids: self.centroids.ptr(),
                lists: self.lists.ptr(),
                lens: self.lens.ptr(),
                update,
                r: shape.group,
                d: shape.head_dim,
                slots,
                longest: space.longest,
                room: space.room,
            }
            .launch(self.driver, self.shape.grid(blocks), self.query_bytes())?;
        }
        let b = shape.sequences;
        kernels::AdvanceRing {
            ring,
            spans: positions.spans.ptr(),
            limits: space.limits.ptr(),
            update,
            slots,
            b,
        }
        .launch(self.driver, [b.div_ceil(256), 1, 1])
    }

    /// Returns the bytes of the centroids and their lists.
    pub fn bytes(&self) -> usize {
        2 * self.centroids.len() + 4 * (self.lists.len() + self.lens.len())
    }
}
