//! Qwen3: an RMS norm over each head of q and k; windows as in Qwen2.

use super::qwen2;
use crate::error::Result;
use crate::model::config::ModelConfig;
use crate::model::family::{Family, HeadRows};
use crate::model::fields::Fields;

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    gguf: Some(HeadRows::AsTrained),
    rope_theta: 10_000.0,
    head_dim: Some(128),
    read,
};

fn read(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    biases_and_norm(c, model)?;
    qwen2::windows(c, model)
}

/// Reads which projections have a bias; the norm is in all models.
pub(super) fn biases_and_norm(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    model.qk_norm = true;
    model.qkv_bias = c.bool_or("attention_bias", false)?;
    model.o_bias = model.qkv_bias;
    Ok(())
}
