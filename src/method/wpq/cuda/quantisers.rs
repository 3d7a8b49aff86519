//! The quantisers of one layer on the GPU.

use half::{bf16, f16};
use ndarray::{ArrayView2, Axis};

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::signs::PATTERNS;
use crate::error::{Error, Result};
use crate::method::wpq::codebook::HeadCodebook;
use crate::method::wpq::section::STAGES;

/// The most bits of a key's code.
const MOST_BITS: usize = 64;

/// The sizes of a quantiser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Number of groups per stage, m.
    pub groups: usize,
    /// Number of channels per group.
    pub dim: usize,
    /// Number of words per group: 16 or 256.
    pub words: usize,
    /// Whether codes describe the keys around the path of their mean.
    pub(super) has_path: bool,
    /// Number of bytes that every step reads: [`HeadCodebook::bytes`].
    pub(super) bytes: usize,
}

impl Sizes {
    /// Returns the sizes of a head's quantiser.
    pub fn new(head: &HeadCodebook) -> Self {
        let (words, dim) = head.words(0, 0).dim();
        Self {
            groups: head.groups(),
            dim,
            words,
            has_path: head.path().is_some(),
            bytes: head.bytes(),
        }
    }

    /// Returns the number of bytes of a code per stage.
    pub fn width(self) -> usize {
        self.groups * self.word_bits() / 8
    }

    fn word_bits(self) -> usize {
        self.words.trailing_zeros() as usize
    }

    /// Returns whether score tables are rounded to 8 bits.
    pub(super) fn is_rounded(self) -> bool {
        self.words == PATTERNS
    }

    /// Returns the number of words in all groups and both stages.
    pub(super) fn entries(self) -> usize {
        STAGES * self.groups * self.words
    }

    fn check(self) -> Result<()> {
        let bits = STAGES * self.groups * self.word_bits();
        let is_supported = [PATTERNS, 256].contains(&self.words)
            && bits <= MOST_BITS
            && [1, 2, 4].contains(&self.width())
            && self.width() * 8 == self.groups * self.word_bits()
            && self.groups * self.dim <= 128;
        if is_supported {
            Ok(())
        } else {
            Err(Error::unsupported(format!(
                "CUDA: product quantisers that are not supported: {self:?}"
            ))
            .hint("use ⟨device=cpu⟩"))
        }
    }
}

/// The quantisers of one layer's KV heads.
pub struct Quantisers<'d> {
    /// The sizes of every head's quantiser.
    pub sizes: Sizes,
    /// The maps of keys, `[g,padded,m dim]`, where padded is d rounded up to a multiple of 4; the padding is zero.
    pub(super) key_maps: Buffer<'d, f32>,
    /// The maps of queries, `[g,m dim,d]`.
    pub(super) query_maps: Buffer<'d, f16>,
    /// The means of the keys, `[g,d]`.
    pub(super) means: Buffer<'d, f32>,
    /// The mean before rotation at the positions of the first arc, `[g,d,ARC]`, if codes describe the keys around its
    /// path.
    pub(super) arcs: Option<Buffer<'d, f32>>,
    /// The same as the sum of two bf16 numbers, as `path_scores` reads it: `[g,2,ARC,k]`.
    pub(super) arc_parts: Option<Buffer<'d, bf16>>,
    /// The words, `[g,2,m,dim,words]`.
    pub(super) words: Buffer<'d, f16>,
    /// Half of the squared norm of each word, `[g,2,m,words]`.
    pub(super) norms: Buffer<'d, f32>,
}

impl<'d> Quantisers<'d> {
    /// Copies the quantiser of every KV head to the device. Words are rounded to f16, as they are stored in artifacts.
    ///
    /// # Errors
    /// Sizes that differ or that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, heads: &[&HeadCodebook]) -> Result<Self> {
        let none = || Error::internal("CUDA: no product quantiser");
        let sizes = Sizes::new(heads.first().ok_or_else(none)?);
        sizes.check()?;
        if let Some(other) = heads.iter().find(|head| Sizes::new(head) != sizes) {
            return Err(Error::internal(format!(
                "CUDA: product quantisers of {sizes:?} and {:?}",
                Sizes::new(other)
            )));
        }
        let (mut words, mut norms) = (Vec::new(), Vec::new());
        let groups = |head| (0..STAGES).flat_map(move |s| (0..sizes.groups).map(move |j| (head, s, j)));
        for (head, stage, group) in heads.iter().flat_map(groups) {
            let rounded = head.words(stage, group).mapv(f16::from_f32);
            words.extend(rounded.t().iter());
            let half =
                |word: ndarray::ArrayView1<f16>| word.fold(0.0, |sum, v| sum + v.to_f64().powi(2)) / 2.0;
            norms.extend(rounded.outer_iter().map(|word| half(word) as f32));
        }
        let joined =
            |of: fn(&HeadCodebook) -> Vec<f32>| heads.iter().flat_map(|head| of(head)).collect::<Vec<_>>();
        let of_queries: Vec<f16> = heads
            .iter()
            .flat_map(|head| head.query_map().t().mapv(f16::from_f32))
            .collect();
        let arcs: Vec<f32> = heads
            .iter()
            .filter_map(|head| head.path())
            .flat_map(|path| path.arc().t().iter().copied().collect::<Vec<_>>())
            .collect();
        let paths = heads.iter().filter_map(|head| head.path());
        let arc_parts: Vec<bf16> = paths.flat_map(|path| parts(path.arc().view())).collect();
        let arcs = sizes
            .has_path
            .then(|| Buffer::from_slice(driver, "means by position", &arcs));
        let arc_parts = sizes
            .has_path
            .then(|| Buffer::from_slice(driver, "means by position", &arc_parts));
        Ok(Self {
            sizes,
            arcs: arcs.transpose()?,
            arc_parts: arc_parts.transpose()?,
            key_maps: Buffer::from_slice(driver, "key maps", &joined(|head| padded(head.projection())))?,
            query_maps: Buffer::from_slice(driver, "query maps", &of_queries)?,
            means: Buffer::from_slice(driver, "means", &joined(|head| head.mean().to_vec()))?,
            words: Buffer::from_slice(driver, "words", &words)?,
            norms: Buffer::from_slice(driver, "norms of words", &norms)?,
        })
    }
}

/// Returns a matrix `[ARC,d]` as the sum of two matrices of bf16, `[2,ARC,k]`, the larger one first. Channels c and
/// d/2 + c lie side by side, and k is d rounded up to a multiple of 16, with zeros.
fn parts(arc: ArrayView2<f32>) -> Vec<bf16> {
    let (rows, d) = arc.dim();
    let (half, width) = (d / 2, d.next_multiple_of(16));
    let mut out = vec![bf16::ZERO; 2 * rows * width];
    let (large, small) = out.split_at_mut(rows * width);
    for ((row, c), value) in arc.indexed_iter() {
        let at = row * width + 2 * (c % half) + c / half;
        large[at] = bf16::from_f32(*value);
        small[at] = bf16::from_f32(value - large[at].to_f32());
    }
    out
}

/// Returns the rows of a matrix, followed by rows of zeros up to a multiple of 4 rows.
fn padded(matrix: ArrayView2<f32>) -> Vec<f32> {
    let mut out: Vec<f32> = matrix.iter().copied().collect();
    out.resize(matrix.len_of(Axis(0)).next_multiple_of(4) * matrix.ncols(), 0.0);
    out
}
