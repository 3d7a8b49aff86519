//! Whitened product quantisation: codes of rotated keys in the metric of the queries. Ours.
//!
//! Calibration: H is the second moment of the rotated queries of a KV head's group, and L its Cholesky factor. The
//! Euclidean distance of whitened keys `(k - mean) L` is the error of the queries' scores. The principal components of
//! the whitened keys are dealt to groups of channels, so that every group gets its share of the large ones, and the
//! keys are clustered into 16 or 256 words in each group. The remainder that these words leave of a key is clustered into
//! words of a second stage. A key's code is one word per group and stage.
//!
//! Decoding: a query gives a score to every word of every group. The sum over a key's words estimates the score of the
//! key. A KV head attends the keys with the largest estimated probability, summed over the query heads of its group.
//! All keys are scored by the words of the first stage, and the best of these keys by the words of both.

mod bench;
mod choose;
mod codebook;
pub mod cuda;
mod fit;
mod path;
mod scores;
mod section;
mod waves;

use std::sync::Arc;

use ndarray::{ArrayView2, s};

use super::cuda::CudaMethod;
use super::declaration::{Ask, Declaration, InVerdict};
use super::{Method, Place, Prompt, Reads, Retriever, Selection, Step, everything};
use crate::error::{Error, Result};
use crate::kv::lines::grow;
use choose::{choose, scratch_bytes, static_scores};
pub use codebook::{HeadCodebook, HeadCodebooks};
pub use path::MeanPath;
use section::STAGES;
pub use section::{CHOL, CODEBOOK, Center, MEAN, MEAN_PRE, ROTATION, SECTION, WpqSection};

/// The declaration of `wpq`.
pub static METHOD: Declaration = Declaration {
    name: "wpq",
    help: "Positions ranked by estimated attention, from keys that are product-quantised in the metric of the queries (ours)",
    section: Some(SECTION),
    verdict: InVerdict::IfCalibrated,
    prepare,
    bench: Some(&bench::WpqBench),
};

fn prepare(ask: &Ask) -> Result<Box<dyn Method>> {
    let with = ask.artifact.filter(|artifact| artifact.has(SECTION));
    let artifact = with.ok_or_else(|| {
        Error::usage("⟨method=wpq⟩ needs ⟨artifact⟩ with the section `wpq`").hint(
            "make an artifact with `kvsmith calibrate ⟨model=DIR⟩ ⟨text=FILE⟩ ⟨output=ART.safetensors⟩`",
        )
    })?;
    Ok(Box::new(HeadCodebooks::load(artifact, ask.ropes)?))
}

impl Method for HeadCodebooks {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        Box::new(Wpq::new(Arc::clone(self.head(place.layer, place.kv_head))))
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

/// The index of one KV head: the code of every key.
#[derive(Clone)]
pub struct Wpq {
    codebook: Arc<HeadCodebook>,
    /// The codes of each stage, `[n,width]`.
    codes: [Vec<u8>; STAGES],
    /// The candidates whose codes of the second stage the last step read, counted from its first candidate.
    refined: Vec<u32>,
}

impl Wpq {
    /// Makes an empty head.
    pub fn new(codebook: Arc<HeadCodebook>) -> Self {
        Self {
            codes: Default::default(),
            refined: Vec::new(),
            codebook,
        }
    }

    fn take_in(&mut self, k_rope: ArrayView2<f32>) {
        let first = self.codes[0].len() / self.codebook.width();
        for (codes, new) in self.codes.iter_mut().zip(self.codebook.encode(k_rope, first)) {
            grow(codes, new.len()).extend(new);
        }
    }
}

impl Retriever for Wpq {
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
        let (c, width) = (step.candidates.clone(), self.codebook.width());
        let rows = c.start * width..c.end * width;
        let codes = self.codes.each_ref().map(|codes| &codes[rows.clone()]);
        let words = self.codebook.scores(step.q_rope, c.clone());
        let whole = step.whole_rows();
        let fixed = static_scores(step);
        let [chosen, best, refined] = choose(&words, codes, width, &fixed, step.budget, whole.unwrap_or(0));
        self.refined = refined;
        let [positions, best] =
            [chosen, best].map(|places| places.into_iter().map(|p| p + c.start as u32).collect());
        Selection {
            positions,
            whole: whole.map(|_| best),
            ..Selection::default()
        }
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let (c, width) = (&step.candidates, self.codebook.width());
        reads.array_held(self.codebook.bytes(), self.codebook.held_bytes());
        reads.range(c.start * width..c.end * width);
        reads.items(width, self.refined.iter().map(|place| c.start + *place as usize));
        reads.scratch(scratch_bytes(
            step.q_rope.nrows(),
            c.len(),
            self.refined.len(),
            width,
        ));
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        STAGES * self.codebook.width() * positions
    }

    fn state_bytes(&self) -> usize {
        self.codes.iter().map(Vec::capacity).sum()
    }
}
