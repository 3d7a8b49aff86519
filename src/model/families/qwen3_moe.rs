//! Qwen3's mixtures of experts: Qwen3 with a mixture in place of the MLP of all layers or some.

use serde_json::Value;

use super::qwen3;
use crate::error::{Error, Result};
use crate::model::config::{ExpertsConfig, ModelConfig};
use crate::model::family::Family;
use crate::model::fields::Fields;

pub(super) const FAMILY: Family = Family {
    name: "qwen3_moe",
    gguf: None,
    rope_theta: 10_000.0,
    head_dim: None,
    read,
};

/// Most experts of a layer; models have at most a few hundred.
const MOST_EXPERTS: usize = 4096;

fn read(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    qwen3::biases_and_norm(c, model)?;
    if c.bool_or("use_sliding_window", false)? {
        // One window for all layers, as in Mistral.
        model.set_windows(&vec![c.window()?; model.n_layers()]);
    }
    let count = c.size_opt("num_experts")?.unwrap_or(128);
    let active = c.size_opt("num_experts_per_tok")?.unwrap_or(8);
    if count > MOST_EXPERTS || active > count {
        return Err(Error::unsupported(format!(
            "{active} of {count} experts per token are not supported"
        ))
        .hint(format!(
            "`num_experts` must be at most {MOST_EXPERTS}, and `num_experts_per_tok` at most `num_experts`"
        )));
    }
    let mixture = ExpertsConfig {
        count,
        active,
        width: c.size_opt("moe_intermediate_size")?.unwrap_or(768),
        normalises: c.bool_or("norm_topk_prob", false)?,
    };
    let step = c.size_opt("decoder_sparse_step")?.unwrap_or(1);
    let plain = plain_layers(c)?;
    for (i, block) in model.blocks.iter_mut().enumerate() {
        let has = (i + 1).is_multiple_of(step) && !plain.contains(&(i as u64));
        block.experts = has.then(|| mixture.clone());
    }
    Ok(())
}

/// Reads `mlp_only_layers`: the layers with a plain MLP.
fn plain_layers(c: &Fields) -> Result<Vec<u64>> {
    let Some(given) = c.present("mlp_only_layers") else {
        return Ok(Vec::new());
    };
    let layers = given
        .as_array()
        .and_then(|of| of.iter().map(Value::as_u64).collect());
    layers.ok_or_else(|| Error::invalid("`mlp_only_layers` is not a list of layers"))
}
