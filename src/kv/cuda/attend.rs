//! Attention of a decode step over cached rows: all visible ones, or the static set and a [`CudaSelection`].

use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels::{self, Kernel};
use crate::error::{Error, Result};

/// Positions per tile.
const TILE: usize = 64;

/// The kernel that attends rows of any format that does not depend on other rows, in f32.
pub(super) const IN_F32: &Kernel = kernels::AttendRows::KERNEL;

/// Rows as kernels/rows.h describes them.
pub struct Stored<'b> {
    pub rows: Ptr<'b, u8>,
    /// f16.
    pub scales: Option<Ptr<'b, u16>>,
    /// The number of the format.
    pub kind: usize,
}

/// Returns how many blocks share each KV head on a device that runs `places` blocks at a time: as many as let all
/// blocks of the launch run at once. With one block more, that block would run alone, after all others.
pub fn parts(places: usize, heads: usize, tiles: usize) -> usize {
    (places / heads.max(1)).min(tiles).max(1)
}

/// The attention of some query heads to all rows except the sinks, estimated as one partial result per query head.
pub(crate) struct Rest<'b> {
    /// Marks (non-zero) of the query heads that have such a result, `[b,h]`, u32.
    pub marked: Ptr<'b, u32>,
    /// Log-sum-exp over the rows, `[b,h]`, f32.
    pub lse: Ptr<'b, f32>,
    /// Sums of the rows' keys and of their values, `[b,g,2,d]`, f64; the output is the mean value.
    pub sums: Ptr<'b, f64>,
    /// Number of first positions that are left out.
    pub sinks: usize,
}

/// Returns the dynamic shared memory of a block that attends in f32, in bytes.
pub(super) fn f32_bytes(shape: &Shape) -> usize {
    let (w, r) = (shape.width(), shape.group);
    4 * (r * w + TILE * (w + 1) + r * TILE)
}

/// A kernel that attends, and how many of its blocks the device runs at the same time.
pub(super) struct KernelPlaces {
    pub kernel: &'static Kernel,
    pub places: usize,
}

/// What the kernel of every format takes from a step. Its blocks leave their results in `outs` and `sums`.
pub(super) struct Launched<'b> {
    /// Padded queries, `[b,h,w]`.
    pub queries: Ptr<'b, f32>,
    pub spans: Ptr<'b, u32>,
    /// The chosen positions, `[b,g,most]`; without them, the kernel attends everything visible.
    pub lists: Option<Ptr<'b, u32>>,
    /// How many there are, `[b,g]`.
    pub listed: Option<Ptr<'b, u32>>,
    pub most: usize,
    pub outs: Ptr<'b, f32>,
    pub sums: Ptr<'b, f32>,
    /// The factor that turns a dot product into an exponent of base 2.
    pub scale: f32,
    pub r: usize,
    pub capacity: usize,
    pub grid: [usize; 3],
}

/// The buffers of a step's attention; all layers of a shape share them.
pub struct Attention<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    /// Most blocks that share a KV head, for each kernel, by its name.
    parts: Vec<(&'static str, usize)>,
    /// Padded queries, `[b,h,w]`.
    pub(super) queries: Buffer<'d, f32>,
    /// Output of each block, `[b,g,parts,r,w]`.
    outs: Buffer<'d, f32>,
    /// Maximum and sum of exponentials of each block, `[b,g,parts,r,2]`.
    sums: Buffer<'d, f32>,
    /// Attention output, `[b,h,w]`.
    pub out: Buffer<'d, f32>,
    /// Log-sum-exps of the scaled scores, `[b,h]`.
    pub lse: Buffer<'d, f32>,
}

impl<'d> Attention<'d> {
    /// Allocates the buffers of one step with any of these kernels.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub(super) fn with(driver: &'d dyn Driver, shape: Shape, kernels: &[KernelPlaces]) -> Result<Self> {
        let shape = shape.checked()?;
        let (h, w) = (shape.query_heads(), shape.width());
        let tiles = shape.capacity.div_ceil(TILE);
        let of = |kernel: &KernelPlaces| (kernel.kernel.name, parts(kernel.places, shape.heads(), tiles));
        let by_kernel: Vec<(&str, usize)> = kernels.iter().map(of).collect();
        let parts = by_kernel.iter().map(|(_, parts)| *parts).max().unwrap_or(1);
        Ok(Self {
            driver,
            shape,
            parts: by_kernel,
            queries: Buffer::new(driver, "queries", h * w)?,
            outs: Buffer::new(driver, "partial outputs", h * parts * w)?,
            sums: Buffer::new(driver, "partial sums", h * parts * 2)?,
            out: Buffer::new(driver, "attention output", h * w)?,
            lse: Buffer::new(driver, "log-sum-exps", h)?,
        })
    }

    /// Returns the shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Attends rotated queries `[b,h,d]` over the static set and the chosen positions, or over all visible ones:
    /// `launch` starts this kernel.
    ///
    /// # Errors
    /// A kernel that the buffers are not for; what `launch` returns.
    pub(super) fn step(
        &self,
        kernel: &Kernel,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
        launch: impl FnOnce(Launched<'_>) -> Result<()>,
    ) -> Result<()> {
        let shape = &self.shape;
        let parts = self.begin(kernel, queries, positions, chosen)?;
        launch(Launched {
            queries: self.queries.ptr(),
            spans: positions.spans.ptr(),
            lists: chosen.map(|to| to.lists.ptr()),
            listed: chosen.map(|to| to.listed.ptr()),
            most: chosen.map_or(0, |to| to.most),
            outs: self.outs.ptr(),
            sums: self.sums.ptr(),
            scale: shape.exponent(),
            r: shape.group,
            capacity: shape.capacity,
            grid: shape.grid(parts),
        })?;
        self.merge(parts)
    }

    /// As [`Attention::step`], over keys and values that [`IN_F32`] reads.
    pub(super) fn step_in_f32(
        &self,
        [keys, values]: [Stored<'_>; 2],
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()> {
        let shape = &self.shape;
        self.step(IN_F32, queries, positions, chosen, |at| {
            kernels::AttendRows {
                queries: at.queries,
                keys: keys.rows.cast(),
                key_scales: keys.scales,
                values: values.rows.cast(),
                value_scales: values.scales,
                spans: at.spans,
                lists: at.lists,
                listed: at.listed,
                outs: at.outs,
                sums: at.sums,
                scale: at.scale,
                key_kind: keys.kind,
                value_kind: values.kind,
                r: at.r,
                d: shape.head_dim,
                capacity: at.capacity,
                most: at.most,
                w: shape.width(),
            }
            .launch(self.driver, at.grid, f32_bytes(shape))
        })
    }

    /// Pads the queries, and returns how many blocks share a KV head.
    fn begin(
        &self,
        kernel: &Kernel,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<usize> {
        let (shape, w) = (&self.shape, self.shape.width());
        let n = shape.query_heads();
        // Nothing else in a step uses the padded queries before the attention.
        self.driver.beside(&mut || {
            kernels::PadRows {
                rows: queries.ptr(),
                out: self.queries.ptr(),
                n,
                d: shape.head_dim,
                w,
            }
            .launch(self.driver, [(n * w).div_ceil(256), 1, 1])
        })?;
        // There are no more blocks than tiles.
        let limits = &positions.limits;
        let most = match chosen {
            Some(chosen) => chosen.most + limits.sinks + limits.window,
            None => self.shape.capacity,
        };
        let name = kernel.name;
        let all = self.parts.iter().find(|(of, _)| *of == name);
        let unknown = || Error::internal(format!("CUDA: attention with the kernel {name}"));
        let (_, all) = all.ok_or_else(unknown)?;
        Ok((*all).min(most.min(shape.capacity).div_ceil(TILE)).max(1))
    }

    /// Merges the partial results of the blocks that share a KV head.
    fn merge(&self, parts: usize) -> Result<()> {
        let (shape, w) = (&self.shape, self.shape.width());
        let n = shape.query_heads();
        kernels::MergeParts {
            outs: self.outs.ptr(),
            sums: self.sums.ptr(),
            out: self.out.ptr(),
            lse: self.lse.ptr(),
            parts,
            r: shape.group,
            w,
        }
        .launch(self.driver, [n, 1, 1])
    }

    /// Copies the outputs to the host, `[b,h,d]`; waits for the device.
    pub fn output(&self) -> Result<Vec<f32>> {
        let rows = self.out.read()?;
        let rows = rows.chunks(self.shape.width());
        Ok(rows
            .flat_map(|row| &row[..self.shape.head_dim])
            .copied()
            .collect())
    }

    /// Copies the outputs to rows `[b,h d]`.
    pub fn output_rows(&self, rows: &Buffer<'_, f32>) -> Result<()> {
        let (n, w, d) = (self.shape.query_heads(), self.shape.width(), self.shape.head_dim);
        kernels::NarrowRows {
            rows: self.out.ptr(),
            out: rows.ptr(),
            n: n * d,
            w,
            d,
        }
        .launch(self.driver, [(n * d).div_ceil(256), 1, 1])
    }

    /// Merges the outputs with partial results over other positions, `[b,h,d + 1]` with the log-sum-exp last, into rows
    /// `[b,h d]`.
    pub fn join_rows(&self, others: &Buffer<'_, f32>, rows: &Buffer<'_, f32>) -> Result<()> {
        let (n, w, d) = (self.shape.query_heads(), self.shape.width(), self.shape.head_dim);
        kernels::JoinOutputs {
            ours: self.out.ptr(),
            ours_lse: self.lse.ptr(),
            others: others.ptr(),
            out: rows.ptr(),
            n,
            w,
            d,
        }
        .launch(self.driver, [n.div_ceil(8), 1, 1])
    }
}
