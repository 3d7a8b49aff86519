//! Caches and selection on the CPU, for a model on any device.

use ndarray::{Array1, ArrayViewMut3, Axis};

use super::head::{Chooser, Head, Token, prefill_heads};
use super::session::{Backend, StepAt};
use super::shares::{Counts, Shares};
use super::trace::Trace;
use super::{Options, Session};
use crate::compute::team;
use crate::error::{Error, Result};
use crate::kv::{KvHead, StaticSet};
use crate::method::full::Full;
use crate::method::{Choice, Method, Reads, Retriever};
use crate::model::Decoder;
use crate::model::forward::{CpuForward, Forward, Rows};

/// A cache that is filled already, and the index of its rows.
pub type FilledHead = (KvHead, Box<dyn Retriever>);

/// A model on any device, with the caches and indexes of every KV head on the CPU.
pub struct CpuBackend<'a> {
    forward: Box<dyn Forward + 'a>,
    options: Options,
    /// The KV heads of each layer.
    heads: Vec<Vec<Head>>,
    /// The shares of each decode step, averaged over layers and summed over steps.
    shares: Shares,
    /// What was read, per layer.
    counts: Vec<Counts>,
    /// The logits after the last decode step.
    logits: Array1<f32>,
}

impl<'a> CpuBackend<'a> {
    /// Makes a backend whose caches are empty and have space for `capacity` positions; they grow beyond it.
    pub fn new(
        forward: Box<dyn Forward + 'a>,
        method: &dyn Method,
        options: Options,
        capacity: usize,
    ) -> Self {
        let c = &forward.decoder().config;
        let head = |layer: usize, kv_head: usize| Head {
            kv: KvHead::new(options.kv, c.head_dim, capacity, options.packed),
            chooser: Chooser::new(method, &options.place(c, layer, kv_head)),
        };
        let layer = |layer: usize| (0..c.n_kv_heads).map(|kv_head| head(layer, kv_head)).collect();
        Self {
            heads: (0..c.n_layers()).map(layer).collect(),
            counts: vec![Counts::NONE; c.n_layers()],
            forward,
            options,
            shares: Shares::default(),
            logits: Array1::default(0),
        }
    }

    /// Makes a backend whose caches and indexes are filled already, by layer and KV head.
    pub fn filled(forward: Box<dyn Forward + 'a>, options: Options, heads: Vec<Vec<FilledHead>>) -> Self {
        let head = |(kv, retriever)| Head {
            kv,
            chooser: Chooser {
                retriever,
                tail: None,
            },
        };
        let heads = heads.into_iter();
        let heads: Vec<Vec<Head>> = heads.map(|layer| layer.into_iter().map(head).collect()).collect();
        Self {
            counts: vec![Counts::NONE; heads.len()],
            heads,
            forward,
            options,
            shares: Shares::default(),
            logits: Array1::default(0),
        }
    }

    fn heads(&self) -> impl Iterator<Item = &Head> {
        self.heads.iter().flatten()
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
        options: Options,
        capacity: usize,
    ) -> Result<Self> {
        let forward = Box::new(CpuForward::new(decoder)?);
        Ok(Self::new(CpuBackend::new(forward, method, options, capacity)))
    }
}

impl Backend for CpuBackend<'_> {
    fn prompt(&mut self, ids: &[u32], first: usize, done: &mut dyn FnMut(usize)) -> Result<Array1<f32>> {
        let blocks = &self.forward.decoder().config.blocks;
        let heads = &mut self.heads;
        let cache = &mut |layer: usize, rows| {
            prefill_heads(heads[layer].iter_mut().collect(), rows, blocks[layer].window)
        };
        self.forward.prompt(ids, first, cache, done)
    }

    fn step(&mut self, id: u32, at: StepAt, mut trace: Option<&mut Trace<'_>>) -> Result<()> {
        let options = self.options;
        let mut shares = Shares::default();
        let (heads, counts) = (&mut self.heads, &mut self.counts);
        let blocks = &self.forward.decoder().config.blocks;
        let attend = &mut |index: usize, rows: &Rows, out: ArrayViewMut3<f32>| {
            let heads = &mut heads[index];
            let r = rows.q_rope.len_of(Axis(0)) / heads.len();
            let set = StaticSet::at(at.position, blocks[index].window, options.sinks, options.window);
            let stepped = step_layer(heads, rows, at.step, &set, &options, out);
            let chosen = stepped.iter().map(|(choice, _)| choice);
            shares.add_layer(chosen.clone(), &set, r);
            for (choice, reads) in &stepped {
                counts[index].add(choice, reads, &set, r);
            }
            match trace.as_deref_mut() {
                Some(trace) => trace.layer(at.step, index, chosen.map(|c| &c.positions)),
                None => Ok(()),
            }
        };
        let logits = team::through(|| self.forward.step(&[id], at.position, attend))?;
        self.shares.add_step(&shares, self.heads.len());
        let first = logits.into_iter().next();
        self.logits = first.ok_or_else(|| Error::failed("a decode step gave no logits"))?;
        Ok(())
    }

    /// The caches are shared with copies, to which the step adds its rows. Copies of 2-bit rows would take as much memory
    /// again, so there is no such step with them.
    fn peek_in_full(&mut self, id: u32, position: usize) -> Result<Option<Array1<f32>>> {
        if self.options.kv.float().is_none() {
            return Ok(None);
        }
        let in_full = |head: &mut Head| Head {
            kv: head.kv.fork(),
            chooser: Chooser {
                retriever: Box::new(Full),
                tail: None,
            },
        };
        let layers = self.heads.iter_mut();
        let mut heads: Vec<Vec<Head>> = layers
            .map(|heads| heads.iter_mut().map(in_full).collect())
            .collect();
        let (options, blocks) = (self.options, &self.forward.decoder().config.blocks);
        let logits = self.forward.step(&[id], position, &mut |index, rows, out| {
            let set = StaticSet::at(position, blocks[index].window, options.sinks, options.window);
            step_layer(&mut heads[index], rows, 0, &set, &options, out);
            Ok(())
        })?;
        Ok(logits.into_iter().next())
    }

    fn logits(&self) -> Result<Array1<f32>> {
        Ok(self.logits.clone())
    }

    fn shares(&self, steps: usize) -> Result<Shares> {
        Ok(self.shares.mean(steps))
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        Ok(self.counts.clone())
    }

    fn granule(&self) -> usize {
        self.options.granule
    }

    fn kv_bytes(&self) -> usize {
        self.heads().map(|h| h.kv.bytes()).sum()
    }

    fn index_bytes(&self) -> usize {
        self.heads().map(|h| h.chooser.retriever.state_bytes()).sum()
    }
}

/// Runs decode step `step` of a layer's KV heads and writes the attention's output, `[1,h,d]`; returns what each head chose
/// and read.
fn step_layer(
    heads: &mut [Head],
    rows: &Rows,
    step: usize,
    set: &StaticSet,
    options: &Options,
    mut out: ArrayViewMut3<f32>,
) -> Vec<(Choice, Reads)> {
    let r = rows.q_rope.len_of(Axis(0)) / heads.len();
    let mut out = out.index_axis_mut(Axis(0), 0);
    let heads = heads
        .iter_mut()
        .zip(out.axis_chunks_iter_mut(Axis(0), r))
        .enumerate();
    team::map(heads.collect(), |(c, (head, out))| {
        head.step(&Token::of(rows, c, r, 0), step, set, options, out)
    })
}
