//! Chooses the positions with the best scores within the budget: `kernels/best.cu`.

use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;

/// Bins of a histogram of sort keys, and passes of a choice; a KV head has one histogram per pass.
const BINS: usize = 2048;
const PASSES: usize = 3;

/// The sort keys of all positions, and the buffers for choosing the largest keys.
pub(crate) struct Best<'d> {
    pub driver: &'d dyn Driver,
    pub shape: Shape,
    /// Sort keys `[b,g,capacity]`: integers in the order of the scores.
    pub keys: Buffer<'d, u32>,
    /// Histograms, `[b,g,3,BINS]`; the kernel that writes the sort keys fills the first histogram of each KV head.
    pub histograms: Buffer<'d, u32>,
    /// What each pass found: `[b,g,3,4]`.
    found: Buffer<'d, u32>,
    pub selection: CudaSelection<'d>,
}

impl<'d> Best<'d> {
    /// Allocates space to choose up to `most` positions per KV head.
    pub fn new(driver: &'d dyn Driver, shape: Shape, most: usize) -> Result<Self> {
        let heads = shape.heads();
        Ok(Self {
            driver,
            shape,
            keys: Buffer::new(driver, "keys of scores", heads * shape.capacity)?,
            histograms: Buffer::zeros(driver, "histograms", heads * PASSES * BINS)?,
            found: Buffer::zeros(driver, "found keys", heads * PASSES * 4)?,
            selection: CudaSelection::new(driver, &shape, most)?,
        })
    }

    /// Returns the address of the histograms of KV head `at`.
    pub fn histogram_at(&self, at: usize) -> Ptr<'_, u32> {
        self.histograms.ptr_at(at * PASSES * BINS)
    }

    /// Chooses by the current sort keys and the first histograms, which must be filled.
    pub fn choose(&self, positions: &Positions<'_>) -> Result<&CudaSelection<'d>> {
        let to = &self.selection;
        let lists = [to.lists.ptr(), to.listed.ptr()];
        self.choose_into(positions.spans.ptr(), positions.budgets.ptr(), lists, to.most)?;
        Ok(to)
    }

    /// Chooses within the given spans `[b,4]` and budgets `[b]` (at least 1); writes lists `[b,g,most]` and their
    /// lengths `[b,g]`.
    pub fn choose_into(
        &self,
        spans: Ptr<'_, u32>,
        budgets: Ptr<'_, u32>,
        [lists, listed]: [Ptr<'_, u32>; 2],
        most: usize,
    ) -> Result<()> {
        let (shape, to) = (&self.shape, &self.selection);
        let grid = shape.grid(to.blocks);
        let (keys, capacity) = (self.keys.ptr(), shape.capacity);
        let (histograms, found) = (self.histograms.ptr(), self.found.ptr());
        for pass in [1, 2] {
            kernels::NarrowKeys {
                keys,
                spans,
                budgets,
                histograms,
                found,
                pass,
                capacity,
            }
            .launch(self.driver, grid)?;
        }
        let totals = to.totals.ptr();
        kernels::CountBest {
            keys,
            spans,
            histograms,
            found,
            totals,
            capacity,
        }
        .launch(self.driver, grid)?;
        kernels::ListBest {
            keys,
            spans,
            found,
            totals,
            lists,
            listed,
            capacity,
            most,
        }
        .launch(self.driver, grid)
    }
}
