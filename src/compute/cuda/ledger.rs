//! Counts the device memory that host code allocates, without allocating any: the code runs on a [`Ledger`] as it would
//! on the device.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::driver::{Address, Arg, Driver, Launch, Purpose};
use super::start::Kernel;
use crate::error::Result;

/// The pages of a GPU, which allocations of more than half a page get whole.
const PAGE: u64 = 2 << 20;
/// What smaller allocations are rounded up to.
const PIECE: u64 = 512;

/// Bytes of device memory, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// The weights of the model.
    pub weights: u64,
    /// Cached keys and values.
    pub caches: u64,
    /// The indexes of a method, with the buffers of its steps.
    pub indexes: u64,
    /// Buffers for prompts and steps.
    pub workspaces: u64,
}

impl Needs {
    /// Returns the sum.
    pub fn total(&self) -> u64 {
        self.weights + self.caches + self.indexes + self.workspaces
    }

    fn bytes_mut(&mut self, purpose: Purpose) -> &mut u64 {
        match purpose {
            Purpose::Weights => &mut self.weights,
            Purpose::Caches => &mut self.caches,
            Purpose::Indexes => &mut self.indexes,
            Purpose::Workspaces => &mut self.workspaces,
        }
    }
}

/// A driver that only counts bytes. It answers questions about the hardware as the device does; launches and copies do
/// nothing, and what is read is zero.
pub struct Ledger<'d> {
    device: &'d dyn Driver,
    book: Mutex<Book>,
}

struct Book {
    /// What the next allocation is for.
    purpose: Purpose,
    /// The address of the next allocation.
    next: Address,
    live: HashMap<Address, (Purpose, u64)>,
    now: Needs,
    most: Needs,
}

impl<'d> Ledger<'d> {
    /// Makes an empty ledger for a device.
    pub fn new(device: &'d dyn Driver) -> Self {
        Self {
            device,
            book: Mutex::new(Book {
                purpose: Purpose::Workspaces,
                next: PAGE,
                live: HashMap::new(),
                now: Needs::default(),
                most: Needs::default(),
            }),
        }
    }

    /// Returns what was allocated when it was most.
    pub fn most(&self) -> Needs {
        self.book().most
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        // Every change of the book is complete, even if its thread then panicked.
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the bytes that the device takes for an allocation.
fn taken(bytes: usize) -> u64 {
    let bytes = bytes as u64;
    bytes.next_multiple_of(if bytes > PAGE / 2 { PAGE } else { PIECE })
}

impl Driver for Ledger<'_> {
    fn adapter(&self) -> String {
        self.device.adapter()
    }

    fn shared_bytes(&self) -> usize {
        self.device.shared_bytes()
    }

    fn searches_on_tensor_cores(&self) -> bool {
        self.device.searches_on_tensor_cores()
    }

    fn free_bytes(&self) -> Result<u64> {
        Ok(u64::MAX)
    }

    fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        let mut book = self.book();
        let (address, purpose, bytes) = (book.next, book.purpose, taken(bytes));
        book.next += bytes;
        book.live.insert(address, (purpose, bytes));
        *book.now.bytes_mut(purpose) += bytes;
        if book.now.total() > book.most.total() {
            book.most = book.now;
        }
        Ok(Some(address))
    }

    fn set_purpose(&self, purpose: Purpose) -> Purpose {
        std::mem::replace(&mut self.book().purpose, purpose)
    }

    fn has_memory(&self) -> bool {
        false
    }

    fn free(&self, address: Address) {
        let mut book = self.book();
        if let Some((purpose, bytes)) = book.live.remove(&address) {
            *book.now.bytes_mut(purpose) -= bytes;
        }
    }

    fn write(&self, _: Address, _: &[u8]) -> Result<()> {
        Ok(())
    }

    fn read(&self, _: Address, bytes: &mut [u8]) -> Result<()> {
        bytes.fill(0);
        Ok(())
    }

    fn zero(&self, _: Address, _: usize) -> Result<()> {
        Ok(())
    }

    fn multiprocessors(&self) -> usize {
        self.device.multiprocessors()
    }

    fn blocks_at_once(&self, kernel: &'static Kernel, shared_bytes: usize) -> Result<usize> {
        self.device.blocks_at_once(kernel, shared_bytes)
    }

    unsafe fn launch(&self, _: &'static str, _: Launch, _: &[Arg]) -> Result<()> {
        Ok(())
    }
}
