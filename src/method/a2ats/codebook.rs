//! Calibrated codebooks, which encode keys and score queries.

use std::sync::Arc;

use ndarray::{Array1, Array2, Array3, ArrayView2, Axis};
use rayon::prelude::*;

use super::section::{CHOL, CODEBOOK, FitParams, MEAN, SECTION};
use crate::artifact::Artifact;
use crate::compute::codewords::Codewords;
use crate::error::{Error, Result};
use crate::model::rope::{Rope, RopeTable};
use crate::stats::kmeans::Codebook;
use crate::stats::linalg;
use crate::stats::whiten::whiten;

/// The codebooks of every head.
pub struct Codebooks {
    n_kv_heads: usize,
    heads: Vec<Arc<HeadCodebook>>,
}

/// The codebook of one KV head.
pub struct HeadCodebook {
    codebook: Codebook,
    /// The codewords in the layout for scoring queries.
    codewords: Codewords,
    mean: Array1<f32>,
    chol: Array2<f32>,
    /// L^-1, so that a step multiplies instead of solving.
    chol_inverse: Array2<f64>,
    /// R_b; `None` if keys and queries are rotated to their own positions.
    wrope: Option<RopeTable>,
}

/// The codebook of one KV head in the form that a GPU reads.
pub struct HeadConstants<'a> {
    /// C^z, `[M,d]`, values that fit f16.
    pub codebook: ArrayView2<'a, f32>,
    /// Maps a query to y = q R_b L^-T: `[d,d]`, y_i = sum_j map_ij q_j.
    pub query_map: Array2<f32>,
    /// Maps a key to z: `[d,d]`, z_i = sum_j map_ij k_j - mean_i.
    pub key_map: Array2<f32>,
    /// The whitened mean, `[d]`.
    pub mean: Vec<f32>,
}

impl Codebooks {
    /// Reads the section and checks its digests and values.
    pub fn load(artifact: &Artifact, rope: &Rope) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let FitParams {
            size: m, position, ..
        } = section.params()?;
        let table = position.windowed().map(|b| rope.table(b..b + 1));
        let d = artifact.sizes.head_dim;
        let n = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
        let codebook = Array3::from_shape_vec((n, m, d), section.widened(CODEBOOK)?)?;
        let mean = Array2::from_shape_vec((n, d), section.read(MEAN)?)?;
        let chol = Array3::from_shape_vec((n, d, d), section.read(CHOL)?)?;
        let head = |i: usize| {
            let own = |x: &Array3<f32>| x.index_axis(Axis(0), i).to_owned();
            let mean = mean.row(i).to_owned();
            let head = HeadCodebook::with_rotation(own(&codebook), mean, own(&chol), table.clone())?;
            Ok(Arc::new(head))
        };
        let heads = (0..n).into_par_iter().map(head).collect::<Result<_>>()?;
        Ok(Self {
            n_kv_heads: artifact.sizes.n_kv_heads,
            heads,
        })
    }

    /// Returns the codebook of a head.
    pub fn head(&self, layer: usize, kv_head: usize) -> &Arc<HeadCodebook> {
        &self.heads[layer * self.n_kv_heads + kv_head]
    }
}

impl HeadCodebook {
    /// Makes a codebook of C^z `[M,d]`, the mean `[d]` and the Cholesky factor `[d,d]`.
    ///
    /// # Errors
    /// The factor is singular.
    pub fn new(
        codebook: Array2<f32>,
        mean: Array1<f32>,
        chol: Array2<f32>,
        rope: &Rope,
        wrope_position: usize,
    ) -> Result<Self> {
        let table = rope.table(wrope_position..wrope_position + 1);
        Self::with_rotation(codebook, mean, chol, Some(table))
    }

    /// Makes a codebook for queries that `wrope` rotates; without it they are given rotated.
    fn with_rotation(
        codebook: Array2<f32>,
        mean: Array1<f32>,
        chol: Array2<f32>,
        wrope: Option<RopeTable>,
    ) -> Result<Self> {
        let chol_inverse = linalg::invert_lower(chol.mapv(f64::from).view())?
            .ok_or_else(|| Error::failed("a Cholesky factor is singular").hint("make the section again"))?;
        Ok(Self {
            codewords: Codewords::new(codebook.view()),
            codebook: Codebook::new(codebook),
            mean,
            chol,
            chol_inverse,
            wrope,
        })
    }

    /// Returns whether keys and queries are given before rotation (windowed RoPE).
    pub fn is_windowed(&self) -> bool {
        self.wrope.is_some()
    }

    /// Encodes keys `[n,d]`, given before rotation with windowed RoPE, else after: argmin of (k - c) H (k - c)^T, the
    /// lowest index on ties.
    ///
    /// # Source
    /// Eq. 20, in whitened coordinates.
    pub fn encode(&self, k_pre: ArrayView2<f32>) -> Vec<u16> {
        let z = whiten(k_pre, self.chol.view(), self.mean.view());
        let mut codes = vec![0; z.nrows()];
        self.codebook
            .nearest(z.view(), &mut codes, &mut vec![0.0; z.nrows()]);
        codes.into_iter().map(|c| c as u16).collect()
    }

    /// Returns the score of every codeword for each query head, `[r,M]`, up to a constant per query.
    ///
    /// # Shapes
    /// q `[r,d]`, before rotation with windowed RoPE, else after.
    ///
    /// # Numerics
    /// y = qt L^-T in f64, then f32 products: see [`Codewords::products`].
    ///
    /// # Source
    /// Eq. 12 (qt = q R_b) and Eq. 21, with C = C^z L^-1 folded into the query.
    pub fn scores(&self, q: ArrayView2<f32>) -> Array2<f32> {
        let mut y = Array2::<f32>::zeros(q.dim());
        for (query, mut y) in q.rows().into_iter().zip(y.rows_mut()) {
            let qt = self.rotated_query(query.to_vec());
            y.assign(&self.chol_inverse.dot(&qt).mapv(|v| v as f32));
        }
        self.codewords.products(y.view())
    }

    /// Returns a query q R_b in f64; with standard RoPE it is given rotated.
    fn rotated_query(&self, mut query: Vec<f32>) -> Array1<f64> {
        if let Some(table) = &self.wrope {
            table.rotate(&mut query, 0);
        }
        query.into_iter().map(f64::from).collect()
    }

    /// Returns the constants of this head for a GPU: the rotation and L^-1 in one matrix for queries, L for keys.
    pub fn constants(&self) -> HeadConstants<'_> {
        let d = self.chol.nrows();
        // Column j is the rotated j-th unit vector.
        let mut rotation = Array2::<f64>::zeros((d, d));
        for j in 0..d {
            let mut unit = vec![0.0; d];
            unit[j] = 1.0;
            rotation.column_mut(j).assign(&self.rotated_query(unit));
        }
        HeadConstants {
            codebook: self.codebook.centroids().view(),
            query_map: self.chol_inverse.dot(&rotation).mapv(|v| v as f32),
            key_map: self.chol.t().to_owned(),
            mean: self.mean.to_vec(),
        }
    }

    /// Returns the number of codewords.
    pub fn size(&self) -> usize {
        self.codebook.centroids().nrows()
    }
}
