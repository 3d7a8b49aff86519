//! Comparisons of many values with a threshold, as bits, and sums of their powers.

use multiversion::multiversion;

/// Values of a word of bits.
pub const WORD: usize = 64;
/// Values whose largest is known.
pub const BLOCK: usize = 16;
/// Blocks of a word of bits.
const BLOCKS: usize = WORD / BLOCK;
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

/// [`at_least`] of values whose blocks of [`BLOCK`] have nothing above `maxima`: where that is below the threshold,
/// they are not read.
pub fn at_least_in_blocks(values: &[f32], maxima: &[f32], threshold: f32, out: &mut Vec<u64>) {
    out.clear();
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the machine has AVX-512F.
        unsafe { x86::in_blocks(values, maxima, threshold, out) };
        return;
    }
    in_blocks(values, maxima, threshold, out);
}

#[multiversion(targets("x86_64+avx2", "aarch64+neon"))]
fn in_blocks(values: &[f32], maxima: &[f32], threshold: f32, out: &mut Vec<u64>) {
    for (word, maxima) in values.chunks(WORD).zip(maxima.chunks(BLOCKS)) {
        let mut bits = 0;
        for (b, (block, max)) in word.chunks(BLOCK).zip(maxima).enumerate() {
            if *max >= threshold {
                let of_block = block.iter().enumerate();
                let of_block = of_block.fold(0, |bits, (l, x)| bits | u64::from(*x >= threshold) << l);
                bits |= of_block << (b * BLOCK);
            }
        }
        out.push(bits);
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, BLOCKS, WORD, push_rest};

    #[target_feature(enable = "avx512f")]
    pub fn in_blocks(values: &[f32], maxima: &[f32], threshold: f32, out: &mut Vec<u64>) {
        let limit = _mm512_set1_ps(threshold);
        let (words, rest) = values.as_chunks::<WORD>();
        let (near, near_rest) = maxima[..words.len() * BLOCKS].as_chunks::<BLOCK>();
        let mut left = words;
        for near in near {
            // SAFETY: sixteen maxima.
            let near = unsafe { _mm512_loadu_ps(near.as_ptr()) };
            let mut near = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(near, limit);
            let (four, rest) = left.split_at(BLOCK / BLOCKS);
            left = rest;
            let mut bits = [0u64; BLOCK / BLOCKS];
            while near != 0 {
                let block = near.trailing_zeros() as usize;
                near &= near - 1;
                let (lines, _) = four[block / BLOCKS].as_chunks::<BLOCK>();
                // SAFETY: a line has 16 values.
                let line = unsafe { _mm512_loadu_ps(lines[block % BLOCKS].as_ptr()) };
                let mask = u64::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(line, limit));
                bits[block / BLOCKS] |= mask << (block % BLOCKS * BLOCK);
            }
            out.extend(bits);
        }
        for (word, near) in left.iter().zip(near_rest.chunks(BLOCKS)) {
            if near.iter().any(|max| *max >= threshold) {
                push_rest(word, threshold, out);
            } else {
                out.push(0);
            }
        }
        push_rest(rest, threshold, out);
    }

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
                let maxima: Vec<f32> = values
                    .chunks(BLOCK)
                    .map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max))
                    .collect();
                at_least_in_blocks(&values, &maxima, threshold, &mut found);
                assert_eq!(found, expected, "{n}");
                found.clear();
                in_blocks(&values, &maxima, threshold, &mut found);
                assert_eq!(found, expected, "{n}");
                // What a maximum rules out is not looked at.
                at_least_in_blocks(
                    &values,
                    &vec![f32::NEG_INFINITY; maxima.len()],
                    threshold,
                    &mut found,
                );
                assert!(found.iter().take(n / WORD).all(|word| *word == 0), "{n}");
            }
        }
    }
}
