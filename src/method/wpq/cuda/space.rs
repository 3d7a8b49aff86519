//! The buffers of a step, and the exact scores of the static set.

use half::bf16;

use super::Sizes;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::Limits;
use crate::kv::cuda::best::Best;
use crate::kv::cuda::rows::{CudaRows, StaticScores};
use crate::kv::cuda::{Positions, SCAN, Shape};
use crate::method::wpq::choose::REFINED;
use crate::method::wpq::path::{ARC, MeanPath};

/// Query heads whose table entries lie side by side in `wpq.h`; `LINE` is how many numbers turn a sum of
/// entries into a score.
const QUAD: usize = 4;
const LINE: usize = 5;
/// Positions that a block of `path_scores` scores at a time.
const SCORED: usize = 32 * ARC;

/// The buffers of a step; all layers with the same sliding window share them.
pub struct WpqWorkspace<'d> {
    driver: &'d dyn Driver,
    /// The score tables, `[b,g,r / 4,2,m,words,4]`, of u16 or f32. Entries beyond the last query head stay zero.
    pub(super) tables: Buffer<'d, u32>,
    /// The numbers that turn sums of entries into scores, `[b,h,LINE]`.
    pub(super) lines: Buffer<'d, f32>,
    /// Partial sums of the softmax, `[b,h,1 + blocks,2]`; part 0 is that of the static set.
    pub(super) parts: Buffer<'d, f32>,
    /// The denominators of the softmax, `[b,h,2]`.
    pub(super) totals: Buffer<'d, f32>,
    /// Chooses the keys to refine.
    pub(super) best: Best<'d>,
    /// The buffers of the second stage.
    pub(super) refined: Refined<'d>,
    /// The scores of the mean's path; `None` unless codes describe the keys around it.
    pub(super) paths: Option<Paths<'d>>,
}

/// The scores of the mean's path.
pub(super) struct Paths<'d> {
    /// The rotation to the start of each arc, `[arcs,d]`.
    pub turns: Buffer<'d, f32>,
    /// How many times a block scores [`SCORED`] positions, so that all blocks run at the same time.
    pub passes: usize,
    /// The score at every candidate, `[b,g,r / 4,capacity,4]`; zero beyond the last query head.
    pub scores: Buffer<'d, f32>,
}

/// The keys of a KV head that the second stage scored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefinedKeys {
    /// The positions of the keys, ascending.
    pub positions: Vec<u32>,
    /// The sort keys of these positions: the bits of the probability by both stages with the sign bit set.
    pub keys: Vec<u32>,
}

/// The buffers of the second stage.
pub(super) struct Refined<'d> {
    /// How many keys to refine, `[b]`.
    pub wants: Buffer<'d, u32>,
    /// The span of the list of keys to refine, `[b,4]`.
    pub spans: Buffer<'d, u32>,
    /// The scores of the keys to refine, `[b,h,room]`.
    pub scores: Buffer<'d, f32>,
    /// `[b,h,blocks,3]`.
    pub parts: Buffer<'d, f32>,
    /// Chooses among the refined keys, whose positions are their places in the list.
    pub best: Best<'d>,
}

impl<'d> WpqWorkspace<'d> {
    /// Allocates the buffers of a step.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: &Limits, sizes: Sizes) -> Result<Self> {
        let shape = shape.checked()?;
        let (h, capacity) = (shape.query_heads(), shape.capacity);
        let most = limits.most(capacity);
        let entries = shape.heads() * shape.group.div_ceil(QUAD) * QUAD * sizes.entries();
        let words = if sizes.is_rounded() { entries / 2 } else { entries };
        let room = most.saturating_mul(REFINED).min(capacity);
        let refined = Refined::new(driver, shape, room, most)?;
        Ok(Self {
            driver,
            tables: Buffer::zeros(driver, "tables of words", words)?,
            lines: Buffer::zeros(driver, "scales of tables", h * LINE)?,
            parts: Buffer::new(driver, "sums of weights", h * (1 + capacity.div_ceil(SCAN)) * 2)?,
            totals: Buffer::new(driver, "sums of weights", h * 2)?,
            best: Best::new(driver, shape, refined.best.shape.capacity)?,
            refined,
            paths: None,
        })
    }

    /// Adds the buffers for codes of keys around a path like this one: any path of the model's.
    ///
    /// # Errors
    /// Out of memory.
    pub fn with_paths(self, path: &MeanPath) -> Result<Self> {
        let (driver, shape) = (self.driver, self.best.shape);
        let blocks = shape.capacity.div_ceil(SCORED);
        let places = driver.blocks_at_once(kernels::PathScores::KERNEL, 0)?;
        let passes = (blocks * shape.heads()).div_ceil(places.max(1)).min(blocks);
        // A block scores whole arcs.
        let arcs = blocks.next_multiple_of(passes) * (SCORED / ARC);
        let paths = Paths {
            passes,
            turns: Buffer::from_slice(driver, "rotations", &path.turns(arcs))?,
            scores: Buffer::new(
                driver,
                "scores of means",
                shape.heads() * shape.group.div_ceil(QUAD) * QUAD * shape.capacity,
            )?,
        };
        Ok(Self {
            paths: Some(paths),
            ..self
        })
    }

    /// Scores the path of the mean, from its positions on the first arc in two parts, for the queries of a step.
    pub(super) fn score_paths(
        &self,
        paths: &Paths<'d>,
        arcs: &Buffer<'_, bf16>,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let shape = &self.best.shape;
        kernels::PathScores {
            queries: queries.ptr(),
            arcs: arcs.ptr().cast(),
            turns: paths.turns.ptr(),
            spans: positions.spans.ptr(),
            paths: paths.scores.ptr(),
            scale: shape.exponent(),
            r: shape.group,
            d: shape.head_dim,
            k: shape.head_dim.next_multiple_of(16),
            capacity: shape.capacity,
            passes: paths.passes,
        }
        .launch(
            self.driver,
            shape.grid(shape.capacity.div_ceil(paths.passes * SCORED)),
        )
    }

    /// Computes the softmax of the static set alone, into part 0.
    pub(super) fn score_static(
        &self,
        queries: &Buffer<'_, f32>,
        cache: &dyn CudaRows,
        positions: &Positions<'_>,
    ) -> Result<()> {
        cache.score_static(&StaticScores {
            queries,
            positions,
            parts: &self.parts,
            n_parts: 1 + self.best.selection.blocks,
        })
    }

    /// Copies the sort keys of every position after a step to the host, `[b,g,capacity]`: the bits of the probability
    /// by the first stage with the sign bit set. Waits for the device.
    pub fn keys(&self) -> Result<Vec<u32>> {
        self.best.keys.read()
    }

    /// Copies the refined keys of each KV head to the host. Waits for the device.
    pub fn refined(&self) -> Result<Vec<RefinedKeys>> {
        let best = &self.refined.best;
        let (lists, keys) = (self.best.selection.read()?, best.keys.read()?);
        let heads = lists.into_iter().zip(keys.chunks_exact(best.shape.capacity));
        let head = |(positions, keys): (Vec<u32>, &[u32])| RefinedKeys {
            keys: keys[..positions.len()].to_vec(),
            positions,
        };
        Ok(heads.map(head).collect())
    }

    /// Copies the lines `[b,h,5]` and the tables of the last step to the host, laid out as the kernels have them. Waits
    /// for the device.
    pub fn tables(&self) -> Result<(Vec<f32>, Vec<u32>)> {
        Ok((self.lines.read()?, self.tables.read()?))
    }
}

impl<'d> Refined<'d> {
    /// Allocates space to refine up to at least `room` keys per KV head, and to choose up to `most` of them.
    fn new(driver: &'d dyn Driver, shape: Shape, room: usize, most: usize) -> Result<Self> {
        let items = Shape {
            capacity: room,
            ..shape
        };
        let items = items.checked()?;
        let (h, room) = (items.query_heads(), items.capacity);
        Ok(Self {
            wants: Buffer::zeros(driver, "budgets", items.sequences)?,
            spans: Buffer::zeros(driver, "spans", items.sequences * 4)?,
            scores: Buffer::new(driver, "scores of refined keys", h * room)?,
            parts: Buffer::new(driver, "sums of weights", h * room.div_ceil(SCAN) * 3)?,
            best: Best::new(driver, items, most)?,
        })
    }
}
