//! Products of rows of bf16 weights with few input rows: the loops of a decode step that read the most memory.
//!
//! [`dot`] defines each product to the last bit. With AVX2 or AVX-512, a row of the weight is read from memory once for up
//! to three input rows, and the lanes of sixteen vectors are summed together.

use half::bf16;
use multiversion::multiversion;
use multiversion::target::match_target;

#[cfg(target_arch = "x86_64")]
use super::attention::lanes::{Avx2, Avx512};
use super::attention::lanes::{LANES, Simd};
use super::simd::{WIDE, fold, short_dot};
use crate::prefetch::prefetch_ahead;
use crate::weight::Bf16Rows;

/// Returns the dot product of a row of a weight with an input row. Prefetches the weights that follow.
///
/// # Numerics
/// f32, each product and each sum rounded. Sum l of [`WIDE`] takes the products at l, l + [`WIDE`] and so on; these sums are
/// added by halves, and then the sum of the products beyond the last whole chunk, in order.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn dot(row: &[bf16], input: &[f32]) -> f32 {
    assert_eq!(row.len(), input.len(), "values of a product");
    let ((chunks, row_tail), (inputs, tail)) = (row.as_chunks::<WIDE>(), input.as_chunks::<WIDE>());
    let mut acc = [0.0f32; WIDE];
    for (weights, inputs) in chunks.iter().zip(inputs) {
        prefetch_ahead(weights);
        for l in 0..WIDE {
            acc[l] += f32::from_bits(u32::from(weights[l].to_bits()) << 16) * inputs[l];
        }
    }
    fold(acc) + of_tail(row_tail, tail)
}

/// Returns the dot product of less than a chunk, added in order.
#[inline(always)]
fn of_tail(row: &[bf16], input: &[f32]) -> f32 {
    let mut wide = [0.0f32; WIDE];
    wide.iter_mut().zip(row).for_each(|(to, w)| *to = w.to_f32());
    short_dot(&wide[..row.len()], input)
}

/// The most input rows that share the reading of a row of the weight; AVX2 has no registers for the partial sums of more.
const TOGETHER: usize = 3;
/// Values of half a chunk of [`WIDE`] values: one vector of those at even indices, and one of those at odd indices.
const HALF: usize = 2 * LANES;

/// A chunk of an input row in the order of [`Simd::widen_pairs_bf16`], `[half, parity, lane]`; aligned so that no vector crosses
/// a line of the cache.
#[repr(align(64))]
struct Chunk([[[f32; LANES]; 2]; 2]);

/// An input row, and its whole chunks in the order in which the kernel reads them.
pub struct InputRow {
    values: Vec<f32>,
    /// The whole chunks of `values`, reordered; none if no weight is in bf16.
    chunks: Vec<Chunk>,
}

impl InputRow {
    /// Prepares an input row; `for_bf16` says whether it is multiplied with weights in bf16.
    pub fn new(values: Vec<f32>, for_bf16: bool) -> Self {
        let split = |half: &[f32]| [0, 1].map(|parity| std::array::from_fn(|l| half[2 * l + parity]));
        let (whole, _) = values.as_chunks::<WIDE>();
        let whole = if for_bf16 { whole } else { &[] };
        let chunks = whole.iter();
        let chunks = chunks.map(|of| Chunk([split(&of[..HALF]), split(&of[HALF..])]));
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

/// Computes the products of every input row with `n` rows of a weight, from row `first` on.
///
/// # Shapes
/// outs `[inputs][n]`.
///
/// # Numerics
/// See [`dot`].
///
/// # Panics
/// Input rows of another length than the weight's, or not prepared for bf16; `outs` of another shape.
pub fn products(weight: &Bf16Rows, first: usize, inputs: &[InputRow], outs: &mut [&mut [f32]]) {
    assert_eq!(inputs.len(), outs.len(), "as many outputs as inputs");
    for input in inputs {
        assert_eq!(input.values.len(), weight.cols(), "values of a product");
    }
    let mut start = 0;
    // Groups of nearly equal sizes: an input alone would share nothing.
    for groups_left in (1..=inputs.len().div_ceil(TOGETHER)).rev() {
        let end = start + (inputs.len() - start).div_ceil(groups_left);
        let (inputs, outs) = (&inputs[start..end], &mut outs[start..end]);
        match inputs.len() {
            1 => group::<1>(weight, first, inputs, outs),
            2 => group::<2>(weight, first, inputs, outs),
            _ => group::<TOGETHER>(weight, first, inputs, outs),
        }
        start = end;
    }
}

/// Computes [`products`] of M input rows.
fn group<const M: usize>(weight: &Bf16Rows, first: usize, inputs: &[InputRow], outs: &mut [&mut [f32]]) {
    let inputs: &[InputRow; M] = inputs.try_into().expect("M input rows");
    of_inputs(weight, first, inputs, outs);
}

/// Computes [`group`] with the instructions of this machine.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2+fma+f16c"))]
fn of_inputs<const M: usize>(
    weight: &Bf16Rows,
    first: usize,
    inputs: &[InputRow; M],
    outs: &mut [&mut [f32]],
) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx512f+avx512bw+avx512dq+avx512vl" => with_vectors(unsafe { Avx512::new() }, weight, first, inputs, outs),
        // SAFETY: as above.
        "x86_64+avx2+fma+f16c" => with_vectors(unsafe { Avx2::new() }, weight, first, inputs, outs),
        _ => one_by_one(weight, first, inputs, outs),
    }
}

/// Computes [`of_inputs`] by [`dot`].
fn one_by_one(weight: &Bf16Rows, first: usize, inputs: &[InputRow], outs: &mut [&mut [f32]]) {
    for (input, out) in inputs.iter().zip(outs) {
        for (r, out) in out.iter_mut().enumerate() {
            *out = dot(weight.row(first + r), &input.values);
        }
    }
}

/// Computes [`of_inputs`] with vectors.
#[inline(always)]
fn with_vectors<S: Simd, const M: usize>(
    simd: S,
    weight: &Bf16Rows,
    first: usize,
    inputs: &[InputRow; M],
    outs: &mut [&mut [f32]],
) {
    let n = outs[0].len();
    // Two vectors per product: its sums at even and at odd indices.
    let at_once = LANES / (2 * M);
    let mut all = [simd.splat(0.0); LANES];
    for start in (0..n).step_by(at_once) {
        let count = at_once.min(n - start);
        for (r, all) in all.chunks_exact_mut(2 * M).take(count).enumerate() {
            let (chunks, _) = weight.row(first + start + r).as_chunks::<WIDE>();
            // With several inputs, the sums of both parities would leave AVX2 no free register, so that each parity has its own
            // pass. The first reads the row from memory, from start to end; the second finds it in the cache.
            let sums = match M {
                1 => partial_sums::<S, M, 2>(simd, chunks, inputs, 0),
                _ => {
                    let [even] = partial_sums::<S, M, 1>(simd, chunks, inputs, 0);
                    let [odd] = partial_sums::<S, M, 1>(simd, chunks, inputs, 1);
                    [even, odd]
                }
            };
            for m in 0..M {
                for parity in 0..2 {
                    all[2 * m + parity] = sums[parity][m];
                }
            }
        }
        let sums = simd.sums(&all);
        for r in 0..count {
            let row = weight.row(first + start + r);
            let (_, tail) = row.as_chunks::<WIDE>();
            for m in 0..M {
                let rest = &inputs[m].values[row.len() - tail.len()..];
                let at = 2 * (r * M + m);
                outs[m][start + r] = (sums[at] + sums[at + 1]) + of_tail(tail, rest);
            }
        }
    }
}

/// Returns the partial sums of the products of a row's chunks with M input rows, for P parities from parity `first` on, the
/// sums of the two halves added: `[parity, input]`. The pass with parity 0 prefetches the weights that follow.
#[inline(always)]
fn partial_sums<S: Simd, const M: usize, const P: usize>(
    simd: S,
    chunks: &[[bf16; WIDE]],
    inputs: &[InputRow; M],
    first: usize,
) -> [[S::Vector; M]; P] {
    let mut of: [&[Chunk]; M] = [&[]; M];
    for m in 0..M {
        of[m] = &inputs[m].chunks[..chunks.len()];
    }
    let mut sums = [[[simd.splat(0.0); 2]; M]; P];
    for (c, chunk) in chunks.iter().enumerate() {
        for (half, weights) in chunk.as_chunks::<HALF>().0.iter().enumerate() {
            if first == 0 {
                prefetch_ahead(weights);
            }
            let weights = simd.widen_pairs_bf16(weights);
            for m in 0..M {
                // SAFETY: `of` was cut to as many chunks as there are.
                let input = &unsafe { of[m].get_unchecked(c) }.0[half];
                for (p, sums) in sums.iter_mut().enumerate() {
                    let products = simd.mul(weights[first + p], simd.load(&input[first + p]));
                    sums[m][half] = simd.add(sums[m][half], products);
                }
            }
        }
    }
    let mut added = [[simd.splat(0.0); M]; P];
    for p in 0..P {
        for m in 0..M {
            added[p][m] = simd.add(sums[p][m][0], sums[p][m][1]);
        }
    }
    added
}

#[cfg(test)]
mod tests {
    use ndarray::{Array2, ArrayView2, s};

    use super::super::attention::lanes::Plain;
    use super::super::simd;
    use super::*;
    use crate::float::Float;
    use crate::testing::values;
    use crate::weight::Weight;

    /// Calls `of` with weights and input rows of several sizes, and with the products that [`dot`] gives: `[inputs,
    /// rows]`.
    fn each_case(of: impl Fn(&Weight, &[InputRow], &Array2<f32>)) {
        for k in [1, 63, 64, 100, 576, 1087] {
            for n in [1, 3, 4, 8, 21] {
                let all = Array2::from_shape_vec((n, k), values(n * k, 1)).expect("as many values");
                let mut weight = Weight::from_values(all.view(), Float::Bf16).expect("a weight");
                // Rows of a file that alternates between the halves of a head.
                weight.alternating = n.is_multiple_of(4).then_some(4);
                let inputs = (2..8).map(|seed| InputRow::new(values(k, seed), true));
                let inputs: Vec<InputRow> = inputs.collect();
                let product = |(i, r): (usize, usize)| {
                    let row = bytemuck::cast_slice(weight.row_bytes(r));
                    dot(row, inputs[i].values())
                };
                of(
                    &weight,
                    &inputs,
                    &Array2::from_shape_fn((inputs.len(), n), product),
                );
            }
        }
    }

    #[track_caller]
    fn assert_same_bits(found: ArrayView2<f32>, expected: ArrayView2<f32>) {
        assert_eq!(found.mapv(f32::to_bits), expected.mapv(f32::to_bits));
    }

    /// Checks a kernel with M input rows, from the second row of the weight on if there are several.
    fn check_group<S: Simd, const M: usize>(
        simd: S,
        weight: &Weight,
        inputs: &[InputRow],
        expected: &Array2<f32>,
    ) {
        let rows = weight.bf16_rows().expect("values in bf16");
        let first = 1.min(weight.rows() - 1);
        let expected = expected.slice(s![..M, first..]);
        let mut out = Array2::from_elem(expected.dim(), f32::NAN);
        let outs = out.rows_mut().into_iter();
        let mut outs: Vec<&mut [f32]> = outs.map(|out| out.into_slice().expect("contiguous")).collect();
        let inputs: &[InputRow; M] = inputs[..M].try_into().expect("M input rows");
        with_vectors(simd, &rows, first, inputs, &mut outs);
        assert_same_bits(out.view(), expected);
    }

    /// Checks a kernel with every number of input rows that it takes together.
    fn check<S: Simd>(simd: S, weight: &Weight, inputs: &[InputRow], expected: &Array2<f32>) {
        check_group::<S, 1>(simd, weight, inputs, expected);
        check_group::<S, 2>(simd, weight, inputs, expected);
        check_group::<S, TOGETHER>(simd, weight, inputs, expected);
    }

    #[test]
    fn vectors_give_the_bits_of_the_definition() {
        each_case(|weight, inputs, expected| {
            check(Plain::<false>, weight, inputs, expected);
            #[cfg(target_arch = "x86_64")]
            {
                if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
                    // SAFETY: just asked; every machine with AVX2 and F16C has FMA.
                    check(unsafe { Avx2::new() }, weight, inputs, expected);
                }
                if is_x86_feature_detected!("avx512dq") {
                    // SAFETY: machines with AVX-512 DQ have BW and VL.
                    check(unsafe { Avx512::new() }, weight, inputs, expected);
                }
            }
        });
    }

    #[test]
    fn any_number_of_inputs_is_multiplied() {
        each_case(|weight, inputs, expected| {
            let rows = weight.bf16_rows().expect("values in bf16");
            let first = weight.rows() / 2;
            for n in 0..=inputs.len() {
                let mut out = Array2::from_elem((n, weight.rows() - first), f32::NAN);
                let mut outs: Vec<&mut [f32]> = out
                    .rows_mut()
                    .into_iter()
                    .filter_map(|row| row.into_slice())
                    .collect();
                products(&rows, first, &inputs[..n], &mut outs);
                assert_same_bits(out.view(), expected.slice(s![..n, first..]));
            }
        });
    }

    #[test]
    fn weights_that_are_not_aligned_give_the_same_bits() {
        each_case(|weight, inputs, expected| {
            let mut wide = vec![0.0; weight.cols()];
            for ((i, r), expected) in expected.indexed_iter() {
                weight.read(r, 0, &mut wide);
                let product = simd::dot(&wide, inputs[i].values());
                assert_eq!(product.to_bits(), expected.to_bits());
            }
        });
    }
}
