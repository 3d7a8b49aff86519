//! SmolLM3: Llama without rotation in every fourth layer.

use serde_json::Value;

use super::llama;
use crate::error::{Error, Result};
use crate::model::config::ModelConfig;
use crate::model::family::{Family, typed_windows};
use crate::model::fields::Fields;

pub(super) const FAMILY: Family = Family {
    name: "smollm3",
    gguf: None,
    rope_theta: 2_000_000.0,
    head_dim: None,
    read,
};

fn read(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    llama::biases(c, model)?;
    // transformers leaves out what is its default.
    model.tie_word_embeddings = c.bool_or("tie_word_embeddings", true)?;
    let rotates = rotates(c, model.n_layers())?;
    for (block, rotates) in model.blocks.iter_mut().zip(rotates) {
        block.rotates = rotates;
    }
    let window = if c.bool_or("use_sliding_window", false)? {
        c.size_opt("sliding_window")?
    } else {
        None
    };
    let windows = match typed_windows(c, model.n_layers(), window)? {
        Some(windows) => windows,
        // Layers without rotation are the ones that slide.
        None => model
            .blocks
            .iter()
            .map(|block| window.filter(|_| !block.rotates))
            .collect(),
    };
    model.set_windows(&windows);
    Ok(())
}

/// Reads which layers rotate: `no_rope_layers`, which has a 1 for a layer that does, despite its name.
fn rotates(c: &Fields, n: usize) -> Result<Vec<bool>> {
    let Some(given) = c.present("no_rope_layers") else {
        let interval = c.size_opt("no_rope_layer_interval")?.unwrap_or(4);
        return Ok((1..=n).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    let flags: Option<Vec<bool>> = given.as_array().and_then(|given| {
        let flag = |of: &Value| of.as_bool().or_else(|| of.as_u64().map(|of| of != 0));
        given.iter().map(flag).collect()
    });
    flags.filter(|flags| flags.len() >= n).ok_or_else(|| {
        Error::invalid(format!(
            "`no_rope_layers` is not a list of zeros and ones for all {n} layers"
        ))
    })
}
