//! Sequences with caches and indexes on a device, each of which runs steps of its own over weights that all share.

use std::collections::BTreeMap;

use ndarray::Array1;

use super::{Pool, SequenceId, State};
use crate::error::Result;
use crate::model::Decoder;
use crate::runner::session::{Backend, Session};

/// A model whose weights are on a device, and which opens sequences there.
pub trait Opener<'a> {
    /// Returns the checkpoint.
    fn decoder(&self) -> &Decoder;

    /// Returns whether the indexes take in more than one prompt.
    fn takes_later_prompts(&self) -> bool;

    /// Estimates the bytes of keys and values, and of indexes, of a sequence of up to `capacity` positions.
    ///
    /// # Errors
    /// Sizes that the device does not support.
    fn bytes_for(&self, capacity: usize) -> Result<[usize; 2]>;

    /// Checks that there is memory for another sequence of up to `capacity` positions.
    ///
    /// # Errors
    /// The device, or the machine, has too little free memory.
    fn check_room(&self, capacity: usize) -> Result<()>;

    /// Opens a sequence with empty caches for up to `capacity` positions.
    ///
    /// # Errors
    /// As [`Opener::check_room`]; sizes that the device does not support.
    fn open(&self, capacity: usize) -> Result<Box<dyn Backend + 'a>>;
}

/// The sessions of a device.
pub(super) struct Apart<'a> {
    pub opener: Box<dyn Opener<'a> + 'a>,
    pub sessions: BTreeMap<SequenceId, Session<'a>>,
}

impl Pool for Apart<'_> {
    fn decoder(&self) -> &Decoder {
        self.opener.decoder()
    }

    fn grows(&self) -> bool {
        false
    }

    fn takes_later_prompts(&self) -> bool {
        self.opener.takes_later_prompts()
    }

    fn bytes_for(&self, positions: usize) -> Result<[usize; 2]> {
        self.opener.bytes_for(positions)
    }

    fn check_room(&self, capacity: usize) -> Result<()> {
        self.opener.check_room(capacity)
    }

    fn open(&mut self, id: SequenceId, capacity: usize) -> Result<()> {
        let backend = self.opener.open(capacity)?;
        self.sessions.insert(id, Session::of(backend));
        Ok(())
    }

    fn close(&mut self, id: SequenceId) -> bool {
        self.sessions.remove(&id).is_some()
    }

    fn ids(&self) -> Vec<SequenceId> {
        self.sessions.keys().copied().collect()
    }

    fn prompt(&mut self, id: SequenceId, ids: &[u32]) -> Result<Array1<f32>> {
        let session = self.sessions.get_mut(&id).ok_or_else(|| id.unknown())?;
        session.prefill(ids)
    }

    fn step(&mut self, tokens: &[(SequenceId, u32)]) -> Result<Vec<Array1<f32>>> {
        let mut logits = Vec::with_capacity(tokens.len());
        for (id, token) in tokens {
            let session = self.sessions.get_mut(id).ok_or_else(|| id.unknown())?;
            logits.push(session.step(*token)?);
        }
        Ok(logits)
    }

    fn state(&self, id: SequenceId) -> Result<Option<State>> {
        let state = |of: &Session| {
            Ok(State {
                shares: of.shares()?,
                counts: of.counts()?,
            })
        };
        self.sessions.get(&id).map(state).transpose()
    }

    fn positions(&self, id: SequenceId) -> Option<usize> {
        self.sessions.get(&id).map(Session::positions)
    }

    fn bytes(&self) -> [usize; 2] {
        let sessions = || self.sessions.values();
        [
            sessions().map(Session::kv_bytes).sum(),
            sessions().map(Session::index_bytes).sum(),
        ]
    }
}
