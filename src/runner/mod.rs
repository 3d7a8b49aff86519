//! Inference: exact prefill, then decode steps that attend a static set and what a method selects.

pub mod budget;
pub mod kv;
pub mod sample;

use std::io::Write;
use std::ops::Range;

use ndarray::{Array1, Array2, Axis, s};
use rayon::prelude::*;
use serde_json::json;

use crate::compute::attention;
use crate::error::{Error, Result};
use crate::method::{Method, Prompt, Retriever, Step};
use crate::model::decoder::{rotate, rotated};
use crate::model::{Decoder, Layer};
use budget::Budget;
use kv::{KvHead, KvType};

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
}

/// One conversation: a model, a method and the caches of every head.
pub struct Session<'a> {
    decoder: &'a Decoder,
    options: Options,
    layers: Vec<(Layer, Vec<Head>)>,
    /// Positions in the cache.
    len: usize,
    /// Decode steps done.
    steps: usize,
    /// Sum over steps and layers of the share of K and V rows read.
    read_fraction: f64,
    trace: Option<Box<dyn Write + 'a>>,
}

struct Head {
    kv: KvHead,
    retriever: Box<dyn Retriever>,
}

impl<'a> Session<'a> {
    /// An empty session with room for `capacity` positions.
    pub fn new(decoder: &'a Decoder, method: &Method, options: Options, capacity: usize) -> Result<Self> {
        let c = &decoder.config;
        let layers = (0..c.n_layers)
            .map(|i| {
                let heads = (0..c.n_kv_heads)
                    .map(|head| Head {
                        kv: KvHead::new(options.kv, c.head_dim, capacity),
                        retriever: method.head(i, head, c.windows[i]),
                    })
                    .collect();
                Ok((decoder.layer(i)?, heads))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            decoder,
            options,
            layers,
            len: 0,
            steps: 0,
            read_fraction: 0.0,
            trace: None,
        })
    }

    /// Writes one JSON line per step, layer and KV head to `sink`.
    pub fn trace(&mut self, sink: Box<dyn Write + 'a>) {
        self.trace = Some(sink);
    }

    /// Runs the prompt with exact attention; returns the logits after its last token: `[vocab]`.
    ///
    /// # Errors
    /// An empty prompt, a second one, an id outside the vocabulary, activations that are not finite.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<Array1<f32>> {
        if ids.is_empty() {
            return Err(Error::failed("the prompt has no tokens"));
        }
        if self.len > 0 {
            return Err(Error::failed("a session takes one prompt"));
        }
        let m = ids.len();
        let mut hidden = self.decoder.embed(ids)?;
        let table = self.decoder.rope.table(0..m);
        let n_layers = self.layers.len();
        for (index, (layer, heads)) in self.layers.iter_mut().enumerate() {
            crate::interrupt::check()?;
            let mut states = layer.project(hidden.view());
            self.decoder.check_states(layer, &states)?;
            let k_rope = rotated(&states.k_pre, &table, 0..m);
            rotate(&mut states.q_pre, &table, 0..m);
            let q_rope = states.q_pre;
            let r = q_rope.len_of(Axis(0)) / heads.len();
            heads.par_iter_mut().enumerate().for_each(|(c, head)| {
                head.kv.keys.extend(k_rope.index_axis(Axis(0), c));
                head.kv.values.extend(states.v.index_axis(Axis(0), c));
                let Head { kv, retriever } = head;
                retriever.prefill(&Prompt {
                    k_pre: states.k_pre.index_axis(Axis(0), c),
                    q_rope: q_rope.slice(s![c * r..(c + 1) * r, .., ..]),
                    kv,
                });
            });
            // Of the last layer, only the last position is read.
            let first = if index + 1 == n_layers { m - 1 } else { 0 };
            let mut attended = Array2::zeros((m - first, q_rope.len() / m));
            attention::causal(
                q_rope.slice(s![.., first.., ..]),
                k_rope.view(),
                states.v.view(),
                first,
                layer.window,
                attended.view_mut(),
            );
            drop(q_rope);
            let mut rows = hidden.slice_mut(s![first.., ..]);
            layer.finish(rows.view_mut(), attended.view());
            self.decoder.check_finite(layer, rows.view())?;
        }
        self.len += m;
        self.decoder.logits(hidden.row(m - 1))
    }

    /// Feeds one token with sparse attention; returns the logits after it: `[vocab]`.
    pub fn step(&mut self, id: u32) -> Result<Array1<f32>> {
        let t = self.len;
        let step = self.steps;
        let options = self.options;
        let mut hidden = self.decoder.embed(&[id])?;
        let table = self.decoder.rope.table(t..t + 1);
        let mut read = 0.0;
        for (index, (layer, heads)) in self.layers.iter_mut().enumerate() {
            let states = layer.project(hidden.view());
            let k_rope = rotated(&states.k_pre, &table, 0..1);
            let q_rope = rotated(&states.q_pre, &table, 0..1);
            let h = q_rope.len_of(Axis(0));
            let d = q_rope.len_of(Axis(2));
            let r = h / heads.len();
            let q_pre = states.q_pre.index_axis(Axis(1), 0);
            let q_rope = q_rope.index_axis(Axis(1), 0);
            let set = StaticSet::at(t, layer.window, options.sinks, options.window);
            let mut attended = Array2::<f32>::zeros((h, d));
            let chosen: Vec<Vec<u32>> = heads
                .par_iter_mut()
                .zip(attended.axis_chunks_iter_mut(Axis(0), r))
                .enumerate()
                .map(|(c, (head, out))| {
                    head.kv.keys.extend(k_rope.index_axis(Axis(0), c));
                    head.kv.values.extend(states.v.index_axis(Axis(0), c));
                    head.retriever.append(states.k_pre.index_axis(Axis(0), c));
                    let group = s![c * r..(c + 1) * r, ..];
                    let chosen = head.retriever.select(&Step {
                        step,
                        visible: set.visible(),
                        candidates: set.candidates.clone(),
                        budget: options.budget.positions(set.visible().len()),
                        q_pre: q_pre.slice(group),
                        q_rope: q_rope.slice(group),
                        kv: &head.kv,
                    });
                    let positions = set.merge(&chosen);
                    attention::decode(
                        q_rope.slice(group),
                        &head.kv.keys,
                        &head.kv.values,
                        &positions,
                        out,
                    );
                    chosen
                })
                .collect();
            let rows: usize = chosen.iter().map(|c| set.len() + c.len()).sum();
            read += rows as f64 / (set.visible().len() * heads.len()) as f64;
            if let Some(sink) = &mut self.trace {
                for (c, positions) in chosen.iter().enumerate() {
                    let line = json!({ "step": step, "layer": index, "kv_head": c, "positions": positions });
                    writeln!(sink, "{line}")
                        .map_err(|e| Error::failed(format!("cannot write the trace: {e}")))?;
                }
            }
            let attended = attended
                .to_shape((1, h * d))
                .map_err(|e| Error::failed(e.to_string()))?
                .to_owned();
            layer.finish(hidden.view_mut(), attended.view());
            self.decoder.check_finite(layer, hidden.view())?;
        }
        self.len += 1;
        self.steps += 1;
        self.read_fraction += read / self.layers.len() as f64;
        self.decoder.logits(hidden.row(0))
    }

    /// Whether the model ends a text with this token.
    pub fn is_stop_token(&self, id: u32) -> bool {
        self.decoder.config.eos_token_ids.contains(&id)
    }

    /// Share of K and V rows that decode steps read, static set included; 1 without steps.
    pub fn kv_read_fraction(&self) -> f64 {
        if self.steps == 0 {
            1.0
        } else {
            self.read_fraction / self.steps as f64
        }
    }

    /// Bytes of keys and values really held.
    pub fn kv_bytes(&self) -> usize {
        self.heads().map(|h| h.kv.bytes()).sum()
    }

    /// Bytes of the methods' indexes.
    pub fn index_bytes(&self) -> usize {
        self.heads().map(|h| h.retriever.state_bytes()).sum()
    }

    fn heads(&self) -> impl Iterator<Item = &Head> {
        self.layers.iter().flat_map(|(_, heads)| heads)
    }

    /// Flushes the trace.
    pub fn finish_trace(&mut self) -> Result<()> {
        match &mut self.trace {
            Some(sink) => sink
                .flush()
                .map_err(|e| Error::failed(format!("cannot write the trace: {e}"))),
            None => Ok(()),
        }
    }
}

/// The positions that every step attends, and what is left to choose from.
///
/// The first `sinks` and the last `window` positions, as far as the model's own sliding window
/// shows them.
#[derive(Clone, Debug, PartialEq)]
pub struct StaticSet {
    sinks: Range<usize>,
    /// Between the sinks and the window.
    pub candidates: Range<usize>,
    window: Range<usize>,
}

impl StaticSet {
    /// The static set of the token at position `t`.
    pub fn at(t: usize, model_window: Option<usize>, sinks: usize, window: usize) -> Self {
        let Range { start, end } = attention::visible(t, model_window);
        let window_start = end.saturating_sub(window).max(start);
        let sinks_end = sinks.clamp(start, window_start);
        Self {
            sinks: start..sinks_end,
            candidates: sinks_end..window_start,
            window: window_start..end,
        }
    }

    /// Everything that the model lets this token see.
    pub fn visible(&self) -> Range<usize> {
        self.sinks.start..self.window.end
    }

    /// Number of positions in the set.
    pub fn len(&self) -> usize {
        self.sinks.len() + self.window.len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The set with the chosen positions, ascending.
    fn merge(&self, chosen: &[u32]) -> Vec<u32> {
        debug_assert!(chosen.windows(2).all(|w| w[0] < w[1]));
        debug_assert!(chosen.iter().all(|p| self.candidates.contains(&(*p as usize))));
        let range = |r: &Range<usize>| r.start as u32..r.end as u32;
        range(&self.sinks)
            .chain(chosen.iter().copied())
            .chain(range(&self.window))
            .collect()
    }
}
