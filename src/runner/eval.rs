//! What a method loses against full attention: several methods and budgets beside one exact run.
//!
//! A block is prefilled once, exactly. Its last tokens are then fed one by one along several
//! trajectories at the same time: the first attends everything, each of the others what its method
//! chooses. Beside those, every method has a shadow that chooses along the full trajectory, where its
//! choice can be held against the true probabilities.

use std::ops::Range;

use ndarray::{Array1, Array2, ArrayView1, ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use super::budget::Budget;
use super::kv::{KvHead, KvType};
use super::sample::argmax;
use super::trunk::{Context, Rows, Trunk};
use super::{Options, PromptRows, StaticSet, Token, Totals, decode_head};
use crate::compute::attention;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::method::{Choice, Method, Retriever};
use crate::model::Decoder;

/// A method at a budget.
pub struct Variant<'a> {
    /// The method.
    pub method: &'a Method,
    /// What it may choose.
    pub budget: Budget,
}

/// Means of the metrics of a choice; each is a sum until it is divided by `count`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Scores {
    /// Share of the oracle's choice at the same budget.
    pub recall: f64,
    /// True probability on what is attended, static set included, mean over the query group.
    pub mass: f64,
    /// Relative L2 error of the group's attention output.
    pub output_error: f64,
    /// Steps.
    pub count: usize,
}

impl Scores {
    fn add(&mut self, other: &Self) {
        self.recall += other.recall;
        self.mass += other.mass;
        self.output_error += other.output_error;
        self.count += other.count;
    }

    /// The means; zero without a step.
    pub fn mean(&self) -> Self {
        let n = self.count.max(1) as f64;
        Self {
            recall: self.recall / n,
            mass: self.mass / n,
            output_error: self.output_error / n,
            count: self.count,
        }
    }
}

/// What all blocks said of one variant.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Per layer and KV head.
    pub heads: Vec<Vec<Scores>>,
    /// Sum over steps of KL(full || variant) of the next token, in nats.
    pub kl: f64,
    /// Steps.
    pub steps: usize,
    /// Needles asked and found.
    pub needles: (usize, usize),
    totals: Totals,
    /// Sums over blocks or needles.
    index_bytes: f64,
    positions: f64,
}

impl Report {
    /// The metrics over all layers and heads.
    pub fn scores(&self) -> Scores {
        let mut all = Scores::default();
        self.heads.iter().flatten().for_each(|s| all.add(s));
        all.mean()
    }

    /// Mean KL(full || variant) of the next token, in nats.
    pub fn kl(&self) -> f64 {
        self.kl / self.steps.max(1) as f64
    }

    /// See [`super::Session::kv_read_fraction`].
    pub fn kv_read_fraction(&self) -> f64 {
        self.totals.read / self.steps.max(1) as f64
    }

    /// See [`super::Session::exact_dot_fraction`].
    pub fn exact_dot_fraction(&self) -> f64 {
        self.totals.products / self.steps.max(1) as f64
    }

    /// See [`super::Session::bypass_fraction`].
    pub fn bypass_fraction(&self) -> f64 {
        self.totals.bypassed / self.steps.max(1) as f64
    }

    /// Bits of the index per position and KV head.
    pub fn index_bits_per_token(&self) -> f64 {
        8.0 * self.index_bytes / self.positions.max(1.0)
    }
}

/// One KV head under evaluation.
struct Head {
    /// The full trajectory, in f32.
    exact: KvHead,
    /// The full trajectory as the variants' caches hold it, where that is not f32.
    stored: Option<KvHead>,
    /// Per variant: the state that chooses along the full trajectory.
    shadows: Vec<Box<dyn Retriever>>,
    /// Per variant: cache and state along its own trajectory.
    own: Vec<(KvHead, Box<dyn Retriever>)>,
}

/// What one head gives for one step.
struct HeadStep {
    scores: Vec<Scores>,
    chosen: Vec<Choice>,
}

/// The evaluation of variants on one model.
pub struct Panel<'a> {
    trunk: Trunk<'a>,
    variants: Vec<Variant<'a>>,
    options: Options,
    /// Per variant.
    pub reports: Vec<Report>,
}

impl<'a> Panel<'a> {
    /// A panel without results yet; the budget of `options` is not used.
    pub fn new(decoder: &'a Decoder, variants: Vec<Variant<'a>>, options: Options) -> Result<Self> {
        let c = &decoder.config;
        let empty = Report {
            heads: vec![vec![Scores::default(); c.n_kv_heads]; c.n_layers],
            ..Report::default()
        };
        Ok(Self {
            trunk: Trunk::new(decoder)?,
            reports: vec![empty; variants.len()],
            variants,
            options,
        })
    }

    /// Takes in a block: all but its last `decode` tokens (at least one) are the prompt, those are fed one
    /// by one; `done` is called after each.
    ///
    /// # Errors
    /// A block of less than two tokens; activations that are not finite; an interrupt.
    pub fn block(&mut self, ids: &[u32], decode: usize, done: &mut dyn FnMut()) -> Result<()> {
        if ids.len() < 2 {
            return Err(Error::failed("a block of one token has nothing to decode"));
        }
        let first = ids.len() - decode.clamp(1, ids.len() - 1);
        let (mut heads, _) = self.prefill(&ids[..first])?;
        let all = self.variants.len() + 1;
        for (step, id) in ids[first..].iter().enumerate() {
            interrupt::check()?;
            let hidden = self.step(&mut heads, &vec![*id; all], first + step, step, true)?;
            let full = self.trunk.decoder.logits(hidden.row(0))?;
            for (v, report) in self.reports.iter_mut().enumerate() {
                let logits = self.trunk.decoder.logits(hidden.row(v + 1))?;
                report.kl += divergence(full.view(), logits.view());
            }
            done();
        }
        self.close(&heads, ids.len());
        Ok(())
    }

    /// Takes in a needle: the prompt is prefilled, then each variant goes on greedily for as long as
    /// `found` says `None`; the full trajectory's answer is given back.
    pub fn needle(
        &mut self,
        prompt: &[u32],
        most: usize,
        found: &dyn Fn(&[u32]) -> Result<Option<bool>>,
    ) -> Result<bool> {
        let (mut heads, logits) = self.prefill(prompt)?;
        let all = self.variants.len() + 1;
        let first = argmax(logits.as_slice().unwrap_or(&[])) as u32;
        let mut said = vec![vec![first]; all];
        let mut verdicts = vec![None; all];
        for step in 0..most.max(1) {
            interrupt::check()?;
            for (verdict, said) in verdicts.iter_mut().zip(&said) {
                if verdict.is_none() {
                    *verdict = found(said)?;
                }
            }
            if step + 1 >= most.max(1) || verdicts.iter().all(Option::is_some) {
                break;
            }
            let ids: Vec<u32> = said.iter().filter_map(|s| s.last().copied()).collect();
            let hidden = self.step(&mut heads, &ids, prompt.len() + step, step, false)?;
            for (said, hidden) in said.iter_mut().zip(hidden.rows()) {
                let logits = self.trunk.decoder.logits(hidden)?;
                said.push(argmax(logits.as_slice().unwrap_or(&[])) as u32);
            }
        }
        for (report, verdict) in self.reports.iter_mut().zip(&verdicts[1..]) {
            report.needles.0 += 1;
            report.needles.1 += usize::from(*verdict == Some(true));
        }
        self.close(&heads, prompt.len());
        Ok(verdicts[0] == Some(true))
    }

    fn prefill(&self, ids: &[u32]) -> Result<(Vec<Vec<Head>>, Array1<f32>)> {
        let c = &self.trunk.decoder.config;
        let new = |layer: usize, kv_head: usize| {
            let kv = |kind| KvHead::new(kind, c.head_dim, ids.len(), self.options.packed);
            let state = |variant: &Variant| {
                let options = Options {
                    budget: variant.budget,
                    ..self.options
                };
                variant.method.head(&options.place(c, layer, kv_head))
            };
            Head {
                exact: kv(KvType::F32),
                stored: (self.options.kv != KvType::F32).then(|| kv(self.options.kv)),
                shadows: self.variants.iter().map(state).collect(),
                own: Vec::new(),
            }
        };
        let layer = |layer: usize| (0..c.n_kv_heads).map(|head| new(layer, head)).collect();
        let mut heads: Vec<Vec<Head>> = (0..c.n_layers).map(layer).collect();
        let logits = self.trunk.prompt(ids, 0, &mut |layer, rows| {
            let heads = &mut heads[layer];
            let r = c.group();
            heads.par_iter_mut().enumerate().for_each(|(c_kv, head)| {
                head.prefill(&PromptRows {
                    first: 0,
                    k_pre: rows.k_pre.index_axis(Axis(0), c_kv),
                    q_rope: rows.q_rope.slice(s![c_kv * r..(c_kv + 1) * r, .., ..]),
                    keys: rows.k_rope.index_axis(Axis(0), c_kv),
                    values: rows.v.index_axis(Axis(0), c_kv),
                    model_window: c.windows[layer],
                });
            });
            Context {
                q_rope: rows.q_rope,
                keys: rows.k_rope,
                values: rows.v,
            }
        })?;
        Ok((heads, logits))
    }

    /// Feeds one token per trajectory, the full one first; with `judge`, shadows choose along that.
    fn step(
        &mut self,
        heads: &mut [Vec<Head>],
        ids: &[u32],
        t: usize,
        step: usize,
        judge: bool,
    ) -> Result<Array2<f32>> {
        let mut totals = vec![Totals::default(); self.variants.len()];
        let (variants, reports, options) = (&self.variants, &mut self.reports, &self.options);
        let hidden = self.trunk.step(ids, t, &mut |index, layer, rows, mut out| {
            let group = rows.q_rope.len_of(Axis(0)) / heads[index].len();
            let set = StaticSet::at(t, layer.window, options.sinks, options.window);
            let at = At {
                rows,
                group,
                step,
                set: &set,
                variants,
                judge,
            };
            let steps: Vec<HeadStep> = heads[index]
                .par_iter_mut()
                .zip(out.axis_chunks_iter_mut(Axis(1), group))
                .enumerate()
                .map(|(c, (head, out))| head.step(&at, c, out))
                .collect();
            for (v, (total, report)) in totals.iter_mut().zip(reports.iter_mut()).enumerate() {
                let chosen: Vec<&Choice> = steps.iter().map(|s| &s.chosen[v]).collect();
                total.add(&chosen, &set, group);
                for (scores, step) in report.heads[index].iter_mut().zip(&steps) {
                    if let Some(new) = step.scores.get(v) {
                        scores.add(new);
                    }
                }
            }
            Ok(())
        })?;
        let layers = self.trunk.layers.len();
        for (report, total) in self.reports.iter_mut().zip(&totals) {
            report.totals.add_step(total, layers);
            report.steps += 1;
        }
        Ok(hidden)
    }

    /// Counts the indexes of a finished block.
    fn close(&mut self, heads: &[Vec<Head>], positions: usize) {
        for (v, report) in self.reports.iter_mut().enumerate() {
            for head in heads.iter().flatten() {
                report.index_bytes += head.own[v].1.state_bytes() as f64;
                report.positions += positions as f64;
            }
        }
    }
}

/// Where a step stands.
struct At<'a> {
    rows: &'a Rows,
    group: usize,
    step: usize,
    set: &'a StaticSet,
    variants: &'a [Variant<'a>],
    judge: bool,
}

impl Head {
    fn prefill(&mut self, rows: &PromptRows) {
        rows.cache(&mut self.exact);
        if let Some(stored) = &mut self.stored {
            rows.cache(stored);
        }
        for shadow in &mut self.shadows {
            let kv = self.stored.as_mut().unwrap_or(&mut self.exact);
            shadow.prefill(&rows.view(kv));
            self.own.push((kv.fork(), shadow.fork()));
        }
    }

    /// One step of KV head `c`; out `[trajectories,r,d]`.
    fn step(&mut self, at: &At, c: usize, mut out: ndarray::ArrayViewMut3<f32>) -> HeadStep {
        let token = Token::of(at.rows, c, at.group, 0);
        token.cache(&mut self.exact);
        if let Some(stored) = &mut self.stored {
            token.cache(stored);
        }
        let mut full = out.index_axis_mut(Axis(0), 0);
        let visible: Vec<u32> = at.set.visible().map(|p| p as u32).collect();
        let (keys, values) = (self.exact.keys(), self.exact.values());
        let truth = attention::decode(token.q_rope.view(), keys, values, &visible, full.view_mut());
        let full = full.to_owned();
        let mut scores = Vec::new();
        if at.judge {
            let judge = Judge::new(at.set, truth.weights.view(), full.view());
            let kv = self.stored.as_ref().unwrap_or(&self.exact);
            for (shadow, variant) in self.shadows.iter_mut().zip(at.variants) {
                let step = token.step(at.step, at.set, variant.budget, kv);
                let mut output = Array2::zeros(full.dim());
                let choice = decode_head(&token, &step, at.set, shadow.as_mut(), output.view_mut());
                scores.push(judge.scores(&choice, step.budget, output.view_mut()));
            }
        }
        let mut chosen = Vec::new();
        for (v, ((kv, state), variant)) in self.own.iter_mut().zip(at.variants).enumerate() {
            let token = Token::of(at.rows, c, at.group, v + 1);
            token.cache(kv);
            let step = token.step(at.step, at.set, variant.budget, kv);
            let output = out.index_axis_mut(Axis(0), v + 1);
            chosen.push(decode_head(&token, &step, at.set, state.as_mut(), output));
        }
        HeadStep { scores, chosen }
    }
}

/// The truth of one step of one KV head.
struct Judge<'a> {
    set: &'a StaticSet,
    /// True probabilities of what is visible, `[r,n]`.
    weights: ArrayView2<'a, f32>,
    /// Exact output, `[r,d]`.
    output: ArrayView2<'a, f32>,
    /// Candidates by their sum over the group, the largest first, the lower position on ties.
    ranked: Vec<u32>,
}

impl<'a> Judge<'a> {
    fn new(set: &'a StaticSet, weights: ArrayView2<'a, f32>, output: ArrayView2<'a, f32>) -> Self {
        let start = set.visible().start;
        let sums: Vec<f64> = weights
            .columns()
            .into_iter()
            .map(|column| column.iter().map(|w| f64::from(*w)).sum())
            .collect();
        let mut ranked: Vec<u32> = set.candidates.clone().map(|p| p as u32).collect();
        let sum = |p: u32| sums[p as usize - start];
        ranked.sort_unstable_by(|a, b| sum(*b).total_cmp(&sum(*a)).then(a.cmp(b)));
        Self {
            set,
            weights,
            output,
            ranked,
        }
    }

    /// The metrics of a choice and its attention output, `[r,d]`.
    fn scores(&self, choice: &Choice, budget: usize, output: ArrayViewMut2<f32>) -> Scores {
        let oracle = &self.ranked[..budget.min(self.ranked.len())];
        let found = |p: &&u32| choice.positions.binary_search(p).is_ok();
        let recall = match oracle.len() {
            0 => 1.0,
            n => oracle.iter().filter(found).count() as f64 / n as f64,
        };
        let start = self.set.visible().start;
        let sum = |row: ArrayView1<f32>, range: Range<usize>| -> f64 {
            range.map(|p| f64::from(row[p - start])).sum()
        };
        let mut mass = 0.0;
        for (a, row) in self.weights.rows().into_iter().enumerate() {
            mass += sum(row, self.set.sinks.clone());
            if !choice.bypassed.get(a).is_some_and(Option::is_some) {
                let chosen = choice
                    .positions
                    .iter()
                    .map(|p| f64::from(row[*p as usize - start]));
                mass += chosen.sum::<f64>() + sum(row, self.set.window.clone());
            }
        }
        let (mut error, mut size) = (0.0, 0.0);
        for (x, y) in output.iter().zip(&self.output) {
            error += f64::from(x - y).powi(2);
            size += f64::from(*y).powi(2);
        }
        Scores {
            recall,
            mass: mass / self.weights.nrows() as f64,
            output_error: if size > 0.0 { (error / size).sqrt() } else { 0.0 },
            count: 1,
        }
    }
}

/// KL(p || q) of the softmax of two rows of logits, in nats.
///
/// # Numerics
/// f64; never below zero.
pub fn divergence(p: ArrayView1<f32>, q: ArrayView1<f32>) -> f64 {
    let lse = |x: ArrayView1<f32>| {
        let max = x.fold(f32::NEG_INFINITY, |m, v| m.max(*v));
        f64::from(max) + x.iter().map(|v| f64::from(v - max).exp()).sum::<f64>().ln()
    };
    let (lp, lq) = (lse(p), lse(q));
    let terms = p.iter().zip(q).map(|(p, q)| {
        let log_p = f64::from(*p) - lp;
        log_p.exp() * (log_p - (f64::from(*q) - lq))
    });
    terms.sum::<f64>().max(0.0)
}
