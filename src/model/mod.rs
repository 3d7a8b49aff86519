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
