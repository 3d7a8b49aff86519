//! Double Sparsity: keys ranked by a few of their channels, arXiv 2408.07092.
//!
//! Calibration: the channels of each KV head are ordered by the sum of |q_i k_i|, where q and k are the rotated query and
//! key of the same token; the sum runs over the tokens and the query heads of the group.
//!
//! Decoding: a label of every key holds the first c channels in 4 bits each, with a minimum and a step per key. The
//! product of a query with the label estimates the score of the key. A KV head attends the candidates with the largest
//! estimated probability, summed over the query heads of its group; the scores of the static set, which the step attends
//! anyway, are exact.
//!
//! Where we differ from the authors' code: it chooses channels, and positions, per query head, and does not say how heads
//! that share keys share a cache of labels; here there is one label per key of a KV head, and the budget bounds the keys
//! of the KV head. For heads without a group, the ranking is theirs. It also rounds the query to 4 bits, which saves no
//! memory; here the query stays in f32. It divides partial products by the root of c; here, by the root of d, because
//! they stand beside exact scores.

mod fit;
mod labels;
pub mod params;
mod section;

use std::sync::Arc;

use ndarray::{Array2, ArrayView2, s};

use super::declaration::{Ask, Declaration, InVerdict};
use super::{Method, Place, Prompt, Reads, Retriever, Selection, Step, add_probabilities, everything};
use crate::artifact::Artifact;
use crate::compute::layout::elements_mut;
use crate::compute::products::all_products;
use crate::error::{Error, Result};
use labels::{Labels, pick};
pub use params::DoubleSparsityParams;
pub use section::{CHANNELS, DoubleSparsitySection, SECTION};

/// The declaration of `doublesparsity`.
pub static METHOD: Declaration = Declaration {
    name: "doublesparsity",
    help: "Positions ranked by estimated attention, from a few calibrated channels of each key in 4 bits (Double Sparsity, arXiv 2408.07092)",
    section: Some(SECTION),
    verdict: InVerdict::IfCalibrated,
    prepare,
    bench: None,
};

fn prepare(ask: &Ask) -> Result<Box<dyn Method>> {
    let with = ask.artifact.filter(|artifact| artifact.has(SECTION));
    let artifact = with.ok_or_else(|| {
        Error::usage("⟨method=doublesparsity⟩ needs ⟨artifact⟩ with the section `doublesparsity`").hint(
            "make an artifact with `kvsmith calibrate ⟨peers⟩ ⟨model=DIR⟩ ⟨text=FILE⟩ ⟨output=ART.safetensors⟩`",
        )
    })?;
    let d = ask.sizes.head_dim;
    let channels = ask.params.doublesparsity.channels(d);
    if channels > d {
        return Err(Error::usage(format!(
            "⟨ds_channels={channels}⟩ is more than the {d} channels of a head"
        ))
        .hint(format!("choose a number from 1 to {d}")));
    }
    Ok(Box::new(HeadChannels::load(artifact, channels)?))
}

impl DoubleSparsityParams {
    /// Returns the number of channels per label for heads of `d` channels.
    pub fn channels(&self, d: usize) -> usize {
        self.ds_channels.unwrap_or((d / 8).max(1))
    }
}

/// The channels of the labels of every head.
struct HeadChannels {
    n_kv_heads: usize,
    heads: Vec<Arc<[usize]>>,
}

impl HeadChannels {
    /// Reads the first `count` channels of every head; checks the section's digests and values.
    fn load(artifact: &Artifact, count: usize) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let channels = section.read::<u32>(CHANNELS)?;
        let heads = channels.chunks_exact(artifact.sizes.head_dim);
        let first = |head: &[u32]| head[..count].iter().map(|channel| *channel as usize).collect();
        Ok(Self {
            n_kv_heads: artifact.sizes.n_kv_heads,
            heads: heads.map(first).collect(),
        })
    }
}

impl Method for HeadChannels {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        let channels = &self.heads[place.layer * self.n_kv_heads + place.kv_head];
        Box::new(DoubleSparsity::new(Arc::clone(channels)))
    }
}

/// The index of one KV head: a label of every key.
#[derive(Clone)]
pub struct DoubleSparsity {
    channels: Arc<[usize]>,
    labels: Labels,
}

impl DoubleSparsity {
    /// Makes an empty head whose labels have these channels.
    pub fn new(channels: Arc<[usize]>) -> Self {
        Self {
            labels: Labels::new(channels.len()),
            channels,
        }
    }

    /// Appends the labels of rotated keys, `[n,d]`.
    fn take_in(&mut self, k_rope: ArrayView2<f32>) {
        let keys = pick(k_rope, &self.channels);
        keys.outer_iter().for_each(|key| self.labels.push(key));
    }
}

impl Retriever for DoubleSparsity {
    fn prefill(&mut self, prompt: &Prompt) {
        self.take_in(prompt.keys.slice(s![prompt.first.., ..]));
    }

    fn append(&mut self, _: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        self.take_in(k_rope);
    }

    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let (c, visible) = (step.candidates.clone(), step.visible.clone());
        let outside: Vec<u32> = (visible.start..c.start)
            .chain(c.end..visible.end)
            .map(|p| p as u32)
            .collect();
        let (r, d) = step.q_rope.dim();
        let scale = 1.0 / (d as f32).sqrt();
        // First the candidates, then the static set.
        let mut scores = Array2::zeros((r, visible.len()));
        let queries = pick(step.q_rope, &self.channels) * scale;
        self.labels
            .products(queries.view(), c.clone(), scores.slice_mut(s![.., ..c.len()]));
        let exact = all_products(step.q_rope, scale, step.kv.keys(), &outside);
        scores.slice_mut(s![.., c.len()..]).assign(&exact);
        let mut mass = vec![0.0; visible.len()];
        for mut row in scores.rows_mut() {
            add_probabilities(elements_mut(&mut row), &mut mass);
        }
        Selection::of_mass(step, &mass[..c.len()])
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let (c, width) = (&step.candidates, self.labels.width());
        let (count, r) = (self.channels.len(), step.q_rope.nrows());
        reads.array_held(count * size_of::<u32>(), count * size_of::<usize>());
        reads.range(c.start * width..c.end * width);
        // The scores of every query head, and the probabilities.
        reads.scratch(step.visible.len() * (r * size_of::<f32>() + size_of::<f64>()));
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        self.labels.width() * positions
    }

    fn state_bytes(&self) -> usize {
        self.labels.bytes()
    }
}
