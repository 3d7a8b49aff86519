//! streaming and random on the GPU: choices that look at no key.

use super::super::driver::{self, Arg, Driver};
use super::{Limits, Positions, Selection, Shape};
use crate::error::Result;
use crate::method::random::Random;

/// The most recent candidates: see [`crate::method::streaming`].
pub struct Streaming<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    selection: Selection<'d>,
}

impl<'d> Streaming<'d> {
    /// Room for one step; one for all layers of a shape.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: &Limits) -> Result<Self> {
        let shape = shape.checked()?;
        Ok(Self {
            driver,
            selection: Selection::new(driver, &shape, limits.most(shape.capacity))?,
            shape,
        })
    }

    /// Chooses the last candidates before the window.
    pub fn select(&self, positions: &Positions<'_>) -> Result<&Selection<'d>> {
        let (shape, to) = (&self.shape, &self.selection);
        let args = [
            positions.spans.arg(),
            positions.budgets.arg(),
            to.lists.arg(),
            to.listed.arg(),
            Arg::u32(to.most),
        ];
        let grid = [to.most.div_ceil(256), shape.kv_heads, shape.sequences];
        driver::launch(self.driver, "list_recent", grid, &args)?;
        Ok(to)
    }
}

/// Candidates drawn uniformly, the same as on the CPU: see [`crate::method::random`]. The host draws.
pub struct Draws<'d> {
    /// Per KV head of a sequence.
    heads: Vec<Random>,
    selection: Selection<'d>,
}

impl<'d> Draws<'d> {
    /// The draws of one layer.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        seed: u64,
        layer: usize,
    ) -> Result<Self> {
        let shape = shape.checked()?;
        let head = |kv_head| Random::new(seed, layer, kv_head);
        Ok(Self {
            heads: (0..shape.kv_heads).map(head).collect(),
            selection: Selection::new(driver, &shape, limits.most(shape.capacity))?,
        })
    }

    /// Draws for decode step number `step`, from 0.
    pub fn select(&self, step: usize, positions: &Positions<'_>) -> Result<&Selection<'d>> {
        let mut lists = Vec::new();
        for (set, budget) in positions.sets() {
            let draw = |head: &Random| head.draw(step, set.candidates.clone(), budget);
            lists.extend(self.heads.iter().map(draw));
        }
        self.selection.write(&lists)?;
        Ok(&self.selection)
    }
}
