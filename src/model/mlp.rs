//! The feed-forward part of a layer: a gated MLP, or a mixture of them.

use ndarray::{Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use crate::compute::layout::{elements, elements_mut};
use crate::compute::linear::{FEW, Linear, forward_all};
use crate::compute::simd;

/// The feed-forward part of a layer.
pub enum FeedForward {
    /// One MLP for every row.
    Gated(Gated),
    /// Several, of which each row passes a few.
    Experts(Experts),
}

impl FeedForward {
    /// Computes the outputs, `[m, hidden]`, for normed rows, `[m, hidden]`.
    pub fn forward(&self, normed: ArrayView2<f32>, out: ArrayViewMut2<f32>) {
        match self {
            Self::Gated(mlp) => mlp.forward(normed, out),
            Self::Experts(experts) => experts.forward(normed, out),
        }
    }

    /// Lists the projections.
    pub fn linears(&self) -> Vec<&Linear> {
        match self {
            Self::Gated(mlp) => mlp.linears().to_vec(),
            Self::Experts(of) => {
                let experts = of.experts.iter().flat_map(Gated::linears);
                experts.chain([&of.router]).collect()
            }
        }
    }

    /// Lists the projections that may be rounded: all but a router, which decides for whole experts.
    pub fn rounded_mut(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Gated(mlp) => mlp.linears_mut().into(),
            Self::Experts(of) => of.experts.iter_mut().flat_map(Gated::linears_mut).collect(),
        }
    }

    /// Returns the bytes of the weights that one row reads.
    pub fn read_bytes(&self) -> usize {
        let bytes = |linears: &[&Linear]| linears.iter().map(|of| of.weight.bytes()).sum::<usize>();
        match self {
            Self::Gated(mlp) => bytes(&mlp.linears()),
            Self::Experts(of) => {
                let expert = of.experts.first().map_or(0, |expert| bytes(&expert.linears()));
                of.router.weight.bytes() + of.active * expert
            }
        }
    }
}

/// A mixture of experts: each row passes the few MLPs that a router gives the largest probabilities, and takes the sum of
/// their outputs, weighted by these.
///
/// # Source
/// Qwen3's models (arXiv 2505.09388, section 2), as transformers computes them.
pub struct Experts {
    /// Scores every expert, `[experts, hidden]`.
    pub router: Linear,
    /// The experts.
    pub experts: Vec<Gated>,
    /// Number of experts that a row passes.
    pub active: usize,
    /// Whether their probabilities are divided by their sum.
    pub normalises: bool,
}

impl Experts {
    fn forward(&self, normed: ArrayView2<f32>, mut out: ArrayViewMut2<f32>) {
        let mut scores = Array2::zeros((normed.nrows(), self.experts.len()));
        self.router.forward(normed, scores.view_mut());
        // By expert: its rows and their weights.
        let mut rows: Vec<Vec<(usize, f32)>> = vec![Vec::new(); self.experts.len()];
        for (row, scores) in scores.rows().into_iter().enumerate() {
            for (expert, weight) in self.choose(scores) {
                rows[expert].push((row, weight));
            }
        }
        out.fill(0.0);
        for (expert, rows) in self
            .experts
            .iter()
            .zip(&rows)
            .filter(|(_, rows)| !rows.is_empty())
        {
            let mut numbers: Vec<usize> = rows.iter().map(|(row, _)| *row).collect();
            if normed.nrows() > FEW {
                // Few rows would be rounded for quantised weights; the rows of a prompt are not.
                numbers.resize(numbers.len().max(FEW + 1), numbers[0]);
            }
            let inputs = normed.select(Axis(0), &numbers);
            let mut outputs = Array2::zeros(inputs.dim());
            expert.forward(inputs.view(), outputs.view_mut());
            for ((row, weight), output) in rows.iter().zip(outputs.rows()) {
                out.row_mut(*row).scaled_add(*weight, &output);
            }
        }
    }

    /// Returns the experts of a row and their weights, from the scores of all, `[experts]`. Of equal scores, the first count.
    fn choose(&self, scores: ArrayView1<f32>) -> Vec<(usize, f32)> {
        let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f32> = scores.iter().map(|x| (x - largest).exp()).collect();
        let mut order: Vec<usize> = (0..powers.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
        order.truncate(self.active);
        let sum: f32 = if self.normalises {
            order.iter().map(|expert| powers[*expert]).sum()
        } else {
            powers.iter().sum()
        };
        order
            .into_iter()
            .map(|expert| (expert, powers[expert] / sum))
            .collect()
    }
}

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

#[cfg(test)]
mod tests {
    use ndarray::arr1;

    use super::*;
    use crate::float::Float;
    use crate::quant::Quant;
    use crate::testing::values;
    use crate::weight::Weight;

    fn linear(rows: usize, cols: usize, seed: u32) -> Linear {
        let values = Array2::from_shape_vec((rows, cols), values(rows * cols, seed)).unwrap();
        Linear::new(Weight::from_values(values.view(), Float::F32).unwrap(), None)
    }

    fn experts(count: usize, active: usize, normalises: bool) -> Experts {
        let expert = |i| Gated {
            gate: linear(8, 4, 3 * i),
            up: linear(8, 4, 3 * i + 1),
            down: linear(4, 8, 3 * i + 2),
        };
        Experts {
            router: linear(count, 4, 99),
            experts: (0..count as u32).map(expert).collect(),
            active,
            normalises,
        }
    }

    /// A row of a prompt is not rounded for quantised weights, however few rows pass its expert.
    #[test]
    fn few_rows_of_a_prompt_are_exact() {
        let wide = |rows, cols, seed| {
            let linear = linear(rows, cols, seed);
            let weight = linear.weight.rounded(Some(Quant::Q8_0)).unwrap();
            Linear::new(weight, None)
        };
        let expert = |i: u32| Gated {
            gate: wide(32, 32, 3 * i),
            up: wide(32, 32, 3 * i + 1),
            down: wide(32, 32, 3 * i + 2),
        };
        let mixture = Experts {
            router: linear(64, 32, 99),
            experts: (0..64).map(expert).collect(),
            active: 1,
            normalises: true,
        };
        let rows = Array2::from_shape_vec((6, 32), values(6 * 32, 7)).unwrap();
        let mut found = Array2::zeros((6, 32));
        mixture.forward(rows.view(), found.view_mut());
        let mut scores = Array2::zeros((6, 64));
        mixture.router.forward(rows.view(), scores.view_mut());
        let mut outputs = Array2::zeros((6, 32));
        for (row, scores) in scores.rows().into_iter().enumerate() {
            let (expert, _) = mixture.choose(scores)[0];
            mixture.experts[expert].forward(rows.view(), outputs.view_mut());
            assert_eq!(found.row(row), outputs.row(row));
        }
    }

    #[test]
    fn the_most_probable_experts_are_chosen() {
        let scores = arr1(&[0.0, 2f32.ln(), 5f32.ln(), 2f32.ln()]);
        let close = |found: Vec<(usize, f32)>, expected: &[(usize, f32)]| {
            assert_eq!(found.len(), expected.len());
            for (a, b) in found.iter().zip(expected) {
                assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-6, "{found:?}");
            }
        };
        // The probabilities are 1, 2, 5 and 2 tenths.
        close(experts(4, 2, false).choose(scores.view()), &[(2, 0.5), (1, 0.2)]);
        close(
            experts(4, 2, true).choose(scores.view()),
            &[(2, 5.0 / 7.0), (1, 2.0 / 7.0)],
        );
        let large = scores.mapv(|x| x + 300.0);
        close(experts(4, 1, false).choose(large.view()), &[(2, 0.5)]);
    }

    /// Rows that pass an expert together get what each gets alone.
    #[test]
    fn rows_do_not_depend_on_each_other() {
        let mixture = experts(5, 2, true);
        let rows = Array2::from_shape_vec((40, 4), values(160, 7)).unwrap();
        let mut together = Array2::from_elem((40, 4), f32::NAN);
        mixture.forward(rows.view(), together.view_mut());
        for (row, together) in rows.axis_chunks_iter(Axis(0), 1).zip(together.rows()) {
            let mut alone = Array2::zeros((1, 4));
            mixture.forward(row, alone.view_mut());
            for (a, b) in alone.iter().zip(together) {
                assert!((a - b).abs() < 1e-5, "{alone} {together}");
            }
            let mut sum = Array2::<f32>::zeros((1, 4));
            let mut scores = Array2::zeros((1, 5));
            mixture.router.forward(row, scores.view_mut());
            for (expert, weight) in mixture.choose(scores.row(0)) {
                let mut output = Array2::zeros((1, 4));
                mixture.experts[expert].forward(row, output.view_mut());
                sum += &(output * weight);
            }
            assert!((sum - alone).iter().all(|off| off.abs() < 1e-6));
        }
    }
}
