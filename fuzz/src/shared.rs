//! Coverage of child processes.

/// Moves the coverage counters into memory that child processes share, so that the fuzzer sees what these reach.
#[cfg(fuzzing)]
pub fn share_counters() {
    unsafe extern "C" {
        #[link_name = "__start___sancov_cntrs"]
        static START: u8;
        #[link_name = "__stop___sancov_cntrs"]
        static STOP: u8;
    }
    const PAGE: usize = 4096;
    let start = (&raw const START as usize).next_multiple_of(PAGE);
    let len = (&raw const STOP as usize / PAGE * PAGE).saturating_sub(start);
    let (protection, flags) = (
        libc::PROT_READ | libc::PROT_WRITE,
        libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
    );
    // SAFETY: the pages lie within the counters, plain bytes that nobody holds a reference to; they are replaced by
    // others with the same content.
    unsafe {
        let at = start as *mut u8;
        let counters = std::slice::from_raw_parts(at, len).to_vec();
        let map = libc::mmap(at.cast(), len, protection, flags, -1, 0);
        assert_eq!(map as usize, start, "the counters cannot be shared");
        at.copy_from(counters.as_ptr(), len);
    }
}

/// Does nothing in a build without counters.
#[cfg(not(fuzzing))]
pub fn share_counters() {}
