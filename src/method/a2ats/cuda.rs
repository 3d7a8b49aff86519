//! a2ats on the GPU: codeword scores, the largest k that fits the budget, and one scan over the codes.

pub mod encode;
mod index;

use half::f16;

pub use super::codebook::HeadConstants;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels;
use crate::compute::cuda::width;
use crate::error::{Error, Result};
use crate::kv::Limits;
use crate::kv::cuda::{CudaSelection, KINDS, Positions, Shape};
use encode::Norms;
pub(super) use index::random;

/// Threads of `rank_codewords`, which counts the tokens of twice as many digits in the same shared memory.
const RANKERS: usize = kernels::RankCodewords::KERNEL.threads as usize;
/// Most codewords per KV head: `rank_codewords` keeps eight bytes of each in shared memory.
pub const MOST_CODEWORDS: usize = kernels::RankCodewords::KERNEL.shared_bytes / 8;

/// The codebooks of one layer.
pub struct Codebooks<'d> {
    pub(crate) size: usize,
    /// `[g,M,w]`, where w is d rounded up to a multiple of 16; the padding is zero.
    pub(crate) codebook: Buffer<'d, f16>,
    /// Half of the squared norms, `[g,M]`.
    pub(crate) norms: Buffer<'d, f32>,
    /// The halves of the squared norms in the form that the search needs, and their bounds: see [`Norms`].
    pub(crate) biases: Buffer<'d, f32>,
    pub(crate) bounds: Buffer<'d, f32>,
    /// The maps of queries, `[g,d,d]`.
    query_maps: Buffer<'d, f32>,
    /// The factors L, which map a key to z: z_i = sum_j k_j L_ji - mean_i; `[g,d,d]`.
    pub(crate) factors: Buffer<'d, f32>,
    /// The whitened means, `[g,d]`.
    pub(crate) means: Buffer<'d, f32>,
}

impl<'d> Codebooks<'d> {
    /// Uploads the constants of every KV head.
    ///
    /// # Errors
    /// A codebook that is too large; channels that are not a multiple of 8; out of memory.
    pub fn new(driver: &'d dyn Driver, heads: &[HeadConstants<'_>]) -> Result<Self> {
        let (size, d) = heads.first().map_or((0, 0), |head| head.codebook.dim());
        if size == 0 || size > MOST_CODEWORDS {
            return Err(Error::unsupported(format!(
                "CUDA: a codebook of {size} codewords; 1 to {MOST_CODEWORDS} are supported"
            ))
            .hint("use ⟨device=cpu⟩"));
        }
        if !d.is_multiple_of(8) {
            return Err(Error::unsupported(format!(
                "CUDA: a2ats needs a head dimension that is a multiple of 8, not {d}"
            ))
            .hint("use ⟨device=cpu⟩"));
        }
        let mut codebook = Vec::with_capacity(heads.len() * size * width(d));
        for row in heads.iter().flat_map(|head| head.codebook.rows()) {
            codebook.extend(row.iter().map(|v| f16::from_f32(*v)));
            codebook.resize(codebook.len().next_multiple_of(width(d)), f16::ZERO);
        }
        let norms = Norms::new(&codebook, size, width(d));
        let joined = |of: fn(&HeadConstants) -> Vec<f32>| heads.iter().flat_map(of).collect::<Vec<f32>>();
        let query_maps = joined(|head| head.query_map.iter().copied().collect());
        let factors = joined(|head| head.key_map.t().iter().copied().collect());
        let means = joined(|head| head.mean.clone());
        Ok(Self {
            size,
            codebook: Buffer::from_slice(driver, "codebooks", &codebook)?,
            norms: Buffer::from_slice(driver, "norms of codewords", &norms.halves)?,
            biases: Buffer::from_slice(driver, "norms of codewords", &norms.biases)?,
            bounds: Buffer::from_slice(driver, "bounds of codewords", &norms.bounds)?,
            query_maps: Buffer::from_slice(driver, "query maps", &query_maps)?,
            factors: Buffer::from_slice(driver, "factors of the metric", &factors)?,
            means: Buffer::from_slice(driver, "means", &means)?,
        })
    }
}

/// The codes of one layer's cache, and the buffers of a step.
pub struct A2ats<'d> {
    driver: &'d dyn Driver,
    pub(crate) shape: Shape,
    pub(crate) size: usize,
    per_query_head: bool,
    /// The code of every position, `[b,g,capacity]`.
    pub codes: Buffer<'d, u16>,
    /// Number of candidates per codeword in the last step, `[b,g,M]`.
    pub counts: Buffer<'d, u32>,
    /// The range of candidates that `counts` covers, `[b,g,2]`.
    counted: Buffer<'d, u32>,
    /// Whitened queries or keys, `[b,h,d]`.
    mapped: Buffer<'d, f32>,
    /// The scores of the last step, `[b,h,M]`.
    pub scores: Buffer<'d, f32>,
    /// `[b,h,M]`.
    ranks: Buffer<'d, u32>,
    /// `[b,g,M]`.
    marks: Buffer<'d, u8>,
    /// `[b,g,16,2]`.
    parts: Buffer<'d, u32>,
    selection: CudaSelection<'d>,
}

impl<'d> A2ats<'d> {
    /// Makes an empty layer. With `per_query_head`, each query head has a budget of its own.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        codebooks: &Codebooks<'_>,
        per_query_head: bool,
    ) -> Result<Self> {
        let shape = shape.checked()?;
        let (heads, h, size) = (shape.heads(), shape.query_heads(), codebooks.size);
        let most = limits.most(shape.capacity);
        let most = if per_query_head { most * shape.group } else { most };
        Ok(Self {
            driver,
            shape,
            size,
            per_query_head,
            codes: Buffer::zeros(driver, "codes", heads * shape.capacity)?,
            counts: Buffer::zeros(driver, "counts of codewords", heads * size)?,
            counted: Buffer::zeros(driver, "counted ranges", heads * 2)?,
            mapped: Buffer::new(driver, "whitened queries", h * shape.head_dim)?,
            scores: Buffer::new(driver, "codeword scores", h * size)?,
            ranks: Buffer::new(driver, "codeword ranks", h * size)?,
            marks: Buffer::new(driver, "codeword marks", heads * size)?,
            parts: Buffer::new(driver, "codewords in part", heads * (KINDS - 1) * 2)?,
            selection: CudaSelection::new(driver, &shape, most.min(shape.capacity))?,
        })
    }

    /// Forgets all codes, to begin new sequences.
    pub fn clear(&self) -> Result<()> {
        self.counted.zero()?;
        self.counts.zero()
    }

    /// Fills the codes with random numbers, for a benchmark.
    pub fn fill(&self, seed: u32) -> Result<()> {
        self.clear()?;
        let random = Random::Below(self.size);
        fill(self.driver, &self.codes, self.codes.len(), random, seed)
    }

    /// Returns the bytes of the codes.
    pub fn bytes(&self) -> usize {
        2 * self.codes.len()
    }

    /// Encodes the keys of the last position, `[b,g,d]`; `positions` already counts that position.
    ///
    /// # Numerics
    /// f32; the lower codeword wins a tie.
    pub fn append(
        &self,
        keys: &Buffer<'_, f32>,
        codebooks: &Codebooks<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let d = self.shape.head_dim;
        self.driver.beside(&mut || {
            kernels::WhitenLast {
                keys: keys.ptr(),
                factors: codebooks.factors.ptr(),
                means: codebooks.means.ptr(),
                out: self.mapped.ptr(),
                d,
            }
            .launch(self.driver, self.shape.grid(d.div_ceil(64)))
        })?;
        self.score(codebooks, 1)?;
        kernels::EncodeLast {
            scores: self.scores.ptr(),
            norms: codebooks.norms.ptr(),
            lens: positions.lens.ptr(),
            codes: self.codes.ptr(),
            size: self.size,
            capacity: self.shape.capacity,
        }
        .launch(self.driver, self.shape.grid(1))
    }

    /// Chooses for queries `[b,h,d]`, given before rotation with windowed RoPE, else after.
    ///
    /// # Numerics
    /// Scores in f32. Ties are as on the CPU: the lower codeword wins, then the lower position.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        codebooks: &Codebooks<'_>,
        positions: &Positions<'_>,
    ) -> Result<&CudaSelection<'d>> {
        let (r, d) = (self.shape.group, self.shape.head_dim);
        kernels::CountCandidates {
            codes: self.codes.ptr(),
            spans: positions.spans.ptr(),
            counts: self.counts.ptr(),
            counted: self.counted.ptr(),
            capacity: self.shape.capacity,
            size: self.size,
        }
        .launch(self.driver, self.shape.grid(1))?;
        self.driver.beside(&mut || {
            kernels::MapRows {
                x: queries.ptr(),
                matrices: codebooks.query_maps.ptr(),
                out: self.mapped.ptr(),
                r,
                d,
            }
            .launch(self.driver, self.shape.grid(d.div_ceil(8)))
        })?;
        self.score(codebooks, r)?;
        self.take(positions)?;
        self.list(positions)?;
        Ok(&self.selection)
    }

    /// Decides how many positions of each codeword to take.
    fn take(&self, positions: &Positions<'_>) -> Result<()> {
        let (shape, r, size) = (&self.shape, self.shape.group, self.size);
        let budgets = positions.budgets.ptr();
        let query_heads = [1, shape.kv_heads * r, shape.sequences];
        kernels::RankCodewords {
            scores: self.scores.ptr(),
            counts: self.counts.ptr(),
            budgets,
            ranks: self.ranks.ptr(),
            r,
            size,
        }
        .launch(self.driver, query_heads, (8 * size).max(8 * RANKERS))?;
        kernels::TakeCodewords {
            ranks: self.ranks.ptr(),
            counts: self.counts.ptr(),
            scores: self.scores.ptr(),
            codes: self.codes.ptr(),
            spans: positions.spans.ptr(),
            budgets,
            marks: self.marks.ptr(),
            parts: self.parts.ptr(),
            r,
            size,
            capacity: shape.capacity,
            per_query_head: usize::from(self.per_query_head),
        }
        .launch(self.driver, self.shape.grid(1))
    }

    /// Lists the positions to take.
    fn list(&self, positions: &Positions<'_>) -> Result<()> {
        let (to, spans) = (&self.selection, positions.spans.ptr());
        let (codes, marks, totals) = (self.codes.ptr(), self.marks.ptr(), to.totals.ptr());
        let (capacity, size) = (self.shape.capacity, self.size);
        kernels::CountTaken {
            codes,
            marks,
            spans,
            totals,
            capacity,
            size,
        }
        .launch(self.driver, self.shape.grid(to.blocks))?;
        kernels::ListTaken {
            codes,
            marks,
            parts: self.parts.ptr(),
            spans,
            totals,
            lists: to.lists.ptr(),
            listed: to.listed.ptr(),
            capacity,
            size,
            most: to.most,
        }
        .launch(self.driver, self.shape.grid(to.blocks))
    }

    /// Computes the products of `r` whitened rows per KV head with the codewords of that head.
    fn score(&self, codebooks: &Codebooks<'_>, r: usize) -> Result<()> {
        let d = self.shape.head_dim;
        let grid = self.shape.grid(self.size.div_ceil(64));
        kernels::CodewordScores {
            y_w: self.mapped.ptr(),
            codebook: codebooks.codebook.ptr().cast(),
            scores: self.scores.ptr(),
            r,
            size: self.size,
            d,
            w: width(d),
        }
        .launch(self.driver, grid, 4 * r * d)
    }
}
