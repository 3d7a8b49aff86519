//! The vectors of AVX-512 and AVX2.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{LANES, Simd};

/// Mask of the upper half of a 32-bit lane.
const UPPER: i32 = -1 << 16;

/// AVX-512 with F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ and VL, and the caller is compiled for them.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

/// Which quarters of two vectors a shuffle puts side by side: their lower halves, or their upper ones.
const HALVES: [i32; 2] = [0b01_00_01_00, 0b11_10_11_10];
/// Their even quarters, or their odd ones.
const QUARTERS: [i32; 2] = [0b10_00_10_00, 0b11_01_11_01];
/// The lower halves of two vectors of 256 bits, or their upper ones, for a permutation.
const HALVES_256: [i32; 2] = [0x20, 0x31];

/// Adds what the first and what the second shuffle puts side by side of two vectors.
macro_rules! join {
    ($add:ident, $shuffle:ident, $which:ident, $a:expr, $b:expr) => {
        $add(
            $shuffle::<{ $which[0] }>($a, $b),
            $shuffle::<{ $which[1] }>($a, $b),
        )
    };
}

/// Sums each run of four lanes of four vectors, by halves, and puts the sums side by side: those of the first runs, and so on.
macro_rules! sum_fours {
    ($add:ident, $shuffle:ident, $vectors:expr) => {{
        let [a, b, c, d] = $vectors;
        let (low, high) = (
            join!($add, $shuffle, HALVES, a, b),
            join!($add, $shuffle, HALVES, c, d),
        );
        join!($add, $shuffle, QUARTERS, low, high)
    }};
}

// SAFETY of the blocks: `new` is called only on machines with these instructions, and loads and stores stay within the
// arrays that they are given.
impl Simd for Avx512 {
    type Vector = __m512;

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, v: __m512) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), v) };
        out
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn widen_bf16(self, from: &[bf16; LANES]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    /// A 32-bit lane holds two values: a shift widens the first, a mask the second.
    #[inline(always)]
    fn widen_pairs_bf16(self, from: &[bf16; 2 * LANES]) -> [__m512; 2] {
        // SAFETY: see the impl.
        unsafe {
            let pairs = _mm512_loadu_si512(from.as_ptr().cast());
            [
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
                _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(UPPER))),
            ]
        }
    }

    #[inline(always)]
    fn widen_f16(self, from: &[f16; LANES]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }

    #[inline(always)]
    fn widen_i8(self, from: &[i8; LANES]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn splat_f16(self, x: f16) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_broadcastss_ps(widened(x)) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn flip(self, v: __m512, lanes: u16) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mask_xor_ps(v, lanes, v, _mm512_set1_ps(-0.0)) }
    }

    #[inline(always)]
    fn levels(self, pair: [f16; 2]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_broadcast_f32x4(levels(pair)) }
    }

    /// A permutation within runs of four lanes, which reads the low two bits of each index.
    #[inline(always)]
    fn two_bits(self, codes: u32, levels: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let places = _mm512_srlv_epi32(_mm512_set1_epi32(codes as i32), shifts);
            _mm512_permutevar_ps(levels, places)
        }
    }

    /// Joins the vectors in pairs, so that every addition uses whole registers.
    #[inline(always)]
    fn sums(self, v: &[__m512; LANES]) -> [f32; LANES] {
        // SAFETY: see the impl.
        unsafe {
            let mut fours = [_mm512_setzero_ps(); 4];
            for e in 0..4 {
                let a = join!(_mm512_add_ps, _mm512_shuffle_f32x4, HALVES, v[e], v[e + 4]);
                let b = join!(_mm512_add_ps, _mm512_shuffle_f32x4, HALVES, v[e + 8], v[e + 12]);
                fours[e] = join!(_mm512_add_ps, _mm512_shuffle_f32x4, QUARTERS, a, b);
            }
            self.store(sum_fours!(_mm512_add_ps, _mm512_shuffle_ps, fours))
        }
    }
}

/// Returns the four levels of [`Simd::levels`].
///
/// # Safety
/// The machine has F16C, and the caller is compiled for it.
#[inline(always)]
unsafe fn levels([step, zero]: [f16; 2]) -> __m128 {
    let bits = u32::from(step.to_bits()) | u32::from(zero.to_bits()) << 16;
    // SAFETY: the caller has the instructions.
    unsafe {
        let pair = _mm_cvtph_ps(_mm_cvtsi32_si128(bits as i32));
        let (step, zero) = (
            _mm_shuffle_ps::<0>(pair, pair),
            _mm_shuffle_ps::<0b01_01_01_01>(pair, pair),
        );
        _mm_add_ps(_mm_mul_ps(_mm_setr_ps(0.0, 1.0, 2.0, 3.0), step), zero)
    }
}

/// Returns the value of an f16 in the lowest lane.
///
/// # Safety
/// The machine has F16C.
#[inline(always)]
unsafe fn widened(x: f16) -> __m128 {
    // SAFETY: the caller has the instructions.
    unsafe { _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from(x.to_bits()))) }
}

/// AVX2 with FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2, FMA and F16C, and the caller is compiled for them.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self(())
    }
}

// SAFETY of the blocks: as for AVX-512.
impl Simd for Avx2 {
    type Vector = [__m256; 2];

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_loadu_ps(from.as_ptr()),
                _mm256_loadu_ps(from[8..].as_ptr()),
            ]
        }
    }

    #[inline(always)]
    fn store(self, v: [__m256; 2]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(out[8..].as_mut_ptr(), v[1]);
        }
        out
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn mul_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], c[0]),
                _mm256_fmadd_ps(a[1], b[1], c[1]),
            ]
        }
    }

    #[inline(always)]
    fn widen_bf16(self, from: &[bf16; LANES]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.as_ptr().cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from[8..].as_ptr().cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        }
    }

    /// As with AVX-512.
    #[inline(always)]
    fn widen_pairs_bf16(self, from: &[bf16; 2 * LANES]) -> [[__m256; 2]; 2] {
        // SAFETY: see the impl.
        unsafe {
            let low = _mm256_loadu_si256(from.as_ptr().cast());
            let high = _mm256_loadu_si256(from[LANES..].as_ptr().cast());
            let upper = _mm256_set1_epi32(UPPER);
            [
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
                ],
                [
                    _mm256_castsi256_ps(_mm256_and_si256(low, upper)),
                    _mm256_castsi256_ps(_mm256_and_si256(high, upper)),
                ],
            ]
        }
    }

    #[inline(always)]
    fn widen_f16(self, from: &[f16; LANES]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from[8..].as_ptr().cast())),
            ]
        }
    }

    #[inline(always)]
    fn widen_i8(self, from: &[i8; LANES]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128::<8>(codes))),
            ]
        }
    }

    #[inline(always)]
    fn splat_f16(self, x: f16) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_broadcastss_ps(widened(x)); 2] }
    }

    #[inline(always)]
    fn mul(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }

    #[inline(always)]
    fn flip(self, v: [__m256; 2], lanes: u16) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let sign = _mm256_set1_ps(-0.0);
            let to_sign = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
            let flip = |v: __m256, lanes: u16| {
                let lanes = _mm256_sllv_epi32(_mm256_set1_epi32(i32::from(lanes)), to_sign);
                _mm256_xor_ps(v, _mm256_and_ps(_mm256_castsi256_ps(lanes), sign))
            };
            [flip(v[0], lanes), flip(v[1], lanes >> 8)]
        }
    }

    #[inline(always)]
    fn levels(self, pair: [f16; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let levels = levels(pair);
            [_mm256_set_m128(levels, levels); 2]
        }
    }

    /// As with AVX-512.
    #[inline(always)]
    fn two_bits(self, codes: u32, levels: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: see the impl.
        unsafe {
            let shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
            let pick = |codes: u32, levels: __m256| {
                let places = _mm256_srlv_epi32(_mm256_set1_epi32(codes as i32), shifts);
                _mm256_permutevar_ps(levels, places)
            };
            [pick(codes, levels[0]), pick(codes >> 16, levels[1])]
        }
    }

    /// As with AVX-512.
    #[inline(always)]
    fn sums(self, v: &[[__m256; 2]; LANES]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (v, out) in v.as_chunks::<8>().0.iter().zip(out.as_chunks_mut::<8>().0) {
            // SAFETY: see the impl.
            unsafe {
                let mut fours = [_mm256_setzero_ps(); 4];
                for e in 0..4 {
                    let a = _mm256_add_ps(v[e][0], v[e][1]);
                    let b = _mm256_add_ps(v[e + 4][0], v[e + 4][1]);
                    fours[e] = join!(_mm256_add_ps, _mm256_permute2f128_ps, HALVES_256, a, b);
                }
                let sums = sum_fours!(_mm256_add_ps, _mm256_shuffle_ps, fours);
                _mm256_storeu_ps(out.as_mut_ptr(), sums);
            }
        }
        out
    }
}
