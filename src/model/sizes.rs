//! The sizes of a model on which the shapes of keys, queries and all calibrated data depend.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kv::Shape;

/// The numbers of layers and heads of a model, and the width of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sizes {
    /// Number of decoder layers.
    pub n_layers: usize,
    /// Number of query heads, h.
    pub n_heads: usize,
    /// Number of KV heads, g.
    pub n_kv_heads: usize,
    /// Number of channels per head, d.
    pub head_dim: usize,
}

impl Sizes {
    /// Returns the number of query heads per KV head, r = h / g.
    pub fn group(self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Returns the sizes of a layer's cache for `sequences` sequences of up to `capacity` positions.
    pub fn shape(self, sequences: usize, capacity: usize) -> Shape {
        Shape {
            sequences,
            kv_heads: self.n_kv_heads,
            group: self.group(),
            head_dim: self.head_dim,
            capacity,
        }
    }

    /// Checks sizes that were read from a file.
    ///
    /// # Errors
    /// A size that is zero or implausibly large; query heads that are no multiple of the KV heads.
    pub fn check(self) -> Result<()> {
        for (name, size) in [
            ("n_layers", self.n_layers),
            ("n_heads", self.n_heads),
            ("n_kv_heads", self.n_kv_heads),
            ("head_dim", self.head_dim),
        ] {
            if !(1..1 << 31).contains(&size) {
                return Err(Error::damaged(format!(
                    "the manifest has no valid `model.{name}`"
                )));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(Error::damaged(
                "the manifest's `n_heads` is not a multiple of `n_kv_heads`",
            ));
        }
        Ok(())
    }
}
