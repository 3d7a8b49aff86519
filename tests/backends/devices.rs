//! The devices of this machine.

use std::sync::Arc;

use kvsmith::compute::cpu::Cpu;
use kvsmith::compute::cuda::Cuda;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::compute::cuda::nvidia::Nvidia;
use kvsmith::compute::device::Device;

use super::emulated::Emulated;

/// A device, or why it is not there.
pub struct Entry {
    pub name: &'static str,
    pub device: Result<Arc<dyn Device>, String>,
    /// The same without its tensor cores, where it has some.
    pub plain: Option<Arc<dyn Device>>,
    /// Leaves the large cases out: software that stands in for a GPU.
    pub slow: bool,
}

/// All devices that kvsmith knows.
pub fn all() -> Vec<Entry> {
    vec![
        Entry {
            name: "cpu",
            device: Ok(Arc::new(Cpu)),
            plain: None,
            slow: false,
        },
        cuda(),
        emulated(),
    ]
}

fn device(driver: impl Driver + 'static) -> Arc<dyn Device> {
    Arc::new(Cuda::new(Box::new(driver)))
}

fn cuda() -> Entry {
    Entry {
        name: "cuda",
        device: Nvidia::open().map(device).map_err(|e| e.to_string()),
        plain: Nvidia::open().ok().map(|gpu| device(gpu.without_tensor_cores())),
        slow: false,
    }
}

/// The CUDA kernels on the CPU.
fn emulated() -> Entry {
    Entry {
        name: "emulated",
        device: Emulated::new(true).map(device),
        plain: Emulated::new(false).ok().map(device),
        slow: true,
    }
}
