//! Sessions whose keys and values stay in the machine's memory, for contexts larger than the GPU's: `--kv host`.
//!
//! The index is on the device and chooses there. Of each layer the queries, the new key and value and the chosen
//! positions come to the CPU, which attends these; meanwhile the device attends the static set, of which it has a copy,
//! and joins the two. A prompt has one layer's rows on the device at a time.

use ndarray::{Array1, Array2, ArrayView2, ArrayView3, s};
use rayon::prelude::*;

use super::forward::StepSpace;
use super::session::{groups, indexes};
use super::{Body, Prompted, ROWS, Rotation, Standing, Workspace};
use crate::compute::attention;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::interrupt;
use crate::kv::Budget;
use crate::kv::KvHead;
use crate::kv::StaticSet;
use crate::kv::cuda::attend::{Attention, LayerRows};
use crate::kv::cuda::prompt::{Prompts, Queries};
use crate::kv::cuda::{Limits, Positions, Selection, Shape};
use crate::kv::sample::Sampler;
use crate::method::Method;
use crate::method::cuda::{CudaIndex, CudaNeeds, OnDevice, WholePrompt};
use crate::model::forward::check_prompt;
use crate::runner::{Backend, Options, Shares, StepAt, Trace};

/// A model and its indexes on the device, with the caches in the machine's memory.
pub struct HostBackend<'a> {
    body: Body<'a>,
    options: Options,
    shape: Shape,
    /// One per sliding window that layers have.
    positions: Vec<Positions<'a>>,
    layers: Vec<HostLayer<'a>>,
    rotation: Rotation<'a>,
    space: StepSpace<'a>,
    near: Near<'a>,
    /// Sum over steps and layers.
    shares: Shares,
}

/// The cache and the index of one layer.
struct HostLayer<'d> {
    /// Which positions are its own.
    positions: usize,
    /// Per KV head.
    heads: Vec<KvHead>,
    index: Box<dyn CudaIndex + 'd>,
    /// The static set's rows. Of a layer with a sliding window the CPU has them alone.
    near: Option<LayerRows<'d>>,
}

/// Where the device attends static sets: the sinks, then the window's rows in a ring, in no order.
struct Near<'d> {
    attention: Attention<'d>,
    /// Ends with the row that is written next.
    writing: Positions<'d>,
    /// All rows.
    reading: Positions<'d>,
    /// What the CPU gives, `[h,d + 1]`.
    others: Buffer<'d, f32>,
    sinks: usize,
    window: usize,
}

impl<'d> Near<'d> {
    fn new(driver: &'d dyn Driver, shape: Shape, options: &Options) -> Result<Self> {
        let (sinks, window) = (
            options.sinks.min(shape.capacity),
            options.window.min(shape.capacity),
        );
        let shape = Shape {
            capacity: sinks + window,
            ..shape
        }
        .checked()?;
        let limits = Limits {
            sinks: 0,
            window: shape.capacity,
            model_window: None,
            budget: Budget::Count(1),
        };
        Ok(Self {
            attention: Attention::new(driver, shape)?,
            writing: Positions::new(driver, shape, limits)?,
            reading: Positions::new(driver, shape, limits)?,
            others: Buffer::new(
                driver,
                "partial outputs",
                shape.query_heads() * (shape.head_dim + 1),
            )?,
            sinks,
            window,
        })
    }

    /// The row of position p.
    fn slot(&self, p: usize) -> usize {
        if p < self.sinks {
            p
        } else {
            self.sinks + (p - self.sinks) % self.window
        }
    }

    /// Goes to the step of the token at position t.
    fn advance(&mut self, t: usize) -> Result<()> {
        self.writing.set(&[self.slot(t) as u32 + 1])?;
        let rows = (t + 1).min(self.sinks + self.window);
        self.reading.set(&[rows as u32])?;
        self.reading.begin(0)
    }

    /// Takes in the static set of a cache with `n` positions.
    fn fill(&mut self, rows: &LayerRows<'_>, heads: &[KvHead], n: usize, work: &Workspace<'_>) -> Result<()> {
        let count = n.min(self.sinks + self.window);
        let first = (n - (count - count.min(self.sinks))).max(count.min(self.sinks));
        let positions = (0..count.min(self.sinks)).chain(first..n);
        let mut order: Vec<usize> = positions.collect();
        order.sort_by_key(|p| self.slot(*p));
        put_rows(heads, &order, work)?;
        self.writing.set(&[count as u32])?;
        rows.append(&work.k_rope, &work.v, count, &self.writing)
    }
}

/// The type of the cached rows.
fn kind(options: &Options) -> Result<Float> {
    let refused = || Error::failed("CUDA: the cache is not of a float type");
    options.kv.float().ok_or_else(refused)
}

impl<'a> HostBackend<'a> {
    /// Whether a method's index can be on the device without the rows.
    pub fn can(method: &dyn Method, options: &Options, turns: bool) -> bool {
        let needs = CudaNeeds {
            packed: false,
            later_prompts: turns,
            rows_on_host: true,
        };
        let has_index = method.cuda().is_some_and(|method| method.serves(&needs));
        has_index && options.kv.float().is_some()
    }

    /// Empty caches with room for `expected` positions from the start, and for an index of up to `capacity`.
    ///
    /// # Errors
    /// No memory for the index.
    pub fn new(
        body: Body<'a>,
        method: &dyn Method,
        options: Options,
        [expected, capacity]: [usize; 2],
    ) -> Result<Self> {
        let driver = body.driver;
        let shape = body.sizes().shape(1, capacity).checked()?;
        let kind = kind(&options)?;
        let near = Near::new(driver, shape, &options)?;
        let (positions, limits, places) = groups(driver, shape, &options, &body.config.windows)?;
        let limits: Vec<Limits> = places.iter().map(|at| limits[*at]).collect();
        let at = OnDevice {
            driver,
            shape,
            kv: options.kv,
        };
        let indexes = indexes(method, at, &limits)?;
        let mut layers: Vec<HostLayer<'a>> = Vec::new();
        for (i, (at, index)) in places.into_iter().zip(indexes).enumerate() {
            let head = |_| KvHead::new(options.kv, shape.head_dim, expected, options.packed);
            let near_rows = match body.config.windows[i] {
                None => Some(LayerRows::new(driver, near.attention.shape(), kind)?),
                Some(_) => None,
            };
            layers.push(HostLayer {
                positions: at,
                heads: (0..shape.kv_heads).map(head).collect(),
                index,
                near: near_rows,
            });
        }
        Ok(Self {
            rotation: Rotation::new(driver, &body.rope, 0, shape.capacity)?,
            space: StepSpace::new(&body, 1)?,
            near,
            body,
            options,
            shape,
            positions,
            layers,
            shares: Shares::default(),
        })
    }

    /// A prompt's rows through one layer; the positions are as far as before in the end.
    fn prompt_layer(&mut self, index: usize, pass: &mut Pass<'_>, first: usize, m: usize) -> Result<()> {
        let sizes = self.body.sizes();
        let is_last = index + 1 == self.layers.len();
        let (weights, state) = (&self.body.layers[index], &mut self.layers[index]);
        let positions = &mut self.positions[state.positions];
        pass.prompted.clear()?;
        pass.put_cached(&state.heads, first)?;
        let mut last = 0;
        for start in (0..m).step_by(ROWS) {
            interrupt::check()?;
            let n = ROWS.min(m - start);
            last = n;
            positions.set(&[(first + start) as u32])?;
            positions.advance(n)?;
            let (work, rows) = (
                &pass.work,
                pass.hidden.part(start * sizes.hidden, n * sizes.hidden),
            );
            let standing = Standing::Last(positions);
            work.project(weights, &rows, n, n, &self.rotation, standing)?;
            pass.prompted.append(&work.k_rope, &work.v, n)?;
            state
                .index
                .extend(work.queries(), work.keys(), n, &pass.prompted.rows, positions)?;
            store(&mut state.heads, work, n)?;
            // Of the last layer, only the last position is read.
            if !is_last || start + n == m {
                let (at, out) = (first + start, &work.attended);
                pass.prompted.attend(&work.q_rope, n, at, weights.window, out)?;
                work.finish(weights, &rows, n)?;
                self.space.watch.look(&rows, n * sizes.hidden, index)?;
            }
        }
        let queries = Queries {
            rows: &pass.work.q_rope,
            m: last,
        };
        if let Some(near) = &state.near {
            self.near.fill(near, &state.heads, first + m, &pass.work)?;
        }
        state.index.end_of_prompt(&WholePrompt {
            rows: &pass.prompted.rows,
            cache: None,
            queries,
            prompts: pass.prompts.as_ref(),
            positions,
        })
    }

    /// A step from the id to the logits on the device.
    fn feed(&mut self, id: u32, at: StepAt, mut trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.body.check_ids(&[id])?;
        self.positions.iter_mut().try_for_each(|p| p.advance(1))?;
        self.near.advance(at.position)?;
        self.space.ids.write(&[id])?;
        self.body.ends.embed(&self.space.ids, 1, &self.space.hidden)?;
        for index in 0..self.layers.len() {
            let (weights, space) = (&self.body.layers[index], &self.space);
            let standing = Standing::Last(&self.positions[self.layers[index].positions]);
            space
                .work
                .project(weights, &space.hidden, 1, 1, &self.rotation, standing)?;
            let chosen = self.attend(index, at)?;
            let (weights, space) = (&self.body.layers[index], &self.space);
            space.work.finish(weights, &space.hidden, 1)?;
            space
                .watch
                .look(&space.hidden, self.body.config.hidden_size, index)?;
            if let Some(trace) = &mut trace {
                trace.layer(at.step, index, chosen.iter())?;
            }
        }
        let space = &self.space;
        space.finish(&self.body, &space.work, &space.hidden, 1)
    }

    /// The attention of one layer for the last position; the positions chosen per KV head.
    fn attend(&mut self, index: usize, at: StepAt) -> Result<Vec<Vec<u32>>> {
        let (shape, work) = (self.shape, &self.space.work);
        let (state, near) = (&mut self.layers[index], &self.near);
        let positions = &self.positions[state.positions];
        state.index.append(work.keys(), positions)?;
        let chosen = state.index.select(work.queries(), None, positions, at.step)?;
        if let Some(rows) = &state.near {
            rows.append(&work.k_rope, &work.v, 1, &near.writing)?;
        }
        let (g, h, d) = (shape.kv_heads, shape.query_heads(), shape.head_dim);
        let mut arrived = (vec![0.0; g * d], vec![0.0; g * d], vec![0.0; h * d]);
        let mut lists = chosen.map(Selection::arriving).unwrap_or_default();
        let mut parts = vec![
            work.k_rope.to(&mut arrived.0),
            work.v.to(&mut arrived.1),
            work.q_rope.to(&mut arrived.2),
        ];
        if let Some(chosen) = chosen {
            parts.extend(chosen.parts(&mut lists));
        }
        // Runs from the copies on, while the CPU attends the others.
        self.body.driver.fetch(&mut parts, &mut || match &state.near {
            Some(rows) => near.attention.attend(&work.q_rope, rows, &near.reading, None),
            None => Ok(()),
        })?;
        let (keys, values, queries) = arrived;
        extend(&mut state.heads, &keys, &values, 1)?;
        let window = self.body.config.windows[index];
        let set = StaticSet::at(at.position, window, self.options.sinks, self.options.window);
        let chosen = match chosen {
            Some(_) => lists.positions(),
            None => vec![set.candidates.clone().map(|p| p as u32).collect(); g],
        };
        let lists: Vec<Vec<u32>> = match state.near {
            Some(_) => chosen.clone(),
            None => chosen.iter().map(|chosen| set.merge(chosen)).collect(),
        };
        let others = attend_on_cpu(&state.heads, &queries, &lists, &shape)?;
        match state.near {
            Some(_) => {
                near.others.send(&others)?;
                near.attention.join_rows(&near.others, &work.attended)?;
            }
            None => {
                let rows = others.chunks(shape.head_dim + 1);
                let outputs: Vec<f32> = rows.flat_map(|row| &row[..shape.head_dim]).copied().collect();
                work.attended.send(&outputs)?;
            }
        }
        let read: usize = chosen.iter().map(|chosen| set.len() + chosen.len()).sum();
        self.shares.read += read as f64 / (set.visible().len() * chosen.len()) as f64;
        Ok(chosen)
    }
}

/// Attention of queries `[h,d]` over some positions of each KV head: `[h,d + 1]`, the log-sum-exp last.
fn attend_on_cpu(heads: &[KvHead], queries: &[f32], lists: &[Vec<u32>], shape: &Shape) -> Result<Vec<f32>> {
    let (r, d) = (shape.group, shape.head_dim);
    let mut out = vec![0.0f32; shape.query_heads() * (d + 1)];
    let heads = heads.par_iter().zip(lists).zip(queries.par_chunks(r * d));
    heads
        .zip(out.par_chunks_mut(r * (d + 1)))
        .try_for_each(|(((kv, list), queries), out)| {
            let queries = ArrayView2::from_shape((r, d), queries).map_err(shape_error)?;
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

/// Writes the cached rows at some positions, `[g,positions,d]`, to where new keys and values are.
fn put_rows(heads: &[KvHead], positions: &[usize], work: &Workspace<'_>) -> Result<()> {
    let mut scratch = vec![0.0; work.sizes.head_dim];
    for (to, is_key) in [(&work.k_rope, true), (&work.v, false)] {
        let mut rows = Vec::new();
        for kv in heads {
            let from = if is_key { kv.keys() } else { kv.values() };
            for p in positions {
                rows.extend_from_slice(from.row(*p, &mut scratch));
            }
        }
        to.send(&rows)?;
    }
    Ok(())
}

/// A prompt on its way through the layers.
struct Pass<'d> {
    work: Workspace<'d>,
    hidden: Buffer<'d, f32>,
    prompted: Prompted<'d>,
    /// Where signs need it.
    prompts: Option<Prompts<'d>>,
}

impl Pass<'_> {
    /// The rows of earlier positions, as the caches hold them.
    fn put_cached(&mut self, heads: &[KvHead], first: usize) -> Result<()> {
        let work = &self.work;
        let room = work.rows;
        for start in (0..first).step_by(room) {
            let n = room.min(first - start);
            put_rows(heads, &(start..start + n).collect::<Vec<_>>(), work)?;
            self.prompted.append(&work.k_rope, &work.v, n)?;
        }
        Ok(())
    }
}

/// Takes the keys and values of the last `n` positions, `[g,n,d]`, into the caches; waits for the device.
fn store(heads: &mut [KvHead], work: &Workspace<'_>, n: usize) -> Result<()> {
    let values = heads.len() * n * work.sizes.head_dim;
    let mut arrived = (vec![0.0; values], vec![0.0; values]);
    let mut parts = [work.k_rope.to(&mut arrived.0), work.v.to(&mut arrived.1)];
    work.driver.fetch(&mut parts, &mut || Ok(()))?;
    extend(heads, &arrived.0, &arrived.1, n)
}

/// Takes `n` keys and values per KV head, `[g,n,d]`, into the caches.
fn extend(heads: &mut [KvHead], keys: &[f32], values: &[f32], n: usize) -> Result<()> {
    let (g, d) = (heads.len(), keys.len() / (heads.len() * n).max(1));
    let keys = ArrayView3::from_shape((g, n, d), keys).map_err(shape_error)?;
    let values = ArrayView3::from_shape((g, n, d), values).map_err(shape_error)?;
    heads.par_iter_mut().enumerate().for_each(|(c, kv)| {
        kv.extend(keys.slice(s![c, .., ..]), values.slice(s![c, .., ..]));
    });
    Ok(())
}

fn shape_error(e: ndarray::ShapeError) -> Error {
    Error::failed(format!("CUDA: {e}"))
}

impl Backend for HostBackend<'_> {
    fn prompt(&mut self, ids: &[u32], first: usize) -> Result<Array1<f32>> {
        check_prompt(ids)?;
        self.body.check_ids(ids)?;
        let (driver, sizes, m) = (self.body.driver, self.body.sizes(), ids.len());
        let kind = kind(&self.options)?;
        let chunk = ROWS.min(first + m).max(self.near.sinks + self.near.window);
        let wants_prompts = self.layers.iter().any(|l| l.index.wants_prompts());
        if let Some(layer) = self.layers.first() {
            layer.index.begin_prompt(first..first + m, chunk)?;
        }
        let mut pass = Pass {
            work: self.body.workspace(chunk)?,
            hidden: Buffer::new(driver, "hidden states", m * sizes.hidden)?,
            prompted: Prompted::new(driver, &sizes, kind, first + m)?,
            prompts: match wants_prompts {
                true => Some(Prompts::new(driver, self.shape)?),
                false => None,
            },
        };
        let ids = Buffer::of(driver, "ids", ids)?;
        self.body.ends.embed(&ids, m, &pass.hidden)?;
        for index in 0..self.layers.len() {
            self.prompt_layer(index, &mut pass, first, m)?;
        }
        if let Some(layer) = self.layers.first() {
            layer.index.end_prompt();
        }
        let len = (first + m) as u32;
        self.positions.iter_mut().try_for_each(|p| p.set(&[len]))?;
        let last = pass.hidden.part((m - 1) * sizes.hidden, sizes.hidden);
        self.space.finish(&self.body, &pass.work, &last, 1)?;
        self.space.read_logits(&self.body)
    }

    fn step(&mut self, id: u32, at: StepAt, trace: Option<&mut Trace<'_>>) -> Result<Array1<f32>> {
        self.feed(id, at, trace)?;
        self.space.read_logits(&self.body)
    }

    fn next(
        &mut self,
        id: u32,
        at: StepAt,
        trace: Option<&mut Trace<'_>>,
        sampler: &mut Sampler,
    ) -> Result<u32> {
        self.feed(id, at, trace)?;
        Ok(self.space.next(&self.body, 1, sampler)?[0])
    }

    fn shares(&self, steps: usize) -> Result<Shares> {
        Ok(self.shares.mean(steps * self.layers.len()))
    }

    fn kv_bytes(&self) -> usize {
        let heads = self.layers.iter().flat_map(|l| &l.heads);
        heads.map(KvHead::bytes).sum()
    }

    fn index_bytes(&self) -> usize {
        self.layers.iter().map(|l| l.index.bytes()).sum()
    }
}
