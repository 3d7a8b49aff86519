//! Rows of cached keys or values, and the operations of a decode step on them.

use std::iter::Chain;
use std::slice::Iter;

use ndarray::{Array2, ArrayView2};

use super::kernels::{self, StoredRows};
use super::lanes::LANES;

/// Rows that are widened together if the kernels cannot read the rows as they are stored.
const BLOCK: usize = 32;

/// Positions whose weighted values are summed in f32 before the result is added to an f64 sum.
pub(super) const TILE: usize = 256;

/// How many rows ahead of the current row to prefetch: memory sends many lines at a time, if it is asked for as many.
pub const AHEAD: usize = 64;

/// The queries of one query group, in the order in which the kernels read them.
pub struct GroupQueries {
    /// Chunks of [`LANES`] channels per query; the last one is padded.
    pub(super) chunks: usize,
    /// `[groups of GROUP heads, chunks, heads of the group, LANES]`, padded with zeros.
    pub(super) packed: Vec<[f32; LANES]>,
}

impl GroupQueries {
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

    /// Returns the number of chunks of [`LANES`] channels.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Returns a query, `[chunks LANES]`.
    pub fn row(&self, head: usize) -> Vec<f32> {
        let group = head / kernels::GROUP * kernels::GROUP;
        let heads = kernels::GROUP.min(self.heads() - group);
        let chunk = |chunk| self.packed[group * self.chunks + chunk * heads + head - group];
        (0..self.chunks).flat_map(chunk).collect()
    }

    /// Counts the queries.
    pub fn heads(&self) -> usize {
        self.packed.len() / self.chunks
    }

    /// Returns the queries with `change` applied to the d channels of each.
    pub fn mapped(&self, d: usize, change: impl Fn(&mut [f32])) -> Self {
        let mut packed = self.packed.clone();
        let mut row = vec![[0.0; LANES]; self.chunks];
        for group in packed.chunks_mut(kernels::GROUP * self.chunks) {
            let heads = group.len() / self.chunks;
            for head in 0..heads {
                for (chunk, to) in row.iter_mut().enumerate() {
                    *to = group[chunk * heads + head];
                }
                change(&mut row.as_flattened_mut()[..d]);
                for (chunk, from) in row.iter().enumerate() {
                    group[chunk * heads + head] = *from;
                }
            }
        }
        Self {
            chunks: self.chunks,
            packed,
        }
    }

    /// Returns the queries with each channel multiplied by a factor, `[chunks, LANES]`.
    pub fn times(&self, factors: &[[f32; LANES]]) -> Self {
        let mut packed = self.packed.clone();
        for group in packed.chunks_mut(kernels::GROUP * self.chunks) {
            let heads = group.len() / self.chunks;
            for (of_chunk, factors) in group.chunks_mut(heads).zip(factors) {
                for query in of_chunk {
                    query.iter_mut().zip(factors).for_each(|(q, factor)| *q *= factor);
                }
            }
        }
        Self {
            chunks: self.chunks,
            packed,
        }
    }
}

/// The positions of the rows to read now, and of those to read next.
pub struct Run<'a> {
    /// Read now, ascending.
    pub now: &'a [u32],
    /// Read next.
    pub next: &'a [u32],
}

/// The positions of the rows to prefetch. After the first ones, one row is prefetched per row read: if all were prefetched
/// at once, the prefetches would wait for each other and delay the arithmetic.
pub type Coming<'a> = Chain<Iter<'a, u32>, Iter<'a, u32>>;

impl<'a> Run<'a> {
    /// Reads the first `n` of `positions` now and the others next.
    pub fn new(positions: &'a [u32], n: usize) -> Self {
        let (now, next) = positions.split_at(n);
        Self { now, next }
    }

    /// Returns the positions to prefetch while the `now` rows are read, one per row read.
    pub fn coming(&self) -> Coming<'a> {
        let now = self.now.get(AHEAD..).unwrap_or_default();
        let next = self
            .next
            .get(AHEAD.saturating_sub(self.now.len())..)
            .unwrap_or_default();
        now.iter().chain(next)
    }

    /// Cuts the run into blocks; each comes with the index of its first position in `now`.
    fn blocks(&self) -> impl Iterator<Item = (usize, Run<'a>)> {
        let Self { now, next } = *self;
        (0..now.len()).step_by(BLOCK).map(move |at| {
            let (block, rest) = now[at..].split_at(BLOCK.min(now.len() - at));
            let next = if rest.is_empty() { next } else { rest };
            (at, Run { now: block, next })
        })
    }
}

/// Rows of neighbouring positions, one after the other.
#[derive(Clone, Copy)]
pub struct Segment<'a, U> {
    /// The position of the first row.
    pub first: usize,
    pub rows: &'a [U],
}

/// Weighted sums of rows, for r sets of weights.
pub struct OutputSums<'a> {
    /// The number of weights per row, which is the number of query heads.
    pub r: usize,
    /// `[r, chunks, LANES]`.
    pub values: &'a mut [[f32; LANES]],
}

/// Cached rows of keys or values, in the type in which they are stored.
pub trait CachedRows: Sync {
    /// Returns the channels of a row, d.
    fn dim(&self) -> usize;

    /// Returns the row of `position` as f32; `scratch` (d values) may hold a converted copy.
    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32];

    /// Prefetches the first rows of some positions (ascending); a run prefetches only rows that are read some rows later.
    fn prefetch(&self, _: &[u32]) {}

    /// Writes the dot products of the run's rows with the queries to `out`, `[r, stride]`, one column per position.
    ///
    /// # Numerics
    /// f32: fused multiply-adds into [`LANES`] partial sums, which are then added by halves.
    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        widened_scores(self, queries, run, out, stride);
    }

    /// Adds the run's rows, weighted, to `sums`; `weights` is `[r, stride]`, one column per position.
    ///
    /// # Numerics
    /// f32: fused multiply-adds, one position after the other.
    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        widened_add(self, weights, stride, run, sums);
    }

    /// Adds the rows of a piece of the positions (ascending), weighted, to `total`, `[r,d]`; `weights` is `[r, stride]`, one column
    /// per position.
    ///
    /// # Numerics
    /// f32 within runs of 256 positions, f64 across runs.
    fn add_piece(&self, weights: &[f32], stride: usize, positions: &[u32], total: &mut Array2<f64>) {
        add_tiles(self, weights, stride, positions, total);
    }
}

/// Computes [`CachedRows::add_piece`] run by run.
fn add_tiles<R: CachedRows + ?Sized>(
    rows: &R,
    weights: &[f32],
    stride: usize,
    positions: &[u32],
    total: &mut Array2<f64>,
) {
    let (r, d) = total.dim();
    let chunks = d.div_ceil(LANES);
    let mut sums = vec![[0.0; LANES]; r * chunks];
    for at in (0..positions.len()).step_by(TILE) {
        sums.fill([0.0; LANES]);
        let mut sums = OutputSums { r, values: &mut sums };
        let run = Run::new(&positions[at..], TILE.min(positions.len() - at));
        rows.add(&weights[at..], stride, &run, &mut sums);
        for (mut total, sums) in total.rows_mut().into_iter().zip(sums.values.chunks(chunks)) {
            for (t, x) in total.iter_mut().zip(sums.as_flattened()) {
                *t += f64::from(*x);
            }
        }
    }
}

/// Widens the rows of a run to f32, block by block. `each` gets the index of the block's first position, the widened
/// rows, and the block's run.
fn widen_blocks<R: CachedRows + ?Sized>(
    rows: &R,
    run: &Run,
    mut each: impl FnMut(usize, StoredRows<f32>, &Run),
) {
    let chunks = rows.dim().div_ceil(LANES);
    let mut block = vec![[0.0f32; LANES]; BLOCK.min(run.now.len()) * chunks];
    let mut scratch = vec![0.0; rows.dim()];
    let numbers: [u32; BLOCK] = std::array::from_fn(|i| i as u32);
    for (at, run) in run.blocks() {
        for (to, p) in block.chunks_mut(chunks).zip(run.now) {
            let row = rows.row(*p as usize, &mut scratch);
            to.as_flattened_mut()[..row.len()].copy_from_slice(row);
        }
        let run = Run::new(&numbers[..run.now.len()], run.now.len());
        each(at, StoredRows { rows: &block, chunks }, &run);
    }
}

/// Computes [`CachedRows::scores`] for rows that the kernels cannot read as they are stored.
pub fn widened_scores<R: CachedRows + ?Sized>(
    rows: &R,
    queries: &GroupQueries,
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    widen_blocks(rows, run, |at, rows, run| {
        kernels::scores(queries, rows, run, &mut out[at..], stride);
    });
}

/// Computes [`CachedRows::add`] for rows that the kernels cannot read as they are stored.
pub fn widened_add<R: CachedRows + ?Sized>(
    rows: &R,
    weights: &[f32],
    stride: usize,
    run: &Run,
    sums: &mut OutputSums,
) {
    widen_blocks(rows, run, |at, rows, run| {
        kernels::add(&weights[at..], stride, rows, run, sums);
    });
}
