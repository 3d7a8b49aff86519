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

    /// Checks that there is memory for another sequence of up to `capacity` positions, if the open ones will still take
    /// `to_come` positions.
    ///
    /// # Errors
    /// The device, or the machine, has too little free memory.
    fn check_room(&self, capacity: usize, to_come: usize) -> Result<()>;

    /// Opens a sequence with empty caches for up to `capacity` positions.
    ///
    /// # Errors
    /// Out of memory; sizes that the device does not support.
    fn open(&self, capacity: usize) -> Result<Box<dyn Backend + 'a>>;
}

/// The sessions of a device.
pub(super) struct Apart<'a> {
    pub opener: Box<dyn Opener<'a> + 'a>,
    pub sessions: BTreeMap<SequenceId, Opened<'a>>,
}

/// A session, and the positions that it was opened for.
pub(super) struct Opened<'a> {
    session: Session<'a>,
    capacity: usize,
}

impl<'a> Apart<'a> {
    fn session(&mut self, id: SequenceId) -> Result<&mut Session<'a>> {
        let opened = self.sessions.get_mut(&id);
        opened.map(|of| &mut of.session).ok_or_else(|| id.unknown())
    }
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
        let left = |of: &Opened| of.capacity.saturating_sub(of.session.positions());
        let to_come = self.sessions.values().map(left).fold(0, usize::saturating_add);
        self.opener.check_room(capacity, to_come)
    }

    fn open(&mut self, id: SequenceId, capacity: usize) -> Result<()> {
        self.check_room(capacity)?;
        let session = Session::boxed(self.opener.open(capacity)?);
        self.sessions.insert(id, Opened { session, capacity });
        Ok(())
    }

    fn close(&mut self, id: SequenceId) -> bool {
        self.sessions.remove(&id).is_some()
    }

    fn ids(&self) -> Vec<SequenceId> {
        self.sessions.keys().copied().collect()
    }

    fn prompt(&mut self, id: SequenceId, ids: &[u32]) -> Result<Array1<f32>> {
        self.session(id)?.prefill(ids)
    }

    fn step(&mut self, tokens: &[(SequenceId, u32)]) -> Result<Vec<Array1<f32>>> {
        let step = |(id, token): &(SequenceId, u32)| self.session(*id)?.step(*token);
        tokens.iter().map(step).collect()
    }

    fn state(&self, id: SequenceId) -> Result<Option<State>> {
        let state = |Opened { session, .. }: &Opened| {
            Ok(State {
                shares: session.shares()?,
                counts: session.counts()?,
            })
        };
        self.sessions.get(&id).map(state).transpose()
    }

    fn positions(&self, id: SequenceId) -> Option<usize> {
        self.sessions.get(&id).map(|of| of.session.positions())
    }

    fn bytes(&self) -> [usize; 2] {
        let sessions = || self.sessions.values().map(|of| &of.session);
        [
            sessions().map(Session::kv_bytes).sum(),
            sessions().map(Session::index_bytes).sum(),
        ]
    }
}
