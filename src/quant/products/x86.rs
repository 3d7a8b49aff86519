//! [`dots`](super::dots) with AVX2.

use std::arch::x86_64::*;

use super::{LANES, ROWS, RoundedRow, joined};
use crate::quant::{CHUNK, Quant};

/// Computes the products with 1 to [`ROWS`] rows of inputs.
#[target_feature(enable = "avx2,f16c")]
pub fn dots(quant: Quant, row: &[u8], x: &[RoundedRow], out: &mut [f32]) {
    // Each type has its own loop.
    match quant {
        Quant::Q4_0 => with_type::<{ Quant::Q4_0 as u8 }>(row, x, out),
        Quant::Q4_1 => with_type::<{ Quant::Q4_1 as u8 }>(row, x, out),
        Quant::Q5_0 => with_type::<{ Quant::Q5_0 as u8 }>(row, x, out),
        Quant::Q5_1 => with_type::<{ Quant::Q5_1 as u8 }>(row, x, out),
        Quant::Q8_0 => with_type::<{ Quant::Q8_0 as u8 }>(row, x, out),
        Quant::Q4K => with_type::<{ Quant::Q4K as u8 }>(row, x, out),
        Quant::Q5K => with_type::<{ Quant::Q5K as u8 }>(row, x, out),
        Quant::Q6K => with_type::<{ Quant::Q6K as u8 }>(row, x, out),
    }
}

/// Sums of as many rows as there are stay in registers.
#[target_feature(enable = "avx2,f16c")]
fn with_type<const Q: u8>(row: &[u8], x: &[RoundedRow], out: &mut [f32]) {
    match x {
        [a] => with_rows::<Q, 1>(row, [a], out),
        [a, b] => with_rows::<Q, 2>(row, [a, b], out),
        [a, b, c] => with_rows::<Q, 3>(row, [a, b, c], out),
        [a, b, c, d] => with_rows::<Q, ROWS>(row, [a, b, c, d], out),
        _ => unreachable!("1 to 4 rows"),
    }
}

#[target_feature(enable = "avx2,f16c")]
fn with_rows<const Q: u8, const N: usize>(row: &[u8], x: [&RoundedRow; N], out: &mut [f32]) {
    let quant = const { Quant::ALL[Q as usize].0 };
    let (mut sums, mut offsets) = ([_mm256_setzero_ps(); N], [0.0; N]);
    let (values, bytes) = quant.block();
    for (b, block) in row.chunks_exact(bytes).enumerate() {
        for at in 0..values / CHUNK {
            let (i, codes) = (b * values / CHUNK + at, codes(quant, block, at));
            let (scales, offset) = quant.scales(block, at, |bits| widen(bits));
            let scales = _mm256_set_m128(_mm_set1_ps(scales[1]), _mm_set1_ps(scales[0]));
            // One factor of the 8-bit products must be unsigned: 2 * 128 * 127 is the most that two of them give.
            let sizes = _mm256_abs_epi8(codes);
            for ((x, sums), offsets) in x.iter().zip(&mut sums).zip(&mut offsets) {
                let signed = _mm256_sign_epi8(load(bytemuck::cast_slice(&x.codes[i]), 0), codes);
                let pairs = _mm256_maddubs_epi16(sizes, signed);
                let fours = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                let scales = _mm256_mul_ps(scales, _mm256_set1_ps(x.scales[i]));
                *sums = _mm256_add_ps(*sums, _mm256_mul_ps(scales, fours));
                if quant.has_offset() {
                    *offsets += offset * x.sums[i];
                }
            }
        }
    }
    for ((out, sums), offset) in out.iter_mut().zip(sums).zip(offsets) {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has 32 bytes.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sums) };
        *out = joined(lanes) + offset;
    }
}

/// Widens a number in f16.
#[inline]
#[target_feature(enable = "f16c")]
pub fn widen(bits: u16) -> f32 {
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(bits))))
}

/// Decodes the integer codes of chunk `at` of a block, as [`Quant::codes`] does.
#[inline]
#[target_feature(enable = "avx2")]
fn codes(quant: Quant, block: &[u8], at: usize) -> __m256i {
    let bias = match quant {
        Quant::Q4_0 => 8,
        Quant::Q5_0 => 16,
        Quant::Q6K => 32,
        _ => return raw_codes(quant, block, at),
    };
    _mm256_sub_epi8(raw_codes(quant, block, at), _mm256_set1_epi8(bias))
}

/// Decodes the codes of chunk `at` of a block as they are stored: without the sign that [`codes`] gives to those of Q4_0, Q5_0
/// and Q6_K.
#[inline]
#[target_feature(enable = "avx2")]
pub fn raw_codes(quant: Quant, block: &[u8], at: usize) -> __m256i {
    match quant {
        Quant::Q4_0 => nibbles(block, 2),
        Quant::Q4_1 => nibbles(block, 4),
        Quant::Q5_0 => _mm256_or_si256(nibbles(block, 6), fifth_bits(block, 2)),
        Quant::Q5_1 => _mm256_or_si256(nibbles(block, 8), fifth_bits(block, 4)),
        Quant::Q8_0 => load(block, 2),
        Quant::Q4K => bits(load(block, 16 + at / 2 * CHUNK), 4 * (at % 2), 15),
        Quant::Q5K => {
            let low = bits(load(block, 48 + at / 2 * CHUNK), 4 * (at % 2), 15);
            let high = bits(load(block, 16), at, 1);
            _mm256_or_si256(low, _mm256_slli_epi16::<4>(high))
        }
        Quant::Q6K => {
            let (side, part) = (at / 4, at % 4);
            let low = bits(load(block, 64 * side + 32 * (part % 2)), 4 * (part / 2), 15);
            let high = bits(load(block, 128 + 32 * side), 2 * part, 3);
            _mm256_or_si256(low, _mm256_slli_epi16::<4>(high))
        }
    }
}

/// Reads 32 bytes from byte `at` on.
#[inline]
#[target_feature(enable = "avx2")]
pub fn load(bytes: &[u8], at: usize) -> __m256i {
    let bytes = &bytes[at..at + 32];
    // SAFETY: the slice has 32 bytes.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Shifts every byte to the right and keeps the bits of `mask`.
#[inline]
#[target_feature(enable = "avx2")]
fn bits(bytes: __m256i, shift: usize, mask: i8) -> __m256i {
    // What comes from the neighbouring byte is not in the mask.
    let shifted = _mm256_srl_epi16(bytes, _mm_cvtsi32_si128(shift as i32));
    _mm256_and_si256(shifted, _mm256_set1_epi8(mask))
}

/// Splits the 16 bytes from byte `at` on into the codes of their lower and then of their upper halves.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(block: &[u8], at: usize) -> __m256i {
    let bytes = &block[at..at + 16];
    // SAFETY: the slice has 16 bytes.
    let bytes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
    let both = _mm256_set_m128i(_mm_srli_epi16::<4>(bytes), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(15))
}

/// Returns 16 in each byte whose bit is set in the 32 bits from byte `at` on.
#[inline]
#[target_feature(enable = "avx2")]
fn fifth_bits(block: &[u8], at: usize) -> __m256i {
    let all = i32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]]);
    // Byte i / 8 of the bits, at byte i; the two halves of the register are shuffled on their own.
    let place = _mm256_setr_epi64x(
        0,
        0x0101_0101_0101_0101,
        0x0202_0202_0202_0202,
        0x0303_0303_0303_0303,
    );
    let own = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(all), place);
    let is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
    _mm256_and_si256(is_set, _mm256_set1_epi8(16))
}
