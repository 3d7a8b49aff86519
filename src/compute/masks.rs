//! Comparisons of many values with a threshold, as bits, and sums of their powers.

use multiversion::multiversion;

/// Values of a word of bits.
pub const WORD: usize = 64;
/// Lanes of a sum.
const LANES: usize = 16;

/// Bits of `values >= threshold`, the first value in the lowest bit of the first word; bits beyond the last value
/// are zero. A NaN is below everything.
pub fn at_least(values: &[f32], threshold: f32, out: &mut Vec<u64>) {
    out.clear();
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the machine has AVX-512F.
        unsafe { x86::with_avx512(values, threshold, out) };
        return;
    }
    with_any(values, threshold, out);
}

#[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
fn with_any(values: &[f32], threshold: f32, out: &mut Vec<u64>) {
    let (words, rest) = values.as_chunks::<WORD>();
    for word in words {
        let mut bits = 0;
        for (l, x) in word.iter().enumerate() {
            bits |= u64::from(*x >= threshold) << l;
        }
        out.push(bits);
    }
    push_rest(rest, threshold, out);
}

fn push_rest(rest: &[f32], threshold: f32, out: &mut Vec<u64>) {
    if !rest.is_empty() {
        let bits = rest.iter().enumerate();
        out.push(bits.fold(0, |bits, (l, x)| bits | u64::from(*x >= threshold) << l));
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{WORD, push_rest};

    #[target_feature(enable = "avx512f")]
    pub fn with_avx512(values: &[f32], threshold: f32, out: &mut Vec<u64>) {
        let limit = _mm512_set1_ps(threshold);
        let (words, rest) = values.as_chunks::<WORD>();
        for word in words {
            let (lines, _) = word.as_chunks::<16>();
            let bits = |i: usize| {
                // SAFETY: a line has 16 values.
                let line = unsafe { _mm512_loadu_ps(lines[i].as_ptr()) };
                u64::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(line, limit)) << (16 * i)
            };
            out.push(bits(0) | bits(1) | bits(2) | bits(3));
        }
        push_rest(rest, threshold, out);
    }
}

/// Sums of the first four powers of the values.
///
/// # Numerics
/// f64 in 16 lanes: each sum has a relative error, against the sum of its magnitudes, of at most
/// `(n / 16 + 24) 2^-53`.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn powers(values: &[f32]) -> [f64; 4] {
    let mut sums = [[0.0f64; LANES]; 4];
    let (blocks, rest) = values.as_chunks::<LANES>();
    for block in blocks {
        for l in 0..LANES {
            let x = f64::from(block[l]);
            let square = x * x;
            sums[0][l] += x;
            sums[1][l] += square;
            sums[2][l] += square * x;
            sums[3][l] += square * square;
        }
    }
    let mut out = sums.map(|lanes| lanes.iter().sum());
    for x in rest.iter().map(|x| f64::from(*x)) {
        for (sum, power) in out.iter_mut().zip([x, x * x, x * x * x, x * x * (x * x)]) {
            *sum += power;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_and_powers_of_every_length() {
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 64.0;
        for n in [0, 1, 15, 16, 17, 63, 64, 65, 128, 200, 1000] {
            let mut values: Vec<f32> = (0..n).map(value).collect();
            // Sums of such small fractions are exact in f64.
            let powers = powers(&values);
            for (i, power) in powers.iter().enumerate() {
                let exact: f64 = values.iter().map(|x| f64::from(*x).powi(i as i32 + 1)).sum();
                assert_eq!(*power, exact, "{n} {i}");
            }
            if n > 2 {
                (values[1], values[2]) = (f32::NAN, -0.0);
            }
            for threshold in [0.0, 7.5, f32::INFINITY, f32::MIN_POSITIVE] {
                let expected = |w: usize| {
                    let bit = |l: usize| w * WORD + l < n && values[w * WORD + l] >= threshold;
                    (0..WORD).fold(0u64, |bits, l| bits | u64::from(bit(l)) << l)
                };
                let expected: Vec<u64> = (0..n.div_ceil(WORD)).map(expected).collect();
                let mut found = vec![3];
                at_least(&values, threshold, &mut found);
                assert_eq!(found, expected, "{n}");
                found.clear();
                with_any(&values, threshold, &mut found);
                assert_eq!(found, expected, "{n}");
            }
        }
    }
}
