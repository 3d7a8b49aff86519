//! selfindex on the GPU: table scores of sign patterns, and the best positions within the budget.

mod index;

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::Limits;
use crate::kv::cuda::best::Best;
use crate::kv::cuda::signs::{FULL, Signs, words};
use crate::kv::cuda::{CudaSelection, Positions, Shape};
pub(super) use index::random;

/// The centroids of one layer, and the buffers of a step.
pub struct SelfIndex<'d> {
    /// The centroids, `[b,g,d/4,16,4]`; they may come from a prompt.
    pub centroids: Buffer<'d, f32>,
    /// The score tables of a step, `[b,g,2 pitch,16]`.
    tables: Buffer<'d, f32>,
    /// The full-precision tokens that are chosen first, `[b,g,FULL]`.
    first: Buffer<'d, u32>,
    best: Best<'d>,
}

impl<'d> SelfIndex<'d> {
    /// Makes a layer with these centroids, `[b,g,d/4,16,4]`.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: &Limits, centroids: &[f32]) -> Result<Self> {
        let index = Self::empty(driver, shape, limits)?;
        if centroids.len() != index.centroids.len() {
            return Err(Error::internal(format!(
                "CUDA: {} values of centroids do not fit {:?}",
                centroids.len(),
                index.best.shape
            )));
        }
        index.centroids.write(centroids)?;
        Ok(index)
    }

    /// Makes a layer whose centroids will come from a prompt.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn empty(driver: &'d dyn Driver, shape: Shape, limits: &Limits) -> Result<Self> {
        let shape = shape.checked()?;
        let values = shape.heads() * shape.head_dim * 16;
        Ok(Self {
            centroids: Buffer::zeros(driver, "centroids of signs", values)?,
            tables: Buffer::new(driver, "tables of signs", shape.heads() * words(&shape) * 4 * 32)?,
            first: Buffer::new(driver, "positions that come first", shape.heads() * FULL)?,
            best: Best::new(driver, shape, limits.most(shape.capacity))?,
        })
    }

    /// Chooses for rotated queries `[b,h,d]`: the best full-precision tokens, one for every 38 positions of the budget,
    /// then the best of all other positions.
    ///
    /// # Numerics
    /// Scores in f32; the lower position wins a tie.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        signs: &Signs<'_>,
        positions: &Positions<'_>,
    ) -> Result<&CudaSelection<'d>> {
        let (best, shape) = (&self.best, &self.best.shape);
        let (capacity, pitch, spans) = (shape.capacity, signs.pitch(), positions.spans.ptr());
        let table_bytes = signs.pitch() * 32 * 4;
        kernels::SignTables {
            queries: queries.ptr(),
            centroids: self.centroids.ptr(),
            signs: signs.signs.ptr(),
            full: signs.full.ptr(),
            full_count: signs.full_count.ptr(),
            spans,
            budgets: positions.budgets.ptr(),
            tables: self.tables.ptr(),
            first: self.first.ptr(),
            histograms: best.histograms.ptr(),
            r: shape.group,
            d: shape.head_dim,
            pitch,
            capacity,
        }
        .launch(best.driver, shape.grid(1), table_bytes)?;
        let blocks = best.selection.blocks;
        kernels::SignKeys {
            signs: signs.signs.ptr(),
            tables: self.tables.ptr(),
            first: self.first.ptr(),
            spans,
            keys: best.keys.ptr(),
            histograms: best.histograms.ptr(),
            pitch,
            capacity,
        }
        .launch(best.driver, shape.grid(blocks), (256 + 32) * 4 * pitch)?;
        best.choose(positions)
    }

    /// Copies the sort keys of every position after a step to the host, `[b,g,capacity]`. They sort as the scores do;
    /// the full-precision tokens chosen first have the largest key. Waits for the device.
    pub fn keys(&self) -> Result<Vec<u32>> {
        self.best.keys.read()
    }
}
