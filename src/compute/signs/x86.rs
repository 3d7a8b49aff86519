//! Sums of table entries, and comparisons of the sums, with AVX-512 and AVX2.

use std::arch::x86_64::*;

use super::{AHEAD, PATTERNS, Pair, keep, plain};

#[inline]
fn table(of: &[u8; PATTERNS]) -> __m128i {
    // SAFETY: SSE2 is part of x86-64; the array has 16 bytes.
    unsafe { _mm_loadu_si128(of.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f,avx512bw")]
pub fn with_avx512<const W: usize>(pairs: &[Pair; W], rows: &[[u8; W]], out: &mut [u16]) {
    let low = _mm512_set1_epi8(15);
    let (rows_of_register, rows_of_lane) = (64 / W, 16 / W);
    let order: [u16; 32] = std::array::from_fn(|row| {
        let (i, rest) = (row / rows_of_register, row % rows_of_register);
        let (lane, k) = (rest / rows_of_lane, rest % rows_of_lane);
        (lane * 8 + i * rows_of_lane + k) as u16
    });
    // SAFETY: the array has 64 bytes.
    let order = unsafe { _mm512_loadu_si512(order.as_ptr().cast()) };
    let wide = |pair: &Pair| {
        let [a, b] = pair;
        [_mm512_broadcast_i32x4(table(a)), _mm512_broadcast_i32x4(table(b))]
    };
    let mut tables = [[low; 2]; W];
    tables.iter_mut().zip(pairs).for_each(|(t, pair)| *t = wide(pair));
    let (blocks, rest) = rows.as_chunks::<64>();
    let (outs, _) = out.as_chunks_mut::<64>();
    for (block, out) in blocks.iter().zip(outs) {
        let mut r = [low; W];
        for (i, r) in r.iter_mut().enumerate() {
            let register = block.as_flattened().as_ptr().wrapping_add(64 * i);
            // SAFETY: W loads of 64 bytes each out of 64 W; a prefetch accesses nothing.
            *r = unsafe {
                _mm_prefetch::<_MM_HINT_T1>(register.wrapping_add(AHEAD).cast());
                _mm512_loadu_si512(register.cast())
            };
        }
        let r = shuffle_512(shuffle_512(shuffle_512(shuffle_512(r))));
        // `all` sums whole 16-bit lanes, `odd` only their upper bytes.
        let (mut all, mut odd) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        for (r, [first, second]) in r.iter().zip(&tables) {
            let a = _mm512_shuffle_epi8(*first, _mm512_and_si512(*r, low));
            let b = _mm512_shuffle_epi8(*second, _mm512_and_si512(_mm512_srli_epi16::<4>(*r), low));
            all = _mm512_add_epi16(all, _mm512_add_epi16(a, b));
            let upper = _mm512_add_epi16(_mm512_srli_epi16::<8>(a), _mm512_srli_epi16::<8>(b));
            odd = _mm512_add_epi16(odd, upper);
        }
        let even = _mm512_sub_epi16(all, _mm512_slli_epi16::<8>(odd));
        let first = _mm512_permutexvar_epi16(order, _mm512_unpacklo_epi16(even, odd));
        let last = _mm512_permutexvar_epi16(order, _mm512_unpackhi_epi16(even, odd));
        // SAFETY: two loads and two stores of 64 bytes each in 128.
        unsafe {
            let out: *mut __m512i = out.as_mut_ptr().cast();
            for (i, sums) in [first, last].into_iter().enumerate() {
                let out = out.add(i);
                _mm512_storeu_si512(out, _mm512_add_epi16(_mm512_loadu_si512(out), sums));
            }
        }
    }
    let done = rows.len() - rest.len();
    plain(pairs, rest, &mut out[done..]);
}

#[target_feature(enable = "avx2")]
pub fn with_avx2<const W: usize>(pairs: &[Pair; W], rows: &[[u8; W]], out: &mut [u16]) {
    let low = _mm256_set1_epi8(15);
    let wide = |pair: &Pair| {
        let [a, b] = pair;
        [
            _mm256_broadcastsi128_si256(table(a)),
            _mm256_broadcastsi128_si256(table(b)),
        ]
    };
    let mut tables = [[low; 2]; W];
    tables.iter_mut().zip(pairs).for_each(|(t, pair)| *t = wide(pair));
    let (blocks, rest) = rows.as_chunks::<32>();
    let (outs, _) = out.as_chunks_mut::<32>();
    for (block, out) in blocks.iter().zip(outs) {
        let mut r = [low; W];
        for (i, r) in r.iter_mut().enumerate() {
            let register = block.as_flattened().as_ptr().wrapping_add(32 * i);
            // SAFETY: W loads of 32 bytes each out of 32 W; a prefetch accesses nothing.
            *r = unsafe {
                if i % 2 == 0 {
                    _mm_prefetch::<_MM_HINT_T1>(register.wrapping_add(AHEAD).cast());
                }
                _mm256_loadu_si256(register.cast())
            };
        }
        let r = shuffle_256(shuffle_256(shuffle_256(shuffle_256(r))));
        let (mut all, mut odd) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        for (r, [first, second]) in r.iter().zip(&tables) {
            let a = _mm256_shuffle_epi8(*first, _mm256_and_si256(*r, low));
            let b = _mm256_shuffle_epi8(*second, _mm256_and_si256(_mm256_srli_epi16::<4>(*r), low));
            all = _mm256_add_epi16(all, _mm256_add_epi16(a, b));
            let upper = _mm256_add_epi16(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b));
            odd = _mm256_add_epi16(odd, upper);
        }
        let even = _mm256_sub_epi16(all, _mm256_slli_epi16::<8>(odd));
        let halves = [_mm256_unpacklo_epi16(even, odd), _mm256_unpackhi_epi16(even, odd)];
        for (half, out) in halves.into_iter().zip(out.as_chunks_mut::<16>().0) {
            let (a, b) = (_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half));
            // Each run of 16 / W rows lies in one lane, and the next run in the other.
            let sums = match W {
                16 => [_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)],
                8 => [_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)],
                4 => [_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b)],
                _ => [a, b],
            };
            // SAFETY: two loads and two stores of 16 bytes each in 32.
            unsafe {
                let out: *mut __m128i = out.as_mut_ptr().cast();
                for (i, sums) in sums.into_iter().enumerate() {
                    let out = out.add(i);
                    _mm_storeu_si128(out, _mm_add_epi16(_mm_loadu_si128(out), sums));
                }
            }
        }
    }
    let done = rows.len() - rest.len();
    plain(pairs, rest, &mut out[done..]);
}

/// Interleaves the bytes of the first half of the registers with those of the second half, lane by lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn shuffle_512<const W: usize>(r: [__m512i; W]) -> [__m512i; W] {
    interleave!(r, _mm512_unpacklo_epi8, _mm512_unpackhi_epi8)
}

/// Interleaves the bytes of the first half of the registers with those of the second half, lane by lane.
#[inline]
#[target_feature(enable = "avx2")]
fn shuffle_256<const W: usize>(r: [__m256i; W]) -> [__m256i; W] {
    interleave!(r, _mm256_unpacklo_epi8, _mm256_unpackhi_epi8)
}

/// Implements [`super::at_least`].
#[target_feature(enable = "avx512f")]
pub fn at_least(sums: &[u16], limit: u16, out: &mut [u32]) -> usize {
    let mut place = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let limit_wide = _mm512_set1_epi32(i32::from(limit) << 16);
    let (blocks, rest) = sums.as_chunks::<16>();
    let mut len = 0;
    for block in blocks {
        // SAFETY: a block has 32 bytes.
        let sums = unsafe { _mm256_loadu_si256(block.as_ptr().cast()) };
        let sums = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(sums));
        let kept = _mm512_cmpge_epu32_mask(sums, limit_wide);
        let keys = _mm512_maskz_compress_epi32(kept, _mm512_or_si512(sums, place));
        let room = &mut out[len..len + 16];
        // SAFETY: 16 values have 64 bytes.
        unsafe { _mm512_storeu_si512(room.as_mut_ptr().cast(), keys) };
        len += kept.count_ones() as usize;
        place = _mm512_add_epi32(place, _mm512_set1_epi32(16));
    }
    keep(sums, sums.len() - rest.len(), limit, out, len)
}
