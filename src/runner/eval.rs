//! What a method loses against full attention: several methods and budgets beside one exact run.
//!
//! A block is prefilled once, exactly. Its last tokens are then fed one by one along several
//! trajectories at the same time: the first attends everything, each of the others what its method
//! chooses. Beside those, every method has a shadow that chooses along the full trajectory, where its
//! choice can be held against the true probabilities. Where a block or a conversation has several turns,
//! each trajectory runs every later prompt over its own cache.

mod course;
mod judge;

use std::ops::Range;

use ndarray::{Array1, Axis};
use rayon::prelude::*;

use super::{Options, Totals};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::kv::sample::argmax;
use crate::kv::{Budget, StaticSet};
use crate::method::{Choice, Method};
use crate::model::Forward;
use course::{At, Course, LaneStep};
pub use judge::{Scores, divergence};

/// A method at a budget.
pub struct Variant<'a> {
    /// The method.
    pub method: &'a Method,
    /// What it may choose.
    pub budget: Budget,
}

/// What the blocks said of one turn.
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

/// Questions asked and answered, by the turn they stand in.
#[derive(Clone, Debug, Default)]
pub struct Answers(Vec<(usize, usize)>);

impl Answers {
    fn add(&mut self, turn: usize, right: bool) {
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

    /// The same of every turn.
    pub fn by_turn(&self) -> Vec<f64> {
        let share = |(asked, answered): &(usize, usize)| *answered as f64 / (*asked).max(1) as f64;
        self.0.iter().map(share).collect()
    }
}

/// The entry of a turn, made where there is none yet.
fn at_turn<T: Default + Clone>(turns: &mut Vec<T>, turn: usize) -> &mut T {
    if turns.len() <= turn {
        turns.resize(turn + 1, T::default());
    }
    &mut turns[turn]
}

/// What all blocks said of one variant.
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
    totals: Totals,
    /// Sums over blocks or needles.
    index_bytes: f64,
    positions: f64,
}

impl Report {
    /// All turns of all blocks.
    pub fn whole(&self) -> Turn {
        let mut all = Turn::default();
        self.turns.iter().for_each(|turn| all.add(turn));
        all
    }

    /// See [`super::Generate::kv_read_fraction`].
    pub fn kv_read_fraction(&self) -> f64 {
        self.totals.read / self.steps.max(1) as f64
    }

    /// See [`super::Generate::exact_dot_fraction`].
    pub fn exact_dot_fraction(&self) -> f64 {
        self.totals.products / self.steps.max(1) as f64
    }

    /// See [`super::Generate::bypass_fraction`].
    pub fn bypass_fraction(&self) -> f64 {
        self.totals.bypassed / self.steps.max(1) as f64
    }

    /// Bits of the index per position and KV head.
    pub fn index_bits_per_token(&self) -> f64 {
        8.0 * self.index_bytes / self.positions.max(1.0)
    }

    /// Adds what one head and step gave along the full trajectory.
    fn add_scores(&mut self, layer: usize, kv_head: usize, turn: usize, scores: &Scores) {
        self.heads[layer][kv_head].add(scores);
        at_turn(&mut self.turns, turn).scores.add(scores);
    }
}

/// A turn of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// What is fed at once.
    pub prompt: Vec<u32>,
    /// What should come next.
    pub answer: Vec<u32>,
}

/// The parts of `n` tokens that are one turn each, of `turns` equal ones.
pub fn turns_of(n: usize, turns: usize) -> impl Iterator<Item = Range<usize>> {
    (0..turns).map(move |turn| turn * n / turns..(turn + 1) * n / turns)
}

/// Tokens of a turn of `n` that are fed one by one, of at most `decode`: the prompt keeps one.
pub fn decoded(n: usize, decode: usize) -> usize {
    decode.clamp(1, n.max(2) - 1)
}

/// The evaluation of variants on one model.
pub struct Panel<'a> {
    forward: Box<dyn Forward + 'a>,
    variants: Vec<Variant<'a>>,
    options: Options,
    /// Per variant.
    pub reports: Vec<Report>,
    /// Needles that full attention was asked.
    pub full: Answers,
}

impl<'a> Panel<'a> {
    /// A panel without results yet; the budget of `options` is not used.
    pub fn new(forward: Box<dyn Forward + 'a>, variants: Vec<Variant<'a>>, options: Options) -> Self {
        let c = &forward.decoder().config;
        let empty = Report {
            heads: vec![vec![Scores::default(); c.n_kv_heads]; c.n_layers],
            ..Report::default()
        };
        Self {
            forward,
            reports: vec![empty; variants.len()],
            variants,
            options,
            full: Answers::default(),
        }
    }

    /// Takes in a block as `turns` equal turns: all but the last `decode` tokens of each (at least one) are
    /// its prompt, those are fed one by one; `done` is called after each.
    ///
    /// # Errors
    /// A turn of less than two tokens; activations that are not finite; an interrupt.
    pub fn block(&mut self, ids: &[u32], turns: usize, decode: usize, done: &mut dyn FnMut()) -> Result<()> {
        if ids.len() / turns.max(1) < 2 {
            return Err(Error::failed("a turn of one token has nothing to decode"));
        }
        let mut course = self.course(ids.len(), true);
        for (turn, range) in turns_of(ids.len(), turns).enumerate() {
            let ids = &ids[range];
            let (prompt, rest) = ids.split_at(ids.len() - decoded(ids.len(), decode));
            course.prompt(self.forward.as_ref(), prompt)?;
            for id in rest {
                interrupt::check()?;
                let ids = vec![*id; self.variants.len() + 1];
                let logits = self.step(&mut course, &ids, turn)?;
                for (report, own) in self.reports.iter_mut().zip(&logits[1..]) {
                    let turn = at_turn(&mut report.turns, turn);
                    turn.kl += divergence(logits[0].view(), own.view());
                    turn.steps += 1;
                }
                done();
            }
        }
        self.close(&course);
        Ok(())
    }

    /// Takes in a needle: the prompt is prefilled, then each variant goes on greedily for as long as
    /// `found` says `None`.
    pub fn needle(
        &mut self,
        prompt: &[u32],
        most: usize,
        found: &dyn Fn(&[u32]) -> Result<Option<bool>>,
    ) -> Result<()> {
        let mut course = self.course(prompt.len(), false);
        let mut logits = course.prompt(self.forward.as_ref(), prompt)?;
        let mut said = vec![Vec::new(); logits.len()];
        let mut verdicts = vec![None; logits.len()];
        for step in 0..most.max(1) {
            interrupt::check()?;
            for ((verdict, said), logits) in verdicts.iter_mut().zip(&mut said).zip(&logits) {
                said.push(greedy(logits));
                if verdict.is_none() {
                    *verdict = found(said)?;
                }
            }
            if step + 1 >= most.max(1) || verdicts.iter().all(Option::is_some) {
                break;
            }
            let ids: Vec<u32> = said.iter().filter_map(|s| s.last().copied()).collect();
            logits = self.step(&mut course, &ids, 0)?;
        }
        self.answer(0, verdicts.iter().map(|verdict| *verdict == Some(true)));
        self.close(&course);
        Ok(())
    }

    /// Takes in a conversation. Every trajectory is fed the right answers; a turn counts as answered where
    /// each token of its answer is the greedy choice. As in a session, the last token of an answer is fed
    /// with the next prompt.
    ///
    /// # Errors
    /// An empty prompt; activations that are not finite; an interrupt.
    pub fn conversation(&mut self, questions: &[Question]) -> Result<()> {
        let length = |q: &Question| q.prompt.len() + q.answer.len();
        let mut course = self.course(questions.iter().map(length).sum(), false);
        let mut unfed = None;
        for (turn, question) in questions.iter().enumerate() {
            let ids: Vec<u32> = unfed.into_iter().chain(question.prompt.iter().copied()).collect();
            let mut logits = course.prompt(self.forward.as_ref(), &ids)?;
            let mut right = vec![true; logits.len()];
            for (i, id) in question.answer.iter().enumerate() {
                interrupt::check()?;
                if i > 0 {
                    let ids = vec![question.answer[i - 1]; logits.len()];
                    logits = self.step(&mut course, &ids, turn)?;
                }
                for (right, logits) in right.iter_mut().zip(&logits) {
                    *right &= greedy(logits) == *id;
                }
            }
            unfed = question.answer.last().copied();
            self.answer(turn, right.into_iter());
        }
        self.close(&course);
        Ok(())
    }

    fn course(&self, capacity: usize, judged: bool) -> Course {
        Course::new(
            &self.forward.decoder().config,
            &self.variants,
            &self.options,
            capacity,
            judged,
        )
    }

    /// Notes whether each trajectory, the full one first, answered the question of a turn.
    fn answer(&mut self, turn: usize, mut right: impl Iterator<Item = bool>) {
        self.full.add(turn, right.next() == Some(true));
        for (report, right) in self.reports.iter_mut().zip(right) {
            report.answers.add(turn, right);
        }
    }

    /// Feeds one token per trajectory, the full one first, along which shadows choose. Returns the logits
    /// after it: `[vocab]` each.
    fn step(&mut self, course: &mut Course, ids: &[u32], turn: usize) -> Result<Vec<Array1<f32>>> {
        let mut totals = vec![Totals::default(); self.variants.len()];
        let (variants, reports, options) = (&self.variants, &mut self.reports, &self.options);
        let (t, step, lanes) = (course.len, course.steps, &mut course.lanes);
        let windows = &self.forward.decoder().config.windows;
        let logits = self.forward.step(ids, t, &mut |index, rows, mut out| {
            let group = rows.q_rope.len_of(Axis(0)) / lanes[index].len();
            let set = StaticSet::at(t, windows[index], options.sinks, options.window);
            let at = At {
                rows,
                group,
                step,
                set: &set,
                variants,
            };
            let steps: Vec<LaneStep> = lanes[index]
                .par_iter_mut()
                .zip(out.axis_chunks_iter_mut(Axis(1), group))
                .enumerate()
                .map(|(c, (lanes, out))| lanes.step(&at, c, out))
                .collect();
            for (v, (total, report)) in totals.iter_mut().zip(reports.iter_mut()).enumerate() {
                let chosen: Vec<&Choice> = steps.iter().map(|s| &s.chosen[v]).collect();
                total.add(&chosen, &set, group);
                for (c, step) in steps.iter().enumerate() {
                    if let Some(new) = step.scores.get(v) {
                        report.add_scores(index, c, turn, new);
                    }
                }
            }
            Ok(())
        })?;
        course.len += 1;
        course.steps += 1;
        for (report, total) in self.reports.iter_mut().zip(&totals) {
            report.totals.add_step(total, windows.len());
            report.steps += 1;
        }
        Ok(logits)
    }

    /// Counts the indexes of a finished block.
    fn close(&mut self, course: &Course) {
        for (v, report) in self.reports.iter_mut().enumerate() {
            for lanes in course.lanes.iter().flatten() {
                report.index_bytes += lanes.own[v].retriever.state_bytes() as f64;
                report.positions += course.len as f64;
            }
        }
    }
}

/// The greedy choice.
fn greedy(logits: &Array1<f32>) -> u32 {
    argmax(logits.as_slice().unwrap_or(&[])) as u32
}
