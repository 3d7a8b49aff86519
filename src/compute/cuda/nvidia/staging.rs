//! Copies through page-locked memory, which run while the host continues.

use std::ffi::{c_uint, c_void};
use std::ptr;
use std::sync::Mutex;
use std::thread;

use cudarc::driver::result;
use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};

use super::failed;
use crate::compute::cuda::driver::Part;
use crate::error::{Error, Result};

/// The most bytes of one piece of a copy.
const PIECE: usize = 16 << 20;
/// Copies of at least so many bytes go through page-locked memory: the driver's own copies of other memory are several
/// times slower.
pub const LARGE: usize = 1 << 20;

/// Page-locked memory, with an event that tells when its copies are done.
struct Pinned {
    at: *mut u8,
    bytes: usize,
    event: CUevent,
}

// SAFETY: CUDA's driver takes calls from any thread, and one thread at a time has what it is inside of.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Allocates page-locked memory; `None` if the system locks no more memory.
    fn new(bytes: usize) -> Result<Option<Self>> {
        let portable: c_uint = sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: the memory is not read before it is written.
        let at = match unsafe { result::malloc_host(bytes, portable) } {
            Ok(at) => at.cast::<u8>(),
            Err(e) if e.0 == CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Ok(None),
            Err(e) => return Err(failed("no page-locked memory", e)),
        };
        let mut pinned = Self {
            at,
            bytes,
            event: ptr::null_mut(),
        };
        let event = result::event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING);
        pinned.event = event.map_err(|e| failed("no event", e))?;
        Ok(Some(pinned))
    }

    /// Records the event after all copies so far.
    fn mark(&self) -> Result<()> {
        // SAFETY: the event was created in `new`; the null stream is the one everything goes through.
        unsafe { result::event::record(self.event, ptr::null_mut()) }.map_err(|e| failed("no event", e))
    }

    /// Waits for the recorded event; returns at once if none was recorded.
    fn wait(&self) -> Result<()> {
        // SAFETY: as above.
        unsafe { result::event::synchronize(self.event) }
            .map_err(|e| failed("a copy from or to the GPU failed", e))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if !self.event.is_null() {
            // The memory must outlive a copy that is still running.
            let _ = self.wait();
            // SAFETY: created in `new`, destroyed once.
            let _ = unsafe { result::event::destroy(self.event) };
        }
        // SAFETY: from `malloc_host`, freed once.
        let _ = unsafe { result::free_host(self.at.cast::<c_void>()) };
    }
}

/// The page-locked memory for copies in each direction.
#[derive(Default)]
pub struct Staging {
    arriving: Mutex<Option<Pinned>>,
    /// Two pieces of memory for large copies from the device, used in turns.
    receiving: Mutex<[Option<Pinned>; 2]>,
    /// Two pieces of memory, used in turns; the number says which was used last.
    leaving: Mutex<(usize, [Option<Pinned>; 2])>,
}

impl Staging {
    /// See [`Driver::fetch`](crate::compute::cuda::driver::Driver::fetch); returns false, and does nothing, if no
    /// memory can be locked.
    pub fn fetch(&self, parts: &mut [Part<'_>], meanwhile: &mut dyn FnMut() -> Result<()>) -> Result<bool> {
        let mut arriving = self.arriving.lock().map_err(|_| broken())?;
        let total = parts
            .iter()
            .map(|part| part.bytes.len().next_multiple_of(64))
            .sum();
        let Some(pinned) = at_least(&mut arriving, total)? else {
            return Ok(false);
        };
        let mut at = 0;
        for part in &*parts {
            // SAFETY: within the memory, which nobody else has while the lock is held; the copy is waited for below,
            // or in `drop`.
            let room = unsafe { std::slice::from_raw_parts_mut(pinned.at.add(at), part.bytes.len()) };
            // SAFETY: the buffer behind the address has at least as many bytes.
            unsafe { result::memcpy_dtoh_async(room, part.from, ptr::null_mut()) }
                .map_err(|e| failed("a copy from the GPU failed", e))?;
            at += part.bytes.len().next_multiple_of(64);
        }
        pinned.mark()?;
        let launched = meanwhile();
        pinned.wait()?;
        launched?;
        let mut at = 0;
        for part in parts {
            // SAFETY: as above; the copies are done.
            let arrived = unsafe { std::slice::from_raw_parts(pinned.at.add(at), part.bytes.len()) };
            part.bytes.copy_from_slice(arrived);
            at += part.bytes.len().next_multiple_of(64);
        }
        Ok(true)
    }

    /// Copies bytes from the device after all earlier launches, a piece while the one before it goes to its place; returns
    /// false, and does nothing, if no memory can be locked.
    pub fn receive(&self, from: u64, bytes: &mut [u8]) -> Result<bool> {
        let mut receiving = self.receiving.lock().map_err(|_| broken())?;
        let size = PIECE.min(bytes.len());
        for pinned in receiving.iter_mut() {
            if at_least(pinned, size)?.is_none() {
                return Ok(false);
            }
        }
        let [Some(first), Some(second)] = &*receiving else {
            return Ok(false);
        };
        let both = [first, second];
        let begin = |i: usize, len: usize| {
            let pinned = both[i % 2];
            // SAFETY: within the memory, which nobody else has while the lock is held; what was in it has been copied
            // away.
            let room = unsafe { std::slice::from_raw_parts_mut(pinned.at, len) };
            // SAFETY: the buffer behind the address has at least as many bytes; the copy is waited for below, or in
            // `drop`.
            unsafe { result::memcpy_dtoh_async(room, from + (i * PIECE) as u64, ptr::null_mut()) }
                .map_err(|e| failed("a copy from the GPU failed", e))?;
            pinned.mark()
        };
        let sizes: Vec<usize> = bytes.chunks(PIECE).map(<[u8]>::len).collect();
        begin(0, sizes[0])?;
        for (i, to) in bytes.chunks_mut(PIECE).enumerate() {
            if let Some(next) = sizes.get(i + 1) {
                begin(i + 1, *next)?;
            }
            let pinned = both[i % 2];
            pinned.wait()?;
            // SAFETY: as above; the copy is done.
            copy(unsafe { std::slice::from_raw_parts(pinned.at, to.len()) }, to);
        }
        Ok(true)
    }

    /// See [`Driver::send`](crate::compute::cuda::driver::Driver::send); returns false if no memory can be locked.
    pub fn send(&self, to: u64, bytes: &[u8]) -> Result<bool> {
        let mut leaving = self.leaving.lock().map_err(|_| broken())?;
        let (turn, both) = &mut *leaving;
        for (i, piece) in bytes.chunks(PIECE).enumerate() {
            *turn = 1 - *turn;
            let Some(pinned) = at_least(&mut both[*turn], piece.len())? else {
                return Ok(false);
            };
            // Waits until the last copy from this memory is done.
            pinned.wait()?;
            // SAFETY: within the memory, which nobody else has while the lock is held, and no copy reads any more.
            let room = unsafe { std::slice::from_raw_parts_mut(pinned.at, piece.len()) };
            copy(piece, room);
            // SAFETY: the buffer behind the address has at least as many bytes; the memory stays as it is until the
            // event has come.
            unsafe { result::memcpy_htod_async(to + (i * PIECE) as u64, room, ptr::null_mut()) }
                .map_err(|e| failed("a copy to the GPU failed", e))?;
            pinned.mark()?;
        }
        Ok(true)
    }

    /// Frees all page-locked memory.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Returns page-locked memory of at least `bytes` bytes, allocating it anew if the present memory is smaller.
fn at_least(pinned: &mut Option<Pinned>, bytes: usize) -> Result<Option<&Pinned>> {
    if pinned.as_ref().is_none_or(|p| p.bytes < bytes) {
        drop(pinned.take());
        *pinned = Pinned::new(bytes.next_power_of_two().max(1 << 16))?;
    }
    Ok(pinned.as_ref())
}

/// Copies bytes with several threads if there are many. Memory that is written for the first time costs much more than the
/// copy, and threads of a pool could run work that waits for the same lock.
fn copy(from: &[u8], to: &mut [u8]) {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let each = from.len().div_ceil(cores.min(8)).max(LARGE);
    if from.len() <= each {
        return to.copy_from_slice(from);
    }
    thread::scope(|scope| {
        for (from, to) in from.chunks(each).zip(to.chunks_mut(each)) {
            scope.spawn(|| to.copy_from_slice(from));
        }
    });
}

fn broken() -> Error {
    Error::internal("CUDA: an earlier copy ended badly")
}
