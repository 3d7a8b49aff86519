//! Memory of the device with the type of what it holds.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use super::driver::{Address, Arg, Driver, Part};
use crate::error::{Error, Result};

/// Some values on the device; given back when dropped.
pub struct Buffer<'d, T> {
    driver: &'d dyn Driver,
    address: Address,
    len: usize,
    /// Whether dropping it gives the memory back.
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
    /// The place in the device's memory.
    pub fn address(self) -> Address {
        self.address
    }

    /// The place `n` values further on.
    pub fn after(self, n: usize) -> Self {
        Self {
            address: self.address + (n * size_of::<T>()) as u64,
            ..self
        }
    }

    /// The same place, where the kernel takes the bytes for another type.
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
    /// Room for `len` values, not set to anything; `what` names them in the error.
    ///
    /// # Errors
    /// The device has no such room: how much was needed.
    pub fn new(driver: &'d dyn Driver, what: &str, len: usize) -> Result<Self> {
        // Even an empty buffer has an address.
        let bytes = (len * size_of::<T>()).max(1);
        let Some(address) = driver.allocate(bytes)? else {
            let mib = |bytes: u64| bytes.div_ceil(1 << 20);
            return Err(Error::gpu_memory(format_args!(
                "{what} need {} MiB, and {} MiB are free",
                mib(bytes as u64),
                mib(driver.free_bytes()?)
            ))
            .hint("end what else uses the GPU, give fewer tokens, or use --device cpu"));
        };
        Ok(Self {
            driver,
            address,
            len,
            owned: true,
            values: PhantomData,
        })
    }

    /// `len` of its values from number `start` on, as a buffer of their own.
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

    /// These values.
    pub fn of(driver: &'d dyn Driver, what: &str, values: &[T]) -> Result<Self> {
        let buffer = Self::new(driver, what, values.len())?;
        buffer.write(values)?;
        Ok(buffer)
    }

    /// Room for `len` values, all bits zero.
    pub fn zeros(driver: &'d dyn Driver, what: &str, len: usize) -> Result<Self> {
        let buffer = Self::new(driver, what, len)?;
        buffer.zero()?;
        Ok(buffer)
    }

    /// Values.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pointer to the first value, for a kernel.
    pub fn ptr(&self) -> Ptr<'_, T> {
        self.ptr_at(0)
    }

    /// The pointer to value number `at`.
    pub fn ptr_at(&self, at: usize) -> Ptr<'_, T> {
        assert!(at <= self.len, "a place beyond the end of the buffer: {at}");
        Ptr {
            address: self.address + (at * size_of::<T>()) as u64,
            values: PhantomData,
        }
    }

    /// Sets the first values.
    pub fn write(&self, values: &[T]) -> Result<()> {
        assert!(values.len() <= self.len, "more values than the buffer has");
        match values {
            [] => Ok(()),
            values => self.driver.write(self.address, bytemuck::cast_slice(values)),
        }
    }

    /// Sets the first values, after everything that was launched before, without waiting for it.
    pub fn send(&self, values: &[T]) -> Result<()> {
        assert!(values.len() <= self.len, "more values than the buffer has");
        match values {
            [] => Ok(()),
            values => self.driver.send(self.address, bytemuck::cast_slice(values)),
        }
    }

    /// The first values as a part of a [`Driver::fetch`].
    pub fn to<'v>(&self, values: &'v mut [T]) -> Part<'v> {
        assert!(values.len() <= self.len, "more values than the buffer has");
        Part {
            from: self.address,
            bytes: bytemuck::cast_slice_mut(values),
        }
    }

    /// All bits to zero.
    pub fn zero(&self) -> Result<()> {
        match self.len {
            0 => Ok(()),
            len => self.driver.zero(self.address, len * size_of::<T>()),
        }
    }

    /// All values.
    pub fn read(&self) -> Result<Vec<T>> {
        self.read_part(0, self.len)
    }

    /// `len` values from number `start` on.
    pub fn read_part(&self, start: usize, len: usize) -> Result<Vec<T>> {
        assert!(
            start + len <= self.len,
            "a part beyond the end of the buffer: {start} + {len}"
        );
        let mut values = vec![T::zeroed(); len];
        if len > 0 {
            let at = self.address + (start * size_of::<T>()) as u64;
            self.driver.read(at, bytemuck::cast_slice_mut(&mut values))?;
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
