//! Rows of a float type on the GPU, as a prompt attends them and most indexes read them.

use super::attend::{Attention, IN_F32, Rest, Stored, f32_bytes};
use super::pair::{PartFormat, PartRows};
use super::rows::{CudaFormat, CudaRows, StaticScores};
use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels::{self, Kernel};
use crate::error::Result;
use crate::float::Float;
use crate::kv::qkv::Part;
use crate::kv::{KvType, RowFormat};

/// The format of rows of a float type.
pub(super) struct Floats(Float);

impl Floats {
    pub const F32: Self = Self(Float::F32);
    pub const F16: Self = Self(Float::F16);
    pub const BF16: Self = Self(Float::Bf16);
}

impl CudaFormat for Floats {
    fn kv(&self) -> KvType {
        self.0.into()
    }

    fn kernel(&self, shape: &Shape) -> Result<(&'static Kernel, usize)> {
        match self.0 {
            Float::F32 => Ok((IN_F32, f32_bytes(shape))),
            float => {
                let kernel = kernels::Attend::kernel(float, shape.width())?;
                Ok((kernel, kernel.shared_bytes))
            }
        }
    }

    fn cache<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn CudaRows + 'd>> {
        Ok(Box::new(LayerRows::new(driver, shape, self.0)?))
    }

    fn bytes_per_position(&self, shape: &Shape) -> usize {
        self.kv().bytes_per_position(shape.width())
    }
}

impl PartFormat for Floats {
    fn format(&self) -> RowFormat {
        self.0.into()
    }

    fn rows<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn PartRows + 'd>> {
        Ok(Box::new(FloatRows {
            driver,
            shape,
            float: self.0,
            rows: buffer(driver, "cached rows", shape, self.0)?,
        }))
    }

    fn bytes(&self, _: Part, shape: &Shape) -> usize {
        shape.width() * self.0.bytes()
    }
}

/// The cached keys or values of one layer, `[b,g,capacity,w]`; channels beyond the head's are zero.
struct FloatRows<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    float: Float,
    rows: Buffer<'d, u8>,
}

impl PartRows for FloatRows<'_> {
    fn append(&self, rows: &Buffer<'_, f32>, m: usize, positions: &Positions<'_>) -> Result<()> {
        append(
            self.driver,
            &self.shape,
            self.float,
            rows,
            &self.rows,
            m,
            positions,
        )
    }

    fn fill(&self, seed: u32) -> Result<()> {
        let n = self.shape.heads() * self.shape.capacity * self.shape.width();
        fill(self.driver, &self.rows, n, Random::Float(self.float), seed)
    }

    fn stored(&self) -> Stored<'_> {
        stored(&self.rows, self.float)
    }
}

/// Allocates rows `[b,g,capacity,w]`.
fn buffer<'d>(
    driver: &'d dyn Driver,
    what: &'static str,
    shape: Shape,
    float: Float,
) -> Result<Buffer<'d, u8>> {
    let bytes = shape.heads() * shape.capacity * shape.width() * float.bytes();
    Buffer::new(driver, what, bytes)
}

/// Returns rows as kernels read them.
fn stored<'b>(rows: &'b Buffer<'_, u8>, float: Float) -> Stored<'b> {
    Stored {
        rows: rows.ptr(),
        scales: None,
        kind: float.number(),
    }
}

/// Stores rows of the last `m` positions, `[b,g,m,d]`, in a cache `[b,g,capacity,w]`.
fn append(
    driver: &dyn Driver,
    shape: &Shape,
    float: Float,
    rows: &Buffer<'_, f32>,
    cache: &Buffer<'_, u8>,
    m: usize,
    positions: &Positions<'_>,
) -> Result<()> {
    kernels::AppendRows {
        rows: rows.ptr(),
        cache: cache.ptr().cast(),
        lens: positions.lens.ptr(),
        kind: float.number(),
        m,
        d: shape.head_dim,
        w: shape.width(),
        capacity: shape.capacity,
    }
    .launch(driver, shape.grid((m * shape.width()).div_ceil(256)))
}

/// The cached keys and values of one layer, `[b,g,capacity,w]` each; channels beyond the head's are zero.
pub struct LayerRows<'d> {
    pub(super) driver: &'d dyn Driver,
    pub(crate) shape: Shape,
    pub(crate) float: Float,
    pub(crate) keys: Buffer<'d, u8>,
    pub(crate) values: Buffer<'d, u8>,
}

impl<'d> LayerRows<'d> {
    /// Allocates an empty cache for rows of type `float`.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, float: Float) -> Result<Self> {
        let shape = shape.checked()?;
        Ok(Self {
            driver,
            shape,
            float,
            keys: buffer(driver, "cached keys", shape, float)?,
            values: buffer(driver, "cached values", shape, float)?,
        })
    }

    /// Returns the bytes of one padded key and one padded value.
    pub fn bytes_per_position(&self) -> usize {
        2 * self.shape.width() * self.float.bytes()
    }

    /// Copies the first `n` keys and values of KV head `at` to the host, `[n,d]` each; waits for the device.
    pub fn read_head(&self, at: usize, n: usize) -> Result<[Vec<f32>; 2]> {
        let (w, size) = (self.shape.width(), self.float.bytes());
        let read = |buffer: &Buffer<'_, u8>| -> Result<Vec<f32>> {
            let bytes = buffer.read_part(at * self.shape.capacity * w * size, n * w * size)?;
            let mut rows = vec![0.0; n * w];
            self.float.read(&bytes, &mut rows);
            let rows = rows.chunks_exact(w).flat_map(|row| &row[..self.shape.head_dim]);
            Ok(rows.copied().collect())
        };
        Ok([read(&self.keys)?, read(&self.values)?])
    }

    /// Returns the number that stands for the rows' type in the kernels.
    pub(crate) fn kind(&self) -> usize {
        self.float.number()
    }

    /// Replaces, after [`CudaRows::attend`], the output of the marked heads by their attention to the sinks, merged
    /// with `rest`.
    ///
    /// # Numerics
    /// f32 throughout; the merging weights are f64.
    pub(crate) fn join_rest(
        &self,
        attention: &Attention<'_>,
        rest: Rest<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let shape = &self.shape;
        let grid = [shape.query_heads(), 1, 1];
        kernels::JoinRest {
            queries: attention.queries.ptr(),
            keys: self.keys.ptr().cast(),
            values: self.values.ptr().cast(),
            spans: positions.spans.ptr(),
            marked: rest.marked,
            rest: rest.lse,
            sums: rest.sums,
            out: attention.out.ptr(),
            lse: attention.lse.ptr(),
            scale: shape.exponent(),
            kind: self.kind(),
            g: shape.kv_heads,
            r: shape.group,
            d: shape.head_dim,
            w: shape.width(),
            capacity: shape.capacity,
            sinks: rest.sinks,
        }
        .launch(self.driver, grid)
    }
}

impl CudaRows for LayerRows<'_> {
    fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let store = |rows, cache| append(self.driver, &self.shape, self.float, rows, cache, m, positions);
        store(keys, &self.keys)?;
        self.driver.beside(&mut || store(values, &self.values))
    }

    /// # Numerics
    /// Rows of 16 bits: queries and softmax weights are rounded to the rows' type, products are summed in f32. Rows in
    /// f32: f32 throughout.
    fn attend(
        &self,
        attention: &Attention<'_>,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()> {
        let float = self.float;
        if float == Float::F32 {
            let rows = [&self.keys, &self.values].map(|rows| stored(rows, float));
            return attention.step_in_f32(rows, queries, positions, chosen);
        }
        let w = self.shape.width();
        let kernel = kernels::Attend::kernel(float, w)?;
        attention.step(kernel, queries, positions, chosen, |at| {
            kernels::Attend {
                queries: at.queries,
                keys: self.keys.ptr().cast(),
                values: self.values.ptr().cast(),
                spans: at.spans,
                lists: at.lists,
                listed: at.listed,
                outs: at.outs,
                sums: at.sums,
                scale: at.scale,
                r: at.r,
                capacity: at.capacity,
                most: at.most,
            }
            .launch(self.driver, float, w, at.grid)
        })
    }

    fn score_static(&self, scores: &StaticScores<'_>) -> Result<()> {
        scores.launch(self.driver, &self.shape, stored(&self.keys, self.float))
    }

    fn fill(&self, seed: u32) -> Result<()> {
        let n = self.shape.heads() * self.shape.capacity * self.shape.width();
        for (i, buffer) in [&self.keys, &self.values].into_iter().enumerate() {
            fill(self.driver, buffer, n, Random::Float(self.float), seed + i as u32)?;
        }
        Ok(())
    }

    fn plain(&self) -> Option<&LayerRows<'_>> {
        Some(self)
    }
}
