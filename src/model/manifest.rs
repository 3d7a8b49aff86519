//! What a file says about the model that it was made from.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::ModelConfig;
use super::rope::{Rope, RopeConfig};
use super::sizes::Sizes;
use crate::error::{Error, Result};

/// The `model` object of a manifest: the fields of the config that shape the forward pass, and the
/// fingerprint of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelManifest {
    /// `model_type` of the config.
    pub model_type: String,
    /// Identifies config and weights.
    pub fingerprint: String,
    /// Layers, heads and channels.
    #[serde(flatten)]
    pub sizes: Sizes,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Sliding window of every layer; `None` = all positions are visible.
    pub windows: Vec<Option<usize>>,
    /// The other fields, which nothing but the fingerprint depends on.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

impl ModelManifest {
    /// Describes a model with this config and fingerprint.
    pub fn new(config: &ModelConfig, fingerprint: &str) -> Result<Self> {
        let mut fields = config.canonical();
        fields["fingerprint"] = fingerprint.into();
        serde_json::from_value(fields).map_err(|e| Error::failed(format!("internal: model manifest: {e}")))
    }

    /// Checks the sizes and windows of a manifest that comes from a file.
    pub fn check(&self) -> Result<()> {
        self.sizes.check()?;
        let valid = self.windows.len() == self.sizes.n_layers && !self.windows.contains(&Some(0));
        match valid {
            true => Ok(()),
            false => Err(Error::failed("`model.windows` is not valid")),
        }
    }

    /// The rotary embedding of the model.
    pub fn rope(&self) -> Rope {
        Rope::new(&self.rope, self.sizes.head_dim)
    }
}
