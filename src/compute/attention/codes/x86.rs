//! The loops with AVX2.

use std::arch::x86_64::*;

use super::{
    BLOCK, CodeRows, GROUP, LANES, MOST, OutputSums, ROWS, RoundedGroup, RoundedQueries, RoundedWeights, Row,
    Run, code_bytes, factor, sum_channel,
};

/// Sums of weighted codes that stay in registers: four vectors for each of as many heads.
const HEADS: usize = 3;

/// Computes [`super::scores`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn scores<const BITS: usize>(
    rows: CodeRows<BITS>,
    queries: &RoundedQueries,
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    let mut coming = run.coming();
    for (b, positions) in run.now.chunks(ROWS).enumerate() {
        // A last tile of fewer rows reads its first row again.
        let mut of_tile = [rows.row(positions[0]); ROWS];
        for (row, p) in of_tile.iter_mut().zip(positions) {
            rows.prefetch_next(&mut coming);
            *row = rows.row(*p);
        }
        let mut first = 0;
        while first < queries.heads {
            let out = &mut out[first * stride + b * ROWS..];
            let n = positions.len();
            first += match queries.heads - first {
                1 => score_heads::<BITS, 1>(rows, &of_tile, queries, first, out, stride, n),
                2 => score_heads::<BITS, 2>(rows, &of_tile, queries, first, out, stride, n),
                3 => score_heads::<BITS, 3>(rows, &of_tile, queries, first, out, stride, n),
                _ => score_heads::<BITS, 4>(rows, &of_tile, queries, first, out, stride, n),
            };
        }
    }
}

/// Scores a tile of rows for N heads from head `first` on, writes the scores of the first `n` rows, and returns N.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn score_heads<const BITS: usize, const N: usize>(
    rows: CodeRows<BITS>,
    of_tile: &[Row<'_>; ROWS],
    queries: &RoundedQueries,
    first: usize,
    out: &mut [f32],
    stride: usize,
    n: usize,
) -> usize {
    let mut sums = [_mm256_setzero_ps(); N];
    for (g, of_group) in queries.groups.chunks_exact(queries.heads).enumerate() {
        let of_group: &[RoundedGroup; N] = of_group[first..first + N].try_into().expect("N heads");
        let mut tile = [[_mm256_setzero_si256(); ROWS]; N];
        for j in 0..ROWS {
            let codes = codes(rows, of_tile[j], g);
            for a in 0..N {
                tile[a][j] = products(codes, &of_group[a]);
            }
        }
        let [scales, offsets] = pairs(rows, of_tile, g);
        for a in 0..N {
            let (scale, sum) = (_mm256_set1_ps(of_group[a].scale), _mm256_set1_ps(of_group[a].sum));
            let product = _mm256_mul_ps(_mm256_cvtepi32_ps(lane_sums(&tile[a])), scale);
            sums[a] = _mm256_fmadd_ps(sum, offsets, _mm256_fmadd_ps(product, scales, sums[a]));
        }
    }
    for a in 0..N {
        out[a * stride..][..n].copy_from_slice(&stored(sums[a])[..n]);
    }
    N
}

/// Returns the scales and the offsets of a group of eight rows. They go from memory to lanes of a vector one by one: a vector that
/// was written to memory in parts would be read from there only when all of it has arrived.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn pairs<const BITS: usize>(rows: CodeRows<BITS>, of: &[Row<'_>; 8], group: usize) -> [__m256; 2] {
    let pair = |i: usize| bytemuck::cast::<_, i32>(rows.pair(of[i], group));
    let pairs = _mm256_setr_epi32(
        pair(0),
        pair(1),
        pair(2),
        pair(3),
        pair(4),
        pair(5),
        pair(6),
        pair(7),
    );
    // A pair has the scale in its lower half.
    let scales = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
    let halves = _mm256_packus_epi32(scales, _mm256_srli_epi32::<16>(pairs));
    // The two halves of a vector are packed apart.
    let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(halves);
    [
        _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
        _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
    ]
}

#[inline]
#[target_feature(enable = "avx2")]
fn stored(x: __m256) -> [f32; 8] {
    let mut out = [0.0; 8];
    // SAFETY: there is room for eight values.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), x) };
    out
}

/// Returns the codes of a group of a row as i16, in the order of [`super::score_channel`]. Beyond the last channel they are
/// zeros or of no meaning: there, queries are zero.
#[inline]
#[target_feature(enable = "avx2")]
fn codes<const BITS: usize>(rows: CodeRows<BITS>, row: Row<'_>, group: usize) -> [__m256i; 4] {
    let first = group * code_bytes(BITS, GROUP);
    let is_whole = rows.d >= (group + 1) * GROUP;
    let load = |plane: &[u8]| {
        let mut copied = [0u8; 32];
        let from = if is_whole {
            // SAFETY: the row has the codes of this group.
            unsafe { plane.as_ptr().add(first) }
        } else {
            let rest = &plane[first..rows.codes];
            copied[..rest.len()].copy_from_slice(rest);
            copied.as_ptr()
        };
        // SAFETY: there are 32 bytes, in 2 bits 16.
        unsafe {
            if BITS == 2 {
                _mm256_castsi128_si256(_mm_loadu_si128(from.cast()))
            } else {
                _mm256_loadu_si256(from.cast())
            }
        }
    };
    match BITS {
        8 => joined(load(row.0), load(row.1)),
        4 => nibbles(load(row.0)),
        _ => crumbs(_mm256_castsi256_si128(load(row.0))),
    }
}

/// Multiplies codes with a query; the sum of the lanes is the product.
#[inline]
#[target_feature(enable = "avx2")]
fn products(codes: [__m256i; 4], query: &RoundedGroup) -> __m256i {
    let product = |k: usize| {
        // SAFETY: there are sixteen values from each of these places on, which are aligned to 32 bytes.
        let query = unsafe { _mm256_load_si256(query.codes.as_ptr().add(16 * k).cast()) };
        _mm256_madd_epi16(codes[k], query)
    };
    _mm256_add_epi32(
        _mm256_add_epi32(product(0), product(1)),
        _mm256_add_epi32(product(2), product(3)),
    )
}

/// Returns the sum of the lanes of each vector.
#[inline]
#[target_feature(enable = "avx2")]
fn lane_sums(of: &[__m256i; ROWS]) -> __m256i {
    let pairs = |i: usize| _mm256_hadd_epi32(of[i], of[i + 1]);
    let low = _mm256_hadd_epi32(pairs(0), pairs(2));
    let high = _mm256_hadd_epi32(pairs(4), pairs(6));
    _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high),
    )
}

/// Computes [`super::add`].
#[target_feature(enable = "avx2,fma,f16c")]
pub fn add<const BITS: usize>(
    rows: CodeRows<BITS>,
    weights: &[f32],
    stride: usize,
    run: &Run,
    sums: &mut OutputSums,
) {
    let (r, groups) = (sums.r, rows.groups());
    let mut coming = run.coming();
    // `[r, groups, GROUP / 8]`, in the order of `sum_channel`.
    let mut own = vec![_mm256_setzero_ps(); r * groups * (GROUP / 8)];
    let mut rounded = vec![RoundedWeights::NONE; r];
    for (b, positions) in run.now.chunks(BLOCK).enumerate() {
        // The last rows, if there are fewer than in other blocks, are the first one again, without a weight.
        let mut of_block = [rows.row(positions[0]); BLOCK];
        for (row, p) in of_block.iter_mut().zip(positions) {
            rows.prefetch_next(&mut coming);
            *row = rows.row(*p);
        }
        let two_rows = positions.len().div_ceil(2);
        for g in 0..groups {
            let mut scales = [_mm256_setzero_ps(); BLOCK / 8];
            let mut offsets = scales;
            for (i, eight) in of_block.as_chunks::<8>().0.iter().enumerate() {
                [scales[i], offsets[i]] = pairs(rows, eight, g);
            }
            for (a, to) in rounded.iter_mut().enumerate() {
                let weights = &weights[a * stride + b * BLOCK..][..positions.len()];
                *to = rounded_weights(weights, &scales, &offsets);
            }
            let mut heads = rounded.as_slice();
            let mut first = 0;
            while let Some(n) = tile(heads.len()) {
                let (of_tile, rest) = heads.split_at(n);
                let own = &mut own[first * groups * (GROUP / 8)..];
                let to = |a: usize| (a * groups + g) * (GROUP / 8);
                match n {
                    1 => add_heads::<BITS, 1>(rows, &of_block, two_rows, g, of_tile, own, to),
                    2 => add_heads::<BITS, 2>(rows, &of_block, two_rows, g, of_tile, own, to),
                    _ => add_heads::<BITS, HEADS>(rows, &of_block, two_rows, g, of_tile, own, to),
                }
                (heads, first) = (rest, first + n);
            }
        }
    }
    let chunks = rows.d / LANES;
    for (to, own) in sums
        .values
        .chunks_mut(chunks)
        .zip(own.chunks(groups * (GROUP / 8)))
    {
        for (i, own) in own.iter().enumerate() {
            for (lane, x) in stored(*own).into_iter().enumerate() {
                let channel = i / 8 * GROUP + sum_channel(BITS, i % 8 * 8 + lane);
                if channel < rows.d {
                    to.as_flattened_mut()[channel] += x;
                }
            }
        }
    }
}

/// Computes [`RoundedWeights::new`].
#[inline]
#[target_feature(enable = "avx2,fma")]
fn rounded_weights(
    weights: &[f32],
    scales: &[__m256; BLOCK / 8],
    offsets: &[__m256; BLOCK / 8],
) -> RoundedWeights {
    let mut all = [0.0; BLOCK];
    all[..weights.len()].copy_from_slice(weights);
    let sizes = _mm256_castsi256_ps(_mm256_set1_epi32(i32::MAX));
    let (mut most, mut sum) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    let mut scaled = [_mm256_setzero_ps(); BLOCK / 8];
    for (i, of_lane) in all.as_chunks::<8>().0.iter().enumerate() {
        // SAFETY: there are eight values.
        let weights = unsafe { _mm256_loadu_ps(of_lane.as_ptr()) };
        scaled[i] = _mm256_mul_ps(weights, scales[i]);
        most = _mm256_max_ps(_mm256_and_ps(scaled[i], sizes), most);
        sum = _mm256_fmadd_ps(weights, offsets[i], sum);
    }
    let most = across(most, |a, b| _mm_max_ps(a, b));
    let offset = across(sum, |a, b| _mm_add_ps(a, b));
    let factor = _mm256_set1_ps(factor(most));
    let mut codes = [0; BLOCK];
    for (to, two) in codes
        .as_chunks_mut::<16>()
        .0
        .iter_mut()
        .zip(scaled.as_chunks::<2>().0)
    {
        let [low, high] = two.map(|x| _mm256_cvtps_epi32(_mm256_mul_ps(x, factor)));
        // The two halves of a vector are packed apart.
        let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(low, high));
        // SAFETY: there is room for sixteen values.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), packed) };
    }
    RoundedWeights {
        codes,
        scale: most / MOST,
        offset,
    }
}

/// Joins the lanes of a vector by halves.
#[inline]
#[target_feature(enable = "avx2")]
fn across(x: __m256, join: impl Fn(__m128, __m128) -> __m128) -> f32 {
    let four = join(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = join(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(join(two, _mm_shuffle_ps::<1>(two, two)))
}

/// Returns how many of the heads that remain go together.
fn tile(heads: usize) -> Option<usize> {
    match heads {
        0 => None,
        // Two equal tiles.
        4 => Some(2),
        n => Some(n.min(HEADS)),
    }
}

/// Adds the weighted codes of a group of channels of `pairs` pairs of rows to the sums of N heads; head `a` has the vectors
/// from `to(a)` on.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn add_heads<const BITS: usize, const N: usize>(
    rows: CodeRows<BITS>,
    of_block: &[Row<'_>; BLOCK],
    pairs: usize,
    group: usize,
    weights: &[RoundedWeights],
    own: &mut [__m256],
    to: impl Fn(usize) -> usize,
) {
    let channels = GROUP.min(rows.d - group * GROUP);
    let weights: &[RoundedWeights; N] = weights.try_into().expect("the weights of N heads");
    for half in 0..channels.div_ceil(32) {
        let first = group * code_bytes(BITS, GROUP) + half * code_bytes(BITS, GROUP) / 2;
        // The last half may have one chunk only.
        let is_whole = channels >= 32 * (half + 1);
        let mut sums = [[_mm256_setzero_si256(); 4]; N];
        for (pair, two) in of_block.as_chunks::<2>().0[..pairs].iter().enumerate() {
            let codes = row_pairs::<BITS>(*two, first, is_whole);
            for a in 0..N {
                let weight = _mm256_set1_epi32(bytemuck::cast(weights[a].codes.as_chunks::<2>().0[pair]));
                for k in 0..4 {
                    sums[a][k] = _mm256_add_epi32(sums[a][k], _mm256_madd_epi16(codes[k], weight));
                }
            }
        }
        for a in 0..N {
            let (scale, offset) = (
                _mm256_set1_ps(weights[a].scale),
                _mm256_set1_ps(weights[a].offset),
            );
            for k in 0..4 {
                let to = &mut own[to(a) + half * 4 + k];
                *to = _mm256_add_ps(
                    _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[a][k]), scale, *to),
                    offset,
                );
            }
        }
    }
}

/// Returns the codes of two rows as pairs of i16, for half a group that begins at byte `first`, in the order of
/// [`super::sum_channel`]. A half that is not whole has one chunk.
#[inline]
#[target_feature(enable = "avx2")]
fn row_pairs<const BITS: usize>([x, y]: [Row<'_>; 2], first: usize, is_whole: bool) -> [__m256i; 4] {
    let load = |plane: &[u8]| {
        debug_assert!(first + code_bytes(BITS, if is_whole { 32 } else { LANES }) <= plane.len());
        // SAFETY: the row has these codes, which are of two chunks, or of one.
        unsafe {
            let from = plane.as_ptr().add(first);
            match (BITS, is_whole) {
                (2, true) | (4 | 8, false) => _mm_loadl_epi64(from.cast()),
                (2, false) => _mm_cvtsi32_si128(from.cast::<i32>().read_unaligned()),
                _ => _mm_loadu_si128(from.cast()),
            }
        }
    };
    let pairs = |x: &[u8], y: &[u8]| {
        let (x, y) = (load(x), load(y));
        _mm256_set_m128i(_mm_unpackhi_epi8(x, y), _mm_unpacklo_epi8(x, y))
    };
    match BITS {
        8 => joined(pairs(x.0, y.0), pairs(x.1, y.1)),
        4 => nibbles(pairs(x.0, y.0)),
        _ => crumbs(_mm_unpacklo_epi8(load(x.0), load(y.0))),
    }
}

/// Returns the lower halves of the bytes, then their upper halves, as i16; each in two vectors.
#[inline]
#[target_feature(enable = "avx2")]
fn nibbles(x: __m256i) -> [__m256i; 4] {
    let mask = _mm256_set1_epi8(15);
    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask);
    widened(_mm256_and_si256(x, mask), high)
}

/// Joins the halves of bytes of two vectors, the upper and the lower 4 bits of codes; returns these as [`nibbles`] does.
#[inline]
#[target_feature(enable = "avx2")]
fn joined(upper: __m256i, lower: __m256i) -> [__m256i; 4] {
    let (low_half, high_half) = (_mm256_set1_epi8(15), _mm256_set1_epi8(-16));
    // Shifts of halves of 8 bits, as the bits that cross to the next one are cleared.
    let low = _mm256_or_si256(
        _mm256_and_si256(_mm256_slli_epi16::<4>(upper), high_half),
        _mm256_and_si256(lower, low_half),
    );
    let high = _mm256_or_si256(
        _mm256_and_si256(upper, high_half),
        _mm256_and_si256(_mm256_srli_epi16::<4>(lower), low_half),
    );
    widened(low, high)
}

/// Returns the bytes of two vectors as i16; each in two vectors.
#[inline]
#[target_feature(enable = "avx2")]
fn widened(low: __m256i, high: __m256i) -> [__m256i; 4] {
    let zero = _mm256_setzero_si256();
    [
        _mm256_unpacklo_epi8(low, zero),
        _mm256_unpackhi_epi8(low, zero),
        _mm256_unpacklo_epi8(high, zero),
        _mm256_unpackhi_epi8(high, zero),
    ]
}

/// Returns the four pairs of bits of each byte as i16, the lowest first.
#[inline]
#[target_feature(enable = "avx2")]
fn crumbs(x: __m128i) -> [__m256i; 4] {
    let mask = _mm_set1_epi8(3);
    [
        _mm256_cvtepu8_epi16(_mm_and_si128(x, mask)),
        _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<2>(x), mask)),
        _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<4>(x), mask)),
        _mm256_cvtepu8_epi16(_mm_and_si128(_mm_srli_epi16::<6>(x), mask)),
    ]
}
