//! Temporary files that must go if the program ends without dropping its values: on a second Ctrl-C, by a fault, or
//! because there is no memory.

use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::slots::{Slot, Slots};

static FILES: Slots<CString> = Slots::new();

/// The entry of a file that is not finished yet.
pub type Unfinished = Slot<CString>;

/// Removes the listed files if the program aborts, as it does without memory; called once by `main`.
pub fn install() {
    extern "C" fn on_abort(_: c_int) {
        remove_all();
    }
    // SAFETY: the handler calls only what a signal handler may call; the program aborts when it returns.
    unsafe { libc::signal(libc::SIGABRT, on_abort as *const () as libc::sighandler_t) };
}

/// Lists a file until the entry is dropped.
pub fn list(path: &Path) -> Unfinished {
    // The path of a file that exists has no zero byte.
    FILES.put(CString::new(path.as_os_str().as_bytes()).unwrap_or_default())
}

/// Removes all listed files; a signal handler may call this, and the program has to end afterwards.
pub fn remove_all() {
    for path in FILES.take() {
        // SAFETY: the path is a C string. If the file is gone already, nothing happens.
        unsafe { libc::unlink(path.as_ptr()) };
    }
}
