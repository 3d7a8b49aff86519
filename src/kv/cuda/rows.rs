//! Cached rows on the GPU: what a format declares ([`CudaFormat`]), and the cached keys and values of one layer
//! ([`CudaRows`]).

use super::attend::{Attention, Stored};
use super::float::LayerRows;
use super::prompt::{Prompts, Queries};
use super::signs::Signs;
use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels::{self, Kernel};
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::kv::packed::Layout;

/// A format in which the keys and values of a layer are cached on the GPU.
pub trait CudaFormat: Sync {
    /// Returns the formats of keys and values that it holds.
    fn kv(&self) -> KvType;

    /// Returns the kernel that attends its rows in a decode step, and the dynamic shared memory of a block in bytes.
    ///
    /// # Errors
    /// There is no kernel for this shape.
    fn kernel(&self, shape: &Shape) -> Result<(&'static Kernel, usize)>;

    /// Allocates the empty cache of a layer.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    fn cache<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn CudaRows + 'd>>;

    /// Returns the bytes of a key and a value of one KV head.
    fn bytes_per_position(&self, shape: &Shape) -> usize;

    /// Returns the bytes per KV head that do not depend on the length.
    fn fixed_bytes(&self, _shape: &Shape) -> usize {
        0
    }

    /// Returns whether the rows are floats ([`CudaRows::plain`]): a prompt attends them, and indexes rank by them.
    fn is_plain(&self) -> bool {
        self.kv().float().is_some()
    }

    /// Returns whether a cache takes one prompt only, because a later prompt could not attend its rows.
    fn needs_one_prompt(&self) -> bool {
        !self.is_plain()
    }

    /// Returns whether [`CudaRows::prompt`] needs [buffers](WholePrompt::prompts).
    fn needs_room(&self) -> bool {
        false
    }

    /// Returns whether rows can be [random](CudaRows::fill), for a benchmark.
    fn has_random_rows(&self) -> bool {
        true
    }

    /// Returns whether the format can have this layout; formats that do not use it can.
    fn holds(&self, _layout: &Layout) -> bool {
        true
    }
}

/// The cached keys and values of one layer.
pub trait CudaRows {
    /// Stores the rotated keys and the values of the last `m` positions, `[b,g,m,d]` each; `positions` counts them already.
    fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()>;

    /// Stores the rows of a chunk of a prompt, as [`CudaRows::append`]; a cache that takes in prompts as a whole stores
    /// nothing here.
    fn extend(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        self.append(keys, values, m, positions)
    }

    /// Takes in a prompt, after its last chunk; by default, nothing is left to do. A 2-bit cache then holds its rows as `layout`
    /// says.
    ///
    /// # Errors
    /// No buffers; a layout that the format does not [hold](CudaFormat::holds).
    fn prompt(&mut self, _prompt: &WholePrompt<'_>, _layout: Layout) -> Result<()> {
        Ok(())
    }

    /// Attends rotated queries `[b,h,d]` over the static set and the chosen positions; without a selection, over all
    /// visible ones. The outputs and their log-sum-exps are then in `attention`.
    fn attend(
        &self,
        attention: &Attention<'_>,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()>;

    /// Computes the largest score and the sum of exponentials of each of a step's queries over the static set alone.
    fn score_static(&self, scores: &StaticScores<'_>) -> Result<()>;

    /// Fills the cache with random rows, for a benchmark.
    ///
    /// # Errors
    /// A format whose rows come from a prompt.
    fn fill(&self, _seed: u32) -> Result<()> {
        Err(Error::internal(
            "CUDA: random rows of a format that packs prompts",
        ))
    }

    /// Returns the rows, if they are floats.
    fn plain(&self) -> Option<&LayerRows<'_>> {
        None
    }

    /// Returns the signs of the keys, if the format stores signs.
    fn signs(&self) -> Option<&Signs<'_>> {
        None
    }
}

/// A prompt, all of which has passed a layer.
pub struct WholePrompt<'a> {
    /// The prompt's rotated keys and its values, after those of earlier prompts.
    pub rows: &'a LayerRows<'a>,
    /// The queries of the prompt's last chunk.
    pub queries: Queries<'a>,
    /// Buffers for rows in f32; present if the cache's format or an index needs them.
    pub prompts: Option<&'a Prompts<'a>>,
    /// The positions of the layer.
    pub positions: &'a Positions<'a>,
}

/// What [`CudaRows::score_static`] reads and writes.
pub struct StaticScores<'b> {
    /// Rotated queries, `[b,h,d]`.
    pub queries: &'b Buffer<'b, f32>,
    /// The positions of the layer.
    pub positions: &'b Positions<'b>,
    /// `[b,h,n_parts,2]`; part 0 becomes the largest score and the sum of the exponentials relative to it.
    pub parts: &'b Buffer<'b, f32>,
    /// Number of parts per query head.
    pub n_parts: usize,
}

impl StaticScores<'_> {
    /// Scores keys that do not depend on one another.
    pub(super) fn launch(&self, driver: &dyn Driver, shape: &Shape, keys: Stored<'_>) -> Result<()> {
        kernels::StaticScores {
            queries: self.queries.ptr(),
            keys: keys.rows.cast(),
            key_scales: keys.scales,
            spans: self.positions.spans.ptr(),
            parts: self.parts.ptr(),
            scale: shape.exponent(),
            kind: keys.kind,
            r: shape.group,
            d: shape.head_dim,
            w: shape.width(),
            capacity: shape.capacity,
            n_parts: self.n_parts,
        }
        .launch(driver, shape.grid(1))
    }
}
