//! Asking memory for values before they are needed.

/// How many bytes ahead of the weights that it multiplies a product prefetches: one and a half pages of memory, because the
/// processor by itself does not ask for the next page.
const AHEAD: usize = 6144;

/// Prefetches the cache lines that hold `values`, which are needed soon, into the first cache.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        each_line(values, |line| {
            // SAFETY: a prefetch accesses nothing, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line) }
        });
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Prefetches the cache lines that hold `values`, which are needed a little later, into the second cache, as
/// [`prefetch_ahead`] does.
#[inline(always)]
pub fn prefetch_later<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        each_line(values, |line| {
            // SAFETY: a prefetch accesses nothing, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line) }
        });
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Prefetches the cache lines [`AHEAD`] bytes after those that hold `values`, which need not belong to anything, into the
/// second cache: the first one has few places for lines that are on their way, and what is read now needs them.
#[inline(always)]
pub fn prefetch_ahead<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        each_line(values, |line| {
            // SAFETY: a prefetch accesses nothing, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(AHEAD)) }
        });
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Calls `each` with an address every 64 bytes, the length of a cache line.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn each_line<T>(values: &[T], each: impl Fn(*const i8)) {
    let start = values.as_ptr().cast::<i8>();
    for at in (0..size_of_val(values)).step_by(64) {
        each(start.wrapping_add(at));
    }
}
