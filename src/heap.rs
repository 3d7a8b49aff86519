//! How the program gives memory back that it no longer needs.

/// Allocations of at least this size have a mapping of their own: glibc's first value, which then stays.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const OWN_MAPPING_BYTES: libc::c_int = 128 << 10;

/// Makes large allocations go back to the system as soon as they are freed; called at the start of a long run.
///
/// By default glibc raises the size from which it does this up to 32 MB and keeps what is smaller. Blocks of text have
/// different lengths, so their states leave holes of all sizes: a calibration kept up to half of a layer's keys with
/// every layer.
pub fn return_large_allocations() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call only sets a number in the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES);
    }
}

/// Gives the pages of all freed allocations back to the system, the small ones' too.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the allocator may be trimmed at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
