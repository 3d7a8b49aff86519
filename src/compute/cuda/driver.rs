//! What the device needs of CUDA: memory, copies and launches, in order.

use crate::error::Result;

/// Threads of every kernel's blocks.
pub const THREADS: u32 = 256;

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

    /// Sets bytes to zero.
    fn zero(&self, at: Address, bytes: usize) -> Result<()>;

    /// Starts a kernel of `kernels/` in blocks of [`THREADS`], after everything that was launched before.
    fn launch(&self, kernel: &'static str, grid: [u32; 3], shared_bytes: usize, args: &[Arg]) -> Result<()>;
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
    /// A u32. Sizes fit: rows are fewer than 2^32, and of channels and centroids there are thousands.
    pub fn u32(value: usize) -> Self {
        debug_assert!(u32::try_from(value).is_ok(), "a size beyond 2^32: {value}");
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

    /// A pointer; 0 is the null pointer.
    pub fn address(value: Address) -> Self {
        Self { value, bytes: 8 }
    }
}

/// [`Driver::launch`] without dynamic shared memory; nothing for an empty grid.
pub(super) fn launch(
    driver: &dyn Driver,
    kernel: &'static str,
    grid: [usize; 3],
    args: &[Arg],
) -> Result<()> {
    launch_with(driver, kernel, grid, 0, args)
}

/// [`Driver::launch`]; nothing for an empty grid.
pub(super) fn launch_with(
    driver: &dyn Driver,
    kernel: &'static str,
    grid: [usize; 3],
    shared_bytes: usize,
    args: &[Arg],
) -> Result<()> {
    if grid.contains(&0) {
        return Ok(());
    }
    driver.launch(kernel, grid.map(|n| n as u32), shared_bytes, args)
}
