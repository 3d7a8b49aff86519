//! Inference: exact prefill, then decode steps that attend a static set and what a method selects.

pub mod budget;
pub mod eval;
pub mod kv;
pub mod lines;
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
use crate::model::forward::{Context, CpuForward, Forward, Rows};
use crate::model::{Decoder, ModelConfig};
use budget::Budget;
use kv::{KvHead, KvType};
use packed::Layout;
use sample::Sampler;

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

/// One KV head along one trajectory.
struct Head {
    kv: KvHead,
    retriever: Box<dyn Retriever>,
}

impl Head {
    /// Feeds one token; out `[r,d]`.
    fn step(
        &mut self,
        token: &Token,
        step: usize,
        set: &StaticSet,
        budget: Budget,
        out: ArrayViewMut2<f32>,
    ) -> Choice {
        token.cache(&mut self.kv);
        let step = token.step(step, set, budget, &self.kv);
        decode_head(token, &step, set, self.retriever.as_mut(), out)
    }
}

/// Takes a prompt's rows of one layer into its heads; gives back what the prompt attends.
fn prefill_heads(mut heads: Vec<&mut Head>, rows: Rows, model_window: Option<usize>) -> Context {
    let caches: Vec<&KvHead> = heads.iter().map(|head| &head.kv).collect();
    let context = Context::join(rows.q_rope, rows.k_rope, rows.v, &caches);
    heads.par_iter_mut().enumerate().for_each(|(c, head)| {
        let prompt = PromptRows::of(&rows.k_pre, &context, c, model_window);
        prompt.cache(&mut head.kv);
        head.retriever.prefill(&prompt.view(&head.kv));
    });
    context
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

/// The rows of a prompt for one KV head, before its cache has them.
struct PromptRows<'a> {
    first: usize,
    /// `[m,d]`.
    k_pre: ArrayView2<'a, f32>,
    /// `[r,m,d]`.
    q_rope: ArrayView3<'a, f32>,
    /// `[first + m, d]`.
    keys: ArrayView2<'a, f32>,
    /// `[first + m, d]`.
    values: ArrayView2<'a, f32>,
    model_window: Option<usize>,
}

impl<'a> PromptRows<'a> {
    /// KV head `c` of a layer's new keys, `[g,m,d]`, and of what the prompt attends.
    fn of(k_pre: &'a Array3<f32>, context: &'a Context, c: usize, model_window: Option<usize>) -> Self {
        let (g, m, _) = k_pre.dim();
        let r = context.q_rope.len_of(Axis(0)) / g;
        Self {
            first: context.keys.len_of(Axis(1)) - m,
            k_pre: k_pre.index_axis(Axis(0), c),
            q_rope: context.q_rope.slice(s![c * r..(c + 1) * r, .., ..]),
            keys: context.keys.index_axis(Axis(0), c),
            values: context.values.index_axis(Axis(0), c),
            model_window,
        }
    }

    /// Puts the new rows into a cache.
    fn cache(&self, kv: &mut KvHead) {
        let last = self.q_rope.index_axis(Axis(1), self.q_rope.len_of(Axis(1)) - 1);
        let query = last.mean_axis(Axis(0)).unwrap_or_default();
        kv.prompt(
            self.keys.view(),
            self.values.view(),
            &query.to_vec(),
            attention::visible(self.keys.nrows() - 1, self.model_window),
        );
    }

    /// What a method sees of them.
    fn view<'b>(&'b self, kv: &'b KvHead) -> Prompt<'b> {
        Prompt {
            first: self.first,
            k_pre: self.k_pre.view(),
            q_rope: self.q_rope.view(),
            keys: self.keys.view(),
            values: self.values.view(),
            kv,
        }
    }
}

/// One token's rows of one KV head: `[1,d]` and `[r,d]`.
struct Token<'a> {
    k_pre: ArrayView2<'a, f32>,
    k_rope: ArrayView2<'a, f32>,
    v: ArrayView2<'a, f32>,
    q_pre: ArrayView2<'a, f32>,
    q_rope: ArrayView2<'a, f32>,
}

impl<'a> Token<'a> {
    /// KV head `c` with `r` query heads, of one trajectory's rows.
    fn of(rows: &'a Rows, c: usize, r: usize, trajectory: usize) -> Self {
        let own = s![c, trajectory..trajectory + 1, ..];
        let group = s![c * r..(c + 1) * r, trajectory, ..];
        Self {
            k_pre: rows.k_pre.slice(own),
            k_rope: rows.k_rope.slice(own),
            v: rows.v.slice(own),
            q_pre: rows.q_pre.slice(group),
            q_rope: rows.q_rope.slice(group),
        }
    }

    /// Puts key and value into a cache.
    fn cache(&self, kv: &mut KvHead) {
        kv.extend(self.k_rope.view(), self.v.view());
    }

    /// The step of a method, on a cache that holds the token.
    fn step<'b>(&'b self, step: usize, set: &StaticSet, budget: Budget, kv: &'b KvHead) -> Step<'b> {
        Step {
            step,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: budget.positions(set.visible().len()),
            q_pre: self.q_pre.view(),
            q_rope: self.q_rope.view(),
            kv,
        }
    }
}

/// One decode step of one KV head: the method takes in the key, chooses, and sees what was attended.
fn decode_head(
    token: &Token,
    step: &Step,
    set: &StaticSet,
    retriever: &mut dyn Retriever,
    out: ArrayViewMut2<f32>,
) -> Choice {
    retriever.append(token.k_pre.view(), token.k_rope.view());
    let choice = retriever.select(step);
    attend(step, set, &choice, retriever, out);
    choice
}

impl Context {
    /// The rows of every position: earlier ones as the caches give them, one per KV head, then the new
    /// keys and values, `[g,m,d]`.
    fn join(q_rope: Array3<f32>, keys: Array3<f32>, values: Array3<f32>, caches: &[&KvHead]) -> Self {
        Self {
            q_rope,
            keys: with_cached(keys, caches, KvHead::keys),
            values: with_cached(values, caches, KvHead::values),
        }
    }
}

/// The rows of every position, `[g, first + m, d]`: earlier ones as the caches give them, then `new`,
/// `[g,m,d]`.
fn with_cached(
    new: Array3<f32>,
    caches: &[&KvHead],
    rows: fn(&KvHead) -> &dyn attention::Rows,
) -> Array3<f32> {
    let first = caches.first().map_or(0, |kv| kv.len());
    if first == 0 {
        return new;
    }
    let (g, m, d) = new.dim();
    let mut all = Array3::zeros((g, first + m, d));
    all.slice_mut(s![.., first.., ..]).assign(&new);
    let pairs = all.axis_iter_mut(Axis(0)).into_par_iter().zip(caches);
    pairs.for_each(|(mut all, kv)| {
        let cached = rows(kv);
        let mut scratch = vec![0.0; d];
        for (p, mut row) in all.rows_mut().into_iter().take(first).enumerate() {
            row.assign(&ArrayView1::from(cached.row(p, &mut scratch)));
        }
    });
    all
}

/// Attends the static set and what was chosen, out `[r,d]`; bypassed heads attend the sinks alone,
/// joined with the result that their method gave.
pub(crate) fn attend(
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
    if attending.len() == r && !retriever.observes(step) {
        attention::decode(step.q_rope, keys, values, &positions, out);
        return;
    }
    if attending.len() == r {
        let (weights, _) = attention::decode_with_weights(step.q_rope, keys, values, &positions, out);
        return retriever.observe(step, &positions, weights.view());
    }
    let mut weights = Array2::zeros((r, positions.len()));
    let mut rows = Array2::zeros((attending.len(), d));
    let queries = step.q_rope.select(Axis(0), &attending);
    // Where no head attends them, no row is read.
    let read = if attending.is_empty() { &[] } else { &positions[..] };
    let (seen, _) = attention::decode_with_weights(queries.view(), keys, values, read, rows.view_mut());
    for (i, &a) in attending.iter().enumerate() {
        out.row_mut(a).assign(&rows.row(i));
        weights.row_mut(a).assign(&seen.row(i));
    }
    let sinks: Vec<u32> = set.sinks.clone().map(|p| p as u32).collect();
    for a in 0..r {
        if let Some(rest) = own(a) {
            let mut row = out.slice_mut(s![a..a + 1, ..]);
            let query = step.q_rope.slice(s![a..a + 1, ..]);
            let lse = attention::decode(query, keys, values, &sinks, row.view_mut());
            let mut joined = row.row(0).to_vec();
            attention::merge(&mut joined, lse[0], rest);
            row.row_mut(0).assign(&ArrayView1::from(&joined));
        }
    }
    retriever.observe(step, &positions, weights.view());
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
    pub fn merge(&self, chosen: &[u32]) -> Vec<u32> {
        debug_assert!(chosen.windows(2).all(|w| w[0] < w[1]));
        debug_assert!(chosen.iter().all(|p| self.candidates.contains(&(*p as usize))));
        let range = |r: &Range<usize>| r.start as u32..r.end as u32;
        range(&self.sinks)
            .chain(chosen.iter().copied())
            .chain(range(&self.window))
            .collect()
    }
}
