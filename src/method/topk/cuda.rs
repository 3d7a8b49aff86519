//! topk on the GPU: the weight of every visible position, and the best of the candidates within the budget.

use std::ffi::c_void;
use std::rc::Rc;

use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::cuda::attend::LayerRows;
use crate::kv::cuda::best::Best;
use crate::kv::cuda::{Limits, Positions, Selection, Shape};
use crate::method::cuda::{ByWindow, CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice};
use crate::method::topk as cpu;

/// Positions of a block of `topk_scores`.
const SPAN: usize = 256;

/// What a step needs to choose by true weights; one for all layers of a shape.
pub struct TopK<'d> {
    /// `[b,h,capacity]`.
    scores: Buffer<'d, f32>,
    /// `[b,h,blocks,2]`: the largest score of a block, and the sum of the exponentials below it.
    parts: Buffer<'d, f32>,
    best: Best<'d>,
}

/// Softmax weights of keys for the queries of some lists, by which [`Best`] then chooses.
pub(crate) struct Weights<'w, 'd> {
    /// `[lists,h,w]`.
    pub queries: Ptr<'w, f32>,
    /// Of the first list.
    pub keys: Ptr<'w, c_void>,
    /// `[lists,4]`.
    pub spans: Ptr<'w, u32>,
    /// Room for the scores and for the sums of their parts.
    pub scores: Ptr<'w, f32>,
    /// See `scores`.
    pub parts: Ptr<'w, f32>,
    /// Where the keys are.
    pub rows: &'w LayerRows<'d>,
    pub lists: usize,
    /// Whether all lists are of one sequence's keys.
    pub share_rows: bool,
}

impl Weights<'_, '_> {
    pub fn rank(&self, best: &Best<'_>) -> Result<()> {
        let shape = &best.shape;
        let (r, w) = (shape.group, shape.width());
        let n_parts = shape.capacity.div_ceil(SPAN);
        let grid = |blocks| [blocks, shape.kv_heads, self.lists];
        let shared_bytes = 4 * r * (w + SPAN);
        kernels::TopkScores {
            queries: self.queries,
            keys: self.keys,
            items: None,
            spans: self.spans,
            scores: self.scores,
            parts: self.parts,
            histograms: best.histograms.ptr(),
            scale: shape.exponent(),
            kind: self.rows.kind(),
            r,
            d: shape.head_dim,
            w,
            capacity: shape.capacity,
            rows: self.rows.shape.capacity,
            shared_rows: usize::from(self.share_rows),
        }
        .launch(best.driver, grid(n_parts), shared_bytes)?;
        kernels::WeightKeys {
            scores: self.scores,
            parts: self.parts,
            spans: self.spans,
            keys: best.keys.ptr(),
            histograms: best.histograms.ptr(),
            r,
            n_parts,
            capacity: shape.capacity,
            largest: usize::from(self.share_rows),
        }
        .launch(best.driver, grid(best.selection.blocks))
    }
}

impl<'d> TopK<'d> {
    /// Room for one step.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: &Limits) -> Result<Self> {
        let shape = shape.checked()?;
        let h = shape.query_heads();
        Ok(Self {
            scores: Buffer::new(driver, "scores of positions", h * shape.capacity)?,
            parts: Buffer::new(driver, "sums of weights", h * shape.capacity.div_ceil(SPAN) * 2)?,
            best: Best::new(driver, shape, limits)?,
        })
    }

    /// Chooses for rotated queries `[b,h,d]`: the candidates with the largest softmax weights over all that is visible,
    /// summed over the query heads of the group; `rows` hold the current token.
    ///
    /// # Numerics
    /// f32; the lower position on ties.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<&Selection<'d>> {
        let best = &self.best;
        let weights = Weights {
            queries: queries.ptr(),
            keys: rows.keys.ptr().cast(),
            spans: positions.spans.ptr(),
            scores: self.scores.ptr(),
            parts: self.parts.ptr(),
            rows,
            lists: best.shape.sequences,
            share_rows: false,
        };
        weights.rank(best)?;
        best.choose(positions)
    }

    /// The keys of every position after a step, `[b,g,capacity]`: the bits of the weights with the sign bit set; what is
    /// no candidate has none. Waits for the device.
    pub fn keys(&self) -> Result<Vec<u32>> {
        self.best.keys.read()
    }
}

impl CudaMethod for cpu::TopK {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        !needs.packed && !needs.rows_on_host
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, limits: &[Limits]) -> Result<Indexes<'d>> {
        let mut shared = ByWindow::new();
        let index = |limits| -> Result<Box<dyn CudaIndex + 'd>> {
            let index = shared.of(limits, || TopK::new(at.driver, at.shape, limits))?;
            Ok(Box::new(index))
        };
        limits.iter().map(index).collect()
    }
}

impl CudaIndex for Rc<TopK<'_>> {
    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&Selection<'_>>> {
        TopK::select(self, step.queries.rope, step.rows()?, step.positions).map(Some)
    }

    fn is_oracle(&self) -> bool {
        true
    }
}
