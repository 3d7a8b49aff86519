//! The devices of this machine.

use std::sync::Arc;

use kvsmith::compute::cpu::Cpu;
use kvsmith::compute::device::Device;

/// A device, or why it is not there.
pub struct Entry {
    pub name: &'static str,
    pub device: Result<Arc<dyn Device>, String>,
    /// Leaves the large cases out: software that stands in for a GPU.
    pub slow: bool,
}

/// All devices that kvsmith knows.
pub fn all() -> Vec<Entry> {
    vec![Entry {
        name: "cpu",
        device: Ok(Arc::new(Cpu)),
        slow: false,
    }]
}
