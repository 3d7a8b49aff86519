//! Granite 3: Llama with constant factors on embeddings, attention scores, residuals and logits.

use super::llama;
use crate::error::{Error, Result};
use crate::model::config::{ModelConfig, Multipliers};
use crate::model::family::Family;
use crate::model::fields::Fields;

pub(super) const FAMILY: Family = Family {
    name: "granite",
    gguf: None,
    rope_theta: 10_000.0,
    head_dim: None,
    read,
};

fn read(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    llama::read(c, model)?;
    let factor = |name: &str| -> Result<f64> {
        let found = c.number_or(name, 1.0)?;
        let is_valid = (1e-6..=1e6).contains(&found);
        is_valid.then_some(found).ok_or_else(|| {
            Error::invalid(format!("{name} {found} is out of range")).hint("factors are from 1e-6 to 1e6")
        })
    };
    model.multipliers = Multipliers {
        embedding: factor("embedding_multiplier")? as f32,
        // `attention_multiplier` takes the place of 1 / sqrt(d).
        query: (factor("attention_multiplier")? * (model.head_dim as f64).sqrt()) as f32,
        residual: factor("residual_multiplier")? as f32,
        logits: (1.0 / factor("logits_scaling")?) as f32,
    };
    Ok(())
}
