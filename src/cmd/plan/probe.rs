//! How long a calibration would take on this machine, from a few seconds of the same work.
//!
//! The model's pass is timed on one layer with random weights of the model's shape. Fits and verdict are timed by a
//! calibration of a small model with one layer and heads of the model's shape: once on blocks of some length, once on
//! blocks of half of it, so that what grows with the text can be told from what does not.

use std::path::Path;

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::json;

use crate::cmd::args::Global;
use crate::cmd::bench::{random_matrix, random_points, seconds};
use crate::cmd::calibrate::stages::{BUDGETS, CAPTURE, Stages, VERDICT};
use crate::cmd::calibrate::{Settings, time_stages};
use crate::compute::attention;
use crate::compute::cpu::Cpu;
use crate::compute::linear::Linear;
use crate::corpus::Corpus;
use crate::disk::Output;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::ModelConfig;
use crate::model::decoder::Layer;
use crate::model::rope::Rope;
use crate::stats::moments::QuerySums;
use crate::store::{self, Tensor};
use crate::weight::Weight;

/// Rows for which the projections of a layer are timed.
const PROJECTED: usize = 512;
/// Rows for which attention is timed.
const ATTENDED: usize = 1024;
/// The longest block of the small calibration, unless the codebooks need more.
const BLOCK: usize = 4096;

/// Estimates the seconds of every stage.
///
/// # Errors
/// A temporary file that cannot be written; what the small calibration fails with.
pub fn stages(settings: &Settings, config: &ModelConfig, corpus: &Corpus, global: &Global) -> Result<Stages> {
    let forward = ForwardTime::measure(config)?;
    let mut stages = Stages::default();
    let blocks = (0..corpus.n_blocks()).map(|block| corpus.block(block).len());
    stages.add(CAPTURE, blocks.map(|rows| forward.block(rows)).sum());
    let small = Small::measure(settings, config, global)?;
    let heads = (config.n_layers * config.n_kv_heads) as f64 / small.heads as f64;
    let kept = corpus.kept().iter().filter(|kept| **kept).count();
    for (name, _) in small
        .long
        .iter()
        .filter(|(name, _)| ![CAPTURE, BUDGETS, VERDICT].contains(name))
    {
        stages.add(name, heads * small.at(name, kept));
    }
    let passages: Vec<usize> = corpus.held_out.iter().map(|&(_, _, end)| end).collect();
    if let (false, Some(first)) = (settings.no_verdict, passages.first()) {
        stages.add(BUDGETS, heads * small.at(BUDGETS, *first) + forward.block(*first));
        let steps = settings.verdict.steps() as f64 * small.variants as f64 * forward.row;
        let of = |end: &usize| heads * small.at(VERDICT, *end) + forward.block(*end) + steps;
        stages.add(VERDICT, passages.iter().map(of).sum());
    }
    Ok(stages)
}

/// The time of the model on the CPU.
struct ForwardTime {
    /// Seconds of all layers for a row, besides attention.
    row: f64,
    /// Seconds of one layer's attention for a query and a key that it sees.
    pair: f64,
    windows: Vec<Option<usize>>,
}

impl ForwardTime {
    fn measure(c: &ModelConfig) -> Result<Self> {
        let layer = random_layer(c)?;
        let rope = Rope::new(&c.rope, c.head_dim);
        let mut hidden = random_matrix(PROJECTED, c.hidden_size, 1);
        let attended = Array2::zeros((PROJECTED, c.n_heads * c.head_dim));
        let mut sums = QuerySums::new(c.n_kv_heads, c.head_dim);
        let mut rows = || {
            let states = layer.project(hidden.view());
            layer.finish(hidden.view_mut(), attended.view());
            sums.add(&Cpu, states.q_pre.view(), &[true; PROJECTED], &rope)
        };
        // The first pass reads the weights from their file.
        rows()?;
        let mut outcome = Ok(());
        let row = seconds(|| outcome = rows()) / PROJECTED as f64;
        outcome?;
        let states = |heads, seed| random_points(heads, ATTENDED, c.head_dim, seed);
        let (q, k, v) = (
            states(c.n_heads, 1),
            states(c.n_kv_heads, 2),
            states(c.n_kv_heads, 3),
        );
        let mut out = Array2::zeros((ATTENDED, c.n_heads * c.head_dim));
        let attend = || attention::causal(q.view(), k.view(), v.view(), 0, None, out.view_mut());
        Ok(Self {
            row: row * c.n_layers as f64,
            pair: seconds(attend) / pairs(ATTENDED, None),
            windows: c.windows.clone(),
        })
    }

    /// Returns the seconds of a block's way through all layers.
    fn block(&self, rows: usize) -> f64 {
        let attention: f64 = self
            .windows
            .iter()
            .map(|window| self.pair * pairs(rows, *window))
            .sum();
        self.row * rows as f64 + attention
    }
}

/// Counts the pairs of a query and a key that it sees, in a block.
fn pairs(rows: usize, window: Option<usize>) -> f64 {
    let full = window.unwrap_or(rows).min(rows);
    let (full, rows) = (full as f64, rows as f64);
    full * (full + 1.0) / 2.0 + (rows - full) * full
}

/// Makes a layer of the model's shape with random weights.
fn random_layer(c: &ModelConfig) -> Result<Layer> {
    let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
    let (hidden, inner) = (c.hidden_size, c.intermediate_size);
    let linear = |rows: usize, cols: usize, has_bias: bool| {
        Ok::<_, Error>(Linear {
            weight: Weight::from_values(noise(rows, cols).view(), Float::Bf16)?,
            bias: has_bias.then(|| vec![0.0; rows]),
        })
    };
    let norm = || c.qk_norm.then(|| vec![1.0; c.head_dim]);
    Ok(Layer {
        index: 0,
        n_heads: c.n_heads,
        n_kv_heads: c.n_kv_heads,
        head_dim: c.head_dim,
        eps: c.rms_norm_eps,
        window: None,
        input_norm: vec![1.0; hidden],
        q: linear(q, hidden, c.qkv_bias)?,
        k: linear(kv, hidden, c.qkv_bias)?,
        v: linear(kv, hidden, c.qkv_bias)?,
        o: linear(hidden, q, c.o_bias)?,
        q_norm: norm(),
        k_norm: norm(),
        mlp_norm: vec![1.0; hidden],
        gate: linear(inner, hidden, c.mlp_bias)?,
        up: linear(inner, hidden, c.mlp_bias)?,
        down: linear(hidden, inner, c.mlp_bias)?,
    })
}

/// Makes weights that keep the size of what they multiply: rows of the same numbers, each of which begins at another one.
fn noise(rows: usize, cols: usize) -> Array2<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(rows as u64);
    let scale = 1.7 / (cols as f32).sqrt();
    let numbers: Vec<f32> = (0..65_521).map(|_| rng.gen_range(-scale..scale)).collect();
    let mut out = Array2::zeros((rows, cols));
    for mut row in out.rows_mut() {
        let first = rng.gen_range(0..numbers.len());
        row.iter_mut()
            .zip(numbers.iter().cycle().skip(first))
            .for_each(|(x, value)| *x = *value);
    }
    out
}

/// The stages of two calibrations of a small model with one layer.
struct Small {
    /// KV heads of the layer.
    heads: usize,
    /// On two blocks of `rows` tokens, one of them held out.
    long: Stages,
    /// On two blocks of half as many.
    short: Stages,
    rows: usize,
    /// Methods and budgets that its verdict measures.
    variants: usize,
}

impl Small {
    fn measure(settings: &Settings, config: &ModelConfig, global: &Global) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::failed(format!("cannot write a temporary folder: {e}"))
                .hint("TMPDIR names another place for it, --no-probe does without")
        };
        let folder = tempfile::tempdir().map_err(failed)?;
        let heads = config.n_kv_heads.min(rayon::current_num_threads());
        let rows = BLOCK.max(2 * settings.sections.codewords()).next_multiple_of(2);
        let model = folder.path().join("model");
        std::fs::create_dir(&model).map_err(failed)?;
        write_model(&model, config, heads, 2 * rows)?;
        let time = |rows: usize| {
            let tokens = folder.path().join("tokens.json");
            let ids: Vec<Vec<usize>> = vec![(0..rows).collect(), (rows..2 * rows).collect()];
            std::fs::write(&tokens, json!(ids).to_string()).map_err(failed)?;
            let mut of = settings.clone();
            of.model.clone_from(&model);
            of.input = of.input.of_tokens(tokens, rows, 0.5);
            let output = folder.path().join(format!("{rows}.safetensors"));
            let mut global = global.clone();
            global.silent = true;
            time_stages(of, &output, &global)
        };
        let ((long, variants), (short, _)) = (time(rows)?, time(rows / 2)?);
        Ok(Self {
            heads,
            long,
            short,
            rows,
            variants,
        })
    }

    /// Returns the seconds of a stage for `rows` rows: on the line through the two that were measured.
    fn at(&self, stage: &str, rows: usize) -> f64 {
        let (long, short) = (self.long.get(stage), self.short.get(stage));
        let half = self.rows as f64 / 2.0;
        // Noise could make the line fall, or start below zero.
        let slope = ((long - short) / half).clamp(0.0, long / self.rows as f64);
        (long + slope * (rows as f64 - self.rows as f64)).max(0.0)
    }
}

/// Writes a checkpoint with one layer, `kv_heads` KV heads of the model's shape, and little else.
fn write_model(dir: &Path, c: &ModelConfig, kv_heads: usize, vocabulary: usize) -> Result<()> {
    let (d, inner) = (c.head_dim, 64);
    let n_heads = kv_heads * c.group();
    let config = json!({
        "model_type": "llama", "hidden_act": "silu", "num_hidden_layers": 1, "hidden_size": d, "intermediate_size": inner,
        "num_attention_heads": n_heads, "num_key_value_heads": kv_heads, "head_dim": d, "vocab_size": vocabulary,
        "tie_word_embeddings": true, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
        "max_position_embeddings": c.max_position_embeddings.max(vocabulary),
    });
    let path = dir.join("config.json");
    std::fs::write(&path, config.to_string()).map_err(|e| Error::io(&path, "write", &e))?;
    let matrix = |name: &str, rows: usize, cols: usize| {
        let values: Vec<f32> = noise(rows, cols).into_iter().collect();
        Tensor::new(name, &[rows, cols], &values)
    };
    let ones = |name: &str, n: usize| Tensor::new(name, &[n], &vec![1.0f32; n]);
    let of = |part: &str| format!("model.layers.0.{part}.weight");
    let tensors = [
        matrix("model.embed_tokens.weight", vocabulary, d),
        ones("model.norm.weight", d),
        ones(&of("input_layernorm"), d),
        ones(&of("post_attention_layernorm"), d),
        matrix(&of("self_attn.q_proj"), n_heads * d, d),
        matrix(&of("self_attn.k_proj"), kv_heads * d, d),
        matrix(&of("self_attn.v_proj"), kv_heads * d, d),
        matrix(&of("self_attn.o_proj"), d, n_heads * d),
        matrix(&of("mlp.gate_proj"), inner, d),
        matrix(&of("mlp.up_proj"), inner, d),
        matrix(&of("mlp.down_proj"), d, inner),
    ];
    store::write(Output::create(&dir.join("model.safetensors"))?, &tensors, None)
}
