//! The trajectories of one block or conversation: the caches along the full trajectory, and along each variant's own.

use ndarray::{Array1, Array2, Axis};
use rayon::prelude::*;

use super::super::DecodeOptions;
use super::super::head::{Chooser, Head, Stepped, Token, cache_prompt, decode_head, prefill_heads, prompt};
use super::Variant;
use super::judge::{Judge, Metrics};
use crate::compute::attention;
use crate::error::Result;
use crate::kv::StaticSet;
use crate::kv::{KvHead, KvType};
use crate::method::Reads;
use crate::model::ModelConfig;
use crate::model::forward::{Forward, PromptRows, Rows};

/// The full trajectory, and one trajectory per variant.
pub(super) struct Trajectories {
    /// Per layer and KV head.
    pub heads: Vec<Vec<HeadTrajectories>>,
    /// Number of positions fed.
    pub len: usize,
    /// How many of these positions were fed in decode steps.
    pub steps: usize,
    /// Whether shadows choose along the full trajectory.
    judged: bool,
    /// Per variant: the first variant of the same method.
    leaders: Vec<usize>,
}

/// One KV head along every trajectory.
pub(super) struct HeadTrajectories {
    /// Cache of the full trajectory, in f32.
    exact: KvHead,
    /// Caches of the full trajectory in the other formats of the variants' caches; empty once no variant chooses along it.
    stored: Vec<KvHead>,
    /// Per variant: which of `stored` has its formats; `None` for f32.
    held: Vec<Option<usize>>,
    /// Per variant: its index along the full trajectory. Empty unless choices are judged.
    shadows: Vec<Chooser>,
    /// Per variant: cache and index along its own trajectory; empty before the first prompt.
    pub own: Vec<Head>,
}

/// The results of one KV head in one decode step.
pub(super) struct HeadStep {
    /// Per variant: its metrics, if choices are judged.
    pub metrics: Vec<Metrics>,
    /// Per variant: its choice along its own trajectory, and what it read.
    pub chosen: Vec<Stepped>,
}

/// What the KV heads of a layer have in common in one decode step.
pub(super) struct StepInput<'a> {
    /// The rows of the token, one per trajectory.
    pub rows: &'a Rows,
    /// Query heads per KV head.
    pub group: usize,
    /// Index of the step.
    pub step: usize,
    pub set: &'a StaticSet,
    /// The options of every variant; the budget is that of its chooser.
    pub options: &'a DecodeOptions,
}

impl Trajectories {
    /// Makes empty caches with room for `capacity` positions.
    pub fn new(
        c: &ModelConfig,
        variants: &[Variant],
        options: &DecodeOptions,
        capacity: usize,
        judged: bool,
    ) -> Self {
        let new = |layer, head| HeadTrajectories::new(c, variants, options, capacity, [layer, head]);
        let layer = |layer: usize| (0..c.n_kv_heads).map(|head| new(layer, head)).collect();
        Self {
            leaders: leaders(variants),
            heads: (0..c.n_layers()).map(layer).collect(),
            len: 0,
            steps: 0,
            judged,
        }
    }

    /// Runs a prompt with exact attention along every trajectory. The first prompt is the same for all trajectories; in
    /// a later prompt, each trajectory attends its own cache. Returns the logits after the prompt, `[vocab]` for each
    /// trajectory, the full trajectory first; `done` is called with numbers of tokens that have passed a layer.
    pub fn prompt(
        &mut self,
        forward: &dyn Forward,
        ids: &[u32],
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Array1<f32>>> {
        let windows = forward.decoder().config.windows();
        let (heads, leaders) = (&mut self.heads, &self.leaders);
        let mut cache = |layer: usize, rows| prefill_full(&mut heads[layer], rows, windows[layer], leaders);
        let full = forward.prompt(ids, self.len, &mut cache, done)?;
        let variants = self.heads[0][0].shadows.len().max(self.heads[0][0].own.len());
        let mut logits = vec![full];
        if self.len == 0 {
            let judged = self.judged;
            self.heads.iter_mut().flatten().for_each(|h| h.branch(judged));
            logits = vec![logits[0].clone(); variants + 1];
        } else {
            for v in 0..variants {
                let heads = &mut self.heads;
                let mut cache = |layer: usize, rows| {
                    let own = heads[layer].iter_mut().map(|h| &mut h.own[v]);
                    prefill_heads(own.collect(), rows, windows[layer])
                };
                logits.push(forward.prompt(ids, self.len, &mut cache, done)?);
            }
        }
        self.len += ids.len();
        Ok(logits)
    }
}

/// Adds a prompt's rows to one layer of the full trajectory; returns what the prompt attends.
fn prefill_full(
    heads: &mut [HeadTrajectories],
    rows: PromptRows,
    model_window: Option<usize>,
    leaders: &[usize],
) -> PromptRows {
    let exact: Vec<&KvHead> = heads.iter().map(|h| &h.exact).collect();
    // Methods see earlier positions as the variants' caches round them.
    let formats = heads.iter().map(|h| h.stored.len()).max().unwrap_or(0);
    let formats = if exact[0].is_empty() { 0 } else { formats };
    let rounded = (0..formats).map(|i| {
        let stored = heads.iter().map(|h| h.stored.get(i).unwrap_or(&h.exact));
        rows.clone().join(&stored.collect::<Vec<_>>())
    });
    let rounded: Vec<PromptRows> = rounded.collect();
    let rows = rows.join(&exact);
    heads.par_iter_mut().enumerate().for_each(|(c, head)| {
        head.prefill(&rows, &rounded, c, model_window, leaders);
    });
    rows
}

/// Returns, for each variant, the first variant of the same method and cache.
pub(super) fn leaders(variants: &[Variant]) -> Vec<usize> {
    let same = |a: &Variant, b: &Variant| (a.number, a.kv) == (b.number, b.kv);
    let leader = |of: &Variant| variants.iter().position(|v| same(v, of));
    variants.iter().filter_map(leader).collect()
}

impl HeadTrajectories {
    /// Makes empty caches of a layer's KV head with room for `capacity` positions.
    pub fn new(
        c: &ModelConfig,
        variants: &[Variant],
        options: &DecodeOptions,
        capacity: usize,
        [layer, kv_head]: [usize; 2],
    ) -> Self {
        let kv = |kind| options.cache(kind, c.head_dim, capacity, [layer, kv_head]);
        // Variants without formats of their own read the same rows: in those of the head plan, if there is one.
        let planned = variants
            .iter()
            .find_map(|variant| variant.method.own(layer, kv_head));
        let usual = planned.map_or(options.kv, |(_, kv)| kv);
        let state = |variant: &Variant| {
            let options = DecodeOptions {
                limits: options.limits.with_budget(variant.budget),
                kv: variant.kv.unwrap_or(usual),
                ..options.clone()
            };
            Chooser::new(variant.method, options.place(c, variant.method, layer, kv_head))
        };
        let mut formats = Vec::new();
        let held = variants.iter().map(|variant| {
            let own = variant.kv.unwrap_or(usual);
            if own != KvType::F32 && !formats.contains(&own) {
                formats.push(own);
            }
            formats.iter().position(|format| *format == own)
        });
        Self {
            held: held.collect(),
            exact: kv(KvType::F32),
            stored: formats.into_iter().map(kv).collect(),
            shadows: variants.iter().map(state).collect(),
            own: Vec::new(),
        }
    }

    /// Adds the prompt of KV head `c` to the full trajectory, from joined rows; in `rounded`, earlier rows are as each of the
    /// stored caches rounds them (empty for a first prompt). After the first prompt, a variant copies the index of the first
    /// variant of its method (its leader), if indexes do not depend on the budget.
    pub fn prefill(
        &mut self,
        exact: &PromptRows,
        rounded: &[PromptRows],
        c: usize,
        model_window: Option<usize>,
        leaders: &[usize],
    ) {
        let is_first = self.exact.is_empty();
        cache_prompt(exact, c, model_window, &mut self.exact);
        let seen = |i: usize| rounded.get(i).unwrap_or(exact);
        for (i, stored) in self.stored.iter_mut().enumerate() {
            cache_prompt(seen(i), c, model_window, stored);
        }
        let (held, stored, own) = (&self.held, &self.stored, &self.exact);
        // What variant `v` sees of the prompt, and its cache.
        let of = |v: usize| held[v].map_or((exact, own), |i| (seen(i), &stored[i]));
        // Without judging there is no shadow after the first prompt.
        let copies =
            |v: usize, shadow: &Chooser| is_first && leaders[v] != v && !shadow.retriever.depends_on_budget();
        let shadows = self.shadows.par_iter_mut().enumerate();
        shadows.for_each(|(v, shadow)| {
            if !copies(v, shadow) {
                let (seen, kv) = of(v);
                shadow.retriever.prefill(&prompt(seen, c, kv));
                shadow.restart_tail(kv, model_window);
            }
        });
        for v in 0..self.shadows.len() {
            let (before, rest) = self.shadows.split_at_mut(v);
            let shadow = &mut rest[0];
            if copies(v, shadow) {
                shadow.retriever = before[leaders[v]].retriever.fork();
                shadow.restart_tail(of(v).1, model_window);
            }
        }
    }

    /// Starts each variant's own trajectory after the first prompt; drops the shadows if choices are not judged.
    pub fn branch(&mut self, judged: bool) {
        let (stored, exact) = (&mut self.stored, &mut self.exact);
        let forks = self.shadows.iter().zip(&self.held).map(|(shadow, held)| Head {
            kv: held.map_or(&mut *exact, |i| &mut stored[i]).fork(),
            chooser: shadow.fork(),
        });
        self.own = forks.collect();
        if !judged {
            self.shadows.clear();
            self.stored.clear();
        }
    }

    /// Runs one step of KV head `c` along every trajectory; writes the attention's output, `[trajectories,r,d]`.
    pub fn step(&mut self, input: &StepInput, c: usize, mut out: ndarray::ArrayViewMut3<f32>) -> HeadStep {
        let token = Token::from_rows(input.rows, c, input.group, 0);
        token.cache(&mut self.exact);
        self.stored.iter_mut().for_each(|stored| token.cache(stored));
        let mut full = out.index_axis_mut(Axis(0), 0);
        let visible: Vec<u32> = input.set.visible().map(|p| p as u32).collect();
        let (keys, values) = (self.exact.keys(), self.exact.values());
        let q = token.q.rope.view();
        let mut metrics = Vec::new();
        if self.shadows.is_empty() {
            attention::decode(q, keys, values, &visible, full);
        } else {
            let (weights, _) = attention::decode_with_weights(q, keys, values, &visible, full.view_mut());
            let full = full.to_owned();
            let judge = Judge::new(input.set, weights.view(), full.view());
            let (held, stored, exact) = (&self.held, &self.stored, &self.exact);
            let measured = self.shadows.par_iter_mut().zip(held).map(|(shadow, held)| {
                let kv = held.map_or(exact, |i| &stored[i]);
                let step = token.step(input.step, input.set, shadow.budget, kv);
                let mut output = Array2::zeros(full.dim());
                let reads = &mut Reads::new(input.options.granule);
                let choice = decode_head(&token, &step, input.set, shadow, output.view_mut(), reads);
                judge.measure(&choice, step.budget, output.view_mut())
            });
            metrics = measured.collect();
        }
        let (_, mut outputs) = out.view_mut().split_at(Axis(0), 1);
        let own = self.own.par_iter_mut().zip(outputs.axis_iter_mut(Axis(0)));
        let chosen = own.enumerate().map(|(v, (head, output))| {
            let token = Token::from_rows(input.rows, c, input.group, v + 1);
            head.step(&token, input.step, input.set, input.options.granule, output)
        });
        let chosen = chosen.collect();
        HeadStep { metrics, chosen }
    }
}
