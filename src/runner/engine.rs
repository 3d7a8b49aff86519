//! Several sequences of different lengths over one model, whose weights a step reads once for some of them together.

use std::collections::BTreeMap;
use std::fmt;

use ndarray::Array1;

use super::caches::{Caches, Fed, FilledHead, step};
use super::options::Options;
use super::room;
use super::session::StepAt;
use super::shares::{Counts, Shares};
use crate::env;
use crate::error::{Error, Result};
use crate::method::Method;
use crate::model::forward::Forward;

/// The name of a sequence of an [`Engine`]; it is never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// A model, and sequences that are fed together. Caches and indexes are on the CPU; the model may be on any device.
///
/// What a sequence computes does not depend on the others: with a model on the CPU, its logits and choices are, to the last bit,
/// those that it has alone. There, the weights are read once for every four sequences.
pub struct Engine<'a> {
    forward: Box<dyn Forward + 'a>,
    method: &'a dyn Method,
    options: Options,
    sequences: BTreeMap<SequenceId, Sequence>,
    opened: u64,
}

/// The state of a sequence.
struct Sequence {
    caches: Caches,
    /// Positions for which the caches were opened.
    capacity: usize,
    /// Positions in the caches.
    positions: usize,
    /// Decode steps so far.
    steps: usize,
}

impl<'a> Engine<'a> {
    /// Makes an engine without sequences, whose decode steps choose positions by `method`.
    pub fn new(forward: Box<dyn Forward + 'a>, method: &'a dyn Method, options: Options) -> Self {
        Self {
            forward,
            method,
            options,
            sequences: BTreeMap::new(),
            opened: 0,
        }
    }

    /// Opens a sequence with space for `capacity` positions; its caches grow beyond it.
    ///
    /// # Errors
    /// The machine has too little free memory for the caches.
    pub fn open(&mut self, capacity: usize) -> Result<SequenceId> {
        self.check_room(capacity)?;
        let config = &self.forward.decoder().config;
        let caches = Caches::new(config, self.method, &self.options, capacity);
        Ok(self.add(caches, capacity, 0))
    }

    /// Takes in a sequence whose caches and indexes are filled already, by layer and KV head, with `positions` positions.
    pub fn adopt(&mut self, heads: Vec<Vec<FilledHead>>, positions: usize) -> SequenceId {
        self.add(Caches::filled(heads), positions, positions)
    }

    fn add(&mut self, caches: Caches, capacity: usize, positions: usize) -> SequenceId {
        let id = SequenceId(self.opened);
        self.opened += 1;
        let sequence = Sequence {
            caches,
            capacity,
            positions,
            steps: 0,
        };
        self.sequences.insert(id, sequence);
        id
    }

    /// Checks that there is memory for another sequence, besides what the open ones will still take.
    ///
    /// # Errors
    /// The machine has too little free memory.
    pub fn check_room(&self, capacity: usize) -> Result<()> {
        let config = &self.forward.decoder().config;
        let bytes = |positions| room::bytes(config, &self.options, positions);
        let left = |of: &Sequence| bytes(of.capacity.saturating_sub(of.positions));
        room::check(bytes(capacity), self.sequences.values().map(left).sum())
    }

    /// Closes a sequence and frees its memory, at any time between two calls.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn close(&mut self, id: SequenceId) -> Result<()> {
        self.sequences.remove(&id).map(drop).ok_or_else(|| unknown(id))
    }

    /// Returns what bounds the steps' reads.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Lists the open sequences.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> {
        self.sequences.keys().copied()
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or_else(|| unknown(id))
    }

    /// Runs a prompt of a sequence with exact attention: the first, or a later one, which continues its caches. Returns the
    /// logits after its last token, `[vocab]`.
    ///
    /// # Errors
    /// The sequence is not open; an empty prompt, an id outside the vocabulary, activations that are not finite, cancelled
    /// work. The sequence is then closed, unless the prompt was refused before it began.
    pub fn prefill(&mut self, id: SequenceId, ids: &[u32]) -> Result<Array1<f32>> {
        let forward = self.forward.as_ref();
        crate::model::forward::check_prompt(ids)?;
        forward.decoder().check_ids(ids)?;
        let sequence = self.sequences.get_mut(&id).ok_or_else(|| unknown(id))?;
        let first = sequence.positions;
        let logits = sequence.caches.prompt(forward, ids, first, &mut |_| {});
        match logits {
            Ok(logits) => {
                sequence.positions += ids.len();
                Ok(logits)
            }
            Err(e) => {
                self.sequences.remove(&id);
                Err(e)
            }
        }
    }

    /// Feeds one token to each of some sequences with sparse attention; returns the logits after each, `[vocab]`, in the
    /// order of `tokens`.
    ///
    /// # Errors
    /// Cancelled work, a sequence that is not open or stands twice, an id outside the vocabulary: nothing was done. Activations
    /// that are not finite: the sequences of this step are then closed.
    pub fn step(&mut self, tokens: &[(SequenceId, u32)]) -> Result<Vec<Array1<f32>>> {
        env::check()?;
        let ids: Vec<u32> = tokens.iter().map(|(_, id)| *id).collect();
        self.forward.decoder().check_ids(&ids)?;
        for (i, (id, _)) in tokens.iter().enumerate() {
            self.sequence(*id)?;
            if tokens[..i].iter().any(|(other, _)| other == id) {
                return Err(Error::usage(format!("{id} stands twice in one step"))
                    .hint("feed each sequence one token per step"));
            }
        }
        if tokens.is_empty() {
            return Ok(Vec::new());
        }
        // In the order of the sequences; the rows of the step are in the same order.
        let mut order: Vec<usize> = (0..tokens.len()).collect();
        order.sort_by_key(|i| tokens[*i].0);
        let mut own = order.iter().map(|i| tokens[*i]).peekable();
        let mut fed = Vec::with_capacity(tokens.len());
        for (id, sequence) in &mut self.sequences {
            if let Some((_, token)) = own.next_if(|(next, _)| next == id) {
                let at = StepAt {
                    position: sequence.positions,
                    step: sequence.steps,
                };
                let caches = &mut sequence.caches;
                fed.push(Fed {
                    id: token,
                    at,
                    caches,
                });
            }
        }
        let (forward, options) = (self.forward.as_ref(), &self.options);
        let parts = fed.chunks_mut(forward.most_together());
        let stepped = parts
            .map(|part| step(forward, options, part, None))
            .collect::<Result<Vec<_>>>();
        let stepped = stepped.map(|parts| parts.concat());
        drop(fed);
        let logits = match stepped {
            Ok(logits) => logits,
            Err(e) => {
                tokens.iter().for_each(|(id, _)| drop(self.sequences.remove(id)));
                return Err(e);
            }
        };
        for (id, _) in tokens {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.positions += 1;
                sequence.steps += 1;
            }
        }
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
        Ok(self.sequence(id)?.positions)
    }

    /// Returns the means over all decode steps and layers of a sequence; before its first step, everything counts as read.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn shares(&self, id: SequenceId) -> Result<Shares> {
        let sequence = self.sequence(id)?;
        Ok(match sequence.steps {
            0 => Shares::UNSTEPPED,
            steps => sequence.caches.mean_shares(steps),
        })
    }

    /// Returns what all decode steps of a sequence read, per layer.
    ///
    /// # Errors
    /// The sequence is not open.
    pub fn counts(&self, id: SequenceId) -> Result<&[Counts]> {
        Ok(&self.sequence(id)?.caches.counts)
    }

    /// Counts the bytes held for keys and values, and for indexes, of all sequences.
    pub fn bytes(&self) -> [usize; 2] {
        let caches = || self.sequences.values().map(|sequence| &sequence.caches);
        [
            caches().map(Caches::kv_bytes).sum(),
            caches().map(Caches::index_bytes).sum(),
        ]
    }
}

fn unknown(id: SequenceId) -> Error {
    Error::usage(format!("{id} is not open"))
        .hint("open a sequence first; an error during its work closes it")
}
