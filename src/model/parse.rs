//! Reads `config.json`, or what stands for it in a GGUF file.

use std::path::Path;

use serde_json::Value;

use super::config::{Block, MAX_HEAD_DIM, ModelConfig, Multipliers};
use super::families::family;
use super::fields::{Fields, read_json, token_ids};
use super::folder;
use super::gguf::Gguf;
use super::rope::{Rope, RopeConfig};
use crate::error::{Error, Result};

const MAX_LAYERS: usize = 4096;

impl ModelConfig {
    /// Reads `dir/config.json`, and the stop tokens of `dir/generation_config.json` if it exists; or the metadata of a
    /// GGUF file.
    ///
    /// # Errors
    /// A missing or malformed file; an unsupported architecture, rope or layer type (the message lists
    /// the supported ones); sizes that contradict each other.
    pub fn load(dir: &Path) -> Result<Self> {
        if let Some(gguf) = Gguf::at(dir)? {
            return gguf.config();
        }
        folder::check(dir)?;
        let path = dir.join("config.json");
        const CHECK: &str =
            "the file is damaged or the model is not supported; compare config.json with the published one";
        let value = read_json(&path)?;
        folder::check_weights(dir, &value)?;
        let mut config = Self::parse(&value).map_err(|e| e.context(path.display()).or_hint(CHECK))?;
        let generation = dir.join("generation_config.json");
        if generation.is_file() {
            let value = read_json(&generation)?;
            // As in transformers, these stop tokens replace those of config.json.
            let ids = token_ids(value.get("eos_token_id"), "eos_token_id")
                .map_err(|e| e.context(generation.display()).or_hint(CHECK))?;
            if !ids.is_empty() {
                config.eos_token_ids = ids;
            }
        }
        Ok(config)
    }

    /// Interprets the JSON value of a `config.json`.
    pub fn parse(value: &Value) -> Result<Self> {
        let map = value.as_object();
        let map = map.ok_or_else(|| Error::invalid("expected a JSON object"))?;
        let c = Fields { map };
        let model_type = c
            .string_opt("model_type")?
            .ok_or_else(|| Fields::missing("model_type"))?;
        let family = family(model_type)?;
        check_supported(&c)?;
        let hidden_size = c.size("hidden_size")?;
        let n_layers = c.size("num_hidden_layers")?;
        if n_layers > MAX_LAYERS {
            return Err(Error::invalid(format!(
                "num_hidden_layers {n_layers} is out of range (at most {MAX_LAYERS})"
            )));
        }
        let (n_heads, n_kv_heads, head_dim) = heads(&c, family.head_dim, hidden_size)?;
        let max_position_embeddings = c.size_opt("max_position_embeddings")?.unwrap_or(2048);
        let rms_norm_eps = c.number_or("rms_norm_eps", 1e-6)? as f32;
        if !(rms_norm_eps.is_finite() && rms_norm_eps >= 0.0) {
            return Err(Error::invalid(format!(
                "rms_norm_eps {rms_norm_eps} is out of range"
            )));
        }
        let rope = RopeConfig::parse(&c, max_position_embeddings, family.rope_theta)?;
        Rope::new(&rope, head_dim).check()?;
        let plain = Block {
            window: None,
            rotates: true,
            experts: None,
        };
        let mut model = Self {
            model_type: model_type.to_owned(),
            hidden_size,
            intermediate_size: c.size("intermediate_size")?,
            n_heads,
            n_kv_heads,
            head_dim,
            vocab_size: c.size("vocab_size")?,
            rms_norm_eps,
            tie_word_embeddings: c.bool_or("tie_word_embeddings", false)?,
            qkv_bias: false,
            o_bias: false,
            mlp_bias: false,
            qk_norm: false,
            max_position_embeddings,
            rope,
            multipliers: Multipliers::ONE,
            blocks: vec![plain; n_layers],
            bos_token_id: token_ids(map.get("bos_token_id"), "bos_token_id")?
                .first()
                .copied(),
            eos_token_ids: token_ids(map.get("eos_token_id"), "eos_token_id")?,
        };
        (family.read)(&c, &mut model)?;
        Ok(model)
    }
}

/// Fails for activations and rotations that no family has here.
fn check_supported(c: &Fields) -> Result<()> {
    let act = c.string_opt("hidden_act")?.unwrap_or("silu");
    if act != "silu" {
        return Err(
            Error::unsupported(format!("hidden_act `{act}` is not supported")).hint("supported: silu")
        );
    }
    let partial = c.number_or("partial_rotary_factor", 1.0)?;
    if partial != 1.0 {
        return Err(
            Error::unsupported(format!("partial_rotary_factor {partial} is not supported"))
                .hint("only models that rotate every channel of a head are supported"),
        );
    }
    Ok(())
}

/// Finds the numbers of query heads and of KV heads, and the channels of a head.
fn heads(c: &Fields, default: Option<usize>, hidden_size: usize) -> Result<(usize, usize, usize)> {
    let n_heads = c.size("num_attention_heads")?;
    let n_kv_heads = c.size_opt("num_key_value_heads")?.unwrap_or(n_heads);
    let head_dim = match c.size_opt("head_dim")?.or(default) {
        Some(d) => d,
        None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
        None => {
            return Err(Error::invalid(format!(
                "hidden_size {hidden_size} is not a multiple of num_attention_heads {n_heads}, and there is no head_dim"
            )));
        }
    };
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(Error::invalid(format!(
            "num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}"
        )));
    }
    if !head_dim.is_multiple_of(4) || head_dim > MAX_HEAD_DIM {
        return Err(
            Error::unsupported(format!("head_dim {head_dim} is not supported")).hint(format!(
                "head_dim must be a multiple of 4 and at most {MAX_HEAD_DIM}"
            )),
        );
    }
    Ok((n_heads, n_kv_heads, head_dim))
}
