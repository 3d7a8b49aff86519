//! Runs a prompt through the layers of a model on the device.

use super::ROWS;
use super::body::Body;
use super::context::LayerContext;
use super::heads::{HeadList, HeadRoom};
use super::model::DeviceModel;
use super::windows::Windows;
use super::work::{RowPositions, Workspace};
use crate::compute::cuda::buffer::Buffer;
use crate::env;
use crate::error::{Error, Result};
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::prompt::{Prompts, Queries};
use crate::kv::cuda::rows::{CudaRows, WholePrompt};
use crate::kv::cuda::{Positions, Shape};
use crate::kv::packed::Layout;
use crate::method::cuda::{Chunk, CudaIndex};

/// A prompt of one sequence. It passes each layer in chunks of rows.
pub(super) struct PromptPass<'d> {
    /// Position of its first token.
    pub first: usize,
    /// Number of its tokens.
    pub m: usize,
    pub work: Workspace<'d>,
    /// The hidden states, `[m, hidden]`.
    hidden: Buffer<'d, f32>,
    spaces: Vec<PromptSpace<'d>>,
}

/// The buffers of a prompt for layers, or parts of layers, of one shape.
struct PromptSpace<'d> {
    /// Buffers for rows in f32; present if an index or the format of the cache needs them.
    prompts: Option<Prompts<'d>>,
    /// The keys and values that a layer attends; present if no cache on the device has them as floats.
    context: Option<LayerContext<'d>>,
    /// The rows of the part's KV heads; absent if it has all KV heads.
    room: Option<HeadRoom<'d>>,
}

/// The sizes that determine a prompt's buffers.
#[derive(Clone, Copy)]
pub(super) struct PromptRoom {
    /// Position of its first token.
    pub first: usize,
    /// Most rows per chunk.
    pub rows: usize,
}

/// What the layers, or parts of layers, of one shape need for a prompt.
pub(super) struct SpaceNeeds<'s, 'd> {
    /// The shape of their caches.
    pub shape: Shape,
    /// Whether the caches take in prompts with buffers for rows in f32.
    pub needs_room: bool,
    /// Whether they have some of the KV heads only.
    pub is_part: bool,
    /// The keys and values that a layer attends, if no cache on the device has them as floats.
    pub context: Option<LayerContext<'d>>,
    /// Their indexes.
    pub indexes: Vec<&'s (dyn CudaIndex + 'd)>,
}

/// A layer in the form that a prompt needs.
pub(super) struct PromptLayer<'s, 'd> {
    pub number: usize,
    /// One, or several that together have all KV heads.
    pub parts: Vec<PromptPart<'s, 'd>>,
}

/// All KV heads of a layer, or some of them.
pub(super) struct PromptPart<'s, 'd> {
    /// The number of its shape among those of the prompt.
    pub space: usize,
    /// The KV heads; `None` for all of them.
    pub heads: Option<&'s HeadList<'d>>,
    pub index: &'s (dyn CudaIndex + 'd),
    /// `None` if the cache is in host memory.
    pub cache: Option<&'s (dyn CudaRows + 'd)>,
}

impl<'d> PromptSpace<'d> {
    /// Returns the keys and values that a part of a layer attends.
    fn attended<'s>(&'s self, part: &PromptPart<'s, 'd>) -> Result<&'s LayerRows<'s>> {
        let context = self.context.as_ref().map(|context| &context.rows);
        let rows = context.or(part.cache.and_then(|cache| cache.plain()));
        rows.ok_or_else(no_rows)
    }
}

impl<'d> PromptPass<'d> {
    /// Embeds a prompt, and allocates its buffers and those of the indexes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new<'s>(
        body: &Body<'d>,
        ids: &[u32],
        room: PromptRoom,
        spaces: impl IntoIterator<Item = SpaceNeeds<'s, 'd>>,
    ) -> Result<Self>
    where
        'd: 's,
    {
        let (driver, m) = (body.driver, ids.len());
        let space = |needs: SpaceNeeds<'s, 'd>| -> Result<PromptSpace<'d>> {
            if let Some(index) = needs.indexes.first() {
                index.begin_prompt(room.first..room.first + m, room.rows)?;
            }
            let wants_prompts = needs.needs_room || needs.indexes.iter().any(|index| index.wants_prompts());
            Ok(PromptSpace {
                prompts: wants_prompts
                    .then(|| Prompts::new(driver, needs.shape))
                    .transpose()?,
                context: needs.context,
                room: needs
                    .is_part
                    .then(|| HeadRoom::new(driver, needs.shape, room.rows))
                    .transpose()?,
            })
        };
        let spaces = spaces.into_iter().map(space).collect::<Result<_>>()?;
        let hidden = Buffer::new(driver, "hidden states", m * body.config.hidden_size)?;
        body.embed(&Buffer::from_slice(driver, "ids", ids)?, m, &hidden)?;
        Ok(Self {
            first: room.first,
            m,
            work: body.workspace(room.rows)?,
            hidden,
            spaces,
        })
    }

    /// Removes the previous layer's keys and values from the contexts.
    pub fn begin_layer(&mut self) -> Result<()> {
        let contexts = self.spaces.iter_mut().filter_map(|space| space.context.as_mut());
        contexts.into_iter().try_for_each(LayerContext::clear)
    }

    /// Returns rows `start..start + n` of the hidden states.
    pub fn rows(&self, start: usize, n: usize) -> Buffer<'_, f32> {
        let width = self.work.sizes.hidden;
        self.hidden.part(start * width, n * width)
    }

    /// Describes the whole prompt, whose keys and values are in `rows`.
    fn whole<'s>(
        &'s self,
        space: &'s PromptSpace<'d>,
        rows: &'s LayerRows<'s>,
        positions: &'s Positions<'d>,
    ) -> WholePrompt<'s> {
        let heads = space.room.as_ref().map_or(&self.work.heads, |room| &room.rows);
        WholePrompt {
            rows,
            queries: Queries {
                rows: &heads.q.rope,
                m: (self.m - 1) % ROWS + 1,
            },
            prompts: space.prompts.as_ref(),
            positions,
        }
    }

    /// Gives the whole prompt to a part's cache that takes in more than its chunks, once all of it has passed the layer.
    ///
    /// # Errors
    /// As [`CudaRows::prompt`].
    pub fn keep(
        &self,
        space: usize,
        layout: Layout,
        positions: &Positions<'d>,
        to: &mut (dyn CudaRows + 'd),
    ) -> Result<()> {
        let space = &self.spaces[space];
        // Without a context, the cache has had all rows.
        let Some(context) = &space.context else {
            return Ok(());
        };
        to.prompt(&self.whole(space, &context.rows, positions), layout)
    }

    /// Appends the `n` keys and values that were projected last to the context of the first shape.
    pub fn append(&mut self, n: usize) -> Result<()> {
        let context = self.spaces.first_mut().and_then(|space| space.context.as_mut());
        context
            .ok_or_else(no_rows)?
            .append(&self.work.heads.k.rope, &self.work.heads.v, n)
    }

    /// Runs all rows through a layer and appends their keys and values to its contexts or caches. `own` has the positions of
    /// each shape that does not share those of the model. `store` sees the keys and values of each chunk. Afterwards the
    /// layer's positions count the whole prompt.
    pub fn run(
        &mut self,
        model: &mut DeviceModel<'d>,
        own: &mut [Option<Windows<'d>>],
        layer: &PromptLayer<'_, 'd>,
        store: &mut dyn FnMut(&Workspace<'d>, usize) -> Result<()>,
    ) -> Result<()> {
        let is_last = layer.number + 1 == model.body.layers.len();
        let weights = &model.body.layers[layer.number];
        for start in (0..self.m).step_by(ROWS) {
            env::check()?;
            let n = ROWS.min(self.m - start);
            let at = self.first + start;
            // Only the last position of the last layer's output is needed.
            let is_wanted = !is_last || start + n == self.m;
            let positions = model.windows.layer_mut(layer.number);
            positions.set(&[at as u32])?;
            positions.advance(n)?;
            let last = RowPositions::Last(positions);
            self.work
                .project(weights, &self.rows(start, n), n, n, &model.rotation, last)?;
            let positions = &*positions;
            for part in &layer.parts {
                let (work, space) = (&self.work, &mut self.spaces[part.space]);
                let positions = match own.get_mut(part.space) {
                    Some(Some(windows)) => {
                        let positions = windows.layer_mut(layer.number);
                        positions.set(&[at as u32])?;
                        positions.advance(n)?;
                        &*positions
                    }
                    _ => positions,
                };
                let gathered = space.room.as_ref().zip(part.heads);
                if let Some((room, heads)) = gathered {
                    room.gather(work, heads, n)?;
                }
                let (heads, attended) = match gathered {
                    Some((room, _)) => (&room.rows, &room.attended),
                    None => (&work.heads, &work.attended),
                };
                if let Some(context) = &mut space.context {
                    context.append(&heads.k.rope, &heads.v, n)?;
                }
                if let Some(cache) = part.cache {
                    cache.extend(&heads.k.rope, &heads.v, n, positions)?;
                }
                let rows = space.attended(part)?;
                part.index.extend(&Chunk {
                    own: heads.as_ref(),
                    m: n,
                    rows,
                    positions,
                })?;
                if is_wanted {
                    rows.attend_prompt(&heads.q.rope, at, n, weights.window, attended)?;
                    if let Some((room, heads)) = space.room.as_ref().zip(part.heads) {
                        room.scatter(work, heads, n)?;
                    }
                }
            }
            store(&self.work, n)?;
            if is_wanted {
                let hidden = self.rows(start, n);
                self.work.finish(weights, &hidden, n)?;
                let values = n * self.work.sizes.hidden;
                model.space.finite.look(&hidden, values, layer.number)?;
            }
        }
        Ok(())
    }

    /// Adds the whole prompt to the layer's indexes, once all of it has passed the layer. `own` is as in [`PromptPass::run`].
    pub fn end_layer(
        &self,
        model: &DeviceModel<'d>,
        own: &[Option<Windows<'d>>],
        layer: &PromptLayer<'_, 'd>,
    ) -> Result<()> {
        for part in &layer.parts {
            let space = &self.spaces[part.space];
            let windows = own.get(part.space).and_then(Option::as_ref);
            let positions = windows.unwrap_or(&model.windows).layer(layer.number);
            let prompt = self.whole(space, space.attended(part)?, positions);
            part.index.end_of_prompt(&prompt, part.cache)?;
        }
        Ok(())
    }
}

fn no_rows() -> Error {
    Error::internal("CUDA: a prompt without rows")
}
