//! Projections by checkpoint weights, which stay in the type that the checkpoint stores.

use std::cell::Cell;

use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, s};
use rayon::prelude::*;

use super::blocks::{PANEL, PANELS, PanelLine, Row, SIDE, TILE, multiply, multiply_pairs, transpose};
use super::few::{self, InputRow};
use super::layout::elements_mut;
use super::{pairs, pieces, simd, team};
use crate::float::Float;
use crate::prefetch::prefetch;
use crate::quant::{RoundedRow, dots};
use crate::weight::{Stored, Weight};

/// The most output channels per task if there are few input rows.
const FEW_CHANNELS: usize = 128;
/// The most output channels per task if there are more input rows.
const CHANNELS: usize = 504;
/// Blocks of [`SIDE`] input rows per task.
const SIDES: usize = 2;
/// With at most this many input rows, each row of the weight is widened and multiplied on its own.
pub const FEW: usize = 4;

/// A projection: `y = x W^T + b`.
pub struct Linear {
    /// W `[out, in]`.
    pub weight: Weight,
    /// b `[out]`.
    pub bias: Option<Vec<f32>>,
    /// Whether more than [`FEW`] input rows are rounded to bf16 if the weight is in bf16.
    pub rounds: bool,
}

impl Linear {
    /// Makes a projection in f32.
    pub fn new(weight: Weight, bias: Option<Vec<f32>>) -> Self {
        Self {
            weight,
            bias,
            rounds: false,
        }
    }

    /// Applies the projection to every row of `x`.
    ///
    /// # Shapes
    /// x `[m, in]`, out `[m, out]` (rows contiguous).
    ///
    /// # Numerics
    /// f32 products and sums, with weights widened exactly; with at most four input rows and a quantised weight, the inputs are
    /// rounded to 8 bits per value ([`dots`]). With more than four input rows, each sum over 128 input
    /// channels takes fused multiply-adds; these sums are added in order, and then the bias. The bits of a row are the
    /// same on every instruction set and do not depend on the other rows. With `rounds` and a weight in bf16, more than four
    /// input rows are rounded to bf16 instead, and each sum takes 256 input channels, pair by pair
    /// ([`multiply_pairs`]).
    pub fn forward(&self, x: ArrayView2<f32>, mut out: ArrayViewMut2<f32>) {
        if x.nrows() <= FEW {
            forward_few(x, vec![(self, out)]);
            return;
        }
        let packed = if self.in_pairs() {
            PackedInputs::new(pairs_of(x).view(), PACKED.take())
        } else {
            PackedInputs::new(x, PACKED.take())
        };
        let channels = out.ncols();
        let count = channels.div_ceil(CHANNELS).max(1);
        let size = channels.div_ceil(count).next_multiple_of(TILE);
        let mut tasks = Vec::new();
        for (c, part) in pieces(out.view_mut(), Axis(1), size).into_iter().enumerate() {
            for (s, part) in pieces(part, Axis(0), SIDES * SIDE).into_iter().enumerate() {
                tasks.push((c * size, s * SIDES, part));
            }
        }
        let tasks = tasks.into_par_iter();
        tasks.for_each(|(channel, side, part)| {
            let mut scratch = SCRATCH.take();
            self.multiply(&packed, channel, side, &mut scratch, part);
            SCRATCH.set(scratch);
        });
        PACKED.set(packed.lines);
    }

    /// Returns whether many input rows are multiplied as pairs of bf16 values.
    fn in_pairs(&self) -> bool {
        self.rounds
            && self.weight.stored() == Stored::Float(Float::Bf16)
            && self.weight.cols().is_multiple_of(2)
    }

    /// Computes the output channels from `first` on, for the blocks of input rows from block number `side` on.
    fn multiply(
        &self,
        x: &PackedInputs,
        first: usize,
        side: usize,
        scratch: &mut LinearScratch,
        mut out: ArrayViewMut2<f32>,
    ) {
        let (m, n) = out.dim();
        // A pair takes the place of a value.
        let each = if self.in_pairs() { 2 } else { 1 };
        let k = self.weight.cols() / each;
        // Whole tiles for the products, and whole panels for the transposition.
        let stride = n.next_multiple_of(TILE).next_multiple_of(PANEL);
        scratch.tile.resize(TILE, Row::ZERO);
        scratch.lines.resize(SIDE, PanelLine::ZERO);
        scratch.sums.resize(m.div_ceil(SIDE) * stride, Row::ZERO);
        for (b, start) in (0..k).step_by(SIDE).enumerate() {
            let terms = start..k.min(start + SIDE);
            for tile in (0..n).step_by(TILE) {
                let channels = first + tile..first + n.min(tile + TILE);
                for (to, channel) in scratch.tile.iter_mut().zip(channels) {
                    let to = &mut to.0[..terms.len()];
                    match each {
                        1 => self.weight.read(channel, terms.start, to),
                        _ => bytemuck::cast_slice_mut(to)
                            .copy_from_slice(self.weight.part(channel, 2 * terms.start..2 * terms.end)),
                    }
                }
                let next = if tile + TILE < n {
                    (tile + TILE..n.min(tile + 2 * TILE), terms.clone())
                } else {
                    (0..n.min(TILE), terms.end..k.min(terms.end + SIDE))
                };
                for channel in next.0 {
                    prefetch(
                        self.weight
                            .part(first + channel, each * next.1.start..each * next.1.end),
                    );
                }
                for (h, rows) in scratch.sums.chunks_exact_mut(stride).enumerate() {
                    let panels = (m - h * SIDE).div_ceil(PANEL).min(PANELS);
                    let (x, rows) = (x.block(b, side + h), &mut rows[tile..tile + TILE]);
                    match each {
                        1 => multiply(&scratch.tile, terms.len(), x, panels, rows, b > 0),
                        _ => multiply_pairs(&scratch.tile, terms.len(), x, panels, rows, b > 0),
                    }
                }
            }
        }
        let sums = scratch.sums.chunks_exact(stride);
        for (rows, mut out) in sums.zip(out.axis_chunks_iter_mut(Axis(0), SIDE)) {
            for (rows, start) in rows.as_chunks::<PANEL>().0.iter().zip((0..n).step_by(PANEL)) {
                let target = out.slice_mut(s![.., start..n.min(start + PANEL)]);
                self.turn(rows, first + start, &mut scratch.lines, target);
            }
        }
    }

    /// Transposes sums, stored as one row per output channel from `first` on, into rows of outputs, and adds the bias.
    fn turn(&self, rows: &[Row; PANEL], first: usize, lines: &mut [PanelLine], mut out: ArrayViewMut2<f32>) {
        transpose(rows, lines);
        let (m, n) = out.dim();
        for (mut to, line) in out.rows_mut().into_iter().zip(&mut lines[..m]) {
            if let Some(bias) = &self.bias {
                let bias = &bias[first..first + n];
                line.0.iter_mut().zip(bias).for_each(|(y, b)| *y += b);
            }
            to.iter_mut().zip(&line.0).for_each(|(to, y)| *to = *y);
        }
    }

    /// Computes the output channels from `first` on of few rows.
    fn few_channels(&self, rows: &FewRows, first: usize, mut out: ArrayViewMut2<f32>) {
        let n = out.ncols();
        let outs = out.rows_mut().into_iter();
        let outs = outs.map(|out| out.into_slice().expect("contiguous rows"));
        let mut outs: Vec<&mut [f32]> = outs.collect();
        if let Some(weights) = self.weight.bf16_rows() {
            few::products(&weights, first, &rows.inputs, &mut outs);
        } else if let Stored::Quant(quant) = self.weight.stored() {
            let weights: Vec<&[u8]> = (first..first + n).map(|row| self.weight.row_bytes(row)).collect();
            dots(quant, &weights, &rows.rounded, &mut outs);
        } else {
            let mut wide = vec![0.0; self.weight.cols()];
            for j in 0..n {
                self.weight.read(first + j, 0, &mut wide);
                for (out, input) in outs.iter_mut().zip(&rows.inputs) {
                    out[j] = simd::dot(&wide, input.values());
                }
            }
        }
        if let Some(bias) = &self.bias {
            for out in outs {
                out.iter_mut()
                    .zip(&bias[first..first + n])
                    .for_each(|(y, b)| *y += b);
            }
        }
    }
}

/// Few input rows.
struct FewRows {
    inputs: Vec<InputRow>,
    /// The same with 8 bits per value, if a weight is quantised.
    rounded: Vec<RoundedRow>,
}

/// Applies several projections to the same rows, in one parallel loop if the rows are few.
///
/// # Shapes
/// x `[m, in]`; each output `[m, out]` (rows contiguous).
///
/// # Numerics
/// As [`Linear::forward`].
pub fn forward_all(x: ArrayView2<f32>, outputs: Vec<(&Linear, ArrayViewMut2<f32>)>) {
    if x.nrows() <= FEW {
        forward_few(x, outputs)
    } else {
        outputs
            .into_iter()
            .for_each(|(linear, out)| linear.forward(x, out))
    }
}

/// Computes [`forward_all`] of at most [`FEW`] rows.
fn forward_few(x: ArrayView2<f32>, outputs: Vec<(&Linear, ArrayViewMut2<f32>)>) {
    let is_any = |of: fn(&Weight) -> bool| outputs.iter().any(|(linear, _)| of(&linear.weight));
    let for_bf16 = is_any(|weight| weight.bf16_rows().is_some());
    let inputs = x
        .rows()
        .into_iter()
        .map(|row| InputRow::new(row.to_vec(), for_bf16));
    let inputs: Vec<InputRow> = inputs.collect();
    let rounded = if is_any(|weight| matches!(weight.stored(), Stored::Quant(_))) {
        inputs
            .iter()
            .map(|input| RoundedRow::new(input.values()))
            .collect()
    } else {
        Vec::new()
    };
    let rows = FewRows { inputs, rounded };
    let parts = outputs.into_iter().flat_map(|(linear, out)| {
        let parts = pieces(out, Axis(1), FEW_CHANNELS).into_iter().enumerate();
        parts.map(move |(p, part)| (linear, p * FEW_CHANNELS, part))
    });
    team::for_each(parts.collect(), |(linear, first, part)| {
        linear.few_channels(&rows, first, part)
    });
}

/// Rounds rows to pairs of bf16 values: `[m, k / 2]`.
fn pairs_of(x: ArrayView2<f32>) -> Array2<f32> {
    let mut out = Array2::zeros((x.nrows(), x.ncols().div_ceil(2)));
    let rows = x.axis_iter(Axis(0)).into_par_iter();
    let each = out.axis_iter_mut(Axis(0)).into_par_iter().zip(rows);
    each.for_each(|(mut out, row)| pairs::round_array(row, elements_mut(&mut out)));
    out
}

/// The input rows, transposed into the columns of panels. All tasks share them.
struct PackedInputs {
    /// Number of blocks of [`SIDE`] input channels.
    blocks: usize,
    /// `[blocks of SIDE input rows, blocks, PANELS, SIDE]`, and perhaps more lines, which are not used.
    lines: Vec<PanelLine>,
}

impl PackedInputs {
    /// Packs the rows into a buffer, whatever it holds; what lies beyond the rows and their channels stays as it is.
    fn new(x: ArrayView2<f32>, mut lines: Vec<PanelLine>) -> Self {
        let (m, k) = x.dim();
        let blocks = k.div_ceil(SIDE);
        let size = m.div_ceil(SIDE) * blocks * PANELS * SIDE;
        if lines.len() < size {
            // Frees the old buffer before the new one is allocated.
            lines = Vec::new();
            lines.resize(size, PanelLine::ZERO);
        }
        let each = lines[..size].par_chunks_exact_mut(PANELS * SIDE).enumerate();
        each.for_each_init(
            || [Row::ZERO; PANEL],
            |rows, (i, lines)| {
                let (row, channel) = (i / blocks * SIDE, i % blocks * SIDE);
                let panels = (row..m.min(row + SIDE)).step_by(PANEL);
                for (start, lines) in panels.zip(lines.chunks_exact_mut(SIDE)) {
                    let x = x.slice(s![start..m.min(start + PANEL), channel..k.min(channel + SIDE)]);
                    for (to, from) in rows.iter_mut().zip(x.rows()) {
                        to.0.iter_mut().zip(from).for_each(|(to, x)| *to = *x);
                    }
                    transpose(rows, lines);
                }
            },
        );
        Self { blocks, lines }
    }

    /// Returns the panels of one block of input channels and one block of input rows: `[PANELS, SIDE]`.
    fn block(&self, channels: usize, side: usize) -> &[PanelLine] {
        &self.lines[(side * self.blocks + channels) * PANELS * SIDE..][..PANELS * SIDE]
    }
}

/// Returns how many floats `rows` input rows of `width` channels take when packed.
pub fn packed_floats(rows: usize, width: usize) -> usize {
    rows.next_multiple_of(SIDE) * width.next_multiple_of(SIDE)
}

/// The buffers of one thread.
#[derive(Default)]
struct LinearScratch {
    /// The widened weights of a tile of output channels, `[TILE]`.
    tile: Vec<Row>,
    /// The sums, one row per output channel, for each block of input rows.
    sums: Vec<Row>,
    /// The outputs of a block of input rows, `[SIDE]`.
    lines: Vec<PanelLine>,
}

thread_local! {
    // Each thread keeps its buffers: if they were allocated for every task, the operating system would have to supply
    // their pages each time.
    static SCRATCH: Cell<LinearScratch> = Cell::default();
    // So does the thread that calls, which would also have to fill them with zeros on its own.
    static PACKED: Cell<Vec<PanelLine>> = Cell::default();
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::float::Float;
    use crate::testing::values;

    fn matrix(rows: usize, cols: usize, seed: u32) -> Array2<f32> {
        Array2::from_shape_vec((rows, cols), values(rows * cols, seed)).expect("as many values")
    }

    fn linear(k: usize, n: usize, dtype: Float) -> Linear {
        let weight = Weight::from_values(matrix(n, k, 1).view(), dtype).expect("a weight");
        Linear::new(weight, n.is_multiple_of(2).then(|| values(n, 2)))
    }

    fn run(linear: &Linear, x: ArrayView2<f32>, threads: usize) -> Array2<f32> {
        let mut out = Array2::from_elem((x.nrows(), linear.weight.rows()), f32::NAN);
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        pool.expect("threads")
            .install(|| linear.forward(x, out.view_mut()));
        out
    }

    #[test]
    fn products_are_those_of_f64() {
        for dtype in [Float::F32, Float::F16, Float::Bf16] {
            for (m, k, n) in [
                (1, 70, 5),
                (3, 64, 509),
                (4, 128, 130),
                (5, 1, 1),
                (33, 127, 12),
                (129, 300, 509),
                (257, 129, 40),
            ] {
                let linear = linear(k, n, dtype);
                let x = matrix(m, k, 3);
                let got = run(&linear, x.view(), 2);
                let weights = Array2::from_shape_vec((n, k), linear.weight.to_vec()).expect("as many values");
                for ((i, j), y) in got.indexed_iter() {
                    let bias = linear.bias.as_ref().map_or(0.0, |b| f64::from(b[j]));
                    let row = x.row(i);
                    let terms = row
                        .iter()
                        .zip(weights.row(j))
                        .map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let (sum, size) = terms.fold((bias, bias.abs()), |(s, a), t| (s + t, a + t.abs()));
                    // A term is rounded once as a product and at most once per later addition; the bias is added last.
                    let bound = (k as f64 + 2.0) * 2f64.powi(-24) * size;
                    assert!(
                        (f64::from(*y) - sum).abs() <= bound,
                        "{dtype:?} {m} {k} {n}: {y} {sum}"
                    );
                }
            }
        }
    }

    #[test]
    fn rounded_inputs_are_multiplied_as_they_are() {
        for (m, k, n) in [
            (5, 2, 1),
            (33, 126, 12),
            (129, 300, 509),
            (257, 512, 40),
            (6, 127, 20),
            (4, 64, 9),
        ] {
            let mut linear = linear(k, n, Float::Bf16);
            linear.rounds = true;
            let x = matrix(m, k, 3);
            let got = run(&linear, x.view(), 2);
            // Few rows, and rows that are no whole pairs, are not rounded.
            let rounds = m > FEW && k.is_multiple_of(2);
            let input = |x: f32| {
                if rounds {
                    half::bf16::from_f32(x).to_f64()
                } else {
                    f64::from(x)
                }
            };
            let weights = Array2::from_shape_vec((n, k), linear.weight.to_vec()).expect("as many values");
            for ((i, j), y) in got.indexed_iter() {
                let bias = linear.bias.as_ref().map_or(0.0, |b| f64::from(b[j]));
                let terms = x
                    .row(i)
                    .into_iter()
                    .zip(weights.row(j))
                    .map(|(x, w)| input(*x) * f64::from(*w));
                let (sum, size) = terms.fold((bias, bias.abs()), |(s, a), t| (s + t, a + t.abs()));
                let bound = (k as f64 + 2.0) * 2f64.powi(-24) * size;
                assert!((f64::from(*y) - sum).abs() <= bound, "{m} {k} {n}: {y} {sum}");
            }
        }
    }

    #[test]
    fn threads_and_other_rows_change_nothing() {
        for rounds in [false, true] {
            threads_and_other_rows(rounds);
        }
    }

    fn threads_and_other_rows(rounds: bool) {
        let mut linear = linear(200, 1030, Float::Bf16);
        linear.rounds = rounds;
        let x = matrix(300, 200, 4);
        let all = run(&linear, x.view(), 1);
        assert_eq!(all, run(&linear, x.view(), 3));
        for rows in [0..5, 100..110, 250..300] {
            let alone = run(&linear, x.slice(s![rows.clone(), ..]), 2);
            assert_eq!(alone, all.slice(s![rows, ..]));
        }
        let few = run(&linear, x.slice(s![..3, ..]), 1);
        for threads in [3, 40] {
            let other = run(&linear, x.slice(s![..3, ..]), threads);
            assert_eq!(few, other, "{threads} threads");
        }
        assert_eq!(run(&linear, x.slice(s![1..2, ..]), 2), few.slice(s![1..2, ..]));
    }
}
