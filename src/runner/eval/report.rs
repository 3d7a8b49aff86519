//! The results of an evaluation: per variant, by block, by turn, by position and by task.

use std::collections::BTreeMap;

use serde::Serialize;

use super::bootstrap::quantile;
use super::judge::{Mean, Metrics, StepLoss};
use crate::model::ModelConfig;
use crate::runner::{Counts, Shares};

/// Number of decode steps of a turn that the first entry of `by_position` covers; every later entry ends at twice the
/// position where the entry before it ends.
const FIRST_STEPS: usize = 16;

/// A question that was asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    /// Turn of its conversation, from 0.
    pub turn: usize,
    /// The group to which the file assigns it.
    pub group: Group,
    /// Share of its expected answers that were found: 0 or 1 if it has one answer.
    pub score: f64,
}

/// What questions that are counted together have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Group {
    /// Name of the task.
    pub task: Option<String>,
    /// Length, in tokens, that the prompt was made for.
    pub length: Option<u64>,
}

/// The answers of one trajectory, by line of the file.
#[derive(Clone, Debug, Default)]
pub struct Answers {
    lines: Vec<Vec<Asked>>,
}

/// The share of questions that were answered.
#[derive(Clone, Debug, Serialize)]
pub struct Accuracy {
    #[serde(flatten)]
    group: Group,
    questions: usize,
    accuracy: f64,
}

impl Answers {
    pub(super) fn begin_line(&mut self) {
        self.lines.push(Vec::new());
    }

    pub(super) fn add(&mut self, asked: Asked) {
        if let Some(line) = self.lines.last_mut() {
            line.push(asked);
        }
    }

    fn all(&self) -> impl Iterator<Item = &Asked> {
        self.lines.iter().flatten()
    }

    /// Counts the lines from which a question was asked.
    pub fn lines(&self) -> usize {
        self.lines.iter().filter(|line| !line.is_empty()).count()
    }

    /// Counts the questions asked.
    pub fn asked(&self) -> usize {
        self.all().count()
    }

    /// Returns the mean score; `None` if no question was asked.
    pub fn accuracy(&self) -> Option<f64> {
        mean_score(self.all()).map(|mean| mean.into())
    }

    /// Returns the mean score of some lines.
    pub fn accuracy_of(&self, lines: &[usize]) -> f64 {
        mean_score(lines.iter().flat_map(|line| &self.lines[*line])).map_or(0.0, f64::from)
    }

    /// Returns the score of each question, line by line.
    pub fn by_line(&self) -> Vec<Vec<f64>> {
        let scores = |line: &Vec<Asked>| line.iter().map(|asked| asked.score).collect();
        self.lines.iter().map(scores).collect()
    }

    /// Returns the mean score per turn.
    pub fn by_turn(&self) -> Vec<f64> {
        let turns = self.all().map(|asked| asked.turn + 1).max().unwrap_or(0);
        let of = |turn: usize| mean_score(self.all().filter(|asked| asked.turn == turn));
        (0..turns).map(|turn| of(turn).map_or(0.0, f64::from)).collect()
    }

    /// Returns the mean score per task and length; nothing if the file names neither.
    pub fn by_task(&self) -> Vec<Accuracy> {
        let mut groups: BTreeMap<&Group, Mean> = BTreeMap::new();
        for asked in self.all().filter(|asked| asked.group != Group::default()) {
            *groups.entry(&asked.group).or_default() += asked.score.into();
        }
        let accuracy = |(group, mean): (&Group, Mean)| Accuracy {
            group: group.clone(),
            questions: mean.count,
            accuracy: mean.into(),
        };
        groups.into_iter().map(accuracy).collect()
    }
}

fn mean_score<'a>(asked: impl Iterator<Item = &'a Asked>) -> Option<Mean> {
    let mut mean = Mean::default();
    asked.for_each(|asked| mean += asked.score.into());
    (mean.count > 0).then_some(mean)
}

/// What decode steps along a variant's own trajectory lost against full attention.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Losses {
    /// Mean KL(full || variant) of the next token, in nats.
    pub kl: f64,
    /// Median of the KL over the steps.
    pub kl_median: f64,
    /// 99th percentile of the KL over the steps.
    pub kl_p99: f64,
    /// Share of steps with the same most likely token.
    pub top1_equal: f64,
    /// Perplexity of the text over that with full attention.
    pub perplexity_ratio: f64,
}

impl Losses {
    /// Computes the losses of some steps; without steps, the perplexity ratio is 1 and everything else 0.
    fn from_steps<'a>(steps: impl Iterator<Item = &'a StepLoss> + Clone) -> Self {
        let mut kl: Vec<f64> = steps.clone().map(|step| step.kl).collect();
        let mean = |values: &mut dyn Iterator<Item = f64>| {
            let mut mean = Mean::default();
            values.for_each(|value| mean += value.into());
            f64::from(mean)
        };
        Self {
            kl: mean(&mut steps.clone().map(|step| step.kl)),
            kl_median: quantile(&mut kl, 0.5),
            kl_p99: quantile(&mut kl, 0.99),
            top1_equal: mean(&mut steps.clone().map(|step| f64::from(u8::from(step.same_top)))),
            perplexity_ratio: mean(&mut steps.filter_map(|step| step.surprise)).exp(),
        }
    }
}

/// The metrics of some steps, over all layers and heads.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct StepMetrics {
    /// Metrics of the choices along the full trajectory.
    #[serde(flatten)]
    pub choices: Metrics,
    /// Losses of the next token along the variant's own trajectory.
    #[serde(flatten)]
    pub losses: Losses,
}

/// The losses of those steps of all turns that lie in a range of steps within their turn.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PositionLosses {
    /// First step of the range, counted from 1 at the start of a turn.
    first: usize,
    /// Last step of the range.
    last: usize,
    steps: usize,
    #[serde(flatten)]
    losses: Losses,
}

/// How the error of the attention's output is spread over the layers.
#[derive(Clone, Debug, Serialize)]
pub struct LayerErrors {
    /// Mean over steps and KV heads, per layer.
    output_error_by_layer: Vec<f64>,
    /// Median of the layers' means.
    output_error_median: f64,
    /// The fewest layers whose errors make up half of the sum over all layers, the largest error first.
    output_error_layers: Vec<usize>,
}

/// The results of one variant on all blocks.
#[derive(Clone, Debug, Default)]
pub struct VariantReport {
    /// Metrics per layer and KV head.
    pub heads: Vec<Vec<Metrics>>,
    /// Per block and turn: the choices along the full trajectory.
    choices: Vec<Vec<Metrics>>,
    /// Per block: the steps of all turns.
    losses: Vec<Vec<StepLoss>>,
    /// The answers to needles.
    pub answers: Answers,
    /// What was read.
    pub counts: Counts,
    /// Decode steps, those of needles included.
    steps: usize,
    /// The shares of each decode step, averaged over layers and summed over steps.
    shares: Shares,
    /// Bytes of the indexes at the end of each block or needle, summed over layers and KV heads.
    index_bytes: f64,
    /// Positions of these indexes, summed in the same way.
    positions: f64,
}

impl VariantReport {
    /// Makes an empty report on a model.
    pub fn new(c: &ModelConfig) -> Self {
        Self {
            heads: vec![vec![Metrics::default(); c.n_kv_heads]; c.n_layers()],
            ..Self::default()
        }
    }

    /// Counts the blocks in which a step was decoded.
    pub fn blocks(&self) -> usize {
        self.losses.iter().filter(|steps| !steps.is_empty()).count()
    }

    /// Returns the metrics over all turns of all blocks.
    pub fn whole(&self) -> StepMetrics {
        let all: Vec<usize> = (0..self.losses.len()).collect();
        self.of_blocks(&all)
    }

    /// Returns the metrics over all turns of some blocks; a block that is given twice counts twice.
    pub fn of_blocks(&self, blocks: &[usize]) -> StepMetrics {
        let mut choices = Metrics::default();
        let turns = blocks.iter().flat_map(|block| &self.choices[*block]);
        turns.for_each(|turn| choices += *turn);
        StepMetrics {
            choices,
            losses: Losses::from_steps(blocks.iter().flat_map(|block| &self.losses[*block])),
        }
    }

    /// Returns the mean KL of some blocks.
    pub fn kl_of_blocks(&self, blocks: &[usize]) -> f64 {
        let mut mean = Mean::default();
        let steps = blocks.iter().flat_map(|block| &self.losses[*block]);
        steps.for_each(|step| mean += step.kl.into());
        mean.into()
    }

    /// Says for each step of a block whether the text's next token is the most likely one of the variant, and of full
    /// attention.
    pub fn right(&self, block: usize) -> Vec<[bool; 2]> {
        self.losses[block].iter().map(|step| step.right).collect()
    }

    /// Returns the metrics of each turn.
    pub fn by_turn(&self) -> Vec<StepMetrics> {
        let turns = self.choices.iter().map(Vec::len).max().unwrap_or(0);
        let of = |turn: usize| {
            let mut choices = Metrics::default();
            let blocks = self.choices.iter().filter_map(|block| block.get(turn));
            blocks.for_each(|block| choices += *block);
            let steps = self.losses.iter().flatten();
            let losses = Losses::from_steps(steps.filter(|step| step.turn == turn));
            StepMetrics { choices, losses }
        };
        (0..turns).map(of).collect()
    }

    /// Returns the losses by the place of a step in its turn: steps 1 to 16, 17 to 32, 33 to 64, and so on.
    pub fn by_position(&self) -> Vec<PositionLosses> {
        let longest = self.losses.iter().flatten().map(|step| step.place + 1).max();
        let (mut out, mut first) = (Vec::new(), 1);
        while first <= longest.unwrap_or(0) {
            let last = (2 * (first - 1)).max(FIRST_STEPS);
            let steps = self.losses.iter().flatten();
            let steps = steps.filter(|step| (first..=last).contains(&(step.place + 1)));
            out.push(PositionLosses {
                first,
                last,
                steps: steps.clone().count(),
                losses: Losses::from_steps(steps),
            });
            first = last + 1;
        }
        out
    }

    /// Returns how the error of the attention's output is spread over the layers.
    pub fn layer_errors(&self) -> LayerErrors {
        let layer = |heads: &Vec<Metrics>| {
            let mut mean = Mean::default();
            heads.iter().for_each(|head| mean += head.output_error);
            f64::from(mean)
        };
        let errors: Vec<f64> = self.heads.iter().map(layer).collect();
        let mut order: Vec<usize> = (0..errors.len()).collect();
        order.sort_by(|a, b| errors[*b].total_cmp(&errors[*a]));
        let (half, mut sum) = (errors.iter().sum::<f64>() / 2.0, 0.0);
        order.retain(|layer| {
            let needed = sum < half;
            sum += errors[*layer];
            needed
        });
        LayerErrors {
            output_error_median: quantile(&mut errors.clone(), 0.5),
            output_error_by_layer: errors,
            output_error_layers: order,
        }
    }

    /// Returns the means over all decode steps and layers.
    pub fn shares(&self) -> Shares {
        self.shares.mean(self.steps)
    }

    /// Returns the bits of the index per position and KV head.
    pub fn index_bits_per_token(&self) -> f64 {
        8.0 * self.index_bytes / self.positions.max(1.0)
    }

    /// Returns the bytes of the indexes at the end of each block, summed over blocks, layers and KV heads.
    pub(super) fn index_bytes(&self) -> f64 {
        self.index_bytes
    }

    /// Adds the blocks of another report of the same variant.
    pub fn append(&mut self, other: Self) {
        let Self {
            heads,
            choices,
            losses,
            answers,
            counts,
            steps,
            shares,
            index_bytes,
            positions,
        } = other;
        for (sum, head) in self.heads.iter_mut().flatten().zip(heads.into_iter().flatten()) {
            *sum += head;
        }
        self.choices.extend(choices);
        self.losses.extend(losses);
        self.answers.lines.extend(answers.lines);
        self.counts += counts;
        self.steps += steps;
        self.shares.add(&shares);
        self.index_bytes += index_bytes;
        self.positions += positions;
    }

    /// Starts a block or a line of questions.
    pub(super) fn begin(&mut self, turns: usize) {
        self.choices.push(vec![Metrics::default(); turns]);
        self.losses.push(Vec::new());
        self.answers.begin_line();
    }

    /// Adds the metrics of one KV head in one step along the full trajectory.
    pub(super) fn add_metrics(&mut self, layer: usize, kv_head: usize, turn: usize, metrics: Metrics) {
        self.heads[layer][kv_head] += metrics;
        if let Some(block) = self.choices.last_mut() {
            block[turn] += metrics;
        }
    }

    /// Adds the shares of a step; `sum` is their sum over layers.
    pub(super) fn add_step(&mut self, sum: &Shares, layers: usize) {
        self.shares.add_step(sum, layers);
        self.steps += 1;
    }

    /// Adds what a step lost.
    pub(super) fn add_loss(&mut self, loss: StepLoss) {
        if let Some(block) = self.losses.last_mut() {
            block.push(loss);
        }
    }

    /// Adds the size of one KV head's index at the end of a block or needle of `positions` positions.
    pub(super) fn add_index(&mut self, bytes: usize, positions: usize) {
        self.index_bytes += bytes as f64;
        self.positions += positions as f64;
    }
}
