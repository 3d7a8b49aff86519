//! The devices of this machine.

use std::sync::Arc;

use kvsmith::compute::cpu::Cpu;
use kvsmith::compute::cuda::Cuda;
use kvsmith::compute::device::Device;

use super::emulated::Emulated;

/// A device, or why it is not there.
pub struct Entry {
    pub name: &'static str,
    pub device: Result<Arc<dyn Device>, String>,
    /// Leaves the large cases out: software that stands in for a GPU.
    pub slow: bool,
}

/// All devices that kvsmith knows.
pub fn all() -> Vec<Entry> {
    let cuda = Cuda::open().map_err(|e| e.to_string());
    // The CUDA kernels on the CPU, with and without what tensor cores would do.
    let emulated = |tensor_cores| match Emulated::new(tensor_cores) {
        Ok(driver) => Ok(Arc::new(Cuda::new(Box::new(driver))) as Arc<dyn Device>),
        Err(e) => Err(e),
    };
    vec![
        Entry {
            name: "cpu",
            device: Ok(Arc::new(Cpu)),
            slow: false,
        },
        Entry {
            name: "cuda",
            device: cuda.map(|cuda| Arc::new(cuda) as Arc<dyn Device>),
            slow: false,
        },
        Entry {
            name: "emulated",
            device: emulated(true),
            slow: true,
        },
        Entry {
            name: "emulated-plain",
            device: emulated(false),
            slow: true,
        },
    ]
}
