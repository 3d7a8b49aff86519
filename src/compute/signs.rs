//! Sums of table entries over sign patterns: the first pass of a scan of sign bytes.
//!
//! A byte of a row holds the sign patterns of two groups of four channels, the first in the low bits. With the
//! 16 scores of a group rounded to u8, its table fits one vector register and a lookup is one byte shuffle. Rows
//! are transposed in registers, so that the bytes of one column share a register. The sums are integers and the
//! same on every instruction set.
//!
//! W registers with L lanes of 16 bytes hold 16 L rows of W bytes, W being 2, 4, 8 or 16. A perfect shuffle interleaves
//! the lanes of register k with those of k + W / 2; in the binary number made of a byte's register and its place in the
//! lane, that moves the first digit to the end. After four of them the register is the byte's column, and the row is
//! read off what is left: byte `16 / W i + k` of lane l is of row `16 / W (L i + l) + k`.

use multiversion::multiversion;
use multiversion::target::match_target;

/// Patterns of a group of four channels.
pub const PATTERNS: usize = 16;
/// The most groups whose sums fit into 16 bits.
pub const MOST_GROUPS: usize = 257;
/// Most bytes of a row that a kernel takes in one pass.
const COLUMNS: usize = 16;
/// Rows that are cut to [`COLUMNS`] bytes at a time.
const TILE: usize = 256;
/// Bytes between what is read and what is prefetched: two pages of memory, since the hardware does not prefetch across
/// pages.
const AHEAD: usize = 8192;
/// Values of `out` beyond the last result that [`at_least`] may write.
pub const ROOM: usize = 16;

/// The tables of the two groups of a byte: low and high bits.
type Pair = [[u8; PATTERNS]; 2];

/// The tables of all groups, packed for the kernels.
pub struct Tables {
    width: usize,
    /// `[w / 16,16]`, the last padded with tables of zeros.
    pairs: Vec<[Pair; COLUMNS]>,
}

impl Tables {
    /// Packs the tables of the groups, in order: `[groups,16]`, 1 to [`MOST_GROUPS`].
    pub fn new(groups: &[[u8; PATTERNS]]) -> Self {
        assert!(
            (1..=MOST_GROUPS).contains(&groups.len()),
            "tables of {} groups",
            groups.len()
        );
        let width = groups.len().div_ceil(2);
        let mut pairs = vec![[[[0; PATTERNS]; 2]; COLUMNS]; width.div_ceil(COLUMNS)];
        for (g, table) in groups.iter().enumerate() {
            pairs[g / 2 / COLUMNS][g / 2 % COLUMNS][g % 2] = *table;
        }
        Self { width, pairs }
    }

    /// Writes the sum of each row of sign bytes, `rows` `[n,w]`, to `out` `[n]`.
    pub fn sums(&self, rows: &[u8], out: &mut [u16]) {
        assert_eq!(
            rows.len(),
            self.width * out.len(),
            "rows of the width of the tables"
        );
        out.fill(0);
        match self.width {
            2 => return self.add_rows::<2>(rows, out),
            4 => return self.add_rows::<4>(rows, out),
            8 => return self.add_rows::<8>(rows, out),
            COLUMNS => return self.add_rows::<COLUMNS>(rows, out),
            _ => (),
        }
        let mut tile = [[0; COLUMNS]; TILE];
        let rows = rows.chunks(TILE * self.width);
        for (rows, out) in rows.zip(out.chunks_mut(TILE)) {
            for (piece, pairs) in self.pairs.iter().enumerate() {
                for (tile, row) in tile.iter_mut().zip(rows.chunks_exact(self.width)) {
                    let row = &row[piece * COLUMNS..self.width.min((piece + 1) * COLUMNS)];
                    tile[..row.len()].copy_from_slice(row);
                }
                add_sums(pairs, &tile[..out.len()], out);
            }
        }
    }

    /// Adds the sums of rows of W bytes.
    fn add_rows<const W: usize>(&self, rows: &[u8], out: &mut [u16]) {
        if let Some(pairs) = self.pairs[0].first_chunk::<W>() {
            add_sums(pairs, rows.as_chunks().0, out);
        }
    }
}

/// Adds the sums of `rows` `[n,W]` to `out` `[n]`.
#[multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2", "aarch64+neon"))]
fn add_sums<const W: usize>(pairs: &[Pair; W], rows: &[[u8; W]], out: &mut [u16]) {
    match_target! {
        // SAFETY: this arm is chosen only on machines with AVX-512 F and BW.
        "x86_64+avx512f+avx512bw" => unsafe { x86::with_avx512(pairs, rows, out) },
        // SAFETY: this arm is chosen only on machines with AVX2.
        "x86_64+avx2" => unsafe { x86::with_avx2(pairs, rows, out) },
        // SAFETY: this arm is chosen only on machines with NEON.
        "aarch64+neon" => unsafe { arm::with_neon(pairs, rows, out) },
        _ => plain(pairs, rows, out),
    }
}

/// Implements [`add_sums`] in plain Rust.
fn plain<const W: usize>(pairs: &[Pair; W], rows: &[[u8; W]], out: &mut [u16]) {
    for (row, out) in rows.iter().zip(out) {
        let cells = row.iter().zip(pairs);
        let of = |(byte, [low, high]): (&u8, &Pair)| {
            u16::from(low[usize::from(byte & 15)]) + u16::from(high[usize::from(byte >> 4)])
        };
        *out += cells.map(of).sum::<u16>();
    }
}

/// Writes the sums of at least `limit` as `sum << 16 | index`, by ascending index, and returns their number.
///
/// There are at most 65536 sums, and `out` has [`ROOM`] values more: a sum is written before it is compared.
#[multiversion(targets("x86_64+avx512f"))]
pub fn at_least(sums: &[u16], limit: u16, out: &mut [u32]) -> usize {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with AVX-512F.
        "x86_64+avx512f" => unsafe { x86::at_least(sums, limit, out) },
        _ => keep(sums, 0, limit, out, 0),
    }
}

/// Appends the results of [`at_least`] for the sums from `from` on to the first `len`, and returns the new length.
fn keep(sums: &[u16], from: usize, limit: u16, out: &mut [u32], mut len: usize) -> usize {
    for (place, sum) in sums.iter().enumerate().skip(from) {
        out[len] = u32::from(*sum) << 16 | place as u32;
        len += usize::from(*sum >= limit);
    }
    len
}

#[cfg(target_arch = "x86_64")]
mod x86 {
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
                    _mm_prefetch::<_MM_HINT_T0>(register.wrapping_add(AHEAD).cast());
                    _mm512_loadu_si512(register.cast())
                };
            }
            let r = shuffle_512(shuffle_512(shuffle_512(shuffle_512(r))));
            // Sums of whole 16-bit lanes, and of their upper bytes alone.
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
                        _mm_prefetch::<_MM_HINT_T0>(register.wrapping_add(AHEAD).cast());
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
                // The lanes alternate after 16 / W rows.
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

    /// Interleaves the bytes of the first half of the registers with those of the other, lane by lane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn shuffle_512<const W: usize>(r: [__m512i; W]) -> [__m512i; W] {
        let mut out = r;
        for k in 0..W / 2 {
            out[2 * k] = _mm512_unpacklo_epi8(r[k], r[k + W / 2]);
            out[2 * k + 1] = _mm512_unpackhi_epi8(r[k], r[k + W / 2]);
        }
        out
    }

    /// Interleaves the bytes of the first half of the registers with those of the other, lane by lane.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn shuffle_256<const W: usize>(r: [__m256i; W]) -> [__m256i; W] {
        let mut out = r;
        for k in 0..W / 2 {
            out[2 * k] = _mm256_unpacklo_epi8(r[k], r[k + W / 2]);
            out[2 * k + 1] = _mm256_unpackhi_epi8(r[k], r[k + W / 2]);
        }
        out
    }

    /// [`super::at_least`].
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
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;

    use super::{Pair, plain};

    #[target_feature(enable = "neon")]
    pub fn with_neon<const W: usize>(pairs: &[Pair; W], rows: &[[u8; W]], out: &mut [u16]) {
        let low = vdupq_n_u8(15);
        let (blocks, rest) = rows.as_chunks::<16>();
        let (outs, _) = out.as_chunks_mut::<16>();
        for (block, out) in blocks.iter().zip(outs) {
            let mut r = [low; W];
            for (r, register) in r.iter_mut().zip(block.as_flattened().as_chunks::<16>().0) {
                // SAFETY: a register has 16 bytes.
                *r = unsafe { vld1q_u8(register.as_ptr()) };
            }
            let r = shuffle(shuffle(shuffle(shuffle(r))));
            let (mut first, mut last) = (vdupq_n_u16(0), vdupq_n_u16(0));
            for (r, [a, b]) in r.iter().zip(pairs) {
                // SAFETY: each table has 16 bytes.
                let (a, b) = unsafe { (vld1q_u8(a.as_ptr()), vld1q_u8(b.as_ptr())) };
                let a = vqtbl1q_u8(a, vandq_u8(*r, low));
                let b = vqtbl1q_u8(b, vshrq_n_u8::<4>(*r));
                first = vaddq_u16(first, vaddl_u8(vget_low_u8(a), vget_low_u8(b)));
                last = vaddq_u16(last, vaddl_high_u8(a, b));
            }
            // SAFETY: two loads and two stores of 16 bytes each in 32.
            unsafe {
                let out = out.as_mut_ptr();
                vst1q_u16(out, vaddq_u16(vld1q_u16(out), first));
                vst1q_u16(out.add(8), vaddq_u16(vld1q_u16(out.add(8)), last));
            }
        }
        let done = rows.len() - rest.len();
        plain(pairs, rest, &mut out[done..]);
    }

    /// Interleaves the bytes of the first half of the registers with those of the other.
    #[inline]
    #[target_feature(enable = "neon")]
    fn shuffle<const W: usize>(r: [uint8x16_t; W]) -> [uint8x16_t; W] {
        let mut out = r;
        for k in 0..W / 2 {
            out[2 * k] = vzip1q_u8(r[k], r[k + W / 2]);
            out[2 * k + 1] = vzip2q_u8(r[k], r[k + W / 2]);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// Adds the sums of rows `[n,W]` to `[n]`.
    type Kernel<const W: usize> = fn(&[Pair; W], &[[u8; W]], &mut [u16]);

    /// Returns every kernel that this machine can run.
    fn kernels<const W: usize>() -> Vec<Kernel<W>> {
        let mut out: Vec<Kernel<W>> = vec![plain, add_sums];
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the machine has AVX2.
            out.push(|pairs, rows, out| unsafe { x86::with_avx2(pairs, rows, out) });
        }
        out
    }

    /// Returns random bytes.
    fn bytes(n: usize, seed: u32) -> Vec<u8> {
        let mut number = numbers(seed);
        let mut next = || (number() >> 24) as u8;
        (0..n).map(|_| next()).collect()
    }

    #[test]
    fn every_kernel_gives_the_sums_of_the_tables() {
        sums_of_width::<2>();
        sums_of_width::<4>();
        sums_of_width::<8>();
        sums_of_width::<COLUMNS>();
    }

    fn sums_of_width<const W: usize>() {
        let values = bytes(2 * W * PATTERNS, 1);
        let groups: Vec<[u8; PATTERNS]> = values.as_chunks().0.to_vec();
        let tables = Tables::new(&groups);
        let pairs = tables.pairs[0].first_chunk::<W>().expect("a pair for each byte");
        for n in [0, 1, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 200] {
            let rows = bytes(n * W, 2 + n as u32);
            let rows = rows.as_chunks::<W>().0;
            for kernel in kernels() {
                let mut out = vec![7; n];
                kernel(pairs, rows, &mut out);
                for (row, sum) in rows.iter().zip(&out) {
                    let nibble = |g: usize| usize::from(row[g / 2] >> (4 * (g % 2)) & 15);
                    let expected: u32 = (0..2 * W).map(|g| u32::from(groups[g][nibble(g)])).sum();
                    assert_eq!(u32::from(*sum), 7 + expected, "{n} of {W}");
                }
            }
        }
    }

    #[test]
    fn rows_of_every_width() {
        for count in [1, 2, 3, 4, 8, 16, 20, 31, 32, 33, 64, 100, MOST_GROUPS] {
            let (width, n) = (count.div_ceil(2), 2 * TILE + 77);
            // The largest sum is the largest that 16 bits hold.
            let mut groups: Vec<[u8; PATTERNS]> = bytes(count * PATTERNS, 3).as_chunks().0.to_vec();
            groups.iter_mut().for_each(|table| table[15] = 255);
            let mut rows = bytes(n * width, 4);
            rows[..width].fill(255);
            let mut out = vec![9; n];
            Tables::new(&groups).sums(&rows, &mut out);
            assert_eq!(usize::from(out[0]), 255 * count);
            for (row, sum) in rows.chunks(width).zip(&out) {
                let nibble = |g: usize| usize::from(row[g / 2] >> (4 * (g % 2)) & 15);
                let expected: u32 = (0..count).map(|g| u32::from(groups[g][nibble(g)])).sum();
                assert_eq!(u32::from(*sum), expected, "{count}");
            }
        }
    }

    #[test]
    fn what_is_at_least_a_limit() {
        for n in [0, 1, 15, 16, 17, 64, 100, 65_536] {
            let low = bytes(n, 5);
            let sums: Vec<u16> = low
                .iter()
                .zip(bytes(n, 6))
                .map(|(a, b)| u16::from_le_bytes([*a, b]))
                .collect();
            for limit in [0, 1, 30_000, sums.iter().copied().max().unwrap_or(0), u16::MAX] {
                let kept = sums.iter().enumerate().filter(|(_, sum)| **sum >= limit);
                let expected: Vec<u32> = kept.map(|(i, sum)| u32::from(*sum) << 16 | i as u32).collect();
                let mut room = vec![0; n + ROOM];
                let len = at_least(&sums, limit, &mut room);
                assert_eq!(room[..len], expected, "{n} {limit}");
                let len = keep(&sums, 0, limit, &mut room, 0);
                assert_eq!(room[..len], expected, "{n} {limit}");
            }
        }
    }
}
