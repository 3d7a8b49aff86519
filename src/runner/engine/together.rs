//! Sequences with caches and indexes on the CPU, whose steps share the reading of the weights.

use std::collections::BTreeMap;

use ndarray::Array1;

use super::{Pool, SequenceId, State};
use crate::error::{Error, Result};
use crate::method::Method;
use crate::model::Decoder;
use crate::model::forward::Forward;
use crate::runner::caches::{Caches, Fed, FilledHead, step};
use crate::runner::options::DecodeOptions;
use crate::runner::room;
use crate::runner::session::StepAt;
use crate::runner::shares::Shares;

/// A model on any device, and the caches of its sequences.
pub(super) struct Together<'a> {
    pub forward: Box<dyn Forward + 'a>,
    pub method: &'a dyn Method,
    pub options: DecodeOptions,
    pub sequences: BTreeMap<SequenceId, Sequence>,
}

/// The state of a sequence.
pub(super) struct Sequence {
    caches: Caches,
    /// Positions for which the caches were opened.
    capacity: usize,
    /// Positions in the caches.
    positions: usize,
    /// Decode steps so far.
    steps: usize,
}

impl Together<'_> {
    /// Estimates the bytes of keys and values, and of indexes, of a sequence of so many positions.
    fn estimate(&self, positions: usize) -> [usize; 2] {
        let config = &self.forward.decoder().config;
        [
            room::row_bytes(config, self.method, &self.options, positions),
            room::index_bytes(config, self.method, &self.options, positions),
        ]
    }

    fn add(&mut self, id: SequenceId, caches: Caches, capacity: usize, positions: usize) {
        let sequence = Sequence {
            caches,
            capacity,
            positions,
            steps: 0,
        };
        self.sequences.insert(id, sequence);
    }
}

impl Pool for Together<'_> {
    fn decoder(&self) -> &Decoder {
        self.forward.decoder()
    }

    fn grows(&self) -> bool {
        true
    }

    fn takes_later_prompts(&self) -> bool {
        true
    }

    fn bytes_for(&self, positions: usize) -> Result<[usize; 2]> {
        Ok(self.estimate(positions))
    }

    fn check_room(&self, capacity: usize) -> Result<()> {
        let bytes = |positions| {
            self.estimate(positions)
                .into_iter()
                .fold(0, usize::saturating_add)
        };
        let left = |of: &Sequence| bytes(of.capacity.saturating_sub(of.positions));
        let promised = self.sequences.values().map(left).fold(0, usize::saturating_add);
        room::check(bytes(capacity), promised)
    }

    fn open(&mut self, id: SequenceId, capacity: usize) -> Result<()> {
        self.check_room(capacity)?;
        let config = &self.forward.decoder().config;
        let caches = Caches::new(config, self.method, &self.options, capacity);
        self.add(id, caches, capacity, 0);
        Ok(())
    }

    fn adopt(&mut self, id: SequenceId, heads: Vec<Vec<FilledHead>>, positions: usize) -> Result<()> {
        self.add(id, Caches::filled(heads), positions, positions);
        Ok(())
    }

    fn close(&mut self, id: SequenceId) -> bool {
        self.sequences.remove(&id).is_some()
    }

    fn ids(&self) -> Vec<SequenceId> {
        self.sequences.keys().copied().collect()
    }

    fn prompt(&mut self, id: SequenceId, ids: &[u32]) -> Result<Array1<f32>> {
        let sequence = self.sequences.get_mut(&id).ok_or_else(|| id.unknown())?;
        let first = sequence.positions;
        let forward = self.forward.as_ref();
        let logits = sequence.caches.prompt(forward, ids, first, &mut |_| {})?;
        sequence.positions += ids.len();
        Ok(logits)
    }

    fn step(&mut self, tokens: &[(SequenceId, u32)]) -> Result<Vec<Array1<f32>>> {
        let mut own = tokens.iter().peekable();
        let mut fed = Vec::with_capacity(tokens.len());
        for (id, sequence) in &mut self.sequences {
            if let Some((_, token)) = own.next_if(|(next, _)| next == id) {
                let at = StepAt {
                    position: sequence.positions,
                    step: sequence.steps,
                };
                let caches = &mut sequence.caches;
                fed.push(Fed {
                    id: *token,
                    at,
                    caches,
                });
            }
        }
        if fed.len() != tokens.len() {
            return Err(Error::internal("a step feeds a sequence that is not open"));
        }
        let (forward, options) = (self.forward.as_ref(), &self.options);
        let parts = fed.chunks_mut(forward.most_together());
        let stepped = parts
            .map(|part| step(forward, options, part, None))
            .collect::<Result<Vec<_>>>()?;
        for (id, _) in tokens {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.positions += 1;
                sequence.steps += 1;
            }
        }
        Ok(stepped.concat())
    }

    fn state(&self, id: SequenceId) -> Result<Option<State>> {
        let state = |of: &Sequence| State {
            shares: match of.steps {
                0 => Shares::UNSTEPPED,
                steps => of.caches.mean_shares(steps),
            },
            counts: of.caches.counts.clone(),
        };
        Ok(self.sequences.get(&id).map(state))
    }

    fn positions(&self, id: SequenceId) -> Option<usize> {
        self.sequences.get(&id).map(|sequence| sequence.positions)
    }

    fn bytes(&self) -> [usize; 2] {
        let caches = || self.sequences.values().map(|sequence| &sequence.caches);
        [
            caches().map(Caches::kv_bytes).sum(),
            caches().map(Caches::index_bytes).sum(),
        ]
    }
}
