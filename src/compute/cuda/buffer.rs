//! Typed arrays in device memory.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use super::driver::{Address, Arg, Driver, Part};
use crate::error::{Error, Result};

/// An array in device memory, freed when dropped.
pub struct Buffer<'d, T> {
    driver: &'d dyn Driver,
    address: Address,
    len: usize,
    /// Whether dropping the buffer frees the memory.
    owned: bool,
    values: PhantomData<T>,
}

/// A pointer to a value of a live [`Buffer`], for a kernel.
pub struct Ptr<'b, T> {
    address: Address,
    values: PhantomData<&'b T>,
}

impl<T> Clone for Ptr<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Ptr<'_, T> {}

impl<'b, T> Ptr<'b, T> {
    /// Returns the address.
    pub fn address(self) -> Address {
        self.address
    }

    /// Returns the same address with another element type, for a kernel that reads the bytes as that type.
    pub fn cast<U>(self) -> Ptr<'b, U> {
        Ptr {
            address: self.address,
            values: PhantomData,
        }
    }
}

impl<T> From<Ptr<'_, T>> for Arg {
    fn from(pointer: Ptr<'_, T>) -> Self {
        Self::address(pointer.address)
    }
}

impl<T> From<Option<Ptr<'_, T>>> for Arg {
    fn from(pointer: Option<Ptr<'_, T>>) -> Self {
        Self::address(pointer.map_or(0, Ptr::address))
    }
}

impl<'d, T: Pod + Zeroable> Buffer<'d, T> {
    /// Allocates space for `len` uninitialised values; `what` names them in the error.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, what: &str, len: usize) -> Result<Self> {
        // Even an empty buffer needs an address.
        let bytes = (len * size_of::<T>()).max(1);
        let Some(address) = driver.allocate(bytes)? else {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            return Err(Error::gpu_memory(format_args!(
                "{what} need {} MiB, but only {} MiB are free",
                mib(bytes as u64),
                mib(driver.free_bytes()?)
            ))
            .hint("stop other programs that use the GPU, give fewer tokens, or use ⟨device=cpu⟩"));
        };
        Ok(Self {
            driver,
            address,
            len,
            owned: true,
            values: PhantomData,
        })
    }

    /// Returns the `len` values from index `start` on as a buffer that shares the memory.
    pub fn part(&self, start: usize, len: usize) -> Buffer<'_, T> {
        assert!(
            start + len <= self.len,
            "a part beyond the end of the buffer: {start} + {len}"
        );
        Buffer {
            driver: self.driver,
            address: self.address + (start * size_of::<T>()) as u64,
            len,
            owned: false,
            values: PhantomData,
        }
    }

    /// Allocates a buffer and copies `values` into it.
    pub fn from_slice(driver: &'d dyn Driver, what: &str, values: &[T]) -> Result<Self> {
        let buffer = Self::new(driver, what, values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Allocates `len` values whose bits are all zero.
    pub fn zeros(driver: &'d dyn Driver, what: &str, len: usize) -> Result<Self> {
        let buffer = Self::new(driver, what, len)?;
        buffer.zero()?;
        Ok(buffer)
    }

    /// Counts the values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Says whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the pointer to the first value, for a kernel.
    pub fn ptr(&self) -> Ptr<'_, T> {
        self.ptr_at(0)
    }

    /// Returns the pointer to the value at index `at`.
    pub fn ptr_at(&self, at: usize) -> Ptr<'_, T> {
        assert!(at <= self.len, "a place beyond the end of the buffer: {at}");
        Ptr {
            address: self.address + (at * size_of::<T>()) as u64,
            values: PhantomData,
        }
    }

    /// Overwrites the first `values.len()` values.
    pub fn write(&self, values: &[T]) -> Result<()> {
        assert!(values.len() <= self.len, "more values than the buffer has");
        match values {
            [] => Ok(()),
            values => self.driver.write(self.address, bytemuck::cast_slice(values)),
        }
    }

    /// Overwrites the first `values.len()` values after all earlier launches, without waiting for the copy.
    pub fn send(&self, values: &[T]) -> Result<()> {
        assert!(values.len() <= self.len, "more values than the buffer has");
        match values {
            [] => Ok(()),
            values => self.driver.send(self.address, bytemuck::cast_slice(values)),
        }
    }

    /// Returns the copy of the first `values.len()` values into `values`, as a part of a [`Driver::fetch`].
    pub fn to<'v>(&self, values: &'v mut [T]) -> Part<'v> {
        assert!(values.len() <= self.len, "more values than the buffer has");
        Part {
            from: self.address,
            bytes: bytemuck::cast_slice_mut(values),
        }
    }

    /// Sets all bits to zero.
    pub fn zero(&self) -> Result<()> {
        match self.len {
            0 => Ok(()),
            len => self.driver.zero(self.address, len * size_of::<T>()),
        }
    }

    /// Copies all values to the host.
    pub fn read(&self) -> Result<Vec<T>> {
        self.read_part(0, self.len)
    }

    /// Copies the `len` values from index `start` on to the host.
    pub fn read_part(&self, start: usize, len: usize) -> Result<Vec<T>> {
        let part = self.part(start, len);
        let mut values = vec![T::zeroed(); len];
        if len > 0 {
            let bytes = bytemuck::cast_slice_mut(&mut values);
            self.driver.read(part.address, bytes)?;
        }
        Ok(values)
    }
}

impl<T> Drop for Buffer<'_, T> {
    fn drop(&mut self) {
        if self.owned {
            self.driver.free(self.address);
        }
    }
}
