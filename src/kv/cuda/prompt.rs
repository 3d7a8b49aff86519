//! Builds the signs, the sign centroids and the 2-bit cache from the keys and values of a first prompt.
//!
//! The results are those of [`crate::method::selfindex`] and [`crate::kv::packed`] on the CPU. Cached rows are
//! widened to f32, a few KV heads at a time.

use super::best::Best;
use super::float::LayerRows;
use super::packed::PackedLayer;
use super::signs::{FULL, Signs, check_channels};
use super::{Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::compute::cuda::rows::HeadRows;
use crate::compute::device::Statistic;
use crate::error::{Error, Result};
use crate::kv::packed::{Center, Layout};

/// Most values processed at once, unless one KV head has more.
const MOST_VALUES: usize = 1 << 26;

/// The last queries of a prompt.
#[derive(Clone, Copy)]
pub struct Queries<'a> {
    /// Rotated queries, `[b,h,m,d]`.
    pub rows: &'a Buffer<'a, f32>,
    /// Number of queries per head, m; only the last is used.
    pub m: usize,
}

/// Consecutive KV heads of a sequence that are processed at once.
#[derive(Clone, Copy)]
struct Heads {
    sequence: usize,
    /// Index of the first head among those of all sequences, then the number of heads.
    at: usize,
    count: usize,
    /// Number of positions.
    n: usize,
}

/// The buffers for processing prompts; all layers of a shape share them.
pub struct Prompts<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    /// Number of KV heads processed at once.
    at_once: usize,
    /// Rows in f32, `[heads,capacity,w]`.
    x: Buffer<'d, f32>,
    /// Bits of the largest magnitude, `[heads]`.
    largest: Buffer<'d, u32>,
    /// Sums `[heads,d/4,16,4]` and counts `[heads,d/4,16]` of sign patterns.
    sums: Buffer<'d, u64>,
    counts: Buffer<'d, u32>,
    /// A statistic of each channel, `[heads,w]`.
    statistic: Buffer<'d, f32>,
    /// Visible positions `[b,4]`, and how many of them to choose, `[b]`.
    spans: Buffer<'d, u32>,
    most: Buffer<'d, u32>,
    best: Best<'d>,
}

impl<'d> Prompts<'d> {
    /// Allocates buffers for prompts up to the capacity.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let checked = shape.checked()?;
        Self::with_heads(driver, shape, MOST_VALUES / (checked.capacity * checked.width()))
    }

    /// Allocates buffers that hold `at_once` KV heads at a time.
    ///
    /// # Errors
    /// Those of [`Prompts::new`].
    pub fn with_heads(driver: &'d dyn Driver, shape: Shape, at_once: usize) -> Result<Self> {
        let shape = shape.checked()?;
        let (d, w, b) = (shape.head_dim, shape.width(), shape.sequences);
        check_channels(d)?;
        let at_once = at_once.clamp(1, shape.kv_heads);
        Ok(Self {
            driver,
            shape,
            at_once,
            x: Buffer::new(driver, "rows of a prompt", at_once * shape.capacity * w)?,
            largest: Buffer::new(driver, "magnitudes", at_once)?,
            sums: Buffer::new(driver, "sums of signs", at_once * d * 16)?,
            counts: Buffer::new(driver, "counts of signs", at_once * d * 4)?,
            statistic: Buffer::new(driver, "statistics of channels", at_once * w)?,
            spans: Buffer::new(driver, "spans", b * 4)?,
            most: Buffer::new(driver, "numbers of positions", b)?,
            best: Best::new(driver, shape, FULL)?,
        })
    }

    /// Computes the center and the signs of keys, and chooses the full-precision tokens: those with the
    /// largest products with the last query, averaged over the group.
    ///
    /// # Numerics
    /// The median is exact, a mean is summed in f64. Products are f32; the lower position wins ties.
    ///
    /// # Errors
    /// More full-precision tokens than [`FULL`]; signs of another shape.
    pub fn signs(
        &self,
        rows: &LayerRows<'_>,
        queries: Queries<'_>,
        layout: Layout,
        positions: &Positions<'_>,
        to: &Signs<'_>,
    ) -> Result<()> {
        if layout.full > FULL {
            return Err(Error::unsupported(format!(
                "CUDA: {} positions in full precision; up to {FULL} are supported",
                layout.full
            )));
        }
        self.check(&to.shape)?;
        self.begin_choice(layout.full, positions)?;
        for heads in self.parts(positions) {
            self.widen(rows, &rows.keys, heads, None)?;
            let centers = match layout.center {
                Center::Median => Statistic::Ranked((heads.n - 1) / 2),
                Center::Mean => Statistic::Mean,
            };
            self.fit(heads, centers, &to.centers, 0.0)?;
            to.store(
                self.x.ptr(),
                [heads.at, heads.count, 1],
                [heads.n, self.shape.width()],
                positions.lens.ptr_at(heads.sequence),
            )?;
            self.score(queries, heads)?;
        }
        self.choose_full(layout.full, to)
    }

    /// Computes the centroids of centered keys, `[b,g,d/4,16,4]`, into `to`: the means of the keys that
    /// share a sign pattern. Full-precision tokens are left out, unless few others remain.
    ///
    /// # Numerics
    /// Sums are 64-bit fixed point.
    pub fn centroids(
        &self,
        rows: &LayerRows<'_>,
        signs: &Signs<'_>,
        positions: &Positions<'_>,
        to: &Buffer<'_, f32>,
    ) -> Result<()> {
        self.check(&signs.shape)?;
        let d = self.shape.head_dim;
        for heads in self.parts(positions) {
            self.widen(rows, &rows.keys, heads, Some(signs))?;
            self.clear_full(heads, signs)?;
            self.sums.zero()?;
            self.counts.zero()?;
            self.rows(heads).largest(&self.largest)?;
            self.rows(heads)
                .sign_sums(d, &self.largest, &self.sums, &self.counts)?;
            kernels::SignCentroids {
                sums: self.sums.ptr(),
                counts: self.counts.ptr(),
                largest: self.largest.ptr(),
                full_count: signs.full_count.ptr_at(heads.at),
                centroids: to.ptr_at(heads.at * d * 16),
                n: heads.n,
                d,
            }
            .launch(self.driver, [(d * 16).div_ceil(256), heads.count, 1])?;
        }
        Ok(())
    }

    /// Builds the 2-bit cache of keys and values, with its signs and full-precision tokens.
    ///
    /// # Errors
    /// Those of [`Prompts::signs`].
    pub fn pack(
        &self,
        rows: &LayerRows<'_>,
        queries: Queries<'_>,
        layout: Layout,
        positions: &Positions<'_>,
        to: &mut PackedLayer<'_>,
    ) -> Result<()> {
        self.signs(rows, queries, layout, positions, &to.signs)?;
        to.is_signed = layout.signed;
        for heads in self.parts(positions) {
            self.widen(rows, &rows.keys, heads, Some(&to.signs))?;
            self.clear_full(heads, &to.signs)?;
            // A channel whose magnitudes are all zero gets a scale of one.
            self.fit(heads, Statistic::RankedMagnitude(heads.n - 1), &to.alpha, 1.0)?;
            for (i, of) in [&rows.keys, &rows.values].into_iter().enumerate() {
                self.widen(rows, of, heads, None)?;
                to.pack(
                    i,
                    self.x.ptr(),
                    [heads.at, heads.count, 1],
                    [heads.n, self.shape.width()],
                    positions.lens.ptr_at(heads.sequence),
                )?;
                self.keep_full(heads, i, to)?;
            }
        }
        Ok(())
    }

    fn check(&self, other: &Shape) -> Result<()> {
        let sizes = |shape: &Shape| (shape.sequences, shape.kv_heads, shape.head_dim, shape.capacity);
        if sizes(&self.shape) == sizes(other) {
            Ok(())
        } else {
            Err(Error::internal(format!(
                "CUDA: room for prompts of {:?}, but signs are {other:?}",
                self.shape
            )))
        }
    }

    /// Splits the KV heads of all non-empty sequences into ranges of at most `at_once` heads.
    fn parts(&self, positions: &Positions<'_>) -> Vec<Heads> {
        let (g, at_once) = (self.shape.kv_heads, self.at_once);
        let mut parts = Vec::new();
        for (sequence, n) in positions.known().iter().enumerate().filter(|(_, n)| **n > 0) {
            parts.extend((0..g).step_by(at_once).map(|first| Heads {
                sequence,
                at: sequence * g + first,
                count: at_once.min(g - first),
                n: *n,
            }));
        }
        parts
    }

    /// Widens the cached keys or values `of` to f32 in `x`; with `centered`, subtracts its center.
    fn widen(
        &self,
        rows: &LayerRows<'_>,
        of: &Buffer<'_, u8>,
        heads: Heads,
        centered: Option<&Signs<'_>>,
    ) -> Result<()> {
        let (d, w) = (self.shape.head_dim, self.shape.width());
        let (stride, pitch) = (rows.shape.capacity, rows.shape.width());
        let centers = centered.map(|signs| signs.centers.ptr_at(heads.at * d));
        kernels::WidenRows {
            rows: of.ptr_at(heads.at * stride * pitch * rows.float.bytes()).cast(),
            centers,
            x: self.x.ptr(),
            kind: rows.kind(),
            stride,
            pitch,
            n: heads.n,
            d,
            w,
        }
        .launch(self.driver, [(heads.n * w).div_ceil(256), heads.count, 1])
    }

    /// Returns the rows in `x`.
    fn rows(&self, heads: Heads) -> HeadRows<'_> {
        HeadRows {
            driver: self.driver,
            x: self.x.ptr(),
            heads: heads.count,
            n: heads.n,
            w: self.shape.width(),
        }
    }

    /// Stores a statistic of every channel of `x` as per-channel values, `[b,g,d]`, with `instead` in place of zeros.
    fn fit(&self, heads: Heads, what: Statistic, to: &Buffer<'_, f32>, instead: f32) -> Result<()> {
        self.rows(heads)
            .channel_statistic(0..heads.n, what, &self.statistic)?;
        let (d, w) = (self.shape.head_dim, self.shape.width());
        kernels::StoreChannels {
            from: self.statistic.ptr(),
            to: to.ptr_at(heads.at * d),
            instead,
            d,
            w,
        }
        .launch(self.driver, [1, heads.count, 1])
    }

    fn begin_choice(&self, full: usize, positions: &Positions<'_>) -> Result<()> {
        let visible = positions.sets().map(|(set, _)| set.visible());
        let spans = visible.flat_map(|seen| [seen.start, 0, seen.end, seen.end].map(|p| p as u32));
        self.spans.write(&spans.collect::<Vec<_>>())?;
        self.most.write(&vec![full as u32; self.shape.sequences])?;
        self.best.histograms.zero()
    }

    /// Writes the scores of the visible positions as sort keys, for the choice of full-precision tokens.
    fn score(&self, queries: Queries<'_>, heads: Heads) -> Result<()> {
        let shape = &self.shape;
        let (r, d) = (shape.group, shape.head_dim);
        kernels::QueryKeys {
            queries: queries.rows.ptr_at(heads.at * r * queries.m * d),
            x: self.x.ptr(),
            spans: self.spans.ptr_at(heads.sequence * 4),
            keys: self.best.keys.ptr_at(heads.at * shape.capacity),
            histograms: self.best.histogram_at(heads.at),
            r,
            m: queries.m,
            n: heads.n,
            d,
            w: shape.width(),
            capacity: shape.capacity,
        }
        .launch(self.driver, [self.best.selection.blocks, heads.count, 1])
    }

    /// Chooses the full-precision tokens of all sequences.
    fn choose_full(&self, full: usize, to: &Signs<'_>) -> Result<()> {
        if full == 0 {
            return to.full_count.zero();
        }
        self.best.choose_into(
            self.spans.ptr(),
            self.most.ptr(),
            [to.full.ptr(), to.full_count.ptr()],
            FULL,
        )
    }

    /// Clears the full-precision rows in `x`, since statistics leave them out.
    fn clear_full(&self, heads: Heads, signs: &Signs<'_>) -> Result<()> {
        kernels::ClearRows {
            x: self.x.ptr(),
            full: signs.full.ptr_at(heads.at * FULL),
            full_count: signs.full_count.ptr_at(heads.at),
            n: heads.n,
            w: self.shape.width(),
        }
        .launch(self.driver, [FULL, heads.count, 1])
    }

    /// Stores the full-precision rows of `x` in f16, as keys (`i` = 0) or values (1).
    fn keep_full(&self, heads: Heads, i: usize, to: &PackedLayer<'_>) -> Result<()> {
        let (d, signs) = (self.shape.head_dim, &to.signs);
        let centers = (i == 0).then(|| signs.centers.ptr_at(heads.at * d));
        kernels::KeepFull {
            x: self.x.ptr(),
            centers,
            full: signs.full.ptr_at(heads.at * FULL),
            full_count: signs.full_count.ptr_at(heads.at),
            out: to.full[i].ptr_at(heads.at * FULL * d).cast(),
            n: heads.n,
            d,
            w: self.shape.width(),
        }
        .launch(self.driver, [FULL, heads.count, 1])
    }
}
