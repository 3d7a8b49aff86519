//! What stands for NVIDIA GPUs in a build without the feature `cuda`: there are none.

use super::driver::{Address, Arg, Driver, Launch};
use super::start::Kernel;
use crate::error::{Error, Result};

fn absent() -> Error {
    Error::device("CUDA: this build has no support for NVIDIA GPUs")
        .hint("build kvsmith with the feature `cuda`, or use the CPU")
}

/// The first GPU of a machine; there is none.
#[derive(Clone, Debug)]
pub struct Found {
    /// The name and the compute capability of the GPU.
    pub gpu: String,
}

impl Found {
    /// Looks for the first GPU.
    ///
    /// # Errors
    /// Always: exit code 3.
    pub fn first() -> Result<Self> {
        Err(absent())
    }

    /// Describes the driver.
    pub fn driver(&self) -> String {
        String::new()
    }
}

/// An open GPU; there is none.
#[derive(Clone, Copy, Debug)]
pub enum Nvidia {}

impl Nvidia {
    /// Opens the first GPU.
    ///
    /// # Errors
    /// Always: exit code 3.
    pub fn open() -> Result<Self> {
        Err(absent())
    }

    /// Opens the vendor's library for products.
    ///
    /// # Errors
    /// None: there is no GPU.
    pub fn with_library(self, _tell: &dyn Fn(&str)) -> Result<Self> {
        match self {}
    }
}

impl Driver for Nvidia {
    fn adapter(&self) -> String {
        match *self {}
    }

    fn shared_bytes(&self) -> usize {
        match *self {}
    }

    fn free_bytes(&self) -> Result<u64> {
        match *self {}
    }

    fn allocate(&self, _: usize) -> Result<Option<Address>> {
        match *self {}
    }

    fn free(&self, _: Address) {
        match *self {}
    }

    fn write(&self, _: Address, _: &[u8]) -> Result<()> {
        match *self {}
    }

    fn read(&self, _: Address, _: &mut [u8]) -> Result<()> {
        match *self {}
    }

    fn zero(&self, _: Address, _: usize) -> Result<()> {
        match *self {}
    }

    fn multiprocessors(&self) -> usize {
        match *self {}
    }

    fn blocks_at_once(&self, _: &'static Kernel, _: usize) -> Result<usize> {
        match *self {}
    }

    unsafe fn launch(&self, _: &'static str, _: Launch, _: &[Arg]) -> Result<()> {
        match *self {}
    }
}
