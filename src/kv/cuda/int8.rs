//! The cache in 8 bits on the GPU: the codes and scales of the CPU's format `int8`, which attention widens to f32.

use half::f16;

use super::attend::{Attention, f32_bytes};
use super::rows::{CudaFormat, CudaRows, StaticScores};
use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels::{self, Kernel};
use crate::error::Result;
use crate::kv::KvType;

/// Channels that share a scale.
const GROUP: usize = 64;

/// The format of 8 bits.
pub(super) struct Int8s;

impl CudaFormat for Int8s {
    fn kv(&self) -> KvType {
        KvType::INT8
    }

    fn kernel(&self, shape: &Shape) -> Result<(&'static Kernel, usize)> {
        Ok((kernels::AttendInt8::KERNEL, f32_bytes(shape)))
    }

    fn cache<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn CudaRows + 'd>> {
        Ok(Box::new(Int8Layer::new(driver, shape)?))
    }

    fn bytes_per_position(&self, shape: &Shape) -> usize {
        self.kv().bytes_per_position(shape.head_dim)
    }
}

/// The cached keys and values of one layer in 8 bits. In arrays of two, keys come first, then values.
pub struct Int8Layer<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    /// Codes from -127 to 127 in two's complement, `[b,g,capacity,d]` each.
    pub codes: [Buffer<'d, u8>; 2],
    /// A scale per 64 channels, `[b,g,capacity,d / 64]` each, with d / 64 rounded up.
    pub scales: [Buffer<'d, f16>; 2],
}

impl<'d> Int8Layer<'d> {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let rows = shape.heads() * shape.capacity;
        let codes = || Buffer::zeros(driver, "8-bit rows", rows * shape.head_dim);
        let scales = || {
            let groups = shape.head_dim.div_ceil(GROUP);
            Buffer::zeros(driver, "scales of 8-bit rows", rows * groups)
        };
        Ok(Self {
            driver,
            shape,
            codes: [codes()?, codes()?],
            scales: [scales()?, scales()?],
        })
    }
}

impl CudaRows for Int8Layer<'_> {
    /// # Numerics
    /// Gives the same codes and scales as the format on the CPU.
    fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let (shape, d) = (&self.shape, self.shape.head_dim);
        let grid = shape.grid((m * d.div_ceil(GROUP)).div_ceil(8));
        let store = |rows: &Buffer<'_, f32>, i: usize| {
            kernels::AppendInt8 {
                rows: rows.ptr(),
                lens: positions.lens.ptr(),
                codes: self.codes[i].ptr(),
                scales: self.scales[i].ptr().cast(),
                m,
                d,
                capacity: shape.capacity,
            }
            .launch(self.driver, grid)
        };
        store(keys, 0)?;
        self.driver.beside(&mut || store(values, 1))
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
        let shape = &self.shape;
        attention.step(KvType::INT8, queries, positions, chosen, |at| {
            kernels::AttendInt8 {
                queries: at.queries,
                keys: self.codes[0].ptr(),
                key_scales: self.scales[0].ptr().cast(),
                values: self.codes[1].ptr(),
                value_scales: self.scales[1].ptr().cast(),
                spans: at.spans,
                lists: at.lists,
                listed: at.listed,
                outs: at.outs,
                sums: at.sums,
                scale: at.scale,
                r: at.r,
                d: shape.head_dim,
                capacity: at.capacity,
                most: at.most,
                w: shape.width(),
            }
            .launch(self.driver, at.grid, f32_bytes(shape))
        })
    }

    fn score_static(&self, scores: &StaticScores<'_>) -> Result<()> {
        let shape = &self.shape;
        kernels::StaticScoresInt8 {
            queries: scores.queries.ptr(),
            keys: self.codes[0].ptr(),
            key_scales: self.scales[0].ptr().cast(),
            spans: scores.positions.spans.ptr(),
            parts: scores.parts.ptr(),
            scale: shape.exponent(),
            r: shape.group,
            d: shape.head_dim,
            w: shape.width(),
            capacity: shape.capacity,
            n_parts: scores.n_parts,
        }
        .launch(self.driver, shape.grid(1))
    }
}
