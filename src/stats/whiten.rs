//! Whitening: the metric that queries induce on keys, as a Cholesky factor, and keys in that metric.
//!
//! # Source
//! A2ATS, arXiv 2502.12665, Eq. 13 and 15-17.

use ndarray::{Array2, ArrayView1, ArrayView2, Axis};
use rayon::prelude::*;

use super::linalg;
use crate::compute::gemm;
use crate::error::{Error, Result};

/// The first ridge added to the normalised second moment.
pub const EPS: f64 = 1e-6;
/// Rows that one task whitens.
const ROWS: usize = 1024;

/// The metric of one KV head.
pub struct Metric {
    /// Lower triangular L with Hn + eps I = L L^T: `[d,d]`.
    pub chol: Array2<f32>,
    /// The ridge that made the factorisation succeed.
    pub eps: f64,
    /// Largest over smallest eigenvalue of Hn + eps I.
    pub condition: f64,
}

impl Metric {
    /// Returns the Euclidean metric of d channels.
    pub fn euclidean(d: usize) -> Self {
        Self {
            chol: Array2::eye(d),
            eps: 0.0,
            condition: 1.0,
        }
    }

    /// Factorises the second moment H of the queries.
    ///
    /// H is first normalised to Hn = H / rms(entries of H), which cancels its scale and the number of
    /// queries. The ridge starts at 1e-6 and grows tenfold until the factorisation succeeds. A head whose
    /// queries are all zero gets the Euclidean metric.
    ///
    /// # Shapes
    /// sum_qq `[d,d]`, symmetric.
    ///
    /// # Numerics
    /// f64 throughout; L is rounded to f32 at the end.
    ///
    /// # Errors
    /// Entries that are not finite; no factorisation with a ridge of up to 1; too little memory.
    ///
    /// # Source
    /// Eq. 13; the normalisation and eps are those of the authors' code.
    pub fn new(sum_qq: ArrayView2<f64>) -> Result<Self> {
        let d = sum_qq.nrows();
        if !sum_qq.iter().all(|v| v.is_finite()) {
            return Err(Error::invalid("the second moment of the queries is not finite"));
        }
        let rms = (sum_qq.iter().map(|v| v * v).sum::<f64>() / (d * d) as f64).sqrt();
        if rms == 0.0 {
            return Ok(Self {
                eps: 1.0,
                ..Self::euclidean(d)
            });
        }
        // The rounding of f32 partial sums may differ between the two halves of the matrix.
        let normalised = (&sum_qq + &sum_qq.t()) * (0.5 / rms);
        for exponent in 0..=6 {
            let eps = EPS * 10f64.powi(exponent);
            let ridged = &normalised + &(Array2::<f64>::eye(d) * eps);
            if let Some(chol) = linalg::cholesky(ridged.view())? {
                let values = linalg::eigenvalues(ridged.view())?
                    .ok_or_else(|| Error::invalid("the eigenvalues of the second moment did not converge"))?;
                return Ok(Self {
                    chol: chol.mapv(|v| v as f32),
                    eps,
                    condition: values[d - 1] / values[0],
                });
            }
        }
        Err(Error::invalid(
            "the second moment of the queries is not positive definite",
        ))
    }
}

/// Whitens and centers keys: z = k L - mean.
///
/// # Shapes
/// keys `[n,d]`, chol `[d,d]` lower, mean `[d]`; result `[n,d]`.
///
/// # Numerics
/// f32; fixed chunks of rows, so the result does not depend on the number of threads.
///
/// # Source
/// Eq. 15. The mean is kvsmith's addition: it shifts all scores of a query equally, so rankings do not change, and it
/// keeps a large key bias out of the f32 distances and the f16 codebook.
pub fn whiten(keys: ArrayView2<f32>, chol: ArrayView2<f32>, mean: ArrayView1<f32>) -> Array2<f32> {
    let mut out = Array2::zeros(keys.dim());
    let keys = keys.axis_chunks_iter(Axis(0), ROWS);
    let chunks = out.axis_chunks_iter_mut(Axis(0), ROWS).into_par_iter();
    chunks.zip(keys).for_each(|(mut z, k)| {
        gemm(z.view_mut(), false, k, chol);
        z -= &mean;
    });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cpu::row_mean;
    use ndarray::Array1;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn moment(d: usize, vectors: usize, scale: f64) -> Array2<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(d as u64);
        let q = Array2::from_shape_simple_fn((vectors, d), || rng.gen_range(-1.0..1.0) * scale);
        q.t().dot(&q)
    }

    #[test]
    fn the_factor_reproduces_the_normalised_moment() {
        for d in [4, 16, 80, 128] {
            // The scale cancels: H is divided by the RMS of its entries.
            for scale in [1.0, 1e6] {
                let h = moment(d, 3 * d, scale);
                let metric = Metric::new(h.view()).unwrap();
                assert_eq!(metric.eps, EPS);
                let rms = (h.iter().map(|v| v * v).sum::<f64>() / (d * d) as f64).sqrt();
                let l = metric.chol.mapv(f64::from);
                let back = l.dot(&l.t());
                for ((i, j), v) in back.indexed_iter() {
                    let expected = h[[i, j]] / rms + if i == j { EPS } else { 0.0 };
                    // L is rounded to f32; an entry sums at most d products of rows of L.
                    let bound = 2.0 * 2f64.powi(-24) * (back[[i, i]] * back[[j, j]]).sqrt() + 1e-12;
                    assert!((v - expected).abs() <= bound, "d {d} [{i},{j}]: {v} {expected}");
                    assert!(j <= i || metric.chol[[i, j]] == 0.0);
                }
            }
        }
    }

    #[test]
    fn the_condition_is_that_of_the_eigenvalues() {
        let h = Array2::from_diag(&Array1::from(vec![8.0, 4.0, 2.0, 1.0]));
        let metric = Metric::new(h.view()).unwrap();
        assert!((metric.condition - 8.0).abs() < 1e-4, "{}", metric.condition);
    }

    #[test]
    fn the_ridge_grows_until_the_factorisation_succeeds() {
        // An indefinite matrix, such as rounding can make of a rank-deficient one: its smallest eigenvalue is about
        // -3e-5 of the RMS.
        let mut h = Array2::from_elem((4, 4), 1.0);
        h[[3, 3]] -= 1.2e-4;
        let metric = Metric::new(h.view()).unwrap();
        assert!(metric.eps > EPS && metric.eps <= 1e-3, "{}", metric.eps);
    }

    #[test]
    fn degenerate_moments() {
        let zero = Metric::new(Array2::zeros((8, 8)).view()).unwrap();
        assert_eq!(zero.chol, Array2::<f32>::eye(8));
        let mut broken = Array2::<f64>::eye(4);
        broken[[1, 2]] = f64::NAN;
        assert!(Metric::new(broken.view()).is_err());
        assert!(Metric::new((-Array2::<f64>::eye(4)).view()).is_err());
    }

    #[test]
    fn whitening_is_the_product_less_the_mean() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut random = |shape| Array2::from_shape_simple_fn(shape, || rng.gen_range(-1.0..1.0f32));
        // Sizes below and beyond a chunk of 1024 rows.
        for n in [1, 1023, 1025] {
            let (keys, chol) = (random((n, 16)), random((16, 16)));
            let mean = row_mean(keys.dot(&chol).view());
            let z = whiten(keys.view(), chol.view(), mean.view());
            for i in 0..n {
                for j in 0..16 {
                    let product: f64 = (0..16)
                        .map(|c| f64::from(keys[[i, c]]) * f64::from(chol[[c, j]]))
                        .sum();
                    let expected = product - f64::from(mean[j]);
                    // 16 products below 1, summed in f32, and one subtraction.
                    assert!((f64::from(z[[i, j]]) - expected).abs() < 18.0 * 16.0 * 2f64.powi(-24));
                }
            }
        }
    }
}
