//! The families of models: one file each, and one line in [`FAMILIES`].
//!
//! A family says how its models differ from the plain decoder: [`ModelConfig`] before [`Family::read`] has no biases, no
//! windows, no norm over heads, rotates every layer and has a gated MLP in each.

mod llama;
mod mistral;
mod qwen2;
mod qwen3;

use super::config::ModelConfig;
use super::fields::Fields;
use crate::error::{Error, Result};

/// A family of models.
pub struct Family {
    /// `model_type` in config.json, and the architecture in GGUF files.
    pub name: &'static str,
    /// How GGUF files order the rows of q and k; `None` if models of the family are not read from GGUF files.
    pub gguf: Option<HeadRows>,
    /// Channels of a head if config.json does not say; `None`: `hidden_size` / `num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Reads what is particular to the family.
    pub read: fn(&Fields, &mut ModelConfig) -> Result<()>,
}

/// The order of a head's rows of q and k in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadRows {
    /// As in transformers.
    AsTrained,
    /// 0, d/2, 1, d/2 + 1, ..: llama.cpp rotates neighbouring channels of these models.
    Alternating,
}

/// Every family that the decoder runs.
pub static FAMILIES: [&Family; 4] = [&llama::FAMILY, &mistral::FAMILY, &qwen2::FAMILY, &qwen3::FAMILY];

/// Returns the family of a `model_type`.
///
/// # Errors
/// No such family; the hint lists them.
pub fn family(model_type: &str) -> Result<&'static Family> {
    let found = FAMILIES.iter().find(|family| family.name == model_type);
    found.copied().ok_or_else(|| {
        let names: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
        Error::failed(format!("model_type `{model_type}` is not supported"))
            .hint(format!("supported: {}", names.join(", ")))
    })
}

/// Returns the families that are read from GGUF files.
pub fn in_gguf() -> impl Iterator<Item = &'static Family> {
    FAMILIES.iter().copied().filter(|family| family.gguf.is_some())
}

/// Reads `layer_types`: the sliding window of each layer, if the field is there. `window` is the model's window.
///
/// # Errors
/// Another number of entries than layers; a type that is not supported; a sliding layer of a model without a window.
fn typed_windows(c: &Fields, n_layers: usize, window: Option<usize>) -> Result<Option<Vec<Option<usize>>>> {
    let Some(types) = c.present("layer_types") else {
        return Ok(None);
    };
    let types = types
        .as_array()
        .ok_or_else(|| Error::failed("`layer_types` is not an array"))?;
    if types.len() != n_layers {
        return Err(Error::failed(format!(
            "`layer_types` has {} entries for {n_layers} layers",
            types.len()
        )));
    }
    let windows = types.iter().enumerate().map(|(i, kind)| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => Err(Error::failed(format!(
            "layer {i} is `sliding_attention`, but config.json does not enable a sliding window"
        ))
        .hint("set `sliding_window` (for Qwen, also `use_sliding_window`: true)")),
        Some(other) => Err(
            Error::failed(format!("layer type `{other}` (layer {i}) is not supported"))
                .hint("supported: full_attention, sliding_attention"),
        ),
        None => Err(Error::failed(
            "`layer_types` contains an entry that is not a string",
        )),
    });
    windows.collect::<Result<_>>().map(Some)
}
