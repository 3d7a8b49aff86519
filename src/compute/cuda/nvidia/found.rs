//! Looks for the first GPU of this machine, without opening it.

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute, CUresult};

use super::{attribute, failed};
use crate::error::{Error, Result};

/// The hint of errors that say that CUDA is not available.
const HINT: &str = "install the NVIDIA driver (`nvidia-smi` shows whether it works), or use ⟨device=cpu⟩";
/// The oldest compute capability that the kernels run on: they need asynchronous copies and m16n8k16 products.
const OLDEST: (i32, i32) = (8, 0);

/// The first GPU of a machine, and its driver.
#[derive(Clone, Debug)]
pub struct Found {
    pub(super) device: CUdevice,
    /// The name and the compute capability of the GPU.
    pub gpu: String,
    /// The compute capability.
    pub capability: (i32, i32),
    /// The CUDA version of the driver, such as 13.0.
    pub cuda: String,
    /// The release of the driver, such as 580.65.06; `None` if the system does not tell.
    pub release: Option<String>,
}

impl Found {
    /// Looks for the first GPU.
    ///
    /// # Errors
    /// There is no driver or no GPU, or the GPU is too old: exit code 3.
    pub fn first() -> Result<Self> {
        // SAFETY: looks for the library and closes it again.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::device("CUDA: no NVIDIA driver (libcuda) found").hint(HINT));
        }
        result::init().map_err(|e| match e.0 {
            CUresult::CUDA_ERROR_NO_DEVICE => no_gpu(),
            _ => failed("cannot start the driver", e).hint(HINT),
        })?;
        if result::device::get_count().map_err(|e| failed("cannot list the GPUs", e))? == 0 {
            return Err(no_gpu());
        }
        let device = result::device::get(0).map_err(|e| failed("cannot open the first GPU", e))?;
        let name =
            result::device::get_name(device).map_err(|e| failed("cannot read the name of the GPU", e))?;
        let fact = |which| attribute(device, which);
        let major = fact(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = fact(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let capability = (major, minor);
        if capability < OLDEST {
            return Err(Error::device(format!(
                "CUDA: {name} has compute capability {major}.{minor}; kvsmith needs 8.0 or later"
            ))
            .hint("use ⟨device=wgpu⟩ or ⟨device=cpu⟩"));
        }
        let (of_major, of_minor) = version()?;
        Ok(Self {
            device,
            gpu: format!("{name}, compute capability {major}.{minor}"),
            capability,
            cuda: format!("{of_major}.{of_minor}"),
            release: std::fs::read_to_string("/proc/driver/nvidia/version")
                .ok()
                .and_then(|text| release(&text)),
        })
    }

    /// Returns the versions of the driver.
    pub fn driver(&self) -> String {
        match &self.release {
            Some(release) => format!("CUDA {}, driver {release}", self.cuda),
            None => format!("CUDA {}", self.cuda),
        }
    }
}

/// Finds the release in what the kernel module says of itself: the first word of numbers with dots between them.
fn release(text: &str) -> Option<String> {
    let is_number = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_digit());
    let is_release = |word: &&str| word.contains('.') && word.split('.').all(is_number);
    text.split_whitespace().find(is_release).map(str::to_owned)
}

fn no_gpu() -> Error {
    Error::device("CUDA: the driver finds no NVIDIA GPU").hint(HINT)
}

/// Returns the CUDA version of the driver, such as 13.0, in two parts.
pub(super) fn version() -> Result<(i32, i32)> {
    let mut version = 0;
    // SAFETY: writes a number to where the pointer points.
    unsafe { sys::cuDriverGetVersion(&mut version) }
        .result()
        .map_err(|e| failed("cannot read the version of the driver", e))?;
    Ok((version / 1000, version % 1000 / 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_found_in_the_modules_text() {
        let text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)\n\
                    GCC version:  gcc version 12.2.0";
        assert_eq!(release(text).as_deref(), Some("580.65.06"));
        assert_eq!(release("NVRM version: none"), None);
    }
}
