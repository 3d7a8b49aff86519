//! Attention over the static set on the device, for caches in host memory.

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::cuda::Workspace;
use crate::error::Result;
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::rows::CudaRows;
use crate::kv::cuda::{Positions, Shape};
use crate::kv::{KvHead, Limits};
use crate::runner::DecodeOptions;

/// The attention over the static set on the device. Each layer keeps a copy of the static set's rows there: first the
/// sinks, then the window as a ring buffer.
pub(super) struct StaticAttention<'d> {
    pub attention: Attention<'d>,
    /// Positions whose last one is the row that is written next.
    pub writing: Positions<'d>,
    /// Positions that cover all filled rows.
    pub reading: Positions<'d>,
    /// The CPU's attention outputs with their log-sum-exps, `[h,d + 1]`.
    pub others: Buffer<'d, f32>,
    sinks: usize,
    window: usize,
}

impl<'d> StaticAttention<'d> {
    /// Allocates the buffers for caches of this shape.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, options: &DecodeOptions) -> Result<Self> {
        let [sinks, window] = [options.limits.sinks, options.limits.window].map(|n| n.min(shape.capacity));
        let shape = Shape {
            capacity: sinks + window,
            ..shape
        }
        .checked()?;
        let limits = Limits::last(shape.capacity);
        let values = shape.query_heads() * (shape.head_dim + 1);
        Ok(Self {
            attention: Attention::new(driver, shape)?,
            writing: Positions::new(driver, shape, limits)?,
            reading: Positions::new(driver, shape, limits)?,
            others: Buffer::new(driver, "partial outputs", values)?,
            sinks,
            window,
        })
    }

    /// Returns the number of rows per layer.
    pub fn rows(&self) -> usize {
        self.sinks + self.window
    }

    /// Returns the row that holds position p.
    fn slot(&self, p: usize) -> usize {
        if p < self.sinks {
            p
        } else {
            self.sinks + (p - self.sinks) % self.window
        }
    }

    /// Begins the step whose token is at position t.
    pub fn advance(&mut self, t: usize) -> Result<()> {
        self.writing.set(&[self.slot(t) as u32 + 1])?;
        let rows = (t + 1).min(self.rows());
        self.reading.set(&[rows as u32])?;
        self.reading.begin(0)
    }

    /// Fills the rows of a layer with the static set of a cache that has `n` positions.
    pub fn fill(
        &mut self,
        rows: &LayerRows<'_>,
        heads: &[KvHead],
        n: usize,
        work: &Workspace<'_>,
    ) -> Result<()> {
        let count = n.min(self.rows());
        let sinks = count.min(self.sinks);
        let mut order: Vec<usize> = (0..sinks).chain(n - (count - sinks)..n).collect();
        order.sort_by_key(|p| self.slot(*p));
        put_rows(heads, &order, work)?;
        self.writing.set(&[count as u32])?;
        rows.append(&work.heads.k.rope, &work.heads.v, count, &self.writing)
    }
}

/// Copies the cached rows at the given positions, `[g,positions,d]`, to the keys and values of a workspace.
pub(super) fn put_rows(heads: &[KvHead], positions: &[usize], work: &Workspace<'_>) -> Result<()> {
    let mut scratch = vec![0.0; work.sizes.heads.head_dim];
    for (to, is_key) in [(&work.heads.k.rope, true), (&work.heads.v, false)] {
        let mut rows = Vec::new();
        for kv in heads {
            let from = if is_key { kv.keys() } else { kv.values() };
            for p in positions {
                rows.extend_from_slice(from.row(*p, &mut scratch));
            }
        }
        to.send(&rows)?;
    }
    Ok(())
}
