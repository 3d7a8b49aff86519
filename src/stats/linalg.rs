//! Small dense factorisations; the only module that calls LAPACK.

use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapMut;
use ndarray::{Array2, ArrayView2};
use ndarray_linalg::{Cholesky, Eigh, Inverse, SolveTriangular, UPLO};

use crate::error::{Error, Result};

/// More bytes than OpenBLAS allocates at its first call and keeps. OpenBLAS retries for ever if it does not get its
/// memory, so [`lapack`] first tries whether there is as much.
const BUFFER_BYTES: usize = 160 << 20;

/// Gives access to LAPACK to one caller at a time, so that LAPACK needs one buffer only.
///
/// LAPACK is limited to one thread: results must not depend on the number of cores, and kvsmith's own threads use all
/// cores already.
///
/// # Errors
/// There is no memory for LAPACK's buffer.
fn lapack() -> Result<MutexGuard<'static, bool>> {
    unsafe extern "C" {
        fn openblas_set_num_threads(threads: std::ffi::c_int);
    }
    static READY: Mutex<bool> = Mutex::new(false);
    let mut ready = READY.lock().unwrap_or_else(PoisonError::into_inner);
    if !*ready {
        // SAFETY: the function only sets a number in the linked OpenBLAS.
        unsafe { openblas_set_num_threads(1) };
        MmapMut::map_anon(BUFFER_BYTES).map_err(|e| {
            Error::memory(format!(
                "not enough memory for linear algebra, which needs 160 MB: {e}"
            ))
            .hint("raise the memory limit (`ulimit -v`), or use fewer ⟨threads⟩")
        })?;
        *ready = true;
    }
    Ok(ready)
}

/// Computes the lower triangular L with `L L^T = a`; `None` if `a` is not positive definite.
///
/// # Shapes
/// a `[d,d]` symmetric.
///
/// # Errors
/// There is too little memory for LAPACK.
pub fn cholesky(a: ArrayView2<f64>) -> Result<Option<Array2<f64>>> {
    let _alone = lapack()?;
    let factor = a.cholesky(UPLO::Lower).ok();
    Ok(factor.filter(|l| l.iter().all(|v| v.is_finite())))
}

/// Computes the eigenvalues of a symmetric matrix, ascending; `None` if LAPACK does not converge.
///
/// # Errors
/// There is too little memory for LAPACK.
pub fn eigenvalues(a: ArrayView2<f64>) -> Result<Option<Vec<f64>>> {
    let _alone = lapack()?;
    Ok(a.eigh(UPLO::Lower).ok().map(|(values, _)| values.to_vec()))
}

/// The eigenvalues of a symmetric matrix, ascending, and the eigenvectors as columns.
pub type Eigen = (Vec<f64>, Array2<f64>);

/// Computes eigenvalues and eigenvectors of a symmetric matrix; `None` if LAPACK does not converge.
///
/// # Errors
/// There is too little memory for LAPACK.
pub fn eigen(a: ArrayView2<f64>) -> Result<Option<Eigen>> {
    let _alone = lapack()?;
    Ok(a.eigh(UPLO::Lower)
        .ok()
        .map(|(values, vectors)| (values.to_vec(), vectors)))
}

/// Computes what [`eigen`] does, with the largest eigenvalue first. The entry with the largest magnitude of every eigenvector is
/// positive, so that the answer is unique.
///
/// # Errors
/// There is too little memory for LAPACK.
pub fn principal(a: ArrayView2<f64>) -> Result<Option<Eigen>> {
    let Some((mut values, vectors)) = eigen(a)? else {
        return Ok(None);
    };
    values.reverse();
    let d = vectors.nrows();
    let mut directions = Array2::zeros((d, d));
    for (i, mut column) in directions.columns_mut().into_iter().enumerate() {
        let vector = vectors.column(d - 1 - i);
        let largest = vector
            .iter()
            .fold(0.0f64, |a, v| if v.abs() > a.abs() { *v } else { a });
        column.assign(&(&vector * largest.signum()));
    }
    Ok(Some((values, directions)))
}

/// Inverts a matrix; `None` if it is singular.
///
/// # Errors
/// There is too little memory for LAPACK.
pub fn inverse(a: ArrayView2<f64>) -> Result<Option<Array2<f64>>> {
    let _alone = lapack()?;
    let inverse = a.inv().ok();
    Ok(inverse.filter(|inverse| inverse.iter().all(|x| x.is_finite())))
}

/// Inverts a lower triangular matrix; `None` if it is singular.
///
/// # Errors
/// There is too little memory for LAPACK.
pub fn invert_lower(l: ArrayView2<f64>) -> Result<Option<Array2<f64>>> {
    let _alone = lapack()?;
    let identity = Array2::eye(l.nrows());
    Ok(
        l.solve_triangular(UPLO::Lower, ndarray_linalg::Diag::NonUnit, &identity)
            .ok(),
    )
}
