//! Caches and selection on the CPU, for a model on any device.

use ndarray::Array1;

use super::caches::{Caches, Fed, step};
use super::options::DecodeOptions;
use super::session::{Backend, Session, StepAt};
use super::shares::{Counts, Shares};
use super::trace::Trace;

use crate::error::{Error, Result};
use crate::method::Method;
use crate::model::Decoder;
use crate::model::forward::{CpuForward, Forward};

/// A model on any device, with the caches and indexes of every KV head on the CPU.
pub struct CpuBackend<'a> {
    forward: Box<dyn Forward + 'a>,
    options: DecodeOptions,
    caches: Caches,
    /// The logits after the last decode step.
    logits: Array1<f32>,
}

impl<'a> CpuBackend<'a> {
    /// Makes a backend whose caches are empty and have space for `capacity` positions; they grow beyond it.
    pub fn new(
        forward: Box<dyn Forward + 'a>,
        method: &dyn Method,
        options: DecodeOptions,
        capacity: usize,
    ) -> Self {
        Self {
            caches: Caches::new(&forward.decoder().config, method, &options, capacity),
            forward,
            options,
            logits: Array1::default(0),
        }
    }
}

impl<'a> Session<'a> {
    /// Makes a session with model, caches and selection on the CPU, and space for `capacity` positions.
    ///
    /// # Errors
    /// Weights that cannot be read.
    pub fn on_cpu(
        decoder: &'a Decoder,
        method: &dyn Method,
        options: DecodeOptions,
        capacity: usize,
    ) -> Result<Self> {
        let forward = Box::new(CpuForward::new(decoder)?);
        Ok(Self::new(CpuBackend::new(forward, method, options, capacity)))
    }
}

impl Backend for CpuBackend<'_> {
    fn prompt(&mut self, ids: &[u32], first: usize, done: &mut dyn FnMut(usize)) -> Result<Array1<f32>> {
        self.caches.prompt(self.forward.as_ref(), ids, first, done)
    }

    fn step(&mut self, id: u32, at: StepAt, trace: Option<&mut Trace<'_>>) -> Result<()> {
        let caches = &mut self.caches;
        let fed = &mut [Fed { id, at, caches }];
        self.logits = only(step(self.forward.as_ref(), &self.options, fed, trace)?)?;
        Ok(())
    }

    /// The caches are shared with copies, to which the step adds its rows. If copies would hold all rows again, there is no such
    /// step.
    fn peek_in_full(&mut self, id: u32, position: usize) -> Result<Option<Array1<f32>>> {
        if !self.caches.shares_rows() {
            return Ok(None);
        }
        let caches = &mut self.caches.in_full();
        let at = StepAt { position, step: 0 };
        let fed = &mut [Fed { id, at, caches }];
        only(step(self.forward.as_ref(), &self.options, fed, None)?).map(Some)
    }

    fn logits(&self) -> Result<Array1<f32>> {
        Ok(self.logits.clone())
    }

    fn shares(&self, steps: usize) -> Result<Shares> {
        Ok(self.caches.mean_shares(steps))
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        Ok(self.caches.counts.clone())
    }

    fn granule(&self) -> usize {
        self.options.granule
    }

    fn kv_bytes(&self) -> usize {
        self.caches.kv_bytes()
    }

    fn index_bytes(&self) -> usize {
        self.caches.index_bytes()
    }
}

/// Returns the logits of the only sequence of a step.
fn only(logits: Vec<Array1<f32>>) -> Result<Array1<f32>> {
    let first = logits.into_iter().next();
    first.ok_or_else(|| Error::internal("a decode step gave no logits"))
}
