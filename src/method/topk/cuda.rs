//! topk on the GPU: softmax weights of all visible positions, then the best candidates within the budget.

use std::ffi::c_void;
use std::rc::Rc;

use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::Limits;
use crate::kv::cuda::best::Best;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::{CudaSelection, Positions, Shape};
use crate::method::cuda::{
    ByWindow, CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice, ServedLayer, each_served,
};
use crate::method::topk as cpu;

/// Positions per block of `topk_scores`.
const SPAN: usize = 256;

/// Buffers for choosing the positions whose keys have the largest softmax weights.
pub(crate) struct BestByWeight<'d> {
    /// The scores, `[b,h,capacity]`.
    scores: Buffer<'d, f32>,
    /// For each block, the largest score and the sum of `exp(score - largest)`: `[b,h,blocks,2]`.
    parts: Buffer<'d, f32>,
    pub best: Best<'d>,
}

/// Queries, and the keys that are ranked by their softmax weights.
pub(crate) struct Weighed<'a> {
    /// The queries, `[b,h,w]`.
    pub queries: Ptr<'a, f32>,
    /// The keys of the first sequence.
    pub keys: Ptr<'a, c_void>,
    /// The positions to rank, `[b,g,capacity]`; `None` ranks all.
    pub items: Option<Ptr<'a, u32>>,
    /// Spans, `[b,4]`: see [`Positions::spans`].
    pub spans: Ptr<'a, u32>,
    /// The layout of the keys.
    pub rows: &'a LayerRows<'a>,
    /// Whether all sequences rank the keys of the first sequence.
    pub share_rows: bool,
    /// Whether a key ranks by its largest weight in the query group instead of the sum of its weights.
    pub by_largest: bool,
}

impl<'d> BestByWeight<'d> {
    /// Allocates space to choose up to `most` positions per KV head.
    pub fn new(driver: &'d dyn Driver, shape: Shape, most: usize) -> Result<Self> {
        let h = shape.query_heads();
        Ok(Self {
            scores: Buffer::new(driver, "scores of positions", h * shape.capacity)?,
            parts: Buffer::new(driver, "sums of weights", h * shape.capacity.div_ceil(SPAN) * 2)?,
            best: Best::new(driver, shape, most)?,
        })
    }

    /// Writes the sort keys by which [`Best`] then chooses positions.
    pub fn rank(&self, of: &Weighed<'_>) -> Result<()> {
        let (best, shape) = (&self.best, &self.best.shape);
        let (r, w) = (shape.group, shape.width());
        let n_parts = shape.capacity.div_ceil(SPAN);
        let shared_bytes = 4 * r * (w + SPAN);
        kernels::TopkScores {
            queries: of.queries,
            keys: of.keys,
            items: of.items,
            spans: of.spans,
            scores: self.scores.ptr(),
            parts: self.parts.ptr(),
            histograms: best.histograms.ptr(),
            scale: shape.exponent(),
            kind: of.rows.kind(),
            r,
            d: shape.head_dim,
            w,
            capacity: shape.capacity,
            rows: of.rows.shape.capacity,
            shared_rows: usize::from(of.share_rows),
        }
        .launch(best.driver, shape.grid(n_parts), shared_bytes)?;
        kernels::WeightKeys {
            scores: self.scores.ptr(),
            parts: self.parts.ptr(),
            spans: of.spans,
            keys: best.keys.ptr(),
            histograms: best.histograms.ptr(),
            r,
            n_parts,
            capacity: shape.capacity,
            largest: usize::from(of.by_largest),
        }
        .launch(best.driver, shape.grid(best.selection.blocks))
    }
}

/// Exact top-k; all layers of the same shape share its buffers.
pub struct TopK<'d>(BestByWeight<'d>);

impl<'d> TopK<'d> {
    /// Allocates the buffers of a step.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: &Limits) -> Result<Self> {
        let shape = shape.checked()?;
        let most = limits.most(shape.capacity);
        BestByWeight::new(driver, shape, most).map(Self)
    }

    /// Chooses, for rotated queries `[b,h,d]`, the candidates with the largest softmax weights over all visible
    /// positions, summed over the query group. `rows` must already hold the current token.
    ///
    /// # Numerics
    /// f32; the lower position wins a tie.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<&CudaSelection<'d>> {
        self.0.rank(&Weighed {
            queries: queries.ptr(),
            keys: rows.keys.ptr().cast(),
            items: None,
            spans: positions.spans.ptr(),
            rows,
            share_rows: false,
            by_largest: false,
        })?;
        self.0.best.choose(positions)
    }

    /// Copies the sort keys of every position after a step to the host, `[b,g,capacity]`: the bits of the weight with
    /// the sign bit set, or zero for a position that is no candidate. Waits for the device.
    pub fn keys(&self) -> Result<Vec<u32>> {
        self.0.best.keys.read()
    }
}

impl CudaMethod for cpu::TopK {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        needs.has_rows_on_device()
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        let mut shared = ByWindow::new();
        each_served(layers, |ServedLayer { limits, .. }| {
            shared.get_or_make(limits, || TopK::new(at.driver, at.shape, limits))
        })
    }
}

impl CudaIndex for Rc<TopK<'_>> {
    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        TopK::select(self, step.queries.rope, step.rows()?, step.positions).map(Some)
    }

    fn is_oracle(&self) -> bool {
        true
    }
}
