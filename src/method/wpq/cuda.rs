//! wpq on the GPU: codes of keys, and the keys with the largest estimated probabilities within the budget.

mod index;
mod quantisers;
mod space;

use std::ffi::c_void;
use std::rc::Rc;

use super::section::STAGES;
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::Limits;
use crate::kv::cuda::rows::CudaRows;
use crate::kv::cuda::{CudaSelection, Positions, SCAN, Shape};
pub(super) use index::random;
pub use quantisers::{Quantisers, Sizes};
pub use space::{RefinedKeys, WpqWorkspace};

/// Keys per block of `encode_keys`.
const ENCODED: usize = 16;

/// The codes of one layer's keys.
pub struct Wpq<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    limits: Limits,
    quantisers: Quantisers<'d>,
    /// The codes of every position, `[2,b,g,capacity,width]`.
    pub codes: Buffer<'d, u8>,
    space: Rc<WpqWorkspace<'d>>,
}

impl<'d> Wpq<'d> {
    /// Makes an empty layer. The workspace must be for the same shape and for quantisers of the same sizes.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        quantisers: Quantisers<'d>,
        space: Rc<WpqWorkspace<'d>>,
    ) -> Result<Self> {
        let shape = shape.checked()?;
        let sizes = quantisers.sizes;
        let bytes = STAGES * shape.heads() * shape.capacity * sizes.width();
        Ok(Self {
            driver,
            shape,
            limits: *limits,
            quantisers,
            codes: Buffer::zeros(driver, "codes", bytes)?,
            space,
        })
    }

    /// Fills the codes with random numbers, for a benchmark.
    pub fn fill(&self, seed: u32) -> Result<()> {
        // Codes are whole u32s, since capacities are multiples of 8.
        fill(self.driver, &self.codes, self.codes.len() / 4, Random::Bits, seed)
    }

    /// Returns the bytes of the codes.
    pub fn bytes(&self) -> usize {
        self.codes.len()
    }

    /// Encodes the rotated keys of the last `n` positions, `[b,g,n,d]`; `positions` already counts these positions.
    ///
    /// # Numerics
    /// f32; the lowest number wins a tie.
    pub fn extend(&self, keys: &Buffer<'_, f32>, n: usize, positions: &Positions<'_>) -> Result<()> {
        let (of, sizes) = (&self.quantisers, self.quantisers.sizes);
        kernels::EncodeKeys {
            keys: keys.ptr(),
            key_maps: of.key_maps.ptr(),
            means: of.means.ptr(),
            arcs: of.arcs.as_ref().map(Buffer::ptr),
            turns: self.space.paths.as_ref().map(|paths| paths.turns.ptr()),
            words: of.words.ptr().cast(),
            norms: of.norms.ptr(),
            lens: positions.lens.ptr(),
            codes: self.codes.ptr(),
            groups: sizes.groups,
            dim: sizes.dim,
            n,
            d: self.shape.head_dim,
            capacity: self.shape.capacity,
        }
        .launch(self.driver, sizes.words, self.shape.grid(n.div_ceil(ENCODED)))
    }

    /// Chooses for rotated queries `[b,h,d]`; `cache` must already hold the current token.
    ///
    /// # Numerics
    /// Estimates and probabilities in f32; the lower position wins a tie.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        cache: &dyn CudaRows,
        positions: &Positions<'_>,
    ) -> Result<&CudaSelection<'d>> {
        let space = &self.space;
        self.build_tables(queries, positions)?;
        self.driver
            .beside(&mut || space.score_static(queries, cache, positions))?;
        if let (Some(paths), Some(arcs)) = (&space.paths, &self.quantisers.arc_parts) {
            self.driver
                .beside(&mut || space.score_paths(paths, arcs, queries, positions))?;
        }
        self.rank(positions)?;
        let (refined, items) = (&space.refined, &space.best.selection);
        let lists = [items.lists.ptr(), items.listed.ptr()];
        let spans = positions.spans.ptr();
        space
            .best
            .choose_into(spans, refined.wants.ptr(), lists, items.most)?;
        self.refine(refined)?;
        self.choose_refined(refined, positions)
    }

    /// Scores the words for the queries of the step.
    fn build_tables(&self, queries: &Buffer<'_, f32>, positions: &Positions<'_>) -> Result<()> {
        let (of, space, sizes) = (&self.quantisers, &self.space, self.quantisers.sizes);
        let refined = &space.refined;
        kernels::WordTables {
            queries: queries.ptr(),
            query_maps: of.query_maps.ptr().cast(),
            means: of.means.ptr(),
            words: of.words.ptr().cast(),
            spans: positions.spans.ptr(),
            budgets: positions.budgets.ptr(),
            tables: self.tables(),
            lines: space.lines.ptr(),
            histograms: space.best.histograms.ptr(),
            refined_histograms: refined.best.histograms.ptr(),
            wants: refined.wants.ptr(),
            item_spans: refined.spans.ptr(),
            scale: self.shape.exponent(),
            groups: sizes.groups,
            dim: sizes.dim,
            d: self.shape.head_dim,
        }
        .launch(self.driver, sizes.words, self.shape.grid(self.shape.group))
    }

    fn paths(&self) -> Option<Ptr<'_, f32>> {
        self.space.paths.as_ref().map(|paths| paths.scores.ptr())
    }

    fn tables(&self) -> Ptr<'_, c_void> {
        self.space.tables.ptr().cast()
    }

    /// Writes the sort keys of all candidates, from the first stage.
    fn rank(&self, positions: &Positions<'_>) -> Result<()> {
        let (space, sizes, shape) = (&self.space, self.quantisers.sizes, &self.shape);
        let (codes, tables, lines) = (self.codes.ptr(), self.tables(), space.lines.ptr());
        let paths = self.paths();
        let (spans, parts, grid) = (
            positions.spans.ptr(),
            space.parts.ptr(),
            shape.grid(space.best.selection.blocks),
        );
        let (r, width, capacity) = (shape.group, sizes.width(), shape.capacity);
        kernels::WordParts {
            codes,
            tables,
            lines,
            paths,
            spans,
            parts,
            groups: sizes.groups,
            width,
            r,
            capacity,
        }
        .launch(self.driver, sizes.words, grid)?;
        kernels::WordKeys {
            codes,
            tables,
            lines,
            paths,
            spans,
            parts,
            groups: sizes.groups,
            width,
            r,
            capacity,
            totals: space.totals.ptr(),
            keys: space.best.keys.ptr(),
            histograms: space.best.histograms.ptr(),
        }
        .launch(self.driver, sizes.words, grid)
    }

    /// Writes the sort keys of the keys to refine, from both stages.
    fn refine(&self, refined: &space::Refined<'d>) -> Result<()> {
        let (space, sizes, shape) = (&self.space, self.quantisers.sizes, &self.shape);
        let (items, room) = (&space.best.selection, refined.best.shape.capacity);
        let (scores, parts, totals) = (refined.scores.ptr(), refined.parts.ptr(), space.totals.ptr());
        let grid = shape.grid(room.div_ceil(SCAN));
        kernels::RefinedParts {
            codes: self.codes.ptr(),
            tables: self.tables(),
            lines: space.lines.ptr(),
            paths: self.paths(),
            totals,
            items: items.lists.ptr(),
            listed: items.listed.ptr(),
            scores,
            parts,
            groups: sizes.groups,
            width: sizes.width(),
            r: shape.group,
            room,
            capacity: shape.capacity,
        }
        .launch(self.driver, sizes.words, grid)?;
        kernels::RefinedKeys {
            scores,
            totals,
            parts,
            item_spans: refined.spans.ptr(),
            keys: refined.best.keys.ptr(),
            histograms: refined.best.histograms.ptr(),
            r: shape.group,
            room,
        }
        .launch(self.driver, grid)
    }

    /// Chooses among the refined keys, and returns the positions of the chosen ones.
    fn choose_refined<'s>(
        &self,
        refined: &'s space::Refined<'d>,
        positions: &Positions<'_>,
    ) -> Result<&'s CudaSelection<'d>> {
        let (best, to) = (&refined.best, &refined.best.selection);
        let lists = [to.lists.ptr(), to.listed.ptr()];
        best.choose_into(refined.spans.ptr(), positions.budgets.ptr(), lists, to.most)?;
        kernels::NameItems {
            items: self.space.best.selection.lists.ptr(),
            lists: to.lists.ptr(),
            listed: to.listed.ptr(),
            histograms: best.histograms.ptr(),
            room: best.shape.capacity,
            most: to.most,
        }
        .launch(self.driver, self.shape.grid(to.most.div_ceil(256)))?;
        Ok(to)
    }
}
