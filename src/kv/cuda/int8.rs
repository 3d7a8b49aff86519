//! Rows in 8 bits on the GPU: the codes and scales of the CPU's format `int8`.

use half::f16;

use super::attend::Stored;
use super::pair::{PartFormat, PartRows};
use super::{Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::float::Float;
use crate::kv::RowFormat;

/// Channels that share a scale.
const GROUP: usize = 64;
/// The number of the format in kernels/rows.h.
const KIND: usize = 3;

/// The format of 8 bits.
pub struct Int8s;

impl PartFormat for Int8s {
    fn format(&self) -> RowFormat {
        RowFormat::INT8
    }

    fn rows<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn PartRows + 'd>> {
        Ok(Box::new(Int8Rows::new(driver, shape)?))
    }
}

/// The cached keys or values of one layer in 8 bits.
pub struct Int8Rows<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    /// Codes from -127 to 127 in two's complement, `[b,g,capacity,d]`.
    pub codes: Buffer<'d, u8>,
    /// A scale per 64 channels, `[b,g,capacity,d / 64]`, with d / 64 rounded up.
    pub scales: Buffer<'d, f16>,
}

impl<'d> Int8Rows<'d> {
    /// Allocates empty rows.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let rows = shape.heads() * shape.capacity;
        let groups = shape.head_dim.div_ceil(GROUP);
        Ok(Self {
            driver,
            shape,
            codes: Buffer::zeros(driver, "8-bit rows", rows * shape.head_dim)?,
            scales: Buffer::zeros(driver, "scales of 8-bit rows", rows * groups)?,
        })
    }
}

impl PartRows for Int8Rows<'_> {
    /// # Numerics
    /// Gives the same codes and scales as the format on the CPU.
    fn append(&self, rows: &Buffer<'_, f32>, m: usize, positions: &Positions<'_>) -> Result<()> {
        let (shape, d) = (&self.shape, self.shape.head_dim);
        kernels::AppendInt8 {
            rows: rows.ptr(),
            lens: positions.lens.ptr(),
            codes: self.codes.ptr(),
            scales: self.scales.ptr().cast(),
            m,
            d,
            capacity: shape.capacity,
        }
        .launch(self.driver, shape.grid((m * d.div_ceil(GROUP)).div_ceil(8)))
    }

    fn fill(&self, seed: u32) -> Result<()> {
        let (codes, scales) = (self.codes.len() / 4, self.scales.len());
        fill(self.driver, &self.codes, codes, Random::Bits, seed)?;
        fill(
            self.driver,
            &self.scales,
            scales,
            Random::Float(Float::F16),
            seed + 2,
        )
    }

    fn stored(&self) -> Stored<'_> {
        Stored {
            rows: self.codes.ptr(),
            scales: Some(self.scales.ptr().cast()),
            kind: KIND,
        }
    }
}
