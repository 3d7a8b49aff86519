//! Exact attention of a prompt, or of a piece of one, over the cached rows.

use super::attend::LayerRows;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{self, Arg, Driver};
use crate::compute::cuda::kernels::shared;
use crate::error::{Error, Result};
use crate::float::Float;

/// Rows of a block and keys of a tile on the tensor cores.
const ROWS: usize = 128;
/// Both in f32.
const SIDE: usize = 64;

/// The m last positions of a sequence, and which positions they see.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Number of the sequence in the cache.
    pub sequence: usize,
    /// The first one's position.
    pub first: usize,
    /// How many there are, m.
    pub rows: usize,
    /// A position t sees t - W + 1 to t; `None` = 0 to t.
    pub window: Option<usize>,
}

/// Causal grouped-query attention of a piece, whose own keys and values are in the cache already.
///
/// # Shapes
/// queries `[h,m,d]`, rotated; out `[m,h d]`, head-major within a row.
///
/// # Numerics
/// Rows of 16 bits: queries and softmax weights are rounded to the rows' type, products are summed in f32; the
/// softmax is taken tile by tile with a running maximum. f32 rows: f32 throughout.
///
/// # Errors
/// Positions that the cache has no room for, buffers that are too short, a window of nothing; a launch that failed.
pub fn attend(
    driver: &dyn Driver,
    queries: &Buffer<'_, f32>,
    rows: &LayerRows<'_>,
    piece: Piece,
    out: &Buffer<'_, f32>,
) -> Result<()> {
    let (shape, m) = (&rows.shape, piece.rows);
    let (h, d, w) = (shape.kv_heads * shape.group, shape.head_dim, shape.width());
    let fits = piece.sequence < shape.sequences
        && piece.first + m <= shape.capacity
        && m.div_ceil(SIDE) <= 65_535
        && piece.window != Some(0);
    if !fits || queries.len().min(out.len()) < h * m * d {
        let (queries, out) = (queries.len(), out.len());
        return Err(Error::failed(format!(
            "CUDA: {queries} queries and {out} outputs for {piece:?} of {shape:?}"
        )));
    }
    // A window beyond the capacity hides nothing.
    let window = piece.window.filter(|w| *w < shape.capacity).unwrap_or(0);
    let mut args = vec![
        queries.arg(),
        rows.keys.arg(),
        rows.values.arg(),
        out.arg(),
        Arg::f32(std::f32::consts::LOG2_E / (d as f32).sqrt()),
        Arg::u32(m),
        Arg::u32(d),
        Arg::u32(shape.group),
        Arg::u32(shape.capacity),
        Arg::u32(piece.sequence * shape.kv_heads),
        Arg::u32(piece.first),
        Arg::u32(window),
    ];
    if rows.float == Float::F32 {
        args.push(Arg::u32(w));
        let (grid, shared) = ([h, m.div_ceil(SIDE), 1], shared::prefill_float(w));
        return driver::launch_with(driver, "prefill_float", grid, shared, &args);
    }
    let grid = [h, m.div_ceil(ROWS), 1];
    driver::launch_blocks(
        driver,
        kernel(rows.float, w),
        grid,
        128,
        shared::prefill(w),
        &args,
    )
}

fn kernel(float: Float, w: usize) -> &'static str {
    match (float == Float::Bf16, w) {
        (false, 64) => "prefill_half_64",
        (false, 80) => "prefill_half_80",
        (false, 96) => "prefill_half_96",
        (false, _) => "prefill_half_128",
        (true, 64) => "prefill_bfloat_64",
        (true, 80) => "prefill_bfloat_80",
        (true, 96) => "prefill_bfloat_96",
        (true, _) => "prefill_bfloat_128",
    }
}
