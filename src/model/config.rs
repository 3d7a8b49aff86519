//! What `config.json` says of a model: the sizes that all of its layers share, and a [`Block`] for each layer.

use serde::Serialize;
use serde_json::{Value, json};

use super::rope::{RopeConfig, Ropes};
use super::sizes::Sizes;
use crate::error::{Error, Result};

/// Most channels of a head.
pub const MAX_HEAD_DIM: usize = 4096;

/// The configuration of a model.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// `model_type`, the name of one of the [families](super::families).
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP; mixtures of experts have their own.
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
    /// The mixture of experts in place of the MLP, if there is one.
    pub experts: Option<ExpertsConfig>,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExpertsConfig {
    /// Number of experts.
    pub count: usize,
    /// Number of experts that a row passes.
    pub active: usize,
    /// Width of an expert, which is a gated MLP.
    pub width: usize,
    /// Whether the probabilities of a row's experts are divided by their sum.
    pub normalises: bool,
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

    /// Fails unless every id is in the vocabulary.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match ids.iter().position(|id| *id as usize >= self.vocab_size) {
            None => Ok(()),
            Some(i) => Err(Error::invalid(format!(
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

    /// Returns the width of the widest MLP or expert.
    pub fn widest_mlp(&self) -> usize {
        let width = |block: &Block| {
            block
                .experts
                .as_ref()
                .map_or(self.intermediate_size, |of| of.width)
        };
        self.blocks.iter().map(width).max().unwrap_or(0)
    }

    /// Counts the weights of each layer's projections, and those of them that a decode step reads. As f64, in which no
    /// product overflows.
    pub fn layer_weights(&self) -> Vec<[f64; 2]> {
        let [hidden, inner] = [self.hidden_size, self.intermediate_size].map(|n| n as f64);
        let [h, g, d] = [self.n_heads, self.n_kv_heads, self.head_dim].map(|n| n as f64);
        let attention = 2.0 * (h + g) * d;
        let of_block = |block: &Block| match &block.experts {
            None => [3.0 * inner; 2],
            Some(of) => [of.count, of.active].map(|n| of.count as f64 + 3.0 * (n * of.width) as f64),
        };
        let blocks = self.blocks.iter();
        blocks
            .map(|block| of_block(block).map(|mlp| hidden * (attention + mlp)))
            .collect()
    }

    /// Returns the layer with the most weights; the first of several.
    pub fn largest_layer(&self) -> usize {
        let weights = self.layer_weights();
        let larger = |a: usize, b: usize| if weights[b][0] > weights[a][0] { b } else { a };
        (0..weights.len()).reduce(larger).unwrap_or(0)
    }

    /// Computes the rotary embeddings of the layers.
    pub fn ropes(&self) -> Ropes {
        Ropes::new(&self.rope, self.head_dim, self.no_rope_layers())
    }

    /// Returns what decides the forward pass as canonical JSON (sorted keys), the same for all spellings of a config. It is
    /// part of the checkpoint's fingerprint and of manifests.
    ///
    /// The sixteen fields that come first here are in every one. What was added later is there only where a model has it, so
    /// that the fingerprints of other models stay what they were.
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
        let experts = self.blocks.iter().map(|block| &block.experts);
        if experts.clone().any(Option::is_some) {
            fields["experts"] = json!(experts.collect::<Vec<_>>());
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
