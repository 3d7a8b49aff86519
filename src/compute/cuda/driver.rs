//! What the device needs of CUDA: memory, copies and launches, in order.

use crate::error::{Error, Result};

/// A place in the device's memory.
pub type Address = u64;

/// Memory of a device and kernels that run on it, one after the other.
pub trait Driver: Send + Sync {
    /// The hardware and the driver, for the log and the manifest.
    fn adapter(&self) -> String;

    /// Bytes of shared memory that a block of `nearest_fast` may have; 0 where it does not run.
    fn fast_shared_bytes(&self) -> usize;

    /// Bytes free.
    fn free_bytes(&self) -> Result<u64>;

    /// Memory of `bytes`, at least one; `None` where there is not as much.
    fn allocate(&self, bytes: usize) -> Result<Option<Address>>;

    /// Gives back what [`Driver::allocate`] gave.
    fn free(&self, address: Address);

    /// Copies to the device.
    fn write(&self, to: Address, bytes: &[u8]) -> Result<()>;

    /// Copies from the device, after everything that was launched before.
    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()>;

    /// Copies parts from the device, after everything that was launched before. `meanwhile` may launch more, and is
    /// called while the copies are on their way: they wait for nothing that it launches.
    ///
    /// # Errors
    /// A failed copy, a launch before it that went wrong, those of `meanwhile`.
    fn fetch(&self, parts: &mut [Part<'_>], meanwhile: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        for part in parts {
            self.read(part.from, part.bytes)?;
        }
        meanwhile()
    }

    /// Copies to the device, after everything that was launched before, and does not wait for it.
    fn send(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.write(to, bytes)
    }

    /// Sets bytes to zero.
    fn zero(&self, at: Address, bytes: usize) -> Result<()>;

    /// Processors that run blocks side by side.
    fn multiprocessors(&self) -> usize;

    /// Starts a kernel of `kernels/` after everything that was launched before; while recording it only notes it.
    ///
    /// # Safety
    /// The driver copies as many arguments as the kernel declares, whatever `args` holds: they must be those of its
    /// declaration in number, order and size, else host memory is read beyond their end. Pointers must be to memory of
    /// this driver, as long as the kernel's comment says, that is not given back before the kernel ends; a recorded
    /// launch ends with its last replay. The threads are those that the kernel declares, and its dynamic shared memory is
    /// no more than that. The structs of [`super::kernels`] do all of this but the sizes.
    unsafe fn launch(&self, kernel: &'static str, shape: Launch, args: &[Arg]) -> Result<()>;

    /// Notes the launches from here on, in their order, until [`Driver::recorded`]; false where it cannot.
    fn record(&self) -> Result<bool> {
        Ok(false)
    }

    /// Ends recording: the number by which [`Driver::replay`] knows the launches noted.
    ///
    /// # Errors
    /// Nothing was recorded.
    fn recorded(&self) -> Result<u64> {
        Err(Error::failed("CUDA: no launches were recorded"))
    }

    /// Starts launches that were noted, all of them at once.
    ///
    /// # Errors
    /// A number that is not known.
    fn replay(&self, recording: u64) -> Result<()> {
        Err(Error::failed(format!("CUDA: no recording {recording}")))
    }

    /// Gives back what [`Driver::recorded`] keeps.
    fn forget(&self, recording: u64) {
        let _ = recording;
    }

    /// A product by the vendor's library, after everything that was launched before; false where there is none.
    fn multiply(&self, product: &Product) -> Result<bool> {
        let _ = product;
        Ok(false)
    }
}

/// Some memory of the device, and where its contents go.
#[derive(Debug)]
pub struct Part<'v> {
    /// Where they are.
    pub from: Address,
    /// Where they go, as many as are wanted.
    pub bytes: &'v mut [u8],
}

/// `out = x W^T`, or `out += x W^T`, of 16-bit matrices with sums and results in f32, row after row.
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
    /// What is summed over.
    pub k: usize,
    /// bf16, else f16.
    pub is_bfloat: bool,
    /// Adds to what is there.
    pub accumulate: bool,
}

/// Launches that were noted once; given back when dropped.
pub struct Recording<'d> {
    driver: &'d dyn Driver,
    number: u64,
}

impl<'d> Recording<'d> {
    /// The launches of `launches`; `None` where the driver cannot note them, and then they are started.
    ///
    /// # Errors
    /// What `launches` returns.
    pub fn of(driver: &'d dyn Driver, launches: impl FnOnce() -> Result<()>) -> Result<Option<Self>> {
        let noted = driver.record()?;
        let result = launches();
        if !noted {
            return result.map(|()| None);
        }
        // Ended even after an error, so that later launches start again.
        let recording = driver.recorded().map(|number| Self { driver, number });
        result?;
        recording.map(Some)
    }

    /// Starts them.
    pub fn replay(&self) -> Result<()> {
        self.driver.replay(self.number)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        self.driver.forget(self.number);
    }
}

/// How many blocks run a kernel, and what each of them has.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    /// Blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: usize,
}

/// An argument of a kernel.
#[derive(Clone, Copy, Debug)]
pub struct Arg {
    /// Its value, in the low bytes.
    pub value: u64,
    /// 4 or 8.
    pub bytes: usize,
}

impl Arg {
    /// A u32; a launch with one beyond 2^32 fails.
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
