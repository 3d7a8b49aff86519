//! Sessions whose caches and selection stay on the device.
//!
//! A prompt goes through the layers one after the other, in chunks of rows; each layer attends its own cache. A step is
//! one run of launches, from the ids to the logits, in which the host waits for nothing.

use ndarray::Array1;

use super::forward::StepSpace;
use super::{Body, Prompted, ROWS, Rotation, Standing, Workspace};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{Driver, Recording};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::kv::KvType;
use crate::kv::cuda::attend::{Attention, LayerRows};
use crate::kv::cuda::cache::{LayerCache, bytes_per_position, fixed_bytes};
use crate::kv::cuda::prompt::{Prompts, Queries};
use crate::kv::cuda::signs::FULL;
use crate::kv::cuda::{Limits, Positions, Shape};
use crate::kv::sample::Sampler;
use crate::method::Method;
use crate::method::bench::Bench;
use crate::method::cuda::{CudaIndex, CudaNeeds, Indexes, OnDevice, WholePrompt};
use crate::model::forward::check_prompt;
use crate::runner::{Backend, Options, Shares, StepAt, Trace};

/// A model with its caches and indexes on the device: one sequence for a session, or several that
/// [`CudaBackend::feed`] and [`CudaBackend::advance`] take on together.
pub struct CudaBackend<'a> {
    body: Body<'a>,
    options: Options,
    shape: Shape,
    /// One per sliding window that layers have.
    positions: Vec<Positions<'a>>,
    layers: Vec<LayerState<'a>>,
    attention: Attention<'a>,
    rotation: Rotation<'a>,
    space: StepSpace<'a>,
    /// Sums over steps and layers of shares: rows read, products taken to rank, query heads bypassed.
    shares: Buffer<'a, f64>,
    /// The launches of a step.
    recording: Option<Recording<'a>>,
}

/// The cache and the index of one layer.
struct LayerState<'d> {
    /// Which positions are its own.
    positions: usize,
    cache: LayerCache<'d>,
    index: Box<dyn CudaIndex + 'd>,
}

/// Makes the indexes of all layers.
type NewIndexes<'f, 'a> = dyn Fn(OnDevice<'a>, &[Limits]) -> Result<Indexes<'a>> + 'f;

impl<'a> CudaBackend<'a> {
    /// Whether a method's caches and selection can be on the device; `turns` says that more than one prompt comes.
    pub fn can(method: &dyn Method, options: &Options, turns: bool) -> bool {
        let packed = options.kv == KvType::TwoBit;
        let needs = CudaNeeds {
            packed,
            later_prompts: turns,
            rows_on_host: false,
        };
        let has_index = method.cuda().is_some_and(|method| method.serves(&needs));
        has_index && !(packed && (turns || options.packed.full > FULL))
    }

    /// Empty caches of `sequences` sequences with room for `capacity` positions each.
    ///
    /// # Errors
    /// Less memory than they need: how much that is, and what would fit.
    pub fn new(
        body: Body<'a>,
        method: &dyn Method,
        options: Options,
        sequences: usize,
        capacity: usize,
    ) -> Result<Self> {
        let indexes = |at, limits: &[Limits]| indexes(method, at, limits);
        Self::with(body, options, sequences, capacity, &indexes)
    }

    /// Caches of `context` random positions and indexes of random contents, with room for as many steps; for a
    /// benchmark.
    ///
    /// # Errors
    /// As [`CudaBackend::new`].
    pub fn random(
        body: Body<'a>,
        method: &dyn Bench,
        codewords: usize,
        options: Options,
        [sequences, context, steps]: [usize; 3],
        seed: u32,
    ) -> Result<Self> {
        let indexes = |at, limits: &[Limits]| {
            let seeds: Vec<u32> = (0..limits.len() as u32).map(|layer| seed + 8 * layer).collect();
            method.indexes(at, limits, &seeds, codewords)
        };
        let mut backend = Self::with(body, options, sequences, context + steps, &indexes)?;
        for (i, layer) in backend.layers.iter().enumerate() {
            if let LayerCache::Plain(rows) = &layer.cache {
                rows.fill(seed + 8 * i as u32 + 4)?;
            }
        }
        let lens = vec![context as u32; sequences];
        backend.positions.iter_mut().try_for_each(|p| p.set(&lens))?;
        Ok(backend)
    }

    fn with(
        body: Body<'a>,
        options: Options,
        sequences: usize,
        capacity: usize,
        indexes: &NewIndexes<'_, 'a>,
    ) -> Result<Self> {
        let (driver, c) = (body.driver, &body.config);
        let shape = body.sizes().shape(sequences, capacity).checked()?;
        check_room(driver, &shape, &options, c.n_layers)?;
        let (positions, limits, places) = groups(driver, shape, &options, &c.windows)?;
        let limits: Vec<Limits> = places.iter().map(|at| limits[*at]).collect();
        let at = OnDevice {
            driver,
            shape,
            kv: options.kv,
        };
        let layers = places.into_iter().zip(indexes(at, &limits)?);
        let layer = |(positions, index)| -> Result<LayerState<'a>> {
            let cache = LayerCache::new(driver, shape, options.kv)?;
            Ok(LayerState {
                positions,
                cache,
                index,
            })
        };
        let layers = layers.map(layer).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            attention: Attention::new(driver, shape)?,
            rotation: Rotation::new(driver, &body.rope, 0, shape.capacity)?,
            space: StepSpace::new(&body, sequences)?,
            shares: Buffer::zeros(driver, "sums of shares", 3)?,
            recording: None,
            body,
            options,
            shape,
            positions,
            layers,
        })
    }

    /// Runs a prompt of one sequence; returns the logits after it: `[vocab]`.
    fn feed_rows(&mut self, ids: &[u32], first: usize) -> Result<Array1<f32>> {
        check_prompt(ids)?;
        self.body.check_ids(ids)?;
        let (driver, sizes) = (self.body.driver, self.body.sizes());
        let m = ids.len();
        let work = self.body.workspace(ROWS.min(m))?;
        let hidden = Buffer::<f32>::new(driver, "hidden states", m * sizes.hidden)?;
        self.body
            .ends
            .embed(&Buffer::of(driver, "ids", ids)?, m, &hidden)?;
        let packed = self.options.kv == KvType::TwoBit;
        if packed && first > 0 {
            return Err(Error::failed("CUDA: a 2-bit cache takes in one prompt"));
        }
        let wants_prompts = packed || self.layers.iter().any(|l| l.index.wants_prompts());
        if let Some(layer) = self.layers.first() {
            layer.index.begin_prompt(first..first + m, ROWS.min(m))?;
        }
        let mut pass = Pass {
            prompts: match wants_prompts {
                true => Some(Prompts::new(driver, self.shape)?),
                false => None,
            },
            prompted: match packed {
                true => Some(Prompted::new(driver, &sizes, self.body.row_type(), m)?),
                false => None,
            },
            work,
            hidden,
        };
        for index in 0..self.layers.len() {
            self.prompt_layer(index, &mut pass, first, m)?;
        }
        if let Some(layer) = self.layers.first() {
            layer.index.end_prompt();
        }
        self.positions
            .iter_mut()
            .try_for_each(|p| p.set(&[(first + m) as u32]))?;
        let last = pass.hidden.part((m - 1) * sizes.hidden, sizes.hidden);
        self.space.finish(&self.body, &pass.work, &last, 1)?;
        self.space.read_logits(&self.body)
    }

    /// A prompt's rows through one layer; the caches are as long as before in the end.
    fn prompt_layer(&mut self, index: usize, pass: &mut Pass<'_>, first: usize, m: usize) -> Result<()> {
        let sizes = self.body.sizes();
        let is_last = index + 1 == self.layers.len();
        let (weights, state) = (&self.body.layers[index], &mut self.layers[index]);
        let positions = &mut self.positions[state.positions];
        if let Some(prompted) = &mut pass.prompted {
            prompted.clear()?;
        }
        let mut last = 0;
        for start in (0..m).step_by(ROWS) {
            interrupt::check()?;
            let n = ROWS.min(m - start);
            last = n;
            positions.set(&[(first + start) as u32])?;
            positions.advance(n)?;
            let work = &pass.work;
            let rows = pass.hidden.part(start * sizes.hidden, n * sizes.hidden);
            work.project(weights, &rows, n, n, &self.rotation, Standing::Last(positions))?;
            match &mut pass.prompted {
                Some(prompted) => prompted.append(&work.k_rope, &work.v, n)?,
                None => state.cache.append(&work.k_rope, &work.v, n, positions)?,
            }
            let cached = pass.rows(&state.cache)?;
            state
                .index
                .extend(work.queries(), work.keys(), n, cached, positions)?;
            // Of the last layer, only the last position is read.
            if !is_last || start + n == m {
                let (at, window, out) = (first + start, weights.window, &work.attended);
                cached.attend_prompt(&work.q_rope, at, n, window, out)?;
                work.finish(weights, &rows, n)?;
                self.space.watch.look(&rows, n * sizes.hidden, index)?;
            }
        }
        let queries = Queries {
            rows: &pass.work.q_rope,
            m: last,
        };
        if let (Some(prompted), Some(prompts)) = (&pass.prompted, &pass.prompts) {
            let layout = self.options.packed;
            state
                .cache
                .pack(&prompted.rows, queries, layout, prompts, positions)?;
        }
        state.index.end_of_prompt(&WholePrompt {
            rows: pass.rows(&state.cache)?,
            cache: Some(&state.cache),
            queries,
            prompts: pass.prompts.as_ref(),
            positions,
        })
    }

    /// Runs decode step number `step` of every sequence, from the ids on the device to the logits and the next ids;
    /// waits for nothing.
    ///
    /// # Errors
    /// The caches are full.
    pub fn advance(&mut self, step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.positions.iter_mut().try_for_each(|p| p.count(1))?;
        let recordable = self.layers.iter().all(|l| l.index.is_recordable());
        // What a trace reads cannot be recorded.
        if trace.is_some() || !recordable {
            return self.launch_step(step, trace);
        }
        if self.recording.is_none() {
            self.recording = Recording::of(self.body.driver, || self.launch_step(step, None))?;
        }
        self.recording.as_ref().map_or(Ok(()), Recording::replay)
    }

    /// The launches of a step: the same for every step.
    fn launch_step(&self, step: usize, mut trace: Option<&mut Trace<'_>>) -> Result<()> {
        let (n, hidden_size) = (self.shape.sequences, self.body.sizes().hidden);
        let (body, space) = (&self.body, &self.space);
        let (work, hidden) = (&space.work, &space.hidden);
        let at = OnDevice {
            driver: body.driver,
            shape: self.shape,
            kv: self.options.kv,
        };
        self.positions.iter().try_for_each(|p| p.begin(1))?;
        body.ends.embed(&space.ids, n, hidden)?;
        for (index, state) in self.layers.iter().enumerate() {
            let (weights, positions) = (&body.layers[index], &self.positions[state.positions]);
            let standing = Standing::Last(positions);
            work.project(weights, hidden, n, 1, &self.rotation, standing)?;
            state.cache.append(&work.k_rope, &work.v, 1, positions)?;
            state.index.append(work.keys(), positions)?;
            let cache = Some(&state.cache);
            let chosen = state.index.select(work.queries(), cache, positions, step)?;
            state
                .cache
                .attend(&self.attention, &work.q_rope, positions, chosen)?;
            state
                .index
                .observe(work.queries(), &state.cache, positions, &self.attention)?;
            self.attention.output_rows(&work.attended)?;
            state.index.tally(at, positions, chosen, &self.shares)?;
            work.finish(weights, hidden, n)?;
            space.watch.look(hidden, n * hidden_size, index)?;
            if let Some(trace) = &mut trace {
                let chosen = match chosen {
                    Some(chosen) => chosen.read()?,
                    None => positions.between()?,
                };
                trace.layer(step, index, chosen.iter())?;
            }
        }
        space.finish(body, work, hidden, n)
    }

    /// Feeds one token per sequence in decode step number `step`; [`CudaBackend::choices`] has what follows.
    pub fn feed(&mut self, ids: &[u32], step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.body.check_ids(ids)?;
        self.space.ids.write(ids)?;
        self.advance(step, trace)
    }

    /// Bytes of keys and values of one position, over all layers and sequences.
    pub fn position_bytes(&self) -> usize {
        self.layers.len() * self.shape.heads() * bytes_per_position(&self.shape, self.options.kv)
    }

    /// The greedy choices after the last step; waits for the device.
    pub fn choices(&self) -> Result<Vec<u32>> {
        self.space.watch.check(&self.body)?;
        self.space.ids.read_part(0, self.shape.sequences)
    }
}

impl Backend for CudaBackend<'_> {
    fn prompt(&mut self, ids: &[u32], first: usize) -> Result<Array1<f32>> {
        self.feed_rows(ids, first)
    }

    fn step(&mut self, id: u32, at: StepAt, trace: Option<&mut Trace<'_>>) -> Result<Array1<f32>> {
        self.feed(&[id], at.step, trace)?;
        self.space.read_logits(&self.body)
    }

    fn next(
        &mut self,
        id: u32,
        at: StepAt,
        trace: Option<&mut Trace<'_>>,
        sampler: &mut Sampler,
    ) -> Result<u32> {
        self.feed(&[id], at.step, trace)?;
        Ok(self.space.next(&self.body, 1, sampler)?[0])
    }

    fn shares(&self, steps: usize) -> Result<Shares> {
        let [read, products, bypassed] = self.shares.read()?[..] else {
            return Err(Error::failed("CUDA: there are not three shares"));
        };
        let sum = Shares {
            read,
            products,
            bypassed,
        };
        let mean = sum.mean(steps * self.layers.len());
        // What ranks by true probabilities takes every product.
        Ok(match self.layers.iter().any(|l| l.index.is_oracle()) {
            true => Shares {
                products: 1.0,
                ..mean
            },
            false => mean,
        })
    }

    fn kv_bytes(&self) -> usize {
        let fixed = self.shape.heads() * fixed_bytes(&self.shape, self.options.kv);
        self.shape.capacity * self.position_bytes() + self.layers.len() * fixed
    }

    fn index_bytes(&self) -> usize {
        self.layers.iter().map(|l| l.index.bytes()).sum()
    }
}

/// The indexes of a method's layers.
///
/// # Errors
/// A method without one on the device; no memory.
pub(crate) fn indexes<'d>(method: &dyn Method, at: OnDevice<'d>, limits: &[Limits]) -> Result<Indexes<'d>> {
    let without = || Error::failed("CUDA: a method without an index on the device");
    method.cuda().ok_or_else(without)?.indexes(at, limits)
}

/// A prompt on its way through the layers.
struct Pass<'d> {
    work: Workspace<'d>,
    hidden: Buffer<'d, f32>,
    /// Where signs or the 2-bit cache need it.
    prompts: Option<Prompts<'d>>,
    /// A layer's rows, where the cache does not keep them as they are.
    prompted: Option<Prompted<'d>>,
}

impl<'d> Pass<'d> {
    /// What a layer's queries attend.
    fn rows<'s>(&'s self, cache: &'s LayerCache<'d>) -> Result<&'s LayerRows<'d>> {
        let prompted = self.prompted.as_ref().map(|p| &p.rows);
        let rows = prompted.or(cache.plain());
        rows.ok_or_else(|| Error::failed("CUDA: a prompt without rows"))
    }
}

/// Positions and limits of every sliding window that layers have, and which of them is each layer's.
pub(crate) type Groups<'d> = (Vec<Positions<'d>>, Vec<Limits>, Vec<usize>);

/// See [`Groups`].
pub(crate) fn groups<'d>(
    driver: &'d dyn Driver,
    shape: Shape,
    options: &Options,
    windows: &[Option<usize>],
) -> Result<Groups<'d>> {
    let (mut positions, mut limits, mut places): Groups<'d> = Groups::default();
    for window in windows {
        let known = limits.iter().position(|l| l.model_window == *window);
        places.push(known.unwrap_or(limits.len()));
        if known.is_none() {
            let new = Limits {
                sinks: options.sinks,
                window: options.window,
                model_window: *window,
                budget: options.budget,
            };
            limits.push(new);
            positions.push(Positions::new(driver, shape, new)?);
        }
    }
    Ok((positions, limits, places))
}

/// Says before anything is taken that the caches do not fit.
fn check_room(driver: &dyn Driver, shape: &Shape, options: &Options, layers: usize) -> Result<()> {
    let each = shape.heads() * layers * bytes_per_position(shape, options.kv);
    let (need, free) = ((each * shape.capacity) as u64, driver.free_bytes()?);
    if need <= free {
        return Ok(());
    }
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    Err(Error::gpu_memory(format_args!(
        "a KV cache of {} positions needs {:.2} GiB, and {:.2} GiB are free: about {} positions would fit",
        shape.capacity,
        gib(need),
        gib(free),
        free / each.max(1) as u64 / 10 * 9,
    ))
    .hint("give fewer tokens, or keep the cache in the machine's memory with --kv host"))
}
