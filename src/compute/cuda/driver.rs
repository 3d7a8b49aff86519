//! The operations of CUDA that the device needs: memory, copies and launches, executed in order.

use std::time::Instant;

use super::start::Kernel;
use crate::error::{Error, Result};

/// An address in the device's memory.
pub type Address = u64;

/// A device's memory and the kernels that run on it, one after the other.
pub trait Driver: Send + Sync {
    /// Names the hardware and the driver, for the log and the manifest.
    fn adapter(&self) -> String;

    /// Tells what multiplies many rows, such as `cuBLAS 13.1`; `None` if the device was opened for work without such
    /// products.
    fn products(&self) -> Option<String> {
        None
    }

    /// Names the adapter and what multiplies, for people.
    fn described(&self) -> String {
        match self.products() {
            Some(products) => format!("{}, products by {products}", self.adapter()),
            None => self.adapter(),
        }
    }

    /// Says why the vendor's library for products of many rows is not used, what this costs and what to do about it;
    /// `None` if it is used or is not wanted.
    fn missing_library(&self) -> Option<&str> {
        None
    }

    /// Returns the most shared memory that a block may have, in bytes.
    fn shared_bytes(&self) -> usize;

    /// Says whether nearest centroids are searched on the tensor cores.
    fn searches_on_tensor_cores(&self) -> bool {
        true
    }

    /// Returns the bytes of free memory.
    fn free_bytes(&self) -> Result<u64>;

    /// Allocates `bytes` bytes (at least one); `None` if that much memory is not free.
    fn allocate(&self, bytes: usize) -> Result<Option<Address>>;

    /// Says what the allocations from now on are for, and returns what those before were for. Only a
    /// [`Ledger`](super::ledger::Ledger) tells them apart.
    fn set_purpose(&self, purpose: Purpose) -> Purpose {
        purpose
    }

    /// Returns whether allocations hold what is written to them: false for a driver that only counts bytes.
    fn has_memory(&self) -> bool {
        true
    }

    /// Frees memory that [`Driver::allocate`] returned.
    fn free(&self, address: Address);

    /// Copies bytes to the device.
    fn write(&self, to: Address, bytes: &[u8]) -> Result<()>;

    /// Copies bytes from the device after all earlier launches.
    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()>;

    /// Copies parts from the device after all earlier launches. Calls `meanwhile` during the copies; the copies do not
    /// wait for the launches that `meanwhile` starts.
    ///
    /// # Errors
    /// A copy failed; an earlier launch failed; any error of `meanwhile`.
    fn fetch(&self, parts: &mut [Part<'_>], meanwhile: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        for part in parts {
            self.read(part.from, part.bytes)?;
        }
        meanwhile()
    }

    /// Copies bytes to the device after all earlier launches, without waiting for the copy.
    fn send(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.write(to, bytes)
    }

    /// Sets bytes to zero.
    fn zero(&self, at: Address, bytes: usize) -> Result<()>;

    /// Counts the multiprocessors.
    fn multiprocessors(&self) -> usize;

    /// Returns how many blocks of a kernel the device runs at the same time, if each block gets `shared_bytes` of
    /// dynamic shared memory.
    ///
    /// # Errors
    /// `shared_bytes` is more than a block may have.
    fn blocks_at_once(&self, kernel: &'static Kernel, shared_bytes: usize) -> Result<usize>;

    /// Starts a kernel of `kernels/` after all earlier launches; while recording, notes the launch instead.
    ///
    /// # Safety
    /// The driver copies as many arguments as the kernel declares, whatever `args` holds: they must be those of its
    /// declaration in number, order and size, else host memory is read beyond their end. Pointers must be to memory
    /// of this driver, as long as the kernel's comment says, that is not given back before the kernel ends; a
    /// recorded launch ends with its last replay. The threads must be as the kernel declares, and the dynamic shared
    /// memory no more than it declares. The structs of [`super::kernels`] do all of this but the sizes.
    unsafe fn launch(&self, kernel: &'static str, shape: Launch, args: &[Arg]) -> Result<()>;

    /// Starts recording: until [`Driver::recorded`], launches are recorded instead of started, and copies and clears
    /// are errors. Returns false if the driver cannot record.
    fn record(&self) -> Result<bool> {
        Ok(false)
    }

    /// Makes launches of which the first may run at the same time as the launch before it, if both are recorded; neither
    /// may write what the other reads or writes. Launches that are not recorded run one after the other.
    ///
    /// # Errors
    /// Any error of `launches`.
    fn beside(&self, launches: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        launches()
    }

    /// Ends the recording, and returns the number by which [`Driver::replay`] knows it.
    ///
    /// # Errors
    /// Nothing was recorded.
    fn recorded(&self) -> Result<u64> {
        Err(Error::internal("CUDA: no launches were recorded"))
    }

    /// Starts all launches of a recording, in order.
    ///
    /// # Errors
    /// The number is unknown.
    fn replay(&self, recording: u64) -> Result<()> {
        Err(Error::internal(format!("CUDA: no recording {recording}")))
    }

    /// Frees a recording.
    fn forget(&self, recording: u64) {
        let _ = recording;
    }

    /// Runs `work`, waits for its launches, and returns the seconds that the device took for them.
    ///
    /// # Errors
    /// Any error of `work`; a launch failed.
    fn timed(&self, work: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
        let start = Instant::now();
        work()?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Starts a product by the vendor's library after all earlier launches; returns false if there is no such library.
    fn multiply(&self, product: &Product) -> Result<bool> {
        let _ = product;
        Ok(false)
    }
}

/// What device memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The weights of the model.
    Weights,
    /// Cached keys and values.
    Caches,
    /// The indexes of a method, with the buffers of its steps.
    Indexes,
    /// Everything else: buffers for prompts and steps.
    Workspaces,
}

/// Calls `work`, whose allocations are for `purpose`.
pub fn allocating<T>(driver: &dyn Driver, purpose: Purpose, work: impl FnOnce() -> T) -> T {
    let before = driver.set_purpose(purpose);
    let out = work();
    driver.set_purpose(before);
    out
}

/// A range of device memory, and the host memory that it is copied to.
#[derive(Debug)]
pub struct Part<'v> {
    /// The source on the device.
    pub from: Address,
    /// The destination; its length is the number of bytes.
    pub bytes: &'v mut [u8],
}

/// `out = x W^T`, or `out += x W^T`. x and W are 16-bit matrices, sums and results are f32, and all matrices are
/// row-major.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    /// `[m,k]`.
    pub x: Address,
    /// `[n,k]`.
    pub weight: Address,
    /// `[m,n]`.
    pub out: Address,
    /// Rows of x.
    pub m: usize,
    /// Rows of W.
    pub n: usize,
    /// Length of the sums, which is the number of columns of x and W.
    pub k: usize,
    /// Whether x and W are bf16; else f16.
    pub is_bfloat: bool,
    /// Whether to add to `out` instead of overwriting it.
    pub accumulate: bool,
}

/// Recorded launches; freed when dropped.
pub struct Recording<'d> {
    driver: &'d dyn Driver,
    number: u64,
}

impl<'d> Recording<'d> {
    /// Records the launches that `launches` makes; `None` if the driver cannot record, in which case they have been
    /// started.
    ///
    /// # Errors
    /// Any error of `launches`; the recording fails.
    pub fn record(driver: &'d dyn Driver, launches: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        let noted = driver.record()?;
        let result = launches();
        if !noted {
            return result.map(|()| None);
        }
        // The recording is ended even after an error, so that later launches start again.
        let recording = driver.recorded().map(|number| Self { driver, number });
        result?;
        recording.map(Some)
    }

    /// Starts the launches.
    pub fn replay(&self) -> Result<()> {
        self.driver.replay(self.number)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.driver.forget(self.number);
    }
}

/// The size of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Number of blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: usize,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Arg {
    /// The value of the argument, in the low bytes.
    pub value: u64,
    /// The size of the argument in bytes, 4 or 8.
    pub bytes: usize,
}

impl Arg {
    /// A u32; a launch with a value of 2^32 or more fails.
    pub fn u32(value: usize) -> Self {
        Self {
            value: value as u64,
            bytes: 4,
        }
    }

    /// A u64.
    pub fn u64(value: usize) -> Self {
        Self {
            value: value as u64,
            bytes: 8,
        }
    }

    /// An f32.
    pub fn f32(value: f32) -> Self {
        Self {
            value: u64::from(value.to_bits()),
            bytes: 4,
        }
    }

    /// An f64.
    pub fn f64(value: f64) -> Self {
        Self {
            value: value.to_bits(),
            bytes: 8,
        }
    }

    /// A pointer; 0 is the null pointer.
    pub fn address(value: Address) -> Self {
        Self { value, bytes: 8 }
    }
}
