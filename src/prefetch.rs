//! Asking memory for values before they are needed.

/// How many bytes ahead of the weights that it multiplies a product prefetches. Rows of a weight follow one another, and the
/// processor by itself does not ask for enough of the next ones.
pub const AHEAD: usize = 1024;

/// Prefetches the cache lines that hold `values`.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    prefetch_beyond(values, 0);
}

/// Prefetches the cache lines `ahead` bytes after those that hold `values`, which need not belong to anything.
#[inline(always)]
pub fn prefetch_beyond<T>(values: &[T], ahead: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = values.as_ptr().cast::<i8>().wrapping_add(ahead);
        for line in (0..size_of_val(values)).step_by(64) {
            // SAFETY: a prefetch accesses nothing, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (values, ahead);
}
