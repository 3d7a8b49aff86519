//! Several sequences of different lengths over one model, whose weights are in memory once.

mod apart;
mod together;

use std::collections::BTreeMap;
use std::fmt;

use ndarray::Array1;

use super::caches::FilledHead;
use super::options::DecodeOptions;
use super::shares::{Counts, Shares};
use crate::env;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::model::Decoder;
use crate::model::forward::{Forward, check_prompt};
use apart::Apart;
pub use apart::Opener;
use together::Together;

/// The name of a sequence of an [`Engine`]; it is never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

impl SequenceId {
    fn unknown(self) -> Error {
        Error::usage(format!("{self} is not open"))
            .hint("open a sequence first; an error during its work closes it")
    }
}

/// A model, and sequences of different lengths that are fed together.
///
/// What a sequence computes does not depend on the others. [`Engine::new`] keeps caches and indexes on the CPU: with a model on
/// the CPU, a sequence's logits and choices are, to the last bit, those that it has alone, and the weights are read once for
/// every four sequences. [`Engine::on_device`] keeps them where an [`Opener`] puts them, and steps one sequence after the
/// other. [`Machine::engine`](crate::machine::Machine::engine) takes the right one.
pub struct Engine<'a> {
    pool: Box<dyn Pool + 'a>,
    options: DecodeOptions,
    opened: u64,
}

/// Where the sequences of an engine live.
trait Pool {
    fn decoder(&self) -> &Decoder;

    /// Returns whether caches grow beyond the positions that they were opened for.
    fn grows(&self) -> bool;

    /// Returns whether a sequence may have more than one prompt.
    fn takes_later_prompts(&self) -> bool;

    fn bytes_for(&self, positions: usize) -> Result<[usize; 2]>;

    fn check_room(&self, capacity: usize) -> Result<()>;

    /// Opens a sequence with a new name.
    fn open(&mut self, id: SequenceId, capacity: usize) -> Result<()>;

    fn adopt(&mut self, _: SequenceId, _: Vec<Vec<FilledHead>>, _: usize) -> Result<()> {
        Err(Error::unsupported(
            "caches of the CPU cannot become a sequence on a device",
        ))
    }

    /// Returns whether the sequence was open.
    fn close(&mut self, id: SequenceId) -> bool;

    fn ids(&self) -> Vec<SequenceId>;

    /// Runs a prompt that was checked. After an error, the sequence is in no defined state.
    fn prompt(&mut self, id: SequenceId, ids: &[u32]) -> Result<Array1<f32>>;

    /// Steps distinct open sequences, given in ascending order. After an error, they are in no defined state.
    fn step(&mut self, tokens: &[(SequenceId, u32)]) -> Result<Vec<Array1<f32>>>;

    /// Returns what is known of a sequence, if it is open.
    fn state(&self, id: SequenceId) -> Result<Option<State>>;

    fn positions(&self, id: SequenceId) -> Option<usize>;

    /// Returns the bytes of keys and values, and of indexes.
    fn bytes(&self) -> [usize; 2];
}

/// What is known of a sequence.
struct State {
    shares: Shares,
    counts: Vec<Counts>,
}

impl<'a> Engine<'a> {
    /// Makes an engine without sequences, with caches and indexes on the CPU; the model may be on any device. Decode steps choose
    /// positions by `method`.
    pub fn new(forward: Box<dyn Forward + 'a>, method: &'a dyn Method, options: DecodeOptions) -> Self {
        Self::with_pool(
            options.clone(),
            Together {
                forward,
                method,
                options,
                sequences: BTreeMap::new(),
            },
        )
    }

    /// Makes an engine without sequences, each of which has its caches and its index on a device.
    pub fn on_device(opener: Box<dyn Opener<'a> + 'a>, options: DecodeOptions) -> Self {
        let sessions = BTreeMap::new();
        Self::with_pool(options, Apart { opener, sessions })
    }

    fn with_pool(options: DecodeOptions, pool: impl Pool + 'a) -> Self {
        Self {
            pool: Box::new(pool),
            options,
            opened: 0,
        }
    }

    /// Returns whether the caches of a sequence grow beyond the positions for which it was opened: those on the CPU do, those on
    /// a device do not.
    pub fn grows(&self) -> bool {
        self.pool.grows()
    }

    /// Opens a sequence for up to `capacity` positions.
    ///
    /// # Errors
    /// Too little free memory for caches and index.
    pub fn open(&mut self, capacity: usize) -> Result<SequenceId> {
        let id = SequenceId(self.opened);
        self.pool.open(id, capacity)?;
        self.opened += 1;
        Ok(id)
    }

    /// For benchmarks: takes in a sequence whose caches and indexes are filled already, by layer and KV head, with `positions` positions.
    ///
    /// # Errors
    /// The engine's caches are not on the CPU.
    #[doc(hidden)]
    pub fn adopt(&mut self, heads: Vec<Vec<FilledHead>>, positions: usize) -> Result<SequenceId> {
        let id = SequenceId(self.opened);
        self.pool.adopt(id, heads, positions)?;
        self.opened += 1;
        Ok(id)
    }

    /// Estimates the bytes of keys and values, and of indexes, of another sequence of so many positions.
    ///
    /// # Errors
    /// Sizes that the device does not support.
    pub fn bytes_for(&self, positions: usize) -> Result<[usize; 2]> {
        self.pool.bytes_for(positions)
    }

    /// Checks that there is memory for another sequence, besides what the open ones will still take.
    ///
    /// # Errors
    /// Too little free memory.
    pub fn check_room(&self, capacity: usize) -> Result<()> {
        self.pool.check_room(capacity)
    }

    /// Closes a sequence and frees its memory, at any time between two calls.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn close(&mut self, id: SequenceId) -> Result<()> {
        if self.pool.close(id) {
            Ok(())
        } else {
            Err(id.unknown())
        }
    }

    /// Returns what bounds the steps' reads.
    pub fn options(&self) -> &DecodeOptions {
        &self.options
    }

    /// Lists the open sequences.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.pool.ids().into_iter()
    }

    /// Runs a prompt of a sequence with exact attention: the first, or a later one, which continues its caches. Returns the
    /// logits after its last token, `[vocab]`.
    ///
    /// # Errors
    /// The sequence is not open; an empty prompt, an id outside the vocabulary, a later prompt for an engine on a device that was
    /// opened for one, activations that are not finite, full caches, cancelled work. The sequence is then closed, unless the
    /// prompt was refused before it began.
    pub fn prefill(&mut self, id: SequenceId, ids: &[u32]) -> Result<Array1<f32>> {
        check_prompt(ids)?;
        self.pool.decoder().check_ids(ids)?;
        if self.positions(id)? > 0 && !self.pool.takes_later_prompts() {
            return Err(Error::usage(format!(
                "{id} has had its prompt, and its index takes in only one"
            ))
            .hint("feed the tokens one by one, or open the engine for later prompts"));
        }
        let logits = self.pool.prompt(id, ids);
        if logits.is_err() {
            self.pool.close(id);
        }
        logits
    }

    /// Feeds one token to each of some sequences with sparse attention; returns the logits after each, `[vocab]`, in the
    /// order of `tokens`.
    ///
    /// # Errors
    /// Cancelled work, a sequence that is not open or stands twice, an id outside the vocabulary: nothing was done. Activations
    /// that are not finite, full caches: the sequences of this step are then closed.
    pub fn step(&mut self, tokens: &[(SequenceId, u32)]) -> Result<Vec<Array1<f32>>> {
        env::check()?;
        let ids: Vec<u32> = tokens.iter().map(|(_, id)| *id).collect();
        self.pool.decoder().check_ids(&ids)?;
        for (i, (id, _)) in tokens.iter().enumerate() {
            self.positions(*id)?;
            if tokens[..i].iter().any(|(other, _)| other == id) {
                return Err(Error::usage(format!("{id} stands twice in one step"))
                    .hint("feed each sequence one token per step"));
            }
        }
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by_key(|i| tokens[*i].0);
        let ascending: Vec<_> = order.iter().map(|i| tokens[*i]).collect();
        let logits = match self.pool.step(&ascending) {
            Ok(logits) => logits,
            Err(e) => {
                for (id, _) in tokens {
                    self.pool.close(*id);
                }
                return Err(e);
            }
        };
        let mut out = vec![Array1::default(0); tokens.len()];
        order
            .into_iter()
            .zip(logits)
            .for_each(|(i, logits)| out[i] = logits);
        Ok(out)
    }

    /// Counts the positions of a sequence.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn positions(&self, id: SequenceId) -> Result<usize> {
        self.pool.positions(id).ok_or_else(|| id.unknown())
    }

    fn state(&self, id: SequenceId) -> Result<State> {
        self.pool.state(id)?.ok_or_else(|| id.unknown())
    }

    /// Returns the means over all decode steps and layers of a sequence; before its first step, everything counts as read.
    ///
    /// # Errors
    /// The sequence is not open; a device that fails.
    pub fn shares(&self, id: SequenceId) -> Result<Shares> {
        Ok(self.state(id)?.shares)
    }

    /// Returns what all decode steps of a sequence read, per layer.
    ///
    /// # Errors
    /// As [`Engine::shares`].
    pub fn counts(&self, id: SequenceId) -> Result<Vec<Counts>> {
        Ok(self.state(id)?.counts)
    }

    /// Counts the bytes held for keys and values, and for indexes, of all sequences.
    pub fn bytes(&self) -> [usize; 2] {
        self.pool.bytes()
    }
}
