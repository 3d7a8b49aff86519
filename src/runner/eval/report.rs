//! The results of an evaluation, by variant and by turn.

use serde::Serialize;

use super::judge::{Mean, Metrics};
use crate::model::ModelConfig;
use crate::runner::Shares;

/// Per turn: how many questions were asked, and the share answered.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Answers(Vec<Mean>);

impl Answers {
    pub(super) fn add(&mut self, turn: usize, right: bool) {
        *at_turn(&mut self.0, turn) += f64::from(right).into();
    }

    fn total(&self) -> Mean {
        let mut total = Mean::default();
        self.0.iter().for_each(|turn| total += *turn);
        total
    }

    /// Counts the questions asked.
    pub fn asked(&self) -> usize {
        self.total().count
    }

    /// Returns the share of them answered; `None` without a question.
    pub fn accuracy(&self) -> Option<f64> {
        (self.asked() > 0).then(|| self.total().into())
    }
}

/// Returns the entry of a turn; makes it if there is none yet.
fn at_turn<T: Default + Clone>(turns: &mut Vec<T>, turn: usize) -> &mut T {
    if turns.len() <= turn {
        turns.resize(turn + 1, T::default());
    }
    &mut turns[turn]
}

/// The metrics of one turn, over all layers and heads.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct TurnMetrics {
    #[serde(flatten)]
    choices: Metrics,
    /// KL(full || variant) of the next token, in nats.
    kl: Mean,
}

/// The results of one variant on all blocks.
#[derive(Clone, Debug, Default)]
pub struct VariantReport {
    /// Per layer and KV head.
    pub heads: Vec<Vec<Metrics>>,
    /// Per turn of a block.
    pub turns: Vec<TurnMetrics>,
    /// The answers to needles.
    pub answers: Answers,
    /// Decode steps, those of needles included.
    steps: usize,
    /// Sum over decode steps of the mean over layers.
    shares: Shares,
    /// Bytes of the indexes at the end of each block or needle, summed over layers and KV heads.
    index_bytes: f64,
    /// Positions of these indexes.
    positions: f64,
}

impl VariantReport {
    /// Makes an empty report on a model.
    pub(super) fn new(c: &ModelConfig) -> Self {
        Self {
            heads: vec![vec![Metrics::default(); c.n_kv_heads]; c.n_layers],
            ..Self::default()
        }
    }

    /// Adds up all turns of all blocks.
    pub fn whole(&self) -> TurnMetrics {
        let mut all = TurnMetrics::default();
        for turn in &self.turns {
            all.choices += turn.choices;
            all.kl += turn.kl;
        }
        all
    }

    /// Returns the means over all decode steps and layers.
    pub fn shares(&self) -> Shares {
        self.shares.mean(self.steps)
    }

    /// Returns the bits of the index per position and KV head.
    pub fn index_bits_per_token(&self) -> f64 {
        8.0 * self.index_bytes / self.positions.max(1.0)
    }

    /// Adds the metrics of one KV head in one step along the full trajectory.
    pub(super) fn add_metrics(&mut self, layer: usize, kv_head: usize, turn: usize, metrics: Metrics) {
        self.heads[layer][kv_head] += metrics;
        at_turn(&mut self.turns, turn).choices += metrics;
    }

    /// Adds a step; `sum` is its sum over layers.
    pub(super) fn add_step(&mut self, sum: &Shares, layers: usize) {
        self.shares.add_step(sum, layers);
        self.steps += 1;
    }

    /// Adds the KL of the next token after a step.
    pub(super) fn add_kl(&mut self, turn: usize, kl: f64) {
        at_turn(&mut self.turns, turn).kl += kl.into();
    }

    /// Adds an index of one KV head at the end of a block or needle of `positions` positions.
    pub(super) fn add_index(&mut self, bytes: usize, positions: usize) {
        self.index_bytes += bytes as f64;
        self.positions += positions as f64;
    }
}
