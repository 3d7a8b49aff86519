//! A prompt through a model in f64, with the roundings to 16 bits that `--precision auto` makes: naive, for small models.

use half::{bf16, f16};
use kvsmith::internal::compute::cuda::linear::FEW;
use kvsmith::internal::compute::linear::Linear;
use kvsmith::internal::float::Float;
use kvsmith::internal::model::mlp::FeedForward;
use kvsmith::internal::model::{Decoder, Layer};

/// Rounds to a type.
pub type Round = fn(f64) -> f64;

/// The rounding to the type of a model's weights.
pub fn rounding(decoder: &Decoder) -> Round {
    match decoder.layer(0).unwrap().k.weight.float() {
        Float::F32 => |v| v,
        Float::F16 => |v| f16::from_f64(v).to_f64(),
        Float::Bf16 => |v| bf16::from_f64(v).to_f64(),
    }
}

/// The logits after the last of `ids`.
pub fn logits(decoder: &Decoder, ids: &[u32], round: Round) -> Vec<f64> {
    let c = &decoder.config;
    // Products with few rows round nothing.
    let inputs: Round = if ids.len() > FEW { round } else { |v| v };
    let embedded = decoder.embed(ids).unwrap();
    let mut hidden: Vec<Vec<f64>> = embedded
        .rows()
        .into_iter()
        .map(|row| row.iter().map(|v| f64::from(*v)).collect())
        .collect();
    for i in 0..c.n_layers() {
        let layer = decoder.layer(i).unwrap();
        // Of the last layer one row goes on.
        let last = i + 1 == c.n_layers();
        let attended = attend(decoder, &layer, &hidden, inputs, round);
        let rest: Round = if last { |v| v } else { inputs };
        for (row, attended) in hidden.iter_mut().zip(&attended) {
            add(row, &product(&layer.o, attended, rest));
            let normed = norm(row, &layer.mlp_norm, layer.eps);
            let FeedForward::Gated(mlp) = &layer.mlp else {
                panic!("a mixture of experts");
            };
            let gate = product(&mlp.gate, &normed, rest);
            let up = product(&mlp.up, &normed, rest);
            let silu = |(g, u): (&f64, &f64)| g / (1.0 + (-g).exp()) * u;
            let activated: Vec<f64> = gate.iter().zip(&up).map(silu).collect();
            add(row, &product(&mlp.down, &activated, rest));
        }
    }
    let row = norm(hidden.last().unwrap(), &decoder.norm, c.rms_norm_eps);
    product(&decoder.head, &row, |v| v)
}

/// The attention output of every row, `[m,h d]`.
fn attend(
    decoder: &Decoder,
    layer: &Layer,
    hidden: &[Vec<f64>],
    inputs: Round,
    round: Round,
) -> Vec<Vec<f64>> {
    let (h, g, d) = (layer.sizes.n_heads, layer.sizes.n_kv_heads, layer.sizes.head_dim);
    let rows = |linear: &Linear, head_norm: Option<&Vec<f32>>, rotated: bool| -> Vec<Vec<f64>> {
        let row = |(p, x): (usize, &Vec<f64>)| {
            let y = product(linear, &norm(x, &layer.input_norm, layer.eps), inputs);
            let heads = y.chunks(d).flat_map(|head| {
                let head = match head_norm {
                    Some(weight) => norm(head, weight, layer.eps),
                    None => head.to_vec(),
                };
                if rotated { rotate(decoder, &head, p) } else { head }
            });
            heads.map(round).collect()
        };
        hidden.iter().enumerate().map(row).collect()
    };
    let q = rows(&layer.q, layer.q_norm.as_ref(), true);
    let k = rows(&layer.k, layer.k_norm.as_ref(), true);
    let v = rows(&layer.v, None, false);
    let head = |t: usize, a: usize| -> Vec<f64> {
        let (own, shared) = (a * d..(a + 1) * d, a / (h / g) * d);
        let start = layer.window.map_or(0, |w| (t + 1).saturating_sub(w));
        let score = |j: usize| -> f64 {
            let products = q[t][own.clone()].iter().zip(&k[j][shared..shared + d]);
            products.map(|(x, y)| x * y).sum::<f64>() / (d as f64).sqrt()
        };
        let scores: Vec<f64> = (start..=t).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let channel = |c: usize| {
            let terms = (start..=t)
                .zip(&weights)
                .map(|(j, w)| round(*w) * v[j][shared + c]);
            terms.sum::<f64>() / sum
        };
        (0..d).map(channel).collect()
    };
    let row = |t: usize| (0..h).flat_map(|a| head(t, a)).collect();
    (0..hidden.len()).map(row).collect()
}

fn rotate(decoder: &Decoder, x: &[f64], position: usize) -> Vec<f64> {
    let table = decoder.ropes.layer(0).table(position..position + 1);
    let [cos, sin] = table.parts();
    let half = x.len() / 2;
    let mut out = x.to_vec();
    for i in 0..half {
        let (c, s) = (f64::from(cos[i]), f64::from(sin[i]));
        out[i] = x[i] * c - x[half + i] * s;
        out[half + i] = x[half + i] * c + x[i] * s;
    }
    out
}

fn norm(x: &[f64], weight: &[f32], eps: f32) -> Vec<f64> {
    let squares: f64 = x.iter().map(|v| v * v).sum();
    let factor = 1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt();
    x.iter()
        .zip(weight)
        .map(|(v, w)| v * factor * f64::from(*w))
        .collect()
}

fn product(linear: &Linear, x: &[f64], round: Round) -> Vec<f64> {
    let x: Vec<f64> = x.iter().map(|v| round(*v)).collect();
    let weights = linear.weight.to_vec();
    let rows = weights.chunks(x.len()).enumerate();
    let channel = |(i, w): (usize, &[f32])| {
        let bias = linear.bias.as_ref().map_or(0.0, |b| f64::from(b[i]));
        bias + x.iter().zip(w).map(|(x, w)| x * f64::from(*w)).sum::<f64>()
    };
    rows.map(channel).collect()
}

fn add(x: &mut [f64], y: &[f64]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}
