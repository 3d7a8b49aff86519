//! The sizes of a model's layers.

use crate::error::{Error, Result};
use crate::kv::cuda::Shape;
use crate::model::ModelConfig;
use crate::model::config::Multipliers;

/// The sizes of a model's layers; all layers have the same.
#[derive(Clone, Copy, Debug)]
pub struct LayerSizes {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Number of query heads, h.
    pub n_heads: usize,
    /// Number of KV heads, g.
    pub n_kv_heads: usize,
    /// Channels per head, d.
    pub head_dim: usize,
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
        _ => return LayerSizes::from_config(c).shape(1, 1).checked().map(drop),
    };
    Err(Error::unsupported(format!("CUDA: models with {part} are not supported")).hint("use ⟨device=cpu⟩"))
}

impl LayerSizes {
    /// Returns the sizes of a model.
    pub fn from_config(c: &ModelConfig) -> Self {
        Self {
            hidden: c.hidden_size,
            intermediate: c.intermediate_size,
            n_heads: c.n_heads,
            n_kv_heads: c.n_kv_heads,
            head_dim: c.head_dim,
            eps: c.rms_norm_eps,
        }
    }

    /// Returns the attention shape of `sequences` sequences of up to `capacity` positions.
    pub fn shape(&self, sequences: usize, capacity: usize) -> Shape {
        Shape {
            sequences,
            kv_heads: self.n_kv_heads,
            group: self.n_heads / self.n_kv_heads,
            head_dim: self.head_dim,
            capacity,
        }
    }

    /// Returns the width of the joined projection of queries, keys and values.
    pub(crate) fn qkv(&self) -> usize {
        (self.n_heads + 2 * self.n_kv_heads) * self.head_dim
    }

    /// Returns the width of the keys, which is also the width of the values.
    pub(crate) fn kv(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Returns the width of the attention output.
    pub fn attended(&self) -> usize {
        self.n_heads * self.head_dim
    }

    pub(crate) fn widest(&self) -> usize {
        self.hidden.max(self.intermediate).max(self.attended())
    }
}
