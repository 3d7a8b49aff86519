//! How good a choice is: recall, probability and output error of one step, and the divergence of two rows of
//! logits.

use std::ops::{AddAssign, Range};

use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2};
use serde::Serialize;

use crate::kv::StaticSet;
use crate::method::Selection;

/// A mean, kept as its sum and the number of values; zero, in JSON null, if there are no values.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[serde(into = "Option<f64>")]
pub struct Mean {
    sum: f64,
    /// Number of values.
    pub count: usize,
}

impl From<f64> for Mean {
    fn from(value: f64) -> Self {
        Self { sum: value, count: 1 }
    }
}

impl From<Mean> for f64 {
    fn from(mean: Mean) -> Self {
        mean.sum / mean.count.max(1) as f64
    }
}

impl From<Mean> for Option<f64> {
    fn from(mean: Mean) -> Self {
        (mean.count > 0).then(|| mean.into())
    }
}

impl AddAssign for Mean {
    fn add_assign(&mut self, other: Self) {
        self.sum += other.sum;
        self.count += other.count;
    }
}

/// The metrics of choices, as means over steps.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Metrics {
    /// Share of the oracle's choice at the same budget that the method chose too.
    pub recall: Mean,
    /// True probability of everything attended, static set included, averaged over the query group.
    pub mass: Mean,
    /// Relative L2 error of the group's attention output.
    pub output_error: Mean,
}

impl AddAssign for Metrics {
    fn add_assign(&mut self, other: Self) {
        self.recall += other.recall;
        self.mass += other.mass;
        self.output_error += other.output_error;
    }
}

/// The exact attention of one step of one KV head, against which choices are measured.
pub(super) struct Judge<'a> {
    set: &'a StaticSet,
    /// True probabilities of the visible positions, `[r,n]`.
    weights: ArrayView2<'a, f32>,
    /// Exact output, `[r,d]`.
    output: ArrayView2<'a, f32>,
    /// Candidates by their probability summed over the query group, the largest first; the lower position on ties.
    ranked: Vec<u32>,
}

impl<'a> Judge<'a> {
    pub fn new(set: &'a StaticSet, weights: ArrayView2<'a, f32>, output: ArrayView2<'a, f32>) -> Self {
        let start = set.visible().start;
        let sums: Vec<f64> = weights
            .columns()
            .into_iter()
            .map(|column| column.iter().map(|w| f64::from(*w)).sum())
            .collect();
        let mut ranked: Vec<u32> = set.candidates.clone().map(|p| p as u32).collect();
        let sum = |p: u32| sums[p as usize - start];
        ranked.sort_unstable_by(|a, b| sum(*b).total_cmp(&sum(*a)).then(a.cmp(b)));
        Self {
            set,
            weights,
            output,
            ranked,
        }
    }

    /// Measures a selection and its attention output, `[r,d]`.
    pub fn measure(&self, selection: &Selection, budget: usize, output: ArrayViewMut2<f32>) -> Metrics {
        let oracle = &self.ranked[..budget.min(self.ranked.len())];
        let found = |p: &&u32| selection.positions.binary_search(p).is_ok();
        let recall = match oracle.len() {
            0 => 1.0,
            n => oracle.iter().filter(found).count() as f64 / n as f64,
        };
        let start = self.set.visible().start;
        let sum = |row: ArrayView1<f32>, range: Range<usize>| -> f64 {
            range.map(|p| f64::from(row[p - start])).sum()
        };
        let mut mass = 0.0;
        for (a, row) in self.weights.rows().into_iter().enumerate() {
            mass += sum(row, self.set.sinks.clone());
            if !selection.bypassed.get(a).is_some_and(Option::is_some) {
                let chosen = selection
                    .positions
                    .iter()
                    .map(|p| f64::from(row[*p as usize - start]));
                mass += chosen.sum::<f64>() + sum(row, self.set.window.clone());
            }
        }
        let (mut error, mut size) = (0.0, 0.0);
        for (x, y) in output.iter().zip(&self.output) {
            error += f64::from(x - y).powi(2);
            size += f64::from(*y).powi(2);
        }
        let output_error = if size > 0.0 { (error / size).sqrt() } else { 0.0 };
        Metrics {
            recall: recall.into(),
            mass: (mass / self.weights.nrows() as f64).into(),
            output_error: output_error.into(),
        }
    }
}

/// What one decode step of a variant lost against full attention.
#[derive(Clone, Copy, Debug)]
pub struct StepLoss {
    /// Turn of the block, from 0.
    pub turn: usize,
    /// Number of the step in its turn, from 0.
    pub place: usize,
    /// KL(full || variant) of the next token, in nats.
    pub kl: f64,
    /// Whether both have the same most likely token.
    pub same_top: bool,
    /// Whether the text's next token is the most likely one of the variant, and of full attention.
    pub right: [bool; 2],
    /// By how many nats the text's next token is less likely than with full attention; `None` at the end of the text.
    pub surprise: Option<f64>,
}

/// Returns the most likely token, the lower id on ties.
pub(super) fn top(logits: ArrayView1<f32>) -> usize {
    let (mut top, mut max) = (0, f32::NEG_INFINITY);
    for (i, logit) in logits.iter().enumerate() {
        if *logit > max {
            (top, max) = (i, *logit);
        }
    }
    top
}

/// The logarithms of the softmax of a row of logits, and the most likely token.
pub(super) struct Prediction<'a> {
    logits: ArrayView1<'a, f32>,
    /// Logarithm of the sum of exponentials.
    lse: f64,
    /// The most likely token, the lower id on ties.
    pub top: usize,
}

impl<'a> Prediction<'a> {
    /// Prepares a row of logits, `[vocab]`.
    ///
    /// # Numerics
    /// f64.
    pub fn new(logits: ArrayView1<'a, f32>) -> Self {
        let top = top(logits);
        let max = logits[top];
        let sum: f64 = logits.iter().map(|v| f64::from(v - max).exp()).sum();
        Self {
            logits,
            lse: f64::from(max) + sum.ln(),
            top,
        }
    }

    /// Returns the logarithm of the probability of a token.
    pub fn log_probability(&self, token: usize) -> f64 {
        f64::from(self.logits[token]) - self.lse
    }

    /// Computes KL(self || other), in nats.
    ///
    /// # Numerics
    /// f64; never below zero.
    pub fn divergence(&self, other: &Prediction) -> f64 {
        let pairs = self.logits.iter().zip(&other.logits);
        let terms = pairs.map(|(p, q)| {
            let log_p = f64::from(*p) - self.lse;
            log_p.exp() * (log_p - (f64::from(*q) - other.lse))
        });
        terms.sum::<f64>().max(0.0)
    }
}
