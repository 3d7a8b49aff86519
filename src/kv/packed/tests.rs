//! Tests of the 2-bit cache: the stored bits, the attention over them, and the error of what is read back.

use ndarray::Array2;

use super::*;
use crate::compute::attention::LANES;
use crate::compute::attention::kernels::{add_of, scores_of};
#[cfg(target_arch = "x86_64")]
use crate::compute::attention::lanes::{Avx2, Avx512};
use crate::compute::attention::lanes::{Plain, Simd};

#[test]
fn two_bit_golden_example() {
    let mut rows = TwoBit::new(4, 1);
    rows.push(&[0.1, 0.4, 0.75, 1.0]);
    assert_eq!(rows.row(0)[0], 0xe4);
    let mut out = [0.0; 4];
    rows.read(0, &mut out);
    for (x, expected) in out.iter().zip([0.1, 0.4, 0.7, 1.0]) {
        // Scale and zero point have 11 bits.
        assert!((x - expected).abs() < 1e-3, "{out:?}");
    }
}

#[test]
fn sign_golden_example() {
    let mut signs = AlignedVec::with_capacity(0);
    let key = ndarray::array![[0.5, -1.0, 2.0, -0.25, -3.0, 0.0, 1.5, 4.0]];
    extend_signs(&mut signs, key.view(), &[0.0; 8]);
    assert_eq!(signs[..], [0xc5]);
}

#[test]
fn equal_values_and_extremes_survive() {
    let mut rows = TwoBit::new(40, 1);
    let mut row = vec![2.5; 40];
    row[39] = 1e30;
    rows.push(&row);
    let mut out = vec![0.0; 40];
    rows.read(0, &mut out);
    assert_eq!(out[..32], row[..32], "a constant group is exact");
    assert!(out.iter().all(|x| x.is_finite()));
}

#[test]
fn a_position_takes_seven_bits_per_channel() {
    for (d, bytes) in [(128, 112), (64, 56)] {
        let mut packed = Packed::new(d, Center::Median, 1000);
        let rows = Array2::from_shape_fn((1000, d), |(i, j)| ((i * d + j) as f32 * 0.7).sin());
        packed.prompt(rows.view(), rows.view(), &vec![1.0; d], 0..1000);
        let full = 2 * FULL * (2 * d + 4);
        assert_eq!(packed.bytes(), 1000 * bytes + full + 2 * 4 * d, "d {d}");
    }
}

/// Keys whose channels have very different sizes and centers.
fn keys(first: usize, n: usize, d: usize) -> Array2<f32> {
    Array2::from_shape_fn((n, d), |(i, j)| {
        let x = (((first + i) * d + j) as f32 * 0.7).sin() + (((first + i) * 7 + j) as f32 * 0.31).cos();
        x * (1.0 + (j % 5) as f32) + (j % 3) as f32 * 10.0
    })
}

/// Mean over rows and channels of the squared error, relative to the squared size of the channel.
fn error(packed: &Packed, exact: &Array2<f32>) -> f64 {
    let d = exact.ncols();
    let mut scratch = vec![0.0; d];
    let mut sum = 0.0;
    for (p, row) in exact.rows().into_iter().enumerate() {
        let read = packed.keys.row(p, &mut scratch);
        for (j, (x, y)) in read.iter().zip(row).enumerate() {
            sum += f64::from((x - y) / (1.0 + (j % 5) as f32)).powi(2);
        }
    }
    sum / exact.len() as f64
}

/// Scores and weighted sums of rows that are all in 2 bits, on every instruction set of this machine.
fn on_every_instruction_set(
    packed: &Packed,
    queries: &GroupQueries,
    weights: &[f32],
    sums: usize,
) -> Vec<(Vec<f32>, Vec<f32>)> {
    fn attended<S: Simd, const ROWS: usize, const CHUNKS: usize>(
        simd: S,
        packed: &Packed,
        queries: &GroupQueries,
        weights: &[f32],
        sums: usize,
    ) -> (Vec<f32>, Vec<f32>) {
        let positions: Vec<u32> = (0..packed.len() as u32).collect();
        let (n, run) = (positions.len(), Run::new(&positions, positions.len()));
        let r = weights.len() / n;
        let mut scores = vec![0.0; weights.len()];
        let keys = attend::Keys::<true>::new(&packed.keys);
        scores_of::<S, _, ROWS, ROWS, ROWS>(simd, &keys.scaled(queries), keys, &run, &mut scores, n);
        let mut values = vec![[0.5; LANES]; sums];
        let mut of = OutputSums {
            r,
            values: &mut values,
        };
        add_of::<S, _, CHUNKS, CHUNKS>(
            simd,
            weights,
            n,
            attend::Values::new(&packed.values),
            &run,
            &mut of,
        );
        (scores, values.as_flattened().to_vec())
    }
    let mut out = vec![
        attended::<_, 1, 1>(Plain::<false>, packed, queries, weights, sums),
        attended::<_, 2, 4>(Plain::<true>, packed, queries, weights, sums),
    ];
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c") {
            // SAFETY: AVX2 and F16C were detected, and every machine with both has FMA.
            out.push(attended::<_, 2, 2>(
                unsafe { Avx2::new() },
                packed,
                queries,
                weights,
                sums,
            ));
        }
        if is_x86_feature_detected!("avx512dq") {
            // SAFETY: AVX-512 DQ was detected, and machines with it have BW and VL.
            out.push(attended::<_, 4, 4>(
                unsafe { Avx512::new() },
                packed,
                queries,
                weights,
                sums,
            ));
        }
    }
    out
}

#[test]
fn every_instruction_set_reads_the_same_rows() {
    for (d, r) in [(32, 1), (96, 4), (128, 3)] {
        let mut packed = Packed::new(d, Center::Mean, 0);
        let exact = keys(0, 150, d);
        packed.extend(exact.view(), exact.view());
        let queries = Array2::from_shape_fn((r, d), |(a, j)| ((a * d + j) as f32 * 0.9).sin());
        let queries = GroupQueries::new(queries.view(), 0.1);
        let weights: Vec<f32> = (0..r * 150).map(|i| (i as f32 * 0.3).cos()).collect();
        let all: Vec<u32> = (0..150).collect();
        let run = Run::new(&all, 150);
        let mut sums = vec![[0.5; LANES]; r * d / LANES];
        let mut of = OutputSums { r, values: &mut sums };
        attention::widened_add(&packed.values, &weights, 150, &run, &mut of);
        let found = on_every_instruction_set(&packed, &queries, &weights, sums.len());
        for (scores, of_values) in &found {
            assert_eq!(*scores, found[0].0, "d {d}, r {r}");
            assert_eq!(*of_values, sums.as_flattened(), "d {d}, r {r}");
        }
    }
}

/// Sums of 2-bit values are, to the bit, those of the same rows widened to f32 first. Scores of 2-bit keys, whose center and
/// scale are applied to the queries, match f64 within the rounding of two products and of d fused sums, twice.
#[test]
fn rows_are_attended_as_they_are_read() {
    for (d, r, signed) in [
        (32, 1, true),
        (64, 4, false),
        (80, 2, true),
        (96, 3, true),
        (128, 5, true),
        (128, 2, false),
        (256, 4, true),
    ] {
        let layout = Layout {
            center: Center::Mean,
            full: 5,
            signed,
            ..Layout::from(Center::Mean)
        };
        let mut packed = Packed::new(d, layout, 0);
        let mut exact = keys(0, 200, d);
        exact.row_mut(7).fill(3.0);
        exact[[9, d - 1]] = 1e30;
        packed.prompt(exact.view(), exact.view(), &vec![1.0; d], 0..200);
        let full = packed.keys.full_positions().to_vec();
        let chosen: Vec<u32> = (0..200).filter(|p| p % 3 != 1 || *p == full[1]).collect();
        let q = Array2::from_shape_fn((r, d), |(a, j)| ((a * d + j) as f32 * 0.9).sin());
        let queries = GroupQueries::new(q.view(), 1.0);
        let next = [3, 199];
        for now in [&chosen[..], &chosen[20..37], &full, &full[1..2], &[]] {
            let run = Run { now, next: &next };
            let n = now.len();
            let mut scores = vec![0.5; r * (n + 3)];
            packed.keys.scores(&queries, &run, &mut scores, n + 3);
            let mut scratch = vec![0.0; d];
            for (a, scores) in scores.chunks(n + 3).enumerate() {
                assert_eq!(scores[n..], [0.5; 3], "d {d}, r {r}: beyond the positions");
                for (p, score) in now.iter().zip(scores) {
                    let key = packed.keys.row(*p as usize, &mut scratch);
                    let (mut exact, mut size) = (0.0, 0.0);
                    for ((q, k), c) in q.row(a).iter().zip(key).zip(packed.keys.centers()) {
                        let [q, k, c] = [*q, *k, *c].map(f64::from);
                        exact += q * k;
                        size += (q * c).abs() + (q * (k - c)).abs();
                    }
                    let error = (f64::from(*score) - exact).abs();
                    let bound = 2.0 * (d + 4) as f64 * 2f64.powi(-24) * size;
                    assert!(
                        error <= bound,
                        "d {d}, r {r}, signed {signed}, {p}: {error} over {bound}"
                    );
                }
            }
            let weights: Vec<f32> = (0..r * (n + 3)).map(|i| (i as f32 * 0.3).cos()).collect();
            let sum = |add: &dyn Fn(&mut OutputSums)| {
                let mut values = vec![[0.25; LANES]; r * d.div_ceil(LANES)];
                add(&mut OutputSums {
                    r,
                    values: &mut values,
                });
                values
            };
            let got = sum(&|sums| packed.values.add(&weights, n + 3, &run, sums));
            let expected = sum(&|sums| attention::widened_add(&packed.values, &weights, n + 3, &run, sums));
            assert_eq!(got, expected, "d {d}, r {r}, {n} positions");
        }
    }
}

#[test]
fn short_prompts_are_held_as_well_as_long_ones() {
    let d = 64;
    let after = |lengths: &[usize]| {
        let mut packed = Packed::new(d, Center::Median, 0);
        let all = keys(0, lengths.iter().sum(), d);
        let mut end = 0;
        for m in lengths {
            end += m;
            // Earlier rows, as read back from the cache.
            let mut known = all.slice(s![..end, ..]).to_owned();
            let mut scratch = vec![0.0; d];
            for (p, mut row) in known.rows_mut().into_iter().take(end - m).enumerate() {
                row.assign(&ArrayView1::from(packed.keys.row(p, &mut scratch)));
            }
            packed.prompt(known.view(), known.view(), &vec![1.0; d], 0..end);
        }
        error(&packed, &all)
    };
    let long = after(&[1000]);
    assert!(long < 0.1, "{long}");
    // One token more than half precision has room for; conversations that start with a few tokens.
    for lengths in [
        &[65][..],
        &[66],
        &[80],
        &[130],
        &[1, 600],
        &[3, 70, 600],
        &[20, 40, 300],
    ] {
        let error = after(lengths);
        assert!(error < 1.5 * long, "{lengths:?}: {error}, long {long}");
    }
}

#[test]
fn the_ablations_hold_what_they_say() {
    let (n, d) = (400, 64);
    let exact = keys(0, n, d);
    let held = |full: usize, signed: bool| {
        let layout = Layout {
            center: Center::Mean,
            full,
            signed,
            ..Layout::from(Center::Mean)
        };
        let mut packed = Packed::new(d, layout, n);
        packed.prompt(exact.view(), exact.view(), &vec![1.0; d], 0..n);
        assert_eq!(packed.keys.full_positions().len(), full);
        (error(&packed, &exact), packed.keys.signs().to_vec())
    };
    let (signed, signs) = held(0, true);
    let (plain, same) = held(0, false);
    assert_eq!(signs, same, "the index does not change");
    // A key stored without signs has two bits for its whole range, instead of two bits for the magnitude and one for
    // the sign: its steps are up to twice as large, so the squared error is up to four times as large.
    assert!(plain > 1.5 * signed && plain < 6.0 * signed, "{plain} {signed}");
    let (some, _) = held(64, true);
    assert!(some < signed, "{some} {signed}");
}
