//! A prompt on its way through the layers of a model on the device.

use super::ROWS;
use super::body::Body;
use super::context::LayerContext;
use super::model::DeviceModel;
use super::work::{RowPositions, Workspace};
use crate::compute::cuda::buffer::Buffer;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::kv::cuda::attend::LayerRows;
use crate::kv::cuda::cache::LayerCache;
use crate::kv::cuda::packed::PackedLayer;
use crate::kv::cuda::prompt::{Prompts, Queries};
use crate::kv::cuda::{Positions, Shape};
use crate::kv::packed::Layout;
use crate::method::cuda::{Chunk, CudaIndex, WholePrompt};

/// A prompt of one sequence, which passes each layer in chunks of rows.
pub(super) struct PromptPass<'d> {
    /// Position of its first token.
    pub first: usize,
    /// Number of its tokens.
    pub m: usize,
    pub work: Workspace<'d>,
    /// `[m, hidden]`.
    hidden: Buffer<'d, f32>,
    /// Where an index or the 2-bit cache works on rows as f32.
    prompts: Option<Prompts<'d>>,
    /// What a layer attends, where no cache on the device holds it as it is.
    context: Option<LayerContext<'d>>,
}

/// The room that a prompt takes.
#[derive(Clone, Copy)]
pub(super) struct PromptRoom {
    /// Position of its first token.
    pub first: usize,
    /// Rows of the workspace.
    pub rows: usize,
    /// The cache of a layer.
    pub shape: Shape,
    /// Whether the cache is in 2 bits.
    pub packed: bool,
}

/// A layer that a prompt passes.
pub(super) struct PromptLayer<'s, 'd> {
    pub number: usize,
    pub index: &'s (dyn CudaIndex + 'd),
    /// `None` where it is in the machine's memory.
    pub cache: Option<&'s LayerCache<'d>>,
}

impl<'d> PromptPass<'d> {
    /// A prompt before the first layer; makes room for it in the indexes of all layers.
    ///
    /// # Errors
    /// No memory.
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

    /// Forgets the rows of the layer before.
    pub fn begin_layer(&mut self) -> Result<()> {
        self.context.as_mut().map_or(Ok(()), LayerContext::clear)
    }

    /// The hidden states of rows `start..start + n`.
    pub fn rows(&self, start: usize, n: usize) -> Buffer<'_, f32> {
        let width = self.work.sizes.hidden;
        self.hidden.part(start * width, n * width)
    }

    /// The rotated queries of the last chunk.
    pub fn queries(&self) -> Queries<'_> {
        Queries {
            rows: &self.work.q_rope,
            m: (self.m - 1) % ROWS + 1,
        }
    }

    /// Packs the prompt, all of which has passed the layer, into the layer's 2-bit cache.
    ///
    /// # Errors
    /// More full-precision tokens than there is room for.
    pub fn pack(&self, layout: Layout, positions: &Positions<'d>, to: &mut PackedLayer<'d>) -> Result<()> {
        let room = self.context.as_ref().zip(self.prompts.as_ref());
        let (LayerContext { rows, .. }, prompts) = room.ok_or_else(no_rows)?;
        prompts.pack(rows, self.queries(), layout, positions, to)
    }

    /// The keys and values that a layer attends.
    pub fn attended<'s>(&'s self, layer: &PromptLayer<'s, 'd>) -> Result<&'s LayerRows<'d>> {
        let context = self.context.as_ref().map(|context| &context.rows);
        let rows = context.or(layer.cache.and_then(LayerCache::plain));
        rows.ok_or_else(no_rows)
    }

    /// Takes the last `n` keys and values that were projected into the context, or into the cache where there is none.
    pub fn append(&mut self, cache: Option<(&LayerCache<'d>, &Positions<'d>)>, n: usize) -> Result<()> {
        let (keys, values) = (&self.work.k_rope, &self.work.v);
        match (&mut self.context, cache) {
            (Some(context), _) => context.append(keys, values, n),
            (None, Some((cache, positions))) => cache.append(keys, values, n, positions),
            (None, None) => Err(no_rows()),
        }
    }

    /// Runs all rows through a layer and into its context or cache; `store` sees the keys and values of each chunk.
    /// The layer's positions end with the prompt's afterwards.
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
            interrupt::check()?;
            let n = ROWS.min(self.m - start);
            let at = self.first + start;
            positions.set(&[at as u32])?;
            positions.advance(n)?;
            let row_positions = RowPositions::Last(positions);
            self.work.project(
                weights,
                &self.rows(start, n),
                n,
                n,
                &model.rotation,
                row_positions,
            )?;
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
            // Of the last layer, only the last position is read.
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

    /// Takes the prompt, all of which has passed the layer, into the layer's index.
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
    Error::failed("CUDA: a prompt without rows")
}
