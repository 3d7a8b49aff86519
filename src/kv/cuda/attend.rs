//! Attention of one token over cached rows: all of them, or the static set and a [`Selection`].

use half::{bf16, f16};

use super::packed::PackedLayer;
use super::prefill;
use super::{Positions, Selection, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{self, Arg, Driver};
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels::shared;
use crate::error::Result;
use crate::float::Float;

/// Threads of a block, and the positions of a tile.
const THREADS: usize = 128;
const TILE: usize = 64;
/// Blocks per processor that hide each other's waiting.
const BLOCKS_EACH: usize = 3;

/// The cached keys and values of one layer, `[b,g,capacity,w]` each; channels beyond the head's are zeros.
pub struct LayerRows<'d> {
    driver: &'d dyn Driver,
    pub(crate) shape: Shape,
    pub(crate) float: Float,
    pub(crate) keys: Buffer<'d, u8>,
    pub(crate) values: Buffer<'d, u8>,
}

impl<'d> LayerRows<'d> {
    /// Room for rows of a type.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, float: Float) -> Result<Self> {
        let shape = shape.checked()?;
        let bytes = shape.heads() * shape.capacity * shape.width() * bytes_of(float);
        Ok(Self {
            driver,
            shape,
            float,
            keys: Buffer::new(driver, "cached keys", bytes)?,
            values: Buffer::new(driver, "cached values", bytes)?,
        })
    }

    /// Random rows, for a benchmark.
    pub fn fill(&self, seed: u32) -> Result<()> {
        let n = self.shape.heads() * self.shape.capacity * self.shape.width();
        for (i, buffer) in [&self.keys, &self.values].into_iter().enumerate() {
            fill(self.driver, buffer, n, Random::Float(self.float), seed + i as u32)?;
        }
        Ok(())
    }

    /// Bytes of a key and a value.
    pub fn bytes_per_position(&self) -> usize {
        2 * self.shape.width() * bytes_of(self.float)
    }

    /// The last `m` positions' rows, `[b,g,m,d]` each; `positions` counts them already.
    pub fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let shape = &self.shape;
        let grid = [(m * shape.width()).div_ceil(256), shape.kv_heads, shape.sequences];
        for (rows, cache) in [(keys, &self.keys), (values, &self.values)] {
            let args = [
                rows.arg(),
                cache.arg(),
                positions.lens.arg(),
                Arg::u32(self.kind()),
                Arg::u32(m),
                Arg::u32(shape.head_dim),
                Arg::u32(shape.width()),
                Arg::u32(shape.capacity),
            ];
            driver::launch(self.driver, "append_rows", grid, &args)?;
        }
        Ok(())
    }

    /// The first `n` keys and values of KV head number `at`, `[n,d]` each; waits for the device.
    pub fn read_head(&self, at: usize, n: usize) -> Result<[Vec<f32>; 2]> {
        let (w, size) = (self.shape.width(), bytes_of(self.float));
        let read = |buffer: &Buffer<'_, u8>| -> Result<Vec<f32>> {
            let bytes = buffer.read_part(at * self.shape.capacity * w * size, n * w * size)?;
            let rows = bytes.chunks_exact(w * size);
            let values = rows.flat_map(|row| row.chunks_exact(size).take(self.shape.head_dim));
            Ok(values.map(|x| widened(self.float, x)).collect())
        };
        Ok([read(&self.keys)?, read(&self.values)?])
    }

    /// Attends a prompt's `m` queries `[h,m,d]` at the positions from `first` on, whose rows are there, with the
    /// model's own sliding window; out `[m,h d]`. One sequence.
    ///
    /// # Errors
    /// Positions beyond the capacity.
    pub fn attend_prompt(
        &self,
        queries: &Buffer<'_, f32>,
        first: usize,
        m: usize,
        window: Option<usize>,
        out: &Buffer<'_, f32>,
    ) -> Result<()> {
        let piece = prefill::Piece {
            sequence: 0,
            first,
            rows: m,
            window,
        };
        prefill::attend(self.driver, queries, self, piece, out)
    }

    /// The type of the rows, as kernels number it.
    pub(crate) fn kind(&self) -> usize {
        match self.float {
            Float::F32 => 0,
            Float::F16 => 1,
            Float::Bf16 => 2,
        }
    }

    fn kernel(&self) -> &'static str {
        match (self.float, self.shape.width()) {
            (Float::F32, _) => "attend_float",
            (Float::F16, 64) => "attend_half_64",
            (Float::F16, 80) => "attend_half_80",
            (Float::F16, 96) => "attend_half_96",
            (Float::F16, _) => "attend_half_128",
            (Float::Bf16, 64) => "attend_bfloat_64",
            (Float::Bf16, 80) => "attend_bfloat_80",
            (Float::Bf16, 96) => "attend_bfloat_96",
            (Float::Bf16, _) => "attend_bfloat_128",
        }
    }

    fn shared_bytes(&self) -> usize {
        let (w, r) = (self.shape.width(), self.shape.group);
        match self.float {
            Float::F32 => 4 * (r * w + TILE * (w + 1) + r * TILE),
            Float::F16 | Float::Bf16 => shared::attend(w),
        }
    }
}

/// A number of a row, from its bytes.
fn widened(float: Float, bytes: &[u8]) -> f32 {
    match (float, bytes) {
        (Float::F32, &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
        (Float::F16, &[a, b]) => f16::from_le_bytes([a, b]).to_f32(),
        (Float::Bf16, &[a, b]) => bf16::from_le_bytes([a, b]).to_f32(),
        _ => f32::NAN,
    }
}

fn bytes_of(float: Float) -> usize {
    match float {
        Float::F32 => 4,
        Float::F16 | Float::Bf16 => 2,
    }
}

/// What some query heads attend besides the sinks, as one result over all that is no sink.
pub(crate) struct Rest {
    /// Which heads, `[b,h]`, u32.
    pub marked: Arg,
    /// Its log-sum-exp, `[b,h]`, f32.
    pub lse: Arg,
    /// Sums of the keys and of the values of its rows, `[b,g,2,d]`, f64; its output is the mean value.
    pub sums: Arg,
    /// First positions that it leaves out.
    pub sinks: Arg,
}

/// Where a step's attention is computed; one for all layers of a shape.
pub struct Attention<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    /// Most blocks that share a KV head.
    parts: usize,
    /// `[b,h,w]`.
    queries: Buffer<'d, f32>,
    /// `[b,g,parts,r,w]`.
    outs: Buffer<'d, f32>,
    /// `[b,g,parts,r,2]`.
    sums: Buffer<'d, f32>,
    /// `[b,h,w]`.
    out: Buffer<'d, f32>,
    /// `[b,h]`.
    lse: Buffer<'d, f32>,
}

impl<'d> Attention<'d> {
    /// Room for one step.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let (h, w) = (shape.query_heads(), shape.width());
        let tiles = shape.capacity.div_ceil(TILE);
        let parts = (driver.multiprocessors() * BLOCKS_EACH).div_ceil(shape.heads());
        let parts = parts.min(tiles);
        Ok(Self {
            driver,
            shape,
            parts,
            queries: Buffer::new(driver, "queries", h * w)?,
            outs: Buffer::new(driver, "partial outputs", h * parts * w)?,
            sums: Buffer::new(driver, "partial sums", h * parts * 2)?,
            out: Buffer::new(driver, "attention output", h * w)?,
            lse: Buffer::new(driver, "log-sum-exps", h)?,
        })
    }

    /// Its shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Attends rotated queries `[b,h,d]` over the static set and what was chosen, or over everything visible.
    ///
    /// # Numerics
    /// Rows of 16 bits: queries and softmax weights are rounded to the rows' type, products are summed in f32. f32
    /// rows: f32 throughout.
    pub fn attend(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        chosen: Option<&Selection<'_>>,
    ) -> Result<()> {
        let w = self.shape.width();
        let (parts, [lists, listed, most]) = self.begin(queries, positions, chosen)?;
        let mut args = vec![
            self.queries.arg(),
            rows.keys.arg(),
            rows.values.arg(),
            positions.spans.arg(),
            lists,
            listed,
            self.outs.arg(),
            self.sums.arg(),
            self.shape.exponent(),
            Arg::u32(self.shape.group),
            Arg::u32(self.shape.capacity),
            most,
        ];
        if rows.float == Float::F32 {
            args.push(Arg::u32(w));
        }
        self.run(rows.kernel(), parts, rows.shared_bytes(), &args)
    }

    /// The same over a 2-bit cache.
    ///
    /// # Numerics
    /// Rows are dequantised to f16, keys around the centre and relative to their channel's largest magnitude; queries
    /// take up that scale and are brought to at most 1 before they are rounded to f16. Weights in f16, sums in f32.
    pub fn attend_packed(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &PackedLayer<'_>,
        positions: &Positions<'_>,
        chosen: Option<&Selection<'_>>,
    ) -> Result<()> {
        let w = self.shape.width();
        let (parts, [lists, listed, most]) = self.begin(queries, positions, chosen)?;
        let signs = &rows.signs;
        let args = [
            self.queries.arg(),
            signs.signs.arg(),
            rows.bits[0].arg(),
            rows.bits[1].arg(),
            rows.params[0].arg(),
            rows.params[1].arg(),
            signs.centre.arg(),
            rows.alpha.arg(),
            signs.full.arg(),
            signs.full_count.arg(),
            rows.full[0].arg(),
            rows.full[1].arg(),
            positions.spans.arg(),
            lists,
            listed,
            self.outs.arg(),
            self.sums.arg(),
            self.shape.exponent(),
            Arg::u32(self.shape.group),
            Arg::u32(self.shape.head_dim),
            Arg::u32(signs.pitch()),
            Arg::u32(self.shape.capacity),
            most,
            Arg::u32(usize::from(rows.is_signed)),
        ];
        let kernel = match w {
            64 => "attend_packed_64",
            80 => "attend_packed_80",
            96 => "attend_packed_96",
            _ => "attend_packed_128",
        };
        self.run(kernel, parts, shared::attend(w), &args)
    }

    /// Pads the queries. How many blocks share a KV head, and what the kernels are told of the choice.
    fn begin(
        &self,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&Selection<'_>>,
    ) -> Result<(usize, [Arg; 3])> {
        let (shape, w) = (&self.shape, self.shape.width());
        let n = shape.query_heads();
        let args = [
            queries.arg(),
            self.queries.arg(),
            Arg::u32(n),
            Arg::u32(shape.head_dim),
            Arg::u32(w),
        ];
        driver::launch(self.driver, "pad_rows", [(n * w).div_ceil(256), 1, 1], &args)?;
        // More blocks than there are tiles would have nothing to do.
        let limits = &positions.limits;
        let most = match chosen {
            Some(chosen) => chosen.most + limits.sinks + limits.window,
            None => self.shape.capacity,
        };
        let parts = self.parts.min(most.min(shape.capacity).div_ceil(TILE)).max(1);
        let null = Arg::address(0);
        let lists = chosen.map_or([null, null], |chosen| [chosen.lists.arg(), chosen.listed.arg()]);
        let most = Arg::u32(chosen.map_or(0, |chosen| chosen.most));
        Ok((parts, [lists[0], lists[1], most]))
    }

    /// Attends in parts, and puts these together.
    fn run(&self, kernel: &'static str, parts: usize, shared_bytes: usize, args: &[Arg]) -> Result<()> {
        let (shape, w) = (&self.shape, self.shape.width());
        let n = shape.query_heads();
        let grid = [parts, shape.kv_heads, shape.sequences];
        driver::launch_blocks(self.driver, kernel, grid, THREADS, shared_bytes, args)?;
        let args = [
            self.outs.arg(),
            self.sums.arg(),
            self.out.arg(),
            self.lse.arg(),
            Arg::u32(parts),
            Arg::u32(shape.group),
            Arg::u32(w),
        ];
        driver::launch_blocks(self.driver, "merge_parts", [n, 1, 1], THREADS, 0, &args)
    }

    /// After [`Attention::attend`]: the marked heads attend the sinks alone, joined with a result over everything else.
    ///
    /// # Numerics
    /// f32 throughout, the joining weights in f64.
    pub(crate) fn join_rest(
        &self,
        rest: Rest,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let shape = &self.shape;
        let args = [
            self.queries.arg(),
            rows.keys.arg(),
            rows.values.arg(),
            positions.spans.arg(),
            rest.marked,
            rest.lse,
            rest.sums,
            self.out.arg(),
            self.lse.arg(),
            shape.exponent(),
            Arg::u32(rows.kind()),
            Arg::u32(shape.kv_heads),
            Arg::u32(shape.group),
            Arg::u32(shape.head_dim),
            Arg::u32(shape.width()),
            Arg::u32(shape.capacity),
            rest.sinks,
        ];
        let grid = [shape.query_heads(), 1, 1];
        driver::launch_blocks(self.driver, "join_rest", grid, THREADS, 0, &args)
    }

    /// Copies the outputs to rows `[b,h d]`.
    pub fn output_rows(&self, rows: &Buffer<'_, f32>) -> Result<()> {
        let (n, w, d) = (self.shape.query_heads(), self.shape.width(), self.shape.head_dim);
        let args = [
            self.out.arg(),
            rows.arg(),
            Arg::u64(n * d),
            Arg::u32(w),
            Arg::u32(d),
        ];
        driver::launch(self.driver, "narrow_rows", [(n * d).div_ceil(256), 1, 1], &args)
    }

    /// Joins the outputs with those over other positions, `[b,h,d + 1]`, the log-sum-exp last; to rows `[b,h d]`.
    pub fn join_rows(&self, others: &Buffer<'_, f32>, rows: &Buffer<'_, f32>) -> Result<()> {
        let (n, w, d) = (self.shape.query_heads(), self.shape.width(), self.shape.head_dim);
        let args = [
            self.out.arg(),
            self.lse.arg(),
            others.arg(),
            rows.arg(),
            Arg::u32(n),
            Arg::u32(w),
            Arg::u32(d),
        ];
        driver::launch(self.driver, "join_outputs", [n.div_ceil(8), 1, 1], &args)
    }

    /// The outputs, `[b,h,d]`; waits for the device.
    pub fn output(&self) -> Result<Vec<f32>> {
        let rows = self.out.read()?;
        let rows = rows.chunks(self.shape.width());
        Ok(rows
            .flat_map(|row| &row[..self.shape.head_dim])
            .copied()
            .collect())
    }

    /// The log-sum-exps of the scaled scores, `[b,h]`; waits for the device.
    pub fn lse(&self) -> Result<Vec<f32>> {
        self.lse.read()
    }
}
