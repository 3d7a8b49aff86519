//! [`dots`](super::dots) with AVX512-VNNI: a register holds a chunk of two rows of the weight, one in each half.
//!
//! The instruction multiplies unsigned codes with signed ones. Codes of the weight keep the [`bias`] with which most types store
//! them; what it adds to a sum depends on the inputs alone, and the sum begins with its negative.
//!
//! The loops are plain ones: the compiler does not inline a closure of these instructions into `map` or `from_fn`.

use std::arch::x86_64::*;

use super::{AT_ONCE, ROWS, RoundedRow, x86};
use crate::prefetch::prefetch_ahead;
use crate::quant::{CHUNK, Quant};

/// Registers that hold the rows of one call.
const PAIRS: usize = AT_ONCE / 2;

/// Returns by how much the codes of a type are larger than their values: a power of two, or zero. Q8_0 stores them with a sign,
/// which [`unsigned`] removes.
const fn bias(quant: Quant) -> u32 {
    match quant {
        Quant::Q4_0 => 8,
        Quant::Q5_0 => 16,
        Quant::Q6K => 32,
        Quant::Q8_0 => 128,
        Quant::Q4_1 | Quant::Q5_1 | Quant::Q4K | Quant::Q5K => 0,
    }
}

/// Computes the products of [`AT_ONCE`] rows of one length with 1 to [`ROWS`] rows of inputs: `[inputs]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
pub fn dots(quant: Quant, rows: &[&[u8]; AT_ONCE], x: &[RoundedRow]) -> [[f32; AT_ONCE]; ROWS] {
    // Each type has its own loop.
    match quant {
        Quant::Q4_0 => with_type::<{ Quant::Q4_0 as u8 }>(rows, x),
        Quant::Q4_1 => with_type::<{ Quant::Q4_1 as u8 }>(rows, x),
        Quant::Q5_0 => with_type::<{ Quant::Q5_0 as u8 }>(rows, x),
        Quant::Q5_1 => with_type::<{ Quant::Q5_1 as u8 }>(rows, x),
        Quant::Q8_0 => with_type::<{ Quant::Q8_0 as u8 }>(rows, x),
        Quant::Q4K => with_type::<{ Quant::Q4K as u8 }>(rows, x),
        Quant::Q5K => with_type::<{ Quant::Q5K as u8 }>(rows, x),
        Quant::Q6K => with_type::<{ Quant::Q6K as u8 }>(rows, x),
    }
}

/// Sums of as many inputs as there are stay in registers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
fn with_type<const Q: u8>(rows: &[&[u8]; AT_ONCE], x: &[RoundedRow]) -> [[f32; AT_ONCE]; ROWS] {
    let mut out = [[0.0; AT_ONCE]; ROWS];
    match x {
        [a] => out[..1].copy_from_slice(&with_rows::<Q, 1>(rows, [a])),
        [a, b] => out[..2].copy_from_slice(&with_rows::<Q, 2>(rows, [a, b])),
        [a, b, c] => out[..3].copy_from_slice(&with_rows::<Q, 3>(rows, [a, b, c])),
        [a, b, c, d] => out = with_rows::<Q, ROWS>(rows, [a, b, c, d]),
        _ => unreachable!("1 to 4 rows"),
    }
    out
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,f16c")]
fn with_rows<const Q: u8, const N: usize>(
    rows: &[&[u8]; AT_ONCE],
    x: [&RoundedRow; N],
) -> [[f32; AT_ONCE]; N] {
    let quant = const { Quant::ALL[Q as usize].0 };
    let (values, bytes) = quant.block();
    let blocks = rows[0].len() / bytes;
    for row in rows {
        assert_eq!(row.len(), blocks * bytes, "rows of one length");
    }
    for x in x {
        assert_eq!(x.codes.len(), blocks * values / CHUNK, "values of a product");
    }
    let (mut sums, mut offsets) = ([[_mm512_setzero_ps(); PAIRS]; N], [[0.0; AT_ONCE]; N]);
    for b in 0..blocks {
        let mut block: [&[u8]; AT_ONCE] = [&[]; AT_ONCE];
        for r in 0..AT_ONCE {
            // SAFETY: every row has this many blocks.
            block[r] = unsafe { rows[r].get_unchecked(b * bytes..(b + 1) * bytes) };
            prefetch_ahead(block[r]);
        }
        for at in 0..values / CHUNK {
            let i = b * values / CHUNK + at;
            let (mut codes, mut scales) = ([_mm512_setzero_si512(); PAIRS], [_mm512_setzero_ps(); PAIRS]);
            for p in 0..PAIRS {
                let pair = [block[2 * p], block[2 * p + 1]];
                (codes[p], scales[p]) = (unsigned(quant, pair, at), scales_of(quant, pair, at));
            }
            for n in 0..N {
                // SAFETY: every row of inputs has this many chunks, each with as many lanes and codes as are read.
                let (input, fours, scale) = unsafe {
                    (
                        _mm256_loadu_si256(x[n].codes.get_unchecked(i).as_ptr().cast()),
                        _mm256_loadu_si256(x[n].fours.get_unchecked(i).as_ptr().cast()),
                        *x[n].scales.get_unchecked(i),
                    )
                };
                let input = _mm512_broadcast_i64x4(input);
                let start = match bias(quant) {
                    0 => _mm512_setzero_si512(),
                    bias => {
                        let size = _mm_cvtsi32_si128(bias.trailing_zeros() as i32);
                        let added = _mm256_sll_epi32(fours, size);
                        _mm512_broadcast_i64x4(_mm256_sub_epi32(_mm256_setzero_si256(), added))
                    }
                };
                for p in 0..PAIRS {
                    let fours = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, codes[p], input));
                    let scales = _mm512_mul_ps(scales[p], _mm512_set1_ps(scale));
                    sums[n][p] = _mm512_add_ps(sums[n][p], _mm512_mul_ps(scales, fours));
                }
                if quant.has_offset() {
                    for r in 0..AT_ONCE {
                        let (_, offset) = quant.scales(block[r], at, |bits| x86::widen(bits));
                        offsets[n][r] += offset * x[n].sums[i];
                    }
                }
            }
        }
    }
    let mut out = [[0.0; AT_ONCE]; N];
    for n in 0..N {
        for p in 0..PAIRS {
            let [first, second] = joined(sums[n][p]);
            out[n][2 * p] = first + offsets[n][2 * p];
            out[n][2 * p + 1] = second + offsets[n][2 * p + 1];
        }
    }
    out
}

/// Decodes the codes of chunk `at` of two blocks, made unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn unsigned(quant: Quant, [a, b]: [&[u8]; 2], at: usize) -> __m512i {
    let (a, b) = (x86::raw_codes(quant, a, at), x86::raw_codes(quant, b, at));
    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
    match quant {
        // These are stored with a sign: adding 128 flips the highest bit.
        Quant::Q8_0 => _mm512_xor_si512(both, _mm512_set1_epi8(-128)),
        _ => both,
    }
}

/// Returns the scales of chunk `at` of two blocks, one for each lane of four products.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,f16c")]
fn scales_of(quant: Quant, [first, second]: [&[u8]; 2], at: usize) -> __m512 {
    match quant {
        Quant::Q4_0 | Quant::Q4_1 | Quant::Q5_0 | Quant::Q5_1 | Quant::Q8_0 => {
            let a = _mm_set1_epi16(i16::from_le_bytes([first[0], first[1]]));
            let b = _mm_set1_epi16(i16::from_le_bytes([second[0], second[1]]));
            _mm512_cvtph_ps(_mm256_set_m128i(b, a))
        }
        Quant::Q4K | Quant::Q5K | Quant::Q6K => {
            let ([a, b], _) = quant.scales(first, at, |bits| x86::widen(bits));
            let ([c, d], _) = quant.scales(second, at, |bits| x86::widen(bits));
            _mm512_setr_ps(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d)
        }
    }
}

/// Adds the lanes of each half, in the order of [`super::joined`].
#[inline]
#[target_feature(enable = "avx512f")]
fn joined(lanes: __m512) -> [f32; 2] {
    let quarters = _mm512_add_ps(lanes, _mm512_shuffle_f32x4::<0b10_11_00_01>(lanes, lanes));
    let pairs = _mm512_add_ps(quarters, _mm512_shuffle_ps::<0b01_00_11_10>(quarters, quarters));
    let whole = _mm512_add_ps(pairs, _mm512_shuffle_ps::<0b10_11_00_01>(pairs, pairs));
    let upper = _mm512_extractf32x4_ps::<2>(whole);
    [_mm512_cvtss_f32(whole), _mm_cvtss_f32(upper)]
}
