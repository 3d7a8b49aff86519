//! Inference: exact prefill, then decode steps that attend a static set and what a method selects.

pub mod eval;
mod head;

use std::io::Write;

use ndarray::{Array1, Axis};
use rayon::prelude::*;
use serde_json::json;

use crate::error::{Error, Result};
use crate::kv::packed::Layout;
use crate::kv::sample::Sampler;
use crate::kv::{Budget, KvHead, KvType, StaticSet};
use crate::method::{Choice, Method, Place};
use crate::model::forward::{CpuForward, Forward};
use crate::model::{Decoder, ModelConfig};
pub(crate) use head::attend;
use head::{Head, Token, prefill_heads};

/// What bounds a decode step's reads.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// First positions that are always attended.
    pub sinks: usize,
    /// Last positions that are always attended, the current one included.
    pub window: usize,
    /// What the method may choose besides.
    pub budget: Budget,
    /// Element type of the cache.
    pub kv: KvType,
    /// How the 2-bit cache holds its rows.
    pub packed: Layout,
}

impl Options {
    /// Where a KV head of a model stands.
    fn place(&self, config: &ModelConfig, layer: usize, kv_head: usize) -> Place {
        Place {
            layer,
            kv_head,
            group: config.group(),
            head_dim: config.head_dim,
            model_window: config.windows[layer],
            sinks: self.sinks,
            window: self.window,
            budget: self.budget,
            kv: self.kv,
        }
    }
}

/// A conversation wherever it is computed: a prompt, then tokens one by one, then perhaps a later prompt.
pub trait Generate<'a> {
    /// Runs a prompt with exact attention: the first, or that of a later turn, which continues the
    /// cache. Returns the logits after its last token: `[vocab]`.
    ///
    /// # Errors
    /// An empty prompt, an id outside the vocabulary, activations that are not finite.
    fn prefill(&mut self, ids: &[u32]) -> Result<Array1<f32>>;

    /// Feeds one token with sparse attention; returns the logits after it: `[vocab]`.
    fn step(&mut self, id: u32) -> Result<Array1<f32>>;

    /// Feeds one token; returns the one that follows it.
    fn next(&mut self, id: u32, sampler: &mut Sampler) -> Result<u32> {
        Ok(sampler.next(self.step(id)?.as_slice().unwrap_or(&[])))
    }

    /// Writes one JSON line per step, layer and KV head to `sink`.
    fn trace(&mut self, sink: Box<dyn Write + 'a>);

    /// Flushes the trace.
    fn finish_trace(&mut self) -> Result<()>;

    /// Positions in the cache.
    fn len(&self) -> usize;

    /// Whether nothing was fed yet.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type of the cache.
    fn kv_type(&self) -> KvType;

    /// Whether the model ends a text with this token.
    fn is_stop_token(&self, id: u32) -> bool;

    /// Share of K and V rows that decode steps read, static set included; 1 without steps.
    fn kv_read_fraction(&self) -> Result<f64>;

    /// Share of all products of a query with a visible key that the method took exactly in order to
    /// choose, mean over steps and layers; 0 without steps.
    fn exact_dot_fraction(&self) -> Result<f64>;

    /// Share of query heads that bypassed their selection, mean over steps and layers.
    fn bypass_fraction(&self) -> Result<f64>;

    /// Bytes of keys and values really held.
    fn kv_bytes(&self) -> usize;

    /// Bytes of the methods' indexes.
    fn index_bytes(&self) -> usize;
}

/// A conversation with its caches on the CPU: a model, a method and the caches of every head.
pub struct Session<'a> {
    forward: Box<dyn Forward + 'a>,
    options: Options,
    /// Per layer.
    heads: Vec<Vec<Head>>,
    /// Positions in the cache.
    len: usize,
    /// Decode steps done.
    steps: usize,
    /// Sums over decode steps of the mean over layers.
    totals: Totals,
    trace: Option<Box<dyn Write + 'a>>,
}

/// What a step read and computed, as shares.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    /// K and V rows read, of the visible ones.
    read: f64,
    /// Exact products of queries and keys taken to rank, of all there are.
    products: f64,
    /// Query heads that bypassed their selection.
    bypassed: f64,
}

impl<'a> Session<'a> {
    /// An empty session on the CPU with room for `capacity` positions.
    pub fn new(decoder: &'a Decoder, method: &Method, options: Options, capacity: usize) -> Result<Self> {
        let forward = Box::new(CpuForward::new(decoder)?);
        Ok(Self::on(forward, method, options, capacity))
    }

    /// An empty session on a model wherever that is computed; caches and selection are on the CPU.
    pub fn on(forward: Box<dyn Forward + 'a>, method: &Method, options: Options, capacity: usize) -> Self {
        let c = &forward.decoder().config;
        let head = |layer: usize, kv_head: usize| Head {
            kv: KvHead::new(options.kv, c.head_dim, capacity, options.packed),
            retriever: method.head(&options.place(c, layer, kv_head)),
        };
        let layer = |layer: usize| (0..c.n_kv_heads).map(|kv_head| head(layer, kv_head)).collect();
        Self {
            heads: (0..c.n_layers).map(layer).collect(),
            forward,
            options,
            len: 0,
            steps: 0,
            totals: Totals::default(),
            trace: None,
        }
    }

    fn heads(&self) -> impl Iterator<Item = &Head> {
        self.heads.iter().flatten()
    }
}

impl<'a> Generate<'a> for Session<'a> {
    fn prefill(&mut self, ids: &[u32]) -> Result<Array1<f32>> {
        let windows = &self.forward.decoder().config.windows;
        let heads = &mut self.heads;
        let logits = self.forward.prompt(ids, self.len, &mut |layer, rows| {
            prefill_heads(heads[layer].iter_mut().collect(), rows, windows[layer])
        })?;
        self.len += ids.len();
        Ok(logits)
    }

    fn step(&mut self, id: u32) -> Result<Array1<f32>> {
        let (t, step) = (self.len, self.steps);
        let options = self.options;
        let mut totals = Totals::default();
        let (heads, trace) = (&mut self.heads, &mut self.trace);
        let windows = &self.forward.decoder().config.windows;
        let logits = self.forward.step(&[id], t, &mut |index, rows, mut out| {
            let heads = &mut heads[index];
            let r = rows.q_rope.len_of(Axis(0)) / heads.len();
            let set = StaticSet::at(t, windows[index], options.sinks, options.window);
            let mut out = out.index_axis_mut(Axis(0), 0);
            let chosen: Vec<Choice> = heads
                .par_iter_mut()
                .zip(out.axis_chunks_iter_mut(Axis(0), r))
                .enumerate()
                .map(|(c, (head, out))| {
                    let token = Token::of(rows, c, r, 0);
                    head.step(&token, step, &set, options.budget, out)
                })
                .collect();
            totals.add(&chosen.iter().collect::<Vec<_>>(), &set, r);
            match trace {
                Some(sink) => write_trace(sink, step, index, &chosen),
                None => Ok(()),
            }
        })?;
        self.len += 1;
        self.steps += 1;
        self.totals.add_step(&totals, self.heads.len());
        Ok(logits.into_iter().next().unwrap_or_default())
    }

    fn trace(&mut self, sink: Box<dyn Write + 'a>) {
        self.trace = Some(sink);
    }

    fn finish_trace(&mut self) -> Result<()> {
        finish_trace(&mut self.trace)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn kv_type(&self) -> KvType {
        self.options.kv
    }

    fn is_stop_token(&self, id: u32) -> bool {
        self.forward.decoder().config.eos_token_ids.contains(&id)
    }

    fn kv_read_fraction(&self) -> Result<f64> {
        match self.steps {
            0 => Ok(1.0),
            steps => Ok(self.totals.read / steps as f64),
        }
    }

    fn exact_dot_fraction(&self) -> Result<f64> {
        Ok(self.totals.products / self.steps.max(1) as f64)
    }

    fn bypass_fraction(&self) -> Result<f64> {
        Ok(self.totals.bypassed / self.steps.max(1) as f64)
    }

    fn kv_bytes(&self) -> usize {
        self.heads().map(|h| h.kv.bytes()).sum()
    }

    fn index_bytes(&self) -> usize {
        self.heads().map(|h| h.retriever.state_bytes()).sum()
    }
}

/// Flushes a trace.
pub(crate) fn finish_trace(trace: &mut Option<Box<dyn Write + '_>>) -> Result<()> {
    match trace {
        Some(sink) => sink
            .flush()
            .map_err(|e| Error::failed(format!("cannot write the trace: {e}"))),
        None => Ok(()),
    }
}

/// Writes the lines of one step and layer.
fn write_trace(sink: &mut Box<dyn Write + '_>, step: usize, layer: usize, chosen: &[Choice]) -> Result<()> {
    for (c, choice) in chosen.iter().enumerate() {
        let line = json!({
            "step": step, "layer": layer, "kv_head": c, "positions": choice.positions,
        });
        writeln!(sink, "{line}").map_err(|e| Error::failed(format!("cannot write the trace: {e}")))?;
    }
    Ok(())
}

impl Totals {
    /// Adds what the heads of one layer did.
    fn add(&mut self, chosen: &[&Choice], set: &StaticSet, group: usize) {
        let n = set.visible().len() as f64;
        let mut rows = 0.0;
        for choice in chosen {
            let bypassed = choice.bypassed.iter().flatten().count();
            let attended = if bypassed == group {
                set.sinks.len()
            } else {
                set.len() + choice.positions.len()
            };
            rows += attended as f64 + choice.ranked_rows as f64 / 2.0;
            self.bypassed += bypassed as f64 / (group * chosen.len()) as f64;
            self.products += choice.products as f64 / (n * (group * chosen.len()) as f64);
        }
        self.read += rows / (n * chosen.len() as f64);
    }

    /// Adds a step of several layers.
    fn add_step(&mut self, step: &Totals, layers: usize) {
        self.read += step.read / layers as f64;
        self.products += step.products / layers as f64;
        self.bypassed += step.bypassed / layers as f64;
    }
}
