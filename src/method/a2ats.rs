//! A2ATS: retrieval by codebook scores of windowed-RoPE queries, arXiv 2502.12665.
//!
//! Calibration: keys before rotation are whitened by the Cholesky factor of the queries' second moment at one relative
//! position b, and then clustered. The distance of a key to a codeword is then the error of the queries' scores.
//! Decoding: each key is represented by the number of a codeword, and the score of a far key is the score of its
//! codeword with the query rotated to position b. Selected keys are attended exactly, with ordinary rotation at their
//! true positions.
//!
//! Ours is `--positions buckets`: distances are divided into buckets, the query is rotated by the mean rotation over
//! the bucket that a key is in, and pairs of codeword and bucket are ranked in place of codewords.
//!
//! The paper's ablations are included: standard RoPE instead of windowed RoPE (keys and queries at their own
//! positions), and the Euclidean metric instead of the queries' metric.
//!
//! Where we differ from the authors' code: everything is in f32 and f64 (theirs: bf16), z is centered, empty clusters
//! are reseeded, and the budget bounds the union over the query group.

mod bench;
mod buckets;
mod codebook;
pub mod cuda;
mod fit;
pub mod params;
mod postings;
mod quotas;
mod section;
mod size;

use std::sync::Arc;

use ndarray::{ArrayView2, s};

use super::cuda::CudaMethod;
use super::declaration::{Ask, Declaration, InVerdict};
use super::{Method, Place, Prompt, Ranking, Reads, Retriever, Selection, Step, everything};
use crate::error::{Error, Result};
use crate::kv::lines::grow;
use buckets::Run;
pub use buckets::{BUCKETS, DistanceBuckets, Edges};
pub use codebook::{Codebooks, HeadCodebook};
pub use params::A2atsParams;
use postings::Postings;
pub use quotas::{Bound, Quotas, choose};
use quotas::{choose_in_runs, choose_listed};
pub use section::{
    A2atsSection, CHOL, CODEBOOK, COUNT, FitMetric, FitParams, MEAN, Positions, Rotation, SECTION, SIZE,
};
pub use size::{CODEWORDS, LONGEST_CONTEXT, codewords, share_of_bytes};

/// The declaration of `a2ats`.
pub static METHOD: Declaration = Declaration {
    name: "a2ats",
    help: "Positions ranked by the score of their key's codeword under windowed RoPE (A2ATS, arXiv 2502.12665)",
    section: Some(SECTION),
    verdict: InVerdict::IfCalibrated,
    prepare,
    bench: Some(&bench::A2atsBench),
};

fn prepare(ask: &Ask) -> Result<Box<dyn Method>> {
    let artifact = ask.artifact.ok_or_else(|| {
        Error::usage("⟨method=a2ats⟩ needs ⟨artifact⟩").hint(
            "make an artifact with `kvsmith calibrate ⟨model=DIR⟩ ⟨text=FILE⟩ ⟨output=ART.safetensors⟩`",
        )
    })?;
    Ok(Box::new(A2atsMethod {
        codebooks: Codebooks::load(artifact, ask.ropes)?,
        params: ask.params.a2ats.clone(),
    }))
}

/// Prepares the method with given codebooks and the default parameters.
pub(crate) fn with_codebooks(codebooks: Codebooks) -> Box<dyn Method> {
    Box::new(A2atsMethod {
        codebooks,
        params: A2atsParams::default(),
    })
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

    /// The kernels rank codewords alone, not pairs of codeword and bucket.
    fn cuda(&self) -> Option<&dyn CudaMethod> {
        (!self.codebooks.has_buckets()).then_some(self as _)
    }
}

/// The index of one KV head: the code of every key.
#[derive(Clone)]
pub struct A2ats {
    codebook: Arc<HeadCodebook>,
    /// The share of the visible context that each query head chooses; if set, it replaces the budget.
    per_query_head: Option<f64>,
    codes: Vec<u16>,
    /// The candidates of each bucket, the farthest bucket first.
    postings: Vec<Postings>,
    ranking: Ranking,
}

impl A2ats {
    /// Makes an empty head.
    pub fn new(codebook: Arc<HeadCodebook>, per_query_head: Option<f64>) -> Self {
        Self {
            per_query_head,
            postings: vec![Postings::new(codebook.size()); codebook.buckets()],
            codebook,
            codes: Vec::new(),
            ranking: Ranking::Fast,
        }
    }

    /// Makes a head that already has these codes.
    pub fn with_codes(codebook: Arc<HeadCodebook>, codes: Vec<u16>) -> Self {
        Self {
            codes,
            ..Self::new(codebook, None)
        }
    }

    /// Returns the head with this ranking in place of its own.
    pub fn ranking(self, ranking: Ranking) -> Self {
        Self { ranking, ..self }
    }

    /// Encodes and appends keys, given before and after rotation, `[m,d]`.
    fn take_in(&mut self, k_pre: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        let codes = if self.codebook.is_pre_rope() {
            self.codebook.encode(k_pre)
        } else {
            self.codebook.encode(k_rope)
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

    fn select(&mut self, step: &Step) -> Selection {
        if !self.ranks(step) {
            return everything(step).into();
        }
        let runs = self.codebook.runs(step.visible.end, &step.candidates);
        let (Some(farthest), codes) = (runs.first(), &self.codes) else {
            return Selection::default();
        };
        let q = if self.codebook.is_pre_rope() {
            step.q_pre
        } else {
            step.q_rope
        };
        let buckets: Vec<usize> = runs.iter().map(|run| run.bucket).collect();
        let scores = self.codebook.scores_in(q, &buckets);
        let bound = match self.per_query_head {
            Some(share) => Bound::PerQueryHead((share * step.visible.len() as f64).floor() as u64),
            None => Bound::Union(step.budget),
        };
        let scores = scores.view();
        match self.ranking {
            Ranking::Fast => {
                let first = self.postings.len() - 1 - farthest.bucket;
                let postings = &mut self.postings[first..first + runs.len()];
                for (postings, run) in postings.iter_mut().zip(&runs) {
                    postings.cover(&run.positions, codes);
                }
                choose_listed(scores, postings, codes, bound).into()
            }
            Ranking::Plain => {
                let size = self.codebook.size();
                let mut counts = vec![0; runs.len() * size];
                for (run, counts) in runs.iter().zip(counts.chunks_exact_mut(size)) {
                    let codes = codes[run.positions.clone()].iter();
                    codes.for_each(|code| counts[usize::from(*code)] += 1);
                }
                let of = |run: &Run| (run.positions.start as u32, &codes[run.positions.clone()]);
                let runs: Vec<_> = runs.iter().map(of).collect();
                choose_in_runs(scores, &counts, &runs, bound).into()
            }
        }
    }

    fn ranks(&self, step: &Step) -> bool {
        !step.is_exact() || self.per_query_head.is_some()
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let (size, (r, d)) = (self.codebook.size(), step.q_pre.dim());
        let runs = self.codebook.runs(step.visible.end, &step.candidates);
        reads.array_held(2 * size * d, self.codebook.held_bytes());
        reads.scratch(4 * r * runs.len() * size);
        let last = self.postings.len() - 1;
        let is_scanned = |run: &&Run| match self.ranking {
            Ranking::Fast => self.postings[last - run.bucket].has_scanned(),
            Ranking::Plain => true,
        };
        let scanned = runs.iter().filter(is_scanned);
        reads.spans(scanned.map(|run| 2 * run.positions.start..2 * run.positions.end));
        for run in runs.iter().filter(|_| self.ranking == Ranking::Fast) {
            self.postings[last - run.bucket].add_reads(reads);
        }
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        let lists = self.postings.len() * self.codebook.size();
        size_of::<u16>() * positions + Postings::bytes_for(positions, lists)
    }

    fn state_bytes(&self) -> usize {
        self.codes.capacity() * 2 + self.postings.iter().map(Postings::bytes).sum::<usize>()
    }
}
