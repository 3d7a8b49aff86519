//! What each family of models says of itself, and what several read in the same way.

use super::config::ModelConfig;
use super::fields::Fields;
use crate::error::{Error, Result};

/// A family of models.
pub struct Family {
    /// `model_type` in config.json, and the architecture in GGUF files.
    pub name: &'static str,
    /// How GGUF files order the rows of q and k; `None` if models of the family are not read from GGUF files.
    pub gguf: Option<HeadRows>,
    /// Base of the rotary frequencies if config.json does not say.
    pub rope_theta: f64,
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

/// Reads `layer_types`: the sliding window of each layer, if the field is there. `window` is the model's window.
///
/// # Errors
/// Another number of entries than layers; a type that is not supported; a sliding layer of a model without a window.
pub fn typed_windows(
    c: &Fields,
    n_layers: usize,
    window: Option<usize>,
) -> Result<Option<Vec<Option<usize>>>> {
    let Some(types) = c.present("layer_types") else {
        return Ok(None);
    };
    let types = types
        .as_array()
        .ok_or_else(|| Error::invalid("`layer_types` is not an array"))?;
    if types.len() != n_layers {
        return Err(Error::invalid(format!(
            "`layer_types` has {} entries for {n_layers} layers",
            types.len()
        )));
    }
    let windows = types.iter().enumerate().map(|(i, kind)| match kind.as_str() {
        Some("full_attention") => Ok(None),
        Some("sliding_attention") if window.is_some() => Ok(window),
        Some("sliding_attention") => Err(Error::invalid(format!(
            "layer {i} is `sliding_attention`, but config.json does not enable a sliding window"
        ))
        .hint("set `sliding_window` (for Qwen and SmolLM3, also `use_sliding_window`: true)")),
        Some(other) => Err(
            Error::unsupported(format!("layer type `{other}` (layer {i}) is not supported"))
                .hint("supported: full_attention, sliding_attention"),
        ),
        None => Err(Error::invalid(
            "`layer_types` contains an entry that is not a string",
        )),
    });
    windows.collect::<Result<_>>().map(Some)
}
