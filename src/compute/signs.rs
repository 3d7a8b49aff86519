//! Sums of table entries over sign patterns: the first pass of a scan of sign bytes.
//!
//! Each byte of a row holds the sign patterns of two groups of four channels, the first group in the low bits. With the
//! 16 scores of a group rounded to u8, the group's table fits into one vector register, and a lookup is one byte
//! shuffle. Rows are transposed in registers, so that the bytes of one column share a register. The sums are integers
//! and therefore the same on every instruction set.
//!
//! W registers with L lanes of 16 bytes hold 16 L rows of W bytes, where W is 2, 4, 8 or 16. A perfect shuffle
//! interleaves the lanes of register k with those of register k + W / 2. Take the binary number made of a byte's
//! register number followed by its place in the lane: a perfect shuffle moves the leading digit of this number to the
//! end. After four shuffles the register number is the byte's column, and the remaining digits give its row: byte
//! `16 / W i + k` of lane l belongs to row `16 / W (L i + l) + k`.

use multiversion::multiversion;
use multiversion::target::match_target;

/// Patterns of a group of four channels.
pub const PATTERNS: usize = 16;
/// The most groups whose sums fit into 16 bits.
pub const MOST_GROUPS: usize = 257;
/// The most bytes of a row that a kernel takes in one pass.
const COLUMNS: usize = 16;
/// Rows that are cut to pieces of [`COLUMNS`] bytes at a time.
const TILE: usize = 256;
/// How many bytes ahead of the current read to prefetch: two pages of memory, because the hardware does not prefetch
/// across pages.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 8192;
/// How many values of `out` beyond the last result [`at_least`] may overwrite.
pub const ROOM: usize = 16;

/// The tables of the two groups of a byte: first the group in the low bits, then the one in the high bits.
type Pair = [[u8; PATTERNS]; 2];

/// The tables of all groups, packed for the kernels.
pub struct Tables {
    width: usize,
    /// `[w / 16,16]`, padded at the end with tables of zeros.
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

    /// Writes the sum of the table entries of each row of sign bytes, `rows` `[n,w]`, to `out` `[n]`.
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

    /// Adds the sums of rows of W bytes to `out`.
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

/// Writes every sum of at least `limit` to `out` as `sum << 16 | index`, by ascending index, and returns their number.
///
/// There are at most 65536 sums. `out` must have [`ROOM`] values more than there are sums, because a sum is written
/// before it is compared.
#[multiversion(targets("x86_64+avx512f"))]
pub fn at_least(sums: &[u16], limit: u16, out: &mut [u32]) -> usize {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with AVX-512F.
        "x86_64+avx512f" => unsafe { x86::at_least(sums, limit, out) },
        _ => keep(sums, 0, limit, out, 0),
    }
}

/// Continues [`at_least`] for the sums from index `from` on, appending after the first `len` results, and returns the
/// new length.
fn keep(sums: &[u16], from: usize, limit: u16, out: &mut [u32], mut len: usize) -> usize {
    for (place, sum) in sums.iter().enumerate().skip(from) {
        out[len] = u32::from(*sum) << 16 | place as u32;
        len += usize::from(*sum >= limit);
    }
    len
}

/// Interleaves the lanes of the first half of the registers with those of the second half: one perfect shuffle.
macro_rules! interleave {
    ($registers:ident, $low:ident, $high:ident) => {{
        let mut out = $registers;
        for k in 0..W / 2 {
            out[2 * k] = $low($registers[k], $registers[k + W / 2]);
            out[2 * k + 1] = $high($registers[k], $registers[k + W / 2]);
        }
        out
    }};
}

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(target_arch = "aarch64")]
mod arm;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// A function that adds the sums of rows `[n,W]` to `[n]`.
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
            // These tables reach the largest sum that 16 bits hold.
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
