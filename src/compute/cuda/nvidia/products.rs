//! Products by cuBLAS, if its library is found.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Mutex;

use libloading::Library;

use super::library::{self, MAJORS, Places};
use crate::compute::cuda::driver::Product;
use crate::error::{Error, Result};

/// A `cublasHandle_t`.
type Handle = *mut c_void;
/// A `cublasStatus_t`; 0 is success.
type Status = c_int;

// The values of cuBLAS's enumerations that are used here.
const OP_N: c_int = 0;
const OP_T: c_int = 1;
const F32: c_int = 0;
const F16: c_int = 2;
const BF16: c_int = 14;
const COMPUTE_F32: c_int = 68;
const ALGORITHM_DEFAULT: c_int = -1;
/// The parts of a version.
const MAJOR: c_int = 0;
const MINOR: c_int = 1;

type GetProperty = unsafe extern "C" fn(c_int, *mut c_int) -> Status;
type Create = unsafe extern "C" fn(*mut Handle) -> Status;
type Destroy = unsafe extern "C" fn(Handle) -> Status;
/// `cublasGemmEx`, unchanged since CUDA 11: handle, operations on A and B, m, n, k, alpha, A with type and leading
/// dimension, B, beta, C, type of the sums, algorithm.
type GemmEx = unsafe extern "C" fn(
    Handle,
    c_int,
    c_int,
    c_int,
    c_int,
    c_int,
    *const c_void,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    c_int,
    c_int,
    *const c_void,
    *mut c_void,
    c_int,
    c_int,
    c_int,
    c_int,
) -> Status;

/// The open cuBLAS library.
pub struct Products {
    /// A handle may be used by one thread at a time.
    handle: Mutex<Handle>,
    gemm: GemmEx,
    destroy: Destroy,
    version: String,
}

// SAFETY: cuBLAS's handle may be used from any thread, by one at a time; the mutex sees to it.
unsafe impl Send for Products {}
// SAFETY: as above.
unsafe impl Sync for Products {}

impl Products {
    /// Opens the best library that runs on a driver of the major version `newest`, and calls `tell` with its place. The
    /// context must be current.
    ///
    /// # Errors
    /// There is none, and why; `None` if none is wanted.
    pub fn open(newest: i32, tell: &dyn Fn(&str)) -> std::result::Result<Self, Option<String>> {
        let places = Places::wanted();
        let mut reason = match &places {
            Places::Unwanted => return Err(None),
            Places::Given(path) => format!("cuBLAS was not found at {} (KVSMITH_CUBLAS)", path.display()),
            Places::Any => "cuBLAS was not found".to_owned(),
        };
        for file in places.files(newest) {
            let is_path = file.is_absolute();
            match library::load(&file) {
                Ok(library) => match Self::with_library(library, newest) {
                    Ok(products) => {
                        tell(&format!(
                            "device: cuBLAS {}, {}",
                            products.version,
                            file.display()
                        ));
                        return Ok(products);
                    }
                    Err(e) => reason = format!("{} does not start: {e}", file.display()),
                },
                // Most of the loader's names are of other systems.
                Err(e) if is_path => reason = format!("cuBLAS does not load: {e}"),
                Err(_) => {}
            }
        }
        Err(Some(reason))
    }

    /// Opens a loaded library.
    fn with_library(library: &'static Library, newest: i32) -> std::result::Result<Self, String> {
        let text = |e: libloading::Error| e.to_string();
        // SAFETY: the functions have these signatures in all versions that `property` lets through.
        let (property, create, destroy, gemm) = unsafe {
            (
                *library.get::<GetProperty>(b"cublasGetProperty").map_err(text)?,
                *library.get::<Create>(b"cublasCreate_v2").map_err(text)?,
                *library.get::<Destroy>(b"cublasDestroy_v2").map_err(text)?,
                *library.get::<GemmEx>(b"cublasGemmEx").map_err(text)?,
            )
        };
        let version = |part| {
            let mut value = 0;
            // SAFETY: writes a number to where the pointer points.
            match unsafe { property(part, &mut value) } {
                0 => Ok(value),
                status => Err(named(status)),
            }
        };
        let (major, minor) = (version(MAJOR)?, version(MINOR)?);
        if !MAJORS.contains(&major) {
            return Err(format!("version {major}.{minor} is not supported"));
        }
        if major > newest {
            return Err(format!(
                "version {major}.{minor} needs a newer driver than one of CUDA {newest}"
            ));
        }
        let mut handle = ptr::null_mut();
        // SAFETY: writes a handle to where the pointer points.
        match unsafe { create(&mut handle) } {
            0 => Ok(Self {
                handle: Mutex::new(handle),
                gemm,
                destroy,
                version: format!("{major}.{minor}"),
            }),
            status => Err(named(status)),
        }
    }

    /// Returns the version of the library, such as 13.0.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Starts a product.
    pub fn multiply(&self, product: &Product) -> Result<()> {
        let size = |n: usize| {
            c_int::try_from(n).map_err(|_| Error::internal(format!("CUDA: a product with a side of {n}")))
        };
        let (m, n, k) = (size(product.m)?, size(product.n)?, size(product.k)?);
        let kind = if product.is_bfloat { BF16 } else { F16 };
        let (one, add) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let at = |address: u64| address as *const c_void;
        let handle = self.handle.lock();
        let handle = handle.map_err(|_| Error::internal("CUDA: an earlier product ended badly"))?;
        // cuBLAS's matrices are column-major: our row-major out `[m,n]` is, to cuBLAS, out^T = W x^T.
        // SAFETY: the addresses are those of live buffers with as many values, as `linear` checked.
        let status = unsafe {
            (self.gemm)(
                *handle,
                OP_T,
                OP_N,
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
                F32,
                n,
                COMPUTE_F32,
                ALGORITHM_DEFAULT,
            )
        };
        match status {
            0 => Ok(()),
            status => Err(Error::device(format!(
                "CUDA: cuBLAS did not multiply: {}",
                named(status)
            ))),
        }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(|e| e.into_inner());
        // SAFETY: made in `of`, destroyed once. An error at the end changes nothing.
        let _ = unsafe { (self.destroy)(*handle) };
    }
}

/// Names a status of cuBLAS other than success.
fn named(status: Status) -> String {
    let name = match status {
        1 => "not initialized",
        3 => "out of memory",
        7 => "invalid value",
        8 => "no such chip",
        11 => "mapping error",
        13 => "execution failed",
        14 => "internal error",
        15 => "not supported",
        _ => return format!("status {status}"),
    };
    format!("{name} (status {status})")
}
