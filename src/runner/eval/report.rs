//! What an evaluation found, by variant and by turn.

use super::judge::Scores;
use crate::model::ModelConfig;
use crate::runner::Shares;

/// What the blocks gave for one turn.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// Sums over layers and heads.
    scores: Scores,
    /// Sum over steps of KL(full || variant) of the next token, in nats.
    kl: f64,
    /// Steps.
    steps: usize,
}

impl Turn {
    fn add(&mut self, other: &Self) {
        self.scores.add(&other.scores);
        self.kl += other.kl;
        self.steps += other.steps;
    }

    /// The metrics over all layers and heads.
    pub fn scores(&self) -> Scores {
        self.scores.mean()
    }

    /// Mean KL(full || variant) of the next token, in nats.
    pub fn kl(&self) -> f64 {
        self.kl / self.steps.max(1) as f64
    }
}

/// Questions asked and answered, by turn.
#[derive(Clone, Debug, Default)]
pub struct Answers(Vec<(usize, usize)>);

impl Answers {
    pub(super) fn add(&mut self, turn: usize, right: bool) {
        let (asked, answered) = at_turn(&mut self.0, turn);
        *asked += 1;
        *answered += usize::from(right);
    }

    /// Questions asked.
    pub fn asked(&self) -> usize {
        self.0.iter().map(|(asked, _)| asked).sum()
    }

    /// Share of them answered; `None` without a question.
    pub fn accuracy(&self) -> Option<f64> {
        let answered: usize = self.0.iter().map(|(_, answered)| answered).sum();
        (self.asked() > 0).then(|| answered as f64 / self.asked() as f64)
    }

    /// The share of each turn.
    pub fn by_turn(&self) -> Vec<f64> {
        let share = |(asked, answered): &(usize, usize)| *answered as f64 / (*asked).max(1) as f64;
        self.0.iter().map(share).collect()
    }
}

/// Finds the entry of a turn, making it if there is none yet.
fn at_turn<T: Default + Clone>(turns: &mut Vec<T>, turn: usize) -> &mut T {
    if turns.len() <= turn {
        turns.resize(turn + 1, T::default());
    }
    &mut turns[turn]
}

/// What all blocks gave for one variant.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Per layer and KV head.
    pub heads: Vec<Vec<Scores>>,
    /// Per turn of a block.
    pub turns: Vec<Turn>,
    /// Needles.
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

impl Report {
    /// An empty report on a model.
    pub(super) fn new(c: &ModelConfig) -> Self {
        Self {
            heads: vec![vec![Scores::default(); c.n_kv_heads]; c.n_layers],
            ..Self::default()
        }
    }

    /// Adds up all turns of all blocks.
    pub fn whole(&self) -> Turn {
        let mut all = Turn::default();
        self.turns.iter().for_each(|turn| all.add(turn));
        all
    }

    /// The means over all decode steps and layers.
    pub fn shares(&self) -> Shares {
        self.shares.mean(self.steps)
    }

    /// Bits of the index per position and KV head.
    pub fn index_bits_per_token(&self) -> f64 {
        8.0 * self.index_bytes / self.positions.max(1.0)
    }

    /// Adds the scores of one KV head in one step along the full trajectory.
    pub(super) fn add_scores(&mut self, layer: usize, kv_head: usize, turn: usize, scores: &Scores) {
        self.heads[layer][kv_head].add(scores);
        at_turn(&mut self.turns, turn).scores.add(scores);
    }

    /// Adds a step; `sum` is its sum over layers.
    pub(super) fn add_step(&mut self, sum: &Shares, layers: usize) {
        self.shares.add_step(sum, layers);
        self.steps += 1;
    }

    /// Adds the KL of the next token after a step.
    pub(super) fn add_kl(&mut self, turn: usize, kl: f64) {
        let turn = at_turn(&mut self.turns, turn);
        turn.kl += kl;
        turn.steps += 1;
    }

    /// Adds an index of one KV head at the end of a block or needle of `positions` positions.
    pub(super) fn add_index(&mut self, bytes: usize, positions: usize) {
        self.index_bytes += bytes as f64;
        self.positions += positions as f64;
    }
}
