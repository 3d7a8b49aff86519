//! Memory-mapped files. An access to a page that the file no longer has raises SIGBUS, which [`install`] turns into an
//! error that names the file.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use memmap2::Mmap;

use crate::slots::{Slot, Slots};
use crate::unfinished;
use crate::wording::harmless;

/// A file that is mapped for reading.
pub struct Mapped {
    /// Dropped first, so that no address outside a map is listed.
    _entry: Slot<ListedMap>,
    map: Mmap,
}

/// What the signal handler needs to know about a map.
struct ListedMap {
    addresses: Range<usize>,
    /// The message that is printed if the file cannot be read.
    message: String,
}

static MAPS: Slots<ListedMap> = Slots::new();

impl Mapped {
    /// Maps a file; `path` names it in errors.
    pub fn new(file: &File, path: &Path) -> io::Result<Self> {
        // SAFETY: the mapping is read-only, and bytes that another program changes are plain data to every reader. An
        // access beyond the end of a truncated file ends the program: through the handler or, if none is installed,
        // through the signal.
        let map = unsafe { Mmap::map(file) }?;
        let start = map.as_ptr() as usize;
        let entry = ListedMap {
            addresses: start..start + map.len(),
            message: format!(
                "error: cannot read {}: it was truncated, or its disk failed, while kvsmith was reading it\n\
                 hint: make sure that no other program writes the file while kvsmith reads it, and start again\n",
                harmless(&path.display().to_string())
            ),
        };
        let _entry = MAPS.put(entry);
        Ok(Self { _entry, map })
    }
}

impl Deref for Mapped {
    type Target = Mmap;

    fn deref(&self) -> &Mmap {
        &self.map
    }
}

/// The action that SIGBUS had before [`install`].
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler of SIGBUS; called once by `main`.
pub fn install() {
    // SAFETY: both structs are plain data; `on_bus` has the signature that SA_SIGINFO asks for, and calls only what a
    // signal handler may call.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut previous: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_bus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous) == 0 {
            PREVIOUS.get_or_init(|| previous);
            libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
        }
    }
}

/// Ends the program with an error if the fault is in a mapped file. Otherwise it restores the action that SIGBUS had
/// before [`install`] and returns, so that the access is repeated and faults under that action.
extern "C" fn on_bus(_: c_int, info: *mut libc::siginfo_t, _: *mut c_void) {
    static ENTERED: AtomicBool = AtomicBool::new(false);
    // Threads that read the same file fault together; the first of them ends the program.
    while ENTERED.swap(true, Ordering::SeqCst) {
        // SAFETY: the call only waits for a signal.
        unsafe { libc::pause() };
    }
    // SAFETY: the system gives a valid struct.
    let address = unsafe { (*info).si_addr() } as usize;
    let mut maps = MAPS.take();
    match maps.find(|entry| entry.addresses.contains(&address)) {
        Some(ListedMap { message, .. }) => {
            unfinished::remove_all();
            // SAFETY: the bytes are a string's; a signal handler may make both calls.
            unsafe {
                libc::write(libc::STDERR_FILENO, message.as_ptr().cast(), message.len());
                libc::_exit(1);
            }
        }
        None => {
            // The access is repeated when this function returns.
            if let Some(previous) = PREVIOUS.get() {
                // SAFETY: the system gave this struct.
                unsafe { libc::sigaction(libc::SIGBUS, previous, std::ptr::null_mut()) };
            }
        }
    }
}
