//! The most recent candidates on the GPU.

use std::rc::Rc;

use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::Limits;
use crate::kv::cuda::{CudaSelection, Positions, Shape};
use crate::method::cuda::{
    ByWindow, CudaIndex, CudaMethod, CudaStep, Indexes, OnDevice, ServedLayer, each_served,
};
use crate::method::streaming as cpu;

/// The most recent candidates: see [`crate::method::streaming`].
pub struct Streaming<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    selection: CudaSelection<'d>,
}

impl<'d> Streaming<'d> {
    /// Allocates the buffers of a step, which all layers of the same shape share.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: &Limits) -> Result<Self> {
        let shape = shape.checked()?;
        Ok(Self {
            driver,
            selection: CudaSelection::new(driver, &shape, limits.most(shape.capacity))?,
            shape,
        })
    }

    /// Chooses the last candidates, those right before the window.
    pub fn select(&self, positions: &Positions<'_>) -> Result<&CudaSelection<'d>> {
        let (shape, to) = (&self.shape, &self.selection);
        kernels::ListRecent {
            spans: positions.spans.ptr(),
            budgets: positions.budgets.ptr(),
            lists: to.lists.ptr(),
            listed: to.listed.ptr(),
            most: to.most,
        }
        .launch(self.driver, shape.grid(to.most.div_ceil(256)))?;
        Ok(to)
    }
}

impl CudaMethod for cpu::Streaming {
    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        let mut shared = ByWindow::new();
        each_served(layers, |ServedLayer { limits, .. }| {
            shared.get_or_make(limits, || Streaming::new(at.driver, at.shape, limits))
        })
    }
}

impl CudaIndex for Rc<Streaming<'_>> {
    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        Streaming::select(self, step.positions).map(Some)
    }
}
