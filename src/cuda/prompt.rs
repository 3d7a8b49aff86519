//! Runs a prompt through the layers of a model on the device.

use super::ROWS;
use super::body::Body;
use super::context::LayerContext;
use super::model::DeviceModel;
use super::work::{RowPositions, Workspace};
use crate::compute::cuda::buffer::Buffer;
use crate::env;
use crate::error::{Error, Result};
use crate::kv::cuda::attend::LayerRows;
use crate::kv::cuda::cache::LayerCache;
use crate::kv::cuda::packed::PackedLayer;
use crate::kv::cuda::prompt::{Prompts, Queries};
use crate::kv::cuda::{Positions, Shape};
use crate::kv::packed::Layout;
use crate::method::cuda::{Chunk, CudaIndex, WholePrompt};

/// A prompt of one sequence. It passes each layer in chunks of rows.
pub(super) struct PromptPass<'d> {
    /// Position of its first token.
    pub first: usize,
    /// Number of its tokens.
    pub m: usize,
    pub work: Workspace<'d>,
    /// The hidden states, `[m, hidden]`.
    hidden: Buffer<'d, f32>,
    /// Buffers for rows in f32; present if an index or the 2-bit cache needs them.
    prompts: Option<Prompts<'d>>,
    /// The keys and values that a layer attends; present if no cache on the device holds them in a float type.
    context: Option<LayerContext<'d>>,
}

/// The sizes that determine a prompt's buffers.
#[derive(Clone, Copy)]
pub(super) struct PromptRoom {
    /// Position of its first token.
    pub first: usize,
    /// Most rows per chunk.
    pub rows: usize,
    /// The shape of one layer's cache.
    pub shape: Shape,
    /// Whether the cache is in 2 bits.
    pub packed: bool,
}

/// A layer in the form that a prompt needs.
pub(super) struct PromptLayer<'s, 'd> {
    pub number: usize,
    pub index: &'s (dyn CudaIndex + 'd),
    /// `None` if the cache is in host memory.
    pub cache: Option<&'s LayerCache<'d>>,
}

impl<'d> PromptPass<'d> {
    /// Embeds a prompt, and allocates its buffers and those of the indexes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(
        body: &Body<'d>,
        ids: &[u32],
        room: PromptRoom,
        context: Option<LayerContext<'d>>,
        indexes: &[&(dyn CudaIndex + 'd)],
    ) -> Result<Self> {
        let (driver, m) = (body.driver, ids.len());
        if let Some(index) = indexes.first() {
            index.begin_prompt(room.first..room.first + m, room.rows)?;
        }
        let wants_prompts = room.packed || indexes.iter().any(|index| index.wants_prompts());
        let hidden = Buffer::new(driver, "hidden states", m * body.config.hidden_size)?;
        body.embed(&Buffer::of(driver, "ids", ids)?, m, &hidden)?;
        Ok(Self {
            first: room.first,
            m,
            work: body.workspace(room.rows)?,
            hidden,
            prompts: match wants_prompts {
                true => Some(Prompts::new(driver, room.shape)?),
                false => None,
            },
            context,
        })
    }

    /// Removes the previous layer's keys and values from the context.
    pub fn begin_layer(&mut self) -> Result<()> {
        self.context.as_mut().map_or(Ok(()), LayerContext::clear)
    }

    /// Returns rows `start..start + n` of the hidden states.
    pub fn rows(&self, start: usize, n: usize) -> Buffer<'_, f32> {
        let width = self.work.sizes.hidden;
        self.hidden.part(start * width, n * width)
    }

    /// Returns the rotated queries of the last chunk.
    pub fn queries(&self) -> Queries<'_> {
        Queries {
            rows: &self.work.q_rope,
            m: (self.m - 1) % ROWS + 1,
        }
    }

    /// Packs the whole prompt into the layer's 2-bit cache, once all of it has passed the layer.
    ///
    /// # Errors
    /// More full-precision tokens than there is room for.
    pub fn pack(&self, layout: Layout, positions: &Positions<'d>, to: &mut PackedLayer<'d>) -> Result<()> {
        let room = self.context.as_ref().zip(self.prompts.as_ref());
        let (LayerContext { rows, .. }, prompts) = room.ok_or_else(no_rows)?;
        prompts.pack(rows, self.queries(), layout, positions, to)
    }

    /// Returns the keys and values that a layer attends.
    pub fn attended<'s>(&'s self, layer: &PromptLayer<'s, 'd>) -> Result<&'s LayerRows<'d>> {
        let context = self.context.as_ref().map(|context| &context.rows);
        let rows = context.or(layer.cache.and_then(LayerCache::plain));
        rows.ok_or_else(no_rows)
    }

    /// Appends the `n` keys and values that were projected last to the context or, if there is none, to the cache.
    pub fn append(&mut self, cache: Option<(&LayerCache<'d>, &Positions<'d>)>, n: usize) -> Result<()> {
        let (keys, values) = (&self.work.k_rope, &self.work.v);
        match (&mut self.context, cache) {
            (Some(context), _) => context.append(keys, values, n),
            (None, Some((cache, positions))) => cache.append(keys, values, n, positions),
            (None, None) => Err(no_rows()),
        }
    }

    /// Runs all rows through a layer and appends their keys and values to its context or cache. `store` sees the keys
    /// and values of each chunk. Afterwards the layer's positions count the whole prompt.
    pub fn run(
        &mut self,
        model: &mut DeviceModel<'d>,
        layer: &PromptLayer<'_, 'd>,
        store: &mut dyn FnMut(&Workspace<'d>, usize) -> Result<()>,
    ) -> Result<()> {
        let is_last = layer.number + 1 == model.body.layers.len();
        let weights = &model.body.layers[layer.number];
        let positions = model.windows.of_mut(layer.number);
        for start in (0..self.m).step_by(ROWS) {
            env::check()?;
            let n = ROWS.min(self.m - start);
            let at = self.first + start;
            positions.set(&[at as u32])?;
            positions.advance(n)?;
            let last = RowPositions::Last(positions);
            self.work
                .project(weights, &self.rows(start, n), n, n, &model.rotation, last)?;
            self.append(layer.cache.map(|cache| (cache, &*positions)), n)?;
            let (work, rows) = (&self.work, self.attended(layer)?);
            layer.index.extend(&Chunk {
                queries: work.queries(),
                keys: work.keys(),
                m: n,
                rows,
                positions,
            })?;
            store(work, n)?;
            // Only the last position of the last layer's output is needed.
            if !is_last || start + n == self.m {
                rows.attend_prompt(&work.q_rope, at, n, weights.window, &work.attended)?;
                let hidden = self.rows(start, n);
                work.finish(weights, &hidden, n)?;
                let values = n * work.sizes.hidden;
                model.space.finite.look(&hidden, values, layer.number)?;
            }
        }
        Ok(())
    }

    /// Adds the whole prompt to the layer's index, once all of it has passed the layer.
    pub fn end_layer(&self, model: &DeviceModel<'d>, layer: &PromptLayer<'_, 'd>) -> Result<()> {
        layer.index.end_of_prompt(&WholePrompt {
            rows: self.attended(layer)?,
            cache: layer.cache,
            queries: self.queries(),
            prompts: self.prompts.as_ref(),
            positions: model.windows.of(layer.number),
        })
    }
}

fn no_rows() -> Error {
    Error::internal("CUDA: a prompt without rows")
}
