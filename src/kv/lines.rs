//! Values that begin on a cache line, in large pages where that pays.
//!
//! A decode step reads rows from all over a cache. A row that begins within a cache line takes one more of them,
//! and with pages of 4 KiB nearly every row costs a look-up of its page beside the read.

use std::ops::{Deref, DerefMut};

use aligned_vec::{AVec, ConstAlign};

/// Bytes of a cache line.
const LINE: usize = 64;
/// Bytes of a large page.
const PAGE: usize = 2 << 20;
/// Rooms of so many bytes ask for large pages: the last one, of which a part stays empty, is little to them.
const LARGE: usize = 4 * PAGE;

/// Room to reserve beyond `len` values so that `more` fit, none where they do: an eighth at least, since doubling a
/// cache would waste half of it.
pub fn growth(len: usize, capacity: usize, more: usize) -> usize {
    if capacity - len < more {
        more.max(len / 8)
    } else {
        0
    }
}

/// Values one after the other, the first on a cache line.
#[derive(Clone, Debug)]
pub struct Lines<T>(AVec<T, ConstAlign<LINE>>);

impl<T: Copy + Default> Lines<T> {
    /// No values, and room for `capacity` of them.
    pub fn with_capacity(capacity: usize) -> Self {
        let mut lines = Self(AVec::with_capacity(LINE, capacity));
        lines.ask_for_large_pages();
        lines
    }

    /// Makes room for `more` values, as much as [`growth`] says.
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

    /// Appends `n` zeros, which are returned.
    pub fn add(&mut self, n: usize) -> &mut [T] {
        let len = self.0.len();
        self.grow(n).0.resize(len + n, T::default());
        &mut self.0[len..]
    }

    /// Drops the values and keeps the room.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Bytes held, those in reserve included.
    pub fn bytes(&self) -> usize {
        self.0.capacity() * size_of::<T>()
    }

    /// What the system does not grant costs time, never correctness.
    fn ask_for_large_pages(&mut self) {
        let bytes = self.bytes();
        if bytes < LARGE {
            return;
        }
        #[cfg(target_os = "linux")]
        {
            let start = self.0.as_mut_ptr().cast::<u8>();
            let first = start.align_offset(PAGE);
            let len = (bytes - first) / PAGE * PAGE;
            // SAFETY: the pages lie within the room of the vector; the advice leaves what they hold as it is.
            unsafe { libc::madvise(start.wrapping_add(first).cast(), len, libc::MADV_HUGEPAGE) };
        }
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

impl<T> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.0
    }
}

impl<T: Copy + Default> Default for Lines<T> {
    fn default() -> Self {
        Self::with_capacity(0)
    }
}

/// Makes room for `more` values, as much as [`growth`] says.
pub fn grow<T>(v: &mut Vec<T>, more: usize) -> &mut Vec<T> {
    v.reserve_exact(growth(v.len(), v.capacity(), more));
    v
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_begin_on_a_line_wherever_they_move() {
        let mut lines = Lines::<u16>::with_capacity(3);
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
