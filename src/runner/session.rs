//! A session on any device: a prompt, then tokens one by one, then perhaps a later prompt.

use std::io::Write;

use ndarray::Array1;

use super::shares::{Counts, Shares};
use super::trace::Trace;
use crate::error::Result;
use crate::kv::sample::Sampler;

/// The position and the number of a decode step.
#[derive(Clone, Copy, Debug)]
pub struct StepAt {
    /// Position of the token that is fed.
    pub position: usize,
    /// Number of decode steps before this step.
    pub step: usize,
}

/// A model with its caches on some device.
pub trait Backend {
    /// Runs a prompt with exact attention. Its first token is at position `first`; earlier positions are in the
    /// caches. Returns the logits after its last token: `[vocab]`; `done` is called with numbers of tokens, which add up
    /// to the prompt's tokens in every layer.
    ///
    /// # Errors
    /// An empty prompt, an id outside the vocabulary, activations that are not finite, an interrupt.
    fn prompt(&mut self, ids: &[u32], first: usize, done: &mut dyn FnMut(usize)) -> Result<Array1<f32>>;

    /// Feeds one token with sparse attention.
    fn step(&mut self, id: u32, at: StepAt, trace: Option<&mut Trace<'_>>) -> Result<()>;

    /// Returns the logits after a step at `position` that attends everything, `[vocab]`, and leaves caches and indexes as
    /// they are; `None` where that cannot be done.
    ///
    /// # Errors
    /// As [`Backend::step`].
    fn peek_in_full(&mut self, _id: u32, _position: usize) -> Result<Option<Array1<f32>>> {
        Ok(None)
    }

    /// Returns the logits after the last step: `[vocab]`.
    fn logits(&self) -> Result<Array1<f32>>;

    /// Returns the token that follows the last step.
    fn next(&self, sampler: &mut Sampler) -> Result<u32> {
        sampler.next(self.logits()?.view())
    }

    /// Returns the means over all decode steps and layers; `steps` is the number of steps.
    fn shares(&self, steps: usize) -> Result<Shares>;

    /// Returns what all decode steps read, per layer.
    fn counts(&self) -> Result<Vec<Counts>>;

    /// Returns how many bytes memory moves at once.
    fn granule(&self) -> usize;

    /// Counts the bytes held for keys and values.
    fn kv_bytes(&self) -> usize;

    /// Counts the bytes held for the methods' indexes.
    fn index_bytes(&self) -> usize;
}

/// A conversation with a model through one method.
pub struct Session<'a> {
    backend: Box<dyn Backend + 'a>,
    /// Positions in the cache.
    positions: usize,
    /// Decode steps so far.
    steps: usize,
    trace: Option<Trace<'a>>,
}

impl<'a> Session<'a> {
    /// Starts a session on a backend whose caches are empty.
    pub fn new(backend: impl Backend + 'a) -> Self {
        Self::boxed(Box::new(backend))
    }

    /// Starts a session on a backend whose caches are empty.
    pub fn boxed(backend: Box<dyn Backend + 'a>) -> Self {
        Self {
            backend,
            positions: 0,
            steps: 0,
            trace: None,
        }
    }

    /// Runs a prompt with exact attention: the first, or that of a later turn, which continues the cache. Returns the
    /// logits after its last token: `[vocab]`.
    ///
    /// # Errors
    /// As [`Backend::prompt`].
    pub fn prefill(&mut self, ids: &[u32]) -> Result<Array1<f32>> {
        self.prefill_watched(ids, &mut |_| {})
    }

    /// Does what [`Session::prefill`] does; `done` is called with numbers of tokens, which add up to the prompt's tokens
    /// in every layer.
    ///
    /// # Errors
    /// As [`Backend::prompt`].
    pub fn prefill_watched(&mut self, ids: &[u32], done: &mut dyn FnMut(usize)) -> Result<Array1<f32>> {
        let logits = self.backend.prompt(ids, self.positions, done)?;
        self.positions += ids.len();
        Ok(logits)
    }

    /// Feeds one token with sparse attention; returns the logits after it: `[vocab]`.
    ///
    /// # Errors
    /// As [`Backend::prompt`]; a trace that cannot be written.
    pub fn step(&mut self, id: u32) -> Result<Array1<f32>> {
        self.feed(id, |backend| backend.logits())
    }

    /// Feeds one token; returns the token that follows it.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn next(&mut self, id: u32, sampler: &mut Sampler) -> Result<u32> {
        self.feed(id, |backend| backend.next(sampler))
    }

    /// Runs one step and reads its result with `read`; counts the step unless either fails.
    fn feed<T>(&mut self, id: u32, read: impl FnOnce(&(dyn Backend + 'a)) -> Result<T>) -> Result<T> {
        let at = StepAt {
            position: self.positions,
            step: self.steps,
        };
        self.backend.step(id, at, self.trace.as_mut())?;
        let out = read(self.backend.as_ref())?;
        self.positions += 1;
        self.steps += 1;
        Ok(out)
    }

    /// Returns the logits that would follow a token if its step attended everything, `[vocab]`, and leaves the session as
    /// it is; `None` if its backend cannot do that.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn peek_in_full(&mut self, id: u32) -> Result<Option<Array1<f32>>> {
        self.backend.peek_in_full(id, self.positions)
    }

    /// Writes the choices of the steps to come to `sink`, one JSON line per step, layer and KV head.
    pub fn trace(&mut self, sink: impl Write + 'a) {
        self.trace = Some(Trace::new(sink));
    }

    /// Flushes the trace, if there is one.
    ///
    /// # Errors
    /// The trace cannot be written.
    pub fn finish_trace(&mut self) -> Result<()> {
        self.trace.as_mut().map_or(Ok(()), Trace::finish)
    }

    /// Counts the positions in the cache.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// Returns the means over all decode steps and layers; before the first step, everything counts as read.
    pub fn shares(&self) -> Result<Shares> {
        match self.steps {
            0 => Ok(Shares::UNSTEPPED),
            steps => self.backend.shares(steps),
        }
    }

    /// Returns what all decode steps read, per layer.
    pub fn counts(&self) -> Result<Vec<Counts>> {
        self.backend.counts()
    }

    /// Returns how many bytes memory moves at once.
    pub fn granule(&self) -> usize {
        self.backend.granule()
    }

    /// Counts the bytes held for keys and values.
    pub fn kv_bytes(&self) -> usize {
        self.backend.kv_bytes()
    }

    /// Counts the bytes held for the methods' indexes.
    pub fn index_bytes(&self) -> usize {
        self.backend.index_bytes()
    }
}
