//! The weights of a whole model on the device, with the embedding and the output projection.

use super::finite::FiniteCheck;
use super::sizes::{LayerSizes, check_model};
use super::weights::{LayerWeights, random, upload};
use super::work::Workspace;
use crate::compute::Precision;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{Driver, Purpose, allocating};
use crate::compute::cuda::kernels;
use crate::compute::cuda::linear::Linear;
use crate::compute::linear;
use crate::env;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::forward::check_prompt;
use crate::model::rope::Rope;
use crate::model::{Decoder, ModelConfig};
use crate::weight::Weight;

/// The weights of a whole model on the device.
pub struct Body<'a> {
    pub(crate) driver: &'a dyn Driver,
    /// The checkpoint; `None` for random weights.
    pub(crate) decoder: Option<&'a Decoder>,
    pub(crate) config: ModelConfig,
    pub(crate) rope: Rope,
    pub(crate) precision: Precision,
    pub(crate) layers: Vec<LayerWeights<'a>>,
    /// `None` if the output projection serves as the embedding.
    embedding: Option<Linear<'a>>,
    /// Weight of the norm after the layers.
    norm: Buffer<'a, f32>,
    /// The output projection.
    head: Linear<'a>,
}

impl<'a> Body<'a> {
    /// Copies all weights of a checkpoint to the device. [`Source`](super::room::Source) first checks that a session fits.
    ///
    /// # Errors
    /// Out of memory; a model whose attention the kernels do not support.
    pub fn load(driver: &'a dyn Driver, decoder: &'a Decoder, precision: Precision) -> Result<Self> {
        allocating(driver, Purpose::Weights, || {
            Self::upload(driver, decoder, precision)
        })
    }

    fn upload(driver: &'a dyn Driver, decoder: &'a Decoder, precision: Precision) -> Result<Self> {
        let config = decoder.config.clone();
        check_model(&config)?;
        let embedding = if config.tie_word_embeddings {
            None
        } else {
            Some(&decoder.embedding)
        };
        let mut layers = Vec::new();
        for number in 0..config.n_layers() {
            env::check()?;
            let view = decoder.layer(number)?;
            layers.push(LayerWeights::upload(driver, &view)?);
            // The page cache need not keep what is on the device now.
            view.release();
        }
        let joined = |weight: &Weight| {
            let (weight, bias) = (weight.clone(), None);
            upload(driver, &[&linear::Linear::new(weight, bias)])
        };
        Ok(Self {
            embedding: embedding.map(joined).transpose()?,
            norm: Buffer::from_slice(driver, "norms", &decoder.norm)?,
            head: upload(driver, &[&decoder.head])?,
            rope: decoder.ropes.layer(0).clone(),
            decoder: Some(decoder),
            driver,
            config,
            precision,
            layers,
        })
    }

    /// For a benchmark: makes random bf16 weights in the sizes of a model, with one matrix as both embedding and output
    /// projection.
    ///
    /// # Errors
    /// As [`Body::load`].
    pub fn random(driver: &'a dyn Driver, config: ModelConfig, seed: u32) -> Result<Self> {
        allocating(driver, Purpose::Weights, || Self::drawn(driver, config, seed))
    }

    fn drawn(driver: &'a dyn Driver, config: ModelConfig, seed: u32) -> Result<Self> {
        check_model(&config)?;
        let sizes = LayerSizes::from_config(&config);
        let windows = config.windows().into_iter().enumerate();
        let layers =
            windows.map(|(i, window)| LayerWeights::random(driver, &sizes, window, seed + 8 + 4 * i as u32));
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self {
            embedding: None,
            norm: Buffer::from_slice(driver, "norms", &vec![1.0; config.hidden_size])?,
            head: random(driver, config.vocab_size, config.hidden_size, seed)?,
            decoder: None,
            rope: Rope::new(&config.rope, config.head_dim),
            precision: Precision::Auto,
            driver,
            config,
            layers,
        })
    }

    /// Returns the sizes of the model's layers.
    pub fn sizes(&self) -> LayerSizes {
        LayerSizes::from_config(&self.config)
    }

    /// Returns the type of rows that a prompt attends but no cache keeps: the type of the weights, or f32.
    pub(crate) fn row_type(&self) -> Float {
        let kind = self.layers.first().map(|l| l.qkv.weight.kind);
        kind.map_or(Float::F32, |kind| self.precision.attended(kind))
    }

    /// Allocates a workspace for `rows` rows.
    pub(crate) fn workspace(&self, rows: usize) -> Result<Workspace<'a>> {
        Workspace::new(self.driver, self.sizes(), self.precision, rows)
    }

    /// Checks that a prompt has tokens and that all of them are in the vocabulary.
    pub(crate) fn check_prompt(&self, ids: &[u32]) -> Result<()> {
        check_prompt(ids)?;
        self.check_ids(ids)
    }

    /// Checks that every id is in the vocabulary.
    pub(crate) fn check_ids(&self, ids: &[u32]) -> Result<()> {
        match self.decoder {
            Some(decoder) => decoder.check_ids(ids),
            None if ids.iter().all(|id| (*id as usize) < self.config.vocab_size) => Ok(()),
            None => Err(Error::invalid("a token id is outside the vocabulary")),
        }
    }

    /// Embeds `n` ids into `hidden`, `[n, hidden]`.
    pub(crate) fn embed(&self, ids: &Buffer<'_, u32>, n: usize, hidden: &Buffer<'_, f32>) -> Result<()> {
        let table = &self.embedding.as_ref().unwrap_or(&self.head).weight;
        kernels::EmbedRows {
            ids: ids.ptr(),
            table: table.values.ptr().cast(),
            out: hidden.ptr(),
            kind: table.kind.number(),
            width: table.cols,
        }
        .launch(self.driver, [n, 1, 1])
    }

    /// Computes the logits, `[rows, vocab]`, of `rows` rows of hidden states. `finite` notes whether they are finite.
    pub(crate) fn logits(
        &self,
        work: &Workspace<'_>,
        hidden: &Buffer<'_, f32>,
        rows: usize,
        logits: &Buffer<'_, f32>,
        finite: &FiniteCheck<'_>,
    ) -> Result<()> {
        work.norm(hidden, &self.norm, &work.normed, rows)?;
        work.multiply(&self.head, &work.normed, rows, logits, false)?;
        finite.look(logits, rows * self.config.vocab_size, self.layers.len())
    }
}
