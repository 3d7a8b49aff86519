//! The sizes of a model's layers.

use crate::error::Result;
use crate::kv::cuda::Shape;
use crate::model::ModelConfig;

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

    /// Width of the keys, and of the values.
    pub(crate) fn kv(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Width of what the attention gives.
    pub fn attended(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Bytes of a workspace per row.
    pub fn bytes_per_row(&self) -> usize {
        let own = self.hidden + self.qkv() + 3 * self.attended() + 3 * self.kv();
        4 * (own + 3 * self.intermediate) + 2 * self.widest()
    }

    pub(crate) fn widest(&self) -> usize {
        self.hidden.max(self.intermediate).max(self.attended())
    }
}
