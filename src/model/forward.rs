//! The forward pass as traits that leave the device to the implementation and the KV cache to the caller.
//!
//! [`Forward`] runs prompts and single tokens of one or more trajectories; [`Layers`] runs one layer
//! after the other over calibration text. The CPU implementations are here, those of NVIDIA GPUs in
//! [`crate::cuda`].

use std::ops::Range;

use ndarray::{
    Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut2, ArrayViewMut3, Axis, s,
};
use rayon::prelude::*;

use super::decoder::Decoder;
use super::layer::{Layer, States, rotate, rotated, rotated_rows};
use crate::compute::Precision;
use crate::compute::attention;
use crate::compute::linear::{FEW, Linear};
use crate::env;
use crate::error::{Error, Result};
use crate::kv::{KvHead, Qkv, Rotated, RotatedQkv};
use crate::weight::Weight;

/// Queries `[h,m,d]`, keys and values `[g,m,d]` of m rows of one layer: in a decode step, one row per trajectory.
pub type Rows = RotatedQkv<Array3<f32>>;

/// A prompt's rows of one layer: its rotated queries, `[h,m,d]`, its keys before rotation, `[g,m,d]`, and the rotated keys
/// and the values that it attends. These two are its own, `[g,m,d]`, until they are [joined](PromptRows::join) with those of
/// earlier positions: `[g, first + m, d]`.
pub type PromptRows = Qkv<Array3<f32>, Rotated<Array3<f32>>, Array3<f32>>;

impl PromptRows {
    /// Puts the cached rows of earlier positions, one cache per KV head, before the prompt's own rows.
    pub fn join(self, caches: &[&KvHead]) -> Self {
        Self {
            q: self.q,
            k: Rotated {
                pre: self.k.pre,
                rope: with_cached(self.k.rope, caches, KvHead::keys),
            },
            v: with_cached(self.v, caches, KvHead::values),
        }
    }

    /// Returns the rotated queries of KV head `c`, `[r,m,d]`.
    pub fn queries(&self, c: usize) -> ArrayView3<'_, f32> {
        let r = self.q.len_of(Axis(0)) / self.v.len_of(Axis(0));
        self.q.slice(s![c * r..(c + 1) * r, .., ..])
    }

    /// Returns the rotated keys and the values that KV head `c` attends, `[first + m, d]`.
    pub fn attended(&self, c: usize) -> (ArrayView2<'_, f32>, ArrayView2<'_, f32>) {
        (self.k.rope.index_axis(Axis(0), c), self.v.index_axis(Axis(0), c))
    }
}

/// Returns the rows of every position, `[g, first + m, d]`: the cached ones, then `new`, `[g,m,d]`.
fn with_cached(
    new: Array3<f32>,
    caches: &[&KvHead],
    rows: fn(&KvHead) -> &dyn attention::CachedRows,
) -> Array3<f32> {
    let first = caches.first().map_or(0, |kv| kv.len());
    if first == 0 {
        return new;
    }
    let (g, m, d) = new.dim();
    let mut all = Array3::zeros((g, first + m, d));
    all.slice_mut(s![.., first.., ..]).assign(&new);
    let pairs = all.axis_iter_mut(Axis(0)).into_par_iter().zip(caches);
    pairs.for_each(|(mut all, kv)| {
        let cached = rows(kv);
        let mut scratch = vec![0.0; d];
        for (p, mut row) in all.rows_mut().into_iter().take(first).enumerate() {
            row.assign(&ArrayView1::from(cached.row(p, &mut scratch)));
        }
    });
    all
}

/// Stores the prompt's rows of a layer, given its index, in the KV cache and returns them joined with the cached ones.
pub type Cache<'f> = dyn FnMut(usize, PromptRows) -> PromptRows + 'f;
/// Is told how many more tokens a layer has finished.
pub type Done<'f> = dyn FnMut(usize) + 'f;
/// Fills a layer's attention output, `[trajectories,h,d]`, from its index and its rows.
pub type Attend<'f> = dyn FnMut(usize, &Rows, ArrayViewMut3<f32>) -> Result<()> + 'f;

/// A model that runs prompts and decode steps on some device.
pub trait Forward: Send + Sync {
    /// Returns the checkpoint.
    fn decoder(&self) -> &Decoder;

    /// Runs a prompt whose first token is at position `first`, and returns the logits after its last
    /// token, `[vocab]`. `cache` is called once per layer; `done` is called with numbers of tokens, which add up to the
    /// prompt's tokens in every layer.
    ///
    /// # Errors
    /// An empty prompt, an id outside the vocabulary, activations that are not finite.
    fn prompt(&self, ids: &[u32], first: usize, cache: &mut Cache, done: &mut Done) -> Result<Array1<f32>>;

    /// Runs one token per trajectory, each at its position, and returns the logits after each, `[vocab]`. `attend` is called
    /// once per layer.
    ///
    /// On the CPU, the weights are read once for all tokens. With up to four tokens, the bits of a trajectory's logits do not
    /// depend on the other tokens; with more, sums are added in another order.
    fn step(&self, ids: &[u32], positions: &[usize], attend: &mut Attend) -> Result<Vec<Array1<f32>>>;

    /// Returns how many trajectories of different sequences a step should take at most; more are better run in several steps.
    fn most_together(&self) -> usize {
        usize::MAX
    }
}

/// A model whose layers are opened one at a time.
pub trait Layers: Send + Sync {
    /// Returns the checkpoint.
    fn decoder(&self) -> &Decoder;

    /// Opens a layer; dropping it releases its memory.
    fn open<'s>(&'s self, index: usize) -> Result<Box<dyn BlockLayer + 's>>;
}

/// An open layer, for blocks of text that start at position 0.
pub trait BlockLayer {
    /// Computes the states of every row of `hidden`, `[m, hidden]`.
    fn project(&self, hidden: ArrayView2<f32>) -> Result<States>;

    /// Runs the whole layer, with exact attention, on `hidden` in place; `tap` sees the states.
    fn forward(&self, hidden: ArrayViewMut2<f32>, tap: &mut dyn FnMut(&States) -> Result<()>) -> Result<()>;

    /// Runs the rest of the layer on `hidden`, `[m, hidden]`, in place, after any attention, whose output is `attended`,
    /// `[m, h d]`.
    fn finish(&self, hidden: ArrayViewMut2<f32>, attended: ArrayView2<f32>) -> Result<()>;
}

/// A model on the CPU.
pub struct CpuForward<'a> {
    decoder: &'a Decoder,
    layers: Vec<Layer>,
    /// The output projection, or its copy.
    head: Linear,
}

impl<'a> CpuForward<'a> {
    /// Opens all layers of a model, whose prompts are multiplied in f32.
    pub fn new(decoder: &'a Decoder) -> Result<Self> {
        Self::with_precision(decoder, Precision::Auto)
    }

    /// Opens all layers of a model; see [`CpuForward::with_layers`].
    pub fn with_precision(decoder: &'a Decoder, precision: Precision) -> Result<Self> {
        let layer = |i| Ok(decoder.layer(i)?.with_precision(precision));
        let layers = (0..decoder.config.n_layers()).map(layer);
        Ok(Self::with_layers(decoder, layers.collect::<Result<_>>()?))
    }

    /// Joins a model with layers, which need not be those of its checkpoint. Copies their weights to large pages of memory if
    /// there is room; see [`Weight::hold`].
    pub fn with_layers(decoder: &'a Decoder, mut layers: Vec<Layer>) -> Self {
        let mut head = Linear::new(decoder.head.weight.clone(), None);
        let weights = layers.iter_mut().flat_map(Layer::weights_mut);
        Weight::hold(weights.chain([&mut head.weight]).collect());
        Self {
            decoder,
            layers,
            head,
        }
    }

    /// Returns the bytes of the weights that a decode step reads.
    pub fn bytes(&self) -> usize {
        let layers = self.layers.iter().map(Layer::read_bytes);
        layers.sum::<usize>() + self.head.weight.bytes()
    }
}

impl<T: Forward + ?Sized> Forward for &T {
    fn decoder(&self) -> &Decoder {
        (**self).decoder()
    }

    fn prompt(&self, ids: &[u32], first: usize, cache: &mut Cache, done: &mut Done) -> Result<Array1<f32>> {
        (**self).prompt(ids, first, cache, done)
    }

    fn step(&self, ids: &[u32], positions: &[usize], attend: &mut Attend) -> Result<Vec<Array1<f32>>> {
        (**self).step(ids, positions, attend)
    }

    fn most_together(&self) -> usize {
        (**self).most_together()
    }
}

impl Forward for CpuForward<'_> {
    fn decoder(&self) -> &Decoder {
        self.decoder
    }

    fn prompt(&self, ids: &[u32], first: usize, cache: &mut Cache, done: &mut Done) -> Result<Array1<f32>> {
        check_prompt(ids)?;
        let m = ids.len();
        let mut hidden = self.decoder.embed(ids)?;
        let tables = self.decoder.ropes.tables(first..first + m);
        for (index, layer) in self.layers.iter().enumerate() {
            env::check()?;
            let mut states = layer.project(hidden.view());
            self.decoder.check_states(layer, &states)?;
            let table = tables.layer(index);
            rotate(&mut states.q, table);
            let k = Rotated {
                rope: rotated(&states.k, table),
                pre: states.k,
            };
            let rows = PromptRows {
                q: states.q,
                k,
                v: states.v,
            };
            let rows = cache(index, rows);
            // Only the last position of the last layer's output is read.
            let skipped = if index + 1 == self.layers.len() { m - 1 } else { 0 };
            done(skipped);
            for part in parts(skipped..m) {
                env::check()?;
                let mut attended = Array2::zeros((part.len(), rows.q.len() / m));
                attention::causal(
                    rows.q.slice(s![.., part.clone(), ..]),
                    rows.k.rope.view(),
                    rows.v.view(),
                    first + part.start,
                    layer.window,
                    layer.rounds,
                    attended.view_mut(),
                );
                let mut hidden = hidden.slice_mut(s![part.clone(), ..]);
                layer.finish(hidden.view_mut(), attended.view());
                self.decoder.check_finite(layer, hidden.view())?;
                done(part.len());
            }
        }
        let last = hidden.slice(s![m - 1.., ..]);
        Ok(self.decoder.logits_by(&self.head, last)?.remove_axis(Axis(0)))
    }

    fn step(&self, ids: &[u32], positions: &[usize], attend: &mut Attend) -> Result<Vec<Array1<f32>>> {
        let mut hidden = self.decoder.embed(ids)?;
        let tables = self.decoder.ropes.tables(positions.iter().copied());
        for (index, layer) in self.layers.iter().enumerate() {
            let states = layer.project(hidden.view());
            let table = tables.layer(index);
            let both = |pre: Array3<f32>| Rotated {
                rope: rotated_rows(&pre, table),
                pre,
            };
            let rows = Rows {
                q: both(states.q),
                k: both(states.k),
                v: states.v,
            };
            let (h, _, d) = rows.q.rope.dim();
            let mut attended = Array3::<f32>::zeros((ids.len(), h, d));
            attend(index, &rows, attended.view_mut())?;
            let attended = attended.into_shape_with_order((ids.len(), h * d))?;
            layer.finish(hidden.view_mut(), attended.view());
            self.decoder.check_finite(layer, hidden.view())?;
        }
        let logits = self.decoder.logits_by(&self.head, hidden.view())?;
        Ok(logits.outer_iter().map(|row| row.to_owned()).collect())
    }

    /// Four: five rows take the way of many, on which a few take longer than two steps of four, and another order of sums.
    fn most_together(&self) -> usize {
        FEW
    }
}

/// Most rows of a prompt that go through the second half of a layer together, so that progress shows within a layer.
const PART: usize = 2048;

/// Cuts rows into parts of at most [`PART`] rows and of about the same length: the bits of a row are the same in every
/// part that is not very short.
fn parts(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let count = rows.len().div_ceil(PART).max(1);
    let edge = move |i: usize| rows.start + rows.len() * i / count;
    (0..count).map(move |i| edge(i)..edge(i + 1))
}

/// Fails for a prompt without tokens.
pub fn check_prompt(ids: &[u32]) -> Result<()> {
    match ids {
        [] => Err(Error::invalid("the prompt has no tokens").hint("give a prompt with at least one token")),
        _ => Ok(()),
    }
}

/// A model on the CPU whose layers are opened one at a time, and how prompts are multiplied.
pub struct CpuLayers<'a>(pub &'a Decoder, pub Precision);

impl Layers for CpuLayers<'_> {
    fn decoder(&self) -> &Decoder {
        self.0
    }

    fn open<'s>(&'s self, index: usize) -> Result<Box<dyn BlockLayer + 's>> {
        Ok(Box::new(CpuLayer {
            decoder: self.0,
            layer: self.0.layer(index)?.with_precision(self.1),
        }))
    }
}

/// An open layer on the CPU; dropping it gives its file pages back.
struct CpuLayer<'a> {
    decoder: &'a Decoder,
    layer: Layer,
}

impl BlockLayer for CpuLayer<'_> {
    fn project(&self, hidden: ArrayView2<f32>) -> Result<States> {
        let states = self.layer.project(hidden);
        self.decoder.check_states(&self.layer, &states)?;
        Ok(states)
    }

    fn forward(
        &self,
        mut hidden: ArrayViewMut2<f32>,
        tap: &mut dyn FnMut(&States) -> Result<()>,
    ) -> Result<()> {
        let mut tapped = Ok(());
        let rope = self.decoder.ropes.layer(self.layer.index);
        self.layer
            .forward(rope, hidden.view_mut(), |states, _| tapped = tap(states));
        // This check goes first: it names the faulty tensor, which an error of `tap` would not.
        self.decoder.check_finite(&self.layer, hidden.view())?;
        tapped
    }

    fn finish(&self, mut hidden: ArrayViewMut2<f32>, attended: ArrayView2<f32>) -> Result<()> {
        self.layer.finish(hidden.view_mut(), attended);
        self.decoder.check_finite(&self.layer, hidden.view())
    }
}

impl Drop for CpuLayer<'_> {
    fn drop(&mut self) {
        self.layer.release();
    }
}
