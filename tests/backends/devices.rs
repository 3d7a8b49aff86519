//! The devices of this machine.

use std::sync::Arc;

use kvsmith::compute::cpu::Cpu;
use kvsmith::compute::device::Device;
use kvsmith::compute::gpu::{Gpu, Limits};

/// A device, or why it is not there.
pub struct Entry {
    pub name: &'static str,
    pub device: Result<Arc<dyn Device>, String>,
    /// Leaves the large cases out: software that stands in for a GPU.
    pub slow: bool,
}

/// All devices that kvsmith knows.
pub fn all() -> Vec<Entry> {
    // Small enough that rows, centroids, sums and dispatches of the cases are cut into several pieces, and
    // large enough for the moments of 256 channels.
    let limits = Limits {
        buffer_bytes: 4 * 256 * 256,
        groups: 3,
    };
    vec![
        Entry {
            name: "cpu",
            device: Ok(Arc::new(Cpu)),
            slow: false,
        },
        gpu("wgpu", Gpu::open()),
        gpu("wgpu in pieces", Gpu::with_limits(limits)),
    ]
}

/// An adapter; a processor that stands in for one gets the small cases.
fn gpu(name: &'static str, device: kvsmith::error::Result<Gpu>) -> Entry {
    let slow = device.as_ref().is_ok_and(Gpu::is_software);
    let device = device.map(|device| Arc::new(device) as Arc<dyn Device>);
    Entry {
        name,
        device: device.map_err(|e| e.to_string()),
        slow,
    }
}
