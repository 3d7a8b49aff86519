//! Exact attention of a prompt, or of a chunk of one, over the cached rows.

use super::float::LayerRows;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::float::Float;

/// On tensor cores: query rows per block.
const ROWS: usize = 128;
/// In f32: query rows per block and keys per tile.
const SIDE: usize = 64;

/// A chunk of a prompt: the last m positions of a sequence, and how far back they see.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Index of the sequence in the cache.
    pub sequence: usize,
    /// Position of the first row.
    pub first: usize,
    /// Number of rows, m.
    pub rows: usize,
    /// Sliding window W: position t sees t - W + 1 to t; `None` = 0 to t.
    pub window: Option<usize>,
}

/// Computes causal grouped-query attention of a chunk whose keys and values are cached already.
///
/// # Shapes
/// queries `[h,m,d]`, rotated; out `[m,h d]`, head-major within a row.
///
/// # Numerics
/// Rows of 16 bits: queries and softmax weights are rounded to the rows' type, products are summed in
/// f32, the softmax runs tile by tile with a running maximum. Rows in f32: f32 throughout.
///
/// # Errors
/// Positions beyond the capacity; buffers that are too short; a window of 0; a failed launch.
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
        return Err(Error::internal(format!(
            "CUDA: {queries} queries and {out} outputs for {piece:?} of {shape:?}"
        )));
    }
    // A window of at least the capacity hides nothing.
    let window = piece.window.filter(|w| *w < shape.capacity).unwrap_or(0);
    let (keys, values) = (rows.keys.ptr(), rows.values.ptr());
    let (scale, r, capacity) = (shape.exponent(), shape.group, shape.capacity);
    let (queries, out, head_at) = (queries.ptr(), out.ptr(), piece.sequence * shape.kv_heads);
    // The arguments that both kernels take, and those that only one of them takes.
    macro_rules! arguments {
        ($kernel:ident $(, $more:ident)?) => {
            kernels::$kernel {
                queries,
                keys: keys.cast(),
                values: values.cast(),
                out,
                scale,
                m,
                d,
                r,
                capacity,
                head_at,
                first: piece.first,
                window,
                $($more)?
            }
        };
    }
    let grid = [h, m.div_ceil(ROWS), 1];
    match rows.float {
        Float::F32 => {
            let grid = [h, m.div_ceil(SIDE), 1];
            arguments!(PrefillFloat, w).launch(driver, grid, float_bytes(w))
        }
        float if kernels::Prefill::kernel(float, w)?.shared_bytes > driver.shared_bytes() => {
            arguments!(PrefillNarrow).launch(driver, float, w, grid)
        }
        float => arguments!(Prefill).launch(driver, float, w, grid),
    }
}

impl LayerRows<'_> {
    /// Attends a prompt's `m` queries `[h,m,d]`, at positions from `first` on, whose keys and values are
    /// cached already; `window` is the model's sliding window, out is `[m,h d]`. For a single sequence.
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
        let piece = Piece {
            sequence: 0,
            first,
            rows: m,
            window,
        };
        attend(self.driver, queries, self, piece, out)
    }
}

/// Returns the dynamic shared memory of a `prefill_float` block in bytes: queries, a tile of keys or values,
/// and weights.
const fn float_bytes(w: usize) -> usize {
    (2 * SIDE * (w + 4) + SIDE * (SIDE + 4)) * 4
}

const _: () = assert!(float_bytes(128) == kernels::PrefillFloat::KERNEL.shared_bytes);
