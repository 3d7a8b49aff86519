//! Codes against f64, and every instruction set against plain arithmetic.

use ndarray::Array2;

use super::*;
use crate::testing::{numbers, values};

/// Rows of random codes, with scales of several sizes.
fn random_rows(bits: usize, d: usize, n: usize) -> Vec<u8> {
    let mut number = numbers(3);
    let mut rows = Vec::new();
    for _ in 0..n {
        rows.extend((0..code_bytes(bits, d)).map(|_| number() as u8));
        for _ in 0..d.div_ceil(GROUP) {
            let scale = f16::from_f32((number() % 100) as f32 * 0.002);
            let offset = f16::from_f32((number() % 100) as f32 * 0.03 - 2.0);
            rows.extend_from_slice(bytemuck::bytes_of(&[scale, offset]));
        }
    }
    rows
}

fn matrix(rows: usize, d: usize, seed: u32) -> Array2<f32> {
    Array2::from_shape_vec((rows, d), values(rows * d, seed)).unwrap()
}

/// Scores `[r,n]` and sums `[r,d]` of the rows at some positions, and how far they may be from those of f64.
struct Expected {
    scores: Vec<[f64; 2]>,
    sums: Vec<[f64; 2]>,
}

fn expected<const BITS: usize>(
    rows: CodeRows<BITS>,
    q: &Array2<f32>,
    weights: &[f32],
    positions: &[u32],
) -> Expected {
    let (r, d, n) = (q.nrows(), rows.d, positions.len());
    let value = |p: u32, c: usize| {
        let row = rows.row(p);
        let [scale, offset] = rows.pair(row, c / GROUP).map(|x| f64::from(x.to_f32()));
        let code = f64::from(code::<BITS>(row, c / GROUP, c % GROUP));
        (code * scale, offset)
    };
    let mut scores = vec![[0.0; 2]; r * n];
    for (i, [score, bound]) in scores.iter_mut().enumerate() {
        let (a, p) = (i / n, positions[i % n]);
        for first in (0..d).step_by(GROUP) {
            let channels = first..d.min(first + GROUP);
            let most = channels
                .clone()
                .map(|c| f64::from(q[[a, c]].abs()))
                .fold(0.0, f64::max);
            for c in channels {
                let ((x, offset), q) = (value(p, c), f64::from(q[[a, c]]));
                *score += (x + offset) * q;
                // Half a unit of the query in integers, and what f32 rounds.
                *bound += x.abs() * most / 32767.0 * 0.51 + 2f64.powi(-22) * (x + offset.abs()) * q.abs();
            }
        }
    }
    let mut sums = vec![[0.0; 2]; r * d];
    for (i, [sum, bound]) in sums.iter_mut().enumerate() {
        let (a, c) = (i / d, i % d);
        for block in (0..n).step_by(BLOCK) {
            let block = block..n.min(block + BLOCK);
            let scaled = |i: usize| {
                let [scale, _] = rows.pair(rows.row(positions[i]), c / GROUP);
                f64::from(weights[a * n + i] * scale.to_f32())
            };
            let most = block
                .clone()
                .map(scaled)
                .fold(0.0, |most: f64, x| most.max(x.abs()));
            for i in block {
                let ((x, offset), w) = (value(positions[i], c), f64::from(weights[a * n + i]));
                let code = f64::from(code::<BITS>(rows.row(positions[i]), c / GROUP, c % GROUP));
                *sum += (x + offset) * w;
                *bound += code * most / 32767.0 * 0.51 + 2f64.powi(-20) * (x + offset.abs()) * w.abs();
            }
        }
    }
    Expected { scores, sums }
}

/// Takes rows as [`CodeRows`] of some bits.
type Take<const BITS: usize> =
    for<'a> fn([&'a [Segment<'a, u8>]; 2], usize, usize, usize) -> CodeRows<'a, BITS>;

/// Without scales, rows are codes alone, each behind as many bytes of other rows.
fn check<const BITS: usize>(has_scales: bool, take: Take<BITS>) {
    for (d, r, n) in [
        (16, 1, 40),
        (64, 3, 75),
        (80, 4, 33),
        (96, 2, 20),
        (128, 5, 65),
        (128, 8, 1),
        (32, 7, 64),
    ] {
        let codes = code_bytes(BITS, d);
        let (stored, stride) = if has_scales {
            (random_rows(BITS, d, 2 * n), width(BITS, d))
        } else {
            let mut number = numbers(3);
            ((0..4 * n * codes).map(|_| number() as u8).collect(), 2 * codes)
        };
        let mut number = numbers(4);
        let lower: Vec<u8> = stored.iter().map(|_| number() as u8).collect();
        // The rows in two segments.
        let segments = [&stored, &lower].map(|of: &Vec<u8>| {
            let (first, second) = of.split_at(n * stride);
            [(0, first), (n, second)].map(|(first, rows)| Segment { first, rows })
        });
        let rows = take([&segments[0], &segments[1]], d, stride, codes);
        let q = matrix(r, d, 6);
        let queries = GroupQueries::new(q.view(), 1.0);
        let weights = values(r * n, 7);
        // Every other row, the last among them.
        let positions: Vec<u32> = (0..n as u32).map(|p| 2 * p + 1).collect();
        let run = Run::new(&positions, n);
        let rounded = RoundedQueries::new(&queries, BITS);
        let attended = |scores: &dyn Fn(&mut [f32]), add: &dyn Fn(&mut OutputSums)| {
            let mut out = vec![0.25; r * n];
            scores(&mut out);
            let mut values = vec![[0.5; LANES]; r * d / LANES];
            add(&mut OutputSums {
                r,
                values: &mut values,
            });
            (out, values)
        };
        let plain = attended(
            &|out| plain_scores::<BITS, false>(rows, &rounded, &run, out, n),
            &|sums| plain_add::<BITS, false>(rows, &weights, n, &run, sums),
        );
        let fused = attended(
            &|out| plain_scores::<BITS, true>(rows, &rounded, &run, out, n),
            &|sums| plain_add::<BITS, true>(rows, &weights, n, &run, sums),
        );
        assert!(plain == fused, "{BITS} {d} {r}");
        // What this machine has.
        let own = attended(&|out| rows.scores(&queries, &run, out, n), &|sums| {
            rows.add(&weights, n, &run, sums)
        });
        assert!(plain == own, "{BITS} {d} {r}");
        let expected = expected(rows, &q, &weights, &positions);
        let mut largest = 0.0f64;
        for (found, [score, bound]) in own.0.iter().zip(&expected.scores) {
            let error = (f64::from(*found) - score).abs();
            assert!(
                error <= *bound,
                "{BITS} {d} {r}: score {found}, not {score}, by {bound}"
            );
            largest = largest.max(error / bound);
        }
        for (found, [sum, bound]) in own.1.as_flattened().iter().zip(&expected.sums) {
            let error = (f64::from(*found) - 0.5 - sum).abs();
            // The sums began at 0.5, at which f32 rounds to 2^-24.
            assert!(
                error <= *bound + 1e-7,
                "{BITS} {d} {r}: sum {found}, not {sum}, by {bound}"
            );
            largest = largest.max(error / bound);
        }
        // The bounds are of the size of the errors.
        assert!(largest > 0.01, "{BITS} {d} {r}: {largest}");
    }
}

#[test]
fn codes_are_attended_as_in_f64_on_every_instruction_set() {
    check::<4>(true, |[rows, _], d, _, _| CodeRows::new(rows, d));
    check::<2>(true, |[rows, _], d, _, _| CodeRows::new(rows, d));
    check::<4>(false, |[rows, _], d, stride, at| {
        CodeRows::plane(rows, d, stride, at)
    });
    check::<2>(false, |[rows, _], d, stride, at| {
        CodeRows::plane(rows, d, stride, at)
    });
    check::<8>(false, |planes, d, stride, at| {
        CodeRows::joined(planes, d, stride, at)
    });
}

#[test]
fn every_channel_has_its_place() {
    for bits in [8, 4, 2] {
        for channel in [score_channel, sum_channel] {
            let mut all: Vec<usize> = (0..GROUP).map(|at| channel(bits, at)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..GROUP).collect::<Vec<_>>());
        }
    }
}

/// What is not finite stays so, and equal or zero numbers are exact.
#[test]
fn extremes_are_kept() {
    let stored = random_rows(4, 64, 40);
    let segments = [Segment {
        first: 0,
        rows: &stored[..],
    }];
    let rows = CodeRows::<4>::new(&segments, 64);
    let positions: Vec<u32> = (0..40).collect();
    let run = Run::new(&positions, 40);
    for (x, is_finite) in [
        (0.0, true),
        (1e-40, true),
        (f32::NAN, false),
        (f32::INFINITY, false),
    ] {
        let mut q = matrix(1, 64, 2);
        q[[0, 5]] = x;
        let mut out = vec![0.0; 40];
        rows.scores(&GroupQueries::new(q.view(), 1.0), &run, &mut out, 40);
        assert!(out.iter().all(|score| score.is_finite() == is_finite), "{x}");
        let mut weights = values(40, 3);
        weights[7] = x;
        let mut sums = vec![[0.0; LANES]; 4];
        rows.add(
            &weights,
            40,
            &run,
            &mut OutputSums {
                r: 1,
                values: &mut sums,
            },
        );
        assert!(
            sums.as_flattened().iter().all(|sum| sum.is_finite() == is_finite),
            "{x}"
        );
    }
    let mut out = vec![1.0; 40];
    rows.scores(
        &GroupQueries::new(Array2::zeros((1, 64)).view(), 1.0),
        &run,
        &mut out,
        40,
    );
    assert_eq!(out, [0.0; 40]);
}
