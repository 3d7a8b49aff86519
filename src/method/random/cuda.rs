//! Uniform draws for the GPU: the host draws the same positions as on the CPU.

use super::{RandomDraws, Seed};
use crate::compute::cuda::driver::Driver;
use crate::error::Result;
use crate::kv::Limits;
use crate::kv::cuda::{CudaSelection, Positions, Shape};
use crate::method::cuda::{CudaIndex, CudaMethod, CudaStep, Indexes, OnDevice, ServedLayer, each_served};

/// The draws of one layer: see [`crate::method::random`].
pub struct Draws<'d> {
    /// The draws of each KV head.
    heads: Vec<RandomDraws>,
    selection: CudaSelection<'d>,
}

impl<'d> Draws<'d> {
    /// Makes the draws of a layer.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        seed: u64,
        layer: usize,
        kv_heads: impl IntoIterator<Item = usize>,
    ) -> Result<Self> {
        let shape = shape.checked()?;
        let head = |kv_head| RandomDraws::new(seed, layer, kv_head);
        Ok(Self {
            heads: kv_heads.into_iter().map(head).collect(),
            selection: CudaSelection::new(driver, &shape, limits.most(shape.capacity))?,
        })
    }

    /// Draws for decode step number `step`, counted from 0.
    pub fn select(&self, step: usize, positions: &Positions<'_>) -> Result<&CudaSelection<'d>> {
        let mut lists = Vec::new();
        for (set, budget) in positions.sets() {
            let draw = |head: &RandomDraws| head.draw(step, set.candidates.clone(), budget);
            lists.extend(self.heads.iter().map(draw));
        }
        self.selection.write(&lists)?;
        Ok(&self.selection)
    }
}

impl CudaMethod for Seed {
    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        each_served(layers, |of| {
            let heads = of.heads.iter().copied();
            Draws::new(at.driver, at.shape, &of.limits, self.0, of.layer, heads)
        })
    }
}

impl CudaIndex for Draws<'_> {
    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        Draws::select(self, step.number, step.positions).map(Some)
    }

    fn is_recordable(&self) -> bool {
        false
    }
}
