//! Temporary files to remove if the program ends without dropping its values: on a second Ctrl-C, on a fault, or for
//! lack of memory.

use std::ffi::{CString, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::slots::{Slot, Slots};

static FILES: Slots<CString> = Slots::new();

/// The list entry of an unfinished file.
pub type Unfinished = Slot<CString>;

/// Makes an abort, which is how the program ends for lack of memory, remove the listed files; called once by `main`.
pub fn install() {
    extern "C" fn on_abort(_: c_int) {
        remove_all();
    }
    // SAFETY: the handler calls only what a signal handler may call; the program aborts when it returns.
    unsafe { libc::signal(libc::SIGABRT, on_abort as *const () as libc::sighandler_t) };
}

/// Lists a file until the entry is dropped.
pub fn list(path: &Path) -> Unfinished {
    // The path of an existing file contains no zero byte.
    FILES.put(CString::new(path.as_os_str().as_bytes()).unwrap_or_default())
}

/// Removes all listed files. A signal handler may call this function; the program has to end afterwards.
pub fn remove_all() {
    for path in FILES.take() {
        // SAFETY: the path is a C string. If the file is gone already, nothing happens.
        unsafe { libc::unlink(path.as_ptr()) };
    }
}
