//! Rows of keys or values, and what a decode step does with them.

use std::iter::Chain;
use std::slice::Iter;

use ndarray::ArrayView2;

use super::kernels::{self, Stored};
use super::lanes::LANES;

/// Rows that are widened at a time, where the kernels cannot read them as they are.
const BLOCK: usize = 32;

/// Rows that are asked for before they are read.
pub const AHEAD: usize = 8;

/// Numbers of the rows of a widened block.
const NUMBERS: [u32; BLOCK] = {
    let mut numbers = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        numbers[i] = i as u32;
        i += 1;
    }
    numbers
};

/// Query rows of one KV head in the order the kernels read them.
pub struct Queries {
    /// Channels, in whole chunks of [`LANES`].
    pub(super) chunks: usize,
    /// `[groups of GROUP heads, chunks, heads of the group, LANES]`, padded with zeros.
    pub(super) packed: Vec<[f32; LANES]>,
}

impl Queries {
    /// Packs queries `[r,d]` times `scale`.
    pub fn new(q: ArrayView2<f32>, scale: f32) -> Self {
        let (r, d) = q.dim();
        let chunks = d.div_ceil(LANES);
        let mut packed = Vec::with_capacity(r * chunks);
        for group in q.axis_chunks_iter(ndarray::Axis(0), kernels::GROUP) {
            for chunk in group.axis_chunks_iter(ndarray::Axis(1), LANES) {
                for row in chunk.rows() {
                    let mut to = [0.0; LANES];
                    to.iter_mut().zip(row).for_each(|(to, x)| *to = x * scale);
                    packed.push(to);
                }
            }
        }
        Self { chunks, packed }
    }
}

/// Positions of which some are read now and the others next.
pub struct Run<'a> {
    /// Read now, ascending.
    pub now: &'a [u32],
    /// Those after them.
    pub next: &'a [u32],
}

/// Positions of rows that are read soon. One is asked for with every row that is read: asked for together, they
/// would keep each other waiting, and the arithmetic too.
pub type Coming<'a> = Chain<Iter<'a, u32>, Iter<'a, u32>>;

impl<'a> Run<'a> {
    /// The first `n` of `positions` now.
    pub fn new(positions: &'a [u32], n: usize) -> Self {
        let (now, next) = positions.split_at(n);
        Self { now, next }
    }

    /// The positions of the rows to ask for while those of now are read, one with each.
    pub fn coming(&self) -> Coming<'a> {
        let now = self.now.get(AHEAD..).unwrap_or_default();
        let next = self
            .next
            .get(AHEAD.saturating_sub(self.now.len())..)
            .unwrap_or_default();
        now.iter().chain(next)
    }

    /// The same in blocks, with the place of each block's first position.
    fn blocks(&self) -> impl Iterator<Item = (usize, Run<'a>)> {
        let Self { now, next } = *self;
        (0..now.len()).step_by(BLOCK).map(move |at| {
            let (block, rest) = now[at..].split_at(BLOCK.min(now.len() - at));
            let next = if rest.is_empty() { next } else { rest };
            (at, Run { now: block, next })
        })
    }
}

/// Asks for the cache lines of values that are read soon.
#[inline(always)]
pub fn prefetch<T>(values: &[T]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let start = values.as_ptr().cast::<i8>();
        for line in (0..size_of_val(values)).step_by(64) {
            // SAFETY: a prefetch accesses nothing, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(line)) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = values;
}

/// Sums of rows under r weights each.
pub struct Sums<'a> {
    /// Weights per row.
    pub r: usize,
    /// `[r, chunks, LANES]`.
    pub values: &'a mut [[f32; LANES]],
}

/// Rows of keys or values that a decode step reads, in whatever type they are stored.
pub trait Rows: Sync {
    /// Channels of a row, d.
    fn dim(&self) -> usize;

    /// The row of `position` as f32; `scratch` (d values) may hold a converted copy.
    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32];

    /// Products of the rows with the queries: `[r, stride]` in `out`, of which the first columns are
    /// written, one for each position.
    ///
    /// # Numerics
    /// f32; each product is fused with its sum, in [`LANES`] sums, which are added by halves.
    fn scores(&self, queries: &Queries, run: &Run, out: &mut [f32], stride: usize) {
        widened_scores(self, queries, run, out, stride);
    }

    /// `sums += weights rows`, with weights in the first columns of `[r, stride]`.
    ///
    /// # Numerics
    /// f32; each product is fused with its sum, position by position.
    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: Sums) {
        widened_add(self, weights, stride, run, sums);
    }
}

/// The rows of a run as f32, `[positions, chunks, LANES]`; what pads them stays as it is.
fn widen<R: Rows + ?Sized>(rows: &R, run: &Run, out: &mut [[f32; LANES]]) {
    let mut scratch = vec![0.0; rows.dim()];
    for (to, p) in out.chunks_mut(rows.dim().div_ceil(LANES)).zip(run.now) {
        let row = rows.row(*p as usize, &mut scratch);
        to.as_flattened_mut()[..row.len()].copy_from_slice(row);
    }
}

/// [`Rows::scores`] of rows that the kernels cannot read as they are.
pub fn widened_scores<R: Rows + ?Sized>(
    rows: &R,
    queries: &Queries,
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    let chunks = queries.chunks;
    let mut block = vec![[0.0f32; LANES]; BLOCK.min(run.now.len()) * chunks];
    for (at, run) in run.blocks() {
        widen(rows, &run, &mut block);
        let run = Run::new(&NUMBERS[..run.now.len()], run.now.len());
        let rows = Stored { rows: &block, chunks };
        kernels::scores(queries, rows, &run, &mut out[at..], stride);
    }
}

/// [`Rows::add`] of rows that the kernels cannot read as they are.
pub fn widened_add<R: Rows + ?Sized>(rows: &R, weights: &[f32], stride: usize, run: &Run, sums: Sums) {
    let Sums { r, values } = sums;
    let chunks = values.len() / r;
    let mut block = vec![[0.0f32; LANES]; BLOCK.min(run.now.len()) * chunks];
    for (at, run) in run.blocks() {
        widen(rows, &run, &mut block);
        let run = Run::new(&NUMBERS[..run.now.len()], run.now.len());
        let sums = Sums {
            r,
            values: &mut *values,
        };
        let rows = Stored { rows: &block, chunks };
        kernels::add(&weights[at..], stride, rows, &run, sums);
    }
}
