//! The running softmax of blocked attention.

use multiversion::multiversion;
use multiversion::target::match_target;

use crate::compute::blocks::{Row, SIDE, multiply_add};

/// Partial sums per row of weights.
const LANES: usize = 16;
/// Powers of two with an exponent below this are taken as zero.
const LEAST: f32 = -126.0;

/// The state of the running softmax of one row, in powers of two.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct Seen {
    /// Partial sums of the weights, relative to `max`.
    sums: [f32; LANES],
    max: f32,
    /// The factor that rescales earlier weights to the current maximum.
    pub rescale: f32,
}

impl Seen {
    /// The state before any score.
    pub const NOTHING: Self = Self {
        sums: [0.0; LANES],
        max: f32::NEG_INFINITY,
        rescale: 1.0,
    };

    /// Returns the sum of all weights so far.
    pub fn sum(&self) -> f32 {
        self.sums.iter().sum()
    }
}

/// Turns scores into weights relative to the largest score so far, `2^(score - max)`. A score of minus infinity gets
/// weight zero.
///
/// # Numerics
/// f32; a power has a relative error below 2e-7 and is zero below 2^-126. The weight of a NaN is NaN. The bits are the
/// same on every instruction set.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
pub fn weigh(scores: &mut [Row], seen: &mut [Seen]) {
    match_target! {
        "x86_64+avx512f+avx512vl" => weigh_rows::<true>(scores, seen),
        "x86_64+avx2+fma" => weigh_rows::<true>(scores, seen),
        "aarch64+neon" => weigh_rows::<true>(scores, seen),
        _ => weigh_rows::<false>(scores, seen),
    }
}

#[inline(always)]
fn weigh_rows<const FMA: bool>(scores: &mut [Row], seen: &mut [Seen]) {
    for (row, seen) in scores.iter_mut().zip(seen) {
        let (line, _) = row.0.as_chunks_mut::<LANES>();
        let max = largest(line);
        seen.rescale = 1.0;
        if max > seen.max {
            // Zero if this row had no score before.
            seen.rescale = exp2::<FMA>(seen.max - max);
            seen.max = max;
            for l in 0..LANES {
                seen.sums[l] *= seen.rescale;
            }
        }
        let shift = if seen.max == f32::NEG_INFINITY {
            0.0
        } else {
            seen.max
        };
        let mut sums = seen.sums;
        for chunk in line {
            for l in 0..LANES {
                chunk[l] = exp2::<FMA>(chunk[l] - shift);
                sums[l] += chunk[l];
            }
        }
        seen.sums = sums;
    }
}

/// Returns the largest value, ignoring NaN.
#[inline(always)]
fn largest(line: &[[f32; LANES]]) -> f32 {
    let larger = |a: f32, b: f32| if a > b { a } else { b };
    let mut best = [f32::NEG_INFINITY; LANES];
    for chunk in line {
        for l in 0..LANES {
            best[l] = larger(chunk[l], best[l]);
        }
    }
    let eight: [f32; 8] = std::array::from_fn(|l| larger(best[l], best[l + 8]));
    let four: [f32; 4] = std::array::from_fn(|l| larger(eight[l], eight[l + 4]));
    larger(larger(four[0], four[2]), larger(four[1], four[3]))
}

/// Returns 2^x for x <= 0 with a relative error below 2e-7; zero for x below [`LEAST`]; NaN for NaN.
#[inline(always)]
fn exp2<const FMA: bool>(x: f32) -> f32 {
    /// ln(2)^k / k! from k = 7 on down: |r| <= 1/2, so the first term left out is below 6e-9.
    const TAYLOR: [f32; 7] = [
        1.525_273_4e-5,
        1.540_353e-4,
        1.333_355_8e-3,
        9.618_129e-3,
        5.550_411e-2,
        2.402_265e-1,
        std::f32::consts::LN_2,
    ];
    /// Adding this constant rounds to an integer, which the low bits of the sum then hold.
    const ROUND: f32 = 12_582_912.0;
    // Not `f32::max`, which would drop a NaN.
    let y = if x < LEAST { LEAST } else { x };
    let rounded = y + ROUND;
    let r = y - (rounded - ROUND);
    let mut p = TAYLOR[0];
    for c in &TAYLOR[1..] {
        p = multiply_add::<FMA>(p, r, *c);
    }
    p = multiply_add::<FMA>(p, r, 1.0);
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127);
    let power = p * f32::from_bits(exponent << 23);
    if x < LEAST { 0.0 } else { power }
}

/// Rescales the weighted sums of each row to the row's current maximum.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn rescale(rows: &mut [Row], seen: &[Seen]) {
    for (row, seen) in rows.iter_mut().zip(seen) {
        if seen.rescale != 1.0 {
            for x in &mut row.0 {
                *x *= seen.rescale;
            }
        }
    }
}

/// Sets all scores outside `visible` to minus infinity.
pub fn mask(row: &mut Row, visible: std::ops::Range<usize>) {
    row.0[..visible.start.min(SIDE)].fill(f32::NEG_INFINITY);
    row.0[visible.end.min(SIDE)..].fill(f32::NEG_INFINITY);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    #[test]
    fn powers_are_accurate_and_total() {
        for i in 0..126_000 {
            let x = i as f32 * -0.001;
            let exact = f64::from(x).exp2();
            for power in [exp2::<true>(x), exp2::<false>(x)] {
                let error = (f64::from(power) - exact).abs() / exact;
                assert!(error < 2e-7, "{x}: {error}");
            }
        }
        assert_eq!(exp2::<true>(0.0), 1.0);
        for x in [-126.1, -1e30, f32::NEG_INFINITY] {
            assert_eq!(exp2::<true>(x), 0.0);
        }
        assert!(exp2::<true>(f32::NAN).is_nan());
    }

    fn block(n: usize, seed: u32) -> Vec<Row> {
        let values: Vec<f32> = values(n * SIDE, seed).iter().map(|x| x * 20.0).collect();
        values.as_chunks::<SIDE>().0.iter().map(|x| Row(*x)).collect()
    }

    /// Compares the running softmax of three blocks of scores, some of them hidden, with the f64 softmax over all
    /// scores.
    #[test]
    fn running_weights_are_those_of_all_scores() {
        let n = 5;
        let mut seen = vec![Seen::NOTHING; n];
        let mut blocks: Vec<Vec<Row>> = (1..4).map(|seed| block(n, seed)).collect();
        // The first block of row 0 is hidden, and the last one of row 1.
        (0..3).for_each(|b| mask(&mut blocks[b][0], if b == 0 { 0..0 } else { 3..77 }));
        mask(&mut blocks[2][1], 128..128);
        let scores = blocks.clone();
        for b in 0..3 {
            let mut plain = (blocks[b].clone(), seen.clone());
            weigh_rows::<false>(&mut plain.0, &mut plain.1);
            weigh(&mut blocks[b], &mut seen);
            for (x, y) in blocks[b].iter().zip(&plain.0) {
                assert_eq!(x.0.map(f32::to_bits), y.0.map(f32::to_bits));
            }
            blocks[..b].iter_mut().for_each(|block| rescale(block, &seen));
        }
        for r in 0..n {
            let all = || (0..3).flat_map(|b| scores[b][r].0.into_iter().map(f64::from));
            let max = all().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = all().map(|x| (x - max).exp2()).sum();
            // The weights are rescaled twice, and a difference of at most 40 is rounded to 2^-24 of itself, all in
            // powers of two.
            let bound = 3.0 * 2e-7 + 40.0 * 2f64.powi(-24) + 4.0 * 2f64.powi(-24);
            let weights = (0..3).flat_map(|b| blocks[b][r].0);
            for (weight, score) in weights.zip(all()) {
                let exact = (score - max).exp2();
                assert!(
                    (f64::from(weight) - exact).abs() <= bound * exact,
                    "{r}: {weight} {exact}"
                );
            }
            let error = (f64::from(seen[r].sum()) - sum).abs();
            assert!(error <= (bound + 40.0 * 2f64.powi(-24)) * sum, "{r}: {error}");
        }
    }

    #[test]
    fn what_is_not_finite_shows() {
        let mut seen = [Seen::NOTHING; 3];
        let mut rows = [
            Row([f32::NAN; SIDE]),
            Row([f32::NEG_INFINITY; SIDE]),
            Row([1.0; SIDE]),
        ];
        rows[2].0[7] = f32::NAN;
        weigh(&mut rows, &mut seen);
        assert!(seen[0].sum().is_nan() && seen[2].sum().is_nan());
        assert_eq!((seen[1].sum(), rows[1].0), (0.0, [0.0; SIDE]));
        assert_eq!(rows[2].0[6], 1.0);
        assert!(rows[2].0[7].is_nan());
    }
}
