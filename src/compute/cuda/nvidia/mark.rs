//! Times of launches, by the device's clock.

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};

use super::failed;
use crate::error::{Error, Result};

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
        let mut milliseconds = 0f32;
        let elapsed = elapsed_time()?;
        // SAFETY: as above; writes a number to where the pointer points.
        unsafe { elapsed(&mut milliseconds, earlier.0, self.0) }
            .result()
            .map_err(|e| failed("cannot read the time of an event", e))?;
        Ok(f64::from(milliseconds) * 1e-3)
    }
}

/// The signature of `cuEventElapsedTime`.
type ElapsedTime = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;

/// Finds the driver's `cuEventElapsedTime`, which every driver has. cudarc's bindings for CUDA 13 call the second
/// version of the function, which drivers before CUDA 12.8 lack, and panic without it.
fn elapsed_time() -> Result<ElapsedTime> {
    // SAFETY: the driver's library was found when the GPU was opened, and the function has this signature.
    let found = unsafe { sys::culib().get::<ElapsedTime>(b"cuEventElapsedTime") };
    found
        .map(|function| *function)
        .map_err(|e| Error::device(format!("CUDA: cannot read the time of an event: {e}")))
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once. An error at the end changes nothing.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}
