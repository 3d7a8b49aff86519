//! What a method is on an NVIDIA GPU: a [`CudaMethod`] makes a [`CudaIndex`] for every layer of a session.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use super::Place;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::kv::cuda::attend::{Attention, LayerRows};
use crate::kv::cuda::cache::LayerCache;
use crate::kv::cuda::prompt::{Prompts, Queries};
use crate::kv::cuda::{Limits, Positions, Rotated, Selection, Shape};

/// What a session needs of a method's index.
#[derive(Clone, Copy, Debug)]
pub struct CudaNeeds {
    /// The cache is in 2 bits.
    pub packed: bool,
    /// More than one prompt comes.
    pub later_prompts: bool,
    /// The cached rows are in the machine's memory.
    pub rows_on_host: bool,
}

impl CudaNeeds {
    /// Returns whether the cached rows are on the device and not packed.
    pub(super) fn has_rows_on_device(&self) -> bool {
        !self.packed && !self.rows_on_host
    }
}

/// Where the indexes of a session are, and the cache beside which they are.
#[derive(Clone, Copy)]
pub struct OnDevice<'d> {
    /// The GPU.
    pub driver: &'d dyn Driver,
    /// One layer's cache.
    pub shape: Shape,
    /// Element type of the cache.
    pub kv: KvType,
}

impl OnDevice<'_> {
    /// Returns the place of a KV head of a layer with these limits.
    pub(super) fn place(&self, layer: usize, kv_head: usize, limits: &Limits) -> Place {
        Place {
            layer,
            kv_head,
            group: self.shape.group,
            head_dim: self.shape.head_dim,
            model_window: limits.model_window,
            sinks: limits.sinks,
            window: limits.window,
            budget: limits.budget,
            kv: self.kv,
        }
    }
}

/// One index per layer.
pub type Indexes<'d> = Vec<Box<dyn CudaIndex + 'd>>;

/// Returns a grid of `blocks` for each KV head of each sequence.
pub(super) fn grid(shape: &Shape, blocks: usize) -> [usize; 3] {
    [blocks, shape.kv_heads, shape.sequences]
}

/// Makes one index per layer from its number and its limits.
pub(super) fn each_layer<'d, I: CudaIndex + 'd>(
    limits: &[Limits],
    mut index: impl FnMut(usize, &Limits) -> Result<I>,
) -> Result<Indexes<'d>> {
    let boxed = |(layer, limits)| Ok(Box::new(index(layer, limits)?) as _);
    limits.iter().enumerate().map(boxed).collect()
}

/// A method whose index can be on an NVIDIA GPU.
pub trait CudaMethod {
    /// Returns whether its index has what a session needs; by default it has.
    fn serves(&self, needs: &CudaNeeds) -> bool {
        let _ = needs;
        true
    }

    /// The empty index of every layer; `limits` has one entry per layer. What layers share is made here.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
    fn indexes<'d>(&self, at: OnDevice<'d>, limits: &[Limits]) -> Result<Indexes<'d>>;
}

/// The last rows of a prompt so far.
pub struct Chunk<'a> {
    /// Their queries, `[b,h,m,d]`.
    pub queries: Rotated<'a>,
    /// Their keys, `[b,g,m,d]`.
    pub keys: Rotated<'a>,
    /// Rows, m.
    pub m: usize,
    /// The rotated keys and values of all positions.
    pub rows: &'a LayerRows<'a>,
    /// Positions of the layer, which count these rows.
    pub positions: &'a Positions<'a>,
}

/// A prompt that has passed a layer.
pub struct WholePrompt<'a> {
    /// All its rows, behind those of earlier prompts.
    pub rows: &'a LayerRows<'a>,
    /// The cache on the device that holds them now.
    pub cache: Option<&'a LayerCache<'a>>,
    /// Those of its last chunk.
    pub queries: Queries<'a>,
    /// Where it is worked on, if the index [`wants_prompts`](CudaIndex::wants_prompts) or the cache does.
    pub prompts: Option<&'a Prompts<'a>>,
    /// Positions of the layer.
    pub positions: &'a Positions<'a>,
}

/// A decode step in a layer.
pub struct CudaStep<'a> {
    /// Number of the step, from 0.
    pub number: usize,
    /// The last position's queries, `[b,h,1,d]`.
    pub queries: Rotated<'a>,
    /// The cache on the device, the last position included.
    pub cache: Option<&'a LayerCache<'a>>,
    /// Positions of the layer.
    pub positions: &'a Positions<'a>,
}

impl<'a> CudaStep<'a> {
    /// The cache's rows, for what ranks by them.
    ///
    /// # Errors
    /// They are in 2 bits, or in the machine's memory.
    pub(super) fn rows(&self) -> Result<&'a LayerRows<'a>> {
        let rows = self.cache.and_then(LayerCache::plain);
        rows.ok_or_else(|| Error::failed("CUDA: the method needs the cache's rows on the device"))
    }
}

/// The index of one layer, for all its KV heads.
pub trait CudaIndex {
    /// Makes room for a prompt at these positions, which passes in chunks of up to `rows` rows. Called on the index of
    /// the first layer, for all layers.
    ///
    /// # Errors
    /// No memory.
    fn begin_prompt(&self, prompt: Range<usize>, rows: usize) -> Result<()> {
        let _ = (prompt, rows);
        Ok(())
    }

    /// Frees that room, after the prompt has passed all layers. Called on the index of the first layer.
    fn end_prompt(&self) {}

    /// Whether [`CudaIndex::end_of_prompt`] works on the rows of a prompt as f32.
    fn wants_prompts(&self) -> bool {
        false
    }

    /// Takes in a chunk of a prompt.
    fn extend(&self, chunk: &Chunk<'_>) -> Result<()> {
        let _ = chunk;
        Ok(())
    }

    /// Takes in a prompt after its last chunk.
    fn end_of_prompt(&self, prompt: &WholePrompt<'_>) -> Result<()> {
        let _ = prompt;
        Ok(())
    }

    /// Takes in the key of the last position, `[b,g,1,d]`.
    fn append(&self, keys: Rotated<'_>, positions: &Positions<'_>) -> Result<()> {
        let _ = (keys, positions);
        Ok(())
    }

    /// Chooses what the last position attends; `None` is everything.
    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&Selection<'_>>>;

    /// Learns from the attention over what was chosen, and has its own say in the result.
    fn observe(&self, step: &CudaStep<'_>, attention: &Attention<'_>) -> Result<()> {
        let _ = (step, attention);
        Ok(())
    }

    /// Adds to `sums` `[3]` what a layer did in this step, mean over its heads: the share of rows read; of products
    /// taken to rank and of query heads bypassed, where that is counted.
    fn tally(
        &self,
        at: OnDevice<'_>,
        positions: &Positions<'_>,
        chosen: Option<&Selection<'_>>,
        sums: &Buffer<'_, f64>,
    ) -> Result<()> {
        kernels::TallyRows {
            spans: positions.span_ptr(),
            listed: chosen.map(Selection::listed_ptr),
            ranked: chosen.and_then(Selection::ranked_ptr),
            sum: sums.ptr(),
            b: at.shape.sequences,
            g: at.shape.kv_heads,
        }
        .launch(at.driver, [1, 1, 1])
    }

    /// Whether a step's launches are the same every time.
    fn is_recordable(&self) -> bool {
        true
    }

    /// Whether it takes every product of a query with a key in order to choose.
    fn is_oracle(&self) -> bool {
        false
    }

    /// Bytes that grow with the context.
    fn bytes(&self) -> usize {
        0
    }
}

/// What layers share that see as far.
pub(super) struct ByWindow<T>(Vec<(Option<usize>, Rc<T>)>);

impl<T> ByWindow<T> {
    /// Nothing yet.
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// That of layers with these limits; the first one makes it.
    pub fn of(&mut self, limits: &Limits, make: impl FnOnce() -> Result<T>) -> Result<Rc<T>> {
        let window = limits.model_window;
        if let Some((_, known)) = self.0.iter().find(|(other, _)| *other == window) {
            return Ok(Rc::clone(known));
        }
        let new = Rc::new(make()?);
        self.0.push((window, Rc::clone(&new)));
        Ok(new)
    }
}

/// Where all layers of a session take in prompts; there from the beginning of a prompt to its end.
pub(super) struct SharedPrompt<T>(Rc<RefCell<Option<T>>>);

impl<T> Clone for SharedPrompt<T> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<T> SharedPrompt<T> {
    /// None yet.
    pub fn new() -> Self {
        Self(Rc::new(RefCell::new(None)))
    }

    /// Begins a prompt.
    pub fn begin(&self, room: T) {
        *self.0.borrow_mut() = Some(room);
    }

    /// Ends it.
    pub fn end(&self) {
        *self.0.borrow_mut() = None;
    }

    /// Works in the room.
    ///
    /// # Errors
    /// No prompt has begun.
    pub fn work(&self, work: impl FnOnce(&T) -> Result<()>) -> Result<()> {
        match &*self.0.borrow() {
            Some(room) => work(room),
            None => Err(Error::failed("CUDA: rows of a prompt that did not begin")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::Budget;

    #[test]
    fn layers_share_by_their_window() {
        let limits = |model_window| Limits {
            sinks: 0,
            window: 1,
            model_window,
            budget: Budget::Count(1),
        };
        let mut shared = ByWindow::new();
        let mut of = |window, i: usize| *shared.of(&limits(window), || Ok(i)).unwrap();
        let windows = [None, Some(8), None, Some(9), Some(8)];
        let found: Vec<usize> = windows.into_iter().zip(0..).map(|(w, i)| of(w, i)).collect();
        assert_eq!(found, [0, 1, 0, 3, 1]);
    }

    #[test]
    fn a_prompt_begins_before_its_rows_come() {
        let room = SharedPrompt::new();
        let other = room.clone();
        let work = |room: &SharedPrompt<usize>| {
            room.work(|i| {
                if *i == 7 {
                    Ok(())
                } else {
                    Err(Error::failed("other"))
                }
            })
        };
        assert!(work(&room).is_err());
        room.begin(7);
        assert!(work(&other).is_ok());
        other.end();
        assert!(work(&room).is_err());
    }
}
