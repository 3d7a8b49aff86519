//! The sizes of a model's layers.

use crate::error::{Error, Result};
use crate::model::config::Multipliers;
use crate::model::{ModelConfig, Sizes};

/// The sizes of a model's layers; all layers have the same.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// The heads and their channels.
    pub heads: Sizes,
    /// Epsilon of every RMS norm.
    pub eps: f32,
}

/// Checks that the kernels support a model.
///
/// # Errors
/// Sizes of attention or parts of the layers that the kernels do not support.
pub fn check_model(c: &ModelConfig) -> Result<()> {
    let part = match c {
        _ if c.multipliers != Multipliers::ONE => "constant factors on activations",
        _ if !c.no_rope_layers().is_empty() => "layers without RoPE",
        _ if c.blocks.iter().any(|block| block.experts.is_some()) => "mixtures of experts",
        _ => return c.sizes().shape(1, 1).checked().map(drop),
    };
    Err(Error::unsupported(format!("CUDA: models with {part} are not supported")).hint("use ⟨device=cpu⟩"))
}

impl LayerSizes {
    /// Returns the sizes of a model.
    pub fn from_config(c: &ModelConfig) -> Self {
        Self {
            hidden: c.hidden_size,
            intermediate: c.intermediate_size,
            heads: c.sizes(),
            eps: c.rms_norm_eps,
        }
    }

    /// Returns the width of the joined projection of queries, keys and values.
    pub(crate) fn qkv(&self) -> usize {
        self.attended() + 2 * self.kv()
    }

    /// Returns the width of the keys, which is also the width of the values.
    pub(crate) fn kv(&self) -> usize {
        self.heads.n_kv_heads * self.heads.head_dim
    }

    /// Returns the width of the attention output.
    pub fn attended(&self) -> usize {
        self.heads.n_heads * self.heads.head_dim
    }

    pub(crate) fn widest(&self) -> usize {
        self.hidden.max(self.intermediate).max(self.attended())
    }
}
