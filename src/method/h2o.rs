//! H2O: the positions that queries attended most so far, arXiv 2306.14048.
//!
//! Every position accumulates the softmax weights that it got from all queries so far, of the prompt and of the steps,
//! summed over the query group. A step chooses the candidates with the largest sums. The lower position wins a tie.
//!
//! Where we differ from the paper: it evicts all other positions for good and spends half of its budget on recent
//! ones; here nothing is evicted and the window is outside the budget, so that methods are compared at equal reads.

use std::ops::Range;

use ndarray::ArrayView2;

use super::best::best_positions;
use super::declaration::{Declaration, InVerdict};
use super::{Place, Prompt, Reads, Retriever, Selection, Step, everything};
use crate::kv::lines::grow;

/// The declaration of `h2o`.
pub static METHOD: Declaration = Declaration {
    name: "h2o",
    help: "The positions that were attended most so far (H2O, arXiv 2306.14048)",
    section: None,
    verdict: InVerdict::IfCalibrated,
    prepare: |_| Ok(Box::new(|place: &Place| H2o::new(place.limits.model_window))),
    bench: None,
};

/// Rows of a prompt whose softmax weights are computed together.
const ROWS: usize = 64;

/// The accumulated attention of one KV head.
#[derive(Clone)]
pub struct H2o {
    /// The model's own sliding window.
    window: Option<usize>,
    /// The sum of the weights that each position has got.
    weights: Vec<f64>,
}

impl H2o {
    /// Makes an empty head of a layer with this sliding window.
    pub fn new(window: Option<usize>) -> Self {
        Self {
            window,
            weights: Vec::new(),
        }
    }
}

impl Retriever for H2o {
    fn prefill(&mut self, prompt: &Prompt) {
        let (r, m, _) = prompt.q_rope.dim();
        self.weights.resize(prompt.keys.nrows(), 0.0);
        for first in (0..m).step_by(ROWS) {
            for a in 0..r {
                let (seen, weights) = prompt.weights_of(a, first..m.min(first + ROWS), self.window);
                for row in weights.rows() {
                    let sums = self.weights[seen.clone()].iter_mut();
                    sums.zip(row).for_each(|(sum, w)| *sum += f64::from(*w));
                }
            }
        }
    }

    fn append(&mut self, _: ArrayView2<f32>, _: ArrayView2<f32>) {
        grow(&mut self.weights, 1).push(0.0);
    }

    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let weighted = step.candidates.clone().map(|p| (self.weights[p], p as u32));
        best_positions(weighted.collect(), step.budget).into()
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let Range { start, end } = step.candidates;
        reads.range(start * size_of::<f64>()..end * size_of::<f64>());
        reads.scratch(step.candidates.len() * size_of::<(f64, u32)>());
    }

    fn observes(&self, _: &Step) -> bool {
        true
    }

    fn observe(&mut self, _: &Step, positions: &[u32], weights: ArrayView2<f32>) {
        for row in weights.rows() {
            for (p, weight) in positions.iter().zip(row) {
                self.weights[*p as usize] += f64::from(*weight);
            }
        }
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        size_of::<f64>() * positions
    }

    fn state_bytes(&self) -> usize {
        self.weights.capacity() * size_of::<f64>()
    }
}
