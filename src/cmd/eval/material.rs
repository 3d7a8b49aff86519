//! What `eval` measures methods on: blocks of text, or lines of questions.

use serde_json::Value;

use super::args::Args;
use super::blocks::Blocks;
use super::needles::{self, NeedleLine, Reader};
use super::reads::Sample;
use crate::cmd::args::Global;
use crate::cmd::terminal::Log;
use crate::error::Result;
use crate::model::Model;
use crate::model::tokenizer::Tokenizer;
use crate::runner::eval::Evaluation;

/// Blocks or lines on which the budgets for --reads are searched.
const SAMPLED: usize = 2;

/// Steps of a sample: of a turn of a text, or of the first questions of a line.
const ROUGH_STEPS: usize = 8;
const FINE_STEPS: usize = 32;

/// Lists at most [`SAMPLED`] of `n` numbers from 0 on, evenly spaced. The last one is seldom among them: the last block of a
/// text is often short.
pub(super) fn sampled(n: usize) -> impl Iterator<Item = usize> {
    let count = n.min(SAMPLED);
    (0..count).map(move |i| i * n / count)
}

/// What methods are evaluated on.
pub(super) enum Material<'a> {
    Text(Blocks),
    Needles(Vec<NeedleLine>, Reader<'a>),
}

impl<'a> Material<'a> {
    /// Reads the text or the needles.
    pub fn open(
        args: &Args,
        global: &Global,
        model: &'a Model,
        tokenizer: Option<&'a Tokenizer>,
    ) -> Result<Self> {
        let Some(path) = &args.needles else {
            return Ok(Self::Text(Blocks::open(args, model, global.seed)?));
        };
        let reader = Reader {
            decoder: &model.decoder,
            tokenizer,
            decode_prompt: args.decode_prompt,
            feeding: args.question,
        };
        let lines = if args.makes_questions() {
            needles::made(args, reader, global)?
        } else {
            needles::open(path, reader, global.log())?
        };
        Ok(Self::Needles(lines, reader))
    }

    /// Counts the tokens of the longest block or line.
    pub fn longest(&self) -> usize {
        match self {
            Self::Text(blocks) => blocks.longest(),
            Self::Needles(lines, _) => needles::longest(lines),
        }
    }

    /// Evaluates some of the blocks or lines, with few of their steps: what a step reads changes little from step to step.
    pub fn sample(&self, args: &Args, evaluation: &mut Evaluation, sample: Sample, log: Log) -> Result<()> {
        let steps = match sample {
            Sample::Rough => ROUGH_STEPS,
            Sample::Fine => FINE_STEPS,
        };
        let count = match self {
            Self::Text(blocks) => blocks.count(),
            Self::Needles(lines, _) => lines.len(),
        };
        let progress = log.progress(count.min(SAMPLED) as u64, "texts");
        progress.stage("searching budgets".to_owned());
        let mut done = || progress.advance(1);
        match self {
            Self::Text(blocks) => blocks.sample(args, evaluation, steps, &mut done),
            Self::Needles(lines, reader) => sampled(lines.len()).try_for_each(|i| {
                lines[i].sample(evaluation, *reader, steps)?;
                done();
                Ok(())
            }),
        }
    }

    /// Evaluates everything; returns how much was evaluated, and whether the user stopped it.
    pub fn evaluate(
        &self,
        args: &Args,
        global: &Global,
        evaluation: &mut Evaluation,
    ) -> Result<(Value, bool)> {
        match self {
            Self::Text(blocks) => blocks.evaluate(args, evaluation, global.log()),
            Self::Needles(lines, reader) => needles::run(lines, *reader, evaluation, global.log()),
        }
    }

    /// Counts the independent units of what was evaluated: blocks of text, or lines of questions.
    pub fn units(&self, evaluation: &Evaluation) -> usize {
        match self {
            Self::Text(_) => evaluation.reports.first().map_or(0, |report| report.blocks()),
            Self::Needles(..) => evaluation.full.lines(),
        }
    }
}
