//! Keys and values on the GPU in two formats that have nothing to do with one another.

use super::attend::{Attention, IN_F32, Stored, f32_bytes};
use super::rows::{CudaFormat, CudaRows, StaticScores};
use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels::Kernel;
use crate::error::Result;
use crate::kv::qkv::Part;
use crate::kv::{KvType, RowFormat};

/// A format of cached keys or values whose rows do not depend on one another.
pub trait PartFormat: Sync {
    /// Returns the format.
    fn format(&self) -> RowFormat;

    /// Allocates the empty rows of a layer.
    ///
    /// # Errors
    /// Out of memory.
    fn rows<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn PartRows + 'd>>;

    /// Returns the bytes of a row of one KV head.
    fn bytes(&self, part: Part, shape: &Shape) -> usize {
        self.format().bytes(part, shape.head_dim)
    }
}

/// The cached keys or values of one layer.
pub trait PartRows {
    /// Stores rows of the last `m` positions, `[b,g,m,d]`; `positions` counts them already.
    fn append(&self, rows: &Buffer<'_, f32>, m: usize, positions: &Positions<'_>) -> Result<()>;

    /// Fills the cache with random rows, for a benchmark.
    fn fill(&self, seed: u32) -> Result<()>;

    /// Returns the rows as kernels read them.
    fn stored(&self) -> Stored<'_>;
}

/// A format of keys and a format of values, which attention reads in f32.
pub(super) struct Pair {
    pub keys: &'static dyn PartFormat,
    pub values: &'static dyn PartFormat,
}

impl CudaFormat for Pair {
    fn kv(&self) -> KvType {
        KvType {
            keys: self.keys.format(),
            values: self.values.format(),
        }
    }

    fn kernel(&self, shape: &Shape) -> Result<(&'static Kernel, usize)> {
        Ok((IN_F32, f32_bytes(shape)))
    }

    fn cache<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn CudaRows + 'd>> {
        Ok(Box::new(PairRows::new(driver, shape, [self.keys, self.values])?))
    }

    fn bytes_per_position(&self, shape: &Shape) -> usize {
        self.keys.bytes(Part::Keys, shape) + self.values.bytes(Part::Values, shape)
    }
}

/// The cached keys and values of one layer.
pub struct PairRows<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    pub keys: Box<dyn PartRows + 'd>,
    pub values: Box<dyn PartRows + 'd>,
}

impl<'d> PairRows<'d> {
    /// Allocates an empty cache for keys and values in these formats.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, [keys, values]: [&dyn PartFormat; 2]) -> Result<Self> {
        let shape = shape.checked()?;
        Ok(Self {
            driver,
            shape,
            keys: keys.rows(driver, shape)?,
            values: values.rows(driver, shape)?,
        })
    }
}

impl CudaRows for PairRows<'_> {
    /// # Numerics
    /// Gives the same rows as the formats on the CPU.
    fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        self.keys.append(keys, m, positions)?;
        self.driver
            .beside(&mut || self.values.append(values, m, positions))
    }

    /// # Numerics
    /// f32 throughout.
    fn attend(
        &self,
        attention: &Attention<'_>,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()> {
        let (keys, values) = (self.keys.stored(), self.values.stored());
        attention.step_in_f32([keys, values], queries, positions, chosen)
    }

    fn score_static(&self, scores: &StaticScores<'_>) -> Result<()> {
        scores.launch(self.driver, &self.shape, self.keys.stored())
    }

    fn fill(&self, seed: u32) -> Result<()> {
        self.keys.fill(seed)?;
        self.values.fill(seed + 1)
    }
}
