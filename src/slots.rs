//! Values that a signal handler can reach.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// A list whose values can be taken out by their owners, or by a signal handler that ends the program.
///
/// It has no lock, so the handler never waits for the code that it interrupted.
pub struct Slots<T> {
    head: AtomicPtr<Node<T>>,
}

/// A place in a list. It stays in the list when its value is taken out, and is then used for another value.
struct Node<T> {
    value: AtomicPtr<T>,
    next: *mut Self,
}

/// The handle of a value in a list; dropping it takes the value out and frees it.
pub struct Slot<T: Send + 'static> {
    place: &'static AtomicPtr<T>,
    value: *mut T,
}

// SAFETY: `value` is only compared and freed, by the one owner; T may be freed by any thread.
unsafe impl<T: Send> Send for Slot<T> {}
// SAFETY: a shared reference gives no access to anything.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T: Send + 'static> Slots<T> {
    /// Makes an empty list.
    pub const fn new() -> Self {
        Self {
            head: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Puts a value into the list.
    pub fn put(&'static self, value: T) -> Slot<T> {
        let value = Box::into_raw(Box::new(value));
        let empty = |place: &&AtomicPtr<T>| {
            let put = place.compare_exchange(ptr::null_mut(), value, Ordering::AcqRel, Ordering::Relaxed);
            put.is_ok()
        };
        let place = self.places().find(empty).unwrap_or_else(|| self.extend(value));
        Slot { place, value }
    }

    /// Takes all values out for good. They are never freed, because a signal handler may not free memory.
    pub fn take(&'static self) -> impl Iterator<Item = &'static T> {
        let values = self
            .places()
            .map(|place| place.swap(ptr::null_mut(), Ordering::AcqRel));
        // SAFETY: a value that is not null came from a box; nobody else has it now, and it is never freed.
        values.filter_map(|value| unsafe { value.as_ref() })
    }

    fn places(&'static self) -> impl Iterator<Item = &'static AtomicPtr<T>> {
        // SAFETY: nodes are never freed, and do not change once they are in the list.
        let node = |node: *mut Node<T>| unsafe { node.as_ref() };
        let first = node(self.head.load(Ordering::Acquire));
        std::iter::successors(first, move |last| node(last.next)).map(|node| &node.value)
    }

    /// Adds a place that holds `value`.
    fn extend(&'static self, value: *mut T) -> &'static AtomicPtr<T> {
        let mut next = self.head.load(Ordering::Acquire);
        let node = Box::into_raw(Box::new(Node {
            value: AtomicPtr::new(value),
            next,
        }));
        while let Err(head) = self
            .head
            .compare_exchange(next, node, Ordering::AcqRel, Ordering::Acquire)
        {
            next = head;
            // SAFETY: the node is not in the list yet.
            unsafe { (*node).next = next };
        }
        // SAFETY: nodes are never freed.
        unsafe { &(*node).value }
    }
}

impl<T: Send + 'static> Drop for Slot<T> {
    fn drop(&mut self) {
        let taken =
            self.place
                .compare_exchange(self.value, ptr::null_mut(), Ordering::AcqRel, Ordering::Relaxed);
        if taken.is_ok() {
            // SAFETY: the value came from a box and has just been taken out by its owner.
            drop(unsafe { Box::from_raw(self.value) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_taken_once_and_places_used_again() {
        static LIST: Slots<String> = Slots::new();
        let put = |text: &str| LIST.put(text.to_owned());
        let (a, b) = (put("a"), put("b"));
        drop(a);
        let c = put("c");
        assert_eq!(LIST.places().count(), 2);
        let mut found: Vec<&String> = LIST.take().collect();
        found.sort();
        assert_eq!(found, ["b", "c"]);
        // The owners of `b` and `c` find their values gone, and leave alone what is now in the same places.
        let _d = put("d");
        drop((b, c));
        assert_eq!(LIST.take().collect::<Vec<_>>(), ["d"]);
    }

    #[test]
    fn threads_share_a_list() {
        static LIST: Slots<usize> = Slots::new();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || (0..1000).for_each(|i| drop((LIST.put(thread), LIST.put(i)))));
            }
        });
        assert_eq!(LIST.take().count(), 0);
        assert!(LIST.places().count() <= 8);
    }
}
