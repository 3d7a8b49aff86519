//! The search on the tensor cores: rows and centroids in f16, and the candidates that it leaves.

use super::super::buffer::Buffer;
use super::super::driver::{Arg, launch_with};
use super::super::points::Rows;
use super::{Clustering, TILE, WARPS};
use crate::error::Result;

/// Bytes of a slab of `nearest_fast`, `[TILE,64]` of f16, and slabs of centroids in flight.
const SLAB_BYTES: usize = TILE * 64 * 2;
const STAGES: usize = 4;
/// The widest rows of `nearest_fast`.
const FAST_WIDTH: usize = 256;
/// Shared memory of a block of `nearest_fast` at the most.
pub const MOST_SHARED_BYTES: usize = shared_bytes(FAST_WIDTH);

/// What the tensor cores work on.
pub struct Fast<'d> {
    /// `[n,w]` of f16, and two norms of each row.
    pub rows: Buffer<'d, u16>,
    pub norms: Buffer<'d, f32>,
    /// `[capacity,w]` of f16, and the scaled biases.
    pub centroids: Buffer<'d, u16>,
    pub biases: Buffer<'d, f32>,
    /// M rounded up to whole tiles.
    pub capacity: usize,
    /// Three bounds over the centroids, and the bits of their largest magnitude.
    pub bounds: Buffer<'d, u32>,
    pub largest: Buffer<'d, u32>,
    /// Four candidates a row, the rows without, and how many of these there are.
    pub candidates: Buffer<'d, u64>,
    pub list: Buffer<'d, u32>,
    pub listed: Buffer<'d, u32>,
}

impl<'d> Fast<'d> {
    /// `None` where the device or the width rule it out.
    pub fn new(rows: &Rows<'d>, size: usize, largest: &Buffer<'d, u32>) -> Result<Option<Self>> {
        let (driver, b, n, w) = (rows.driver, rows.b, rows.n, rows.w);
        if w > FAST_WIDTH || shared_bytes(w) > driver.fast_shared_bytes() {
            return Ok(None);
        }
        let capacity = size.next_multiple_of(TILE);
        let fast = Self {
            rows: Buffer::new(driver, "points in f16", b * n * w)?,
            norms: Buffer::new(driver, "norms", b * n * 2)?,
            centroids: Buffer::new(driver, "centroids in f16", b * capacity * w)?,
            biases: Buffer::new(driver, "norms of centroids", b * capacity)?,
            capacity,
            bounds: Buffer::new(driver, "bounds", b * 3)?,
            largest: Buffer::new(driver, "magnitudes", b)?,
            candidates: Buffer::new(driver, "candidates", b * n)?,
            list: Buffer::new(driver, "lists of rows", b * n)?,
            listed: Buffer::new(driver, "lists of rows", b)?,
        };
        let args = [
            rows.x.arg(),
            largest.arg(),
            fast.rows.arg(),
            fast.norms.arg(),
            Arg::u32(n),
            Arg::u32(w),
        ];
        rows.launch("halve_rows", [n.div_ceil(WARPS), 1], &args)?;
        Ok(Some(fast))
    }
}

impl Clustering<'_> {
    /// The candidates of each row among the centroids in range.
    pub(super) fn find_candidates(&self, rows: &Rows, fast: &Fast, most: usize, scores: Arg) -> Result<()> {
        let (size, capacity) = (Arg::u32(self.size), Arg::u32(fast.capacity));
        let (n, w) = (Arg::u32(rows.n), Arg::u32(rows.w));
        fast.largest.zero()?;
        let args = [
            self.centroids.arg(),
            fast.largest.arg(),
            self.ranges.arg(),
            n,
            size,
            w,
        ];
        let blocks = (most * rows.w).div_ceil(1 << 12);
        rows.launch("largest", [blocks, 1], &args)?;
        fast.bounds.zero()?;
        let args = [
            self.centroids.arg(),
            self.ranges.arg(),
            self.largest.arg(),
            fast.largest.arg(),
            fast.centroids.arg(),
            fast.biases.arg(),
            fast.bounds.arg(),
            w,
            size,
            capacity,
        ];
        let padded = most.next_multiple_of(TILE);
        rows.launch("halve_centroids", [padded / WARPS, 1], &args)?;
        let args = [
            fast.rows.arg(),
            fast.norms.arg(),
            fast.centroids.arg(),
            fast.biases.arg(),
            fast.bounds.arg(),
            self.ranges.arg(),
            self.largest.arg(),
            fast.largest.arg(),
            scores,
            fast.candidates.arg(),
            n,
            w,
            capacity,
        ];
        let grid = [rows.n.div_ceil(TILE), rows.b, 1];
        launch_with(rows.driver, "nearest_fast", grid, shared_bytes(rows.w), &args)
    }
}

/// Shared memory of a block of `nearest_fast` and `nearest_codewords`: the slabs of its rows, and those of centroids in
/// flight.
pub const fn shared_bytes(w: usize) -> usize {
    (w.div_ceil(64) + STAGES) * SLAB_BYTES
}
