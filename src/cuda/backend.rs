//! The backend with caches and indexes on the device.
//!
//! A prompt passes the layers one after the other, in chunks of rows; each layer attends its own cache. A step is one
//! run of launches, from the ids to the logits, during which the host waits for nothing.

use std::ops::Range;
use std::sync::Arc;

use ndarray::Array1;

use super::ROWS;
use super::body::Body;
use super::context::LayerContext;
use super::model::DeviceModel;
use super::prompt::{PromptLayer, PromptPass, PromptRoom};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{Purpose, Recording, allocating};
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::kv::cuda::Limits;
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::cache::{LayerCache, bytes_per_position, fixed_bytes};
use crate::kv::cuda::signs::FULL;
use crate::kv::sample::Sampler;
use crate::method::bench::{Bench, BenchParams, Contents};
use crate::method::cuda::{CudaIndex, CudaNeeds, CudaStep, Indexes, OnDevice, TALLIES};
use crate::method::{CUDA_GRANULE, Method, Reads};
use crate::runner::{Backend, Counts, DecodeOptions, Shares, StepAt, Trace};

/// A model with its caches and indexes on the device. It holds one sequence for a session, or several sequences that
/// [`CudaBackend::feed`] and [`CudaBackend::advance`] continue together. Several backends may share the weights.
pub struct CudaBackend<'a> {
    model: DeviceModel<'a>,
    options: DecodeOptions,
    at: OnDevice<'a>,
    layers: Vec<LayerState<'a>>,
    attention: Attention<'a>,
    /// The sums of [`CudaIndex::tally`] over all steps, `[layers,TALLIES]`.
    tallies: Buffer<'a, f64>,
    /// For each layer, the counters that the host knows without asking the device.
    counts: Vec<Counts>,
    /// The recorded launches of a step.
    recording: Option<Recording<'a>>,
}

/// The cache and the index of one layer.
struct LayerState<'d> {
    cache: LayerCache<'d>,
    index: Box<dyn CudaIndex + 'd>,
}

impl<'d> LayerState<'d> {
    /// Returns layer `number` in the form that a prompt needs.
    fn for_prompt(&self, number: usize) -> PromptLayer<'_, 'd> {
        PromptLayer {
            number,
            index: self.index.as_ref(),
            cache: Some(&self.cache),
        }
    }
}

impl<'a> CudaBackend<'a> {
    /// Returns whether the method's caches and selection can be on the device. `turns` says whether there may be more
    /// than one prompt.
    pub fn can(method: &dyn Method, options: &DecodeOptions, turns: bool) -> bool {
        let packed = options.kv == KvType::TwoBit;
        let needs = CudaNeeds {
            packed,
            later_prompts: turns,
            rows_on_host: false,
        };
        let has_index = method.cuda().is_some_and(|method| method.serves(&needs));
        has_index && !(packed && (turns || options.packed.full > FULL))
    }

    /// Makes empty caches for `sequences` sequences of up to `capacity` positions each.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(
        body: impl Into<Arc<Body<'a>>>,
        method: &dyn Method,
        options: DecodeOptions,
        sequences: usize,
        capacity: usize,
    ) -> Result<Self> {
        let indexes = |at: OnDevice<'a>, limits: &[Limits]| indexes(method, at, limits);
        Self::with(body, options, sequences, capacity, indexes)
    }

    /// For a benchmark: makes caches of `context` random positions and indexes of random contents, with room for
    /// `steps` more positions.
    ///
    /// # Errors
    /// As [`CudaBackend::new`].
    pub fn random(
        body: impl Into<Arc<Body<'a>>>,
        method: &dyn Bench,
        params: &BenchParams,
        options: DecodeOptions,
        [sequences, context, steps]: [usize; 3],
        seed: u32,
    ) -> Result<Self> {
        let indexes = |at: OnDevice<'a>, limits: &[Limits]| {
            let seeds: Vec<u32> = (0..limits.len() as u32).map(|layer| seed + 8 * layer).collect();
            let contents = Contents {
                limits,
                seeds: &seeds,
                params,
            };
            method.indexes(at, &contents)
        };
        let mut backend = Self::with(body, options, sequences, context + steps, indexes)?;
        for (i, layer) in backend.layers.iter().enumerate() {
            if let LayerCache::Plain(rows) = &layer.cache {
                rows.fill(seed + 8 * i as u32 + 4)?;
            }
        }
        backend.model.windows.set(&vec![context as u32; sequences])?;
        Ok(backend)
    }

    fn with(
        body: impl Into<Arc<Body<'a>>>,
        options: DecodeOptions,
        sequences: usize,
        capacity: usize,
        indexes: impl FnOnce(OnDevice<'a>, &[Limits]) -> Result<Indexes<'a>>,
    ) -> Result<Self> {
        let body = body.into();
        let driver = body.driver;
        let shape = body.sizes().shape(sequences, capacity).checked()?;
        let model = DeviceModel::new(body, shape, &options)?;
        let at = OnDevice {
            driver,
            shape,
            kv: options.kv,
        };
        let limits = model.windows.limits();
        let indexes = allocating(driver, Purpose::Indexes, || indexes(at, &limits))?;
        let layers = indexes.into_iter().map(|index| {
            let cache = allocating(driver, Purpose::Caches, || {
                LayerCache::new(driver, shape, options.kv)
            })?;
            Ok(LayerState { cache, index })
        });
        let number = model.body.config.n_layers();
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            attention: Attention::new(driver, shape)?,
            tallies: Buffer::zeros(driver, "sums of what is read", number * TALLIES)?,
            counts: vec![Counts::NONE; number],
            recording: None,
            model,
            options,
            at,
        })
    }

    /// Embeds a prompt, and allocates its buffers and those of the indexes.
    fn begin_prompt(&self, ids: &[u32], first: usize) -> Result<PromptPass<'a>> {
        let body = &self.model.body;
        let packed = self.options.kv == KvType::TwoBit;
        let context = || LayerContext::new(body.driver, &body.sizes(), body.row_type(), ids.len());
        let room = PromptRoom {
            first,
            rows: ROWS.min(ids.len()),
            shape: self.at.shape,
            packed,
        };
        let indexes: Vec<_> = self.layers.iter().map(|l| l.index.as_ref()).collect();
        PromptPass::new(body, ids, room, packed.then(context).transpose()?, &indexes)
    }

    /// Allocates what a prompt at these positions takes, and frees it: see [`room`](super::room).
    pub(super) fn rehearse(&self, prompt: Range<usize>) -> Result<()> {
        self.begin_prompt(&vec![0; prompt.len().max(1)], prompt.start)
            .map(drop)
    }

    /// Runs a prompt through one layer.
    fn prompt_layer(&mut self, number: usize, pass: &mut PromptPass<'a>) -> Result<()> {
        let layer = &mut self.layers[number];
        pass.begin_layer()?;
        pass.run(&mut self.model, &layer.for_prompt(number), &mut |_, _| Ok(()))?;
        if let LayerCache::Packed(cache) = &mut layer.cache {
            pass.pack(self.options.packed, self.model.windows.of(number), cache)?;
        }
        pass.end_layer(&self.model, &layer.for_prompt(number))
    }

    /// Runs decode step number `step` of every sequence, from the ids on the device to the logits and the next ids.
    /// Waits for nothing.
    ///
    /// # Errors
    /// The caches are full.
    pub fn advance(&mut self, step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        let positions = &mut self.model.windows.positions;
        positions.iter_mut().try_for_each(|p| p.count(1))?;
        for (number, (layer, counts)) in self.layers.iter().zip(&mut self.counts).enumerate() {
            for (set, _) in self.model.windows.of(number).sets() {
                let heads = self.at.shape.kv_heads as u64;
                let mut reads = Reads::new(CUDA_GRANULE);
                layer.index.reads(&set, &mut reads);
                let of_heads = |bytes: Option<usize>| bytes.map(|bytes| heads * bytes as u64);
                *counts += Counts {
                    choices: heads,
                    visible: heads * set.visible().len() as u64,
                    index_bytes: of_heads(reads.index_bytes),
                    moved_bytes: of_heads(reads.moved_bytes),
                    scratch_bytes: (layer.index.bytes() == 0).then_some(0),
                    ..Counts::NONE
                };
            }
        }
        let recordable = self.layers.iter().all(|l| l.index.is_recordable());
        // A trace reads results during the step, which a recording cannot do.
        if trace.is_some() || !recordable {
            return self.launch_step(step, trace);
        }
        if self.recording.is_none() {
            self.recording = Recording::of(self.model.body.driver, || self.launch_step(step, None))?;
        }
        self.recording.as_ref().map_or(Ok(()), Recording::replay)
    }

    /// Makes the launches of a step. They are the same for every step unless an index is not recordable.
    fn launch_step(&self, step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        let (model, work, tracing) = (&self.model, &self.model.space.work, trace.is_some());
        model.windows.positions.iter().try_for_each(|p| p.begin(1))?;
        model.step(step, trace, &mut |number| {
            let (LayerState { cache, index }, positions) = (&self.layers[number], model.windows.of(number));
            cache.append(&work.k_rope, &work.v, 1, positions)?;
            index.append(work.keys(), positions)?;
            let at_step = CudaStep {
                number: step,
                queries: work.queries(),
                cache: Some(cache),
                positions,
            };
            let chosen = index.select(&at_step)?;
            cache.attend(&self.attention, &work.q_rope, positions, chosen)?;
            index.observe(&at_step, &self.attention)?;
            self.attention.output_rows(&work.attended)?;
            let sums = self.tallies.part(number * TALLIES, TALLIES);
            // The output and its tally need not wait for one another.
            self.at
                .driver
                .beside(&mut || index.tally(self.at, positions, chosen, &sums))?;
            match chosen {
                _ if !tracing => Ok(Vec::new()),
                Some(chosen) => chosen.read(),
                None => Ok(positions.between()),
            }
        })
    }

    /// Feeds one token per sequence in decode step number `step`. [`CudaBackend::choices`] then returns the greedy next
    /// tokens.
    pub fn feed(&mut self, ids: &[u32], step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.model.send(ids)?;
        self.advance(step, trace)
    }

    /// Returns the bytes of keys and values per position, over all layers and sequences.
    pub fn position_bytes(&self) -> usize {
        self.layers.len() * self.at.shape.heads() * bytes_per_position(&self.at.shape, self.options.kv)
    }

    /// Returns the greedy choices after the last step; waits for the device.
    pub fn choices(&self) -> Result<Vec<u32>> {
        let DeviceModel { body, space, .. } = &self.model;
        space.finite.check(body)?;
        space.ids.read_part(0, self.at.shape.sequences)
    }
}

impl Backend for CudaBackend<'_> {
    fn prompt(&mut self, ids: &[u32], first: usize, done: &mut dyn FnMut(usize)) -> Result<Array1<f32>> {
        let body = &self.model.body;
        body.check_prompt(ids)?;
        if self.options.kv == KvType::TwoBit && first > 0 {
            return Err(Error::internal("CUDA: a 2-bit cache takes in one prompt"));
        }
        let mut pass = self.begin_prompt(ids, first)?;
        for number in 0..self.layers.len() {
            self.prompt_layer(number, &mut pass)?;
            done(ids.len());
        }
        let first = self.layers.first().map(|layer| layer.index.as_ref());
        self.model.end_prompt(&pass, first)
    }

    fn step(&mut self, id: u32, at: StepAt, trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.feed(&[id], at.step, trace)
    }

    fn logits(&self) -> Result<Array1<f32>> {
        self.model.logits()
    }

    fn next(&self, sampler: &mut Sampler) -> Result<u32> {
        match sampler.is_plain() {
            true => self.model.next(sampler),
            false => sampler.next(self.model.logits()?.view()),
        }
    }

    fn shares(&self, steps: usize) -> Result<Shares> {
        let mut sum = Shares::default();
        for layer in self.tallies.read()?.chunks_exact(TALLIES) {
            sum.read += layer[0];
            sum.products += layer[1];
            sum.bypassed += layer[2];
        }
        let mean = sum.mean(steps * self.layers.len());
        // An oracle ranks by true probabilities and therefore computes every product.
        Ok(match self.layers.iter().any(|l| l.index.is_oracle()) {
            true => Shares {
                products: 1.0,
                ..mean
            },
            false => mean,
        })
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        let tallies = self.tallies.read()?;
        let layers = tallies.chunks_exact(TALLIES).zip(&self.counts);
        let moved = |rows: f64, ranked: f64| {
            let mut reads = Reads::new(CUDA_GRANULE);
            reads.unlisted_rows(
                self.options.kv,
                self.at.shape.width(),
                rows as usize,
                ranked as usize,
            );
            reads.moved_bytes.map(|bytes| bytes as u64)
        };
        let counts = layers.map(|(sums, known)| Counts {
            rows: sums[3] as u64,
            ranked_keys: sums[4] as u64,
            full: sums[5] as u64,
            bypassed_heads: sums[6] as u64,
            moved_bytes: known.moved_bytes.zip(moved(sums[3], sums[4])).map(|(a, b)| a + b),
            ..*known
        });
        Ok(counts.collect())
    }

    fn granule(&self) -> usize {
        CUDA_GRANULE
    }

    fn kv_bytes(&self) -> usize {
        let fixed = self.at.shape.heads() * fixed_bytes(&self.at.shape, self.options.kv);
        self.at.shape.capacity * self.position_bytes() + self.layers.len() * fixed
    }

    fn index_bytes(&self) -> usize {
        self.layers.iter().map(|l| l.index.bytes()).sum()
    }
}

/// Makes the method's index for every layer.
///
/// # Errors
/// The method has no index on the device; out of memory.
pub(super) fn indexes<'d>(method: &dyn Method, at: OnDevice<'d>, limits: &[Limits]) -> Result<Indexes<'d>> {
    let without = || Error::internal("CUDA: a method without an index on the device");
    method.cuda().ok_or_else(without)?.indexes(at, limits)
}
