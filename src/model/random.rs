//! Models with random weights, for what is timed without a checkpoint.

use std::cell::RefCell;

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::config::ModelConfig;
use super::decoder::Decoder;
use super::layer::Layer;
use super::mlp::{Experts, FeedForward, Gated};
use super::weights::Checkpoint;
use crate::compute::linear::Linear;
use crate::error::Result;
use crate::float::Float;
use crate::weight::Weight;

/// Numbers of which all random weights are made; a prime, so that rows begin everywhere.
const NUMBERS: usize = 65_521;

/// Makes a model of a configuration without its layers; the embedding is also the output projection.
///
/// # Errors
/// A temporary file that cannot be written.
pub fn decoder(config: ModelConfig) -> Result<Decoder> {
    let embedding = weight(config.vocab_size, config.hidden_size)?;
    Ok(Decoder {
        ropes: config.ropes(),
        checkpoint: Checkpoint::default(),
        norm: vec![1.0; config.hidden_size],
        head: Linear::new(embedding.clone(), None),
        embedding,
        config,
        rounds_to: None,
    })
}

/// Makes layer `index` of a model of a configuration, with weights in bf16 that keep the scale of what they multiply.
///
/// # Errors
/// A temporary file that cannot be written.
pub fn layer(c: &ModelConfig, index: usize) -> Result<Layer> {
    let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
    let hidden = c.hidden_size;
    let linear = |rows: usize, cols: usize, has_bias: bool| -> Result<Linear> {
        Ok(Linear::new(
            weight(rows, cols)?,
            has_bias.then(|| vec![0.0; rows]),
        ))
    };
    let gated = |width: usize| -> Result<Gated> {
        Ok(Gated {
            gate: linear(width, hidden, c.mlp_bias)?,
            up: linear(width, hidden, c.mlp_bias)?,
            down: linear(hidden, width, c.mlp_bias)?,
        })
    };
    let norm = || c.qk_norm.then(|| vec![1.0; c.head_dim]);
    Ok(Layer {
        index,
        sizes: c.sizes(),
        eps: c.rms_norm_eps,
        window: c.blocks[index].window,
        input_norm: vec![1.0; hidden],
        q: linear(q, hidden, c.qkv_bias)?,
        k: linear(kv, hidden, c.qkv_bias)?,
        v: linear(kv, hidden, c.qkv_bias)?,
        o: linear(hidden, q, c.o_bias)?,
        q_norm: norm(),
        k_norm: norm(),
        mlp_norm: vec![1.0; hidden],
        mlp: match &c.blocks[index].experts {
            None => FeedForward::Gated(gated(c.intermediate_size)?),
            Some(of) => FeedForward::Experts(Experts {
                router: linear(of.count, hidden, false)?,
                experts: (0..of.count).map(|_| gated(of.width)).collect::<Result<_>>()?,
                active: of.active,
                normalises: of.normalises,
            }),
        },
        rounds: false,
        query_factor: c.multipliers.query,
        residual_factor: c.multipliers.residual,
    })
}

/// Returns the bytes of random weights in bf16: those of [`decoder`] with all its [`layer`]s, and those that a GPU draws.
pub fn bytes(c: &ModelConfig) -> f64 {
    let layers: f64 = c.layer_weights().iter().map(|[all, _]| all).sum();
    2.0 * (layers + c.hidden_size as f64 * c.vocab_size as f64)
}

fn weight(rows: usize, cols: usize) -> Result<Weight> {
    Weight::from_values(noise(rows, cols).view(), Float::Bf16)
}

thread_local! {
    /// Uniform numbers from -1 to 1.
    static DRAWN: RefCell<Vec<f32>> = RefCell::default();
}

/// Makes random weights that keep the scale of what they multiply, `[rows,cols]`. All rows read the same numbers, from
/// different starts.
pub fn noise(rows: usize, cols: usize) -> Array2<f32> {
    DRAWN.with_borrow_mut(|drawn| {
        if drawn.is_empty() {
            let mut rng = ChaCha8Rng::seed_from_u64(0);
            drawn.extend((0..NUMBERS).map(|_| rng.gen_range(-1.0..1.0)));
        }
        let mut rng = ChaCha8Rng::seed_from_u64(rows as u64);
        let scale = 1.7 / (cols as f32).sqrt();
        let mut out = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            let mut first = rng.gen_range(0..NUMBERS);
            while out.len() < (row + 1) * cols {
                let count = ((row + 1) * cols - out.len()).min(NUMBERS - first);
                out.extend(drawn[first..first + count].iter().map(|x| x * scale));
                first = 0;
            }
        }
        Array2::from_shape_vec((rows, cols), out).expect("whole rows")
    })
}
