//! Measures what methods lose against full attention: several methods and budgets, compared with one exact run.
//!
//! A block is prefilled once, with exact attention. Its last tokens are then fed one by one along several
//! trajectories at the same time: the first attends everything, each of the others what its method
//! chooses. In addition every method has a shadow, which chooses along the full trajectory, so that its
//! choice can be compared with the true probabilities. Where a block or a conversation has several turns,
//! each trajectory runs every later prompt over its own cache.

mod judge;
mod report;
mod trajectories;

use std::ops::Range;

use ndarray::{Array1, Axis};
use rayon::prelude::*;

use super::{Options, Shares};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::kv::sample::greedy;
use crate::kv::{Budget, StaticSet};
use crate::method::Method;
use crate::model::Forward;
pub use judge::{Mean, Metrics, divergence};
pub use report::{Answers, TurnMetrics, VariantReport};
use trajectories::{HeadStep, StepInput, Trajectories};

/// A method with a budget.
pub struct Variant<'a> {
    /// The method.
    pub method: &'a dyn Method,
    /// What it may choose.
    pub budget: Budget,
}

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What is fed at once.
    pub prompt: Vec<u32>,
    /// What should come next.
    pub answer: Vec<u32>,
}

/// Divides `n` tokens into `turns` equal parts, one per turn.
pub fn turns_of(n: usize, turns: usize) -> impl Iterator<Item = Range<usize>> {
    (0..turns).map(move |turn| turn * n / turns..(turn + 1) * n / turns)
}

/// Counts the last tokens of a turn of `n` that are fed one by one: at most `decode`; the prompt keeps
/// at least one.
pub fn decoded(n: usize, decode: usize) -> usize {
    decode.clamp(1, n.max(2) - 1)
}

/// The evaluation of variants on one model.
pub struct Evaluation<'a> {
    forward: Box<dyn Forward + 'a>,
    variants: Vec<Variant<'a>>,
    options: Options,
    /// Per variant.
    pub reports: Vec<VariantReport>,
    /// Needles that full attention was asked.
    pub full: Answers,
}

impl<'a> Evaluation<'a> {
    /// Starts an evaluation without results; the budget of `options` is not used.
    pub fn new(forward: Box<dyn Forward + 'a>, variants: Vec<Variant<'a>>, options: Options) -> Self {
        let empty = VariantReport::new(&forward.decoder().config);
        Self {
            forward,
            reports: vec![empty; variants.len()],
            variants,
            options,
            full: Answers::default(),
        }
    }

    /// Evaluates a block in `turns` equal turns. The last `decode` tokens of a turn (at least one) are fed one by one,
    /// and `done` is called after each; the tokens before them are its prompt.
    ///
    /// # Errors
    /// A turn of less than two tokens; activations that are not finite; an interrupt.
    pub fn block(&mut self, ids: &[u32], turns: usize, decode: usize, done: &mut dyn FnMut()) -> Result<()> {
        if ids.len() / turns.max(1) < 2 {
            return Err(Error::failed("a turn of one token has nothing to decode").hint("give more text"));
        }
        let mut fed = self.trajectories(ids.len(), true);
        for (turn, range) in turns_of(ids.len(), turns).enumerate() {
            let ids = &ids[range];
            let (prompt, rest) = ids.split_at(ids.len() - decoded(ids.len(), decode));
            fed.prompt(self.forward.as_ref(), prompt)?;
            for id in rest {
                interrupt::check()?;
                let ids = vec![*id; self.variants.len() + 1];
                let logits = self.step(&mut fed, &ids, turn)?;
                for (report, own) in self.reports.iter_mut().zip(&logits[1..]) {
                    report.add_kl(turn, divergence(logits[0].view(), own.view()));
                }
                done();
            }
        }
        self.close(&fed);
        Ok(())
    }

    /// Evaluates a needle: the prompt is prefilled, then each variant decodes greedily, at most `most` tokens, until
    /// `found` says whether the answer is right.
    pub fn needle(
        &mut self,
        prompt: &[u32],
        most: usize,
        found: &dyn Fn(&[u32]) -> Result<Option<bool>>,
    ) -> Result<()> {
        let mut fed = self.trajectories(prompt.len(), false);
        let mut logits = fed.prompt(self.forward.as_ref(), prompt)?;
        let mut said = vec![Vec::new(); logits.len()];
        let mut verdicts = vec![None; logits.len()];
        for step in 0..most.max(1) {
            interrupt::check()?;
            for ((verdict, said), logits) in verdicts.iter_mut().zip(&mut said).zip(&logits) {
                said.push(greedy(logits.view())?);
                if verdict.is_none() {
                    *verdict = found(said)?;
                }
            }
            if step + 1 >= most.max(1) || verdicts.iter().all(Option::is_some) {
                break;
            }
            let ids: Vec<u32> = said.iter().filter_map(|s| s.last().copied()).collect();
            logits = self.step(&mut fed, &ids, 0)?;
        }
        self.answer(0, verdicts.iter().map(|verdict| *verdict == Some(true)));
        self.close(&fed);
        Ok(())
    }

    /// Evaluates a conversation. Every trajectory is fed the right answers; a turn counts as answered if each token of
    /// its answer is the greedy choice. As in a session, the last token of an answer is fed with the next prompt.
    ///
    /// # Errors
    /// An empty prompt; activations that are not finite; an interrupt.
    pub fn conversation(&mut self, questions: &[Question]) -> Result<()> {
        let length = |q: &Question| q.prompt.len() + q.answer.len();
        let mut fed = self.trajectories(questions.iter().map(length).sum(), false);
        let mut unfed = None;
        for (turn, question) in questions.iter().enumerate() {
            let ids: Vec<u32> = unfed.into_iter().chain(question.prompt.iter().copied()).collect();
            let mut logits = fed.prompt(self.forward.as_ref(), &ids)?;
            let mut right = vec![true; logits.len()];
            for (i, id) in question.answer.iter().enumerate() {
                interrupt::check()?;
                if i > 0 {
                    let ids = vec![question.answer[i - 1]; logits.len()];
                    logits = self.step(&mut fed, &ids, turn)?;
                }
                for (right, logits) in right.iter_mut().zip(&logits) {
                    *right &= greedy(logits.view())? == *id;
                }
            }
            unfed = question.answer.last().copied();
            self.answer(turn, right.into_iter());
        }
        self.close(&fed);
        Ok(())
    }

    fn trajectories(&self, capacity: usize, judged: bool) -> Trajectories {
        let config = &self.forward.decoder().config;
        Trajectories::new(config, &self.variants, &self.options, capacity, judged)
    }

    fn answer(&mut self, turn: usize, mut right: impl Iterator<Item = bool>) {
        self.full.add(turn, right.next() == Some(true));
        for (report, right) in self.reports.iter_mut().zip(right) {
            report.answers.add(turn, right);
        }
    }

    /// Feeds one token to each trajectory, the full one first; shadows choose along that. Returns the logits after
    /// the token, `[vocab]` for each trajectory.
    fn step(&mut self, fed: &mut Trajectories, ids: &[u32], turn: usize) -> Result<Vec<Array1<f32>>> {
        let mut shares = vec![Shares::default(); self.variants.len()];
        let (variants, reports, options) = (&self.variants, &mut self.reports, &self.options);
        let (t, step, heads) = (fed.len, fed.steps, &mut fed.heads);
        let windows = &self.forward.decoder().config.windows;
        let logits = self.forward.step(ids, t, &mut |layer, rows, mut out| {
            let group = rows.q_rope.len_of(Axis(0)) / heads[layer].len();
            let set = StaticSet::at(t, windows[layer], options.sinks, options.window);
            let input = StepInput {
                rows,
                group,
                step,
                set: &set,
                variants,
            };
            let steps: Vec<HeadStep> = heads[layer]
                .par_iter_mut()
                .zip(out.axis_chunks_iter_mut(Axis(1), group))
                .enumerate()
                .map(|(c, (head, out))| head.step(&input, c, out))
                .collect();
            for (v, (shares, report)) in shares.iter_mut().zip(reports.iter_mut()).enumerate() {
                shares.add_layer(steps.iter().map(|s| &s.chosen[v]), &set, group);
                for (c, step) in steps.iter().enumerate() {
                    if let Some(metrics) = step.metrics.get(v) {
                        report.add_metrics(layer, c, turn, *metrics);
                    }
                }
            }
            Ok(())
        })?;
        if logits.len() != ids.len() {
            return Err(Error::failed(
                "internal: a step gave logits for some of the trajectories alone",
            ));
        }
        fed.len += 1;
        fed.steps += 1;
        for (report, shares) in self.reports.iter_mut().zip(&shares) {
            report.add_step(shares, windows.len());
        }
        Ok(logits)
    }

    /// Adds the indexes of a finished block to the reports.
    fn close(&mut self, fed: &Trajectories) {
        for (v, report) in self.reports.iter_mut().enumerate() {
            for head in fed.heads.iter().flatten() {
                report.add_index(head.own[v].retriever.state_bytes(), fed.len);
            }
        }
    }
}
