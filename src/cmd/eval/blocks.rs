//! The text of `eval`, block by block.

use std::ops::Range;

use serde_json::{Value, json};

use super::args::Args;
use super::material::sampled;
use crate::cmd::signals::is_stopped;
use crate::cmd::terminal::Log;
use crate::corpus::{Corpus, CorpusOptions, CorpusSource};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::runner::eval::{Done, Evaluation, decoded, turns_of};
use crate::wording::counted;

/// Text or tokens in blocks; each block has at least one token to decode in every turn.
pub struct Blocks {
    corpus: Corpus,
    usable: Vec<Range<usize>>,
}

impl Blocks {
    /// Reads the text or the tokens.
    ///
    /// # Errors
    /// A file that cannot be read; an id outside the vocabulary; no block that is long enough.
    pub fn open(args: &Args, model: &Model, seed: u64) -> Result<Self> {
        let source = match &args.tokens {
            Some(path) => CorpusSource::Tokens(path.clone()),
            None => CorpusSource::Text(args.text.files()),
        };
        let options = CorpusOptions {
            seq_len: args.seq_len,
            max_tokens: args.max_tokens,
            uuid_tokens: Some(args.uuid_tokens),
            holdout: 0.0,
            seed,
        };
        let corpus = Corpus::load(&model.path, model.config(), &source, &options)?;
        model.decoder.check_ids(&corpus.ids)?;
        let blocks = (0..corpus.n_blocks()).map(|b| corpus.block(b));
        let usable: Vec<_> = blocks.filter(|b| b.len() / args.turns > 1).collect();
        if usable.is_empty() {
            return Err(match args.turns {
                1 => Error::invalid("no block of the text has more than one token")
                    .hint("give longer documents"),
                n => Error::invalid(format!(
                    "no block of the text has at least two tokens for each of the {n} turns"
                ))
                .hint("give longer documents, or reduce --turns"),
            });
        }
        Ok(Self { corpus, usable })
    }

    /// Counts the tokens of the longest block.
    pub fn longest(&self) -> usize {
        self.usable.iter().map(Range::len).max().unwrap_or(0)
    }

    /// Evaluates some blocks with at most `steps` steps of each turn; `done` is called after each block.
    pub fn sample(
        &self,
        args: &Args,
        evaluation: &mut Evaluation,
        steps: usize,
        done: &mut dyn FnMut(),
    ) -> Result<()> {
        for i in sampled(self.usable.len()) {
            let ids = &self.corpus.ids[self.usable[i].clone()];
            evaluation.sample(ids, args.turns, args.decode.min(steps))?;
            done();
        }
        Ok(())
    }

    /// Counts the blocks.
    pub fn count(&self) -> usize {
        self.usable.len()
    }

    /// Evaluates every block; returns how much was evaluated, and whether the user stopped it.
    pub fn evaluate(&self, args: &Args, evaluation: &mut Evaluation, log: Log) -> Result<(Value, bool)> {
        let Self { corpus, usable } = self;
        let turns = |n: usize| turns_of(n, args.turns).map(|turn| decoded(turn.len(), args.decode));
        let steps: usize = usable.iter().flat_map(|b| turns(b.len())).sum();
        log.note(&format!(
            "evaluating {} in {}; {steps} of these tokens are decoded one by one",
            counted(corpus.n_tokens(), "token"),
            counted(usable.len(), "block")
        ));
        let longest = self.longest();
        warn_without_choice(evaluation, longest, log);
        let tokens = usable
            .iter()
            .map(|b| evaluation.tokens(b.len(), args.turns, args.decode));
        let (layers, of_step) = (evaluation.n_layers(), evaluation.tokens_of_step());
        let progress = log.prefill_progress(tokens.sum(), layers);
        let (mut done, mut finished, mut stopped) = (0, 0, false);
        for (i, block) in usable.iter().enumerate() {
            progress.stage(format!("block {} of {}", i + 1, usable.len()));
            let ids = &corpus.ids[block.clone()];
            let result =
                evaluation.block(
                    ids,
                    args.turns,
                    args.decode,
                    !args.losses_only,
                    &mut |what| match what {
                        Done::Prompt(tokens) => progress.advance(tokens as u64),
                        Done::Step => {
                            done += 1;
                            progress.advance((of_step * layers) as u64);
                        }
                    },
                );
            stopped = is_stopped(result, done)?;
            if stopped {
                break;
            }
            finished += 1;
        }
        drop(progress);
        let found = json!({
            "tokens": corpus.n_tokens(), "blocks": finished, "longest_block": longest, "turns": args.turns,
            "steps": done,
        });
        Ok((found, stopped))
    }
}

/// Warns of layers in which every position is in the static set, so that a method has nothing to choose.
fn warn_without_choice(evaluation: &Evaluation, longest: usize, log: Log) {
    let layers = evaluation.without_choice(longest);
    if layers.is_empty() {
        return;
    }
    let all = if layers.len() == evaluation.n_layers() {
        "every layer".to_owned()
    } else {
        let named: Vec<String> = layers.iter().map(usize::to_string).collect();
        format!("layers {}", named.join(", "))
    };
    log.warn(&format!(
        "in {all}, sinks and window cover every visible position, so methods have nothing to choose; give longer text or a smaller --window"
    ));
}
