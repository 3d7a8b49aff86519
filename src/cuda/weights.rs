//! One layer's weights on the device, in the type that the checkpoint stores.

use super::sizes::LayerSizes;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::linear::{Linear, Matrix};
use crate::compute::linear;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::Layer;
use crate::model::mlp::FeedForward;

/// A decoder layer's weights on the device.
pub struct LayerWeights<'d> {
    pub(crate) input_norm: Buffer<'d, f32>,
    pub(crate) qkv: Linear<'d>,
    pub(crate) q_norm: Option<Buffer<'d, f32>>,
    pub(crate) k_norm: Option<Buffer<'d, f32>>,
    pub(crate) o: Linear<'d>,
    pub(crate) mlp_norm: Buffer<'d, f32>,
    pub(crate) gate_up: Linear<'d>,
    pub(crate) down: Linear<'d>,
    /// Number of visible positions, including the current one; `None` = all.
    pub window: Option<usize>,
}

impl<'d> LayerWeights<'d> {
    /// Copies a layer to the device.
    ///
    /// # Errors
    /// Out of memory.
    pub fn upload(driver: &'d dyn Driver, layer: &Layer) -> Result<Self> {
        let FeedForward::Gated(mlp) = &layer.mlp else {
            return Err(Error::internal("internal: CUDA: a mixture of experts"));
        };
        let joined = |linears: &[&linear::Linear]| upload(driver, linears);
        let vector = |values: &[f32]| Buffer::from_slice(driver, "norms", values);
        let head_norm = |norm: &Option<Vec<f32>>| norm.as_deref().map(vector).transpose();
        Ok(Self {
            input_norm: vector(&layer.input_norm)?,
            qkv: joined(&[&layer.q, &layer.k, &layer.v])?,
            q_norm: head_norm(&layer.q_norm)?,
            k_norm: head_norm(&layer.k_norm)?,
            o: joined(&[&layer.o])?,
            mlp_norm: vector(&layer.mlp_norm)?,
            gate_up: joined(&[&mlp.gate, &mlp.up])?,
            down: joined(&[&mlp.down])?,
            window: layer.window,
        })
    }

    /// For a benchmark: makes random bf16 weights.
    ///
    /// # Errors
    /// Out of memory.
    pub fn random(driver: &'d dyn Driver, s: &LayerSizes, window: Option<usize>, seed: u32) -> Result<Self> {
        let matrix = |rows, cols, seed| random(driver, rows, cols, seed);
        let ones = || Buffer::from_slice(driver, "norms", &vec![1.0; s.hidden]);
        Ok(Self {
            input_norm: ones()?,
            qkv: matrix(s.qkv(), s.hidden, seed)?,
            q_norm: None,
            k_norm: None,
            o: matrix(s.hidden, s.attended(), seed + 1)?,
            mlp_norm: ones()?,
            gate_up: matrix(2 * s.intermediate, s.hidden, seed + 2)?,
            down: matrix(s.hidden, s.intermediate, seed + 3)?,
            window,
        })
    }
}

/// Makes a projection of random bf16 numbers.
pub(crate) fn random<'d>(driver: &'d dyn Driver, rows: usize, cols: usize, seed: u32) -> Result<Linear<'d>> {
    Ok(Linear {
        weight: Matrix::random(driver, Float::Bf16, rows, cols, seed)?,
        bias: None,
    })
}

/// Returns the weights of several projections one after the other, all in the type of the first one.
fn joined(linears: &[&linear::Linear], kind: Float) -> Vec<u8> {
    let mut bytes = Vec::new();
    for weight in linears.iter().map(|linear| &linear.weight) {
        weight.append(kind, &mut bytes);
    }
    bytes
}

/// Copies several projections of the same inputs to the device as one projection, by putting their rows one after the
/// other.
pub(crate) fn upload<'d>(driver: &'d dyn Driver, linears: &[&linear::Linear]) -> Result<Linear<'d>> {
    let Some(first) = linears.first() else {
        return Err(Error::internal("CUDA: no weights to join"));
    };
    let (kind, cols) = (first.weight.float(), first.weight.cols());
    let rows = linears.iter().map(|l| l.weight.rows()).sum();
    let mut others = linears.iter().map(|l| &l.weight).filter(|w| w.float() != kind);
    if let Some(other) = others.next().filter(|_| kind != Float::F32) {
        let (from, to) = (other.float().name(), kind.name());
        let names = [first.weight.name(), other.name()];
        return Err(Error::unsupported(format!(
            "CUDA: `{}` is {to} and `{}` {from}; they must have one type",
            names[0], names[1]
        ))
        .hint("convert the checkpoint to a single type, or use ⟨device=cpu⟩"));
    }
    let bias: Vec<f32> = linears
        .iter()
        .filter_map(|l| l.bias.as_deref())
        .flatten()
        .copied()
        .collect();
    let weight = Matrix::empty(driver, kind, rows, cols)?;
    if driver.has_memory() {
        weight.write(&joined(linears, kind))?;
    }
    let bias = match bias.len() {
        0 => None,
        n if n == rows => Some(Buffer::from_slice(driver, "biases", &bias)?),
        n => return Err(Error::internal(format!("CUDA: {n} biases for {rows} channels"))),
    };
    Ok(Linear { weight, bias })
}
