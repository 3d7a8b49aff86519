//! The families of models: one file each, and one line in [`FAMILIES`].
//!
//! A family says how its models differ from the plain decoder: before [`Family::read`], a
//! [`ModelConfig`](super::ModelConfig) has no biases, no windows and no norm over heads, rotates in every layer and has a
//! gated MLP in each.

mod granite;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod qwen3_moe;
mod smollm3;

use super::family::Family;
use crate::error::{Error, Result};

/// Every family that the decoder runs.
pub static FAMILIES: &[&Family] = &[
    &granite::FAMILY,
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &qwen3_moe::FAMILY,
    &smollm3::FAMILY,
];

/// Returns the family of a `model_type`.
///
/// # Errors
/// No such family; the hint lists them.
pub fn family(model_type: &str) -> Result<&'static Family> {
    let found = FAMILIES.iter().find(|family| family.name == model_type);
    found.copied().ok_or_else(|| {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        Error::unsupported(format!("model_type `{model_type}` is not supported"))
            .hint(format!("supported: {}", names.join(", ")))
    })
}

/// Returns the families that are read from GGUF files.
pub fn in_gguf() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().copied().filter(|family| family.gguf.is_some())
}
