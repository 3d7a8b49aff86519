//! A decoder's checkpoint, a Hugging Face folder or a GGUF file: its configuration, weights, tokenizer, chat template
//! and forward pass.
//!
//! In shapes, h is the number of query heads, g of KV heads, r = h / g of query heads per KV head, and d of
//! channels per head.

pub mod chat;
pub mod config;
pub mod decoder;
pub mod families;
pub mod family;
pub mod fields;
pub mod folder;
pub mod forward;
pub mod gguf;
pub mod layer;
pub mod manifest;
pub mod mlp;
mod parse;
pub mod random;
pub mod rope;
pub mod sizes;
pub mod tokenizer;
pub mod weights;

pub use config::ModelConfig;
pub use decoder::Decoder;
pub use forward::Forward;
pub use layer::{Layer, States};
pub use manifest::ModelManifest;
pub use sizes::Sizes;
pub use weights::Checkpoint;

use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::quant::Quant;
use tokenizer::Tokenizer;

/// A checkpoint that was opened: where it lies, and its decoder.
pub struct Model {
    /// The folder of the checkpoint, or its GGUF file.
    pub path: PathBuf,
    /// The configuration and weights.
    pub decoder: Decoder,
}

impl Model {
    /// Opens a Hugging Face folder or a GGUF file.
    ///
    /// # Errors
    /// Those of [`Decoder::open`].
    pub fn open(path: &Path) -> Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            decoder: Decoder::open(path)?,
        })
    }

    /// Rounds the weights in memory; `None` leaves them as they are.
    ///
    /// # Errors
    /// Those of [`Decoder::rounded`].
    pub fn rounded(self, quant: Option<Quant>) -> Result<Self> {
        let decoder = self.decoder.rounded(quant)?;
        Ok(Self { decoder, ..self })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.decoder.config
    }

    /// Opens the tokenizer.
    ///
    /// # Errors
    /// There is none ([`Model::has_tokenizer`]), or it is damaged.
    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::open(&self.path, &self.decoder.config)
    }

    /// Tells whether the checkpoint has a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        Tokenizer::exists(&self.path)
    }

    /// Returns the fingerprint of the configuration and the weights, by which an artifact knows its model.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn fingerprint(&self) -> Result<String> {
        self.decoder.checkpoint.fingerprint(&self.decoder.config)
    }

    /// Describes the model for a manifest.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn manifest(&self) -> Result<ModelManifest> {
        ModelManifest::new(&folder::name(&self.path), self.config(), &self.fingerprint()?)
    }
}
