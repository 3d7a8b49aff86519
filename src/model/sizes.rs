//! The sizes of a model that keys, queries and everything calibrated from them share.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Number of layers and heads, and the width of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Decoder layers.
    pub n_layers: usize,
    /// Query heads h.
    pub n_heads: usize,
    /// KV heads g.
    pub n_kv_heads: usize,
    /// Channels per head d.
    pub head_dim: usize,
}

impl Sizes {
    /// Query heads per KV head, r = h / g.
    pub fn group(self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Checks sizes that come from a file.
    ///
    /// # Errors
    /// A size that is zero or beyond any model's, query heads that do not divide among the KV heads.
    pub fn check(self) -> Result<()> {
        for (name, size) in [
            ("n_layers", self.n_layers),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
        ] {
            if !(1..1 << 31).contains(&size) {
                return Err(Error::failed(format!("the manifest has no valid `model.{name}`")));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(Error::failed(
                "the manifest's `n_heads` is not a multiple of `n_kv_heads`",
            ));
        }
        Ok(())
    }
}
