//! The positions of a model's layers; layers with the same sliding window share them.

use crate::compute::cuda::driver::Driver;
use crate::error::Result;
use crate::kv::Limits;
use crate::kv::cuda::{Positions, Shape};

/// The positions of a model's layers, one set per different sliding window.
pub(super) struct Windows<'d> {
    /// The positions of each different sliding window.
    pub positions: Vec<Positions<'d>>,
    /// For each layer, the index of its positions in `positions`.
    of_layer: Vec<usize>,
}

impl<'d> Windows<'d> {
    /// Makes the positions of empty caches with these limits; `windows` holds the sliding window of every layer.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: Limits,
        windows: &[Option<usize>],
    ) -> Result<Self> {
        let (mut positions, mut of_layer) = (Vec::<Positions<'d>>::new(), Vec::new());
        for window in windows {
            let known = positions.iter().position(|p| p.limits.model_window == *window);
            of_layer.push(known.unwrap_or(positions.len()));
            if known.is_none() {
                positions.push(Positions::new(driver, shape, limits.in_layer(*window))?);
            }
        }
        Ok(Self { positions, of_layer })
    }

    /// Returns the limits of every layer.
    pub fn limits(&self) -> Vec<Limits> {
        (0..self.of_layer.len())
            .map(|layer| self.layer(layer).limits)
            .collect()
    }

    /// Sets the lengths of the caches, one per sequence.
    ///
    /// # Errors
    /// A length beyond the capacity.
    pub fn set(&mut self, lens: &[u32]) -> Result<()> {
        self.positions.iter_mut().try_for_each(|p| p.set(lens))
    }

    /// Returns the positions of a layer.
    pub fn layer(&self, layer: usize) -> &Positions<'d> {
        &self.positions[self.of_layer[layer]]
    }

    /// Returns the positions of a layer, for changes.
    pub fn layer_mut(&mut self, layer: usize) -> &mut Positions<'d> {
        &mut self.positions[self.of_layer[layer]]
    }
}
