//! Compares many values with a threshold, as bit masks, and sums powers of values.

use multiversion::multiversion;
use multiversion::target::match_target;

use super::simd;
use crate::prefetch::prefetch;

/// Values per 64-bit word of a mask.
pub const WORD: usize = 64;
/// Values per block; the maximum of every block is kept.
pub const BLOCK: usize = 16;
/// Blocks per word of a mask.
const BLOCKS: usize = WORD / BLOCK;
/// How many blocks ahead of the current block to prefetch.
pub const LINES_AHEAD: usize = 24;
/// How many set bits of a word are listed without a branch; most words have fewer.
const SELDOM_MORE: usize = 4;
/// Values that are compared with both of two thresholds before the next ones are; a multiple of [`WORD`].
const PART: usize = 2048;
/// How many bytes ahead of the current read to prefetch: two pages of memory, because the hardware does not prefetch
/// across pages.
#[cfg(target_arch = "x86_64")]
const BYTES_AHEAD: usize = 8192;
/// How many values of `out` beyond the last result [`pick`] may overwrite.
pub const ROOM: usize = BLOCK;
/// Partial sums of every sum.
const LANES: usize = 16;

/// Writes the mask `values >= threshold` to `out`. The first value is the lowest bit of the first word; bits beyond the
/// last value are zero. A NaN is below every threshold.
pub fn at_least(values: &[f32], threshold: f32, out: &mut Vec<u64>) {
    out.clear();
    out.extend(values.chunks(WORD).map(|word| word_of(word, threshold)));
}

/// Returns the masks that [`at_least`] writes for two thresholds, and whether a value is NaN.
#[multiversion(targets("x86_64+avx512f"))]
pub fn at_least_each(values: &[f32], thresholds: [f32; 2]) -> ([Vec<u64>; 2], bool) {
    let mut masks = [(); 2].map(|_| Vec::with_capacity(values.len().div_ceil(WORD)));
    match_target! {
        "x86_64+avx512f" => {
            let (words, rest) = values.as_chunks();
            // SAFETY: compiled for, and chosen on, machines with AVX-512F.
            let has_nan = unsafe { x86::at_least_each(words, thresholds, &mut masks) };
            let has_nan = has_nan | each(rest, thresholds, &mut masks);
            (masks, has_nan)
        },
        _ => {
            let has_nan = each(values, thresholds, &mut masks);
            (masks, has_nan)
        }
    }
}

/// Implements [`at_least_each`] in plain Rust: appends to the masks.
fn each(values: &[f32], thresholds: [f32; 2], masks: &mut [Vec<u64>; 2]) -> bool {
    let mut has_nan = false;
    // All three loops read a part while it is in the cache.
    for part in values.chunks(PART) {
        has_nan |= simd::has_nan(part);
        for (mask, threshold) in masks.iter_mut().zip(thresholds) {
            mask.extend(part.chunks(WORD).map(|word| word_of(word, threshold)));
        }
    }
    has_nan
}

/// Writes the same mask as [`at_least`], but reads only the blocks of [`BLOCK`] values whose entry in `maxima` reaches
/// the threshold. An entry is the block's maximum or an upper bound of it. Returns the blocks read, ascending.
pub fn at_least_in_blocks(values: &[f32], maxima: &[f32], threshold: f32, out: &mut Vec<u64>) -> Vec<u32> {
    at_least(maxima, threshold, out);
    let blocks = places(out, 0);
    out.clear();
    out.resize(values.len().div_ceil(WORD), 0);
    let values_of = |block: u32| {
        let start = block as usize * BLOCK;
        &values[start..values.len().min(start + BLOCK)]
    };
    for (b, &block) in blocks.iter().enumerate() {
        if let Some(&next) = blocks.get(b + LINES_AHEAD) {
            prefetch(values_of(next));
        }
        let bits = bits_of(values_of(block), threshold);
        let block = block as usize;
        out[block / BLOCKS] |= bits << (block % BLOCKS * BLOCK);
    }
    blocks
}

/// Returns `first` plus the index of each set bit, ascending.
#[multiversion(targets("x86_64+avx512f+bmi1+popcnt", "x86_64+avx2+bmi1+popcnt", "aarch64+neon"))]
pub fn places(bits: &[u64], first: u32) -> Vec<u32> {
    let count: u32 = bits.iter().map(|word| word.count_ones()).sum();
    let mut out = vec![0; count as usize + BLOCK];
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with AVX-512F.
        "x86_64+avx512f+bmi1+popcnt" => unsafe { x86::places(bits, first, &mut out) },
        _ => write_places(bits, first, &mut out),
    }
    out.truncate(count as usize);
    out
}

/// Implements [`places`]; `out` has at least [`SELDOM_MORE`] values more than there are set bits.
#[inline(always)]
fn write_places(bits: &[u64], first: u32, out: &mut [u32]) {
    let (mut len, mut start) = (0, first);
    for word in bits {
        // Most words have only a few set bits, and a branch on their number would be mispredicted.
        let (mut left, end) = (*word, len + word.count_ones() as usize);
        for place in &mut out[len..len + SELDOM_MORE] {
            *place = start.wrapping_add(left.trailing_zeros());
            left &= left.wrapping_sub(1);
        }
        len += SELDOM_MORE;
        while left != 0 {
            out[len] = start + left.trailing_zeros();
            left &= left - 1;
            len += 1;
        }
        len = end;
        start = start.wrapping_add(WORD as u32);
    }
}

/// Writes the values whose bits are set to `out`, in order. `out` must have [`ROOM`] values more than there are set bits.
#[multiversion(targets("x86_64+avx512f+popcnt", "x86_64+avx2+popcnt"))]
pub fn pick(values: &[[u8; 4]], bits: &[u64], out: &mut [[u8; 4]]) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with AVX-512F.
        "x86_64+avx512f+popcnt" => unsafe { x86::pick(values, bits, out) },
        // SAFETY: compiled for, and chosen on, machines with AVX2.
        "x86_64+avx2+popcnt" => unsafe { x86::pick_by_eight(values, bits, out) },
        _ => {
            let places = places(bits, 0).into_iter();
            out.iter_mut().zip(places).for_each(|(out, place)| *out = values[place as usize]);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{BLOCK, BYTES_AHEAD, WORD};

    /// Implements [`super::places`]; `out` has at least [`BLOCK`] values more than there are set bits.
    #[target_feature(enable = "avx512f,popcnt")]
    pub fn places(bits: &[u64], first: u32, out: &mut [u32]) {
        let (mut len, step) = (0, _mm512_set1_epi32(BLOCK as i32));
        let mut place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        place = _mm512_add_epi32(place, _mm512_set1_epi32(first as i32));
        for block in bits.iter().flat_map(|word| blocks(*word)) {
            let room = &mut out[len..len + BLOCK];
            let kept = _mm512_maskz_compress_epi32(block, place);
            // SAFETY: 16 values have 64 bytes.
            unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), kept) };
            len += block.count_ones() as usize;
            place = _mm512_add_epi32(place, step);
        }
    }

    /// Implements [`super::pick`]; `out` has at least [`BLOCK`] values more than there are set bits.
    #[target_feature(enable = "avx512f,popcnt")]
    pub fn pick(values: &[[u8; 4]], bits: &[u64], out: &mut [[u8; 4]]) {
        let (words, rest) = values.as_chunks::<WORD>();
        let mut len = 0;
        for (values, word) in words.iter().zip(bits) {
            for (values, block) in values.as_chunks::<BLOCK>().0.iter().zip(blocks(*word)) {
                let room = &mut out[len..len + BLOCK];
                // SAFETY: 16 values have 64 bytes, in both places; a prefetch accesses nothing.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T1>(values.as_ptr().cast::<i8>().wrapping_add(BYTES_AHEAD));
                    let values = _mm512_loadu_si512(values.as_ptr().cast());
                    let kept = _mm512_maskz_compress_epi32(block, values);
                    _mm512_storeu_si512(room.as_mut_ptr().cast(), kept);
                }
                len += block.count_ones() as usize;
            }
        }
        let last = bits.get(words.len()).copied().unwrap_or(0);
        pick_rest(rest, last, &mut out[len..]);
    }

    /// Picks from less than a word of values.
    fn pick_rest(rest: &[[u8; 4]], bits: u64, out: &mut [[u8; 4]]) {
        let kept = rest.iter().enumerate().filter(|(l, _)| bits >> l & 1 == 1);
        out.iter_mut()
            .zip(kept)
            .for_each(|(out, (_, value))| *out = *value);
    }

    /// For each byte, the numbers of its set bits, ascending, as bytes of which the first is the lowest.
    static SET_BITS: [u64; 256] = set_bits();

    const fn set_bits() -> [u64; 256] {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let (mut bit, mut len) = (0, 0);
            while bit < 8 {
                if byte >> bit & 1 == 1 {
                    table[byte] |= bit << (8 * len);
                    len += 1;
                }
                bit += 1;
            }
            byte += 1;
        }
        table
    }

    /// Returns the numbers of the set bits of a byte in the first lanes.
    #[target_feature(enable = "avx2")]
    fn set_bits_of(byte: u8) -> __m256i {
        _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(SET_BITS[usize::from(byte)] as i64))
    }

    /// Implements [`super::pick`]; `out` has at least [`BLOCK`] values more than there are set bits.
    #[target_feature(enable = "avx2,popcnt")]
    pub fn pick_by_eight(values: &[[u8; 4]], bits: &[u64], out: &mut [[u8; 4]]) {
        let (words, rest) = values.as_chunks::<WORD>();
        let mut len = 0;
        for (values, word) in words.iter().zip(bits) {
            for (values, byte) in values.as_chunks::<8>().0.iter().zip(word.to_le_bytes()) {
                let room = &mut out[len..len + 8];
                // SAFETY: eight values have 32 bytes, in both places; a prefetch accesses nothing.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T1>(values.as_ptr().cast::<i8>().wrapping_add(BYTES_AHEAD));
                    let values = _mm256_loadu_si256(values.as_ptr().cast());
                    let kept = _mm256_permutevar8x32_epi32(values, set_bits_of(byte));
                    _mm256_storeu_si256(room.as_mut_ptr().cast(), kept);
                }
                len += byte.count_ones() as usize;
            }
        }
        let last = bits.get(words.len()).copied().unwrap_or(0);
        pick_rest(rest, last, &mut out[len..]);
    }

    /// Implements [`super::at_least_each`] for whole words: appends to the masks.
    #[target_feature(enable = "avx512f")]
    pub fn at_least_each(values: &[[f32; WORD]], thresholds: [f32; 2], masks: &mut [Vec<u64>; 2]) -> bool {
        let wide = thresholds.map(|x| _mm512_set1_ps(x));
        let mut nan = 0;
        for word in values {
            let mut bits = [0; 2];
            for (i, block) in word.as_chunks::<BLOCK>().0.iter().enumerate() {
                // SAFETY: 16 values have 64 bytes.
                let x = unsafe { _mm512_loadu_ps(block.as_ptr()) };
                for (bits, threshold) in bits.iter_mut().zip(wide) {
                    *bits |= u64::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, threshold)) << (i * BLOCK);
                }
                nan |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            }
            masks
                .iter_mut()
                .zip(bits)
                .for_each(|(mask, bits)| mask.push(bits));
        }
        nan != 0
    }

    /// The masks of the blocks of a word.
    fn blocks(word: u64) -> [u16; WORD / BLOCK] {
        std::array::from_fn(|i| (word >> (i * BLOCK)) as u16)
    }
}

/// Returns the mask of at most one word of values.
#[inline(always)]
fn word_of(values: &[f32], threshold: f32) -> u64 {
    let blocks = values.chunks(BLOCK).rev();
    blocks.fold(0, |bits, block| bits << BLOCK | bits_of(block, threshold))
}

/// Returns the mask of at most one block of values.
#[inline(always)]
fn bits_of(values: &[f32], threshold: f32) -> u64 {
    // Compilers do not turn the result of a vector comparison into bits by themselves.
    #[cfg(target_arch = "x86_64")]
    if let ([a, b, c, d], []) = values.as_chunks::<4>() {
        use std::arch::x86_64::{_mm_cmpge_ps, _mm_loadu_ps, _mm_movemask_ps, _mm_set1_ps};
        let of = |four: &[f32; 4]| {
            // SAFETY: every x86-64 has SSE, and these are four values.
            unsafe { _mm_movemask_ps(_mm_cmpge_ps(_mm_loadu_ps(four.as_ptr()), _mm_set1_ps(threshold))) }
        };
        return (of(d) << 12 | of(c) << 8 | of(b) << 4 | of(a)) as u64;
    }
    let values = values.iter().enumerate();
    values.fold(0, |bits, (l, x)| bits | u64::from(*x >= threshold) << l)
}

/// Returns the sums of the first four powers of the values.
///
/// # Numerics
/// f64 in 16 partial sums: the error of each sum is at most `(n / 16 + 24) 2^-53` of the sum of its magnitudes.
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
            // Sums of such fractions with few bits are exact in f64.
            let powers = powers(&values);
            for (i, power) in powers.iter().enumerate() {
                let exact: f64 = values.iter().map(|x| f64::from(*x).powi(i as i32 + 1)).sum();
                assert_eq!(*power, exact, "{n} {i}");
            }
            if n > 2 {
                (values[1], values[2]) = (f32::NAN, -0.0);
            }
            let maxima: Vec<f32> = values
                .chunks(BLOCK)
                .map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max))
                .collect();
            let some = [0.0, 7.5, f32::INFINITY, f32::MIN_POSITIVE];
            for threshold in some.iter().chain(maxima.iter().take(5)).copied() {
                let expected = |w: usize| {
                    let bit = |l: usize| w * WORD + l < n && values[w * WORD + l] >= threshold;
                    (0..WORD).fold(0u64, |bits, l| bits | u64::from(bit(l)) << l)
                };
                let expected: Vec<u64> = (0..n.div_ceil(WORD)).map(expected).collect();
                let mut found = vec![3];
                at_least(&values, threshold, &mut found);
                assert_eq!(found, expected, "{n}");
                at_least_in_blocks(&values, &maxima, threshold, &mut found);
                assert_eq!(found, expected, "{n}");
                let (each, has_nan) = at_least_each(&values, [7.5, threshold]);
                assert_eq!((&each[1], has_nan), (&expected, n > 2), "{n}");
                assert_eq!(each[0], at_least_each(&values, [threshold, 7.5]).0[1], "{n}");
                let mut plain = [Vec::new(), Vec::new()];
                let has_nan = super::each(&values, [7.5, threshold], &mut plain);
                assert_eq!((plain, has_nan), (each, n > 2), "{n}");
                let direct = (0..n).filter(|i| values[*i] >= threshold);
                let direct: Vec<u32> = direct.map(|i| 7 + i as u32).collect();
                assert_eq!(places(&found, 7), direct, "{n}");
                let mut plain = vec![0; direct.len() + SELDOM_MORE];
                write_places(&found, 7, &mut plain);
                assert_eq!(plain[..direct.len()], direct, "{n}");
                let bytes: Vec<[u8; 4]> = values.iter().map(|x| x.to_ne_bytes()).collect();
                let mut picked = vec![[9; 4]; direct.len() + ROOM];
                pick(&bytes, &found, &mut picked);
                let direct: Vec<[u8; 4]> = direct.iter().map(|place| bytes[*place as usize - 7]).collect();
                assert_eq!(picked[..direct.len()], direct, "{n}");
                // A block that its maximum rules out is not read.
                at_least_in_blocks(
                    &values,
                    &vec![f32::NEG_INFINITY; maxima.len()],
                    threshold,
                    &mut found,
                );
                assert!(found.iter().all(|word| *word == 0), "{n}");
            }
        }
    }
}
