//! A vector whose first value is aligned to a cache line, in large pages if it is large.
//!
//! A decode step reads rows from all over a cache. A row that starts within a cache line touches one line
//! more than it must, and with pages of 4 KiB nearly every row costs a lookup of its page.

use std::ops::{Deref, DerefMut};

use aligned_vec::{AVec, ConstAlign};

use crate::large::{self, PAGE};

/// Bytes of a cache line.
const LINE: usize = 64;
/// Allocations of at least this size use large pages; the unused part of the last page is negligible by
/// comparison.
const LARGE: usize = 4 * PAGE;

/// Returns how many values to reserve beyond `len` so that `more` fit: none if they fit already, else at
/// least an eighth of `len`. Doubling would waste up to half of a cache.
pub fn growth(len: usize, capacity: usize, more: usize) -> usize {
    if capacity - len < more {
        more.max(len / 8)
    } else {
        0
    }
}

/// A vector whose first value is aligned to a cache line.
#[derive(Debug)]
pub struct AlignedVec<T>(AVec<T, ConstAlign<LINE>>);

impl<T: Copy + Default> AlignedVec<T> {
    /// Makes an empty vector with space for `capacity` values.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut lines = Self(AVec::with_capacity(LINE, capacity));
        lines.ask_for_large_pages();
        lines
    }

    /// Reserves space for `more` values, by the rule of [`growth`].
    pub fn grow(&mut self, more: usize) -> &mut Self {
        let room = growth(self.0.len(), self.0.capacity(), more);
        if room > 0 {
            self.0.reserve_exact(room);
            self.ask_for_large_pages();
        }
        self
    }

    /// Appends values.
    pub fn extend(&mut self, values: impl ExactSizeIterator<Item = T>) {
        for (to, value) in self.add(values.len()).iter_mut().zip(values) {
            *to = value;
        }
    }

    /// Appends a value.
    pub fn push(&mut self, value: T) {
        self.grow(1).0.push(value);
    }

    /// Appends `n` zeros and returns them.
    pub fn add(&mut self, n: usize) -> &mut [T] {
        let len = self.0.len();
        self.grow(n).0.resize(len + n, T::default());
        &mut self.0[len..]
    }

    /// Removes all values and keeps the space.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the bytes held, reserved space included.
    pub fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<T>()
    }

    /// Asks the system for large pages; a refusal costs time, never correctness.
    fn ask_for_large_pages(&mut self) {
        let bytes = self.bytes();
        if bytes < LARGE {
            return;
        }
        // SAFETY: the addresses are those of the vector's space.
        unsafe { large::ask(self.0.as_mut_ptr().cast(), bytes) };
    }
}

impl<T: Copy + Default> Clone for AlignedVec<T> {
    fn clone(&self) -> Self {
        let mut lines = Self::with_capacity(self.len());
        lines.0.extend_from_slice(self);
        lines
    }
}

impl<T> Deref for AlignedVec<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for AlignedVec<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T: Copy + Default> Default for AlignedVec<T> {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

/// Reserves space for `more` values, by the rule of [`growth`].
pub fn grow<T>(v: &mut Vec<T>, more: usize) -> &mut Vec<T> {
    v.reserve_exact(growth(v.len(), v.capacity(), more));
    v
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_on_a_line_wherever_they_move() {
        let mut lines = AlignedVec::<u16>::with_capacity(3);
        let mut expected = Vec::new();
        for n in [3usize, 1, 60, 1000, 4 << 20] {
            let first = expected.len();
            lines.extend((first..first + n).map(|i| i as u16));
            lines.push(7);
            expected.extend((first..first + n).map(|i| i as u16));
            expected.push(7);
            assert_eq!(lines.as_ptr() as usize % LINE, 0);
            assert!(*lines == *expected);
            assert!(lines.bytes() >= 2 * expected.len() && lines.bytes() <= 2 * expected.len() / 8 * 9 + 128);
        }
        assert_eq!(lines.add(2), [0, 0]);
        assert_eq!(lines.clone().as_ptr() as usize % LINE, 0);
    }
}
