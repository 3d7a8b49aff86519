//! The devices of this machine.

use std::sync::Arc;

use kvsmith::internal::compute::cpu::Cpu;
use kvsmith::internal::compute::cuda::Cuda;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::compute::cuda::nvidia::Nvidia;
use kvsmith::internal::compute::device::Device;
use kvsmith::internal::compute::wgpu::{Wgpu, WgpuLimits};
use kvsmith::internal::error::Error;

use super::emulated::{Emulated, perturbed_one_in};

/// A device, or why it is not there.
pub struct Entry {
    pub name: &'static str,
    pub device: Result<Arc<dyn Device>, String>,
    /// The same without its tensor cores, where it has some.
    pub plain: Option<Arc<dyn Device>>,
    /// Leaves the large cases out.
    pub slow: bool,
    /// Leaves the cases of more channels out.
    pub most_channels: usize,
    /// Of this many cases one is checked.
    pub one_in: usize,
}

/// All devices that kvsmith knows.
pub fn all() -> Vec<Entry> {
    // Small enough that the rows, centroids, sums and dispatches of most cases are cut into pieces: 64 rows
    // or centroids of 64 channels, or the moments of as many.
    let limits = WgpuLimits {
        buffer_bytes: 4 * 64 * 64,
        groups: 3,
    };
    vec![
        Entry {
            name: "cpu",
            device: Ok(Arc::new(Cpu)),
            plain: None,
            slow: false,
            most_channels: usize::MAX,
            one_in: 1,
        },
        adapter("wgpu", Wgpu::open(WgpuLimits::NONE), usize::MAX),
        adapter("wgpu-in-pieces", Wgpu::open(limits), 64),
        cuda(),
        emulated("emulated", Emulated::new),
        emulated("perturbed", Emulated::perturbed),
    ]
}

/// An adapter; in pieces, or on a processor that stands in for one, it gets the small cases.
fn adapter(name: &'static str, device: Result<Wgpu, Error>, most_channels: usize) -> Entry {
    let slow = most_channels < usize::MAX || device.as_ref().is_ok_and(Wgpu::is_software);
    let device = device.map(|device| Arc::new(device) as Arc<dyn Device>);
    Entry {
        name,
        device: device.map_err(|e| e.to_string()),
        plain: None,
        slow,
        most_channels,
        one_in: 1,
    }
}

fn driven(driver: impl Driver + 'static) -> Arc<dyn Device> {
    Arc::new(Cuda::new(Box::new(driver)))
}

fn cuda() -> Entry {
    Entry {
        name: "cuda",
        device: Nvidia::open().map(driven).map_err(|e| e.to_string()),
        plain: Nvidia::open().ok().map(|gpu| driven(gpu.without_tensor_cores())),
        slow: false,
        most_channels: usize::MAX,
        one_in: 1,
    }
}

/// The CUDA kernels on the CPU, with and without the tensor cores' substitutes.
fn emulated(name: &'static str, open: fn(bool) -> Result<Emulated, String>) -> Entry {
    Entry {
        name,
        device: open(true).map(driven),
        plain: open(false).ok().map(driven),
        slow: true,
        most_channels: usize::MAX,
        one_in: if name == "perturbed" {
            perturbed_one_in(6)
        } else {
            1
        },
    }
}
