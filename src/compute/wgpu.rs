//! Any GPU as a [`Device`], through wgpu: Vulkan, Metal or Direct3D 12.
//!
//! Rows stay in buffers of the adapter; each buffer holds as many rows of one head as a binding may have. The kernels
//! are `shaders/<stem>.wgsl`, one per function of [`super::reference`]. They compute in f32; where a sum must be f64,
//! they return partial sums of up to 256 rows for the host to add. WGSL lets a compiler fuse and reorder arithmetic and
//! does not specify subgroups, so the kernels rely on neither.
//!
//! The host keeps the codes, the distances and the centroids: after each assignment it reads 12 bytes per row,
//! sorts the rows by centroid, and sends the new centroids back.
//!
//! A value that is not finite may come out as any other value: WGSL lets a compiler assume that there are no such
//! values. Only [`Points::square_sum`], which looks at the bits, is sure to find them.

mod clusters;
mod context;
mod kernels;
mod points;

use ndarray::{Array3, ArrayView2, ArrayView3, Axis, s};

use super::device::{Device, Points};
use crate::error::Result;
use context::WgpuContext;
pub use context::WgpuLimits;
use points::WgpuPoints;

/// Rows that the shaders sum in f32 before the host adds the result to the f64 sums.
const BLOCK: usize = 256;
/// Rows, centroids or channels per tile of the shaders.
const TILE: usize = 64;
/// Threads per workgroup.
const THREADS: usize = 256;
/// Bytes of rows and clusters that [`Device::heads_at_once`] aims for: little memory for a GPU, but enough work to keep
/// it busy.
const AT_ONCE_BYTES: usize = 1 << 29;
/// The most heads at once, because each head needs dispatches of its own.
const AT_ONCE: usize = 64;

/// An adapter of wgpu.
pub struct Wgpu {
    context: WgpuContext,
}

impl Wgpu {
    /// Opens the fastest adapter, and uses it within both `limits` and the adapter's own limits.
    ///
    /// # Errors
    /// There is no Vulkan loader, driver or adapter; a shader does not compile.
    pub fn open(limits: WgpuLimits) -> Result<Self> {
        WgpuContext::open(limits).map(|context| Self { context })
    }

    /// Returns whether the adapter is a CPU that emulates a GPU.
    pub fn is_software(&self) -> bool {
        self.context.software
    }

    /// Releases the adapter; every later operation is an error.
    pub fn destroy(&self) {
        self.context.device.destroy();
    }
}

impl Device for Wgpu {
    fn name(&self) -> &'static str {
        "wgpu"
    }

    fn adapter(&self) -> Option<String> {
        Some(self.context.adapter.clone())
    }

    fn heads_at_once(&self, n: usize, d: usize, size: usize) -> usize {
        // The rows count twice because whitening copies them.
        let head = 4 * (2 * d * n + 2 * d * size + 3 * n);
        (AT_ONCE_BYTES / head.max(1)).clamp(1, AT_ONCE)
    }

    fn second_moment(&self, q_rope: ArrayView3<f32>) -> Result<Array3<f64>> {
        let (b, m, d) = q_rope.dim();
        let mut sums = Array3::zeros((b, d, d));
        if m * d == 0 {
            return Ok(sums);
        }
        // As many rows as fit into one buffer, as long as their block sums fit into another.
        let blocks = self.context.capacity(4 * d * d)?;
        let rows = rows_per_buffer(&self.context, 4 * d)?.min(blocks.saturating_mul(BLOCK));
        for start in (0..m).step_by(rows) {
            let q = q_rope.slice(s![.., start..m.min(start + rows), ..]);
            for (mut sum, partial) in sums.outer_iter_mut().zip(self.moment_blocks(q)?) {
                for partial in partial.chunks_exact(d * d) {
                    sum.iter_mut().zip(partial).for_each(|(s, p)| *s += f64::from(*p));
                }
            }
        }
        Ok(sums)
    }

    fn points(&self, x: Array3<f32>) -> Result<Box<dyn Points + '_>> {
        Ok(Box::new(WgpuPoints::new(&self.context, x.view())?))
    }
}

impl Wgpu {
    /// Returns the sum of each block of rows, `[blocks,d,d]` per head.
    fn moment_blocks(&self, q: ArrayView3<f32>) -> Result<Vec<Vec<f32>>> {
        let (_, rows, d) = q.dim();
        let (blocks, tiles) = (rows.div_ceil(BLOCK), d.div_ceil(TILE));
        self.context.work("sum query moments", |batch| {
            let mut partials = Vec::new();
            for q in q.axis_iter(Axis(0)) {
                let q = self.context.upload(&flat(q))?;
                let partial = self.context.buffer((4 * blocks * d * d) as u64)?;
                kernels::SecondMoment {
                    rows,
                    d,
                    q: &q,
                    partial: &partial,
                }
                .run(batch, blocks * tiles * tiles, BLOCK * TILE * TILE);
                partials.push(partial);
            }
            batch.read(&partials)
        })
    }
}

/// Returns how many rows of `bytes` bytes fit into a buffer, rounded down to whole blocks if at least one block fits.
fn rows_per_buffer(context: &WgpuContext, bytes: usize) -> Result<usize> {
    let rows = context.capacity(bytes)?;
    Ok(if rows < BLOCK { rows } else { rows / BLOCK * BLOCK })
}

/// Returns the elements of `x`, row by row.
fn flat(x: ArrayView2<'_, f32>) -> Vec<f32> {
    x.iter().copied().collect()
}
