//! A2ATS: retrieval by codebook scores of windowed-RoPE queries, arXiv 2502.12665.
//!
//! Calibration: keys before rotation are whitened by the Cholesky factor of the queries' second
//! moment at one relative position b, and clustered; the distance to a codeword is then the error of the
//! queries' scores. Decoding: a key is represented by one codeword index, and the score of a far key is that
//! of its codeword with the query rotated to position b. Selected keys are attended exactly, with
//! ordinary rotation at their true positions.
//!
//! The paper's ablations are included: standard RoPE instead of windowed RoPE (keys and queries at their own
//! positions), and the Euclidean metric instead of the queries' metric.
//!
//! Where we differ from the authors' code: f32 and f64 throughout (there bf16), z is centred,
//! empty clusters are reseeded, and the budget bounds the union over the query group.

mod bench;
mod codebook;
pub mod cuda;
mod fit;
pub mod params;
mod postings;
mod quotas;
mod section;

use std::sync::Arc;

use ndarray::{ArrayView2, s};

use super::cuda::CudaMethod;
use super::declaration::{Ask, Declaration};
use super::{Choice, Method, Place, Prompt, Ranking, Reads, Retriever, Step, everything};
use crate::error::{Error, Result};
use crate::kv::lines::grow;
pub use codebook::{Codebooks, HeadCodebook};
pub use params::A2atsParams;
use postings::{Postings, read_bytes};
use quotas::choose_listed;
pub use quotas::{Bound, Quotas, choose};
pub use section::{A2atsSection, CHOL, CODEBOOK, COUNT, FitInit, FitMetric, FitParams, MEAN, SECTION};

/// The declaration of `a2ats`.
pub static METHOD: Declaration = Declaration {
    name: "a2ats",
    help: "Codebook scores of windowed-RoPE queries (A2ATS, arXiv 2502.12665)",
    section: Some(SECTION),
    prepare,
    bench: Some(&bench::A2atsBench),
};

fn prepare(ask: &Ask) -> Result<Box<dyn Method>> {
    let artifact = ask.artifact.ok_or_else(|| {
        Error::usage("--method a2ats needs --artifact")
            .hint("make one with `kvsmith calibrate --model DIR --text FILE -o ART.safetensors`")
    })?;
    Ok(Box::new(A2atsMethod {
        codebooks: Codebooks::load(artifact, ask.rope)?,
        params: ask.params.a2ats.clone(),
    }))
}

/// A2ATS prepared for a model: its parameters and the codebooks of every head.
struct A2atsMethod {
    codebooks: Codebooks,
    params: A2atsParams,
}

impl Method for A2atsMethod {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        let codebook = Arc::clone(self.codebooks.head(place.layer, place.kv_head));
        Box::new(A2ats::new(codebook, self.params.topk_per_query_head))
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

/// The index of one KV head: the code of each key.
#[derive(Clone)]
pub struct A2ats {
    codebook: Arc<HeadCodebook>,
    /// The share of the visible context that each query head chooses; replaces the budget.
    per_query_head: Option<f64>,
    codes: Vec<u16>,
    postings: Postings,
    ranking: Ranking,
}

impl A2ats {
    /// Makes an empty head.
    pub fn new(codebook: Arc<HeadCodebook>, per_query_head: Option<f64>) -> Self {
        Self {
            per_query_head,
            postings: Postings::new(codebook.size()),
            codebook,
            codes: Vec::new(),
            ranking: Ranking::default(),
        }
    }

    /// Makes a head with these codes.
    pub fn with_codes(codebook: Arc<HeadCodebook>, codes: Vec<u16>) -> Self {
        Self {
            codes,
            ..Self::new(codebook, None)
        }
    }

    /// Returns the head with this ranking.
    pub fn ranking(self, ranking: Ranking) -> Self {
        Self { ranking, ..self }
    }

    /// Encodes keys, given before and after rotation, `[m,d]`.
    fn take_in(&mut self, k_pre: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        let codes = match self.codebook.is_windowed() {
            true => self.codebook.encode(k_pre),
            false => self.codebook.encode(k_rope),
        };
        grow(&mut self.codes, codes.len()).extend(codes);
    }
}

impl Retriever for A2ats {
    fn prefill(&mut self, prompt: &Prompt) {
        self.take_in(prompt.k_pre.view(), prompt.keys.slice(s![prompt.first.., ..]));
    }

    fn append(&mut self, k_pre: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        self.take_in(k_pre, k_rope);
    }

    fn select(&mut self, step: &Step) -> Choice {
        if !self.ranks(step) {
            return everything(step).into();
        }
        let scores = match self.codebook.is_windowed() {
            true => self.codebook.scores(step.q_pre),
            false => self.codebook.scores(step.q_rope),
        };
        let bound = match self.per_query_head {
            Some(share) => Bound::PerQueryHead((share * step.visible.len() as f64).floor() as u64),
            None => Bound::Union(step.budget),
        };
        let scores = scores.view();
        match self.ranking {
            Ranking::Fast => {
                self.postings.cover(&step.candidates, &self.codes);
                choose_listed(scores, &mut self.postings, &self.codes, bound).into()
            }
            Ranking::Plain => {
                let codes = &self.codes[step.candidates.clone()];
                let mut counts = vec![0; self.codebook.size()];
                codes.iter().for_each(|code| counts[usize::from(*code)] += 1);
                choose(scores, &counts, codes, step.candidates.start as u32, bound).into()
            }
        }
    }

    fn ranks(&self, step: &Step) -> bool {
        !step.is_exact() || self.per_query_head.is_some()
    }

    fn reads(&self, step: &Step, choice: &Choice) -> Reads {
        let (n, size) = (step.candidates.len(), self.codebook.size());
        let codes = match self.ranking {
            Ranking::Fast => read_bytes(n, size, choice.positions.len()),
            Ranking::Plain => 2 * n,
        };
        Reads::index(2 * size * step.q_pre.ncols() + codes)
    }

    fn state_bytes(&self) -> usize {
        self.codes.capacity() * 2 + self.postings.bytes()
    }
}
