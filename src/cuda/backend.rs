//! The backend with caches and indexes on the device.
//!
//! A prompt passes the layers one after the other, in chunks of rows; each layer attends its own cache. A step is one
//! run of launches, from the ids to the logits, during which the host waits for nothing.

mod open;

use std::ops::Range;

use ndarray::Array1;

use super::ROWS;
use super::context::LayerContext;
use super::heads::{HeadList, HeadRoom};
use super::model::DeviceModel;
use super::prompt::{PromptLayer, PromptPart, PromptPass, PromptRoom, SpaceNeeds};
use super::served::Served;
use super::windows::Windows;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Recording;
use crate::error::{Error, Result};
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::rows::{CudaFormat, CudaRows};
use crate::kv::cuda::{Positions, Shape};
use crate::kv::sample::Sampler;
use crate::method::cuda::{CudaIndex, CudaStep, OnDevice, TALLIES};
use crate::method::{CUDA_GRANULE, Method, Reads};
use crate::runner::{Backend, Counts, DecodeOptions, Shares, StepAt, Trace};

/// A model with its caches and indexes on the device. It holds one sequence for a session, or several sequences that
/// [`CudaBackend::feed`] and [`CudaBackend::advance`] continue together. Several backends may share the weights.
pub struct CudaBackend<'a> {
    model: DeviceModel<'a>,
    options: DecodeOptions,
    /// The shape of a layer with all its KV heads.
    shape: Shape,
    spaces: Vec<Space<'a>>,
    /// The positions of each space that does not share those of the model.
    windows: Vec<Option<Windows<'a>>>,
    /// The parts of each layer: one with all KV heads, or several that together have them.
    layers: Vec<Vec<LayerPart<'a>>>,
    /// The sums of [`CudaIndex::tally`] over all steps, `[parts,TALLIES]`.
    tallies: Buffer<'a, f64>,
    /// The recorded launches of a step.
    recording: Option<Recording<'a>>,
}

/// What the layers, or parts of layers, of one shape, method, budget and format share.
struct Space<'d> {
    at: OnDevice<'d>,
    format: &'static dyn CudaFormat,
    attention: Attention<'d>,
    /// The rows of the part's KV heads in a step; absent if it has all KV heads.
    room: Option<HeadRoom<'d>>,
}

/// The cache and the index of some or all KV heads of one layer.
struct LayerPart<'d> {
    space: usize,
    /// Its number among the parts of all layers.
    number: usize,
    /// The KV heads; `None` for all of them.
    heads: Option<HeadList<'d>>,
    cache: Box<dyn CudaRows + 'd>,
    index: Box<dyn CudaIndex + 'd>,
    /// The counters that the host knows without asking the device.
    counts: Counts,
}

impl<'a> CudaBackend<'a> {
    /// Returns whether the method's caches and selection can be on the device. `turns` says whether there may be more
    /// than one prompt.
    pub fn can(method: &dyn Method, options: &DecodeOptions, turns: bool) -> bool {
        Served::all(method, options)
            .iter()
            .all(|served| served.can(options, turns))
    }

    /// Calls `change` with the positions of the model, and with those of each space that does not share them.
    fn each_positions(&mut self, change: impl Fn(&mut Positions<'a>) -> Result<()>) -> Result<()> {
        let own = self.windows.iter_mut().flatten();
        let all = own.chain([&mut self.model.windows]);
        all.flat_map(|windows| &mut windows.positions)
            .try_for_each(change)
    }

    /// Returns the positions of a part of a layer.
    fn positions(&self, layer: usize, part: &LayerPart<'_>) -> &Positions<'a> {
        self.windows[part.space]
            .as_ref()
            .unwrap_or(&self.model.windows)
            .layer(layer)
    }

    /// Lists the parts of all layers.
    fn parts(&self) -> impl Iterator<Item = &LayerPart<'a>> {
        self.layers.iter().flatten()
    }

    /// Returns the index of each space that stands for the others in the space.
    fn first_indexes(&self) -> Vec<&(dyn CudaIndex + 'a)> {
        let spaces = 0..self.spaces.len();
        let first = spaces.filter_map(|space| self.parts().find(|part| part.space == space));
        first.map(|part| part.index.as_ref()).collect()
    }

    /// Embeds a prompt, and allocates its buffers and those of the indexes.
    fn begin_prompt(&self, ids: &[u32], first: usize) -> Result<PromptPass<'a>> {
        let body = &self.model.body;
        let room = PromptRoom {
            first,
            rows: ROWS.min(ids.len()),
        };
        let needs = |(number, space): (usize, &Space<'a>)| {
            let shape = Shape {
                sequences: 1,
                capacity: ids.len(),
                ..space.at.shape
            };
            let context = || LayerContext::new(body.driver, shape, body.row_type());
            let own = self.parts().filter(|part| part.space == number);
            Ok(SpaceNeeds {
                shape: space.at.shape,
                needs_room: space.format.needs_room(),
                is_part: space.room.is_some(),
                context: (!space.format.is_plain()).then(context).transpose()?,
                indexes: own.map(|part| part.index.as_ref()).collect(),
            })
        };
        let spaces: Vec<_> = self.spaces.iter().enumerate().map(needs).collect::<Result<_>>()?;
        PromptPass::new(body, ids, room, spaces)
    }

    /// Allocates what a prompt at these positions takes, and frees it: see [`room`](super::room).
    pub(super) fn rehearse(&self, prompt: Range<usize>) -> Result<()> {
        self.begin_prompt(&vec![0; prompt.len().max(1)], prompt.start)
            .map(drop)
    }

    /// Runs a prompt through one layer.
    fn prompt_layer(&mut self, number: usize, pass: &mut PromptPass<'a>) -> Result<()> {
        let Self {
            model,
            windows,
            layers,
            options,
            ..
        } = self;
        pass.begin_layer()?;
        pass.run(
            model,
            windows,
            &for_prompt(number, &layers[number]),
            &mut |_, _| Ok(()),
        )?;
        for part in &mut layers[number] {
            let windows = windows[part.space].as_ref().unwrap_or(&model.windows);
            pass.keep(
                part.space,
                options.packed,
                windows.layer(number),
                part.cache.as_mut(),
            )?;
        }
        pass.end_layer(model, windows, &for_prompt(number, &layers[number]))
    }

    /// Runs decode step number `step` of every sequence, from the ids on the device to the logits and the next ids.
    /// Waits for nothing.
    ///
    /// # Errors
    /// The caches are full.
    pub fn advance(&mut self, step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.each_positions(|positions| positions.count(1))?;
        for (number, layer) in self.layers.iter_mut().enumerate() {
            for part in layer {
                let windows = self.windows[part.space].as_ref().unwrap_or(&self.model.windows);
                let heads = self.spaces[part.space].at.shape.kv_heads as u64;
                for (set, _) in windows.layer(number).sets() {
                    let mut reads = Reads::new(CUDA_GRANULE);
                    part.index.reads(&set, &mut reads);
                    let of_heads = |bytes: Option<usize>| bytes.map(|bytes| heads * bytes as u64);
                    part.counts += Counts {
                        choices: heads,
                        visible: heads * set.visible().len() as u64,
                        index_bytes: of_heads(reads.index_bytes),
                        moved_bytes: of_heads(reads.moved_bytes),
                        scratch_bytes: (part.index.bytes() == 0).then_some(0),
                        ..Counts::NONE
                    };
                }
            }
        }
        let recordable = self.parts().all(|part| part.index.is_recordable());
        // A trace reads results during the step, which a recording cannot do.
        if trace.is_some() || !recordable {
            return self.launch_step(step, trace);
        }
        if self.recording.is_none() {
            self.recording = Recording::record(self.model.body.driver, || self.launch_step(step, None))?;
        }
        self.recording.as_ref().map_or(Ok(()), Recording::replay)
    }

    /// Makes the launches of a step. They are the same for every step unless an index is not recordable.
    fn launch_step(&self, step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        let (model, tracing) = (&self.model, trace.is_some());
        let own = self.windows.iter().flatten().chain([&model.windows]);
        let mut positions = own.flat_map(|windows| &windows.positions);
        positions.try_for_each(|p| p.begin(1))?;
        model.step(step, trace, &mut |layer| {
            let mut chosen = vec![Vec::new(); if tracing { self.shape.heads() } else { 0 }];
            for part in &self.layers[layer] {
                let lists = self.launch_part(step, layer, part, tracing)?;
                match &part.heads {
                    None => chosen = lists,
                    // A trace is of one sequence.
                    Some(heads) => heads
                        .kv_heads
                        .iter()
                        .zip(lists)
                        .for_each(|(head, list)| chosen[*head] = list),
                }
            }
            Ok(chosen)
        })
    }

    /// Makes the launches of a step for a part of a layer, which fill its part of the attention output. Returns the positions
    /// that its KV heads chose if the step is traced.
    fn launch_part(
        &self,
        step: usize,
        layer: usize,
        part: &LayerPart<'a>,
        tracing: bool,
    ) -> Result<Vec<Vec<u32>>> {
        let (work, space) = (&self.model.space.work, &self.spaces[part.space]);
        let (cache, index, positions) = (&part.cache, &part.index, self.positions(layer, part));
        let gathered = space.room.as_ref().zip(part.heads.as_ref());
        if let Some((room, heads)) = gathered {
            room.gather(work, heads, 1)?;
        }
        let (rows, attended) = match gathered {
            Some((room, _)) => (&room.rows, &room.attended),
            None => (&work.heads, &work.attended),
        };
        cache.append(&rows.k.rope, &rows.v, 1, positions)?;
        index.append(rows.k.as_ref(), positions)?;
        let at_step = CudaStep {
            number: step,
            queries: rows.q.as_ref(),
            cache: Some(cache.as_ref()),
            positions,
        };
        let chosen = index.select(&at_step)?;
        cache.attend(&space.attention, &rows.q.rope, positions, chosen)?;
        index.observe(&at_step, &space.attention)?;
        space.attention.output_rows(attended)?;
        let sums = self.tallies.part(part.number * TALLIES, TALLIES);
        // The output and its tally need not wait for one another.
        self.model
            .body
            .driver
            .beside(&mut || index.tally(space.at, positions, chosen, &sums))?;
        if let Some((room, heads)) = gathered {
            room.scatter(work, heads, self.shape.sequences)?;
        }
        match chosen {
            _ if !tracing => Ok(Vec::new()),
            Some(chosen) => chosen.read(),
            None => Ok(positions.between()),
        }
    }

    /// Feeds one token per sequence in decode step number `step`. [`CudaBackend::choices`] then returns the greedy next
    /// tokens.
    pub fn feed(&mut self, ids: &[u32], step: usize, trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.model.send(ids)?;
        self.advance(step, trace)
    }

    /// Returns the bytes of keys and values per position, over all layers and sequences.
    pub fn position_bytes(&self) -> usize {
        self.of_parts(|of| of.at.shape.heads() * of.format.bytes_per_position(&of.at.shape))
    }

    /// Returns the greedy choices after the last step; waits for the device.
    pub fn choices(&self) -> Result<Vec<u32>> {
        let DeviceModel { body, space, .. } = &self.model;
        space.finite.check(body)?;
        space.ids.read_part(0, self.shape.sequences)
    }

    /// Adds up what parts of a space take, over all parts.
    fn of_parts(&self, of: impl Fn(&Space<'a>) -> usize) -> usize {
        self.parts().map(|part| of(&self.spaces[part.space])).sum()
    }
}

/// Returns a layer in the form that a prompt needs.
fn for_prompt<'s, 'd>(number: usize, parts: &'s [LayerPart<'d>]) -> PromptLayer<'s, 'd> {
    let part = |part: &'s LayerPart<'d>| PromptPart {
        space: part.space,
        heads: part.heads.as_ref(),
        index: part.index.as_ref(),
        cache: Some(part.cache.as_ref()),
    };
    PromptLayer {
        number,
        parts: parts.iter().map(part).collect(),
    }
}

impl<'a> Backend for CudaBackend<'a> {
    fn prompt(&mut self, ids: &[u32], first: usize, done: &mut dyn FnMut(usize)) -> Result<Array1<f32>> {
        let body = &self.model.body;
        body.check_prompt(ids)?;
        let refuses = |space: &&Space<'a>| first > 0 && space.format.needs_one_prompt();
        if let Some(space) = self.spaces.iter().find(refuses) {
            let kv = space.at.kv;
            return Err(Error::internal(format!(
                "CUDA: a cache of type {kv} takes in one prompt"
            )));
        }
        let mut pass = self.begin_prompt(ids, first)?;
        for number in 0..self.layers.len() {
            self.prompt_layer(number, &mut pass)?;
            done(ids.len());
        }
        let lens = [(first + ids.len()) as u32];
        self.windows
            .iter_mut()
            .flatten()
            .try_for_each(|own| own.set(&lens))?;
        let indexes = self.first_indexes();
        indexes.into_iter().for_each(|index| index.end_prompt());
        self.model.end_prompt(&pass, None)
    }

    fn step(&mut self, id: u32, at: StepAt, trace: Option<&mut Trace<'_>>) -> Result<()> {
        self.feed(&[id], at.step, trace)
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
        let (mut sum, tallies) = (Shares::default(), self.tallies.read()?);
        for part in self.parts() {
            let of_part = &tallies[part.number * TALLIES..];
            // Its means are over its own heads.
            let weight = self.spaces[part.space].at.shape.kv_heads as f64 / self.shape.kv_heads as f64;
            sum.read += weight * of_part[0];
            // An oracle ranks by true probabilities and therefore computes every product.
            sum.products += weight
                * if part.index.is_oracle() {
                    steps as f64
                } else {
                    of_part[1]
                };
            sum.bypassed += weight * of_part[2];
        }
        Ok(sum.mean(steps * self.layers.len()))
    }

    fn counts(&self) -> Result<Vec<Counts>> {
        let tallies = self.tallies.read()?;
        let of_part = |part: &LayerPart<'a>| {
            let (sums, at) = (&tallies[part.number * TALLIES..], &self.spaces[part.space].at);
            let mut reads = Reads::new(CUDA_GRANULE);
            reads.unlisted_rows(at.kv, at.shape.width(), sums[3] as usize, sums[4] as usize);
            let moved = reads.moved_bytes.map(|bytes| bytes as u64);
            Counts {
                rows: sums[3] as u64,
                ranked_keys: sums[4] as u64,
                full: sums[5] as u64,
                bypassed_heads: sums[6] as u64,
                moved_bytes: part.counts.moved_bytes.zip(moved).map(|(a, b)| a + b),
                ..part.counts
            }
            .in_rows(at.kv, at.shape.head_dim)
        };
        let layers = self.layers.iter();
        Ok(layers.map(|parts| parts.iter().map(of_part).sum()).collect())
    }

    fn granule(&self) -> usize {
        CUDA_GRANULE
    }

    fn kv_bytes(&self) -> usize {
        let fixed = self.of_parts(|of| of.at.shape.heads() * of.format.fixed_bytes(&of.at.shape));
        self.shape.capacity * self.position_bytes() + fixed
    }

    fn index_bytes(&self) -> usize {
        self.parts().map(|part| part.index.bytes()).sum()
    }
}
