//! Calibrated codebooks, which encode keys and score queries.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array1, Array2, Array3, ArrayView2, Axis, s};
use rayon::prelude::*;

use super::buckets::{BUCKETS, Edges, Run};
use super::section::{CHOL, CODEBOOK, FitParams, MEAN, Rotation, SECTION};
use crate::artifact::Artifact;
use crate::compute::codewords::Codewords;
use crate::error::{Error, Result};
use crate::model::rope::{Rope, RopeTable, Ropes};
use crate::stats::kmeans::Codebook;
use crate::stats::linalg;
use crate::stats::moments::Position;
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
    rotation: QueryRotation,
}

/// How a query is rotated before it is scored.
#[derive(Clone)]
enum QueryRotation {
    /// Not at all: keys and queries are already rotated at their own positions.
    Own,
    /// To one fixed relative position: R_b.
    Windowed(RopeTable),
    /// By the mean rotation of the bucket that the key's distance is in. The table has one row per bucket.
    Buckets(Edges, RopeTable),
}

impl QueryRotation {
    fn new(rotation: &Rotation, rope: &Rope) -> Self {
        match rotation {
            Rotation::At(Position::Own) => Self::Own,
            Rotation::At(Position::Windowed(b)) => Self::Windowed(rope.table(*b..b + 1)),
            Rotation::Buckets(buckets) => Self::Buckets(buckets.edges, buckets.edges.rotations(rope)),
        }
    }
}

/// The codebook of one KV head in the form that a GPU reads.
pub struct HeadConstants<'a> {
    /// C^z, `[M,d]`; all values are exact in f16.
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
    pub fn load(artifact: &Artifact, ropes: &Ropes) -> Result<Self> {
        let section = artifact.checked_section(SECTION)?;
        let FitParams {
            size: m, rotation, ..
        } = section.params()?;
        let rotations = ropes.map(|rope| QueryRotation::new(&rotation, rope));
        let d = artifact.sizes.head_dim;
        let n = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
        let codebook = Array3::from_shape_vec((n, m, d), section.widened(CODEBOOK)?)?;
        let mean = Array2::from_shape_vec((n, d), section.read(MEAN)?)?;
        let chol = Array3::from_shape_vec((n, d, d), section.read(CHOL)?)?;
        let head = |i: usize| {
            let own = |x: &Array3<f32>| x.index_axis(Axis(0), i).to_owned();
            let mean = mean.row(i).to_owned();
            let rotation = rotations.layer(i / artifact.sizes.n_kv_heads).clone();
            let head = HeadCodebook::with_rotation(own(&codebook), mean, own(&chol), rotation)?;
            Ok(Arc::new(head))
        };
        let heads = (0..n).into_par_iter().map(head).collect::<Result<_>>()?;
        Ok(Self {
            n_kv_heads: artifact.sizes.n_kv_heads,
            heads,
        })
    }

    /// Joins the codebooks of the heads, those of the first layer first.
    pub fn from_heads(n_kv_heads: usize, heads: Vec<Arc<HeadCodebook>>) -> Self {
        Self { n_kv_heads, heads }
    }

    /// Returns the codebook of a head.
    pub fn head(&self, layer: usize, kv_head: usize) -> &Arc<HeadCodebook> {
        &self.heads[layer * self.n_kv_heads + kv_head]
    }

    /// Returns whether a query's rotation depends on the bucket that the key's distance is in.
    pub fn has_buckets(&self) -> bool {
        self.heads.iter().any(|head| head.buckets() > 1)
    }
}

impl HeadCodebook {
    /// Makes a codebook from C^z `[M,d]`, the mean `[d]` and the Cholesky factor `[d,d]`.
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
        Self::with_rotation(codebook, mean, chol, QueryRotation::Windowed(table))
    }

    /// Makes a codebook like [`HeadCodebook::new`], whose scores depend on the bucket that the key's distance is in.
    ///
    /// # Errors
    /// The factor is singular.
    pub fn with_buckets(
        codebook: Array2<f32>,
        mean: Array1<f32>,
        chol: Array2<f32>,
        rope: &Rope,
        edges: Edges,
    ) -> Result<Self> {
        let rotation = QueryRotation::Buckets(edges, edges.rotations(rope));
        Self::with_rotation(codebook, mean, chol, rotation)
    }

    fn with_rotation(
        codebook: Array2<f32>,
        mean: Array1<f32>,
        chol: Array2<f32>,
        rotation: QueryRotation,
    ) -> Result<Self> {
        let chol_inverse = linalg::invert_lower(chol.mapv(f64::from).view())?
            .ok_or_else(|| Error::damaged("a Cholesky factor is singular").hint("recreate the section"))?;
        Ok(Self {
            codewords: Codewords::new(codebook.view()),
            codebook: Codebook::new(codebook),
            mean,
            chol,
            chol_inverse,
            rotation,
        })
    }

    /// Returns whether keys and queries are given before rotation; otherwise they are given rotated at their own
    /// positions.
    pub fn is_pre_rope(&self) -> bool {
        !matches!(self.rotation, QueryRotation::Own)
    }

    /// Returns the number of buckets; 1 if a score does not depend on the distance.
    pub fn buckets(&self) -> usize {
        match &self.rotation {
            QueryRotation::Buckets(..) => BUCKETS,
            _ => 1,
        }
    }

    /// Divides the candidates by bucket, for the query at position `end - 1`. The runs are in ascending order of
    /// position; buckets without candidates are left out, and the remaining buckets are consecutive. A head without
    /// buckets has one run.
    pub fn runs(&self, end: usize, candidates: &Range<usize>) -> Vec<Run> {
        match &self.rotation {
            QueryRotation::Buckets(edges, _) => edges.runs(end, candidates),
            _ => vec![Run {
                bucket: 0,
                positions: candidates.clone(),
            }],
        }
    }

    /// Encodes keys `[n,d]`, given before rotation if [`HeadCodebook::is_pre_rope`], else after: the argmin of (k - c)
    /// H (k - c)^T over the codewords c. The lowest number wins a tie.
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

    /// Returns the score of every codeword for each query head, `[r,M]`, up to a constant per query, for a head without
    /// buckets. See [`HeadCodebook::scores_in`].
    pub fn scores(&self, q: ArrayView2<f32>) -> Array2<f32> {
        self.scores_in(q, &[0])
    }

    /// Returns the score of every codeword for each query head in each of the k given buckets, `[r,k M]`, up to a
    /// constant per query. A head without buckets has only bucket 0.
    ///
    /// # Shapes
    /// q `[r,d]`, before rotation if [`HeadCodebook::is_pre_rope`], else after.
    ///
    /// # Numerics
    /// y = qt L^-T in f64, then products in f32: see [`Codewords::products`]. z lacks the mean, which would add y
    /// mean^T to every score of a bucket. The difference of this term from its value in the first given bucket is
    /// computed in f64 and added in f32.
    ///
    /// # Source
    /// Eq. 12 (qt = q R_b) and Eq. 21, with C = C^z L^-1 folded into the query.
    pub fn scores_in(&self, q: ArrayView2<f32>, buckets: &[usize]) -> Array2<f32> {
        let ((r, d), k, size) = (q.dim(), buckets.len(), self.size());
        let mut y = Array2::<f32>::zeros((r * k, d));
        let mut offsets = Vec::with_capacity(r * k);
        for (i, mut y) in y.rows_mut().into_iter().enumerate() {
            let qt = self.rotated_query(q.row(i / k).to_vec(), buckets[i % k]);
            let exact = self.chol_inverse.dot(&qt);
            y.assign(&exact.mapv(|v| v as f32));
            offsets.push(exact.dot(&self.mean.mapv(f64::from)));
        }
        let products = self.codewords.products(y.view());
        if k == 1 {
            return products;
        }
        let mut scores = Array2::zeros((r, k * size));
        for (i, products) in products.rows().into_iter().enumerate() {
            let offset = (offsets[i] - offsets[i - i % k]) as f32;
            let of_bucket = i % k * size..(i % k + 1) * size;
            scores
                .slice_mut(s![i / k, of_bucket])
                .assign(&(&products + offset));
        }
        scores
    }

    /// Returns a query rotated for a bucket, q R, in f64. With standard RoPE, the query is already rotated and stays as
    /// it is.
    fn rotated_query(&self, mut query: Vec<f32>, bucket: usize) -> Array1<f64> {
        match &self.rotation {
            QueryRotation::Own => {}
            QueryRotation::Windowed(table) | QueryRotation::Buckets(_, table) => {
                table.rotate(&mut query, bucket)
            }
        }
        query.into_iter().map(f64::from).collect()
    }

    /// Returns the constants of this head, which must not have buckets, for a GPU. The rotation and L^-1 are combined
    /// into one matrix for queries; L is the matrix for keys.
    pub fn constants(&self) -> HeadConstants<'_> {
        let d = self.chol.nrows();
        // Column j is the j-th unit vector, rotated.
        let mut rotation = Array2::<f64>::zeros((d, d));
        for j in 0..d {
            let mut unit = vec![0.0; d];
            unit[j] = 1.0;
            rotation.column_mut(j).assign(&self.rotated_query(unit, 0));
        }
        HeadConstants {
            codebook: self.codebook.centroids().view(),
            query_map: self.chol_inverse.dot(&rotation).mapv(|v| v as f32),
            key_map: self.chol.t().to_owned(),
            mean: self.mean.to_vec(),
        }
    }

    /// Returns the bytes in which memory holds what a step reads: the codewords and L^-1, which is in f64.
    pub fn held_bytes(&self) -> usize {
        self.codewords.bytes() + self.chol_inverse.len() * size_of::<f64>()
    }

    /// Returns the number of codewords.
    pub fn size(&self) -> usize {
        self.codebook.centroids().nrows()
    }
}
