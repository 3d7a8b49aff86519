//! Times of launches, by the device's clock.

use cudarc::driver::result;
use cudarc::driver::sys::{CUevent, CUevent_flags};

use super::failed;
use crate::error::Result;

/// A point in the order of launches whose time the device records (a CUDA event).
pub struct Mark(CUevent);

impl Mark {
    pub fn new() -> Result<Self> {
        let event = result::event::create(CUevent_flags::CU_EVENT_DEFAULT);
        event.map(Self).map_err(|e| failed("cannot create an event", e))
    }

    /// Records the mark after all earlier launches.
    pub fn set(&self) -> Result<()> {
        // SAFETY: the event was created in `new`; the null stream is the one everything goes through.
        unsafe { result::event::record(self.0, std::ptr::null_mut()) }
            .map_err(|e| failed("cannot create an event", e))
    }

    /// Waits for the mark, and returns the seconds from an `earlier` mark to it.
    pub fn seconds_since(&self, earlier: &Self) -> Result<f64> {
        // SAFETY: both events were created in `new`.
        unsafe { result::event::synchronize(self.0) }.map_err(|e| failed("a timed launch failed", e))?;
        // SAFETY: as above.
        let milliseconds = unsafe { result::event::elapsed(earlier.0, self.0) };
        let milliseconds = milliseconds.map_err(|e| failed("cannot read the time of an event", e))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once. An error at the end changes nothing.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
