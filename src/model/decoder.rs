//! A checkpoint that is ready to run: the embedding, the layers, opened one by one, and the output projection. Everything is
//! computed in f32.

use std::path::Path;

use ndarray::{Array2, ArrayView2};

use super::config::ModelConfig;
use super::layer::{Layer, States, rms_rows};
use super::mlp::{Experts, FeedForward, Gated};
use super::rope::Ropes;
use super::weights::Checkpoint;
use crate::compute::layout::{elements, elements_mut};
use crate::compute::linear::Linear;
use crate::compute::simd;
use crate::error::{Error, Result};
use crate::quant::Quant;
use crate::weight::{Stored, Weight};

/// An opened checkpoint, ready to run.
pub struct Decoder {
    /// Sizes and options of the model.
    pub config: ModelConfig,
    /// The mapped weights.
    pub checkpoint: Checkpoint,
    /// The rotary embeddings of the layers.
    pub ropes: Ropes,
    /// The embedding, `[vocab, hidden]`.
    pub embedding: Weight,
    /// Weight of the final RMS norm, `[hidden]`.
    pub norm: Vec<f32>,
    /// The output projection, `[vocab, hidden]`; the embedding if the model ties the two.
    pub head: Linear,
    /// The type to which the weights of layers are rounded when they are opened.
    pub(super) rounds_to: Option<Quant>,
}

impl Decoder {
    /// Opens the checkpoint in `dir` and checks the presence and the shape of every tensor.
    pub fn open(dir: &Path) -> Result<Self> {
        let config = ModelConfig::load(dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let shape = [config.vocab_size, config.hidden_size];
        let embedding = checkpoint.weight("model.embed_tokens.weight", &shape)?;
        embedding.scattered();
        let norm = checkpoint.vector("model.norm.weight", config.hidden_size)?;
        let weight = if config.tie_word_embeddings {
            embedding.clone()
        } else {
            checkpoint.weight("lm_head.weight", &shape)?
        };
        let head = Linear::new(weight, None);
        let decoder = Self {
            ropes: config.ropes(),
            config,
            checkpoint,
            embedding,
            norm,
            head,
            rounds_to: None,
        };
        for i in 0..decoder.config.n_layers() {
            decoder.layer(i)?;
        }
        Ok(decoder)
    }

    /// Rounds the output projection now, and the weights of each layer when it is opened, to a quantised type, if one is given;
    /// no calibration chooses how. The embedding keeps its type.
    ///
    /// # Errors
    /// Rows that are not whole blocks; a temporary file that cannot be written.
    pub fn rounded(mut self, quant: Option<Quant>) -> Result<Self> {
        self.head.weight = self.head.weight.rounded(quant)?;
        self.rounds_to = quant;
        Ok(self)
    }

    /// Returns the type in which the first layer has most of its weights.
    pub fn stored(&self) -> Result<Stored> {
        let layer = self.layer(0)?;
        let weights = layer.weights();
        let bytes = |of: &Stored| -> usize {
            let same = weights.iter().filter(|weight| weight.stored() == *of);
            same.map(|weight| weight.bytes()).sum()
        };
        let types = weights.iter().map(|weight| weight.stored());
        Ok(types.max_by_key(bytes).unwrap_or(self.embedding.stored()))
    }

    /// Returns layer `index` as views of its weights.
    pub fn layer(&self, index: usize) -> Result<Layer> {
        let c = &self.config;
        let (hidden, d) = (c.hidden_size, c.head_dim);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let vector = |part: &str, len: usize| self.checkpoint.vector(&name(part), len);
        let linear = |part: &str, rows: usize, cols: usize, has_bias: bool| {
            let weight = name(&format!("{part}.weight"));
            let weight = self.checkpoint.weight(&weight, &[rows, cols])?;
            let bias = name(&format!("{part}.bias"));
            if !has_bias && self.checkpoint.contains(&bias) {
                return Err(Error::mismatch(format!(
                    "the checkpoint contains `{bias}`, but config.json says that the model has no such bias"
                ))
                .hint("set `attention_bias` or `mlp_bias` in config.json if the model was trained with it"));
            }
            let bias = has_bias
                .then(|| self.checkpoint.vector(&bias, rows))
                .transpose()?;
            Ok(Linear::new(weight, bias))
        };
        let gated = |part: &str, width: usize| -> Result<Gated> {
            Ok(Gated {
                gate: linear(&format!("{part}.gate_proj"), width, hidden, c.mlp_bias)?,
                up: linear(&format!("{part}.up_proj"), width, hidden, c.mlp_bias)?,
                down: linear(&format!("{part}.down_proj"), hidden, width, c.mlp_bias)?,
            })
        };
        let norm = |part: &str| c.qk_norm.then(|| vector(part, d)).transpose();
        let layer = Layer {
            index,
            sizes: c.sizes(),
            eps: c.rms_norm_eps,
            window: c.blocks[index].window,
            input_norm: vector("input_layernorm.weight", hidden)?,
            q: linear("self_attn.q_proj", c.n_heads * d, hidden, c.qkv_bias)?,
            k: linear("self_attn.k_proj", c.n_kv_heads * d, hidden, c.qkv_bias)?,
            v: linear("self_attn.v_proj", c.n_kv_heads * d, hidden, c.qkv_bias)?,
            o: linear("self_attn.o_proj", hidden, c.n_heads * d, c.o_bias)?,
            q_norm: norm("self_attn.q_norm.weight")?,
            k_norm: norm("self_attn.k_norm.weight")?,
            mlp_norm: vector("post_attention_layernorm.weight", hidden)?,
            mlp: match &c.blocks[index].experts {
                None => FeedForward::Gated(gated("mlp", c.intermediate_size)?),
                Some(of) => FeedForward::Experts(Experts {
                    router: linear("mlp.gate", of.count, hidden, false)?,
                    experts: (0..of.count)
                        .map(|i| gated(&format!("mlp.experts.{i}"), of.width))
                        .collect::<Result<_>>()?,
                    active: of.active,
                    normalises: of.normalises,
                }),
            },
            rounds: false,
            query_factor: c.multipliers.query,
            residual_factor: c.multipliers.residual,
        };
        layer.rounded(self.rounds_to)
    }

    /// Looks up the embeddings of `ids`: `[n, hidden]`.
    ///
    /// # Errors
    /// An id outside the vocabulary; a NaN in an embedding row.
    pub fn embed(&self, ids: &[u32]) -> Result<Array2<f32>> {
        self.check_ids(ids)?;
        let mut out = Array2::zeros((ids.len(), self.config.hidden_size));
        for (mut row, &id) in out.rows_mut().into_iter().zip(ids) {
            let row = elements_mut(&mut row);
            self.embedding.read(id as usize, 0, row);
            scale(row, self.config.multipliers.embedding);
            if !simd::all_finite(row) {
                return Err(Error::damaged(format!(
                    "tensor `{}` contains a NaN or infinite value in row {id}",
                    self.embedding.name()
                ))
                .hint("the checkpoint is damaged; download it again"));
            }
        }
        Ok(out)
    }

    /// Fails unless every id is in the vocabulary.
    pub fn check_ids(&self, ids: &[u32]) -> Result<()> {
        self.config.check_ids(ids)
    }

    /// Computes the next tokens' logits from the hidden states of several positions, reading the weights of the output
    /// projection, or of its copy, once: `[m,vocab]` from `[m,hidden]`.
    pub fn logits_by(&self, head: &Linear, hidden: ArrayView2<f32>) -> Result<Array2<f32>> {
        let mut normed = Array2::zeros(hidden.dim());
        rms_rows(hidden, &self.norm, self.config.rms_norm_eps, normed.view_mut());
        let mut out = Array2::zeros((hidden.nrows(), self.config.vocab_size));
        head.forward(normed.view(), out.view_mut());
        scale(elements_mut(&mut out), self.config.multipliers.logits);
        if simd::all_finite(elements(&out)) {
            Ok(out)
        } else {
            Err(self.diagnose(&[&head.weight], "the output logits"))
        }
    }

    /// Fails if `hidden`, the output of `layer`, has a value that is not finite; names the faulty tensor.
    pub fn check_finite(&self, layer: &Layer, hidden: ArrayView2<f32>) -> Result<()> {
        if simd::all_finite(elements(&hidden)) {
            return Ok(());
        }
        let place = format!("the hidden states after layer {}", layer.index);
        Err(self.diagnose(&layer.weights(), &place))
    }

    /// Fails if the states of `layer` have a value that is not finite; names the faulty tensor.
    pub fn check_states(&self, layer: &Layer, states: &States) -> Result<()> {
        let states = [&states.q, &states.k, &states.v];
        if states.iter().all(|x| simd::all_finite(elements(x))) {
            Ok(())
        } else {
            Err(self.diagnose(&layer.weights(), &format!("the states of layer {}", layer.index)))
        }
    }

    /// Makes the error for values at `place` that are not finite: it names the first of `weights` that has such a
    /// value, and otherwise blames the model.
    pub fn diagnose(&self, weights: &[&Weight], place: &str) -> Error {
        let faulty = weights.iter().find_map(|w| w.check_finite().err());
        faulty.unwrap_or_else(|| {
            Error::invalid(format!(
                "{place} contain NaN or infinite values, although the weights are finite"
            ))
            .hint("check the checkpoint; its activations overflow f32")
        })
    }
}

/// Multiplies values by a factor, which is 1 in most models.
fn scale(values: &mut [f32], factor: f32) {
    if factor != 1.0 {
        values.iter_mut().for_each(|x| *x *= factor);
    }
}
