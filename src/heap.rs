//! Returning freed memory to the system.

/// Allocations of at least this size get a mapping of their own. This is glibc's initial threshold; setting it keeps
/// glibc from raising it.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const OWN_MAPPING_BYTES: libc::c_int = 128 << 10;

/// Makes large allocations go back to the system as soon as they are freed; called at the start of a long run.
///
/// By default, glibc raises this threshold to as much as 32 MB and keeps smaller freed allocations for reuse. Blocks of
/// text differ in length, so their states leave gaps of all sizes: without this call, memory grew with every layer of a
/// calibration, by up to half the size of one layer's keys.
pub fn return_large_allocations() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call only sets a number in the allocator.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING_BYTES);
    }
}

/// Returns the pages of all freed allocations to the system, including those of small allocations.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the allocator may be trimmed at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
