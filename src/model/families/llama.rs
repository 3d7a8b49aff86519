//! Llama, and the many models of its form, SmolLM2 among them.

use crate::error::Result;
use crate::model::config::ModelConfig;
use crate::model::family::{Family, HeadRows, typed_windows};
use crate::model::fields::Fields;

pub(super) const FAMILY: Family = Family {
    name: "llama",
    gguf: Some(HeadRows::Alternating),
    rope_theta: 10_000.0,
    head_dim: None,
    read,
};

pub(super) fn read(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    typed_windows(c, model.n_layers(), None)?;
    biases(c, model)
}

/// Reads which projections have a bias.
pub(super) fn biases(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    model.qkv_bias = c.bool_or("attention_bias", false)?;
    model.o_bias = model.qkv_bias;
    model.mlp_bias = c.bool_or("mlp_bias", false)?;
    Ok(())
}
