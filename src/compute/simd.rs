//! Loops over slices, compiled for several instruction sets; the best one is chosen at run time.
//!
//! The loops use no fused multiply-add, unless it has the same bits everywhere, and add in a fixed order, so each gives
//! the same bits on every instruction set.
//! They panic if slices that belong together differ in length.

use multiversion::multiversion;
use multiversion::target::match_target;

use super::blocks::multiply_add;

/// Partial sums of a reduction.
const LANES: usize = 16;
/// Partial sums of a dot product; they fill four registers of the widest instruction set.
pub(super) const WIDE: usize = 64;

/// Adding this constant rounds to a whole number, which the low bits of the sum then hold.
const ROUND: f32 = 12_582_912.0;

/// Returns the dot product.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len(), "values of a product");
    let ((a, tail_a), (b, tail_b)) = (a.as_chunks::<WIDE>(), b.as_chunks::<WIDE>());
    let mut acc = [0.0f32; WIDE];
    for (x, y) in a.iter().zip(b) {
        for l in 0..WIDE {
            acc[l] += x[l] * y[l];
        }
    }
    fold(acc) + short_dot(tail_a, tail_b)
}

/// Returns the dot product of short slices, added in order.
#[inline(always)]
pub(super) fn short_dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = 0.0;
    for (x, y) in a.iter().zip(b) {
        sum += x * y;
    }
    sum
}

/// Adds the partial sums, a power of two of them, by halves.
#[inline(always)]
pub(super) fn fold<const N: usize>(mut acc: [f32; N]) -> f32 {
    let mut width = N / 2;
    while width > 0 {
        for l in 0..width {
            acc[l] += acc[l + width];
        }
        width /= 2;
    }
    acc[0]
}

/// Returns the sum of the values, in f64.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn sum(x: &[f32]) -> f64 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut acc = [0.0f64; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            acc[l] += f64::from(chunk[l]);
        }
    }
    let acc: f64 = acc.iter().sum();
    rest.iter().fold(acc, |sum, x| sum + f64::from(*x))
}

/// Computes `y += a x`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "values of a sum");
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// Computes `y *= x`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn multiply(x: &[f32], y: &mut [f32]) {
    assert_eq!(x.len(), y.len(), "values of a product");
    for (y, x) in y.iter_mut().zip(x) {
        *y *= x;
    }
}

/// Computes `out = x m`.
///
/// # Shapes
/// x `[d]`, m `[d,n]`, out `[n]`.
///
/// # Numerics
/// f32. Each sum takes its products in order.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn row_product(x: &[f32], m: &[f32], out: &mut [f32]) {
    let n = out.len();
    assert_eq!(x.len() * n, m.len(), "values of a product");
    let wide = n - n % WIDE;
    for first in (0..wide).step_by(WIDE) {
        columns::<WIDE>(x, m, n, first, out);
    }
    let narrow = n - n % LANES;
    for first in (wide..narrow).step_by(LANES) {
        columns::<LANES>(x, m, n, first, out);
    }
    for column in narrow..n {
        columns::<1>(x, m, n, column, out);
    }
}

/// Computes N columns of [`row_product`], from number `first` on.
#[inline(always)]
fn columns<const N: usize>(x: &[f32], m: &[f32], n: usize, first: usize, out: &mut [f32]) {
    let mut acc = [0.0f32; N];
    for (x, row) in x.iter().zip(m.chunks_exact(n)) {
        let row = &row[first..first + N];
        for l in 0..N {
            acc[l] += x * row[l];
        }
    }
    out[first..first + N].copy_from_slice(&acc);
}

/// Computes `y += a x` in f64.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn axpy_f64(a: f64, x: &[f32], y: &mut [f64]) {
    assert_eq!(x.len(), y.len(), "values of a sum");
    for (y, x) in y.iter_mut().zip(x) {
        *y += a * f64::from(*x);
    }
}

/// Computes `y = a x + b` for integers x, or `y += a x + b` with `add`, and returns the largest y, ignoring NaN; of no values,
/// negative infinity.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn line(x: &[u16], a: f32, b: f32, add: bool, y: &mut [f32]) -> f32 {
    if add {
        line_of::<true>(x, a, b, y)
    } else {
        line_of::<false>(x, a, b, y)
    }
}

#[inline(always)]
fn line_of<const ADD: bool>(x: &[u16], a: f32, b: f32, y: &mut [f32]) -> f32 {
    assert_eq!(x.len(), y.len(), "values of a sum");
    let set = |x: u16, y: &mut f32, largest: &mut f32| {
        let of = b + a * f32::from(x);
        *y = if ADD { *y + of } else { of };
        *largest = if *y > *largest { *y } else { *largest };
    };
    let ((x, rest), (y, rest_y)) = (x.as_chunks::<LANES>(), y.as_chunks_mut::<LANES>());
    let mut largest = [f32::NEG_INFINITY; LANES];
    for (x, y) in x.iter().zip(y) {
        for l in 0..LANES {
            set(x[l], &mut y[l], &mut largest[l]);
        }
    }
    for ((x, y), largest) in rest.iter().zip(rest_y).zip(&mut largest) {
        set(*x, y, largest);
    }
    let larger = |a: f32, b: &f32| if *b > a { *b } else { a };
    largest.iter().fold(f32::NEG_INFINITY, larger)
}

/// Replaces `x[i]` by 2^(`x[i]` - shift), and returns the sum in f32.
///
/// # Numerics
/// The relative error is below 2e-7 for differences from -126 to 127. Powers of smaller differences, and of NaN, are
/// 2^-126, and those of larger ones 2^127. Another whole number as the shift gives the same bits times a power of two.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
pub fn exp2_shifted(x: &mut [f32], shift: i32) -> f32 {
    match_target! {
        "x86_64+avx512f+avx512vl" => powers_of_two::<true>(x, shift),
        "x86_64+avx2+fma" => powers_of_two::<true>(x, shift),
        "aarch64+neon" => powers_of_two::<true>(x, shift),
        _ => powers_of_two::<false>(x, shift),
    }
}

#[inline(always)]
fn powers_of_two<const FMA: bool>(x: &mut [f32], shift: i32) -> f32 {
    let (least, most) = (shift as f32 - 126.0, shift as f32 + 127.0);
    let bias = 127i32.wrapping_sub(shift).wrapping_sub(ROUND.to_bits() as i32);
    let power = |x: f32| {
        let x = if x > least { x } else { least };
        let x = if x < most { x } else { most };
        let rounded = x + ROUND;
        let r = x - (rounded - ROUND);
        // The polynomial of this degree with the least relative error for |r| <= 1/2, among those that are 1 at 0.
        #[expect(
            clippy::approx_constant,
            reason = "not the Taylor series, whose factor is ln 2"
        )]
        let factors = [0.009_671_513, 0.055_507_336, 0.240_222_42, 0.693_147, 1.0];
        let p = factors
            .iter()
            .fold(0.001_326_472_7, |p, factor| multiply_add::<FMA>(p, r, *factor));
        p * f32::from_bits(((rounded.to_bits() as i32).wrapping_add(bias) as u32) << 23)
    };
    let (chunks, rest) = x.as_chunks_mut::<LANES>();
    let mut acc = [0.0f32; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            chunk[l] = power(chunk[l]);
            acc[l] += chunk[l];
        }
    }
    for (x, acc) in rest.iter_mut().zip(&mut acc) {
        *x = power(*x);
        *acc += *x;
    }
    fold(acc)
}

/// Replaces `x[i]` by `exp(x[i] - shift)`, and returns their sum in f32. A NaN stays a NaN.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    for v in x.iter_mut() {
        *v = exp(*v - shift);
    }
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut acc = [0.0f32; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            acc[l] += chunk[l];
        }
    }
    let mut sum = 0.0;
    for v in acc.iter().chain(rest) {
        sum += v;
    }
    sum
}

/// Returns e^x with a relative error below 2e-7; zero below -87.3; a NaN stays a NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HI: f32 = 0.693_359_4;
    const LN2_LO: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-87.3, 88.7);
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let e = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let r = (clamped - n * LN2_HI) - n * LN2_LO;
    // Taylor coefficients suffice: |r| <= ln(2)/2, so the first omitted term is below 4e-8.
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r * r + r + 1.0;
    // Scaling takes two factors, because 2^128 is not a finite f32.
    let half = e >> 1;
    let scale = |e: i32| f32::from_bits((e.wrapping_add(127) as u32) << 23);
    let y = p * scale(half) * scale(e.wrapping_sub(half));
    if x < -87.3 {
        0.0
    } else if x.is_nan() {
        x
    } else {
        y
    }
}

/// Returns the largest value, ignoring NaN; an empty slice gives negative infinity.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn max(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut acc = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for l in 0..LANES {
            acc[l] = if chunk[l] > acc[l] { chunk[l] } else { acc[l] };
        }
    }
    let mut best = f32::NEG_INFINITY;
    for v in acc.iter().chain(rest) {
        best = if *v > best { *v } else { best };
    }
    best
}

/// Returns whether a value is NaN.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn has_nan(x: &[f32]) -> bool {
    let mut any = 0u32;
    for v in x {
        any |= u32::from(v.is_nan());
    }
    any != 0
}

/// Returns the sum of the values and the sum of their squares, in f64.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn sums(x: &[f32]) -> (f64, f64) {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let (mut sum, mut squares) = ([0.0f64; LANES], [0.0f64; LANES]);
    for chunk in chunks {
        for l in 0..LANES {
            let v = f64::from(chunk[l]);
            sum[l] += v;
            squares[l] += v * v;
        }
    }
    let rest = || rest.iter().map(|v| f64::from(*v));
    (
        sum.iter().sum::<f64>() + rest().sum::<f64>(),
        squares.iter().sum::<f64>() + rest().map(|v| v * v).sum::<f64>(),
    )
}

/// Multiplies every value by `a`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn scale(x: &mut [f32], a: f32) {
    for v in x.iter_mut() {
        *v *= a;
    }
}

/// Replaces `gate[i]` by `silu(gate[i]) * up[i]`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn silu_mul(gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "values of a gate");
    for (g, u) in gate.iter_mut().zip(up) {
        *g = *g / (1.0 + exp(-*g)) * u;
    }
}

/// Computes the RMS norm `out = x / sqrt(mean(x^2) + eps) * weight`, with the mean of squares in f64.
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!((weight.len(), out.len()), (x.len(), x.len()), "values of a norm");
    let squares: f64 = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
    let inv = 1.0 / (squares / x.len() as f64 + f64::from(eps)).sqrt();
    let inv = inv as f32;
    for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
        *o = v * inv * w;
    }
}

/// Returns whether every value is finite.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn all_finite(x: &[f32]) -> bool {
    let mut bad = 0u32;
    for v in x {
        bad |= u32::from(v.to_bits() & 0x7f80_0000 == 0x7f80_0000);
    }
    bad == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    #[test]
    fn exp_is_accurate_and_total() {
        for i in -8700..=8860 {
            let x = i as f32 * 0.01;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expected).abs() / expected;
            // Below the smallest normal number the result would have fewer bits; the limit of -87.3 stays above it.
            assert!(error < 2e-7, "{x}: {error}");
        }
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn powers_of_two_are_accurate_and_total() {
        for shift in [-40, 0, 3, 200] {
            let differences = (-12_600..=11_000).map(|i| i as f32 * 0.01);
            let x: Vec<f32> = differences.map(|x| x + shift as f32).collect();
            let mut powers = x.clone();
            let sum = exp2_shifted(&mut powers, shift);
            // The form for machines without fused multiply-adds.
            let mut plain = x.clone();
            assert_eq!(powers_of_two::<false>(&mut plain, shift), sum);
            assert_eq!(plain, powers);
            for (x, power) in x.iter().zip(&powers) {
                let expected = (f64::from(*x) - f64::from(shift)).exp2();
                let error = (f64::from(*power) - expected).abs() / expected;
                assert!(error < 2e-7, "{x} {shift}: {error}");
            }
            let exact: f64 = powers.iter().map(|x| f64::from(*x)).sum();
            assert!((f64::from(sum) - exact).abs() < 1e-5 * exact, "{shift}");
            // 2^3 times as large, to the bit.
            let mut others = x.clone();
            exp2_shifted(&mut others, shift - 3);
            let inner = powers.iter().zip(&others).skip(400);
            inner.for_each(|(power, other)| assert_eq!(power * 8.0, *other));
        }
        let mut rest = [f32::NEG_INFINITY, -1e5, f32::NAN, 0.0, 1e5, f32::INFINITY];
        exp2_shifted(&mut rest, 0);
        let (least, most) = ((-126.0f32).exp2(), 127f32.exp2());
        assert_eq!(rest, [least, least, least, 1.0, most, most]);
    }

    #[test]
    fn reductions_match_f64_at_every_length() {
        for n in [0, 1, 15, 16, 17, 63, 64, 65, 128, 200] {
            let a: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let b: Vec<f32> = (0..n).map(|i| (i as f32 * 0.91).cos()).collect();
            let exact: f64 = a.iter().zip(&b).map(|(x, y)| f64::from(*x) * f64::from(*y)).sum();
            assert!((f64::from(dot(&a, &b)) - exact).abs() < 1e-5, "{n}");
            let mut e = a.clone();
            let sum = exp_shifted(&mut e, 0.5);
            let exact: f64 = a.iter().map(|x| f64::from(x - 0.5).exp()).sum();
            assert!((f64::from(sum) - exact).abs() <= 1e-6 * exact, "{n}");
            let squares: f64 = a.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
            let (sum, sum_squares) = sums(&a);
            let exact: f64 = a.iter().map(|x| f64::from(*x)).sum();
            assert!(
                (sum - exact).abs() < 1e-12 && (sum_squares - squares).abs() < 1e-12,
                "{n}"
            );
            assert_eq!(max(&a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let whole: Vec<u16> = a.iter().map(|x| (1000.0 * (x + 1.0)) as u16).collect();
            for add in [false, true] {
                let mut out = b.clone();
                let largest = line(&whole, 0.5, -3.0, add, &mut out);
                let of = |(x, y): (&u16, &f32)| if add { *y } else { 0.0 } + (-3.0 + 0.5 * f32::from(*x));
                let expected: Vec<f32> = whole.iter().zip(&b).map(of).collect();
                assert_eq!((&out, largest), (&expected, max(&expected)));
            }
            let mut product = a.clone();
            multiply(&b, &mut product);
            let expected: Vec<f32> = a.iter().zip(&b).map(|(x, y)| x * y).collect();
            assert_eq!(product, expected);
            for d in [1, 7] {
                let (x, m) = (&values(d, 5), &values(d * n, 6));
                let mut out = vec![f32::NAN; n];
                row_product(x, m, &mut out);
                let of = |column: usize| (0..d).fold(0.0, |sum: f32, i| sum + x[i] * m[i * n + column]);
                let expected: Vec<f32> = (0..n).map(of).collect();
                assert_eq!(out, expected, "{n} {d}");
            }
            assert!(all_finite(&a) && !has_nan(&a));
        }
        assert!(!all_finite(&[0.0, f32::NAN]) && has_nan(&[0.0, f32::NAN]));
        assert!(!has_nan(&[f32::INFINITY; 20]));
        assert!(!all_finite(&[f32::NEG_INFINITY; 40]));
        assert!(exp_shifted(&mut [0.0, f32::NAN], 0.0).is_nan());
    }
}
