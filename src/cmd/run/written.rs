//! A reply while it is written: its tokens, its text, and when it ends.

use super::args::Args;
use super::stop::{Stop, StopText};
use crate::env;
use crate::error::Result;
use crate::model::ModelConfig;
use crate::model::tokenizer::{TextStream, Tokenizer};

/// A reply while it is written.
pub(super) struct Written<'a> {
    pub ids: Vec<u32>,
    stream: TextStream<'a>,
    text: StopText<'a>,
}

impl<'a> Written<'a> {
    /// Begins a reply; without a tokenizer, its ids are shown as numbers.
    pub fn new(args: &'a Args, tokenizer: Option<&'a Tokenizer>) -> Self {
        Self {
            ids: Vec::new(),
            stream: TextStream::new(tokenizer),
            text: StopText::new(&args.stop),
        }
    }

    /// Takes the next token, behind `positions` cached ones, of a reply of at most `max_new`. Returns the text that can be
    /// shown now, and why the reply ends, if it does.
    pub fn push(
        &mut self,
        token: u32,
        args: &Args,
        config: &ModelConfig,
        positions: usize,
        max_new: usize,
    ) -> Result<(String, Option<Stop>)> {
        self.ids.push(token);
        let shown = self.text.push(&self.stream.push(token)?);
        let stop = if self.text.is_found() {
            Some(Stop::Text)
        } else if !args.ignore_eos && config.is_stop_token(token) {
            Some(Stop::Token)
        } else if self.ids.len() >= max_new {
            Some(Stop::Length)
        } else if env::is_cancelled() {
            Some(Stop::Interrupted)
        } else if positions >= config.max_position_embeddings && !args.beyond_context {
            Some(Stop::Context)
        } else {
            None
        };
        Ok((shown, stop))
    }

    /// Ends the reply; returns the rest of the text that can be shown, the tokens and all text shown.
    pub fn finish(mut self) -> Result<(String, Vec<u32>, String)> {
        let last = self.stream.finish()?;
        let last = self.text.push(&last);
        let (rest, text) = self.text.finish();
        Ok((last + &rest, self.ids, text))
    }
}
