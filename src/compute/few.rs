//! Products of rows of bf16 weights with few inputs: the loops of a decode step that read the most memory.
//!
//! [`simd::dot_bf16`] defines each product to the last bit. With the vectors of x86, one or two inputs share the reading and
//! the widening of a row, and the partial sums of sixteen vectors are added at once.

use half::bf16;
use multiversion::multiversion;
use multiversion::target::match_target;
use ndarray::ArrayViewMut2;

#[cfg(target_arch = "x86_64")]
use super::attention::lanes::{Avx2, Avx512};
use super::attention::lanes::{LANES, Simd};
use super::simd::{self, WIDE};
use crate::prefetch::{AHEAD, prefetch_beyond};
use crate::weight::Bf16Rows;

/// Inputs that share the reading of a row: the partial sums of more do not fit into the registers.
const TOGETHER: usize = 2;
/// Values of a part, of which two make up a chunk of [`WIDE`] values: one vector of those at even places, one of the others.
const PART: usize = 2 * LANES;

/// The inputs of a chunk, so that no vector crosses a line of the cache: the values of each part at even places, and those at
/// odd places.
#[repr(align(64))]
struct Chunk([[[f32; LANES]; 2]; 2]);

/// A row of inputs.
pub struct Input {
    values: Vec<f32>,
    /// The same up to the last whole chunk.
    chunks: Vec<Chunk>,
}

impl Input {
    /// Makes a row of inputs of its values.
    pub fn new(values: Vec<f32>) -> Self {
        let split = |part: &[f32]| [0, 1].map(|parity| std::array::from_fn(|l| part[2 * l + parity]));
        let (whole, _) = values.as_chunks::<WIDE>();
        let chunks = whole
            .iter()
            .map(|of| Chunk([split(&of[..PART]), split(&of[PART..])]));
        Self {
            chunks: chunks.collect(),
            values,
        }
    }

    /// Returns the values.
    pub fn values(&self) -> &[f32] {
        &self.values
    }
}

/// Computes the products of the rows from number `first` on with all inputs.
///
/// # Shapes
/// out `[inputs, n]` (rows contiguous).
///
/// # Numerics
/// See [`simd::dot_bf16`].
pub fn products(rows: &Bf16Rows, first: usize, inputs: &[Input], mut out: ArrayViewMut2<f32>) {
    let outs = out
        .rows_mut()
        .into_iter()
        .map(|out| out.into_slice().expect("contiguous rows"));
    let mut outs: Vec<&mut [f32]> = outs.collect();
    for (inputs, outs) in inputs.chunks(TOGETHER).zip(outs.chunks_mut(TOGETHER)) {
        match (inputs, outs) {
            ([a, b], [to_a, to_b]) => of_rows(rows, first, &[a, b], &mut [to_a, to_b]),
            ([a], [to_a]) => of_rows(rows, first, &[a], &mut [to_a]),
            _ => panic!("as many outputs as inputs"),
        }
    }
}

/// Computes the products of rows with M inputs, as many as each output has values.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2+fma+f16c"))]
fn of_rows<const M: usize>(rows: &Bf16Rows, first: usize, inputs: &[&Input; M], outs: &mut [&mut [f32]; M]) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => of_rows_by(unsafe { Avx512::new() }, rows, first, inputs, outs),
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => of_rows_by(unsafe { Avx2::new() }, rows, first, inputs, outs),
        _ => one_by_one(rows, first, inputs, outs),
    }
}

/// Computes [`of_rows`] by [`simd::dot_bf16`].
fn one_by_one(rows: &Bf16Rows, first: usize, inputs: &[&Input], outs: &mut [&mut [f32]]) {
    for r in 0..outs[0].len() {
        let row = rows.row(first + r);
        for (input, out) in inputs.iter().zip(&mut *outs) {
            out[r] = simd::dot_bf16(row, &input.values);
        }
    }
}

/// Computes [`of_rows`] with vectors.
#[inline(always)]
fn of_rows_by<S: Simd, const M: usize>(
    simd: S,
    rows: &Bf16Rows,
    first: usize,
    inputs: &[&Input; M],
    outs: &mut [&mut [f32]; M],
) {
    let n = outs[0].len();
    let at_once = LANES / (2 * M);
    let mut all = [simd.splat(0.0); LANES];
    for start in (0..n).step_by(at_once) {
        let count = at_once.min(n - start);
        for (r, all) in all.chunks_exact_mut(2 * M).take(count).enumerate() {
            let row = rows.row(first + start + r);
            inputs
                .iter()
                .for_each(|of| assert_eq!(of.values.len(), row.len(), "values of a product"));
            let (chunks, _) = row.as_chunks::<WIDE>();
            let sums = match M {
                1 => both_parts(simd, chunks, inputs),
                _ => [part_of(simd, chunks, inputs, 0), part_of(simd, chunks, inputs, 1)],
            };
            for m in 0..M {
                for parity in 0..2 {
                    all[2 * m + parity] = simd.add(sums[0][m][parity], sums[1][m][parity]);
                }
            }
        }
        let sums = simd.sums(&all);
        for r in 0..count {
            let row = rows.row(first + start + r);
            let (_, tail) = row.as_chunks::<WIDE>();
            for m in 0..M {
                let rest = inputs[m].values[row.len() - tail.len()..].iter().zip(tail);
                let rest = rest.fold(0.0, |sum, (x, w)| sum + w.to_f32() * x);
                let at = 2 * (r * M + m);
                outs[m][start + r] = (sums[at] + sums[at + 1]) + rest;
            }
        }
    }
}

/// Returns the partial sums of the products of one part of each chunk with M inputs, by input and parity.
#[inline(always)]
fn part_of<S: Simd, const M: usize>(
    simd: S,
    chunks: &[[bf16; WIDE]],
    inputs: &[&Input; M],
    part: usize,
) -> [[S::Vector; 2]; M] {
    let mut sums = [[simd.splat(0.0); 2]; M];
    for (c, chunk) in chunks.iter().enumerate() {
        add_part(simd, chunk, inputs, [c, part], &mut sums);
    }
    sums
}

/// Returns what [`part_of`] returns for each part, in one pass over the chunks.
#[inline(always)]
fn both_parts<S: Simd, const M: usize>(
    simd: S,
    chunks: &[[bf16; WIDE]],
    inputs: &[&Input; M],
) -> [[[S::Vector; 2]; M]; 2] {
    let (mut first, mut second) = ([[simd.splat(0.0); 2]; M], [[simd.splat(0.0); 2]; M]);
    for (c, chunk) in chunks.iter().enumerate() {
        add_part(simd, chunk, inputs, [c, 0], &mut first);
        add_part(simd, chunk, inputs, [c, 1], &mut second);
    }
    [first, second]
}

/// Adds the products of a part of chunk number `c`, and asks for what follows it in memory.
#[inline(always)]
fn add_part<S: Simd, const M: usize>(
    simd: S,
    chunk: &[bf16; WIDE],
    inputs: &[&Input; M],
    [c, part]: [usize; 2],
    sums: &mut [[S::Vector; 2]; M],
) {
    let weights = &chunk.as_chunks::<PART>().0[part];
    prefetch_beyond(weights, AHEAD);
    let weights = simd.widen_pairs_bf16(weights);
    for m in 0..M {
        // SAFETY: an input has as many chunks as the row, which `of_rows_by` checks.
        let input = unsafe { inputs[m].chunks.get_unchecked(c) };
        for parity in 0..2 {
            let products = simd.mul(weights[parity], simd.load(&input.0[part][parity]));
            sums[m][parity] = simd.add(sums[m][parity], products);
        }
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, s};

    use super::super::attention::lanes::Plain;
    use super::super::layout::elements;
    use super::*;
    use crate::float::Float;
    use crate::testing::values;
    use crate::weight::Weight;

    /// Calls `of` with weights and inputs of several sizes, and with the products that [`simd::dot_bf16`] gives: `[inputs, rows]`.
    fn each_case(of: impl Fn(&Weight, &[Input], &Array2<f32>)) {
        for k in [1, 63, 64, 100, 576, 1087] {
            for n in [1, 3, 4, 8, 21] {
                let all = Array2::from_shape_vec((n, k), values(n * k, 1)).expect("as many values");
                let weight = Weight::from_values(all.view(), Float::Bf16).expect("a weight");
                let inputs: Vec<Input> = (2..7).map(|seed| Input::new(values(k, seed))).collect();
                let rows = weight.bf16_rows().expect("values in bf16");
                let product = |(i, r): (usize, usize)| simd::dot_bf16(rows.row(r), inputs[i].values());
                of(
                    &weight,
                    &inputs,
                    &Array2::from_shape_fn((inputs.len(), n), product),
                );
            }
        }
    }

    /// Checks vectors with one and with two inputs, from the second row on if there are several.
    fn check<S: Simd>(simd: S, weight: &Weight, inputs: &[Input], expected: &Array2<f32>) {
        let rows = weight.bf16_rows().expect("values in bf16");
        let first = 1.min(weight.rows() - 1);
        let expected = expected.slice(s![.., first..]);
        let [mut a, mut b] = [0, 1].map(|_| vec![f32::NAN; expected.ncols()]);
        of_rows_by(
            simd,
            &rows,
            first,
            &[&inputs[0], &inputs[1]],
            &mut [&mut a, &mut b],
        );
        assert_eq!([&a[..], &b], [0, 1].map(|i| elements(&expected.row(i)).to_vec()));
        of_rows_by(simd, &rows, first, &[&inputs[2]], &mut [&mut a]);
        assert_eq!(a, elements(&expected.row(2)));
    }

    #[test]
    fn vectors_give_the_bits_of_the_definition() {
        each_case(|weight, inputs, expected| {
            check(Plain::<false>, weight, inputs, expected);
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                // SAFETY: the machine has these instructions.
                check(unsafe { Avx2::new() }, weight, inputs, expected);
            }
        });
    }

    #[test]
    fn any_number_of_inputs_is_multiplied() {
        each_case(|weight, inputs, expected| {
            let rows = weight.bf16_rows().expect("values in bf16");
            for n in 0..=inputs.len() {
                let mut out = Array2::from_elem((n, weight.rows()), f32::NAN);
                products(&rows, 0, &inputs[..n], out.view_mut());
                assert_eq!(out, expected.slice(s![..n, ..]));
            }
        });
    }
}
