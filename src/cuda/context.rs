//! One layer's keys and values of a prompt, for attention within the prompt.

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::error::Result;
use crate::float::Float;
use crate::kv::Limits;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::rows::CudaRows;
use crate::kv::cuda::{Positions, Shape};

/// One layer's keys and values of one sequence.
pub struct LayerContext<'d> {
    pub(crate) rows: LayerRows<'d>,
    positions: Positions<'d>,
}

impl<'d> LayerContext<'d> {
    /// Allocates space for as many positions as the shape, that of one sequence, has room for.
    ///
    /// # Errors
    /// A model whose attention the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, float: Float) -> Result<Self> {
        let shape = shape.checked()?;
        Ok(Self {
            rows: LayerRows::new(driver, shape, float)?,
            positions: Positions::new(driver, shape, Limits::last(1))?,
        })
    }

    /// Removes all positions.
    pub fn clear(&mut self) -> Result<()> {
        self.positions.set(&[0])
    }

    /// Appends the keys and values of the next `m` positions, `[g,m,d]`.
    pub fn append(&mut self, keys: &Buffer<'_, f32>, values: &Buffer<'_, f32>, m: usize) -> Result<()> {
        self.positions.advance(m)?;
        self.rows.append(keys, values, m, &self.positions)
    }
}
