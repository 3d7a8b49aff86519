//! The kernels of `kernels/*.cu`: their machine code (if `build.rs` found an nvcc), their source, and their launches.
//!
//! The launches are the structs of `launches`, whose fields are the kernels' parameters: a missing
//! argument, or one of the wrong type, does not compile. Sizes and buffer lengths are not checked. The caller must choose
//! them as the comment above the kernel says, which is why launches stay within this crate.

pub use super::launches::ALL;
pub(crate) use super::launches::*;
pub use super::start::Kernel;

include!(concat!(env!("OUT_DIR"), "/kernel_images.rs"));

/// The source of all kernels in one text, with our own `#include`s already replaced by the files.
pub const SOURCE: &str = include_str!(concat!(env!("OUT_DIR"), "/kernels.cu"));

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
