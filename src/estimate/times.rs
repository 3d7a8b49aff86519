//! How long a calibration would take on this machine, estimated from a few seconds of the same work.
//!
//! The model's pass is timed on one layer with random weights of the model's shape. Fits and verdict are timed by
//! calibrating a small model with one layer and heads of the model's shape: once on blocks of some length, and once on
//! blocks of half that length, to tell the time that grows with the text from the time that does not.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::{Array2, Array3};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::line::Line;
use crate::artifact::Fit;
use crate::calibration::memory::JudgedRows;
use crate::calibration::stages::{BUDGETS, CAPTURE, PROBE, Stages, VERDICT};
use crate::calibration::{Calibration, CalibrationSettings};
use crate::compute::Precision;
use crate::compute::attention;
use crate::compute::cpu::Cpu;
use crate::corpus::{Corpus, CorpusOptions, CorpusSource};
use crate::disk::Output;
use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::model::config::Block;
use crate::model::layer::Layer;
use crate::model::rope::Rope;
use crate::model::{Model, ModelConfig, random};
use crate::stats::moments::QuerySums;
use crate::store::{self, Tensor};
use crate::timing::{random_matrix, random_points, seconds};

/// Rows of the two blocks whose pass through a layer is timed; without attention, the time of a block is linear in its
/// rows.
const BLOCKS: [usize; 2] = [64, 512];
/// Rows for which attention is timed.
const ATTENDED: usize = 2048;
/// The least and the most rows of the longer block of the small calibration, unless the codebooks need more. Between
/// them, it has as many as the text.
const BLOCK: [usize; 2] = [1024, 4096];

/// The share of the rows of a verdict that is assumed to be left after the first blocks of text.
const LEFT: f64 = 0.5;

/// Bytes whose digest is timed.
const DIGESTED: usize = 32 << 20;

/// The times of a calibration on this machine.
pub struct Times {
    /// The seconds of every stage.
    pub stages: Stages,
    /// The seconds of every block of the text in the stage that runs the model.
    pub blocks: Vec<f64>,
    /// Seconds to compute the digest of a byte.
    digest: f64,
}

impl Times {
    /// Returns the seconds to compute the digest of so many bytes.
    pub fn digest_seconds(&self, bytes: usize) -> f64 {
        self.digest * bytes as f64
    }
}

/// Returns the seconds to compute the digest of a byte.
fn digest_time() -> f64 {
    let bytes = vec![0x5a; DIGESTED];
    seconds(|| {
        std::hint::black_box(Sha256::digest(&bytes));
    }) / DIGESTED as f64
}

/// Estimates the seconds of every stage of a calibration with these fits, and of parts of it. The small calibration runs on
/// `machine`, the model's pass on the CPU.
///
/// # Errors
/// A temporary file that cannot be written; a failure of the small calibration.
pub fn times(
    settings: &CalibrationSettings,
    config: &ModelConfig,
    corpus: &Corpus,
    fits: &[Box<dyn Fit>],
    judged: &JudgedRows,
    machine: Machine,
) -> Result<Times> {
    // A GPU's own time is not measured.
    let precision = match machine.device.cuda() {
        Some(_) => Precision::Auto,
        None => machine.on_cpu()?,
    };
    let forward = ForwardTime::measure(config, precision)?;
    let mut stages = Stages::default();
    let blocks = (0..corpus.n_blocks()).map(|block| corpus.block(block).len());
    let blocks: Vec<f64> = blocks.map(|rows| forward.capture(rows)).collect();
    stages.add(CAPTURE, blocks.iter().sum());
    let small = Small::measure(settings, config, corpus.n_tokens(), machine)?;
    let heads = (config.n_layers() * config.n_kv_heads) as f64 / small.heads as f64;
    for fit in fits {
        let stage = fit.kind().facts().stage;
        stages.add(stage, heads * small.at(stage, work(fit.as_ref(), corpus)));
    }
    for (pass, texts) in judged.passes.iter().enumerate() {
        let of = |stage: &str, n: usize| heads * small.at(stage, n as f64) + forward.block(n);
        if let (0, Some([first, _])) = (pass, texts.first()) {
            stages.add(BUDGETS, of(BUDGETS, *first));
        }
        let (stage, variants) = match pass {
            0 => (VERDICT, small.variants as f64),
            1 => (VERDICT, LEFT * small.variants as f64),
            _ => (PROBE, LEFT * small.variants as f64),
        };
        let text = |&[n, steps]: &[usize; 2]| {
            let share =
                variants / small.variants.max(1) as f64 * (steps as f64 / small.steps as f64).max(1.0);
            heads * share * small.at(VERDICT, n as f64)
                + forward.block(n)
                + variants * steps as f64 * forward.row()
        };
        stages.add(stage, texts.iter().map(text).sum());
    }
    Ok(Times {
        stages,
        blocks,
        digest: digest_time(),
    })
}

/// Returns the amount of work that the time of a fit grows with: the pairs of a query that it reads and a key up to
/// that query's position; for a fit without queries, the rows that it uses.
fn work(fit: &dyn Fit, corpus: &Corpus) -> f64 {
    let position = |row: &usize| {
        let block = corpus
            .block_start
            .partition_point(|start| *start as usize <= *row)
            - 1;
        (row - corpus.block_start[block] as usize + 1) as f64
    };
    match fit.query_rows() {
        [] => (corpus.n_tokens() - corpus.n_held_out()) as f64,
        rows => rows.iter().map(position).sum(),
    }
}

/// The time of the model on the CPU.
struct ForwardTime {
    /// Seconds that a block takes in each layer, besides attention, by its rows.
    layers: Vec<Line>,
    /// The part of these seconds until queries, keys and values are computed, the same in all layers, which is all that a
    /// capture needs of the last layer.
    states: Line,
    /// Seconds of one layer's attention per pair of a query and a key that it sees.
    pair: f64,
    windows: Vec<Option<usize>>,
}

impl ForwardTime {
    fn measure(c: &ModelConfig, precision: Precision) -> Result<Self> {
        let rope = Rope::new(&c.rope, c.head_dim);
        let states = |heads, seed| random_points(heads, ATTENDED, c.head_dim, seed);
        let (q, k, v) = (
            states(c.n_heads, 1),
            states(c.n_kv_heads, 2),
            states(c.n_kv_heads, 3),
        );
        let mut out = Array2::zeros((ATTENDED, c.n_heads * c.head_dim));
        let rounds = precision == Precision::Bf16;
        let attend = || attention::causal(q.view(), k.view(), v.view(), 0, None, rounds, out.view_mut());
        let pair = seconds(attend) / pairs(ATTENDED, None);
        let mut sums = QuerySums::new(c.n_kv_heads, c.head_dim);
        let mut whole = |layer: &Layer, rows: usize| {
            let mut hidden = random_matrix(rows, c.hidden_size, 1);
            let mut outcome = Ok(());
            let mut kept = Vec::new();
            let seconds = seconds(|| {
                layer.forward(&rope, hidden.view_mut(), |states, _| {
                    let (g, all) = (c.n_kv_heads, vec![true; rows]);
                    let block = QuerySums::of_block(&Cpu, g, states.q.view(), &all, &rope);
                    outcome = block.map(|block| sums.add(&block));
                    // A calibration keeps a copy of the states that its fits read.
                    kept = [&states.q, &states.k, &states.v].map(Array3::clone).into();
                });
            });
            std::hint::black_box(&kept);
            outcome.map(|()| seconds - pair * pairs(rows, None))
        };
        let rows = BLOCKS.map(|rows| rows as f64);
        // One layer with an MLP and one with a mixture of experts, if there are both.
        let mut lines: [Option<(Line, Line)>; 2] = [None; 2];
        for (index, block) in c.blocks.iter().enumerate() {
            let line = &mut lines[usize::from(block.experts.is_some())];
            if line.is_some() {
                continue;
            }
            let layer = Layer {
                window: None,
                ..random::layer(c, index)?.with_precision(precision)
            };
            // The first pass also reads the weights from their file.
            whole(&layer, BLOCKS[0])?;
            let times = [whole(&layer, BLOCKS[0])?, whole(&layer, BLOCKS[1])?];
            let project = |rows: usize| {
                let hidden = random_matrix(rows, c.hidden_size, 1);
                seconds(|| drop(std::hint::black_box(layer.project(hidden.view()))))
            };
            *line = Some((
                Line::through(rows, times),
                Line::through(rows, BLOCKS.map(project)),
            ));
        }
        let of_block = |block: &Block| lines[usize::from(block.experts.is_some())];
        let each: Vec<(Line, Line)> = c.blocks.iter().filter_map(of_block).collect();
        let last = each
            .last()
            .ok_or_else(|| Error::internal("internal: a model without layers"))?;
        Ok(Self {
            states: last.1,
            layers: each.iter().map(|(layer, _)| *layer).collect(),
            pair,
            windows: c.windows(),
        })
    }

    /// Returns the seconds that a block takes through all layers.
    fn block(&self, rows: usize) -> f64 {
        self.layers(rows, self.windows.len())
    }

    /// Returns the seconds that a block takes in a capture, which computes only the states of the last layer.
    fn capture(&self, rows: usize) -> f64 {
        self.layers(rows, self.windows.len() - 1) + self.states.at(rows as f64)
    }

    fn layers(&self, rows: usize, count: usize) -> f64 {
        let windows = self.windows.iter().take(count);
        let attention: f64 = windows.map(|window| self.pair * pairs(rows, *window)).sum();
        let rest = self.layers.iter().take(count).map(|layer| layer.at(rows as f64));
        rest.sum::<f64>() + attention
    }

    /// Returns the seconds of one more row in all layers, besides attention.
    fn row(&self) -> f64 {
        self.layers.iter().map(|layer| layer.slope).sum()
    }
}

/// Counts the pairs of a query and a key that it sees in a block.
fn pairs(rows: usize, window: Option<usize>) -> f64 {
    let full = window.unwrap_or(rows).min(rows);
    let (full, rows) = (full as f64, rows as f64);
    full * (full + 1.0) / 2.0 + (rows - full) * full
}

/// Two calibrations of a small model with one layer, each on two blocks, one of which is held out.
struct Small {
    /// KV heads of the layer.
    heads: usize,
    /// The calibration on blocks of half the length, then that on blocks of the whole length.
    runs: [SmallRun; 2],
    /// Number of combinations of method and budget, and of formats of the cache, in the verdict.
    variants: usize,
    /// Decode steps of its only text.
    steps: usize,
}

/// One calibration of the small model.
struct SmallRun {
    stages: Stages,
    /// By stage: the amount of work that its time grows with.
    work: BTreeMap<&'static str, f64>,
}

impl Small {
    fn measure(
        settings: &CalibrationSettings,
        config: &ModelConfig,
        tokens: usize,
        machine: Machine,
    ) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::system(format!("cannot write a temporary folder: {e}"))
                .hint("set TMPDIR to a writable folder, or do without measurements (⟨no_probe⟩)")
        };
        let folder = tempfile::tempdir().map_err(failed)?;
        let heads = config.n_kv_heads.min(rayon::current_num_threads());
        let [least, most] = BLOCK;
        let least = least.max(2 * settings.sections.codewords().unwrap_or_default());
        let rows = tokens.min(most).max(least).next_multiple_of(2);
        let model = folder.path().join("model");
        std::fs::create_dir(&model).map_err(failed)?;
        write_model(&model, config, heads, 2 * rows)?;
        let model = Model::open(&model)?;
        let mut variants = 0;
        let mut time = |rows: usize| {
            let tokens = folder.path().join("tokens.json");
            let ids: Vec<Vec<usize>> = vec![(0..2 * rows).collect()];
            std::fs::write(&tokens, json!(ids).to_string()).map_err(failed)?;
            let own = CalibrationSettings {
                verdict: settings.verdict.as_ref().map(|verdict| verdict.of_block(rows)),
                ..settings.clone()
            };
            let options = CorpusOptions {
                seq_len: Some(rows),
                max_tokens: 2 * rows,
                uuid_tokens: None,
                holdout: 0.5,
                seed: own.seed,
            };
            let (source, beyond) = (CorpusSource::Tokens(tokens), own.beyond(rows));
            let texts = Corpus::load_with_reserve(&model.path, model.config(), &source, &options, beyond)?;
            let calibration = Calibration::new(machine, &model, &own, (&texts.0, &texts.1))?;
            let of_fit = |fit: &dyn Fit| (fit.kind().facts().stage, work(fit, &texts.0));
            let of_fits = calibration.fits().iter().map(|fit| of_fit(fit.as_ref()));
            let of_verdict = [BUDGETS, VERDICT].map(|stage| (stage, rows as f64));
            let grows = of_fits.chain(of_verdict).collect();
            let output = Output::create(&folder.path().join(format!("{rows}.safetensors")))?;
            let made = calibration.run(output, None)?;
            if let Some(verdict) = made.verdict.transpose()? {
                let rows = verdict.rows.iter().filter(|row| row.measured.is_some());
                variants = rows.count() + verdict.formats.len();
            }
            Ok::<_, Error>(SmallRun {
                stages: made.stages,
                work: grows,
            })
        };
        Ok(Self {
            heads,
            runs: [time(rows / 2)?, time(rows)?],
            variants,
            steps: settings
                .verdict
                .as_ref()
                .map_or(1, |verdict| verdict.steps.min(rows / 2)),
        })
    }

    /// Returns the seconds of a stage with another amount of work.
    fn at(&self, stage: &str, work: f64) -> f64 {
        let [short, long] = &self.runs;
        let of = |run: &SmallRun| {
            (
                run.work.get(stage).copied().unwrap_or_default(),
                run.stages.get(stage),
            )
        };
        let ((x0, t0), (x1, t1)) = (of(short), of(long));
        // Both runs may read equally many queries; no line passes through two equal amounts.
        if x1 > x0 {
            Line::through([x0, x1], [t0, t1]).at(work)
        } else {
            t1 * work / x1.max(1.0)
        }
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
        let values: Vec<f32> = random::noise(rows, cols).into_iter().collect();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_those_that_attention_computes() {
        for (rows, window) in [(7, None), (7, Some(3)), (7, Some(7)), (7, Some(20)), (1, Some(1))] {
            let sees = |row: usize| (row + 1).min(window.unwrap_or(rows));
            let sum: usize = (0..rows).map(sees).sum();
            assert_eq!(pairs(rows, window), sum as f64, "{rows} {window:?}");
        }
    }
}
