//! Attention of a decode step over cached rows: all visible ones, or the static set and a [`CudaSelection`].

use super::packed::PackedLayer;
use super::prefill;
use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::{Random, fill};
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::float::Float;

/// Positions per tile.
const TILE: usize = 64;

/// The cached keys and values of one layer, `[b,g,capacity,w]` each; channels beyond the head's are zero.
pub struct LayerRows<'d> {
    driver: &'d dyn Driver,
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
        let bytes = shape.heads() * shape.capacity * shape.width() * float.bytes();
        Ok(Self {
            driver,
            shape,
            float,
            keys: Buffer::new(driver, "cached keys", bytes)?,
            values: Buffer::new(driver, "cached values", bytes)?,
        })
    }

    /// Fills the cache with random rows, for a benchmark.
    pub fn fill(&self, seed: u32) -> Result<()> {
        let n = self.shape.heads() * self.shape.capacity * self.shape.width();
        for (i, buffer) in [&self.keys, &self.values].into_iter().enumerate() {
            fill(self.driver, buffer, n, Random::Float(self.float), seed + i as u32)?;
        }
        Ok(())
    }

    /// Returns the bytes of one padded key and one padded value.
    pub fn bytes_per_position(&self) -> usize {
        2 * self.shape.width() * self.float.bytes()
    }

    /// Stores the rows of the last `m` positions, `[b,g,m,d]` each; `positions` counts them already.
    pub fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let shape = &self.shape;
        let grid = shape.grid((m * shape.width()).div_ceil(256));
        let store = |rows: &Buffer<'_, f32>, cache: &Buffer<'_, u8>| {
            kernels::AppendRows {
                rows: rows.ptr(),
                cache: cache.ptr().cast(),
                lens: positions.lens.ptr(),
                kind: self.kind(),
                m,
                d: shape.head_dim,
                w: shape.width(),
                capacity: shape.capacity,
            }
            .launch(self.driver, grid)
        };
        store(keys, &self.keys)?;
        self.driver.beside(&mut || store(values, &self.values))
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
        let piece = prefill::Piece {
            sequence: 0,
            first,
            rows: m,
            window,
        };
        prefill::attend(self.driver, queries, self, piece, out)
    }

    /// Returns the number that stands for the rows' type in the kernels.
    pub(crate) fn kind(&self) -> usize {
        self.float.number()
    }
}

/// Returns the dynamic shared memory of an `attend_float` block, in bytes.
fn float_bytes(shape: &Shape) -> usize {
    let (w, r) = (shape.width(), shape.group);
    4 * (r * w + TILE * (w + 1) + r * TILE)
}

/// Returns how many blocks share each KV head on a device that runs `places` blocks at a time: as many as let all
/// blocks of the launch run at once. With one block more, that block would run alone, after all others.
pub fn parts(places: usize, heads: usize, tiles: usize) -> usize {
    (places / heads.max(1)).min(tiles).max(1)
}

/// What a step's attention reads: rows of a float type, or a 2-bit cache.
#[derive(Clone, Copy, PartialEq)]
enum Source {
    Rows(Float),
    Packed,
}

impl Source {
    const ALL: [Self; 4] = [
        Self::Rows(Float::F32),
        Self::Rows(Float::F16),
        Self::Rows(Float::Bf16),
        Self::Packed,
    ];

    /// Counts the blocks of the source's kernel that the device runs at the same time.
    fn places(self, driver: &dyn Driver, shape: &Shape) -> Result<usize> {
        let (kernel, shared_bytes) = match self {
            Self::Rows(Float::F32) => (kernels::AttendFloat::KERNEL, float_bytes(shape)),
            Self::Rows(float) => {
                let kernel = kernels::Attend::kernel(float, shape.width())?;
                (kernel, kernel.shared_bytes)
            }
            Self::Packed => {
                let kernel = kernels::AttendPacked::kernel(shape.width())?;
                (kernel, kernel.shared_bytes)
            }
        };
        driver.blocks_at_once(kernel, shared_bytes)
    }
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

/// A selection as kernels take it: positions `[b,g,most]`, their number `[b,g]`, and `most`; with `None`, a step
/// attends everything visible.
type Lists<'b> = (Option<Ptr<'b, u32>>, Option<Ptr<'b, u32>>, usize);

fn lists_of<'b>(chosen: Option<&'b CudaSelection<'_>>) -> Lists<'b> {
    chosen.map_or((None, None, 0), |to| {
        (Some(to.lists.ptr()), Some(to.listed.ptr()), to.most)
    })
}

/// The buffers of a step's attention; all layers of a shape share them.
pub struct Attention<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    /// Most blocks that share a KV head, per [`Source`].
    parts: [usize; Source::ALL.len()],
    /// Padded queries, `[b,h,w]`.
    queries: Buffer<'d, f32>,
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
    /// Allocates the buffers of one step.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let (h, w) = (shape.query_heads(), shape.width());
        let tiles = shape.capacity.div_ceil(TILE);
        let mut by_source = [0; Source::ALL.len()];
        for (to, source) in by_source.iter_mut().zip(Source::ALL) {
            *to = parts(source.places(driver, &shape)?, shape.heads(), tiles);
        }
        let parts = by_source.into_iter().max().unwrap_or(1);
        Ok(Self {
            driver,
            shape,
            parts: by_source,
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

    /// Attends rotated queries `[b,h,d]` over the static set and the chosen positions; without a selection,
    /// over all visible ones.
    ///
    /// # Numerics
    /// Rows of 16 bits: queries and softmax weights are rounded to the rows' type, products are summed in
    /// f32. Rows in f32: f32 throughout.
    pub fn attend(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()> {
        let w = self.shape.width();
        let parts = self.begin(Source::Rows(rows.float), queries, positions, chosen)?;
        let (queries, spans) = (self.queries.ptr(), positions.spans.ptr());
        let (lists, listed, most) = lists_of(chosen);
        let (outs, sums, scale) = (self.outs.ptr(), self.sums.ptr(), self.shape.exponent());
        let (r, capacity) = (self.shape.group, self.shape.capacity);
        let (driver, grid) = (self.driver, self.shape.grid(parts));
        // The arguments that both kernels take, and one that only one of them takes.
        macro_rules! arguments {
            ($kernel:ident $(, $more:ident)?) => {
                kernels::$kernel {
                    queries,
                    keys: rows.keys.ptr().cast(),
                    values: rows.values.ptr().cast(),
                    spans,
                    lists,
                    listed,
                    outs,
                    sums,
                    scale,
                    r,
                    capacity,
                    most,
                    $($more)?
                }
            };
        }
        match rows.float {
            Float::F32 => arguments!(AttendFloat, w).launch(driver, grid, float_bytes(&self.shape))?,
            float => arguments!(Attend).launch(driver, float, w, grid)?,
        }
        self.merge(parts)
    }

    /// Attends as [`Attention::attend`], over a 2-bit cache.
    ///
    /// # Numerics
    /// Keys are dequantised to f16 around the center and relative to their channel's largest magnitude.
    /// Queries are multiplied by that magnitude and scaled to at most 1 before they are rounded to f16.
    /// Weights are f16, sums f32.
    pub fn attend_packed(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &PackedLayer<'_>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()> {
        let parts = self.begin(Source::Packed, queries, positions, chosen)?;
        let signs = &rows.signs;
        let (lists, listed, most) = lists_of(chosen);
        kernels::AttendPacked {
            queries: self.queries.ptr(),
            signs: signs.signs.ptr(),
            key_bits: rows.bits[0].ptr().cast(),
            value_bits: rows.bits[1].ptr().cast(),
            key_params: rows.params[0].ptr().cast(),
            value_params: rows.params[1].ptr().cast(),
            centers: signs.centers.ptr(),
            alpha: rows.alpha.ptr(),
            full: signs.full.ptr(),
            full_count: signs.full_count.ptr(),
            full_keys: rows.full[0].ptr().cast(),
            full_values: rows.full[1].ptr().cast(),
            spans: positions.spans.ptr(),
            lists,
            listed,
            outs: self.outs.ptr(),
            sums: self.sums.ptr(),
            scale: self.shape.exponent(),
            r: self.shape.group,
            d: self.shape.head_dim,
            pitch: signs.pitch(),
            capacity: self.shape.capacity,
            most,
            is_signed: usize::from(rows.is_signed),
        }
        .launch(self.driver, self.shape.width(), self.shape.grid(parts))?;
        self.merge(parts)
    }

    /// Pads the queries, and returns how many blocks share a KV head.
    fn begin(
        &self,
        source: Source,
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
        let all = Source::ALL.iter().position(|s| *s == source);
        let all = all.map_or(1, |i| self.parts[i]);
        Ok(all.min(most.min(shape.capacity).div_ceil(TILE)).max(1))
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

    /// Replaces, after [`Attention::attend`], the output of the marked heads by their attention to the sinks, merged
    /// with `rest`.
    ///
    /// # Numerics
    /// f32 throughout; the merging weights are f64.
    pub(crate) fn join_rest(
        &self,
        rest: Rest<'_>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let shape = &self.shape;
        let grid = [shape.query_heads(), 1, 1];
        kernels::JoinRest {
            queries: self.queries.ptr(),
            keys: rows.keys.ptr().cast(),
            values: rows.values.ptr().cast(),
            spans: positions.spans.ptr(),
            marked: rest.marked,
            rest: rest.lse,
            sums: rest.sums,
            out: self.out.ptr(),
            lse: self.lse.ptr(),
            scale: shape.exponent(),
            kind: rows.kind(),
            g: shape.kv_heads,
            r: shape.group,
            d: shape.head_dim,
            w: shape.width(),
            capacity: shape.capacity,
            sinks: rest.sinks,
        }
        .launch(self.driver, grid)
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
