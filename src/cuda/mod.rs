//! The forward pass on an NVIDIA GPU: the same as [`crate::model::decoder`].
//!
//! [`LayerWeights`] are one layer's weights on the device, in the type that the checkpoint stores; [`Workspace`] is
//! where some rows pass through a layer. [`forward::CudaForward`] runs prompts and tokens with the caches on the host,
//! [`layers::CudaLayers`] calibration text with one layer's weights on the device at a time.

mod body;
pub mod forward;
pub mod host;
pub mod layers;
pub mod sample;
pub mod session;
mod weights;
mod work;

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::float::Float;
use crate::kv::Budget;
use crate::kv::cuda::attend::LayerRows;
use crate::kv::cuda::{Limits, Positions, Shape};
use crate::model::ModelConfig;
pub use body::Body;
pub use weights::LayerWeights;
pub use work::{Rotation, Standing, Workspace};

/// Rows that pass a layer together.
pub const ROWS: usize = 4096;

/// The sizes that all layers have in common.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// h.
    pub n_heads: usize,
    /// g.
    pub n_kv_heads: usize,
    /// d.
    pub head_dim: usize,
    /// Of every norm.
    pub eps: f32,
}

impl LayerSizes {
    /// Those of a model.
    pub fn of(c: &ModelConfig) -> Self {
        Self {
            hidden: c.hidden_size,
            intermediate: c.intermediate_size,
            n_heads: c.n_heads,
            n_kv_heads: c.n_kv_heads,
            head_dim: c.head_dim,
            eps: c.rms_norm_eps,
        }
    }

    /// Checks that the kernels are made for a model's attention.
    ///
    /// # Errors
    /// What they are not made for.
    pub fn check(&self) -> Result<()> {
        self.shape(1, 1).checked().map(drop)
    }

    /// The shape of one sequence's attention with room for `capacity` positions.
    pub fn shape(&self, sequences: usize, capacity: usize) -> Shape {
        Shape {
            sequences,
            kv_heads: self.n_kv_heads,
            group: self.n_heads / self.n_kv_heads,
            head_dim: self.head_dim,
            capacity,
        }
    }

    /// Width of the joined projection.
    pub(crate) fn qkv(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Width of what the attention gives.
    pub fn attended(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Bytes of a workspace per row.
    pub fn bytes_per_row(&self) -> usize {
        let own = self.hidden + self.qkv() + 3 * self.attended() + 3 * self.n_kv_heads * self.head_dim;
        4 * (own + 3 * self.intermediate) + 2 * self.widest()
    }

    pub(crate) fn widest(&self) -> usize {
        self.hidden.max(self.intermediate).max(self.attended())
    }
}

/// One layer's rows of one sequence, to be attended by its own queries.
pub struct Prompted<'d> {
    pub(crate) rows: LayerRows<'d>,
    pub(crate) positions: Positions<'d>,
}

impl<'d> Prompted<'d> {
    /// Room for `n` positions.
    ///
    /// # Errors
    /// A model whose attention the kernels are not made for; no memory.
    pub fn new(driver: &'d dyn Driver, sizes: &LayerSizes, float: Float, n: usize) -> Result<Self> {
        let shape = sizes.shape(1, n).checked()?;
        let limits = Limits {
            sinks: 0,
            window: 1,
            model_window: None,
            budget: Budget::Count(1),
        };
        Ok(Self {
            rows: LayerRows::new(driver, shape, float)?,
            positions: Positions::new(driver, shape, limits)?,
        })
    }

    /// Forgets all positions.
    pub fn clear(&mut self) -> Result<()> {
        self.positions.set(&[0])
    }

    /// Takes in the keys and values of the next `m` positions, `[g,m,d]`.
    pub fn append(&mut self, keys: &Buffer<'_, f32>, values: &Buffer<'_, f32>, m: usize) -> Result<()> {
        self.positions.advance(m)?;
        self.rows.append(keys, values, m, &self.positions)
    }

    /// Attends queries `[h,m,d]` at the positions from `first` on; out `[m, h d]`.
    pub fn attend(
        &self,
        queries: &Buffer<'_, f32>,
        m: usize,
        first: usize,
        window: Option<usize>,
        out: &Buffer<'_, f32>,
    ) -> Result<()> {
        self.rows.attend_prompt(queries, first, m, window, out)
    }
}

/// Blocks for a loop over n numbers in strides of the whole grid.
fn blocks_for(driver: &dyn Driver, n: usize) -> usize {
    n.div_ceil(256).min(32 * driver.multiprocessors())
}

/// Numbers that are not finite, by the stage that had them.
pub struct Watch<'d> {
    driver: &'d dyn Driver,
    noted: Buffer<'d, u32>,
}

impl<'d> Watch<'d> {
    /// Nothing noted yet.
    pub fn new(driver: &'d dyn Driver) -> Result<Self> {
        Ok(Self {
            driver,
            noted: Buffer::zeros(driver, "a note", 1)?,
        })
    }

    /// Looks at `n` numbers after layer `layer`; one beyond the last is for the logits.
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

    /// Fails if a stage was noted, naming the culprit of the first; waits for the device.
    pub fn check(&self, body: &Body<'_>) -> Result<()> {
        let noted = self.noted.read()?.first().copied().unwrap_or(0);
        if noted == 0 {
            return Ok(());
        }
        self.noted.zero()?;
        let layer = (u32::MAX - noted) as usize;
        let Some(decoder) = body.decoder else {
            return Err(crate::error::Error::failed(format!(
                "the hidden states after layer {layer} are not finite"
            )));
        };
        if layer >= decoder.config.n_layers {
            return Err(decoder.diagnose(&[&decoder.head.weight], "the output logits"));
        }
        let weights = decoder.layer(layer)?;
        let place = format!("the hidden states after layer {layer}");
        Err(decoder.diagnose(&weights.weights(), &place))
    }
}
