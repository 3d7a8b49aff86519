//! The feed-forward part of a layer.

use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::compute::layout::{elements, elements_mut};
use crate::compute::linear::{Linear, forward_all};
use crate::compute::simd;

/// A gated MLP: `down (silu(gate x) * up x)`.
pub struct Gated {
    /// `[intermediate, hidden]`.
    pub gate: Linear,
    /// `[intermediate, hidden]`.
    pub up: Linear,
    /// `[hidden, intermediate]`.
    pub down: Linear,
}

impl Gated {
    /// Computes the outputs, `[m, hidden]`, for normed rows, `[m, hidden]`.
    pub fn forward(&self, normed: ArrayView2<f32>, out: ArrayViewMut2<f32>) {
        let mut gate = Array2::zeros((normed.nrows(), self.gate.weight.rows()));
        let mut up = Array2::zeros(gate.dim());
        forward_all(
            normed,
            vec![(&self.gate, gate.view_mut()), (&self.up, up.view_mut())],
        );
        gate.axis_iter_mut(Axis(0))
            .into_par_iter()
            .zip(up.axis_iter(Axis(0)))
            .for_each(|(mut gate, up)| simd::silu_mul(elements_mut(&mut gate), elements(&up)));
        drop(up);
        self.down.forward(gate.view(), out);
    }

    /// Lists the projections.
    pub fn linears(&self) -> [&Linear; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Lists the projections.
    pub fn linears_mut(&mut self) -> [&mut Linear; 3] {
        [&mut self.gate, &mut self.up, &mut self.down]
    }
}
