//! The kernels of `kernels/*.cu`: their machine code (if `build.rs` found an nvcc), their source, and their launches.
//!
//! `build.rs` reads the kernel declarations and writes [`ALL`] and, for every kernel, a struct whose fields are the
//! kernel's parameters: a missing argument, or one of the wrong type, does not compile. Sizes and buffer lengths are
//! not checked. The caller must choose them as the comment above the kernel says, which is why launches stay within
//! this crate.

use std::ffi::c_void;

use super::buffer::Ptr;
use super::driver::{Arg, Driver, Launch};
use crate::error::{Error, Result};
use crate::float::Float;

include!(concat!(env!("OUT_DIR"), "/kernel_images.rs"));
include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// The source of all kernels in one text, with our own `#include`s already replaced by the files.
pub const SOURCE: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.cu"));

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

/// Returns whether the kernels were compiled when this program was built.
pub fn are_built_in() -> bool {
    !IMAGES.is_empty()
}

/// Returns the built-in image for a chip of this compute capability: machine code for 8.0 and 9.0, which later chips of
/// the same generation run too, and PTX for later generations.
pub fn image(capability: (i32, i32)) -> Option<&'static [u8]> {
    newest(IMAGES, capability)
}

/// Returns the major version of CUDA that made machine code, by its header: the drivers of this version, with any minor
/// version, and all later ones load the code. `None` if the image is not machine code.
pub fn made_by_cuda(image: &[u8]) -> Option<i32> {
    let version = u32::from_le_bytes(image.get(20..24)?.try_into().ok()?);
    // The byte of the operating system, which NVIDIA changed with CUDA 13; before, the version of the file is that of
    // CUDA, 129 for 12.9.
    match (image.starts_with(b"\x7fELF"), image[7]) {
        (true, 0x33) => i32::try_from(version / 10).ok(),
        (true, 0x41) => Some(13),
        _ => None,
    }
}

/// Returns the newest of `images` that is no newer than the chip. An image's number is 10 times the major version plus
/// the minor version.
fn newest<'i>(images: &[(i32, &'i [u8])], (major, minor): (i32, i32)) -> Option<&'i [u8]> {
    let older = images.iter().filter(|(chip, _)| *chip <= 10 * major + minor);
    older.max_by_key(|(chip, _)| *chip).map(|(_, image)| *image)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::cuda::driver::Address;

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

    #[test]
    fn a_chip_gets_the_newest_image_that_it_can_run() {
        let images: &[(i32, &[u8])] = &[(80, &[1]), (90, &[2]), (100, &[3])];
        let cases = [
            ((7, 5), None),
            ((8, 0), Some(1)),
            ((8, 9), Some(1)),
            ((9, 0), Some(2)),
            ((10, 0), Some(3)),
            ((12, 1), Some(3)),
        ];
        for (capability, expected) in cases {
            let found = newest(images, capability).map(|image| image[0]);
            assert_eq!(found, expected, "{capability:?}");
        }
    }
}
