//! Calibrated product quantisers, which encode keys and score queries.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array1, Array2, Array3, ArrayView1, ArrayView2, Axis, s};
use rayon::prelude::*;

use super::section::{CHOL, CODEBOOK, MEAN, ROTATION, SECTION, WpqParams};
use crate::artifact::Artifact;
use crate::compute::gemm;
use crate::compute::layout::elements;
use crate::error::{Error, Result};
use crate::stats::kmeans::Codebook;
use crate::stats::linalg;

/// Rows that one task projects.
const ROWS: usize = 1024;
/// Numbers that a byte of a code can have.
pub(super) const BYTES: usize = 256;

/// The quantisers of every head.
pub struct HeadCodebooks {
    n_kv_heads: usize,
    heads: Vec<Arc<HeadCodebook>>,
}

/// The quantiser of one KV head.
pub struct HeadCodebook {
    /// Words of each group, `[words,dim]`.
    groups: Vec<Codebook>,
    /// Bits of a word's number: 4 or 8.
    word_bits: usize,
    mean: Array1<f32>,
    /// Maps centred keys to the channels of all groups: `[d,m dim]`.
    projection: Array2<f32>,
    /// Maps a query to these channels, so that products stay: `[d,m dim]`.
    query_map: Array2<f32>,
}

/// The scores of one step's queries with all words.
pub(super) struct WordScores {
    /// The score of each value of each byte of a code, `[width,256,r]`.
    pub bytes: Vec<f32>,
    /// The score of the mean key, `[r]`.
    pub mean: Vec<f32>,
}

/// Returns the channels of a group.
pub(super) fn channels(group: usize, dim: usize) -> Range<usize> {
    group * dim..(group + 1) * dim
}

/// Returns the product of the Cholesky factor L and the principal directions V, dealt to the groups: `[d,m dim]`.
pub(super) fn project(chol: &Array2<f32>, rotation: &Array2<f32>, groups: usize) -> Array2<f32> {
    deal(&chol.mapv(f64::from).dot(&rotation.mapv(f64::from)), groups)
}

/// Deals columns to m groups: channel i of group j is column j + i m, and zero if there is none.
fn deal(columns: &Array2<f64>, groups: usize) -> Array2<f32> {
    let (rows, d) = columns.dim();
    let dim = d.div_ceil(groups);
    let mut out = Array2::zeros((rows, groups * dim));
    for (i, column) in columns.columns().into_iter().enumerate() {
        let mut to = out.column_mut(channels(i % groups, dim).start + i / groups);
        to.assign(&column.mapv(|v| v as f32));
    }
    out
}

/// Returns the product of rows with a matrix.
///
/// # Numerics
/// f32; fixed chunks of rows, so the result does not depend on the number of threads.
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
    /// Reads the section and checks its digests and values.
    pub fn load(artifact: &Artifact) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let params: WpqParams = section.params()?;
        let (d, m) = (artifact.sizes.head_dim, params.groups());
        let n = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
        let words = (n * m, params.words, params.group_dim(d));
        let words = Array3::from_shape_vec(words, section.widened(CODEBOOK)?)?;
        let mean = Array2::from_shape_vec((n, d), section.read(MEAN)?)?;
        let square =
            |tensor| -> Result<Array3<f32>> { Ok(Array3::from_shape_vec((n, d, d), section.read(tensor)?)?) };
        let (chol, rotation) = (square(CHOL)?, square(ROTATION)?);
        let head = |i: usize| {
            let own = |x: &Array3<f32>| x.index_axis(Axis(0), i).to_owned();
            let words = words.slice(s![i * m..(i + 1) * m, .., ..]).to_owned();
            HeadCodebook::new(words, mean.row(i), &own(&chol), &own(&rotation)).map(Arc::new)
        };
        Ok(Self {
            n_kv_heads: artifact.sizes.n_kv_heads,
            heads: (0..n).into_par_iter().map(head).collect::<Result<_>>()?,
        })
    }

    /// Returns the quantiser of a head.
    pub fn of(&self, layer: usize, kv_head: usize) -> &Arc<HeadCodebook> {
        &self.heads[layer * self.n_kv_heads + kv_head]
    }
}

impl HeadCodebook {
    /// Makes a quantiser of words `[m,words,dim]`, 16 or 256 per group, the mean `[d]`, the Cholesky factor and the
    /// principal directions `[d,d]`.
    ///
    /// # Errors
    /// The factor is singular.
    pub fn new(
        words: Array3<f32>,
        mean: ArrayView1<f32>,
        chol: &Array2<f32>,
        rotation: &Array2<f32>,
    ) -> Result<Self> {
        let (m, size, _) = words.dim();
        let inverse = linalg::invert_lower(chol.mapv(f64::from).view())?
            .ok_or_else(|| Error::failed("a Cholesky factor is singular").hint("make the section again"))?;
        // With z = (k - mean) L V, q (k - mean)^T = q L^-T V z^T.
        let query_map = inverse.t().dot(&rotation.mapv(f64::from));
        Ok(Self {
            groups: words
                .outer_iter()
                .map(|words| Codebook::new(words.to_owned()))
                .collect(),
            word_bits: size.trailing_zeros() as usize,
            mean: mean.to_owned(),
            projection: project(chol, rotation, m),
            query_map: deal(&query_map, m),
        })
    }

    /// Returns the bytes of a key's code.
    pub fn width(&self) -> usize {
        self.groups.len() * self.word_bits / 8
    }

    /// Returns the bytes that every step reads whatever the context: the words in half precision, the query's map and the
    /// mean.
    pub fn bytes(&self) -> usize {
        let words: usize = self.groups.iter().map(|group| group.centroids().len()).sum();
        2 * words + 4 * (self.query_map.len() + self.mean.len())
    }

    /// Encodes rotated keys, `[n,d]`: the numbers of the nearest words in the order of the groups, of 4-bit numbers the
    /// first of a pair in the low bits. The lowest number wins ties. `[n,width]`.
    pub fn encode(&self, k_rope: ArrayView2<f32>) -> Vec<u8> {
        let (n, width, per_byte) = (k_rope.nrows(), self.width(), 8 / self.word_bits);
        let z = product((&k_rope - &self.mean).view(), self.projection.view());
        let mut out = vec![0; n * width];
        let (mut codes, mut distances) = (vec![0; n], vec![0.0; n]);
        for (j, group) in self.groups.iter().enumerate() {
            let own = z.slice(s![.., channels(j, group.centroids().ncols())]);
            group.nearest(own, &mut codes, &mut distances);
            let bytes = out.iter_mut().skip(j / per_byte).step_by(width);
            let shift = j % per_byte * self.word_bits;
            bytes
                .zip(&codes)
                .for_each(|(byte, code)| *byte |= (*code as u8) << shift);
        }
        out
    }

    /// Scores all words for the queries of a step, q_rope `[r,d]`, divided by the square root of d.
    ///
    /// # Numerics
    /// f32.
    pub(super) fn scores(&self, q_rope: ArrayView2<f32>) -> WordScores {
        let (r, d) = q_rope.dim();
        let scale = 1.0 / (d as f32).sqrt();
        let y = product(q_rope, self.query_map.view()) * scale;
        let per_byte = 8 / self.word_bits;
        let mut bytes = vec![0.0; self.width() * BYTES * r];
        for (j, group) in self.groups.iter().enumerate() {
            let (words, dim) = group.centroids().dim();
            let scores = group.centroids().dot(&y.slice(s![.., channels(j, dim)]).t());
            let scores = scores.as_standard_layout();
            let scores = elements(&scores);
            let shift = j % per_byte * self.word_bits;
            let table = &mut bytes[j / per_byte * BYTES * r..][..BYTES * r];
            for (byte, to) in table.chunks_exact_mut(r).enumerate() {
                let word = byte >> shift & (words - 1);
                let from = &scores[word * r..(word + 1) * r];
                to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
            }
        }
        WordScores {
            bytes,
            mean: (q_rope.dot(&self.mean) * scale).to_vec(),
        }
    }
}
