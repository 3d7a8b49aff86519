//! What `config.json` says of a model: the sizes that all of its layers share, and a [`Block`] for each layer.

use std::path::Path;

use serde_json::{Value, json};

use super::families::family;
use super::fields::{Fields, read_json, token_ids};
use super::folder;
use super::gguf::Gguf;
use super::rope::{Rope, RopeConfig, Ropes};
use super::sizes::Sizes;
use crate::error::{Error, Result};

const MAX_LAYERS: usize = 4096;
/// Most channels of a head.
pub const MAX_HEAD_DIM: usize = 4096;

/// The configuration of a model.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// `model_type`, the name of one of the [families](super::families).
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
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
    pub max_position_embeddings: usize,
    /// The rotary embedding of the layers that have one.
    pub rope: RopeConfig,
    /// Constant factors on activations.
    pub multipliers: Multipliers,
    /// The layers, in their order.
    pub blocks: Vec<Block>,
    /// Token that begins a document.
    pub bos_token_id: Option<u32>,
    /// Tokens that end generation.
    pub eos_token_ids: Vec<u32>,
}

/// What can differ from layer to layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Sliding window: the number of visible positions, the current one included; `None` = all.
    pub window: Option<usize>,
    /// Whether queries and keys are rotated.
    pub rotates: bool,
}

/// Constant factors on activations, 1 in most models.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Multipliers {
    /// On the embeddings.
    pub embedding: f32,
    /// On the queries, so that q . k / sqrt(d) is the attention score whatever scale the model is trained with.
    pub query: f32,
    /// On what attention and MLP add to the residual stream.
    pub residual: f32,
    /// On the logits.
    pub logits: f32,
}

impl Multipliers {
    /// The factors of most models.
    pub const ONE: Self = Self {
        embedding: 1.0,
        query: 1.0,
        residual: 1.0,
        logits: 1.0,
    };
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
        let family = family(model_type)?;
        check_supported(&c)?;
        let hidden_size = c.size("hidden_size")?;
        let n_layers = c.size("num_hidden_layers")?;
        if n_layers > MAX_LAYERS {
            return Err(Error::failed(format!(
                "num_hidden_layers {n_layers} is out of range (at most {MAX_LAYERS})"
            )));
        }
        let (n_heads, n_kv_heads, head_dim) = heads(&c, family.head_dim, hidden_size)?;
        let max_position_embeddings = c.size_opt("max_position_embeddings")?.unwrap_or(2048);
        let rms_norm_eps = c.number_or("rms_norm_eps", 1e-6)? as f32;
        if !(rms_norm_eps.is_finite() && rms_norm_eps >= 0.0) {
            return Err(Error::failed(format!(
                "rms_norm_eps {rms_norm_eps} is out of range"
            )));
        }
        let rope = RopeConfig::parse(&c, max_position_embeddings)?;
        Rope::new(&rope, head_dim).check()?;
        let plain = Block {
            window: None,
            rotates: true,
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
            n_layers: self.n_layers(),
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// Returns the number of layers.
    pub fn n_layers(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the sliding window of each layer.
    pub fn windows(&self) -> Vec<Option<usize>> {
        self.blocks.iter().map(|block| block.window).collect()
    }

    /// Sets the sliding window of each layer.
    pub(super) fn set_windows(&mut self, windows: &[Option<usize>]) {
        for (block, window) in self.blocks.iter_mut().zip(windows) {
            block.window = *window;
        }
    }

    /// Returns the layers that do not rotate queries and keys.
    pub fn no_rope_layers(&self) -> Vec<usize> {
        let blocks = self.blocks.iter().enumerate();
        blocks
            .filter(|(_, block)| !block.rotates)
            .map(|(i, _)| i)
            .collect()
    }

    /// Computes the rotary embeddings of the layers.
    pub fn ropes(&self) -> Ropes {
        Ropes::new(&self.rope, self.head_dim, self.no_rope_layers())
    }

    /// Returns what decides the forward pass as canonical JSON (sorted keys), the same for all spellings of a config. It is
    /// part of the checkpoint's fingerprint and of manifests.
    ///
    /// The fields of the first block are in every one. What was added later is there only where a model has it, so that the
    /// fingerprints of other models stay what they were.
    pub fn canonical(&self) -> Value {
        let mut fields = json!({
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "n_layers": self.n_layers(),
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "qkv_bias": self.qkv_bias,
            "o_bias": self.o_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.qk_norm,
            "rope": self.rope,
            "windows": self.windows(),
        });
        let no_rope = self.no_rope_layers();
        if !no_rope.is_empty() {
            fields["no_rope_layers"] = json!(no_rope);
        }
        let Multipliers {
            embedding,
            query,
            residual,
            logits,
        } = self.multipliers;
        if self.multipliers != Multipliers::ONE {
            fields["multipliers"] =
                json!({ "embedding": embedding, "query": query, "residual": residual, "logits": logits });
        }
        fields
    }
}

/// Fails for activations and rotations that no family has here.
fn check_supported(c: &Fields) -> Result<()> {
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
fn heads(c: &Fields, default: Option<usize>, hidden_size: usize) -> Result<(usize, usize, usize)> {
    let n_heads = c.size("num_attention_heads")?;
    let n_kv_heads = c.size_opt("num_key_value_heads")?.unwrap_or(n_heads);
    let head_dim = match c.size_opt("head_dim")?.or(default) {
        Some(d) => d,
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
