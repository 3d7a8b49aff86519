//! A driver that notes the kernels that are launched on a device.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::driver::{Address, Arg, Driver, Launch, Part, Product, Purpose};
use super::start::Kernel;
use crate::error::Result;

/// Passes everything on to a device and notes the names of the kernels that are launched. It can stand for a device with
/// less: see [`Watched::narrow`], [`Watched::without_library`] and [`Watched::without_tensor_cores`].
#[derive(Clone)]
pub struct Watched {
    device: Arc<dyn Driver>,
    launched: Arc<Mutex<BTreeSet<&'static str>>>,
    /// The most shared memory of a block, in bytes.
    shared_bytes: usize,
    has_library: bool,
    has_fast_search: bool,
}

impl Watched {
    /// Watches a device.
    pub fn new(device: Arc<dyn Driver>) -> Self {
        Self {
            shared_bytes: device.shared_bytes(),
            has_fast_search: device.searches_on_tensor_cores(),
            has_library: true,
            launched: Arc::default(),
            device,
        }
    }

    /// Returns the same device whose blocks have at most `bytes` of shared memory.
    pub fn narrow(&self, bytes: usize) -> Self {
        Self {
            shared_bytes: self.shared_bytes.min(bytes),
            ..self.clone()
        }
    }

    /// Returns the same device without the vendor's library for products.
    pub fn without_library(&self) -> Self {
        Self {
            has_library: false,
            ..self.clone()
        }
    }

    /// Returns the same device, on which nearest centroids are not searched on the tensor cores.
    pub fn without_tensor_cores(&self) -> Self {
        Self {
            has_fast_search: false,
            ..self.clone()
        }
    }

    /// Returns the kernels that were launched since the last call, in the order of their names.
    pub fn take_launched(&self) -> BTreeSet<&'static str> {
        std::mem::take(&mut *self.launched())
    }

    fn launched(&self) -> MutexGuard<'_, BTreeSet<&'static str>> {
        // A set of names is whole, whatever its thread did then.
        self.launched.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Driver for Watched {
    fn adapter(&self) -> String {
        self.device.adapter()
    }

    fn products(&self) -> Option<String> {
        self.device.products()
    }

    fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }

    fn searches_on_tensor_cores(&self) -> bool {
        self.has_fast_search
    }

    fn free_bytes(&self) -> Result<u64> {
        self.device.free_bytes()
    }

    fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        self.device.allocate(bytes)
    }

    fn set_purpose(&self, purpose: Purpose) -> Purpose {
        self.device.set_purpose(purpose)
    }

    fn has_memory(&self) -> bool {
        self.device.has_memory()
    }

    fn free(&self, address: Address) {
        self.device.free(address);
    }

    fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.device.write(to, bytes)
    }

    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        self.device.read(from, bytes)
    }

    fn fetch(&self, parts: &mut [Part<'_>], meanwhile: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.device.fetch(parts, meanwhile)
    }

    fn send(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.device.send(to, bytes)
    }

    fn zero(&self, at: Address, bytes: usize) -> Result<()> {
        self.device.zero(at, bytes)
    }

    fn multiprocessors(&self) -> usize {
        self.device.multiprocessors()
    }

    fn blocks_at_once(&self, kernel: &'static Kernel, shared_bytes: usize) -> Result<usize> {
        self.device.blocks_at_once(kernel, shared_bytes)
    }

    unsafe fn launch(&self, kernel: &'static str, shape: Launch, args: &[Arg]) -> Result<()> {
        self.launched().insert(kernel);
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(kernel, shape, args) }
    }

    fn record(&self) -> Result<bool> {
        self.device.record()
    }

    fn beside(&self, launches: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.device.beside(launches)
    }

    fn recorded(&self) -> Result<u64> {
        self.device.recorded()
    }

    fn replay(&self, recording: u64) -> Result<()> {
        self.device.replay(recording)
    }

    fn forget(&self, recording: u64) {
        self.device.forget(recording);
    }

    fn timed(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        self.device.timed(work)
    }

    fn multiply(&self, product: &Product) -> Result<bool> {
        if self.has_library {
            self.device.multiply(product)
        } else {
            Ok(false)
        }
    }
}
