//! Products by cuBLAS, if its library is found.

use std::ffi::{c_int, c_void};
use std::ptr;

use cudarc::cublas::result;
use cudarc::cublas::sys::{
    self, cublasComputeType_t, cublasGemmAlgo_t, cublasHandle_t, cublasOperation_t, cudaDataType,
};

use crate::compute::cuda::driver::Product;
use crate::error::{Error, Result};

/// The open cuBLAS library.
pub struct Products {
    handle: cublasHandle_t,
}

// SAFETY: cuBLAS's handle may be used from any thread, by one at a time; calls come from `Nvidia::multiply`, and work
// of one session goes through one stream.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

impl Products {
    /// Opens the library. The error says why it is not used; kvsmith's own kernels then take its place.
    pub fn open() -> std::result::Result<Self, String> {
        // SAFETY: looks for the library and closes it again.
        if !unsafe { sys::is_culib_present() } {
            return Err("no cuBLAS".to_owned());
        }
        let handle = result::create_handle();
        let handle = handle.map_err(|e| format!("cuBLAS does not start: {:?}", e.0))?;
        Ok(Self { handle })
    }

    /// Starts a product.
    pub fn multiply(&self, product: &Product) -> Result<()> {
        let size = |n: usize| {
            c_int::try_from(n).map_err(|_| Error::failed(format!("CUDA: a product with a side of {n}")))
        };
        let (m, n, k) = (size(product.m)?, size(product.n)?, size(product.k)?);
        let kind = match product.is_bfloat {
            true => cudaDataType::CUDA_R_16BF,
            false => cudaDataType::CUDA_R_16F,
        };
        let (one, add) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let at = |address: u64| address as *const c_void;
        // cuBLAS's matrices are column-major: our row-major out `[m,n]` is, to cuBLAS, out^T = W x^T.
        // SAFETY: the addresses are those of live buffers with as many values, as `linear` checked.
        unsafe {
            result::gemm_ex(
                self.handle,
                cublasOperation_t::CUBLAS_OP_T,
                cublasOperation_t::CUBLAS_OP_N,
                n,
                m,
                k,
                ptr::from_ref(&one).cast(),
                at(product.weight),
                kind,
                k,
                at(product.x),
                kind,
                k,
                ptr::from_ref(&add).cast(),
                product.out as *mut c_void,
                cudaDataType::CUDA_R_32F,
                n,
                cublasComputeType_t::CUBLAS_COMPUTE_32F,
                cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        }
        .map_err(|e| Error::device(format!("CUDA: cuBLAS did not multiply: {:?}", e.0)))
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: made in `open`, destroyed once. An error at the end changes nothing.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
