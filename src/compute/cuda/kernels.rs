//! The kernels of `kernels/*.cu`: compiled by `build.rs` where there was an nvcc, their source, and their launches.
//!
//! `build.rs` reads the declarations and writes [`ALL`] and, for every kernel, a struct whose fields are the kernel's
//! parameters: a missing argument or one of another type does not compile. Sizes, and how long buffers are, are the
//! caller's to get right, as the comment above the kernel says; they are not checked, so launches stay in this crate.

use std::ffi::c_void;

use super::buffer::Ptr;
use super::driver::{Arg, Driver, Launch};
use crate::error::{Error, Result};
use crate::float::Float;

include!(concat!(env!("OUT_DIR"), "/kernel_images.rs"));
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// All kernels as one source without `#include`s of ours.
pub const SOURCE: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.cu"));

/// A kernel as its source declares it.
#[derive(Debug)]
pub struct Kernel {
    /// Its name.
    pub name: &'static str,
    /// Threads of a block.
    pub threads: u32,
    /// Blocks that are to share a multiprocessor.
    pub blocks: u32,
    /// Most bytes of dynamic shared memory of a block.
    pub shared_bytes: usize,
    /// Bytes of each argument.
    pub argument_bytes: &'static [usize],
}

/// Starts a kernel; nothing for an empty grid.
///
/// # Safety
/// As for [`Driver::launch`]; the number of threads and the shared memory are taken care of.
unsafe fn start(
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
    if shared_bytes > most || grid.iter().any(|n| u32::try_from(*n).is_err()) {
        return Err(Error::failed(format!(
            "CUDA: {name} with {grid:?} blocks and {shared_bytes} bytes of shared memory of at most {most}"
        )));
    }
    let beyond = |argument: &&Arg| argument.bytes == 4 && argument.value > u64::from(u32::MAX);
    if let Some(Arg { value, .. }) = arguments.iter().find(beyond) {
        return Err(Error::failed(format!(
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

/// Whether kernels were compiled when this program was built.
pub fn are_built_in() -> bool {
    !IMAGES.is_empty()
}

/// What was compiled for a chip of this compute capability: machine code for 8.0 and 9.0, which the later chips of
/// the same generation run too, and PTX for later generations.
pub fn image(capability: (i32, i32)) -> Option<&'static [u8]> {
    newest(IMAGES, capability)
}

/// The newest of `images` that is no newer than the chip, as 10 times major plus minor.
fn newest<'i>(images: &[(i32, &'i [u8])], (major, minor): (i32, i32)) -> Option<&'i [u8]> {
    let older = images.iter().filter(|(chip, _)| *chip <= 10 * major + minor);
    older.max_by_key(|(chip, _)| *chip).map(|(_, image)| *image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cuda::driver::Address;

    /// A device that does nothing.
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
            assert!(start([1 << 32, 1, 1], 0).is_err(), "{kernel:?}");
            assert!(given([1; 3], 0, (1 << 32) - 1).is_ok(), "{kernel:?}");
            assert!(given([1; 3], 0, 1 << 32).is_err(), "{kernel:?}");
            assert!(start([1 << 32, 0, 1], most + 1).is_ok(), "an empty grid");
        }
    }

    #[test]
    fn a_chip_gets_the_newest_image_that_it_can_run() {
        let images: &[(i32, &[u8])] = &[(80, &[1]), (90, &[2])];
        let cases = [
            ((7, 5), None),
            ((8, 0), Some(1)),
            ((8, 9), Some(1)),
            ((9, 0), Some(2)),
            ((12, 1), Some(2)),
        ];
        for (capability, expected) in cases {
            let found = newest(images, capability).map(|image| image[0]);
            assert_eq!(found, expected, "{capability:?}");
        }
    }
}
