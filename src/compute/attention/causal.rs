//! Blocked causal attention of a prompt.

use std::cell::Cell;
use std::ops::Range;

use ndarray::{ArrayView1, ArrayView2, ArrayView3, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use super::softmax::{Seen, mask, rescale, weigh};
use super::visible;
use crate::compute::blocks::{
    PANEL, PANELS, PanelLine, Row, SIDE, TILE, multiply, multiply_pairs, transpose,
};
use crate::compute::{pairs, pieces, simd};

/// Query rows per task: positions times the query heads of a group.
const QUERY_TILE: usize = 480;

/// Computes causal grouped-query attention of consecutive queries, with an optional sliding window.
///
/// # Shapes
/// q `[h,m,d]` rotated, k `[g,n,d]` rotated, v `[g,n,d]`; query row i has position `first + i`, key row j
/// position j, and n >= first + m. out `[m, h d]`, head-major within a row.
/// With a `window` of W a query at position t sees the positions t-W+1..=t.
///
/// # Numerics
/// f32; the softmax is computed over blocks of 128 keys from position 0 on, with a running maximum. Scores are summed
/// in blocks of 128 channels, each block starting from zero; outputs are summed block by block of keys. The bits of a
/// row are the same on every instruction set and do not depend on the other queries. A NaN in the inputs gives NaN.
///
/// With `rounds` and an even number of channels, the factors of both products are rounded to bf16 ([`multiply_pairs`]):
/// scaled queries and keys, softmax weights and values. Weights are divided by the sum of the unrounded ones, scores are
/// summed in blocks of 256 channels, and a value that is not finite may also show just before its position.
pub fn causal(
    q: ArrayView3<f32>,
    k: ArrayView3<f32>,
    v: ArrayView3<f32>,
    first: usize,
    window: Option<usize>,
    rounds: bool,
    mut out: ArrayViewMut2<f32>,
) {
    let (h, _, d) = q.dim();
    let g = k.len_of(Axis(0));
    let r = h / g;
    let rows = (QUERY_TILE / r).max(8);
    let mut tasks = Vec::new();
    for (c, columns) in out.axis_chunks_iter_mut(Axis(1), r * d).enumerate() {
        for (tile, part) in pieces(columns, Axis(0), rows).into_iter().enumerate() {
            tasks.push((c, tile * rows, part));
        }
    }
    // Late tiles see the most keys. They are scheduled first, so that the threads finish at about the same time.
    tasks.reverse();
    let tasks = tasks.into_par_iter();
    tasks.for_each(|(c, start, part)| {
        let mut scratch = SCRATCH.take();
        let q = q.slice(s![c * r..(c + 1) * r, start..start + part.nrows(), ..]);
        let task = Task {
            r,
            m: part.nrows(),
            d,
            first: first + start,
            window,
            in_pairs: rounds && d.is_multiple_of(2),
        };
        scratch.start(&task, q);
        let (k, v) = (k.index_axis(Axis(0), c), v.index_axis(Axis(0), c));
        for block in task.blocks() {
            scratch.load(&task, k, v, &block);
            scratch.attend(&task, &block);
        }
        scratch.finish(&task, part);
        SCRATCH.set(scratch);
    });
}

/// A query tile of one KV head.
struct Task {
    /// Query heads.
    r: usize,
    /// Positions.
    m: usize,
    /// Channels.
    d: usize,
    /// The first position.
    first: usize,
    window: Option<usize>,
    /// Whether factors are pairs of bf16 values.
    in_pairs: bool,
}

impl Task {
    /// Returns the number of query rows, rounded up to whole tiles. Rows are ordered by position.
    fn stacked(&self) -> usize {
        (self.r * self.m).next_multiple_of(TILE)
    }

    /// Returns the ranges of channels, at most [`SIDE`] channels each.
    fn sides(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        sides(self.d)
    }

    /// Returns the ranges of channels, or of pairs of channels, of a product of queries and keys.
    fn factor_sides(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        sides(self.places(self.d))
    }

    /// Returns the number of values in the place of so many: pairs have half as many.
    fn places(&self, values: usize) -> usize {
        if self.in_pairs { values.div_ceil(2) } else { values }
    }

    /// Adds a product to `c`, or replaces it.
    fn multiply(&self, a: &[Row], depth: usize, b: &[PanelLine], panels: usize, c: &mut [Row], add: bool) {
        if self.in_pairs {
            multiply_pairs(a, depth, b, panels, c, add)
        } else {
            multiply(a, depth, b, panels, c, add)
        }
    }

    /// Returns the blocks of keys that at least one row sees. Blocks begin at multiples of [`SIDE`].
    fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (begin, end) = (visible(self.first, self.window).start, self.first + self.m);
        let starts = (begin / SIDE * SIDE..end).step_by(SIDE);
        starts.map(move |start| start..end.min(start + SIDE))
    }

    /// Returns the part of a block that a row sees, relative to the block's start.
    fn seen(&self, row: usize, block: &Range<usize>) -> Range<usize> {
        let seen = visible(self.first + row / self.r, self.window);
        let of = |p: usize| p.clamp(block.start, block.end) - block.start;
        of(seen.start)..of(seen.end)
    }

    /// Returns whether the block has full length and every row sees all of it.
    fn sees_all(&self, block: &Range<usize>) -> bool {
        let last = visible(self.first + self.m - 1, self.window);
        block.len() == SIDE && last.start <= block.start && block.end <= self.first + 1
    }

    /// Returns the groups of rows that are multiplied together. Each comes with the number of the block's keys to
    /// multiply, which ends at the last key that a row of the group sees. Groups whose rows see no key are left out.
    fn groups(&self, block: &Range<usize>) -> Vec<(Range<usize>, usize)> {
        let stacked = self.stacked();
        let size = if self.sees_all(block) { stacked } else { TILE };
        let group = |start: usize| {
            let last = (start + size).min(self.r * self.m) - 1;
            let keys = self.seen(start, block).start..self.seen(last, block).end;
            (!keys.is_empty()).then_some((start..start + size, keys.end))
        };
        (0..stacked).step_by(size).filter_map(group).collect()
    }
}

/// Cuts a range to parts of at most [`SIDE`] values.
fn sides(n: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    (0..n).step_by(SIDE).map(move |start| start..n.min(start + SIDE))
}

thread_local! {
    // Each thread keeps its buffers: if they were allocated for every task, the operating system would have to supply
    // their pages each time.
    static SCRATCH: Cell<CausalScratch> = Cell::default();
}

/// The buffers of one thread. Buffers whose shape begins with `sides` have one run of rows or panels per block of
/// channels.
#[derive(Default)]
struct CausalScratch {
    /// Scaled queries, `[sides, stacked]`; of pairs, there are half as many sides.
    q: Vec<Row>,
    /// The scores of a block of keys, and later their softmax weights, `[stacked]`.
    scores: Vec<Row>,
    /// The unnormalised outputs, `[sides, stacked]`.
    out: Vec<Row>,
    seen: Vec<Seen>,
    /// The keys of a block, transposed into columns, `[sides, PANELS, SIDE]`.
    keys: Vec<PanelLine>,
    /// The values of a block, `[sides, PANELS, SIDE]`.
    values: Vec<PanelLine>,
}

impl CausalScratch {
    fn start(&mut self, task: &Task, q: ArrayView3<f32>) {
        let (stacked, n_sides) = (task.stacked(), task.sides().count());
        let factor_sides = task.factor_sides().count();
        // The softmax computes powers of two instead of powers of e, so log2(e) goes into the scale.
        let scale = std::f32::consts::LOG2_E / (task.d as f32).sqrt();
        self.q.clear();
        self.q.resize(factor_sides * stacked, Row::ZERO);
        for row in 0..task.r * task.m {
            let q = q.slice(s![row % task.r, row / task.r, ..]);
            for (b, side) in task.sides().enumerate() {
                let mut part = Row::ZERO;
                copy(q.slice(s![side.clone()]), &mut part.0);
                simd::scale(&mut part.0[..side.len()], scale);
                if task.in_pairs {
                    pairs::round(
                        &part.0[..side.len()],
                        &mut self.q[b / 2 * stacked + row].0[b % 2 * SIDE / 2..],
                    )
                } else {
                    self.q[b * stacked + row] = part
                }
            }
        }
        self.scores.clear();
        self.scores.resize(stacked, Row::ZERO);
        self.out.clear();
        self.out.resize(n_sides * stacked, Row::ZERO);
        self.seen.clear();
        self.seen.resize(stacked, Seen::NOTHING);
        self.keys.clear();
        self.keys.resize(factor_sides * PANELS * SIDE, PanelLine::ZERO);
        self.values.clear();
        self.values.resize(n_sides * PANELS * SIDE, PanelLine::ZERO);
    }

    /// Copies a block of keys and values into the layout that the matrix products read.
    fn load(&mut self, task: &Task, k: ArrayView2<f32>, v: ArrayView2<f32>, block: &Range<usize>) {
        let mut rows = [Row::ZERO; PANEL];
        for (b, side) in task.factor_sides().enumerate() {
            for (p, start) in block.clone().step_by(PANEL).enumerate() {
                for (to, j) in rows.iter_mut().zip(start..block.end) {
                    if task.in_pairs {
                        pairs::round_array(k.slice(s![j, 2 * side.start..2 * side.end]), &mut to.0)
                    } else {
                        copy(k.slice(s![j, side.clone()]), &mut to.0)
                    }
                }
                let lines = (b * PANELS + p) * SIDE;
                transpose(&rows, &mut self.keys[lines..][..side.len()]);
            }
        }
        for (p, start) in (0..task.d).step_by(PANEL).enumerate() {
            let of = |j: usize| v.slice(s![j, start..task.d.min(start + PANEL)]);
            let lines = &mut self.values[p * SIDE..];
            if !task.in_pairs {
                lines
                    .iter_mut()
                    .zip(block.clone())
                    .for_each(|(line, j)| copy(of(j), &mut line.0));
                continue;
            }
            for (line, j) in lines.iter_mut().zip(block.clone().step_by(2)) {
                let (mut first, mut second) = ([0.0; PANEL], [0.0; PANEL]);
                copy(of(j), &mut first);
                // Beyond the block, zeros: their weights are zero too.
                if j + 1 < block.end {
                    copy(of(j + 1), &mut second);
                }
                pairs::interleave(&first, &second, &mut line.0);
            }
        }
    }

    /// Adds the attention over one block of keys to the outputs.
    fn attend(&mut self, task: &Task, block: &Range<usize>) {
        let stacked = task.stacked();
        let groups = task.groups(block);
        for (rows, keys) in &groups {
            for (b, side) in task.factor_sides().enumerate() {
                let q = &self.q[b * stacked..][rows.clone()];
                let (lines, panels) = (&self.keys[b * PANELS * SIDE..], keys.div_ceil(PANEL));
                let scores = &mut self.scores[rows.clone()];
                task.multiply(q, side.len(), lines, panels, scores, b > 0);
            }
        }
        if !task.sees_all(block) {
            for (row, scores) in self.scores.iter_mut().enumerate().take(task.r * task.m) {
                mask(scores, task.seen(row, block));
            }
        }
        weigh(&mut self.scores, &mut self.seen);
        for out in self.out.chunks_mut(stacked) {
            rescale(out, &self.seen);
        }
        if task.in_pairs {
            self.scores
                .iter_mut()
                .for_each(|weights| pairs::round_in_place(&mut weights.0));
        }
        for (rows, keys) in &groups {
            for (b, side) in task.sides().enumerate() {
                let (lines, panels) = (&self.values[b * PANELS * SIDE..], side.len().div_ceil(PANEL));
                let out = &mut self.out[b * stacked..][rows.clone()];
                let depth = task.places(*keys);
                task.multiply(&self.scores[rows.clone()], depth, lines, panels, out, true);
            }
        }
    }

    fn finish(&self, task: &Task, mut part: ArrayViewMut2<f32>) {
        let stacked = task.stacked();
        for (row, seen) in self.seen.iter().enumerate().take(task.r * task.m) {
            let inverse = 1.0 / seen.sum();
            let start = row % task.r * task.d;
            for (b, side) in task.sides().enumerate() {
                let mut target = part.slice_mut(s![row / task.r, start + side.start..start + side.end]);
                let from = ArrayView1::from(&self.out[b * stacked + row].0[..side.len()]);
                target.zip_mut_with(&from, |o, x| *o = x * inverse);
            }
        }
    }
}

/// Copies the elements of `from` to the start of `to`.
fn copy<const N: usize>(from: ArrayView1<f32>, to: &mut [f32; N]) {
    match from.as_slice() {
        // A copy of a length known at compile time needs no function call.
        Some(from) if from.len() == N => to.copy_from_slice(from),
        Some(from) => to[..from.len()].copy_from_slice(from),
        None => to.iter_mut().zip(from).for_each(|(to, x)| *to = *x),
    }
}
