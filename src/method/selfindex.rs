//! Self-Indexing KVCache: sign patterns as index and as storage, arXiv 2603.14224.
//!
//! Calibration: rotated keys are centered in each block with the block's own center. The signs of four neighbouring
//! channels form one of 16 patterns, and the centroid of a pattern is the mean of these channels over the keys that
//! have the pattern. This gives the average of what one pass over a prompt would build from each block.
//!
//! Decoding: the mean query of the group gives a score to every pattern of every group of channels. The score of a key
//! is the sum of the scores of its patterns, and the keys with the best scores are attended. The centroids come from
//! one pass over the prompt, or from calibration.
//!
//! Where we differ from the authors' code: there is one rule for zeros (a bit is set for x > 0); a pattern that no key
//! has gets plus or minus the mean magnitude of its channels instead of 0/0; all rows are in position order, so
//! generated tokens compete for the budget once they leave the window and do not displace prompt tokens from a list of
//! fixed length; scores are f32. A later prompt is added to the sums of the centroids; the center stays unless fewer
//! than 128 positions were cached before that prompt.

mod bench;
mod choose;
pub mod cuda;
mod fit;
mod groups;
pub mod params;
mod section;
mod sums;

use ndarray::{Array2, ArrayView2, s};

use super::cuda::CudaMethod;
use super::declaration::{Declaration, InVerdict};
use super::{Method, Place, Prompt, Ranking, Reads, Retriever, Selection, Step, everything};
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::lines::AlignedVec;
pub use crate::kv::packed::Center;
use crate::kv::packed::{FULL, Layout, REFIT, compressed, extend_signs, sign_bytes};
use choose::PatternScores;
pub use fit::{centroids, pattern};
use groups::sign;
pub use groups::{GROUP, PATTERNS, SECTION};
pub use params::{CentroidSource, SelfIndexParams};
pub use section::SignSection;
use section::{CENTROID, calibrated_center};
use sums::PatternSums;

/// The declaration of `selfindex`.
pub static METHOD: Declaration = Declaration {
    name: "selfindex",
    help: "Positions ranked by the sign patterns of their keys, with a score table (Self-Indexing KVCache, arXiv 2603.14224)",
    section: Some(SECTION),
    verdict: InVerdict::IfCalibrated,
    prepare: |ask| {
        Ok(Box::new(SelfIndexMethod::new(
            &ask.params.selfindex,
            ask.artifact,
            ask.sizes.head_dim,
        )?))
    },
    bench: Some(&bench::SelfIndexBench),
};

impl SelfIndexParams {
    /// Returns the layout in which the 2-bit cache stores its rows.
    pub fn layout(&self, artifact: Option<&Artifact>) -> Result<Layout> {
        Ok(Layout {
            center: self.center(artifact)?,
            full: self.sign_full,
            signed: !self.plain_keys,
            ..Layout::from(Center::Median)
        })
    }

    /// Returns the center: the requested one, else the artifact's, else the median.
    pub fn center(&self, artifact: Option<&Artifact>) -> Result<Center> {
        match (self.center, artifact.filter(|a| a.has(SECTION))) {
            (Some(center), _) => Ok(center),
            (None, Some(artifact)) => calibrated_center(&artifact.section(SECTION)?.manifest.params),
            (None, None) => Ok(Center::Median),
        }
    }
}

/// Self-Indexing prepared for a model: its parameters and the artifact's centroids.
pub struct SelfIndexMethod {
    center: Center,
    source: CentroidSource,
    full: usize,
    n_kv_heads: usize,
    /// The artifact's centroids of each head, `[d/4,16,4]`, if they are used.
    calibrated: Option<Array2<f32>>,
}

impl SelfIndexMethod {
    /// Resolves the parameters, and reads the artifact's section if its centroids are used.
    ///
    /// # Errors
    /// The number of channels is not a multiple of four; calibrated centroids are requested, but the artifact has no
    /// section or the section has another center.
    pub fn new(params: &SelfIndexParams, artifact: Option<&Artifact>, head_dim: usize) -> Result<Self> {
        if !head_dim.is_multiple_of(GROUP) {
            return Err(Error::unsupported(format!(
                "selfindex needs a head_dim that is a multiple of {GROUP}, not {head_dim}"
            ))
            .hint("choose another ⟨method⟩"));
        }
        let section = artifact.filter(|a| a.has(SECTION));
        let source = params.sign_centroids;
        let center = params.center(artifact)?;
        let calibrated = match source {
            CentroidSource::OnePass | CentroidSource::Signs => None,
            CentroidSource::Offline => Some(Self::load(section, center, head_dim)?),
        };
        Ok(Self {
            center,
            source,
            full: params.sign_full,
            n_kv_heads: section.map_or(0, |a| a.sizes.n_kv_heads),
            calibrated,
        })
    }

    /// Reads the artifact's centroids of every head, `[heads,d/4,16,4]`.
    fn load(artifact: Option<&Artifact>, center: Center, head_dim: usize) -> Result<Array2<f32>> {
        let artifact = artifact.ok_or_else(|| {
            Error::usage("⟨sign_centroids=offline⟩ needs an artifact with the section `sign`")
                .hint("make an artifact with `kvsmith calibrate`, and pass it with ⟨artifact⟩")
        })?;
        let section = artifact.section(SECTION)?;
        let theirs = calibrated_center(&section.manifest.params)?;
        if center != theirs {
            return Err(Error::usage(format!(
                "⟨center={}⟩ does not match the centroids, which were calibrated relative to the {}",
                center.as_str(),
                theirs.as_str()
            ))
            .hint("calibrate with the same ⟨center⟩, or add ⟨sign_centroids=one-pass⟩"));
        }
        let section = artifact.checked_section(SECTION)?;
        let heads = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
        let centroids = section.widened(CENTROID)?;
        Ok(Array2::from_shape_vec((heads, head_dim * PATTERNS), centroids)?)
    }

    /// Returns the centroids of some KV heads of a layer, `[heads,d/4,16,4]`, if they are fixed before the prompt.
    pub fn centroids(&self, layer: usize, kv_heads: &[usize], head_dim: usize) -> Option<Vec<f32>> {
        let row = |kv_head: &usize| layer * self.n_kv_heads + kv_head;
        match self.source {
            CentroidSource::OnePass => None,
            CentroidSource::Signs => Some(signs(head_dim).repeat(kv_heads.len())),
            CentroidSource::Offline => {
                let calibrated = self.calibrated.as_ref();
                calibrated.map(|c| {
                    kv_heads
                        .iter()
                        .flat_map(|head| c.row(row(head)).to_vec())
                        .collect()
                })
            }
        }
    }

    /// Returns the layout of the 2-bit cache: the center, and the number of positions in full precision.
    pub fn layout(&self) -> Layout {
        Layout {
            full: self.full,
            ..Layout::from(self.center)
        }
    }

    /// Returns the empty state of a head.
    pub fn head(&self, place: &Place) -> SelfIndex {
        let row = place.layer * self.n_kv_heads + place.kv_head;
        let calibrated = self.calibrated.as_ref().map(|c| c.row(row).to_vec());
        SelfIndex::new(place, self.center, self.source, calibrated)
    }
}

impl Method for SelfIndexMethod {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        Box::new(Self::head(self, place))
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

/// Returns the centroids that stand for plain signs, `[d/4,16,4]`: 1 for a set bit, -1 for a clear one.
fn signs(d: usize) -> Vec<f32> {
    let of = |i: usize| sign(i / GROUP % PATTERNS, i % GROUP) as f32;
    (0..d * PATTERNS).map(of).collect()
}

/// The index of one KV head.
#[derive(Clone)]
pub struct SelfIndex {
    place: Place,
    center: Center,
    source: CentroidSource,
    centers: Vec<f32>,
    sums: PatternSums,
    /// The centroids, `[d/4,16,4]`.
    centroids: Vec<f32>,
    /// The signs of every position as bytes; empty if the cache holds them.
    signs: AlignedVec<u8>,
    /// The full-precision tokens of the 2-bit cache, ascending, some of which are chosen first. Empty for a cache of
    /// another type, which rounds nothing.
    full: Vec<u32>,
    ranking: Ranking,
}

impl SelfIndex {
    /// Makes an empty head. `calibrated` holds its centroids `[d/4,16,4]` if they come from the artifact.
    pub fn new(place: &Place, center: Center, source: CentroidSource, calibrated: Option<Vec<f32>>) -> Self {
        let d = place.head_dim;
        Self {
            place: *place,
            center,
            source,
            centroids: calibrated.unwrap_or_else(|| signs(d)),
            centers: vec![0.0; d],
            sums: PatternSums::new(d),
            signs: AlignedVec::with_capacity(0),
            full: Vec::new(),
            ranking: Ranking::Fast,
        }
    }

    /// Returns the head with this ranking in place of its own.
    pub fn ranking(self, ranking: Ranking) -> Self {
        Self { ranking, ..self }
    }

    /// Returns the centroids, `[d/4,16,4]`.
    pub fn centroids(&self) -> &[f32] {
        &self.centroids
    }
}

/// Returns the bytes of the centroids of one KV head: 16 centroids of f32 values for every 4 channels.
fn centroid_bytes(d: usize) -> usize {
    4 * PATTERNS * d
}

impl Retriever for SelfIndex {
    fn prefill(&mut self, prompt: &Prompt) {
        let n = prompt.keys.nrows();
        // While few positions are cached, a prompt computes the statistics again from all of them.
        let refit = prompt.first < REFIT;
        let first = if refit { 0 } else { prompt.first };
        let rows = prompt.keys.slice(s![first.., ..]);
        if let Some(cached) = prompt.kv.signs() {
            self.centers = cached.centers.to_vec();
            self.full = cached.full.to_vec();
        } else {
            if refit {
                self.centers = self.center.of_channels(rows);
                self.signs.clear();
            }
            extend_signs(&mut self.signs, rows, &self.centers);
        }
        if self.source == CentroidSource::OnePass {
            let mut summed = compressed(first..n, &self.full);
            if refit {
                self.sums = PatternSums::new(self.place.head_dim);
                if summed.len() < FULL {
                    summed = (0..n).collect();
                }
            }
            let mut centered = vec![0.0; self.place.head_dim];
            for p in summed {
                let row = prompt.keys.row(p);
                for ((x, k), c) in centered.iter_mut().zip(row).zip(&self.centers) {
                    *x = k - c;
                }
                self.sums.add(&centered);
            }
            let centroids = self.sums.centroids();
            self.centroids = centroids.into_iter().map(|c| c as f32).collect();
        }
    }

    fn append(&mut self, _: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        if !self.place.kv.keys.has_signs() {
            extend_signs(&mut self.signs, k_rope, &self.centers);
        }
    }

    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let signs = step.kv.signs().map_or(&self.signs[..], |signs| signs.rows);
        let c = step.candidates.clone();
        let width = sign_bytes(self.place.head_dim);
        let rows = &signs[c.start * width..c.end * width];
        let scores = PatternScores::new(step.q_rope, &self.centroids);
        let visible = |p: &u32| c.contains(&(*p as usize));
        let full: Vec<u32> = self.full.iter().copied().filter(visible).collect();
        let full = full.into_iter().map(|p| p - c.start as u32).collect();
        let chosen = scores.choose(rows, full, step.budget, self.ranking);
        let best = step.whole_rows().map(|count| scores.best(rows, &chosen, count));
        let positions = |places: Vec<u32>| places.into_iter().map(|p| p + c.start as u32).collect();
        Selection {
            positions: positions(chosen),
            whole: best.map(positions),
            ..Selection::default()
        }
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let (d, width) = (self.place.head_dim, sign_bytes(self.place.head_dim));
        reads.range(step.visible.start * width..step.visible.end * width);
        reads.array(centroid_bytes(d));
        reads.scratch(choose::scratch_bytes(step.candidates.len(), self.ranking));
    }

    fn bytes_for(&self, place: &Place, positions: usize) -> usize {
        if place.kv.keys.has_signs() {
            // The signs are part of the cache; the places of its full-precision tokens are not.
            size_of::<u32>() * FULL.min(positions)
        } else {
            sign_bytes(place.head_dim) * positions
        }
    }

    fn state_bytes(&self) -> usize {
        self.signs.bytes() + self.full.capacity() * 4
    }
}
