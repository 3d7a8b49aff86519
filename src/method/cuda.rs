//! Methods on an NVIDIA GPU: a [`CudaMethod`] makes one [`CudaIndex`] per layer of a session.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use super::{Place, Reads};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::rows::{CudaRows, WholePrompt};
use crate::kv::cuda::{CudaSelection, Positions, Shape};
use crate::kv::{KvType, Limits, Rotated, RotatedQkv, StaticSet};

/// What a session requires of a method's index on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct CudaNeeds {
    /// The formats of the cache.
    pub kv: KvType,
    /// Whether there may be more than one prompt.
    pub later_prompts: bool,
    /// Whether the cached rows are in host memory.
    pub rows_on_host: bool,
}

impl CudaNeeds {
    /// Returns whether the cached rows are on the device, as floats.
    pub(super) fn has_rows_on_device(&self) -> bool {
        self.kv.float().is_some() && !self.rows_on_host
    }
}

/// The device that a session's indexes are on, and the shape of its cache.
#[derive(Clone, Copy)]
pub struct OnDevice<'d> {
    /// The GPU.
    pub driver: &'d dyn Driver,
    /// The shape of one layer's cache.
    pub shape: Shape,
    /// Element type of the cache.
    pub kv: KvType,
}

impl OnDevice<'_> {
    /// Returns the place of a KV head in a layer with these limits.
    pub(super) fn place(&self, layer: usize, kv_head: usize, limits: &Limits) -> Place {
        Place {
            layer,
            kv_head,
            group: self.shape.group,
            head_dim: self.shape.head_dim,
            limits: *limits,
            kv: self.kv,
        }
    }
}

/// A layer, and those of its KV heads that an index serves.
#[derive(Clone, Debug)]
pub struct ServedLayer {
    /// Index of the layer.
    pub layer: usize,
    /// Indices of the KV heads in the layer, ascending; the index and its cache have them in this order.
    pub heads: Vec<usize>,
    /// The static set and the budget.
    pub limits: Limits,
}

impl ServedLayer {
    /// Serves all KV heads of every layer, from the first one on.
    pub fn all(limits: &[Limits], kv_heads: usize) -> Vec<Self> {
        let of = |(layer, limits): (usize, &Limits)| Self {
            layer,
            heads: (0..kv_heads).collect(),
            limits: *limits,
        };
        limits.iter().enumerate().map(of).collect()
    }
}

/// The number of sums that [`CudaIndex::tally`] adds to.
pub const TALLIES: usize = 7;

/// The indexes of a session, one per layer.
pub type Indexes<'d> = Vec<Box<dyn CudaIndex + 'd>>;

/// Makes the index of every layer from the layer's number and limits.
pub(super) fn each_layer<'d, I: CudaIndex + 'd>(
    limits: &[Limits],
    mut index: impl FnMut(usize, &Limits) -> Result<I>,
) -> Result<Indexes<'d>> {
    let boxed = |(layer, limits)| Ok(Box::new(index(layer, limits)?) as _);
    limits.iter().enumerate().map(boxed).collect()
}

/// Makes the index of every layer that is served.
pub(super) fn each_served<'d, I: CudaIndex + 'd>(
    layers: &[ServedLayer],
    mut index: impl FnMut(&ServedLayer) -> Result<I>,
) -> Result<Indexes<'d>> {
    let boxed = |layer| Ok(Box::new(index(layer)?) as _);
    layers.iter().map(boxed).collect()
}

/// A method that can choose on an NVIDIA GPU.
pub trait CudaMethod {
    /// Returns whether the method's index supports what a session needs; by default it supports everything.
    fn serves(&self, _needs: &CudaNeeds) -> bool {
        true
    }

    /// Makes the empty index of every layer in `layers`, which each have as many KV heads as the shape.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>>;
}

/// A chunk of a prompt; its rows are the last ones so far.
pub struct Chunk<'a> {
    /// The queries `[b,h,m,d]` of the rows, their keys and values `[b,g,m,d]`.
    pub own: RotatedQkv<&'a Buffer<'a, f32>>,
    /// Number of rows, m.
    pub m: usize,
    /// The rotated keys and values of all positions so far.
    pub rows: &'a LayerRows<'a>,
    /// The positions of the layer, which already count these rows.
    pub positions: &'a Positions<'a>,
}

/// A decode step in a layer.
pub struct CudaStep<'a> {
    /// Number of the step, from 0.
    pub number: usize,
    /// The last position's queries, `[b,h,1,d]`.
    pub queries: Rotated<&'a Buffer<'a, f32>>,
    /// The cache on the device, which already holds the last position; `None` if the rows are in host memory.
    pub cache: Option<&'a (dyn CudaRows + 'a)>,
    /// The positions of the layer.
    pub positions: &'a Positions<'a>,
}

impl<'a> CudaStep<'a> {
    /// Returns the cached rows, for a method that ranks by them.
    ///
    /// # Errors
    /// The rows are no floats, or in host memory.
    pub(super) fn rows(&self) -> Result<&'a LayerRows<'a>> {
        let rows = self.cache.and_then(|cache| cache.plain());
        rows.ok_or_else(|| Error::internal("CUDA: the method needs the cache's rows on the device"))
    }
}

/// The index of one layer, for some or all of its KV heads.
pub trait CudaIndex {
    /// Allocates buffers for a prompt at the positions `prompt`, processed in chunks of up to `rows` rows. Called on
    /// the first index only of those that were made together, on behalf of all of them.
    ///
    /// # Errors
    /// Out of memory.
    fn begin_prompt(&self, _prompt: Range<usize>, _rows: usize) -> Result<()> {
        Ok(())
    }

    /// Frees the buffers of [`CudaIndex::begin_prompt`]. Called on the same index, after all layers are done.
    fn end_prompt(&self) {}

    /// Returns whether [`CudaIndex::end_of_prompt`] needs the rows of a prompt in f32.
    fn wants_prompts(&self) -> bool {
        false
    }

    /// Adds a chunk of a prompt.
    fn extend(&self, _chunk: &Chunk<'_>) -> Result<()> {
        Ok(())
    }

    /// Completes the index after the last chunk of a prompt, whose rows `cache` holds by then if it is on the device.
    fn end_of_prompt(&self, _prompt: &WholePrompt<'_>, _cache: Option<&dyn CudaRows>) -> Result<()> {
        Ok(())
    }

    /// Adds the key of the last position, `[b,g,1,d]`. The cache's rows are stored by the launches right before, beside
    /// which this may run.
    fn append(&self, _keys: Rotated<&Buffer<'_, f32>>, _positions: &Positions<'_>) -> Result<()> {
        Ok(())
    }

    /// Chooses the positions that the last position attends; `None` means all visible positions.
    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>>;

    /// Learns from the attention over the chosen positions; may correct the attention's output.
    fn observe(&self, _step: &CudaStep<'_>, _attention: &Attention<'_>) -> Result<()> {
        Ok(())
    }

    /// Adds this step's figures to `sums` `[TALLIES]`. First come three means over the index's heads: the share of rows
    /// read and, where the method counts them, the shares of exact products and of bypassed query heads. Then come four
    /// sums over these heads: rows attended, keys ranked but not attended, choices of everything visible, and
    /// query heads bypassed.
    fn tally(
        &self,
        at: OnDevice<'_>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
        sums: &Buffer<'_, f64>,
    ) -> Result<()> {
        kernels::TallyRows {
            spans: positions.spans.ptr(),
            listed: chosen.map(|chosen| chosen.listed.ptr()),
            ranked: chosen.and_then(|chosen| chosen.ranked.as_ref().map(Buffer::ptr)),
            sum: sums.ptr(),
            b: at.shape.sequences,
            g: at.shape.kv_heads,
        }
        .launch(at.driver, [1, 1, 1])
    }

    /// Returns whether every step makes the same launches, so that they can be recorded.
    fn is_recordable(&self) -> bool {
        true
    }

    /// Returns whether the index computes every query-key product in order to choose.
    fn is_oracle(&self) -> bool {
        false
    }

    /// Returns the bytes of the index that grow with the context.
    fn bytes(&self) -> usize {
        0
    }

    /// Adds what a step of one KV head with this static set reads of the index; by default, only the device knows what is
    /// read of an index that grows.
    fn reads(&self, _set: &StaticSet, reads: &mut Reads) {
        if self.bytes() > 0 {
            reads.unknown();
        }
    }
}

/// Values that layers with the same sliding window share.
pub(super) struct ByWindow<T>(Vec<(Option<usize>, Rc<T>)>);

impl<T> ByWindow<T> {
    /// Makes an empty set.
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Returns the value that layers with this sliding window share; the first call for a window makes it.
    pub fn get_or_make(&mut self, limits: &Limits, make: impl FnOnce() -> Result<T>) -> Result<Rc<T>> {
        let window = limits.model_window;
        if let Some((_, known)) = self.0.iter().find(|(other, _)| *other == window) {
            return Ok(Rc::clone(known));
        }
        let new = Rc::new(make()?);
        self.0.push((window, Rc::clone(&new)));
        Ok(new)
    }
}

/// Buffers for prompts that all layers share. They exist only while a prompt is processed.
pub(super) type SharedPrompt<T> = Rc<RefCell<Option<T>>>;

/// Calls `work` with the buffers of the current prompt.
///
/// # Errors
/// No prompt has begun.
pub(super) fn in_prompt<T>(shared: &SharedPrompt<T>, work: impl FnOnce(&T) -> Result<()>) -> Result<()> {
    match &*shared.borrow() {
        Some(buffers) => work(buffers),
        None => Err(Error::internal("CUDA: rows of a prompt that did not begin")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_share_by_their_window() {
        let limits = |model_window| Limits {
            model_window,
            ..Limits::last(1)
        };
        let mut shared = ByWindow::new();
        let mut of = |window, i: usize| *shared.get_or_make(&limits(window), || Ok(i)).unwrap();
        let windows = [None, Some(8), None, Some(9), Some(8)];
        let found: Vec<usize> = windows.into_iter().zip(0..).map(|(w, i)| of(w, i)).collect();
        assert_eq!(found, [0, 1, 0, 3, 1]);
    }

    #[test]
    fn a_prompt_begins_before_its_rows_come() {
        let room = SharedPrompt::default();
        let other = room.clone();
        let work = |room: &SharedPrompt<usize>| {
            in_prompt(room, |i| {
                if *i == 7 {
                    Ok(())
                } else {
                    Err(Error::internal("other"))
                }
            })
        };
        assert!(work(&room).is_err());
        room.replace(Some(7));
        assert!(work(&other).is_ok());
        other.take();
        assert!(work(&room).is_err());
    }
}
