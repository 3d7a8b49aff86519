//! `config.json`: a decoder's architecture, sizes, rotary embedding and sliding windows.

use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use super::fields::{Fields, read_json, token_ids};
use super::folder;
use super::gguf::Gguf;
use super::rope::{Rope, RopeConfig};
use super::sizes::Sizes;
use crate::error::{Error, Result};

/// `model_type` values that the decoder runs.
pub const SUPPORTED_MODELS: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];
const MAX_LAYERS: usize = 4096;
/// Most channels of a head.
pub const MAX_HEAD_DIM: usize = 4096;
const SUPPORTED_LAYERS: [&str; 2] = ["full_attention", "sliding_attention"];

/// The settings in a checkpoint's `config.json`; only those that decide the forward pass are serialised.
#[derive(Clone, Debug, Serialize)]
pub struct ModelConfig {
    /// `model_type`, one of [`SUPPORTED_MODELS`].
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub n_layers: usize,
    /// Number of query heads, h.
    pub n_heads: usize,
    /// Number of KV heads, g.
    pub n_kv_heads: usize,
    /// Number of channels per head, d.
    pub head_dim: usize,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Whether the embedding is the output projection too.
    pub tie_word_embeddings: bool,
    /// Whether the q, k and v projections have a bias.
    pub qkv_bias: bool,
    /// Whether the projection of the attention output has a bias.
    pub o_bias: bool,
    /// Whether the MLP projections have a bias.
    pub mlp_bias: bool,
    /// Whether each head of q and k passes an RMS norm.
    pub qk_norm: bool,
    /// Longest context that the model claims to support.
    #[serde(skip)]
    pub max_position_embeddings: usize,
    /// The rotary embedding.
    pub rope: RopeConfig,
    /// Sliding window per layer: the number of visible positions, the current one included; `None` = all.
    pub windows: Vec<Option<usize>>,
    /// Token that begins a document.
    #[serde(skip)]
    pub bos_token_id: Option<u32>,
    /// Tokens that end generation.
    #[serde(skip)]
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Says whether this token ends generation.
    pub fn is_stop_token(&self, id: u32) -> bool {
        self.eos_token_ids.contains(&id)
    }

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
        let map = map.ok_or_else(|| Error::failed("expected a JSON object"))?;
        let c = Fields { map };
        let model_type = c
            .string_opt("model_type")?
            .ok_or_else(|| Fields::missing("model_type"))?;
        check_supported(&c, model_type)?;
        let hidden_size = c.size("hidden_size")?;
        let n_layers = c.size("num_hidden_layers")?;
        if n_layers > MAX_LAYERS {
            return Err(Error::failed(format!(
                "num_hidden_layers {n_layers} is out of range (at most {MAX_LAYERS})"
            )));
        }
        let (n_heads, n_kv_heads, head_dim) = heads(&c, model_type, hidden_size)?;
        let max_position_embeddings = c.size_opt("max_position_embeddings")?.unwrap_or(2048);
        let attention_bias = c.bool_or("attention_bias", false)?;
        let rms_norm_eps = c.number_or("rms_norm_eps", 1e-6)? as f32;
        if !(rms_norm_eps.is_finite() && rms_norm_eps >= 0.0) {
            return Err(Error::failed(format!(
                "rms_norm_eps {rms_norm_eps} is out of range"
            )));
        }
        let windows = windows(&c, model_type, n_layers)?;
        let rope = RopeConfig::parse(&c, max_position_embeddings)?;
        Rope::new(&rope, head_dim).check()?;
        Ok(Self {
            model_type: model_type.to_owned(),
            hidden_size,
            intermediate_size: c.size("intermediate_size")?,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            vocab_size: c.size("vocab_size")?,
            rms_norm_eps,
            tie_word_embeddings: c.bool_or("tie_word_embeddings", false)?,
            qkv_bias: match model_type {
                "qwen2" => true,
                "mistral" => false,
                _ => attention_bias,
            },
            o_bias: matches!(model_type, "llama" | "qwen3") && attention_bias,
            mlp_bias: model_type == "llama" && c.bool_or("mlp_bias", false)?,
            qk_norm: model_type == "qwen3",
            max_position_embeddings,
            rope,
            windows,
            bos_token_id: token_ids(map.get("bos_token_id"), "bos_token_id")?
                .first()
                .copied(),
            eos_token_ids: token_ids(map.get("eos_token_id"), "eos_token_id")?,
        })
    }

    /// Fails unless every id is in the vocabulary.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().position(|id| *id as usize >= self.vocab_size) {
            None => Ok(()),
            Some(i) => Err(Error::failed(format!(
                "token id {} (at index {i}) is outside the model's vocabulary of {} tokens",
                ids[i], self.vocab_size
            ))
            .hint("use tokens and a tokenizer that belong to this model")),
        }
    }

    /// Returns the number of query heads per KV head, r = h / g.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Returns the numbers of layers, heads and channels.
    pub fn sizes(&self) -> Sizes {
        Sizes {
            n_layers: self.n_layers,
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// Returns the fields that decide the forward pass as canonical JSON (sorted keys).
    ///
    /// Both spellings of a config give the same value. It is part of the checkpoint fingerprint and of
    /// the manifest.
    pub fn canonical(&self) -> Value {
        json!(self)
    }
}

/// Fails for a model that the decoder does not run.
fn check_supported(c: &Fields, model_type: &str) -> Result<()> {
    if !SUPPORTED_MODELS.contains(&model_type) {
        return Err(
            Error::failed(format!("model_type `{model_type}` is not supported"))
                .hint(format!("supported: {}", SUPPORTED_MODELS.join(", "))),
        );
    }
    let act = c.string_opt("hidden_act")?.unwrap_or("silu");
    if act != "silu" {
        return Err(Error::failed(format!("hidden_act `{act}` is not supported")).hint("supported: silu"));
    }
    let partial = c.number_or("partial_rotary_factor", 1.0)?;
    if partial != 1.0 {
        return Err(
            Error::failed(format!("partial_rotary_factor {partial} is not supported"))
                .hint("only models that rotate every channel of a head are supported"),
        );
    }
    Ok(())
}

/// Finds the numbers of query heads and of KV heads, and the channels of a head.
fn heads(c: &Fields, model_type: &str, hidden_size: usize) -> Result<(usize, usize, usize)> {
    let n_heads = c.size("num_attention_heads")?;
    let n_kv_heads = c.size_opt("num_key_value_heads")?.unwrap_or(n_heads);
    let head_dim = match c.size_opt("head_dim")? {
        Some(d) => d,
        // Qwen3's default is a constant.
        None if model_type == "qwen3" => 128,
        None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
        None => {
            return Err(Error::failed(format!(
                "hidden_size {hidden_size} is not a multiple of num_attention_heads {n_heads}, and there is no head_dim"
            )));
        }
    };
    if !n_heads.is_multiple_of(n_kv_heads) {
        return Err(Error::failed(format!(
            "num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}"
        )));
    }
    if !head_dim.is_multiple_of(4) || head_dim > MAX_HEAD_DIM {
        return Err(
            Error::failed(format!("head_dim {head_dim} is not supported")).hint(format!(
                "head_dim must be a multiple of 4 and at most {MAX_HEAD_DIM}"
            )),
        );
    }
    Ok((n_heads, n_kv_heads, head_dim))
}

/// Finds each layer's sliding window (`sliding_window`, `use_sliding_window`, `layer_types`).
fn windows(c: &Fields, model_type: &str, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let window = match model_type {
        "mistral" => c.window()?,
        "qwen2" | "qwen3" if c.bool_or("use_sliding_window", false)? => c.window()?,
        _ => None,
    };
    if let Some(types) = c.present("layer_types") {
        let types = types
            .as_array()
            .ok_or_else(|| Error::failed("`layer_types` is not an array"))?;
        if types.len() != n_layers {
            return Err(Error::failed(format!(
                "`layer_types` has {} entries for {n_layers} layers",
                types.len()
            )));
        }
        return types
            .iter()
            .enumerate()
            .map(|(i, kind)| match kind.as_str() {
                // Mistral has one window for all layers and does not read `layer_types`.
                Some("full_attention") if model_type == "mistral" => Ok(window),
                Some("full_attention") => Ok(None),
                Some("sliding_attention") if window.is_some() => Ok(window),
                Some("sliding_attention") => Err(Error::failed(format!(
                    "layer {i} is `sliding_attention`, but config.json does not enable a sliding window"
                ))
                .hint("set `sliding_window` (for Qwen, also `use_sliding_window`: true)")),
                Some(other) => Err(Error::failed(format!(
                    "layer type `{other}` (layer {i}) is not supported"
                ))
                .hint(format!("supported: {}", SUPPORTED_LAYERS.join(", ")))),
                None => Err(Error::failed(
                    "`layer_types` contains an entry that is not a string",
                )),
            })
            .collect();
    }
    let first = match model_type {
        "qwen2" | "qwen3" => c.index_opt("max_window_layers")?.unwrap_or(28),
        _ => 0,
    };
    Ok((0..n_layers).map(|i| window.filter(|_| i >= first)).collect())
}
