//! Pairs of bf16 values, kept in the bits of one f32: the first value in the lower half.
//!
//! Buffers, panels and transpositions of products are those of f32; only the products themselves
//! ([`super::blocks::multiply_pairs`]) look into the bits.

use multiversion::multiversion;
use ndarray::ArrayView1;

use crate::error::{Error, Result};

/// Fails on machines without an instruction for products of pairs, which there take longer than those of f32.
///
/// # Errors
/// There is no AVX512-BF16.
pub fn check() -> Result<()> {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vl") {
        return Ok(());
    }
    let missing = "⟨precision=bf16⟩ on the CPU needs AVX512-BF16, which this processor lacks";
    Err(Error::unsupported(missing).hint("omit ⟨precision⟩"))
}

/// Returns two values, rounded, as a pair.
#[inline(always)]
fn pair(first: f32, second: f32) -> f32 {
    f32::from_bits(rounded(first) | rounded(second) << 16)
}

/// Rounds values to bf16, to the nearest, ties to even, and writes them as pairs. Of an odd number of values, the last pair has
/// a zero.
///
/// # Panics
/// Fewer pairs than that.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn round(values: &[f32], out: &mut [f32]) {
    let (whole, rest) = values.as_chunks::<2>();
    let out = &mut out[..values.len().div_ceil(2)];
    for (out, [first, second]) in out.iter_mut().zip(whole) {
        *out = pair(*first, *second);
    }
    if let [last] = rest {
        out[whole.len()] = f32::from_bits(rounded(*last));
    }
}

/// Rounds the elements of an array to pairs at the start of `out`, as [`round`].
pub fn round_array(values: ArrayView1<f32>, out: &mut [f32]) {
    match values.as_slice() {
        Some(values) => round(values, out),
        None => round(&values.to_vec(), out),
    }
}

/// Rounds the values of a row to pairs in its first half.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn round_in_place(row: &mut [f32]) {
    for i in 0..row.len() / 2 {
        row[i] = pair(row[2 * i], row[2 * i + 1]);
    }
}

/// Writes the pairs of two rows: value i of the first with value i of the second.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn interleave(first: &[f32], second: &[f32], out: &mut [f32]) {
    for ((out, first), second) in out.iter_mut().zip(first).zip(second) {
        *out = pair(*first, *second);
    }
}

/// Returns the bits of a value in bf16, without a branch.
#[inline(always)]
fn rounded(x: f32) -> u32 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // The carry of a NaN could make it an infinity or a zero.
    if x.is_nan() { bits >> 16 | 0x40 } else { nearest }
}

/// Returns the sum, and the products of the second values and then of the first values of two pairs: fused, rounded to the
/// nearest, and where the result or a factor is below 2^-126, it counts as zero.
#[inline(always)]
pub fn add_products(sum: f32, a: f32, b: f32) -> f32 {
    let halves =
        |x: f32| [x.to_bits() & 0xffff_0000, x.to_bits() << 16].map(|bits| flushed(f32::from_bits(bits)));
    let ([a_second, a_first], [b_second, b_first]) = (halves(a), halves(b));
    let sum = flushed(a_second.mul_add(b_second, flushed(sum)));
    flushed(a_first.mul_add(b_first, sum))
}

/// Returns a number, or a zero of its sign if it is below 2^-126.
#[inline(always)]
fn flushed(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        0.0f32.copysign(x)
    } else {
        x
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;
    use crate::testing::numbers;

    #[test]
    fn values_are_rounded_as_half_does() {
        let mut next = numbers(1);
        let mut values: Vec<f32> = (0..1001).map(|_| f32::from_bits(next())).collect();
        values.extend([
            f32::NAN,
            -f32::NAN,
            f32::INFINITY,
            f32::MAX,
            -f32::MAX,
            1e-45,
            -0.0,
        ]);
        for values in [&values[..], &values[1..]] {
            let mut out = vec![f32::NAN; values.len().div_ceil(2)];
            round(values, &mut out);
            let halves: Vec<u16> = out
                .iter()
                .flat_map(|pair| [pair.to_bits() as u16, (pair.to_bits() >> 16) as u16])
                .collect();
            for (half, value) in halves.iter().zip(values) {
                assert_eq!(*half, bf16::from_f32(*value).to_bits(), "{value}");
            }
            assert!(values.len().is_multiple_of(2) || halves.last() == Some(&0));
            let mut row = values[..values.len() / 2 * 2].to_vec();
            round_in_place(&mut row);
            let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
            assert_eq!(bits(&row[..row.len() / 2]), bits(&out[..row.len() / 2]));
        }
    }

    #[test]
    fn a_pair_has_the_product_of_both_halves() {
        let of = pair;
        assert_eq!(add_products(1.0, of(2.0, 3.0), of(5.0, 7.0)), 32.0);
        // The second product is added first: it leaves nothing of the sum but its own size.
        let large = 2f32.powi(30);
        assert_eq!(add_products(1.0, of(-large, large), of(1.0, 1.0)), 0.0);
        assert_eq!(add_products(0.0, of(1e-30, 0.0), of(1e-30, 0.0)), 0.0);
    }
}
