//! Evaluation layer by layer: every step of every block passes through one layer before the first passes through the
//! next.
//!
//! The text is given, so the states of a step in one layer depend only on the states of this step and of earlier steps
//! in the layer before. Memory holds the weights of one layer, the hidden states of the blocks and of each variant's
//! steps, and the caches of the KV heads being processed. The results are those of [`Evaluation::block`], which needs
//! the whole model and every cache at once.
//!
//! [`Evaluation::block`]: super::Evaluation::block

use ndarray::{Array1, Array2, Array3, Array4, ArrayView1, ArrayView3, Axis, concatenate, s};
use rayon::prelude::*;

use super::judge::{Prediction, top};
use super::lineup::{All, Changes, Lineup, Unit};
use super::trajectories::{HeadStep, HeadTrajectories, StepInput, leaders};
use super::{Variant, VariantReport, losses, tally};
use crate::env;
use crate::error::{Error, Result};
use crate::kv::{Rotated, StaticSet};
use crate::model::forward::{Layers, PromptRows, Rows};
use crate::model::layer::{rotated, rotated_to};
use crate::model::rope::RopeTable;
use crate::model::{Decoder, States};
use crate::runner::{DecodeOptions, Shares};

/// A text whose last tokens are fed one by one.
#[derive(Clone, Debug)]
pub struct Passage {
    /// The text, from position 0 on.
    pub ids: Vec<u32>,
    /// How many of its last tokens are fed one by one; the others, at least one, are the prompt.
    pub steps: usize,
}

impl Passage {
    /// Makes a text whose last `steps` tokens, but not its first, are fed one by one; `None` if there is no step.
    pub fn new(ids: &[u32], steps: usize) -> Option<Self> {
        let steps = steps.min(ids.len().saturating_sub(1));
        let ids = ids.to_vec();
        (steps > 0).then_some(Self { ids, steps })
    }

    /// Returns the length of the prompt.
    fn first(&self) -> usize {
        self.ids.len() - self.steps
    }

    fn check(&self) -> Result<()> {
        if self.steps > 0 && self.steps < self.ids.len() {
            Ok(())
        } else {
            Err(Error::invalid(format!(
                "a block of {} tokens is too short for {} decode steps after a prompt",
                self.ids.len(),
                self.steps
            ))
            .hint("give longer blocks, or fewer decode steps"))
        }
    }
}

/// An evaluation whose layers are opened one at a time; the budget of `options` is not used.
pub struct Layerwise<'a> {
    /// The model.
    pub layers: &'a dyn Layers,
    /// What bounds a step's reads.
    pub options: DecodeOptions,
}

/// What a run measures.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Measure {
    /// What variants lose along their own trajectories, and how good their choices are along the full one.
    Losses,
    /// Which tokens they predict along their own trajectories.
    Answers,
    /// What they read if they choose along the full trajectory.
    Reads,
    /// How much their predictions diverge along their own trajectories.
    Divergences,
}

/// Steps of all trajectories of [`Layerwise::sensitivities`] that pass the model together; bounds the memory.
const TOGETHER: usize = 1 << 15;
/// Trajectories whose logits are computed together.
const LOGITS: usize = 128;

/// The state of one passage between two layers.
struct Run<'p> {
    passage: &'p Passage,
    /// Input of the next layer along the full trajectory, `[n, hidden]`.
    full: Array2<f32>,
    /// Input of the next layer along the trajectories that have left the full one, `[trajectories steps, hidden]`; `None` if
    /// there are none.
    own: Option<Array2<f32>>,
    /// Per step and variant: the sum over layers.
    shares: Vec<Vec<Shares>>,
    /// Per variant.
    reports: Vec<VariantReport>,
    /// Per layer and variant, after the layer: what was read and held in all layers so far.
    costs: Vec<Vec<Cost>>,
}

/// Bytes of some layers.
#[derive(Clone, Copy, Default)]
struct Cost {
    /// What memory moved for all steps; an infinite number if that is not known.
    moved: f64,
    /// Rows in their formats, and indexes, seen by all steps.
    held: f64,
    /// All visible rows in bf16, seen by all steps.
    all: f64,
}

impl Cost {
    /// Adds up what a variant read and held in the layers so far.
    fn so_far(report: &VariantReport, steps: usize, head_dim: usize) -> Self {
        let counts = &report.counts;
        Self {
            moved: counts.moved_bytes.map_or(f64::INFINITY, |bytes| bytes as f64),
            held: counts.visible_bytes as f64 + steps as f64 * report.index_bytes(),
            all: counts.bytes_in_bf16(head_dim),
        }
    }
}

impl Run<'_> {
    /// Lets further trajectories leave the full one before the next layer, so that there are so many.
    fn leave(&mut self, trajectories: usize) -> Result<()> {
        let before = self.own.as_ref().map_or(0, Array2::nrows) / self.passage.steps;
        if trajectories == before {
            return Ok(());
        }
        let steps = self.full.slice(s![self.passage.first().., ..]);
        let mut parts = vec![steps; trajectories - before];
        parts.extend(self.own.iter().map(Array2::view));
        parts.rotate_right(usize::from(before > 0));
        let joined = concatenate(Axis(0), &parts)?;
        self.own = Some(joined);
        Ok(())
    }
}

/// The results of one KV head of a layer.
struct HeadRun {
    steps: Vec<HeadStep>,
    /// Attention's output, `[steps,trajectories,r,d]`.
    outputs: Array4<f32>,
    /// Per variant: the bytes of its index after the last step.
    index_bytes: Vec<usize>,
}

impl Layerwise<'_> {
    fn decoder(&self) -> &Decoder {
        self.layers.decoder()
    }

    /// Measures what variants lose along their own trajectories; `done` is called after each layer. Returns the reports of
    /// all variants on each passage.
    ///
    /// # Errors
    /// A passage without a prompt or a step; activations that are not finite; an interrupt.
    pub fn evaluate(
        &self,
        passages: &[Passage],
        variants: &[Variant],
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<VariantReport>>> {
        if variants.is_empty() {
            return Ok(vec![Vec::new(); passages.len()]);
        }
        let runs = self.run(passages, &All(variants), Measure::Losses, done)?;
        runs.into_iter().map(|run| self.close(run)).collect()
    }

    /// Returns which tokens variants predict along their own trajectories. `asked` lists, for each passage, the steps
    /// that matter. For each passage and variant there is an entry for each of these steps: whether the variant, and
    /// whether full attention, predicts the passage's next token.
    ///
    /// # Errors
    /// Those of [`Layerwise::evaluate`]; a step that has no next token.
    pub fn answers(
        &self,
        passages: &[Passage],
        asked: &[Vec<usize>],
        variants: &[Variant],
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<Vec<[bool; 2]>>>> {
        let runs = self.run(passages, &All(variants), Measure::Answers, done)?;
        runs.iter()
            .zip(asked)
            .map(|(run, asked)| self.predicted(run, asked, variants.len()))
            .collect()
    }

    /// Returns the shares of the bytes that variants read if they choose along the full trajectory; `None` for a
    /// variant whose bytes are not known.
    ///
    /// # Errors
    /// Those of [`Layerwise::evaluate`].
    pub fn reads(
        &self,
        passage: &Passage,
        variants: &[Variant],
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Option<f64>>> {
        let runs = self.run(
            std::slice::from_ref(passage),
            &All(variants),
            Measure::Reads,
            done,
        )?;
        let share = |report: &VariantReport| report.counts.uncompressed_fraction();
        Ok(runs
            .iter()
            .flat_map(|run| run.reports.iter().map(share))
            .collect())
    }

    /// Returns, for each variant and layer, what memory moves in a step and what rows and indexes take, if variants choose along
    /// the full trajectory: as shares of all visible rows of the model in bf16. What is not known is infinite.
    ///
    /// # Errors
    /// Those of [`Layerwise::evaluate`].
    pub fn costs(
        &self,
        passage: &Passage,
        variants: &[Variant],
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<[f64; 2]>>> {
        let runs = self.run(
            std::slice::from_ref(passage),
            &All(variants),
            Measure::Reads,
            done,
        )?;
        let costs = &runs[0].costs;
        let of_variant = |v: usize| -> Vec<[f64; 2]> {
            let all = costs.last().map_or(1.0, |last| last[v].all);
            let mut before = Cost::default();
            let of_layer = |layer: &Vec<Cost>| {
                let sum = layer[v];
                let share = [sum.moved - before.moved, sum.held - before.held].map(|bytes| bytes / all);
                before = sum;
                share
            };
            costs.iter().map(of_layer).collect()
        };
        Ok((0..variants.len()).map(of_variant).collect())
    }

    /// Returns, for each of some sets of KV heads (in the order of their layers) and each way of serving them, the mean KL
    /// divergence of the predictions over the steps of all passages, in nats, if these heads are served in this way and all others
    /// by full attention. Each trajectory begins in the layer of its heads: before it, it equals the full one. `done` is called
    /// after each layer of [`Layerwise::passes`] passes.
    ///
    /// # Errors
    /// Those of [`Layerwise::evaluate`].
    pub fn sensitivities(
        &self,
        passages: &[Passage],
        units: &[Unit],
        ways: &[Variant],
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f64>>> {
        let steps: usize = passages.iter().map(|passage| passage.steps).sum();
        if ways.is_empty() {
            return Ok(vec![Vec::new(); units.len()]);
        }
        let mut means = Vec::new();
        for units in units.chunks(units_together(ways.len(), passages)) {
            let mut sums = vec![0.0; units.len() * ways.len()];
            // One after the other, since each takes the memory of many trajectories.
            for passage in passages {
                let lineup = Changes { units, ways };
                let passage = std::slice::from_ref(passage);
                for run in self.run(passage, &lineup, Measure::Divergences, done)? {
                    self.add_divergences(&run, &mut sums)?;
                }
            }
            let of_unit = |sums: &[f64]| sums.iter().map(|sum| sum / steps as f64).collect();
            means.extend(sums.chunks(ways.len()).map(of_unit));
        }
        Ok(means)
    }

    /// Counts the passes of a passage through the model in [`Layerwise::sensitivities`].
    pub fn passes(&self, units: usize, ways: usize, passages: &[Passage]) -> usize {
        passages.len() * units.div_ceil(units_together(ways, passages))
    }

    /// Embeds the tokens of every passage.
    fn start<'p>(&self, passages: &'p [Passage], variants: usize) -> Result<Vec<Run<'p>>> {
        let run = |passage: &'p Passage| {
            passage.check()?;
            let mut report = VariantReport::new(&self.decoder().config);
            report.begin(1);
            Ok(Run {
                passage,
                full: self.decoder().embed(&passage.ids)?,
                own: None,
                shares: vec![vec![Shares::default(); variants]; passage.steps],
                reports: vec![report; variants],
                costs: Vec::new(),
            })
        };
        passages.iter().map(run).collect()
    }

    /// Runs every layer on every passage.
    fn run<'p>(
        &self,
        passages: &'p [Passage],
        lineup: &dyn Lineup,
        measure: Measure,
        done: &mut dyn FnMut(usize),
    ) -> Result<Vec<Run<'p>>> {
        let (config, ropes) = (&self.decoder().config, &self.decoder().ropes);
        // Divergences are not reported by variant.
        let reported = match measure {
            Measure::Divergences => 0,
            _ => lineup.left(config.n_layers()),
        };
        let mut runs = self.start(passages, reported)?;
        for index in 0..config.n_layers() {
            let layer = self.layers.open(index)?;
            for run in &mut runs {
                env::check()?;
                if measure != Measure::Reads {
                    run.leave(lineup.left(index))?;
                }
                let own = run
                    .own
                    .as_ref()
                    .map(|own| layer.project(own.view()))
                    .transpose()?;
                let table = ropes.layer(index).table(0..run.passage.ids.len());
                let input = LayerInput {
                    of: self,
                    index,
                    lineup,
                    table: &table,
                    first: run.passage.first(),
                    steps: run.passage.steps,
                    own: own.as_ref(),
                    measure,
                };
                let mut heads = Vec::new();
                layer.forward(run.full.view_mut(), &mut |states| {
                    let each = (0..config.n_kv_heads).into_par_iter();
                    heads = each.map(|c| input.head(states, c)).collect();
                    Ok(())
                })?;
                if measure != Measure::Divergences {
                    input.count(&heads, run);
                }
                if measure == Measure::Reads {
                    let cost = |report| Cost::so_far(report, run.passage.steps, config.head_dim);
                    run.costs.push(run.reports.iter().map(cost).collect());
                }
                if let Some(own) = &mut run.own {
                    layer.finish(own.view_mut(), attended(&heads).view())?;
                }
            }
            done(index);
        }
        Ok(runs)
    }

    /// Computes the logits of a step, `[1 + variants, vocab]`: those of full attention first.
    fn logits(&self, run: &Run, own: &Array2<f32>, step: usize) -> Result<Array2<f32>> {
        env::check()?;
        let own = own.slice(s![step..;run.passage.steps, ..]);
        let full = run.full.slice(s![run.passage.first() + step.., ..]);
        let rows = concatenate(Axis(0), &[full.slice(s![..1, ..]), own])?;
        let decoder = self.decoder();
        decoder.logits_by(&decoder.head, rows.view())
    }

    /// Adds the divergence of every step of a passage from full attention to the sum of its trajectory.
    fn add_divergences(&self, run: &Run, sums: &mut [f64]) -> Result<()> {
        let (decoder, steps) = (self.decoder(), run.passage.steps);
        let own = run.own.as_ref();
        let own = own.ok_or_else(|| Error::internal("internal: no trajectory left the full one"))?;
        for step in 0..steps {
            let full = run.full.slice(s![run.passage.first() + step.., ..]);
            let full = decoder.logits_by(&decoder.head, full.slice(s![..1, ..]))?;
            let full = Prediction::new(full.row(0));
            for (i, sums) in sums.chunks_mut(LOGITS).enumerate() {
                env::check()?;
                let first = i * LOGITS;
                let rows = own.slice(s![first * steps + step..(first + sums.len()) * steps;steps, ..]);
                let logits = decoder.logits_by(&decoder.head, rows)?;
                let each = sums.par_iter_mut().zip(logits.axis_iter(Axis(0)).into_par_iter());
                each.for_each(|(sum, row)| *sum += full.divergence(&Prediction::new(row)));
            }
        }
        Ok(())
    }

    /// Compares the predictions of some steps with the passage's next tokens.
    fn predicted(&self, run: &Run, asked: &[usize], variants: usize) -> Result<Vec<Vec<[bool; 2]>>> {
        let mut hits = vec![Vec::new(); variants];
        let Some(own) = &run.own else {
            return Ok(hits);
        };
        for &step in asked {
            let next = run.passage.ids.get(run.passage.first() + step + 1);
            let next = next.ok_or_else(|| Error::internal("internal: a step has no next token"))?;
            let logits = self.logits(run, own, step)?;
            let is_right = |row: ArrayView1<f32>| top(row) == *next as usize;
            let right: Vec<bool> = logits.outer_iter().map(is_right).collect();
            for (hits, own) in hits.iter_mut().zip(&right[1..]) {
                hits.push([*own, right[0]]);
            }
        }
        Ok(hits)
    }

    /// Computes from the logits what each step of a passage lost, and returns the reports with these losses.
    fn close(&self, mut run: Run) -> Result<Vec<VariantReport>> {
        let mut reports = std::mem::take(&mut run.reports);
        let n_layers = self.decoder().config.n_layers();
        let own = run.own.as_ref();
        let own = own.ok_or_else(|| Error::internal("internal: no trajectories of the variants"))?;
        for (step, shares) in run.shares.iter().enumerate() {
            let logits = self.logits(&run, own, step)?;
            let logits: Vec<Array1<f32>> = logits.outer_iter().map(|row| row.to_owned()).collect();
            let next = run.passage.ids.get(run.passage.first() + step + 1);
            let next = next.map(|id| *id as usize);
            for (report, loss) in reports.iter_mut().zip(losses(&logits, [0, step], next)) {
                report.add_loss(loss);
            }
            for (report, shares) in reports.iter_mut().zip(shares) {
                report.add_step(shares, n_layers);
            }
        }
        Ok(reports)
    }
}

/// Returns how many sets of KV heads pass the model together.
fn units_together(ways: usize, passages: &[Passage]) -> usize {
    let steps = passages.iter().map(|passage| passage.steps).max().unwrap_or(0);
    (TOGETHER / (ways * steps).max(1)).max(1)
}

/// One layer of one passage.
struct LayerInput<'a> {
    of: &'a Layerwise<'a>,
    index: usize,
    lineup: &'a dyn Lineup,
    /// The rotations of all positions.
    table: &'a RopeTable,
    /// Length of the prompt.
    first: usize,
    steps: usize,
    /// The states along the trajectories that have left the full one, `trajectories steps` rows.
    own: Option<&'a States>,
    measure: Measure,
}

impl LayerInput<'_> {
    fn group(&self) -> usize {
        self.of.decoder().config.group()
    }

    fn window(&self) -> Option<usize> {
        self.of.decoder().config.blocks[self.index].window
    }

    fn set(&self, step: usize) -> StaticSet {
        let limits = self.of.options.limits.in_layer(self.window());
        limits.static_set(self.first + step)
    }

    /// Runs KV head `c`: its prompt, then all steps.
    fn head(&self, states: &States, c: usize) -> HeadRun {
        let (config, r) = (&self.of.decoder().config, self.group());
        let variants = self.lineup.serving(self.index, c);
        let queries = s![c * r..(c + 1) * r, .., ..];
        let own = s![c..c + 1, .., ..];
        let both = |pre: ArrayView3<f32>| {
            let pre = pre.to_owned();
            Rotated {
                rope: rotated(&pre, self.table),
                pre,
            }
        };
        let (q, k) = (both(states.q.slice(queries)), both(states.k.slice(own)));
        let v = states.v.slice(own);
        let prompt = |x: ArrayView3<f32>| x.slice(s![.., ..self.first, ..]).to_owned();
        let mut head = HeadTrajectories::new(
            config,
            &variants,
            &self.of.options,
            self.first + self.steps,
            [self.index, c],
        );
        let rows = PromptRows {
            q: prompt(q.rope.view()),
            k: Rotated {
                pre: prompt(k.pre.view()),
                rope: prompt(k.rope.view()),
            },
            v: prompt(v),
        };
        let leaders = leaders(&variants);
        head.prefill(&rows, &[], 0, self.window(), &leaders);
        head.branch(self.measure == Measure::Losses);
        let d = config.head_dim;
        let mut outputs = Array4::zeros((self.steps, variants.len() + 1, r, d));
        let mut steps = Vec::new();
        for (step, out) in outputs.outer_iter_mut().enumerate() {
            let (at, set) = (self.first + step, self.set(step));
            let own = |x: &Array3<f32>, from: usize, heads: usize| {
                let rows = s![from..from + heads, step..;self.steps, ..];
                x.slice(rows).to_owned()
            };
            let joined = |full: ArrayView3<f32>, own: Option<Array3<f32>>| {
                let full = full.slice(s![.., at..at + 1, ..]).to_owned();
                match own {
                    Some(own) => join(&full, &own),
                    None => repeat(&full, variants.len() + 1),
                }
            };
            let turned = |x: &Array3<f32>| rotated_to(x, self.table, at);
            let both = |full: &Rotated<Array3<f32>>, own: Option<Array3<f32>>| Rotated {
                rope: joined(full.rope.view(), own.as_ref().map(turned)),
                pre: joined(full.pre.view(), own),
            };
            let rows = Rows {
                q: both(&q, self.own.map(|states| own(&states.q, c * r, r))),
                k: both(&k, self.own.map(|states| own(&states.k, c, 1))),
                v: joined(v, self.own.map(|states| own(&states.v, c, 1))),
            };
            let input = StepInput {
                rows: &rows,
                group: r,
                step,
                set: &set,
                options: &self.of.options,
            };
            steps.push(head.step(&input, 0, out));
        }
        HeadRun {
            steps,
            outputs,
            index_bytes: head
                .own
                .iter()
                .map(|own| own.chooser.retriever.state_bytes())
                .collect(),
        }
    }

    /// Adds the choices of all heads to the reports.
    fn count(&self, heads: &[HeadRun], run: &mut Run) {
        for (step, shares) in run.shares.iter_mut().enumerate() {
            let each: Vec<&HeadStep> = heads.iter().map(|head| &head.steps[step]).collect();
            tally(
                &mut run.reports,
                shares,
                self.index,
                0,
                &self.set(step),
                self.group(),
                &each,
            );
        }
        for head in heads {
            for (report, bytes) in run.reports.iter_mut().zip(&head.index_bytes) {
                report.add_index(*bytes, self.first + self.steps);
            }
        }
    }
}

/// Joins the rows of the full trajectory, `[heads,1,d]`, and those of the variants, `[heads,variants,d]`.
fn join(full: &Array3<f32>, own: &Array3<f32>) -> Array3<f32> {
    let (heads, variants, d) = own.dim();
    let mut rows = Array3::zeros((heads, variants + 1, d));
    rows.slice_mut(s![.., ..1, ..]).assign(full);
    rows.slice_mut(s![.., 1.., ..]).assign(own);
    rows
}

/// Repeats rows `[heads,1,d]`: `[heads,times,d]`.
fn repeat(full: &Array3<f32>, times: usize) -> Array3<f32> {
    let (heads, _, d) = full.dim();
    let mut rows = Array3::zeros((heads, times, d));
    rows.assign(&full.broadcast((heads, times, d)).unwrap_or(full.view()));
    rows
}

/// Returns the attention's output along the variants' trajectories, `[variants steps, h d]`.
fn attended(heads: &[HeadRun]) -> Array2<f32> {
    let (steps, trajectories, r, d) = heads[0].outputs.dim();
    let width = r * d;
    let mut out = Array2::zeros(((trajectories - 1) * steps, heads.len() * width));
    for (c, head) in heads.iter().enumerate() {
        for (step, of_step) in head.outputs.outer_iter().enumerate() {
            for (v, of_variant) in of_step.outer_iter().skip(1).enumerate() {
                let mut to = out.slice_mut(s![v * steps + step, c * width..(c + 1) * width]);
                to.iter_mut().zip(of_variant).for_each(|(to, x)| *to = *x);
            }
        }
    }
    out
}
