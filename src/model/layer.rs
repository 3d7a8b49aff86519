//! One layer of the decoder, with a seam between the projections and the attention.
//!
//! A layer runs in three steps, so that callers can insert their own attention: [`Layer::project`] gives
//! pre-RoPE q, k and v, the caller attends, and [`Layer::finish`] adds the attention output and the MLP
//! to the residual stream. [`Layer::forward`] is all three with exact causal attention.

use ndarray::{Array2, Array3, ArrayView2, ArrayViewMut2, ArrayViewMut3, Axis, s};
use rayon::prelude::*;

use super::config::ModelConfig;
use super::mlp::FeedForward;
use super::rope::{Rope, RopeTable};
use super::sizes::Sizes;
use crate::compute::Precision;
use crate::compute::attention;
use crate::compute::layout::{elements, elements_mut};
use crate::compute::linear::{FEW, Linear, forward_all, packed_floats};
use crate::compute::simd;
use crate::error::Result;
use crate::float::Float;
use crate::kv::Qkv;
use crate::quant::Quant;
use crate::weight::{Stored, Weight};

/// Values that are worth copying on several threads.
const PARALLEL: usize = 1 << 15;

/// Rows that pass a projection together; bounds the memory of the wide intermediate results.
const ROWS: usize = 2048;

/// One decoder layer, as views of the mapped weights.
pub struct Layer {
    /// Number of the layer, from 0.
    pub index: usize,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// Epsilon of every RMS norm.
    pub eps: f32,
    /// Number of visible positions, the current one included; `None` = all.
    pub window: Option<usize>,
    /// Weight of the RMS norm before the q, k and v projections, `[hidden]`.
    pub input_norm: Vec<f32>,
    /// `[h d, hidden]`.
    pub q: Linear,
    /// `[g d, hidden]`.
    pub k: Linear,
    /// `[g d, hidden]`.
    pub v: Linear,
    /// `[hidden, h d]`.
    pub o: Linear,
    /// Weight of the RMS norm over each head of q, `[d]`.
    pub q_norm: Option<Vec<f32>>,
    /// Weight of the RMS norm over each head of k, `[d]`.
    pub k_norm: Option<Vec<f32>>,
    /// Weight of the RMS norm before the MLP, `[hidden]`.
    pub mlp_norm: Vec<f32>,
    /// The feed-forward part.
    pub mlp: FeedForward,
    /// Whether a prompt's attention rounds its factors to bf16, and projections of a prompt their inputs.
    pub rounds: bool,
    /// Factor on the queries.
    pub query_factor: f32,
    /// Factor on what attention and MLP add to the residual stream.
    pub residual_factor: f32,
}

/// A layer's q `[h,m,d]`, k and v `[g,m,d]` for m rows, after bias and q/k norm and before rotation.
pub type States = Qkv<Array3<f32>>;

impl Layer {
    /// Computes pre-RoPE q (times its factor), k and v of every row of `hidden`, `[m, hidden]`.
    pub fn project(&self, hidden: ArrayView2<f32>) -> States {
        let empty = |heads| Array3::zeros((heads, hidden.nrows(), self.sizes.head_dim));
        let mut states = States {
            q: empty(self.sizes.n_heads),
            k: empty(self.sizes.n_kv_heads),
            v: empty(self.sizes.n_kv_heads),
        };
        for (i, hidden) in hidden.axis_chunks_iter(Axis(0), ROWS).enumerate() {
            let rows = i * ROWS..i * ROWS + hidden.nrows();
            let mut normed = Array2::zeros(hidden.dim());
            rms_rows(hidden, &self.input_norm, self.eps, normed.view_mut());
            let mut all = [
                (&self.q, self.q_norm.as_ref(), &mut states.q),
                (&self.k, self.k_norm.as_ref(), &mut states.k),
                (&self.v, None, &mut states.v),
            ];
            // Many rows pass one projection after the other, so that the results of one alone take memory.
            let at_once = if rows.len() <= FEW { all.len() } else { 1 };
            for part in all.chunks_mut(at_once) {
                let empty =
                    |(linear, ..): &(&Linear, _, _)| Array2::zeros((rows.len(), linear.weight.rows()));
                let mut flat: Vec<Array2<f32>> = part.iter().map(empty).collect();
                let outputs = part.iter().zip(&mut flat);
                forward_all(
                    normed.view(),
                    outputs.map(|(of, flat)| (of.0, flat.view_mut())).collect(),
                );
                for ((_, norm, out), flat) in part.iter_mut().zip(&flat) {
                    let norm = norm.map(|w| (w.as_slice(), self.eps));
                    split_heads(flat.view(), norm, out.slice_mut(s![.., rows.clone(), ..]));
                }
            }
        }
        if self.query_factor != 1.0 {
            states.q *= self.query_factor;
        }
        states
    }

    /// Adds the attention output `attended`, `[m, h d]`, and then the MLP to `hidden`, `[m, hidden]`.
    pub fn finish(&self, mut hidden: ArrayViewMut2<f32>, attended: ArrayView2<f32>) {
        let width = hidden.ncols();
        assert_eq!(hidden.nrows(), attended.nrows(), "attention output per row");
        let attended = attended.axis_chunks_iter(Axis(0), ROWS);
        for (mut hidden, attended) in hidden.axis_chunks_iter_mut(Axis(0), ROWS).zip(attended) {
            let m = hidden.nrows();
            let mut delta = Array2::zeros((m, width));
            self.o.forward(attended, delta.view_mut());
            self.add(&mut hidden, &delta);
            let mut normed = Array2::zeros((m, width));
            rms_rows(hidden.view(), &self.mlp_norm, self.eps, normed.view_mut());
            self.mlp.forward(normed.view(), delta.view_mut());
            self.add(&mut hidden, &delta);
        }
    }

    /// Adds the output of attention or MLP to the residual stream.
    fn add(&self, hidden: &mut ArrayViewMut2<f32>, delta: &Array2<f32>) {
        match self.residual_factor {
            1.0 => *hidden += delta,
            factor => hidden.scaled_add(factor, delta),
        }
    }

    /// Runs the whole layer over a block that starts at position 0, with exact attention.
    ///
    /// `tap` sees the pre-RoPE states and the rotated keys.
    pub fn forward(
        &self,
        rope: &Rope,
        mut hidden: ArrayViewMut2<f32>,
        tap: impl FnOnce(&States, &Array3<f32>),
    ) {
        let m = hidden.nrows();
        let mut states = self.project(hidden.view());
        let table = rope.table(0..m);
        let k_rope = rotated(&states.k, &table);
        tap(&states, &k_rope);
        // In place, since nothing reads the unrotated queries from here on.
        rotate(&mut states.q, &table);
        let mut attended = Array2::zeros((m, self.sizes.n_heads * self.sizes.head_dim));
        attention::causal(
            states.q.view(),
            k_rope.view(),
            states.v.view(),
            0,
            self.window,
            self.rounds,
            attended.view_mut(),
        );
        drop(states);
        drop(k_rope);
        self.finish(hidden.view_mut(), attended.view());
    }

    /// Rounds the weights of the projections to a quantised type, if one is given.
    ///
    /// # Errors
    /// Rows that are not whole blocks; a temporary file that cannot be written.
    pub fn rounded(mut self, quant: Option<Quant>) -> Result<Self> {
        let attention = [&mut self.q, &mut self.k, &mut self.v, &mut self.o];
        for linear in attention.into_iter().chain(self.mlp.rounded_mut()) {
            linear.weight = linear.weight.rounded(quant)?;
        }
        Ok(self)
    }

    /// Multiplies prompts in bf16, or in f32, from now on; weights in another type, and a router, which decides for whole
    /// experts, stay in f32.
    pub fn with_precision(mut self, precision: Precision) -> Self {
        self.rounds = precision == Precision::Bf16 && self.k.weight.stored() == Stored::Float(Float::Bf16);
        let attention = [&mut self.q, &mut self.k, &mut self.v, &mut self.o];
        for linear in attention.into_iter().chain(self.mlp.rounded_mut()) {
            linear.rounds = self.rounds;
        }
        self
    }

    /// Lists the weights of the layer's projections.
    pub fn weights(&self) -> Vec<&Weight> {
        let attention = [&self.q, &self.k, &self.v, &self.o];
        let linears = attention.into_iter().chain(self.mlp.linears());
        linears.map(|linear| &linear.weight).collect()
    }

    /// Lists the weights of the layer's projections, without a router's.
    pub fn weights_mut(&mut self) -> Vec<&mut Weight> {
        let attention = [&mut self.q, &mut self.k, &mut self.v, &mut self.o];
        let linears = attention.into_iter().chain(self.mlp.rounded_mut());
        linears.map(|linear| &mut linear.weight).collect()
    }

    /// Returns the bytes of the projections' weights in the checkpoint.
    pub fn bytes(&self) -> usize {
        self.weights().into_iter().map(Weight::bytes).sum()
    }

    /// Returns the bytes of the weights that a decode step reads.
    pub fn read_bytes(&self) -> usize {
        let attention = [&self.q, &self.k, &self.v, &self.o];
        let attention = attention.iter().map(|linear| linear.weight.bytes());
        attention.sum::<usize>() + self.mlp.read_bytes()
    }

    /// Gives the layer's file pages back to the system.
    pub fn release(&self) {
        Weight::release(&self.weights());
    }
}

/// Returns the bytes of the padded copy of a projection's inputs, once blocks of up to `rows` rows have passed the model on
/// the CPU: the thread keeps it for the next projection. Inputs that are rounded to pairs of bf16 values take about as much, copy
/// included. `finished` says whether the outputs of layers are computed.
pub fn kept_bytes(c: &ModelConfig, rows: usize, finished: bool) -> usize {
    let width = if finished {
        c.hidden_size.max(c.n_heads * c.head_dim).max(c.widest_mlp())
    } else {
        c.hidden_size
    };
    packed_floats(rows.min(ROWS), width) * size_of::<f32>()
}

/// Returns the bytes of memory that a block of `rows` rows takes while it passes a layer on the CPU, in addition to its
/// hidden states and to [`kept_bytes`]; `finished` says whether the layer's output is computed too.
pub fn block_bytes(c: &ModelConfig, rows: usize, finished: bool) -> usize {
    let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
    let (hidden, inter) = (c.hidden_size, c.widest_mlp());
    let chunk = rows.min(ROWS);
    let states = rows * (q + 2 * kv);
    let table = rows * c.head_dim;
    let project = states + chunk * (hidden + q);
    // The rotated keys, the queries of which the moments are computed, and the rotation tables of both.
    let tap = states + rows * kv + 2 * table + chunk * q;
    let attend = states + rows * (kv + q) + table;
    // At most all rows pass one expert, which takes a copy of them.
    let experts = c.blocks.iter().filter_map(|block| block.experts.as_ref());
    // And a list says, in 16 bytes that may double as it grows, where each row goes.
    let mixture = experts.map(|of| of.count + 8 * of.active + 2 + 2 * hidden).max();
    let mixture = mixture.unwrap_or(0);
    let finish = rows * q + table + chunk * (2 * hidden + 2 * inter + mixture);
    let passes = if finished {
        vec![project, tap, attend, finish]
    } else {
        vec![project, tap]
    };
    let floats = passes.into_iter().max().unwrap_or(0);
    floats * size_of::<f32>()
}

/// Returns a rotated copy of `[heads, m, d]`; row i is rotated by the i-th position of the table.
pub fn rotated(x: &Array3<f32>, table: &RopeTable) -> Array3<f32> {
    let mut y = x.clone();
    rotate(&mut y, table);
    y
}

/// Returns a copy of `[heads, m, d]` with every row rotated by the position at index `at` of the table.
pub fn rotated_to(x: &Array3<f32>, table: &RopeTable, at: usize) -> Array3<f32> {
    let mut y = x.clone();
    for mut vector in y.lanes_mut(Axis(2)) {
        table.rotate(elements_mut(&mut vector), at);
    }
    y
}

/// Returns a copy of `[heads, m, d]` with row i rotated by the i-th position of the table, on the calling thread.
pub fn rotated_rows(x: &Array3<f32>, table: &RopeTable) -> Array3<f32> {
    let mut y = x.clone();
    for mut head in y.outer_iter_mut() {
        for (row, mut vector) in head.rows_mut().into_iter().enumerate() {
            table.rotate(elements_mut(&mut vector), row);
        }
    }
    y
}

/// Rotates `[heads, m, d]` in place; row i by the i-th position of the table.
pub fn rotate(x: &mut Array3<f32>, table: &RopeTable) {
    x.axis_iter_mut(Axis(0)).into_par_iter().for_each(|mut head| {
        for (row, mut vector) in head.rows_mut().into_iter().enumerate() {
            table.rotate(elements_mut(&mut vector), row);
        }
    });
}

/// Splits `[m, heads d]` into `[heads, m, d]`, with an optional RMS norm (weight, eps) over each head.
fn split_heads(flat: ArrayView2<f32>, norm: Option<(&[f32], f32)>, mut out: ArrayViewMut3<f32>) {
    let d = out.len_of(Axis(2));
    let split = |(head, mut out): (usize, ArrayViewMut2<f32>)| {
        let source = flat.slice(s![.., head * d..(head + 1) * d]);
        for (mut to, from) in out.rows_mut().into_iter().zip(source.rows()) {
            let (to, from) = (elements_mut(&mut to), elements(&from));
            match norm {
                Some((weight, eps)) => simd::rms_norm(from, weight, eps, to),
                None => to.copy_from_slice(from),
            }
        }
    };
    // Few rows are copied in less time than other threads need to start.
    if flat.len() < PARALLEL {
        out.axis_iter_mut(Axis(0)).enumerate().for_each(split)
    } else {
        out.axis_iter_mut(Axis(0))
            .into_par_iter()
            .enumerate()
            .for_each(split)
    }
}

/// Applies an RMS norm to every row.
pub(super) fn rms_rows(x: ArrayView2<f32>, weight: &[f32], eps: f32, mut out: ArrayViewMut2<f32>) {
    let rows = out
        .axis_iter_mut(Axis(0))
        .into_par_iter()
        .zip(x.axis_iter(Axis(0)));
    rows.for_each(|(mut out, x)| simd::rms_norm(elements(&x), weight, eps, elements_mut(&mut out)));
}
