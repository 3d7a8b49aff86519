//! The [`Driver`] of a real GPU: CUDA's driver library, found at run time.
//!
//! cudarc panics if a library is missing, so its presence is checked first. All work goes through one context and its
//! default stream: copies wait for the launches before them, and report the errors of these launches.

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::sync::{Mutex, MutexGuard};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUfunction, CUfunction_attribute, CUmodule, CUresult,
};

use super::driver::{Address, Arg, Driver, Launch, Part, Product};
use super::kernels::{self, Kernel};
use crate::error::{Error, Result};
pub use found::Found;
use found::version;
use mark::Mark;
use products::Products;
use recording::{Noted, Recordings};
use staging::Staging;

pub mod compile;
mod found;
mod library;
mod mark;
mod products;
mod recording;
mod staging;

/// The shared memory, in bytes, that a block may use on every GPU without opting in.
const SHARED_UNASKED: usize = 48 << 10;

/// The first GPU.
pub struct Nvidia {
    device: CUdevice,
    context: CUcontext,
    module: CUmodule,
    functions: HashMap<&'static str, Function>,
    adapter: String,
    /// The most shared memory of a block, in bytes.
    shared_bytes: usize,
    has_fast_search: bool,
    multiprocessors: usize,
    /// `None` if kvsmith's own kernels multiply.
    products: Option<Products>,
    /// What multiplies many rows; `None` if that was not asked.
    multiplies: Option<String>,
    /// What to tell the user if cuBLAS was looked for and is not used.
    missing_library: Option<String>,
    recordings: Mutex<Recordings>,
    staging: Staging,
}

/// A loaded kernel.
#[derive(Clone, Copy)]
struct Function {
    handle: CUfunction,
    /// The static shared memory of the kernel, in bytes.
    own_bytes: usize,
}

// SAFETY: contexts, modules and functions of CUDA's driver may be used from any thread that has made the
// context current, which every call here does; the driver does its own locking.
unsafe impl Send for Nvidia {}
// SAFETY: as above; nothing here changes after `open`.
unsafe impl Sync for Nvidia {}

impl Nvidia {
    /// Opens the first GPU and loads the kernels.
    ///
    /// # Errors
    /// There is no driver or no GPU, the GPU is too old, or there are no kernels for it: exit code 3.
    pub fn open() -> Result<Self> {
        let found = Found::first()?;
        let (device, capability) = (found.device, found.capability);
        let multiprocessors = attribute(
            device,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        )?;
        let adapter = format!("{}, CUDA {}", found.gpu, found.cuda);
        // SAFETY: the device is the one that the driver just gave.
        let context =
            unsafe { result::primary_ctx::retain(device) }.map_err(|e| failed("cannot open the GPU", e))?;
        let mut gpu = Self {
            device,
            context,
            module: std::ptr::null_mut(),
            functions: HashMap::new(),
            adapter,
            shared_bytes: 0,
            has_fast_search: true,
            multiprocessors: multiprocessors.max(1) as usize,
            products: None,
            multiplies: None,
            missing_library: None,
            recordings: Mutex::new(Recordings::new(capability >= compile::OVERLAPPING)),
            staging: Staging::default(),
        };
        gpu.load(capability)?;
        Ok(gpu)
    }

    /// Opens cuBLAS, if it is found, for products of many rows, and calls `tell` with its place. This is done before
    /// caches take the memory.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn with_library(mut self, tell: &dyn Fn(&str)) -> Result<Self> {
        self.enter()?;
        let (newest, _) = version()?;
        match Products::open(newest, tell) {
            Ok(products) => {
                self.multiplies = Some(format!("cuBLAS {}", products.version()));
                self.products = Some(products);
            }
            Err(reason) => {
                self.multiplies = Some("kvsmith".to_owned());
                let package = match newest {
                    12 => "nvidia-cublas-cu12",
                    _ => "nvidia-cublas",
                };
                self.missing_library = reason.map(|reason| {
                    format!(
                        "{reason}: prompts and calibration multiply with kvsmith's own kernels, about half as fast; \
                         `pip install {package}`, or set KVSMITH_CUBLAS to the library or its folder"
                    )
                });
            }
        }
        Ok(self)
    }

    /// Turns the search on the tensor cores off, so that every score is computed in f32.
    #[must_use]
    pub fn without_tensor_cores(mut self) -> Self {
        self.has_fast_search = false;
        self
    }

    /// Loads the kernels: the built-in ones or, if there are none, kernels compiled now.
    fn load(&mut self, capability: (i32, i32)) -> Result<()> {
        self.enter()?;
        // SAFETY: what is loaded is a whole image that nvcc, ptxas or NVRTC made, aligned.
        let load = |image: &[u8]| unsafe { result::module::load_data(image.as_ptr().cast()) };
        let built_in = kernels::image(capability);
        let loaded = match built_in.map(load) {
            Some(Ok(module)) => Ok(module),
            // An older driver refuses the image of a newer compiler. An NVRTC of the driver's version can compile one
            // that it accepts.
            Some(Err(e)) => match compile::compile(capability) {
                Ok(image) => load(&image),
                Err(_) => Err(e),
            },
            None => load(&compile::compile(capability)?),
        };
        let (major, _) = version()?;
        let is_too_new = built_in
            .and_then(kernels::made_by_cuda)
            .is_some_and(|made| made > major);
        self.module = loaded.map_err(|e| {
            let why = match e.0 {
                _ if is_too_new => "the driver is too old for the kernels",
                CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => "the built-in kernels do not support this GPU",
                CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION | CUresult::CUDA_ERROR_INVALID_IMAGE => {
                    "the driver is too old for the kernels"
                }
                _ => "cannot load the kernels",
            };
            let version = self.adapter.as_str();
            failed(&format!("{why} ({version})"), e).hint("update the NVIDIA driver, or use ⟨device=cpu⟩")
        })?;
        let optin = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        self.shared_bytes = attribute(self.device, optin)?.max(0) as usize;
        for kernel in kernels::ALL {
            let function = self.find(kernel)?;
            if function.own_bytes + kernel.shared_bytes > SHARED_UNASKED {
                let most = self.shared_bytes.saturating_sub(function.own_bytes);
                prefer_shared(function.handle, kernel.shared_bytes.min(most))?;
            }
            self.functions.insert(kernel.name, function);
        }
        Ok(())
    }

    /// Finds a kernel in the module.
    fn find(&self, kernel: &Kernel) -> Result<Function> {
        let name = CString::new(kernel.name).map_err(|e| Error::device(e.to_string()))?;
        // SAFETY: the module is loaded.
        let handle = unsafe { result::module::get_function(self.module, name) }
            .map_err(|e| failed(&format!("no kernel {}", kernel.name), e))?;
        let own = CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function is one of the module.
        let own = unsafe { result::function::get_function_attribute(handle, own) }
            .map_err(|e| failed("cannot read the properties of a kernel", e))?;
        Ok(Function {
            handle,
            own_bytes: own.max(0) as usize,
        })
    }

    fn recordings(&self) -> Result<MutexGuard<'_, Recordings>> {
        let lock = self.recordings.lock();
        lock.map_err(|_| Error::internal("CUDA: an earlier launch ended badly"))
    }

    /// Returns the handle of a kernel whose blocks get `shared_bytes` of dynamic shared memory.
    ///
    /// # Errors
    /// `shared_bytes` is more than this GPU gives to a block.
    fn function(&self, name: &str, shared_bytes: usize) -> Result<CUfunction> {
        let function = self.functions.get(name);
        let function = function.ok_or_else(|| Error::internal(format!("CUDA: no kernel {name}")))?;
        let (needed, most) = (function.own_bytes + shared_bytes, self.shared_bytes);
        if needed > SHARED_UNASKED.max(most) {
            return Err(Error::device(format!(
                "CUDA: a block of {name} needs {needed} bytes of shared memory, and this GPU gives it {most}"
            ))
            .hint("use ⟨device=cpu⟩"));
        }
        Ok(function.handle)
    }

    /// Makes the context current on this thread, for a copy or a clear.
    ///
    /// # Errors
    /// Launches are being recorded: the copy would run now, but the launches recorded before it only later.
    fn enter_to_copy(&self) -> Result<()> {
        if self.recordings()?.is_noting() {
            return Err(Error::internal("CUDA: a copy while launches are recorded"));
        }
        self.enter()
    }

    /// Makes the context current on this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        unsafe { result::ctx::set_current(self.context) }.map_err(|e| failed("cannot open the GPU", e))
    }
}

impl Drop for Nvidia {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            if let Ok(recordings) = self.recordings.get_mut() {
                recordings.clear();
            }
            self.products = None;
            self.staging.clear();
        }
        if self.enter().is_ok() && !self.module.is_null() {
            // SAFETY: loaded in `load`, and nothing runs on it any more. An error at the end changes nothing.
            let _ = unsafe { result::module::unload(self.module) };
        }
        // SAFETY: retained in `open`, given back once.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl Driver for Nvidia {
    fn adapter(&self) -> String {
        self.adapter.clone()
    }

    fn products(&self) -> Option<String> {
        self.multiplies.clone()
    }

    fn missing_library(&self) -> Option<&str> {
        self.missing_library.as_deref()
    }

    fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    fn searches_on_tensor_cores(&self) -> bool {
        self.has_fast_search
    }

    fn free_bytes(&self) -> Result<u64> {
        self.enter()?;
        let (free, _) =
            result::mem_get_info().map_err(|e| failed("cannot read the amount of free memory", e))?;
        Ok(free as u64)
    }

    fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        self.enter()?;
        // SAFETY: the memory is not read before it is written.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => Ok(Some(address)),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => Ok(None),
            Err(e) => Err(failed("cannot allocate memory", e)),
        }
    }

    fn free(&self, address: Address) {
        if self.enter().is_ok() {
            // SAFETY: `allocate` gave this address, and its buffer is gone. What went wrong before was
            // reported where it happened.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter_to_copy()?;
        if bytes.len() >= staging::LARGE && self.staging.send(to, bytes)? {
            return Ok(());
        }
        // SAFETY: the buffer behind the address has at least as many bytes.
        unsafe { result::memcpy_htod_sync(to, bytes) }.map_err(|e| failed("a copy to the GPU failed", e))
    }

    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        self.enter_to_copy()?;
        if bytes.len() >= staging::LARGE && self.staging.receive(from, bytes)? {
            return Ok(());
        }
        // SAFETY: the buffer behind the address has at least as many bytes, and any bytes will do.
        unsafe { result::memcpy_dtoh_sync(bytes, from) }.map_err(|e| failed("a copy from the GPU failed", e))
    }

    fn fetch(&self, parts: &mut [Part<'_>], meanwhile: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.enter_to_copy()?;
        if self.staging.fetch(parts, meanwhile)? {
            return Ok(());
        }
        for part in parts {
            self.read(part.from, part.bytes)?;
        }
        meanwhile()
    }

    fn send(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.enter_to_copy()?;
        if self.staging.send(to, bytes)? {
            return Ok(());
        }
        // SAFETY: as in `write`.
        unsafe { result::memcpy_htod_sync(to, bytes) }.map_err(|e| failed("a copy to the GPU failed", e))
    }

    fn zero(&self, at: Address, bytes: usize) -> Result<()> {
        self.enter_to_copy()?;
        // SAFETY: the buffer behind the address has at least as many bytes.
        unsafe { result::memset_d8_sync(at, 0, bytes) }.map_err(|e| failed("cannot clear memory", e))
    }

    fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    fn blocks_at_once(&self, kernel: &'static Kernel, shared_bytes: usize) -> Result<usize> {
        self.enter()?;
        let function = self.function(kernel.name, shared_bytes)?;
        let threads = kernel.threads as i32;
        // SAFETY: the function is one of the module.
        let each = unsafe {
            result::occupancy::max_active_block_per_multiprocessor(function, threads, shared_bytes)
        };
        let each = each.map_err(|e| failed("cannot read the properties of a kernel", e))?;
        Ok(self.multiprocessors * each.max(1) as usize)
    }

    unsafe fn launch(&self, kernel: &'static str, shape: Launch, args: &[Arg]) -> Result<()> {
        self.enter()?;
        let noted = Noted {
            kernel,
            function: self.function(kernel, shape.shared_bytes)?,
            shape,
            beside: false,
            values: args.iter().map(|arg| arg.value).collect(),
        };
        match self.recordings()?.note(noted) {
            // SAFETY: the caller's promise.
            Some(noted) => unsafe { noted.start() },
            None => Ok(()),
        }
    }

    fn record(&self) -> Result<bool> {
        Ok(self.recordings()?.begin())
    }

    fn beside(&self, launches: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.recordings()?.set_beside(true);
        let launched = launches();
        self.recordings()?.set_beside(false);
        launched
    }

    fn recorded(&self) -> Result<u64> {
        self.enter()?;
        self.recordings()?.end(self.context)
    }

    fn replay(&self, recording: u64) -> Result<()> {
        self.enter()?;
        self.recordings()?.replay(recording)
    }

    fn forget(&self, recording: u64) {
        if let (Ok(()), Ok(mut recordings)) = (self.enter(), self.recordings()) {
            recordings.forget(recording);
        }
    }

    fn timed(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.enter()?;
        let (start, end) = (Mark::new()?, Mark::new()?);
        start.set()?;
        work()?;
        self.enter()?;
        end.set()?;
        end.seconds_since(&start)
    }

    fn multiply(&self, product: &Product) -> Result<bool> {
        self.enter()?;
        match &self.products {
            // Only kernels can be recorded, so a product is not started by the library while recording.
            Some(products) if !self.recordings()?.is_noting() => products.multiply(product).map(|()| true),
            _ => Ok(false),
        }
    }
}

/// Lets the blocks of a kernel have `bytes` of dynamic shared memory, and as many of these blocks as possible share a
/// multiprocessor.
fn prefer_shared(function: CUfunction, bytes: usize) -> Result<()> {
    let attributes = [
        (
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            bytes as i32,
        ),
        // In percent: use as much of the first-level cache as shared memory as is allowed.
        (
            CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
            100,
        ),
    ];
    for (attribute, value) in attributes {
        // SAFETY: the function is one of a loaded module.
        unsafe { result::function::set_function_attribute(function, attribute, value) }
            .map_err(|e| failed("cannot set the shared memory of a kernel", e))?;
    }
    Ok(())
}

fn failed(what: &str, e: DriverError) -> Error {
    let owned = |text: &CStr| text.to_string_lossy().into_owned();
    let (name, text) = (e.error_name().map(owned), e.error_string().map(owned));
    Error::device(format!(
        "CUDA: {what}: {} ({})",
        text.unwrap_or_else(|_| "unknown error".to_owned()),
        name.unwrap_or_else(|_| format!("{:?}", e.0)),
    ))
}

fn attribute(device: CUdevice, attribute: CUdevice_attribute) -> Result<i32> {
    // SAFETY: the device is one that the driver gave.
    unsafe { result::device::get_attribute(device, attribute) }
        .map_err(|e| failed("cannot read the properties of the GPU", e))
}
