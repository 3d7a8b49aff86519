//! The search for candidate centroids on the tensor cores, with rows and centroids in f16.

use super::super::buffer::{Buffer, Ptr};
use super::super::kernels;
use super::super::points::PointRows;
use super::{Clustering, TILE, WARPS};
use crate::error::Result;

/// Bytes of one slab of `nearest_fast`, `[TILE,64]` in f16. `STAGES` slabs of centroids are in flight.
const SLAB_BYTES: usize = TILE * 64 * 2;
const STAGES: usize = 4;
/// The largest row width w that `nearest_fast` takes.
const FAST_WIDTH: usize = 256;
const _: () = assert!(shared_bytes(FAST_WIDTH) == kernels::NearestFast::KERNEL.shared_bytes);

/// The inputs and results of the search on the tensor cores.
pub struct Fast<'d> {
    /// The rows in f16, `[n,w]`.
    pub rows: Buffer<'d, u16>,
    /// Two norms per row.
    pub norms: Buffer<'d, f32>,
    /// The centroids in f16, `[capacity,w]`.
    pub centroids: Buffer<'d, u16>,
    /// The scaled biases.
    pub biases: Buffer<'d, f32>,
    /// M rounded up to whole tiles.
    pub capacity: usize,
    /// Three bounds over the centroids.
    pub bounds: Buffer<'d, u32>,
    /// The bits of the centroids' largest magnitude.
    pub largest: Buffer<'d, u32>,
    /// Four candidates per row.
    pub candidates: Buffer<'d, u64>,
    /// The rows for which the candidates do not suffice.
    pub list: Buffer<'d, u32>,
    /// The number of rows in `list`.
    pub listed: Buffer<'d, u32>,
}

impl<'d> Fast<'d> {
    /// Makes the buffers, and rounds the rows to f16; `None` if the device or the row width does not allow the search
    /// on the tensor cores.
    pub fn new(rows: &PointRows<'d>, size: usize, largest: &Buffer<'d, u32>) -> Result<Option<Self>> {
        let (driver, b, n, w) = (rows.driver, rows.b, rows.n, rows.w);
        let fits = w <= FAST_WIDTH && shared_bytes(w) <= driver.shared_bytes();
        if !fits || !driver.searches_on_tensor_cores() {
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
        rows.heads().halve(largest, &fast.rows, &fast.norms)?;
        Ok(Some(fast))
    }
}

impl Clustering<'_> {
    /// Finds the candidates of each row among the centroids in range, at most `most` per head.
    pub(super) fn find_candidates(
        &self,
        rows: &PointRows,
        fast: &Fast,
        most: usize,
        scores: Option<Ptr<'_, f32>>,
    ) -> Result<()> {
        let (size, capacity) = (self.size, fast.capacity);
        let (n, w) = (rows.n, rows.w);
        fast.largest.zero()?;
        let blocks = (most * rows.w).div_ceil(1 << 12);
        kernels::Largest {
            rows: self.centroids.ptr(),
            out: fast.largest.ptr(),
            ranges: Some(self.ranges.ptr()),
            n,
            stride: size,
            w,
        }
        .launch(rows.driver, rows.grid([blocks, 1]))?;
        fast.bounds.zero()?;
        let padded = most.next_multiple_of(TILE);
        kernels::HalveCentroids {
            centroids: self.centroids.ptr(),
            ranges: self.ranges.ptr(),
            largest: self.largest.ptr(),
            largest_centroid: fast.largest.ptr(),
            halves: fast.centroids.ptr(),
            biases: fast.biases.ptr(),
            bounds: fast.bounds.ptr(),
            w,
            size,
            capacity,
        }
        .launch(rows.driver, rows.grid([padded / WARPS, 1]))?;
        let grid = [rows.n.div_ceil(TILE), rows.b, 1];
        kernels::NearestFast {
            rows: fast.rows.ptr(),
            norms: fast.norms.ptr(),
            centroids: fast.centroids.ptr(),
            biases: fast.biases.ptr(),
            bounds: fast.bounds.ptr(),
            ranges: self.ranges.ptr(),
            largest: self.largest.ptr(),
            largest_centroid: fast.largest.ptr(),
            scores,
            candidates: fast.candidates.ptr(),
            n,
            w,
            capacity,
        }
        .launch(rows.driver, grid, shared_bytes(rows.w))
    }
}

/// Returns the shared memory, in bytes, of a block of `nearest_fast` or `nearest_codewords`: the slabs of its rows and
/// the slabs of centroids in flight.
pub const fn shared_bytes(w: usize) -> usize {
    (w.div_ceil(64) + STAGES) * SLAB_BYTES
}
