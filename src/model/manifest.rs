//! The description of a model in the manifest of a file that was made from it.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::config::{MAX_HEAD_DIM, ModelConfig};
use super::rope::{Rope, RopeConfig, Ropes};
use super::sizes::Sizes;
use crate::error::{Error, Result};

/// The `model` object of a manifest: the config fields that decide the forward pass, and the
/// fingerprint of the checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelManifest {
    /// What the model's folder was called.
    #[serde(default, skip_serializing_if = "ModelName::is_unknown")]
    pub name: ModelName,
    /// `model_type` of the config.
    pub model_type: String,
    /// Fingerprint of config and weights.
    pub fingerprint: String,
    /// Numbers of layers, heads and channels.
    #[serde(flatten)]
    pub sizes: Sizes,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Layers without it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_rope_layers: Vec<usize>,
    /// Sliding window of every layer; `None` = all positions are visible.
    pub windows: Vec<Option<usize>>,
    /// The model's context; `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_position_embeddings: Option<usize>,
    /// The other fields; only the fingerprint depends on them.
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// The name of a model, for people. It tells no model from another: all names are equal.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ModelName(Option<String>);

impl PartialEq for ModelName {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl ModelName {
    fn is_unknown(&self) -> bool {
        self.0.is_none()
    }

    /// Returns the name, or an empty text for a file of an earlier version.
    pub fn as_str(&self) -> &str {
        self.0.as_deref().unwrap_or_default()
    }
}

impl ModelManifest {
    /// Makes the description of a model with this name, config and fingerprint.
    pub fn new(name: &str, config: &ModelConfig, fingerprint: &str) -> Result<Self> {
        let mut fields = config.canonical();
        fields["name"] = name.into();
        fields["fingerprint"] = fingerprint.into();
        fields["max_position_embeddings"] = config.max_position_embeddings.into();
        serde_json::from_value(fields).map_err(|e| Error::internal(format!("internal: model manifest: {e}")))
    }

    /// Checks the sizes, windows and rotary embedding of a manifest that was read from a file.
    pub fn check(&self) -> Result<()> {
        self.sizes.check()?;
        let valid = self.windows.len() == self.sizes.n_layers && !self.windows.contains(&Some(0));
        if !valid {
            return Err(Error::damaged("`model.windows` is invalid"));
        }
        if self
            .no_rope_layers
            .iter()
            .any(|layer| *layer >= self.sizes.n_layers)
        {
            return Err(Error::damaged("`model.no_rope_layers` is invalid"));
        }
        Rope::new(&self.rope, self.sizes.head_dim.min(MAX_HEAD_DIM)).check()
    }

    /// Computes the rotary embeddings of the model's layers.
    pub fn ropes(&self) -> Ropes {
        Ropes::new(&self.rope, self.sizes.head_dim, self.no_rope_layers.clone())
    }
}
