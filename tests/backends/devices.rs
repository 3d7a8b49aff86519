//! The devices of this machine.

use std::sync::Arc;

use kvsmith::compute::cpu::Cpu;
use kvsmith::compute::device::Device;
use kvsmith::compute::gpu::{Gpu, Limits};
use kvsmith::error::Error;

/// A device, or why it is not there.
pub struct Entry {
    pub name: &'static str,
    pub device: Result<Arc<dyn Device>, String>,
    /// Leaves the large cases out.
    pub slow: bool,
    /// Leaves the cases of more channels out.
    pub most_channels: usize,
}

/// All devices that kvsmith knows.
pub fn all() -> Vec<Entry> {
    // Small enough that the rows, centroids, sums and dispatches of most cases are cut into pieces: 64 rows
    // or centroids of 64 channels, or the moments of as many.
    let limits = Limits {
        buffer_bytes: 4 * 64 * 64,
        groups: 3,
    };
    vec![
        Entry {
            name: "cpu",
            device: Ok(Arc::new(Cpu)),
            slow: false,
            most_channels: usize::MAX,
        },
        gpu("wgpu", Gpu::open(), usize::MAX),
        gpu("wgpu-in-pieces", Gpu::with_limits(limits), 64),
    ]
}

/// An adapter; in pieces, or on a processor that stands in for one, it gets the small cases.
fn gpu(name: &'static str, device: Result<Gpu, Error>, most_channels: usize) -> Entry {
    let slow = most_channels < usize::MAX || device.as_ref().is_ok_and(Gpu::is_software);
    let device = device.map(|device| Arc::new(device) as Arc<dyn Device>);
    Entry {
        name,
        device: device.map_err(|e| e.to_string()),
        slow,
        most_channels,
    }
}
