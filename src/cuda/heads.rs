//! Some of the KV heads of a layer, which an index and a cache of their own serve: their rows are gathered from those of all
//! heads, and their attention output is put in its place.

use super::work::{HeadRows, Workspace};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::cuda::Shape;

/// Some of the KV heads of a layer.
pub(super) struct HeadList<'d> {
    /// Their indices in the layer, ascending.
    pub kv_heads: Vec<usize>,
    /// The same on the device.
    list: Buffer<'d, u32>,
}

impl<'d> HeadList<'d> {
    /// Copies the indices to the device.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, kv_heads: Vec<usize>) -> Result<Self> {
        let list: Vec<u32> = kv_heads.iter().map(|head| *head as u32).collect();
        Ok(Self {
            list: Buffer::from_slice(driver, "KV heads", &list)?,
            kv_heads,
        })
    }
}

/// The rows of some KV heads of a layer.
pub(super) struct HeadRoom<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    pub rows: HeadRows<'d>,
    /// Their attention output, `[b m, n r d]`.
    pub attended: Buffer<'d, f32>,
}

impl<'d> HeadRoom<'d> {
    /// Allocates the buffers for `rows` rows of as many KV heads as the shape has.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, rows: usize) -> Result<Self> {
        let kv = shape.kv_heads * shape.head_dim;
        let (what, widths) = ("rows of some heads", [kv * shape.group, kv]);
        Ok(Self {
            driver,
            shape,
            rows: HeadRows::new(driver, what, rows, widths)?,
            attended: Buffer::new(driver, what, rows * widths[0])?,
        })
    }

    /// Takes the heads' rows from those that were projected last, `m` per sequence.
    pub fn gather(&self, work: &Workspace<'_>, heads: &HeadList<'_>, m: usize) -> Result<()> {
        let Shape {
            sequences,
            group,
            head_dim,
            ..
        } = self.shape;
        let (n, values) = (heads.kv_heads.len(), m * head_dim);
        let (all, some) = (&work.heads, &self.rows);
        let gather = |all: &Buffer<'_, f32>, some: &Buffer<'_, f32>, group: usize| {
            kernels::GatherHeads {
                all: all.ptr(),
                list: heads.list.ptr(),
                some: some.ptr(),
                heads: work.sizes.heads.n_kv_heads * group,
                group,
                values,
            }
            .launch(self.driver, [values.div_ceil(256), n * group, sequences])
        };
        gather(&all.q.pre, &some.q.pre, group)?;
        gather(&all.q.rope, &some.q.rope, group)?;
        gather(&all.k.pre, &some.k.pre, 1)?;
        gather(&all.k.rope, &some.k.rope, 1)?;
        gather(&all.v, &some.v, 1)
    }

    /// Puts the attention output of `rows` rows in its place among that of all heads.
    pub fn scatter(&self, work: &Workspace<'_>, heads: &HeadList<'_>, rows: usize) -> Result<()> {
        let (group, d) = (self.shape.group, self.shape.head_dim);
        let own = heads.kv_heads.len() * group * d;
        kernels::ScatterHeads {
            some: self.attended.ptr(),
            list: heads.list.ptr(),
            all: work.attended.ptr(),
            group,
            d,
            own,
            width: work.sizes.attended(),
        }
        .launch(self.driver, [own.div_ceil(256), rows, 1])
    }
}
