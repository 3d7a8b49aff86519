//! Measures what methods lose against full attention: several methods and budgets, compared with one exact run.
//!
//! A block is prefilled once, with exact attention. Its last tokens are then fed one by one along several trajectories
//! at the same time: the first trajectory attends everything, each of the others attends what its method chooses. In
//! addition, every method has a shadow, which chooses along the full trajectory, so that its choice can be compared
//! with the true probabilities. If a block or a conversation has several turns, each trajectory runs every later prompt
//! over its own cache.

mod bootstrap;
mod judge;
mod layerwise;
mod lineup;
mod report;
mod trajectories;

use std::ops::Range;

use ndarray::{Array1, Axis};
use rayon::prelude::*;

use super::{DecodeOptions, Shares};
use crate::env;
use crate::error::{Error, Result};
use crate::kv::sample::greedy;
use crate::kv::{Budget, KvType, StaticSet};
use crate::method::Method;
use crate::model::Forward;
use crate::model::config::Block;
pub use bootstrap::{Bootstrap, FEWEST};
use judge::Prediction;
pub use judge::{Mean, Metrics, StepLoss};
pub use layerwise::{Layerwise, Passage};
pub use lineup::Unit;
pub use report::{
    Accuracy, Answers, Asked, Group, LayerErrors, Losses, PositionLosses, StepMetrics, VariantReport,
};
use trajectories::{HeadStep, StepInput, Trajectories};

/// A method with a budget.
#[derive(Clone, Copy)]
pub struct Variant<'a> {
    /// The method.
    pub method: &'a dyn Method,
    /// Number of the method; variants with the same number and cache differ only in budget and tail, and share the index of
    /// the first prompt.
    pub number: usize,
    /// How many positions the method may choose.
    pub budget: Budget,
    /// The formats of its cache, if they are not those of the options.
    pub kv: Option<KvType>,
}

/// What an evaluation has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    /// This many tokens of a prompt have passed a layer.
    Prompt(usize),
    /// A decode step of every trajectory.
    Step,
}

/// The tokens that are fed before an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Asking {
    /// Tokens that are fed at once: at least one.
    pub prompt: Vec<u32>,
    /// Tokens that are then fed one by one, in decode steps: the exact attention of the prompt must not answer the
    /// question in the method's place.
    pub question: Vec<u32>,
}

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The tokens that are fed.
    pub asking: Asking,
    /// The tokens that should come next.
    pub answer: Vec<u32>,
}

/// The judgement of a reply that is still growing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Judgement {
    /// Share of the expected answers that the reply contains.
    pub score: f64,
    /// Whether further tokens cannot change the score.
    pub is_final: bool,
}

/// A single question, which each variant answers by itself.
pub struct Needle<'a> {
    /// The tokens that are fed.
    pub asking: &'a Asking,
    /// The questions with which its result is counted.
    pub group: &'a Group,
    /// Most tokens of a reply.
    pub most: usize,
    /// Judges a reply.
    pub judge: &'a dyn Fn(&[u32]) -> Result<Judgement>,
}

/// Divides `n` tokens into `turns` equal parts, one per turn.
pub fn turns_of(n: usize, turns: usize) -> impl Iterator<Item = Range<usize>> {
    (0..turns).map(move |turn| turn * n / turns..(turn + 1) * n / turns)
}

/// Returns how many of the last tokens of a turn of `n` tokens are fed one by one: `decode`, and at least one; the
/// prompt keeps at least one token.
pub fn decoded(n: usize, decode: usize) -> usize {
    decode.clamp(1, n.max(2) - 1)
}

/// The evaluation of variants on one model.
pub struct Evaluation<'a> {
    forward: Box<dyn Forward + 'a>,
    variants: Vec<Variant<'a>>,
    options: DecodeOptions,
    /// The report of each variant.
    pub reports: Vec<VariantReport>,
    /// The answers of full attention to the needles.
    pub full: Answers,
}

impl<'a> Evaluation<'a> {
    /// Starts an evaluation without results; the budget of `options` is not used.
    pub fn new(forward: Box<dyn Forward + 'a>, variants: Vec<Variant<'a>>, options: DecodeOptions) -> Self {
        let empty = VariantReport::new(&forward.decoder().config);
        Self {
            forward,
            reports: vec![empty; variants.len()],
            variants,
            options,
            full: Answers::default(),
        }
    }

    /// Evaluates a block in `turns` equal turns. The last `decode` tokens of a turn (at least one) are fed one by one; the
    /// tokens before them are its prompt. With `judged`, choices along the full trajectory are compared with the true
    /// probabilities; without it, the reports have no metrics of choices. `done` is told of all work, which
    /// [`Evaluation::tokens`] counts.
    ///
    /// # Errors
    /// A turn of less than two tokens; activations that are not finite; an interrupt.
    pub fn block(
        &mut self,
        ids: &[u32],
        turns: usize,
        decode: usize,
        judged: bool,
        done: &mut dyn FnMut(Done),
    ) -> Result<()> {
        if ids.len() / turns.max(1) < 2 {
            return Err(
                Error::invalid("a turn has only one token, so there is nothing to decode")
                    .hint("give longer documents"),
            );
        }
        let mut fed = self.trajectories(ids.len(), judged);
        self.begin(turns);
        for (turn, range) in turns_of(ids.len(), turns).enumerate() {
            let steps = decoded(range.len(), decode);
            let first = range.end - steps;
            fed.prompt(self.forward.as_ref(), &ids[range.start..first], &mut |tokens| {
                done(Done::Prompt(tokens));
            })?;
            for (place, at) in (first..range.end).enumerate() {
                env::check()?;
                let fork = vec![ids[at]; self.variants.len() + 1];
                let logits = self.step(&mut fed, &fork, turn)?;
                let next = ids.get(at + 1).map(|id| *id as usize);
                for (report, loss) in self.reports.iter_mut().zip(losses(&logits, [turn, place], next)) {
                    report.add_loss(loss);
                }
                done(Done::Step);
            }
        }
        self.close(&fed);
        Ok(())
    }

    /// Evaluates a block for what variants read alone: no choice is judged, and the reports have no metrics of choices.
    ///
    /// # Errors
    /// As [`block`](Self::block).
    pub fn sample(&mut self, ids: &[u32], turns: usize, decode: usize) -> Result<()> {
        self.block(ids, turns, decode, false, &mut |_| {})
    }

    /// Starts a block or a line of questions in every report.
    fn begin(&mut self, turns: usize) {
        self.full.begin_line();
        self.reports.iter_mut().for_each(|report| report.begin(turns));
    }

    /// Feeds what comes before an answer: the prompt at once, the question in decode steps. Returns the logits after it.
    fn ask(&mut self, fed: &mut Trajectories, asking: &Asking, turn: usize) -> Result<Vec<Array1<f32>>> {
        let mut logits = fed.prompt(self.forward.as_ref(), &asking.prompt, &mut |_| {})?;
        for id in &asking.question {
            env::check()?;
            logits = self.step(fed, &vec![*id; logits.len()], turn)?;
        }
        Ok(logits)
    }

    /// Evaluates a needle: each variant decodes greedily after the question, until the judgement of its reply is final
    /// or the reply has its most tokens.
    ///
    /// # Errors
    /// An empty prompt; activations that are not finite; an interrupt.
    pub fn needle(&mut self, needle: &Needle) -> Result<()> {
        let fed = needle.asking.prompt.len() + needle.asking.question.len();
        let mut fed = self.trajectories(fed, false);
        self.begin(1);
        let mut logits = self.ask(&mut fed, needle.asking, 0)?;
        let mut said = vec![Vec::new(); logits.len()];
        let none = Judgement {
            score: 0.0,
            is_final: false,
        };
        let mut judgements = vec![none; logits.len()];
        let most = needle.most.max(1);
        for step in 0..most {
            env::check()?;
            for ((judgement, said), logits) in judgements.iter_mut().zip(&mut said).zip(&logits) {
                said.push(greedy(logits.view())?);
                if !judgement.is_final {
                    *judgement = (needle.judge)(said)?;
                }
            }
            if step + 1 == most || judgements.iter().all(|judgement| judgement.is_final) {
                break;
            }
            let ids: Vec<u32> = said.iter().filter_map(|s| s.last().copied()).collect();
            logits = self.step(&mut fed, &ids, 0)?;
        }
        self.answer(
            0,
            needle.group,
            judgements.iter().map(|judgement| judgement.score),
        );
        self.close(&fed);
        Ok(())
    }

    /// Evaluates a conversation. Every trajectory is fed the right answers; a turn counts as answered if each token of
    /// its answer is the greedy choice. As in a session, the last token of an answer is fed together with the next
    /// prompt.
    ///
    /// # Errors
    /// An empty prompt; activations that are not finite; an interrupt.
    pub fn conversation(&mut self, questions: &[Question], group: &Group) -> Result<()> {
        let length = |q: &Question| q.asking.prompt.len() + q.asking.question.len() + q.answer.len();
        let mut fed = self.trajectories(questions.iter().map(length).sum(), false);
        self.begin(questions.len());
        let mut unfed = None;
        for (turn, question) in questions.iter().enumerate() {
            let mut asking = question.asking.clone();
            asking.prompt.splice(..0, unfed);
            let mut logits = self.ask(&mut fed, &asking, turn)?;
            let mut right = vec![true; logits.len()];
            for (i, id) in question.answer.iter().enumerate() {
                env::check()?;
                if i > 0 {
                    let ids = vec![question.answer[i - 1]; logits.len()];
                    logits = self.step(&mut fed, &ids, turn)?;
                }
                for (right, logits) in right.iter_mut().zip(&logits) {
                    *right &= greedy(logits.view())? == *id;
                }
            }
            unfed = question.answer.last().copied();
            self.answer(
                turn,
                group,
                right.into_iter().map(|right| f64::from(u8::from(right))),
            );
        }
        self.close(&fed);
        Ok(())
    }

    fn trajectories(&self, capacity: usize, judged: bool) -> Trajectories {
        let config = &self.forward.decoder().config;
        Trajectories::new(config, &self.variants, &self.options, capacity, judged)
    }

    /// Adds the scores of a question; the first score is that of full attention.
    fn answer(&mut self, turn: usize, group: &Group, mut scores: impl Iterator<Item = f64>) {
        let asked = |score: f64| Asked {
            turn,
            group: group.clone(),
            score,
        };
        self.full.add(asked(scores.next().unwrap_or(0.0)));
        for (report, score) in self.reports.iter_mut().zip(scores) {
            report.answers.add(asked(score));
        }
    }

    /// Counts the tokens that pass the model, along all trajectories, while a block of `n` tokens is evaluated.
    pub fn tokens(&self, n: usize, turns: usize, decode: usize) -> usize {
        let trajectories = self.variants.len() + 1;
        let of_turn = |(turn, range): (usize, Range<usize>)| {
            let steps = decoded(range.len(), decode);
            // The first prompt is that of all trajectories.
            let prompts = if turn == 0 { 1 } else { trajectories };
            prompts * (range.len() - steps) + trajectories * steps
        };
        turns_of(n, turns).enumerate().map(of_turn).sum()
    }

    /// Counts the tokens of [`Evaluation::tokens`] that pass the model in a step.
    pub fn tokens_of_step(&self) -> usize {
        self.variants.len() + 1
    }

    /// Counts the layers of the model.
    pub fn n_layers(&self) -> usize {
        self.forward.decoder().config.n_layers()
    }

    /// Lists the layers in which, in a context of `n` positions, the static set covers everything that a step sees, so
    /// that there is nothing to choose.
    pub fn without_choice(&self, n: usize) -> Vec<usize> {
        let blocks = self.forward.decoder().config.blocks.iter().enumerate();
        let limits = self.options.limits;
        let is_full = |block: &Block| {
            n > 0
                && limits
                    .in_layer(block.window)
                    .static_set(n - 1)
                    .candidates
                    .is_empty()
        };
        blocks
            .filter(|(_, block)| is_full(block))
            .map(|(layer, _)| layer)
            .collect()
    }

    /// Returns the bytes that a variant's decode steps read, over those of all visible keys and values.
    pub fn bytes_fraction(&self, variant: usize) -> Option<f64> {
        self.reports[variant].counts.bytes_fraction()
    }

    /// Returns the bytes that memory moved for a variant's decode steps, over those of all visible keys and values.
    pub fn moved_fraction(&self, variant: usize) -> Option<f64> {
        self.reports[variant].counts.moved_fraction()
    }

    /// Returns the bytes that a variant's decode steps read, then those that memory moved for them, over those of all visible
    /// keys and values in floats.
    pub fn uncompressed_fractions(&self, variant: usize) -> [Option<f64>; 2] {
        let counts = &self.reports[variant].counts;
        [
            counts.uncompressed_fraction(),
            counts.uncompressed_moved_fraction(),
        ]
    }

    /// Returns the bytes of the buffers that a variant's decode steps filled and read again, over those of all visible
    /// keys and values.
    pub fn scratch_fraction(&self, variant: usize) -> Option<f64> {
        self.reports[variant].counts.scratch_fraction()
    }

    /// Feeds one token to each trajectory, the full trajectory first; shadows choose along the full trajectory. Returns
    /// the logits after the token, `[vocab]` for each trajectory.
    fn step(&mut self, fed: &mut Trajectories, ids: &[u32], turn: usize) -> Result<Vec<Array1<f32>>> {
        let mut shares = vec![Shares::default(); self.variants.len()];
        let (reports, options) = (&mut self.reports, &self.options);
        let (t, step, heads) = (fed.len, fed.steps, &mut fed.heads);
        let blocks = &self.forward.decoder().config.blocks;
        let logits = self
            .forward
            .step(ids, &vec![t; ids.len()], &mut |layer, rows, mut out| {
                let group = rows.q.rope.len_of(Axis(0)) / heads[layer].len();
                let set = options.limits.in_layer(blocks[layer].window).static_set(t);
                let input = StepInput {
                    rows,
                    group,
                    step,
                    set: &set,
                    options,
                };
                let steps: Vec<HeadStep> = heads[layer]
                    .par_iter_mut()
                    .zip(out.axis_chunks_iter_mut(Axis(1), group))
                    .enumerate()
                    .map(|(c, (head, out))| head.step(&input, c, out))
                    .collect();
                let steps: Vec<&HeadStep> = steps.iter().collect();
                tally(reports, &mut shares, layer, turn, &set, group, &steps);
                Ok(())
            })?;
        if logits.len() != ids.len() {
            return Err(Error::internal(
                "internal: a step gave logits for some of the trajectories alone",
            ));
        }
        fed.len += 1;
        fed.steps += 1;
        for (report, shares) in self.reports.iter_mut().zip(&shares) {
            report.add_step(shares, blocks.len());
        }
        Ok(logits)
    }

    /// Adds the index sizes of a finished block to the reports.
    fn close(&mut self, fed: &Trajectories) {
        for (v, report) in self.reports.iter_mut().enumerate() {
            for head in fed.heads.iter().flatten() {
                report.add_index(head.own[v].chooser.retriever.state_bytes(), fed.len);
            }
        }
    }
}

/// Adds the choices of a layer's KV heads in one step to the variants' reports, and to `shares`, the step's sums over
/// layers.
fn tally(
    reports: &mut [VariantReport],
    shares: &mut [Shares],
    layer: usize,
    turn: usize,
    set: &StaticSet,
    group: usize,
    heads: &[&HeadStep],
) {
    for (v, (shares, report)) in shares.iter_mut().zip(reports.iter_mut()).enumerate() {
        let chosen = heads.iter().map(|step| &step.chosen[v]);
        shares.add_layer(chosen.clone().map(|stepped| &stepped.selection), set, group);
        chosen.for_each(|stepped| stepped.count(&mut report.counts, set, group));
        for (c, step) in heads.iter().enumerate() {
            if let Some(metrics) = step.metrics.get(v) {
                report.add_metrics(layer, c, turn, *metrics);
            }
        }
    }
}

/// Returns what each variant lost in a step; `logits` holds the logits of every trajectory, the full trajectory first.
fn losses(logits: &[Array1<f32>], [turn, place]: [usize; 2], next: Option<usize>) -> Vec<StepLoss> {
    let predictions: Vec<Prediction> = logits.par_iter().map(|row| Prediction::new(row.view())).collect();
    let Some((full, own)) = predictions.split_first() else {
        return Vec::new();
    };
    let loss = |own: &Prediction| StepLoss {
        turn,
        place,
        kl: full.divergence(own),
        same_top: full.top == own.top,
        right: [own.top, full.top].map(|top| Some(top) == next),
        surprise: next.map(|id| full.log_probability(id) - own.log_probability(id)),
    };
    own.par_iter().map(loss).collect()
}
