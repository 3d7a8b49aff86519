//! Checks that hidden states and logits are finite, without waiting for the device after each layer.

use super::blocks_for;
use super::body::Body;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};

/// A note, on the device, of the first layer whose output is not finite.
pub struct FiniteCheck<'d> {
    driver: &'d dyn Driver,
    noted: Buffer<'d, u32>,
}

impl<'d> FiniteCheck<'d> {
    /// Makes an empty note.
    pub fn new(driver: &'d dyn Driver) -> Result<Self> {
        Ok(Self {
            driver,
            noted: Buffer::zeros(driver, "a note", 1)?,
        })
    }

    /// Checks the `n` numbers that layer `layer` put out, on the device. The logits count as one more layer.
    pub fn look(&self, x: &Buffer<'_, f32>, n: usize, layer: usize) -> Result<()> {
        let blocks = blocks_for(self.driver, n);
        kernels::NoteNotFinite {
            x: x.ptr(),
            n,
            noted: self.noted.ptr(),
            stage: u32::MAX as usize - layer,
        }
        .launch(self.driver, [blocks, 1, 1])
    }

    /// Fails if a layer is noted; the error names the weights at fault. Waits for the device.
    pub fn check(&self, body: &Body<'_>) -> Result<()> {
        let noted = self.noted.read()?[0];
        if noted == 0 {
            return Ok(());
        }
        self.noted.zero()?;
        let layer = (u32::MAX - noted) as usize;
        let Some(decoder) = body.decoder else {
            return Err(Error::invalid(format!(
                "the hidden states after layer {layer} contain NaN or infinite values"
            ))
            .hint("use a smaller model; random weights overflow at these sizes"));
        };
        if layer >= decoder.config.n_layers() {
            return Err(decoder.diagnose(&[&decoder.head.weight], "the output logits"));
        }
        let weights = decoder.layer(layer)?;
        let place = format!("the hidden states after layer {layer}");
        Err(decoder.diagnose(&weights.weights(), &place))
    }
}
