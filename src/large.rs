//! Memory in large pages.
//!
//! A processor remembers where a few thousand pages are. Weights and caches have more pages of 4 KiB than that, so that
//! reading them also waits for lookups of pages: on an AMD EPYC in a virtual machine, a loop on one thread that only reads
//! is a third faster in pages of 2 MiB.

use std::ops::Deref;

/// Bytes of a large page.
pub const PAGE: usize = 2 << 20;

/// Asks the system for large pages where `bytes` bytes from `start` on fill them; a refusal costs time, never correctness.
///
/// # Safety
/// The bytes lie within one allocation of the caller.
pub unsafe fn ask(start: *mut u8, bytes: usize) {
    #[cfg(target_os = "linux")]
    {
        let first = start.align_offset(PAGE);
        if let Some(whole) = bytes.checked_sub(first).filter(|rest| *rest >= PAGE) {
            // SAFETY: the pages lie within the allocation, and the advice does not change their contents.
            unsafe { libc::madvise(start.add(first).cast(), whole / PAGE * PAGE, libc::MADV_HUGEPAGE) };
        }
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (start, bytes);
}

/// Says whether the system gives large pages to those who ask.
pub fn available() -> bool {
    let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    setting.is_ok_and(|text| !text.contains("[never]"))
}

/// Bytes that were filled once, in large pages if the system gives them.
pub struct Filled {
    memory: memmap2::MmapMut,
    first: usize,
    len: usize,
}

impl Filled {
    /// Reserves `len` bytes, which `fill` then writes.
    ///
    /// # Errors
    /// The system gives no memory.
    pub fn new(len: usize, fill: impl FnOnce(&mut [u8])) -> std::io::Result<Self> {
        let mut memory = memmap2::MmapMut::map_anon(len + PAGE)?;
        let first = memory.as_ptr().align_offset(PAGE);
        // SAFETY: the addresses are those of the map.
        unsafe { ask(memory.as_mut_ptr(), memory.len()) };
        fill(&mut memory[first..first + len]);
        Ok(Self { memory, first, len })
    }
}

impl Deref for Filled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[self.first..self.first + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_begin_at_a_page_and_stay() {
        for len in [0, 1, PAGE - 1, PAGE, 3 * PAGE + 5] {
            let bytes = |out: &mut [u8]| out.iter_mut().enumerate().for_each(|(i, b)| *b = (i % 251) as u8);
            let filled = Filled::new(len, bytes).expect("memory");
            assert_eq!(filled.as_ptr() as usize % PAGE, 0);
            assert_eq!(filled.len(), len);
            assert!(filled.iter().enumerate().all(|(i, b)| *b == (i % 251) as u8));
        }
    }
}
