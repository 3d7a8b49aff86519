//! The backend with caches in host memory, for contexts larger than the GPU's memory: `--kv host`.
//!
//! The index is on the device, and positions are chosen there. For each layer, the queries, the new key and value, and
//! the chosen positions are copied to the CPU, which attends the chosen positions. Meanwhile the device attends its own
//! copy of the static set; afterwards it merges the two results. During a prompt, the device holds the rows of one
//! layer at a time.

mod static_set;

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array1, Array2, ArrayView2, ArrayView3, s};
use rayon::prelude::*;

use super::ROWS;
use super::body::Body;
use super::context::LayerContext;
use super::model::DeviceModel;
use super::prompt::{PromptLayer, PromptPart, PromptPass, PromptRoom, SpaceNeeds};
use super::work::Workspace;
use crate::compute::attention;
use crate::compute::cuda::driver::{Purpose, allocating};
use crate::error::{Error, Result};
use crate::float::Float;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::rows::CudaRows;
use crate::kv::cuda::{CudaSelection, Positions, Shape};
use crate::kv::sample::Sampler;
use crate::kv::{KvHead, Qkv, StaticSet};
use crate::method::cuda::{CudaIndex, CudaNeeds, CudaStep, OnDevice, ServedLayer};
use crate::method::{CUDA_GRANULE, Method, Reads, Selection};
use crate::runner::{Backend, Counts, DecodeOptions, Shares, StepAt, Trace, add_rows};
use static_set::{StaticAttention, put_rows};

/// A model and its indexes on the device, with the caches in host memory.
pub struct HostBackend<'a> {
    model: DeviceModel<'a>,
    options: DecodeOptions,
    shape: Shape,
    layers: Vec<HostLayer<'a>>,
    static_set: StaticAttention<'a>,
    /// The shares, summed over steps and layers.
    shares: Shares,
    /// The counters of each layer.
    counts: Vec<Counts>,
}

/// The cache and the index of one layer.
struct HostLayer<'d> {
    /// The cache of each KV head.
    heads: Vec<KvHead>,
    index: Box<dyn CudaIndex + 'd>,
    /// The rows of the static set, on the device. `None` in a layer with a sliding window, where the CPU attends
    /// everything that is attended.
    static_rows: Option<LayerRows<'d>>,
}

/// Returns the element type of the cached rows.
fn kind(options: &DecodeOptions) -> Result<Float> {
    let refused = || Error::internal("CUDA: the cache is not of a float type");
    options.kv.float().ok_or_else(refused)
}

impl<'a> HostBackend<'a> {
    /// Returns whether the method's index can be on the device while the cached rows are not. `turns` says whether
    /// there may be more than one prompt.
    pub fn can(method: &dyn Method, options: &DecodeOptions, turns: bool) -> bool {
        let needs = CudaNeeds {
            kv: options.kv,
            later_prompts: turns,
            rows_on_host: true,
        };
        let has_index = method.cuda().is_some_and(|method| method.serves(&needs));
        has_index && options.kv.float().is_some()
    }

    /// Makes empty caches with space for `expected` positions from the start, and indexes for up to `capacity`
    /// positions.
    ///
    /// # Errors
    /// Out of memory for an index.
    pub fn new(
        body: impl Into<Arc<Body<'a>>>,
        method: &dyn Method,
        options: DecodeOptions,
        [expected, capacity]: [usize; 2],
    ) -> Result<Self> {
        let body = body.into();
        let driver = body.driver;
        let shape = body.config.sizes().shape(1, capacity).checked()?;
        let kind = kind(&options)?;
        let static_set = StaticAttention::new(driver, shape, &options)?;
        let model = DeviceModel::new(body, shape, &options)?;
        let at = OnDevice {
            driver,
            shape,
            kv: options.kv,
        };
        let served = ServedLayer::all(&model.windows.limits(), shape.kv_heads);
        let without = || Error::internal("CUDA: a method without an index on the device");
        let method = method.cuda().ok_or_else(without)?;
        let indexes = allocating(driver, Purpose::Indexes, || method.indexes(at, &served))?;
        let layers = indexes
            .into_iter()
            .zip(&model.body.config.blocks)
            .enumerate()
            .map(|(layer, (index, block))| {
                let head = |head| options.cache(options.kv, shape.head_dim, expected, [layer, head]);
                Ok(HostLayer {
                    heads: (0..shape.kv_heads).map(head).collect(),
                    index,
                    static_rows: match block.window {
                        None => Some(allocating(driver, Purpose::Caches, || {
                            LayerRows::new(driver, static_set.attention.shape(), kind)
                        })?),
                        Some(_) => None,
                    },
                })
            });
        let layer_count = model.body.config.n_layers();
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            static_set,
            model,
            options,
            shape,
            shares: Shares::default(),
            counts: vec![Counts::NONE; layer_count],
        })
    }

    /// Embeds a prompt, and allocates its buffers and those of the indexes.
    fn begin_prompt(&self, ids: &[u32], first: usize) -> Result<PromptPass<'a>> {
        let (body, n) = (&self.model.body, first + ids.len());
        let context = LayerContext::new(body.driver, body.config.sizes().shape(1, n), kind(&self.options)?)?;
        let room = PromptRoom {
            first,
            rows: ROWS.min(n).max(self.static_set.rows()),
        };
        let space = SpaceNeeds {
            shape: self.shape,
            needs_room: false,
            is_part: false,
            context: Some(context),
            indexes: self.layers.iter().map(|l| l.index.as_ref()).collect(),
        };
        PromptPass::new(body, ids, room, [space])
    }

    /// Allocates what a prompt at these positions takes, and frees it: see [`room`](super::room).
    pub(super) fn rehearse(&self, prompt: Range<usize>) -> Result<()> {
        self.begin_prompt(&vec![0; prompt.len().max(1)], prompt.start)
            .map(drop)
    }

    /// Runs a prompt through one layer.
    fn prompt_layer(&mut self, number: usize, pass: &mut PromptPass<'a>) -> Result<()> {
        let HostLayer {
            heads,
            index,
            static_rows,
        } = &mut self.layers[number];
        let part = PromptPart {
            space: 0,
            heads: None,
            index: index.as_ref(),
            cache: None,
        };
        let layer = PromptLayer {
            number,
            parts: vec![part],
        };
        pass.begin_layer()?;
        put_cached(pass, heads)?;
        pass.run(&mut self.model, &mut [], &layer, &mut |work, n| {
            store(heads, work, n)
        })?;
        if let Some(rows) = static_rows {
            let n = pass.first + pass.m;
            self.static_set.fill(rows, heads, n, &pass.work)?;
        }
        pass.end_layer(&self.model, &[], &layer)
    }
}

/// The data of one layer that a step copies to the CPU.
struct Arrived {
    /// The queries `[h,d]`, the new keys and values `[g,d]`.
    rows: Qkv<Vec<f32>>,
    /// The chosen positions of each KV head.
    chosen: Vec<Vec<u32>>,
}

impl HostLayer<'_> {
    /// Chooses positions in decode step number `step`, and fetches the choice and the last position's queries, keys and
    /// values. Meanwhile the device attends the static set.
    fn fetch(
        &self,
        work: &Workspace<'_>,
        static_set: &StaticAttention<'_>,
        positions: &Positions<'_>,
        set: &StaticSet,
        step: usize,
    ) -> Result<Arrived> {
        self.index.append(work.heads.k.as_ref(), positions)?;
        let selection = self.index.select(&CudaStep {
            number: step,
            queries: work.heads.q.as_ref(),
            cache: None,
            positions,
        })?;
        if let Some(rows) = &self.static_rows {
            rows.append(&work.heads.k.rope, &work.heads.v, 1, &static_set.writing)?;
        }
        let (g, kv, q) = (self.heads.len(), work.sizes.kv(), work.sizes.attended());
        let mut rows = Qkv {
            q: vec![0.0; q],
            k: vec![0.0; kv],
            v: vec![0.0; kv],
        };
        let mut lists = selection.map(CudaSelection::arriving);
        let mut parts = vec![
            work.heads.k.rope.to(&mut rows.k),
            work.heads.v.to(&mut rows.v),
            work.heads.q.rope.to(&mut rows.q),
        ];
        if let (Some(selection), Some(lists)) = (selection, &mut lists) {
            parts.extend(selection.parts(lists));
        }
        // The device attends the static set once the copies are queued, while the CPU attends the other positions.
        work.driver.fetch(&mut parts, &mut || match &self.static_rows {
            Some(rows) => {
                let StaticAttention {
                    attention, reading, ..
                } = static_set;
                rows.attend(attention, &work.heads.q.rope, reading, None)
            }
            None => Ok(()),
        })?;
        let chosen = match lists {
            Some(lists) => lists.positions(),
            None => vec![set.candidates.clone().map(|p| p as u32).collect(); g],
        };
        Ok(Arrived { rows, chosen })
    }

    /// Appends the last position to the caches and fills its attention output. Returns the positions that each KV head
    /// chose.
    fn attend(
        &mut self,
        work: &Workspace<'_>,
        static_set: &StaticAttention<'_>,
        set: &StaticSet,
        arrived: Arrived,
    ) -> Result<Vec<Vec<u32>>> {
        let d = work.sizes.heads.head_dim;
        let Arrived { rows: new, chosen } = arrived;
        extend(&mut self.heads, &new.k, &new.v, 1)?;
        if self.static_rows.is_some() {
            let others = attend_on_cpu(&self.heads, &new.q, &chosen, d)?;
            static_set.others.send(&others)?;
            static_set
                .attention
                .join_rows(&static_set.others, &work.attended)?;
        } else {
            let lists: Vec<Vec<u32>> = chosen.iter().map(|chosen| set.merge(chosen)).collect();
            let rows = attend_on_cpu(&self.heads, &new.q, &lists, d)?;
            let outputs: Vec<f32> = rows.chunks(d + 1).flat_map(|row| &row[..d]).copied().collect();
            work.attended.send(&outputs)?;
        }
        Ok(chosen)
    }
}

/// Computes the attention of queries `[h,d]` over the listed positions of each KV head: `[h,d + 1]`, with the
/// log-sum-exp last.
fn attend_on_cpu(heads: &[KvHead], queries: &[f32], lists: &[Vec<u32>], d: usize) -> Result<Vec<f32>> {
    let h = queries.len() / d;
    let r = h / heads.len().max(1);
    if lists.len() != heads.len() || r * d * heads.len() != queries.len() {
        let (lists, heads, values) = (lists.len(), heads.len(), queries.len());
        return Err(Error::internal(format!(
            "CUDA: {lists} lists of positions and {values} values of queries for {heads} KV heads"
        )));
    }
    let mut out = vec![0.0f32; h * (d + 1)];
    let heads = heads.par_iter().zip(lists).zip(queries.par_chunks(r * d));
    heads
        .zip(out.par_chunks_mut(r * (d + 1)))
        .try_for_each(|(((kv, list), queries), out)| {
            let queries = ArrayView2::from_shape((r, d), queries)?;
            let mut rows = Array2::zeros((r, d));
            let lse = attention::decode(queries, kv.keys(), kv.values(), list, rows.view_mut());
            for ((to, row), lse) in out.chunks_mut(d + 1).zip(rows.rows()).zip(lse) {
                to.iter_mut()
                    .zip(row.iter().chain([&lse]))
                    .for_each(|(to, v)| *to = *v);
            }
            Ok::<(), Error>(())
        })?;
    Ok(out)
}

/// Copies the cached rows of earlier positions into the context of the prompt.
fn put_cached(pass: &mut PromptPass<'_>, heads: &[KvHead]) -> Result<()> {
    let room = pass.work.rows;
    for start in (0..pass.first).step_by(room) {
        let n = room.min(pass.first - start);
        put_rows(heads, &(start..start + n).collect::<Vec<_>>(), &pass.work)?;
        pass.append(n)?;
    }
    Ok(())
}

/// Copies the keys and values of the last `n` positions, `[g,n,d]`, into the caches; waits for the device.
fn store(heads: &mut [KvHead], work: &Workspace<'_>, n: usize) -> Result<()> {
    let values = heads.len() * n * work.sizes.heads.head_dim;
    let mut arrived = (vec![0.0; values], vec![0.0; values]);
    let mut parts = [
        work.heads.k.rope.to(&mut arrived.0),
        work.heads.v.to(&mut arrived.1),
    ];
    work.driver.fetch(&mut parts, &mut || Ok(()))?;
    extend(heads, &arrived.0, &arrived.1, n)
}

/// Appends `n` keys and values per KV head, `[g,n,d]`, to the caches.
fn extend(heads: &mut [KvHead], keys: &[f32], values: &[f32], n: usize) -> Result<()> {
    let (g, d) = (heads.len(), keys.len() / (heads.len() * n).max(1));
    let keys = ArrayView3::from_shape((g, n, d), keys)?;
    let values = ArrayView3::from_shape((g, n, d), values)?;
    heads.par_iter_mut().enumerate().for_each(|(c, kv)| {
        kv.extend(keys.slice(s![c, .., ..]), values.slice(s![c, .., ..]));
    });
    Ok(())
}

impl Backend for HostBackend<'_> {
    fn prompt(&mut self, ids: &[u32], first: usize, done: &mut dyn FnMut(usize)) -> Result<Array1<f32>> {
        self.model.body.check_prompt(ids)?;
        let mut pass = self.begin_prompt(ids, first)?;
        for number in 0..self.layers.len() {
            self.prompt_layer(number, &mut pass)?;
            done(ids.len());
        }
        let first = self.layers.first().map(|layer| layer.index.as_ref());
        self.model.end_prompt(&pass, first)
    }

    fn step(&mut self, id: u32, at: StepAt, trace: Option<&mut Trace<'_>>) -> Result<()> {
        let Self {
            model,
            layers,
            static_set,
            options,
            shares,
            counts,
            shape,
        } = self;
        model.send(&[id])?;
        let positions = &mut model.windows.positions;
        positions.iter_mut().try_for_each(|p| p.advance(1))?;
        static_set.advance(at.position)?;
        let (model, blocks) = (&*model, &model.body.config.blocks);
        model.step(at.step, trace, &mut |number| {
            let set = options
                .limits
                .in_layer(blocks[number].window)
                .static_set(at.position);
            let positions = model.windows.layer(number);
            let arrived = layers[number].fetch(&model.space.work, static_set, positions, &set, at.step)?;
            let chosen = layers[number].attend(&model.space.work, static_set, &set, arrived)?;
            let mut reads = Reads::new(CUDA_GRANULE);
            layers[number].index.reads(&set, &mut reads);
            if layers[number].index.bytes() > 0 {
                reads.scratch_bytes = None;
            }
            let chosen: Vec<Selection> = chosen.into_iter().map(Selection::from).collect();
            shares.add_layer(chosen.iter(), &set, shape.group);
            for selection in &chosen {
                let mut reads = reads.clone();
                add_rows(
                    &mut reads,
                    selection,
                    &set,
                    shape.group,
                    options.kv,
                    shape.head_dim,
                );
                counts[number].add(selection, &reads, &set, shape.group, options.kv, shape.head_dim);
            }
            Ok(chosen.into_iter().map(|selection| selection.positions).collect())
        })
    }

    fn logits(&self) -> Result<Array1<f32>> {
        self.model.logits()
    }

    fn next(&self, sampler: &mut Sampler) -> Result<u32> {
        if sampler.is_plain() {
            self.model.next(sampler)
        } else {
            sampler.next(self.model.logits()?.view())
        }
    }

    fn shares(&self, steps: usize) -> Result<Shares> {
        Ok(self.shares.mean(steps * self.layers.len()))
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        Ok(self.counts.clone())
    }

    fn granule(&self) -> usize {
        CUDA_GRANULE
    }

    fn kv_bytes(&self) -> usize {
        let heads = self.layers.iter().flat_map(|l| &l.heads);
        heads.map(KvHead::bytes).sum()
    }

    fn index_bytes(&self) -> usize {
        self.layers.iter().map(|l| l.index.bytes()).sum()
    }
}
