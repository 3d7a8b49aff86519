//! Inference: exact prefill, then decode steps that attend a static set and what a method selects.

pub mod budget;
pub mod kv;
pub mod packed;
pub mod sample;

use std::io::Write;
use std::ops::Range;

use ndarray::{Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut2, Axis, s};
use rayon::prelude::*;
use serde_json::json;

use crate::compute::attention;
use crate::error::{Error, Result};
use crate::method::{Choice, Method, Place, Prompt, Retriever, Step};
use crate::model::decoder::{rotate, rotated};
use crate::model::{Decoder, Layer};
use budget::Budget;
use kv::{KvHead, KvType};
use packed::Center;

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
    /// What the 2-bit cache takes signs around.
    pub center: Center,
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
    /// Sums over decode steps of the mean over layers.
    totals: Totals,
    trace: Option<Box<dyn Write + 'a>>,
}

struct Head {
    kv: KvHead,
    retriever: Box<dyn Retriever>,
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
    /// An empty session with room for `capacity` positions.
    pub fn new(decoder: &'a Decoder, method: &Method, options: Options, capacity: usize) -> Result<Self> {
        let c = &decoder.config;
        let layers = (0..c.n_layers)
            .map(|i| {
                let head = |kv_head| Head {
                    kv: KvHead::new(options.kv, c.head_dim, capacity, options.center),
                    retriever: method.head(&Place {
                        layer: i,
                        kv_head,
                        group: c.n_heads / c.n_kv_heads,
                        head_dim: c.head_dim,
                        model_window: c.windows[i],
                        sinks: options.sinks,
                        window: options.window,
                        budget: options.budget,
                        kv: options.kv,
                    }),
                };
                let heads = (0..c.n_kv_heads).map(head).collect();
                Ok((decoder.layer(i)?, heads))
            })
            .collect::<Result<_>>()?;
        Ok(Self {
            decoder,
            options,
            layers,
            len: 0,
            steps: 0,
            totals: Totals::default(),
            trace: None,
        })
    }

    /// Writes one JSON line per step, layer and KV head to `sink`.
    pub fn trace(&mut self, sink: Box<dyn Write + 'a>) {
        self.trace = Some(sink);
    }

    /// Runs a prompt with exact attention: the first, or that of a later turn, which continues the
    /// cache. Returns the logits after its last token: `[vocab]`.
    ///
    /// # Errors
    /// An empty prompt, an id outside the vocabulary, activations that are not finite.
    pub fn prefill(&mut self, ids: &[u32]) -> Result<Array1<f32>> {
        if ids.is_empty() {
            return Err(Error::failed("the prompt has no tokens"));
        }
        let (first, m) = (self.len, ids.len());
        let mut hidden = self.decoder.embed(ids)?;
        let table = self.decoder.rope.table(first..first + m);
        let n_layers = self.layers.len();
        for (index, (layer, heads)) in self.layers.iter_mut().enumerate() {
            crate::interrupt::check()?;
            let mut states = layer.project(hidden.view());
            self.decoder.check_states(layer, &states)?;
            let k_rope = rotated(&states.k_pre, &table, 0..m);
            rotate(&mut states.q_pre, &table, 0..m);
            let q_rope = states.q_pre;
            let keys = with_cached(k_rope, heads, first, KvHead::keys);
            let values = with_cached(states.v, heads, first, KvHead::values);
            let r = q_rope.len_of(Axis(0)) / heads.len();
            heads.par_iter_mut().enumerate().for_each(|(c, head)| {
                let queries = q_rope.slice(s![c * r..(c + 1) * r, .., ..]);
                let both = [keys.index_axis(Axis(0), c), values.index_axis(Axis(0), c)];
                head.prefill(
                    first,
                    states.k_pre.index_axis(Axis(0), c),
                    queries,
                    both,
                    layer.window,
                );
            });
            // Of the last layer, only the last position is read.
            let skipped = if index + 1 == n_layers { m - 1 } else { 0 };
            let mut attended = Array2::zeros((m - skipped, q_rope.len() / m));
            attention::causal(
                q_rope.slice(s![.., skipped.., ..]),
                keys.view(),
                values.view(),
                first + skipped,
                layer.window,
                attended.view_mut(),
            );
            drop((q_rope, keys, values));
            let mut rows = hidden.slice_mut(s![skipped.., ..]);
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
        let mut totals = Totals::default();
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
            let chosen: Vec<Choice> = heads
                .par_iter_mut()
                .zip(attended.axis_chunks_iter_mut(Axis(0), r))
                .enumerate()
                .map(|(c, (head, out))| {
                    let (k_pre, key) = (states.k_pre.index_axis(Axis(0), c), k_rope.index_axis(Axis(0), c));
                    head.kv.extend(key, states.v.index_axis(Axis(0), c));
                    head.retriever.append(k_pre, key);
                    let group = s![c * r..(c + 1) * r, ..];
                    let step = Step {
                        step,
                        visible: set.visible(),
                        candidates: set.candidates.clone(),
                        budget: options.budget.positions(set.visible().len()),
                        q_pre: q_pre.slice(group),
                        q_rope: q_rope.slice(group),
                        kv: &head.kv,
                    };
                    let chosen = head.retriever.select(&step);
                    attend(&step, &set, &chosen, head.retriever.as_mut(), out);
                    chosen
                })
                .collect();
            totals.add(&chosen, &set, r);
            if let Some(sink) = &mut self.trace {
                write_trace(sink, step, index, &chosen)?;
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
        self.totals.add_step(&totals, self.layers.len());
        self.decoder.logits(hidden.row(0))
    }

    /// Positions in the cache.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing was fed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
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
            self.totals.read / self.steps as f64
        }
    }

    /// Share of all products of a query with a visible key that the method took exactly in order to
    /// choose, mean over steps and layers; 0 without steps.
    pub fn exact_dot_fraction(&self) -> f64 {
        self.totals.products / self.steps.max(1) as f64
    }

    /// Share of query heads that bypassed their selection, mean over steps and layers.
    pub fn bypass_fraction(&self) -> f64 {
        self.totals.bypassed / self.steps.max(1) as f64
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

/// Writes the lines of one step and layer.
fn write_trace(sink: &mut dyn Write, step: usize, layer: usize, chosen: &[Choice]) -> Result<()> {
    for (c, choice) in chosen.iter().enumerate() {
        let line = json!({
            "step": step, "layer": layer, "kv_head": c, "positions": choice.positions,
        });
        writeln!(sink, "{line}").map_err(|e| Error::failed(format!("cannot write the trace: {e}")))?;
    }
    Ok(())
}

impl Head {
    /// Takes in the rows of a prompt that starts at `first`: k_pre `[m,d]`, rotated queries `[r,m,d]`,
    /// keys and values of every position `[first + m, d]`.
    fn prefill(
        &mut self,
        first: usize,
        k_pre: ArrayView2<f32>,
        queries: ArrayView3<f32>,
        [keys, values]: [ArrayView2<f32>; 2],
        model_window: Option<usize>,
    ) {
        let last = queries.index_axis(Axis(1), queries.len_of(Axis(1)) - 1);
        let query = last.mean_axis(Axis(0)).unwrap_or_default();
        self.kv.prompt(
            keys.slice(s![first.., ..]),
            values.slice(s![first.., ..]),
            &query.to_vec(),
            attention::visible(keys.nrows() - 1, model_window),
        );
        self.retriever.prefill(&Prompt {
            first,
            k_pre: k_pre.reborrow(),
            q_rope: queries.reborrow(),
            keys: keys.reborrow(),
            values: values.reborrow(),
            kv: &self.kv,
        });
    }
}

/// The rows of every position, `[g, first + m, d]`: earlier ones as the caches give them, then `new`,
/// `[g,m,d]`.
fn with_cached(
    new: Array3<f32>,
    heads: &[Head],
    first: usize,
    rows: fn(&KvHead) -> &dyn attention::Rows,
) -> Array3<f32> {
    if first == 0 {
        return new;
    }
    let (g, m, d) = new.dim();
    let mut all = Array3::zeros((g, first + m, d));
    all.slice_mut(s![.., first.., ..]).assign(&new);
    let mut scratch = vec![0.0; d];
    for (mut all, head) in all.outer_iter_mut().zip(heads) {
        let cached = rows(&head.kv);
        for (p, mut row) in all.rows_mut().into_iter().take(first).enumerate() {
            row.assign(&ArrayView1::from(cached.row(p, &mut scratch)));
        }
    }
    all
}

/// Attends the static set and what was chosen, out `[r,d]`; bypassed heads attend the sinks alone,
/// joined with the result that their method gave.
fn attend(
    step: &Step,
    set: &StaticSet,
    choice: &Choice,
    retriever: &mut dyn Retriever,
    mut out: ArrayViewMut2<f32>,
) {
    let (keys, values) = (step.kv.keys(), step.kv.values());
    let positions = set.merge(&choice.positions);
    let own = |a: usize| choice.bypassed.get(a).and_then(Option::as_ref);
    let (r, d) = step.q_rope.dim();
    let attending: Vec<usize> = (0..r).filter(|a| own(*a).is_none()).collect();
    if attending.len() == r {
        let decoded = attention::decode(step.q_rope, keys, values, &positions, out);
        return retriever.observe(step, &positions, decoded.weights.view());
    }
    let mut weights = Array2::zeros((r, positions.len()));
    let mut rows = Array2::zeros((attending.len(), d));
    let queries = step.q_rope.select(Axis(0), &attending);
    let decoded = attention::decode(queries.view(), keys, values, &positions, rows.view_mut());
    for (i, &a) in attending.iter().enumerate() {
        out.row_mut(a).assign(&rows.row(i));
        weights.row_mut(a).assign(&decoded.weights.row(i));
    }
    let sinks: Vec<u32> = set.sinks.clone().map(|p| p as u32).collect();
    for a in 0..r {
        if let Some(rest) = own(a) {
            let mut row = out.slice_mut(s![a..a + 1, ..]);
            let query = step.q_rope.slice(s![a..a + 1, ..]);
            let decoded = attention::decode(query, keys, values, &sinks, row.view_mut());
            let mut joined = row.row(0).to_vec();
            attention::merge(&mut joined, decoded.lse[0], rest);
            row.row_mut(0).assign(&ArrayView1::from(&joined));
        }
    }
    retriever.observe(step, &positions, weights.view());
}

impl Totals {
    /// Adds what the heads of one layer did.
    fn add(&mut self, chosen: &[Choice], set: &StaticSet, group: usize) {
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
