//! Asking memory for values before they are needed.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{_MM_HINT_T0 as FIRST_CACHE, _MM_HINT_T1 as SECOND_CACHE, _mm_prefetch};

#[cfg(not(target_arch = "x86_64"))]
const FIRST_CACHE: i32 = 0;
#[cfg(not(target_arch = "x86_64"))]
const SECOND_CACHE: i32 = 1;

/// How many bytes ahead of the weights that it multiplies a product prefetches: one and a half pages of memory, because the
/// processor by itself does not ask for the next page.
const AHEAD: usize = 6144;

/// Prefetches the cache lines that hold `values`, which are needed soon, into the first cache.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    each_line::<FIRST_CACHE, T>(values, 0);
}

/// Prefetches the cache lines that hold `values`, which are needed a little later, into the second cache: the first one has
/// few places for lines that are on their way, and what is read now needs them.
#[inline(always)]
pub fn prefetch_later<T>(values: &[T]) {
    each_line::<SECOND_CACHE, T>(values, 0);
}

/// Prefetches the cache lines [`AHEAD`] bytes after those that hold `values`, which need not belong to anything, as
/// [`prefetch_later`] does.
#[inline(always)]
pub fn prefetch_ahead<T>(values: &[T]) {
    each_line::<SECOND_CACHE, T>(values, AHEAD);
}

/// Prefetches the cache lines that hold row number `row`, of `width` bytes, as [`prefetch_later`] does; the row need not be
/// one of `rows`.
#[inline(always)]
pub fn prefetch_row(rows: &[u8], row: usize, width: usize) {
    let first = rows.as_ptr().wrapping_add(row * width);
    for at in (0..width).step_by(64) {
        line::<SECOND_CACHE>(first.wrapping_add(at));
    }
    line::<SECOND_CACHE>(first.wrapping_add(width - 1));
}

/// Prefetches every 64 bytes, the length of a cache line, from `ahead` bytes after the first value on.
#[inline(always)]
fn each_line<const CACHE: i32, T>(values: &[T], ahead: usize) {
    let start = values.as_ptr().cast::<u8>().wrapping_add(ahead);
    for at in (0..size_of_val(values)).step_by(64) {
        line::<CACHE>(start.wrapping_add(at));
    }
}

/// Prefetches the cache line of an address.
#[inline(always)]
fn line<const CACHE: i32>(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch accesses nothing, whatever the address.
    unsafe {
        _mm_prefetch::<CACHE>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
