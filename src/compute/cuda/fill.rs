//! For benchmarks: fills buffers with random numbers, and measures a loop that only reads memory.

use super::buffer::Buffer;
use super::driver::Driver;
use super::kernels;
use crate::error::Result;
use crate::float::Float;

/// Kinds of random numbers for a benchmark.
#[derive(Clone, Copy, Debug)]
pub enum Random {
    /// Numbers of a float type, from -1 to 1.
    Float(Float),
    /// u16 numbers below this bound.
    Below(usize),
    /// All bits of a u32.
    Bits,
}

/// Fills the first `n` values of a buffer with random numbers.
pub fn fill<T: bytemuck::Pod>(
    driver: &dyn Driver,
    buffer: &Buffer<'_, T>,
    n: usize,
    random: Random,
    seed: u32,
) -> Result<()> {
    let (kind, below, bytes) = match random {
        Random::Float(float) => (float.number(), 1, float.bytes()),
        Random::Below(bound) => (3, bound, 2),
        Random::Bits => (4, 1, 4),
    };
    assert!(n * bytes <= buffer.len() * size_of::<T>(), "beyond the end");
    let blocks = n.div_ceil(256).min(16 * driver.multiprocessors());
    kernels::FillRandom {
        out: buffer.ptr().cast(),
        n,
        kind,
        below,
        seed: seed as usize,
    }
    .launch(driver, [blocks, 1, 1])
}

/// A loop that reads memory and does nothing else.
pub struct ReadLoop<'d> {
    driver: &'d dyn Driver,
    memory: Buffer<'d, u32>,
    sums: Buffer<'d, u32>,
    blocks: usize,
}

impl<'d> ReadLoop<'d> {
    /// Makes a loop over `bytes` of device memory.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, bytes: usize) -> Result<Self> {
        let memory = Buffer::new(driver, "memory to read", bytes.div_ceil(16) * 4)?;
        fill(driver, &memory, memory.len(), Random::Bits, 1)?;
        let blocks = 8 * driver.multiprocessors();
        Ok(Self {
            driver,
            memory,
            sums: Buffer::new(driver, "sums of the loop", blocks * 256)?,
            blocks,
        })
    }

    /// Starts the loop.
    pub fn run(&self) -> Result<()> {
        kernels::ReadAll {
            from: self.memory.ptr().cast(),
            n: self.memory.len() / 4,
            sums: self.sums.ptr(),
        }
        .launch(self.driver, [self.blocks, 1, 1])
    }
}
