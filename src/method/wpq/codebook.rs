//! Calibrated product quantisers, which encode keys and score queries.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use ndarray::{
    Array1, Array2, Array3, Array5, ArrayView1, ArrayView2, ArrayView3, ArrayView4, ArrayViewMut2, Axis, s,
};
use rayon::prelude::*;

use super::path::MeanPath;
use super::scores::{WordScores, WordTable};
use super::section::{CHOL, CODEBOOK, Center, MEAN, MEAN_PRE, ROTATION, SECTION, STAGES, WpqParams};
use crate::artifact::Artifact;
use crate::compute::layout::elements;
use crate::compute::{gemm, simd};
use crate::error::{Error, Result};
use crate::model::rope::Ropes;
use crate::stats::kmeans::Codebook;
use crate::stats::linalg;

/// Rows per task of a projection.
pub(super) const ROWS: usize = 1024;

/// The quantisers of every head.
pub struct HeadCodebooks {
    n_kv_heads: usize,
    heads: Vec<Arc<HeadCodebook>>,
}

/// The quantiser of one KV head.
pub struct HeadCodebook {
    stages: [Stage; STAGES],
    /// Mean of the keys that codes describe: of the rotated keys, after `path` was subtracted from them.
    mean: Array1<f32>,
    path: Option<MeanPath>,
    /// Maps centered keys to the channels of all groups: `[d,m dim]`.
    projection: Array2<f32>,
    /// Maps a query to the same channels such that its products with keys are preserved; rounded to half precision:
    /// `[d,m dim]`.
    query_map: Array2<f32>,
}

/// The words of one stage, which stand for keys or for what the stage before leaves of keys.
struct Stage {
    /// The words of each group, `[words,dim]`.
    groups: Vec<Codebook>,
    /// The same by channel, `[m,dim,words]`.
    by_channel: Vec<f32>,
    /// Half of the squared length of each word, `[m,words]`.
    half_squares: Vec<f32>,
}

/// Returns the channels of a group.
pub(super) fn channels(group: usize, dim: usize) -> Range<usize> {
    group * dim..(group + 1) * dim
}

/// Returns the product of the Cholesky factor L and the principal directions V, with its columns dealt to the groups:
/// `[d,m dim]`.
pub(super) fn project(
    chol: ArrayView2<f32>,
    rotation: ArrayView2<f32>,
    groups: usize,
    dim: usize,
) -> Array2<f32> {
    deal(&chol.mapv(f64::from).dot(&rotation.mapv(f64::from)), groups, dim)
}

/// Deals the first m dim columns to m groups: channel i of group j is column j + i m, or zero if there is no such
/// column.
fn deal(columns: &Array2<f64>, groups: usize, dim: usize) -> Array2<f32> {
    let rows = columns.nrows();
    let mut out = Array2::zeros((rows, groups * dim));
    for (i, column) in columns.columns().into_iter().take(groups * dim).enumerate() {
        let mut to = out.column_mut(channels(i % groups, dim).start + i / groups);
        to.assign(&column.mapv(|v| v as f32));
    }
    out
}

/// Returns the product of rows with a matrix.
///
/// # Numerics
/// f32. Rows are processed in fixed chunks, so the result does not depend on the number of threads.
pub(super) fn product(rows: ArrayView2<f32>, by: ArrayView2<f32>) -> Array2<f32> {
    let mut out = Array2::zeros((rows.nrows(), by.ncols()));
    let rows = rows.axis_chunks_iter(Axis(0), ROWS);
    let chunks = out.axis_chunks_iter_mut(Axis(0), ROWS).into_par_iter();
    chunks
        .zip(rows)
        .for_each(|(out, rows)| gemm(out, false, rows, by));
    out
}

impl HeadCodebooks {
    /// Reads the section and checks its digests and values; `ropes` are those of the model's layers.
    pub fn load(artifact: &Artifact, ropes: &Ropes) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let params: WpqParams = section.params()?;
        let (d, m) = (artifact.sizes.head_dim, params.groups());
        let n = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
        let shape = (n, STAGES, m, params.words, params.group_dim(d));
        let words = Array5::from_shape_vec(shape, section.widened(CODEBOOK)?)?;
        let mean = Array2::from_shape_vec((n, d), section.read(MEAN)?)?;
        let square =
            |tensor| -> Result<Array3<f32>> { Ok(Array3::from_shape_vec((n, d, d), section.read(tensor)?)?) };
        let (chol, rotation) = (square(CHOL)?, square(ROTATION)?);
        let paths: Vec<Option<MeanPath>> = match params.center {
            Center::Mean => (0..n).map(|_| None).collect(),
            Center::Path => {
                let means = Array2::from_shape_vec((n, d), section.read(MEAN_PRE)?)?;
                MeanPath::each(means.view(), ropes, artifact.sizes.n_kv_heads)
                    .into_iter()
                    .map(Some)
                    .collect()
            }
        };
        let head = |(i, path): (usize, Option<MeanPath>)| {
            let [chol, rotation] = [&chol, &rotation].map(|x| x.index_axis(Axis(0), i));
            let head = HeadCodebook::new(words.index_axis(Axis(0), i), mean.row(i), chol, rotation)?;
            Ok(Arc::new(HeadCodebook { path, ..head }))
        };
        let heads = paths.into_par_iter().enumerate().map(head);
        Ok(Self {
            n_kv_heads: artifact.sizes.n_kv_heads,
            heads: heads.collect::<Result<_>>()?,
        })
    }

    /// Joins the quantisers of the heads, those of the first layer first.
    pub fn of_heads(n_kv_heads: usize, heads: Vec<Arc<HeadCodebook>>) -> Self {
        Self { n_kv_heads, heads }
    }

    /// Returns whether the mean's path is subtracted from the keys before they are encoded.
    pub fn have_paths(&self) -> bool {
        self.heads.iter().any(|head| head.path.is_some())
    }

    /// Returns the quantiser of a head.
    pub fn head(&self, layer: usize, kv_head: usize) -> &Arc<HeadCodebook> {
        &self.heads[layer * self.n_kv_heads + kv_head]
    }
}

impl HeadCodebook {
    /// Makes a quantiser from the words of both stages, `[2,m,words,dim]` with 16 or 256 words per group, the mean
    /// `[d]`, the Cholesky factor `[d,d]` and the principal directions `[d,d]`, of which the first m dim are used.
    ///
    /// # Errors
    /// The factor is singular, or so close to it that its inverse does not fit half precision.
    pub fn new(
        words: ArrayView4<f32>,
        mean: ArrayView1<f32>,
        chol: ArrayView2<f32>,
        rotation: ArrayView2<f32>,
    ) -> Result<Self> {
        let (_, m, _, dim) = words.dim();
        let singular = || Error::damaged("a Cholesky factor is singular").hint("recreate the section");
        let inverse = linalg::invert_lower(chol.mapv(f64::from).view())?.ok_or_else(singular)?;
        // With z = (k - mean) L V, q (k - mean)^T = q L^-T V z^T. Every step reads this map, whatever the context.
        let query_map = inverse.t().dot(&rotation.mapv(f64::from));
        let query_map = query_map.mapv(|v| f16::from_f64(v).to_f64());
        if query_map.iter().any(|v| !v.is_finite()) {
            return Err(singular());
        }
        let group = |words: ArrayView2<f32>| Codebook::new(words.to_owned());
        let half_square = |word: ArrayView1<f32>| 0.5 * word.dot(&word);
        let stage = |words: ArrayView3<f32>| Stage {
            groups: words.outer_iter().map(group).collect(),
            by_channel: words.permuted_axes([0, 2, 1]).iter().copied().collect(),
            half_squares: words.lanes(Axis(2)).into_iter().map(half_square).collect(),
        };
        Ok(Self {
            stages: std::array::from_fn(|i| stage(words.index_axis(Axis(0), i))),
            mean: mean.to_owned(),
            path: None,
            projection: project(chol, rotation, m, dim),
            query_map: deal(&query_map, m, dim),
        })
    }

    /// Returns this quantiser for keys from which the path of a mean is subtracted first.
    pub fn around(self, path: MeanPath) -> Self {
        Self {
            path: Some(path),
            ..self
        }
    }

    /// Returns the number of groups of a stage.
    pub(super) fn groups(&self) -> usize {
        self.stages[0].groups.len()
    }

    /// Returns the words of a group, `[words,dim]`.
    pub(super) fn words(&self, stage: usize, group: usize) -> ArrayView2<'_, f32> {
        self.stages[stage].groups[group].centroids().view()
    }

    /// Returns the path that is subtracted from the keys first, if any.
    pub(super) fn path(&self) -> Option<&MeanPath> {
        self.path.as_ref()
    }

    /// Returns the mean of the keys, `[d]`.
    pub(super) fn mean(&self) -> ArrayView1<'_, f32> {
        self.mean.view()
    }

    /// Returns the map of centered keys to the channels of all groups, `[d,m dim]`.
    pub(super) fn projection(&self) -> ArrayView2<'_, f32> {
        self.projection.view()
    }

    /// Returns the map of queries to the same channels, rounded to half precision: `[d,m dim]`.
    pub fn query_map(&self) -> ArrayView2<'_, f32> {
        self.query_map.view()
    }

    /// Returns the number of bytes of a key's code per stage.
    pub fn width(&self) -> usize {
        self.stages[0].width()
    }

    /// Returns the number of bytes that every step reads whatever the context: the words and the query map in half
    /// precision, the mean, and the mean before rotation if its path is subtracted.
    pub fn bytes(&self) -> usize {
        let groups = self.stages.iter().flat_map(|stage| &stage.groups);
        let words: usize = groups.map(|group| group.centroids().len()).sum();
        let path = self.path.as_ref().map_or(0, |path| path.mean().len());
        2 * (words + self.query_map.len()) + 4 * (self.mean.len() + path)
    }

    /// Returns the bytes in which memory holds what [`HeadCodebook::bytes`] counts: everything is in f32. The waves of a
    /// mean's path are not included; all heads of a model share them.
    pub fn held_bytes(&self) -> usize {
        let groups = self.stages.iter().flat_map(|stage| &stage.groups);
        let words: usize = groups.map(|group| group.centroids().len()).sum();
        let path = self.path.as_ref().map_or(0, |path| path.mean().len());
        4 * (words + self.query_map.len() + self.mean.len() + path)
    }

    /// Encodes rotated keys, `[n,d]`, of the positions from `first` on. Returns one array `[n,width]` per stage. A code
    /// holds the numbers of the nearest words in the order of the groups; of two 4-bit numbers in a byte, the first is in
    /// the low bits. The lowest number wins a tie.
    pub fn encode(&self, k_rope: ArrayView2<f32>, first: usize) -> [Vec<u8>; STAGES] {
        if k_rope.nrows() == 1 {
            return self.encode_one(k_rope, first);
        }
        let rows = k_rope.axis_chunks_iter(Axis(0), ROWS).into_par_iter().enumerate();
        let chunks: Vec<[Vec<u8>; STAGES]> = rows
            .map(|(i, rows)| self.encode_rows(rows, first + i * ROWS))
            .collect();
        std::array::from_fn(|stage| chunks.iter().flat_map(|chunk| &chunk[stage]).copied().collect())
    }

    /// Encodes one key, `[1,d]`, as every decode step does.
    fn encode_one(&self, k_rope: ArrayView2<f32>, position: usize) -> [Vec<u8>; STAGES] {
        let keys = self.centered(k_rope, position);
        let mut left = vec![0.0; self.projection.ncols()];
        simd::row_product(elements(&keys), elements(&self.projection), &mut left);
        self.stages.each_ref().map(|stage| stage.encode_one(&mut left))
    }

    /// Returns rotated keys, `[n,d]`, of the positions from `first` on, without the mean and without its path.
    fn centered(&self, k_rope: ArrayView2<f32>, first: usize) -> Array2<f32> {
        let mut keys = &k_rope - &self.mean;
        if let Some(path) = &self.path {
            path.subtract(keys.view_mut(), first);
        }
        keys
    }

    fn encode_rows(&self, k_rope: ArrayView2<f32>, first: usize) -> [Vec<u8>; STAGES] {
        let keys = self.centered(k_rope, first);
        let mut left = product(keys.view(), self.projection.view());
        self.stages.each_ref().map(|stage| stage.encode(&mut left))
    }

    /// Scores all words for the queries of a step, q_rope `[r,d]`, and the mean at the candidates' positions. Scores are in
    /// bits: divided by the square root of d, and multiplied by log2(e).
    ///
    /// # Numerics
    /// f32.
    pub(super) fn scores(&self, q_rope: ArrayView2<f32>, candidates: Range<usize>) -> WordScores<'_> {
        let scale = in_bits(q_rope.ncols());
        let map = elements(&self.query_map);
        let mut y = vec![0.0; self.query_map.ncols()];
        let mut stages = [(); STAGES].map(|_| Vec::with_capacity(q_rope.nrows()));
        for query in q_rope.rows() {
            let query: Vec<f32> = query.iter().map(|x| x * scale).collect();
            simd::row_product(&query, map, &mut y);
            for (tables, stage) in stages.iter_mut().zip(&self.stages) {
                tables.push(stage.scores(&y));
            }
        }
        WordScores {
            mean: (q_rope.dot(&self.mean) * scale).to_vec(),
            path: self
                .path
                .as_ref()
                .map(|path| path.scores(q_rope, scale, candidates)),
            stages,
        }
    }
}

/// Returns what turns a product of d channels into a score in bits.
pub(super) fn in_bits(d: usize) -> f32 {
    std::f32::consts::LOG2_E / (d as f32).sqrt()
}

impl Stage {
    /// Returns the number of words per group.
    fn words(&self) -> usize {
        self.groups[0].centroids().nrows()
    }

    fn width(&self) -> usize {
        self.groups.len() * self.words().trailing_zeros() as usize / 8
    }

    /// Encodes projected keys, `[n,m dim]`, as `[n,width]`, and subtracts their words from them.
    fn encode(&self, left: &mut Array2<f32>) -> Vec<u8> {
        let (n, width, word_bits) = (left.nrows(), self.width(), self.words().trailing_zeros() as usize);
        let per_byte = 8 / word_bits;
        let mut out = vec![0; n * width];
        let mut codes = vec![0; n];
        for (j, group) in self.groups.iter().enumerate() {
            let mut own = left.slice_mut(s![.., channels(j, group.centroids().ncols())]);
            group.codes(own.view(), &mut codes);
            subtract(own.view_mut(), &codes, group.centroids().view());
            let bytes = out.iter_mut().skip(j / per_byte).step_by(width);
            let shift = j % per_byte * word_bits;
            bytes
                .zip(&codes)
                .for_each(|(byte, code)| *byte |= (*code as u8) << shift);
        }
        out
    }

    /// Encodes one projected key, `[m dim]`, and subtracts its words from it.
    fn encode_one(&self, left: &mut [f32]) -> Vec<u8> {
        let (words, word_bits) = (self.words(), self.words().trailing_zeros() as usize);
        let (dim, per_byte) = (left.len() / self.groups.len(), 8 / word_bits);
        let (mut out, mut closeness) = (vec![0; self.width()], vec![0.0; words]);
        for (j, (left, group)) in left.chunks_exact_mut(dim).zip(&self.groups).enumerate() {
            simd::row_product(
                left,
                &self.by_channel[j * dim * words..][..dim * words],
                &mut closeness,
            );
            let half_squares = &self.half_squares[j * words..][..words];
            closeness
                .iter_mut()
                .zip(half_squares)
                .for_each(|(x, half)| *x -= half);
            let nearest = (1..words).fold(0, |best, w| if closeness[w] > closeness[best] { w } else { best });
            let word = group.centroids().row(nearest);
            left.iter_mut().zip(word).for_each(|(x, y)| *x -= y);
            out[j / per_byte] |= (nearest as u8) << (j % per_byte * word_bits);
        }
        out
    }

    /// Returns the products of the words with a projected query y, `[m dim]`.
    fn scores(&self, y: &[f32]) -> WordTable {
        let (groups, words) = (self.groups.len(), self.words());
        let dim = y.len() / groups;
        let mut products = vec![0.0; groups * words];
        let each = y.chunks_exact(dim).zip(self.by_channel.chunks_exact(dim * words));
        for (out, (y, words)) in products.chunks_exact_mut(words).zip(each) {
            simd::row_product(y, words, out);
        }
        WordTable::new(products, words)
    }
}

/// Subtracts from each row the centroid that its code names.
pub(super) fn subtract(mut rows: ArrayViewMut2<f32>, codes: &[u32], centroids: ArrayView2<f32>) {
    for (mut row, code) in rows.outer_iter_mut().zip(codes) {
        let centroid = centroids.row(*code as usize);
        row.iter_mut().zip(centroid).for_each(|(x, c)| *x -= c);
    }
}
