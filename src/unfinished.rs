//! Temporary files that must go if the program ends without dropping its values: on a second Ctrl-C, or in a signal
//! handler.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::slots::{Slot, Slots};

static FILES: Slots<CString> = Slots::new();

/// The entry of a file that is not finished yet.
pub type Unfinished = Slot<CString>;

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
