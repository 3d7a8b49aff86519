//! Small dense factorisations; the only module that calls LAPACK.

use std::sync::Once;

use ndarray::{Array2, ArrayView2};
use ndarray_linalg::{Cholesky, Eigh, SolveTriangular, UPLO};

/// Limits LAPACK to one thread: results must not depend on the number of cores, and kvsmith's own
/// threads use all cores already.
fn single_threaded() {
    unsafe extern "C" {
        fn openblas_set_num_threads(threads: std::ffi::c_int);
    }
    static ONCE: Once = Once::new();
    // SAFETY: the function only sets a number in the linked OpenBLAS, and is called once.
    ONCE.call_once(|| unsafe { openblas_set_num_threads(1) });
}

/// Computes the lower triangular L with `L L^T = a`; `None` if `a` is not positive definite.
///
/// # Shapes
/// a `[d,d]` symmetric.
pub fn cholesky(a: ArrayView2<f64>) -> Option<Array2<f64>> {
    single_threaded();
    a.cholesky(UPLO::Lower)
        .ok()
        .filter(|l| l.iter().all(|v| v.is_finite()))
}

/// Computes the eigenvalues of a symmetric matrix, ascending; `None` if LAPACK does not converge.
pub fn eigenvalues(a: ArrayView2<f64>) -> Option<Vec<f64>> {
    single_threaded();
    a.eigh(UPLO::Lower).ok().map(|(values, _)| values.to_vec())
}

/// Inverts a lower triangular matrix; `None` if it is singular.
pub fn invert_lower(l: ArrayView2<f64>) -> Option<Array2<f64>> {
    single_threaded();
    let identity = Array2::eye(l.nrows());
    l.solve_triangular(UPLO::Lower, ndarray_linalg::Diag::NonUnit, &identity)
        .ok()
}
