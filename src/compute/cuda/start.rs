//! How a kernel is started: the checks of its grid and its shared memory that all launches share.

use std::fmt::Debug;

use super::driver::{Arg, Driver, Launch};
use crate::error::{Error, Result};

/// A kernel as its source declares it.
#[derive(Debug)]
pub struct Kernel {
    /// The name.
    pub name: &'static str,
    /// Threads per block.
    pub threads: u32,
    /// Blocks that should run on one multiprocessor at the same time.
    pub blocks: u32,
    /// The most dynamic shared memory that a block may ask for, in bytes.
    pub shared_bytes: usize,
    /// The size of each argument in bytes.
    pub argument_bytes: &'static [usize],
}

/// The most blocks along x, y and z that CUDA launches.
const MOST_BLOCKS: [usize; 3] = [(1 << 31) - 1, 65_535, 65_535];

/// Starts a kernel. Does nothing if the grid is empty.
///
/// # Safety
/// As for [`Driver::launch`], except that this function sets the number of threads and checks the grid and the shared
/// memory.
pub(super) unsafe fn start(
    driver: &dyn Driver,
    kernel: &Kernel,
    grid: [usize; 3],
    shared_bytes: usize,
    arguments: &[Arg],
) -> Result<()> {
    if grid.contains(&0) {
        return Ok(());
    }
    let (name, most) = (kernel.name, kernel.shared_bytes);
    if shared_bytes > most {
        return Err(Error::internal(format!(
            "CUDA: {name} with {shared_bytes} bytes of shared memory of at most {most}"
        )));
    }
    if grid.iter().zip(MOST_BLOCKS).any(|(n, most)| *n > most) {
        return Err(Error::internal(format!(
            "CUDA: {name} with {grid:?} blocks of at most {MOST_BLOCKS:?}"
        )));
    }
    let beyond = |argument: &&Arg| argument.bytes == 4 && argument.value > u64::from(u32::MAX);
    if let Some(Arg { value, .. }) = arguments.iter().find(beyond) {
        return Err(Error::internal(format!(
            "CUDA: {name} with a size beyond 2^32: {value}"
        )));
    }
    let shape = Launch {
        grid: grid.map(|n| n as u32),
        threads: kernel.threads,
        shared_bytes,
    };
    // SAFETY: the caller's promise.
    unsafe { driver.launch(name, shape, arguments) }
}

/// The error for a kernel of this family that there is not.
pub(super) fn no_kernel(family: &str, wanted: impl Debug) -> Error {
    Error::internal(format!("CUDA: no kernel {family} for {wanted:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cuda::driver::Address;
    use crate::compute::cuda::launches::ALL;

    /// A driver that does nothing.
    struct Idle;

    impl Driver for Idle {
        fn adapter(&self) -> String {
            String::new()
        }
        fn shared_bytes(&self) -> usize {
            0
        }
        fn free_bytes(&self) -> Result<u64> {
            Ok(0)
        }
        fn allocate(&self, _: usize) -> Result<Option<Address>> {
            Ok(None)
        }
        fn free(&self, _: Address) {}
        fn write(&self, _: Address, _: &[u8]) -> Result<()> {
            Ok(())
        }
        fn read(&self, _: Address, _: &mut [u8]) -> Result<()> {
            Ok(())
        }
        fn zero(&self, _: Address, _: usize) -> Result<()> {
            Ok(())
        }
        fn multiprocessors(&self) -> usize {
            1
        }
        fn blocks_at_once(&self, _: &'static Kernel, _: usize) -> Result<usize> {
            Ok(1)
        }
        unsafe fn launch(&self, _: &'static str, _: Launch, _: &[Arg]) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_launch_has_no_more_than_its_kernel_declares() {
        for kernel in ALL {
            let most = kernel.shared_bytes;
            // SAFETY: nothing is started.
            let given = |grid, bytes, size| unsafe { start(&Idle, kernel, grid, bytes, &[Arg::u32(size)]) };
            let start = |grid, bytes| given(grid, bytes, 0);
            assert!(start([1; 3], most).is_ok(), "{kernel:?}");
            assert!(start([1; 3], most + 1).is_err(), "{kernel:?}");
            let most = [(1 << 31) - 1, 65_535, 65_535];
            assert!(start(most, 0).is_ok(), "{kernel:?}");
            for axis in 0..3 {
                let mut grid = [1; 3];
                grid[axis] = most[axis] + 1;
                assert!(start(grid, 0).is_err(), "{kernel:?} {grid:?}");
            }
            assert!(given([1; 3], 0, (1 << 32) - 1).is_ok(), "{kernel:?}");
            assert!(given([1; 3], 0, 1 << 32).is_err(), "{kernel:?}");
            assert!(
                start([1 << 32, 0, 1], kernel.shared_bytes + 1).is_ok(),
                "an empty grid"
            );
        }
    }
}
