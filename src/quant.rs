//! The block-quantised types of GGUF files.
//!
//! Every type stores 32 values with integer codes and a scale, and some with an offset: `x = scale code + offset`. The K types
//! join eight such chunks into a block of 256 values, with the chunks' scales in 6 or 8 bits; Q6_K has two scales per chunk.
//! [`Quant::chunk`] decodes any of them into one form, from which values and products are computed.
//!
//! The layouts are those of ggml (`block_q4_0` to `block_q6_K`); all numbers are little-endian.

use half::f16;

/// Values of a chunk.
pub const CHUNK: usize = 32;
/// Values of a block of the K types.
const SUPER: usize = 256;

/// A block-quantised type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quant {
    /// 4 bits, a scale in f16.
    Q4_0,
    /// 4 bits, a scale and an offset in f16.
    Q4_1,
    /// 5 bits, a scale in f16.
    Q5_0,
    /// 5 bits, a scale and an offset in f16.
    Q5_1,
    /// 8 bits, a scale in f16.
    Q8_0,
    /// 4 bits, scales and offsets in 6 bits.
    Q4K,
    /// 5 bits, scales and offsets in 6 bits.
    Q5K,
    /// 6 bits, scales of 16 values in 8 bits.
    Q6K,
}

/// 32 decoded values: value i is `scale[i / 16] * codes[i] + offset`.
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    /// Integer codes.
    pub codes: [i8; CHUNK],
    /// The scales of the two halves.
    pub scales: [f32; 2],
    /// The offset of all values.
    pub offset: f32,
}

impl Quant {
    /// Every type, with its number in GGUF files.
    pub const ALL: [(Self, u32); 8] = [
        (Self::Q4_0, 2),
        (Self::Q4_1, 3),
        (Self::Q5_0, 6),
        (Self::Q5_1, 7),
        (Self::Q8_0, 8),
        (Self::Q4K, 12),
        (Self::Q5K, 13),
        (Self::Q6K, 14),
    ];

    /// Returns the type's name in GGUF files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Returns the values of a block and its bytes.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::Q4_0 => (CHUNK, 18),
            Self::Q4_1 => (CHUNK, 20),
            Self::Q5_0 => (CHUNK, 22),
            Self::Q5_1 => (CHUNK, 24),
            Self::Q8_0 => (CHUNK, 34),
            Self::Q4K => (SUPER, 144),
            Self::Q5K => (SUPER, 176),
            Self::Q6K => (SUPER, 210),
        }
    }

    /// Returns the bytes of so many values, which fill whole blocks.
    pub fn bytes(self, values: usize) -> usize {
        let (each, bytes) = self.block();
        values / each * bytes
    }

    /// Decodes chunk `index` of a row's bytes.
    #[inline(always)]
    pub fn chunk(self, row: &[u8], index: usize) -> Chunk {
        let (each, bytes) = self.block();
        let chunks = each / CHUNK;
        let block = &row[index / chunks * bytes..][..bytes];
        match self {
            Self::Q4_0 => Chunk::plain(nibbles(&block[2..], |q| q as i8 - 8), half(block, 0), 0.0),
            Self::Q4_1 => Chunk::plain(nibbles(&block[4..], |q| q as i8), half(block, 0), half(block, 2)),
            Self::Q5_0 => Chunk::plain(five_bits(&block[2..], 16), half(block, 0), 0.0),
            Self::Q5_1 => Chunk::plain(five_bits(&block[4..], 0), half(block, 0), half(block, 2)),
            Self::Q8_0 => {
                let mut codes = [0; CHUNK];
                for (code, q) in codes.iter_mut().zip(&block[2..]) {
                    *code = *q as i8;
                }
                Chunk::plain(codes, half(block, 0), 0.0)
            }
            Self::Q4K => {
                let at = index % chunks;
                let codes = quarter(&block[16..], at, |_| 0);
                Chunk::six_bits(codes, block, at)
            }
            Self::Q5K => {
                let at = index % chunks;
                let high = &block[16..48];
                let codes = quarter(&block[48..], at, |i| (high[i] >> at & 1) << 4);
                Chunk::six_bits(codes, block, at)
            }
            Self::Q6K => Chunk::q6(block, index % chunks),
        }
    }

    /// Decodes the values from `first` on of a row's bytes; `first` and the values are whole chunks.
    #[inline(always)]
    pub fn read(self, row: &[u8], first: usize, out: &mut [f32]) {
        assert!(
            first.is_multiple_of(CHUNK) && out.len().is_multiple_of(CHUNK),
            "whole chunks"
        );
        for (i, out) in out.chunks_exact_mut(CHUNK).enumerate() {
            self.chunk(row, first / CHUNK + i).values(out);
        }
    }
}

impl Quant {
    /// Rounds a row of values, of whole chunks, to Q8_0 or Q4_0, as ggml does.
    ///
    /// # Panics
    /// Another type.
    pub fn round(self, values: &[f32]) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.bytes(values.len()));
        for values in values.chunks_exact(CHUNK) {
            let largest = values
                .iter()
                .copied()
                .fold(0.0f32, |a, x| if x.abs() > a.abs() { x } else { a });
            let scale = match self {
                Self::Q8_0 => largest.abs() / 127.0,
                Self::Q4_0 => largest / -8.0,
                other => panic!("values are not rounded to {}", other.name()),
            };
            let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            out.extend(f16::from_f32(scale).to_le_bytes());
            match self {
                Self::Q8_0 => out.extend(values.iter().map(|x| (x * inverse).round() as i8 as u8)),
                _ => {
                    let code = |x: f32| ((f64::from(x) * f64::from(inverse) + 8.5) as u8).min(15);
                    let (low, high) = values.split_at(CHUNK / 2);
                    out.extend(
                        low.iter()
                            .zip(high)
                            .map(|(low, high)| code(*low) | code(*high) << 4),
                    );
                }
            }
        }
        out
    }
}

impl Chunk {
    #[inline(always)]
    fn plain(codes: [i8; CHUNK], scale: f32, offset: f32) -> Self {
        Self {
            codes,
            scales: [scale; 2],
            offset,
        }
    }

    /// Makes chunk `at` of a block of Q4_K or Q5_K: f16 scale and offset of the block, then the chunks' scales and offsets in
    /// 6 bits.
    #[inline(always)]
    fn six_bits(codes: [i8; CHUNK], block: &[u8], at: usize) -> Self {
        let packed = &block[4..16];
        let (scale, offset) = match at < 4 {
            true => (packed[at] & 63, packed[at + 4] & 63),
            // The upper two bits are those of the first chunks' bytes.
            false => (
                packed[at + 4] & 15 | packed[at - 4] >> 6 << 4,
                packed[at + 4] >> 4 | packed[at] >> 6 << 4,
            ),
        };
        let (scale, offset) = (
            half(block, 0) * f32::from(scale),
            half(block, 2) * f32::from(offset),
        );
        Self::plain(codes, scale, -offset)
    }

    /// Decodes chunk `at` of a block of Q6_K: the codes' lower 4 bits, their upper 2 bits, scales in 8 bits, f16 scale of the
    /// block.
    #[inline(always)]
    fn q6(block: &[u8], at: usize) -> Self {
        let (side, part) = (at / 4, at % 4);
        let low = &block[64 * side + 32 * (part % 2)..][..CHUNK];
        let high = &block[128 + 32 * side..][..CHUNK];
        let mut codes = [0; CHUNK];
        for ((code, low), high) in codes.iter_mut().zip(low).zip(high) {
            let low = low >> (4 * (part / 2)) & 15;
            *code = (low | (high >> (2 * part) & 3) << 4) as i8 - 32;
        }
        let scale = |i: usize| half(block, 208) * f32::from(block[192 + 2 * at + i] as i8);
        Self {
            codes,
            scales: [scale(0), scale(1)],
            offset: 0.0,
        }
    }

    /// Computes the 32 values.
    #[inline(always)]
    pub fn values(&self, out: &mut [f32]) {
        for (h, out) in out.chunks_exact_mut(CHUNK / 2).enumerate() {
            for (out, code) in out.iter_mut().zip(&self.codes[h * CHUNK / 2..]) {
                *out = self.scales[h] * f32::from(*code) + self.offset;
            }
        }
    }
}

/// A row of inputs with 8 bits per value, and a scale for each chunk: value i is about `scales[i / 32] * codes[i]`.
pub struct RoundedRow {
    codes: Vec<[i8; CHUNK]>,
    scales: Vec<f32>,
    /// The sum of each chunk's rounded values.
    sums: Vec<f32>,
}

impl RoundedRow {
    /// Rounds the values to a grid of which each chunk's largest one is the 127th point; whole chunks.
    pub fn new(x: &[f32]) -> Self {
        let mut row = Self {
            codes: Vec::new(),
            scales: Vec::new(),
            sums: Vec::new(),
        };
        for x in x.chunks_exact(CHUNK) {
            let largest = x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            let scale = largest / 127.0;
            // A chunk of zeros, or of numbers so small that their scale is zero.
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let mut codes = [0; CHUNK];
            for (code, x) in codes.iter_mut().zip(x) {
                *code = (x * inverse).round_ties_even() as i8;
            }
            let sum: i32 = codes.iter().map(|code| i32::from(*code)).sum();
            row.sums.push(scale * sum as f32);
            row.codes.push(codes);
            // The maximum skips NaN.
            let is_finite = x.iter().all(|x| x.is_finite());
            row.scales.push(if is_finite { scale } else { f32::NAN });
        }
        row
    }
}

/// Computes the products of a quantised row with rounded rows of inputs.
///
/// # Numerics
/// The integer products of a chunk are summed exactly; chunks are added in order, in f32. The bits are the same on every
/// instruction set and do not depend on the number of rows.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
pub fn dots(quant: Quant, row: &[u8], x: &[RoundedRow], out: &mut [f32]) {
    // Each type has its own loop.
    match quant {
        Quant::Q4_0 => dots_of(Quant::Q4_0, row, x, out),
        Quant::Q4_1 => dots_of(Quant::Q4_1, row, x, out),
        Quant::Q5_0 => dots_of(Quant::Q5_0, row, x, out),
        Quant::Q5_1 => dots_of(Quant::Q5_1, row, x, out),
        Quant::Q8_0 => dots_of(Quant::Q8_0, row, x, out),
        Quant::Q4K => dots_of(Quant::Q4K, row, x, out),
        Quant::Q5K => dots_of(Quant::Q5K, row, x, out),
        Quant::Q6K => dots_of(Quant::Q6K, row, x, out),
    }
}

#[inline(always)]
fn dots_of(quant: Quant, row: &[u8], x: &[RoundedRow], out: &mut [f32]) {
    let (values, bytes) = quant.block();
    out.fill(0.0);
    for i in 0..row.len() / bytes * (values / CHUNK) {
        let chunk = quant.chunk(row, i);
        for (out, x) in out.iter_mut().zip(x) {
            let sums = halves(&chunk.codes, &x.codes[i]);
            let sum = chunk.scales[0] * sums[0] as f32 + chunk.scales[1] * sums[1] as f32;
            *out += x.scales[i] * sum + chunk.offset * x.sums[i];
        }
    }
}

/// Sums the products of each half of two chunks.
#[inline(always)]
fn halves(a: &[i8; CHUNK], b: &[i8; CHUNK]) -> [i32; 2] {
    let mut out = [0; 2];
    for (h, out) in out.iter_mut().enumerate() {
        let half = h * CHUNK / 2..(h + 1) * CHUNK / 2;
        for (a, b) in a[half.clone()].iter().zip(&b[half]) {
            *out += i32::from(*a) * i32::from(*b);
        }
    }
    out
}

/// Reads the f16 number at a byte of a block.
#[inline(always)]
fn half(block: &[u8], at: usize) -> f32 {
    // Without a test for the instruction that converts, which each call of `to_f32` would make.
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32_const()
}

/// Splits 16 bytes into the codes of their lower and then of their upper halves.
#[inline(always)]
fn nibbles(bytes: &[u8], code: impl Fn(u8) -> i8) -> [i8; CHUNK] {
    let mut out = [0; CHUNK];
    let (low, high) = out.split_at_mut(CHUNK / 2);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(bytes) {
        (*low, *high) = (code(byte & 15), code(byte >> 4));
    }
    out
}

/// Decodes 32 codes of 5 bits: the fifth bits, in four bytes, then the lower ones.
#[inline(always)]
fn five_bits(bytes: &[u8], minus: i8) -> [i8; CHUNK] {
    let high = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut out = nibbles(&bytes[4..], |q| q as i8);
    for (i, code) in out.iter_mut().enumerate() {
        *code = (*code | ((high >> i & 1) << 4) as i8) - minus;
    }
    out
}

/// Decodes chunk `at` of the K types with 4 bits: two chunks share 32 bytes. `high` gives the upper bits of a code.
#[inline(always)]
fn quarter(bytes: &[u8], at: usize, high: impl Fn(usize) -> u8) -> [i8; CHUNK] {
    let bytes = &bytes[at / 2 * CHUNK..][..CHUNK];
    let mut out = [0; CHUNK];
    for (i, (code, byte)) in out.iter_mut().zip(bytes).enumerate() {
        *code = (byte >> (4 * (at % 2)) & 15 | high(i)) as i8;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{numbers, values};

    /// A row of so many random blocks, with scales that are ordinary numbers.
    fn row(quant: Quant, blocks: usize, seed: u32) -> Vec<u8> {
        let mut next = numbers(seed);
        let (_, bytes) = quant.block();
        let mut out: Vec<u8> = (0..blocks * bytes).map(|_| (next() >> 24) as u8).collect();
        let scales: &[usize] = match quant {
            Quant::Q4_0 | Quant::Q5_0 | Quant::Q8_0 => &[0],
            Quant::Q6K => &[208],
            _ => &[0, 2],
        };
        for block in out.chunks_exact_mut(bytes) {
            for at in scales {
                // From 2^-8 to 2^-4, of either sign.
                let exponent = 7 + (next() >> 30) as u16;
                let bits = (block[*at + 1] as u16 & 0x80) << 8 | exponent << 10 | u16::from(block[*at]);
                block[*at..*at + 2].copy_from_slice(&bits.to_le_bytes());
            }
        }
        out
    }

    #[test]
    fn products_are_those_of_the_values() {
        for (quant, _) in Quant::ALL {
            let (values_of, _) = quant.block();
            for blocks in [1, 3, 10] {
                let row = row(quant, blocks, 7);
                let n = blocks * values_of;
                let mut wide = vec![0.0; n];
                quant.read(&row, 0, &mut wide);
                let inputs: Vec<Vec<f32>> = (0..4).map(|seed| values(n, seed + 1)).collect();
                let rounded: Vec<RoundedRow> = inputs.iter().map(|x| RoundedRow::new(x)).collect();
                let mut out = vec![f32::NAN; 4];
                dots(quant, &row, &rounded, &mut out);
                for ((out, x), of) in out.iter().zip(&inputs).zip(&rounded) {
                    let rounded = |i: usize| of.scales[i / CHUNK] * f32::from(of.codes[i / CHUNK][i % CHUNK]);
                    let terms = (0..n).map(|i| f64::from(wide[i]) * f64::from(rounded(i)));
                    let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                    assert!(
                        (f64::from(*out) - sum).abs() <= 1e-5 * size,
                        "{quant:?} {blocks}: {out} {sum}"
                    );
                    // Half a point of the grid, and the rounding of the scale.
                    let most = |chunk: usize| {
                        x[chunk * CHUNK..][..CHUNK]
                            .iter()
                            .fold(0.0f32, |a, x| a.max(x.abs()))
                    };
                    for (i, x) in x.iter().enumerate() {
                        assert!(
                            (x - rounded(i)).abs() <= most(i / CHUNK) / 253.9,
                            "{x} {}",
                            rounded(i)
                        );
                    }
                    // Alone, the bits are the same.
                    let mut alone = [f32::NAN];
                    dots(quant, &row, std::slice::from_ref(of), &mut alone);
                    assert_eq!(alone[0].to_bits(), out.to_bits());
                }
            }
        }
    }

    #[test]
    fn parts_of_a_row_are_those_of_the_row() {
        for (quant, _) in Quant::ALL {
            let (values_of, _) = quant.block();
            let row = row(quant, 3, 5);
            let mut all = vec![f32::NAN; 3 * values_of];
            quant.read(&row, 0, &mut all);
            for first in (0..all.len()).step_by(CHUNK) {
                let mut part = [f32::NAN; CHUNK];
                quant.read(&row, first, &mut part);
                assert_eq!(part, all[first..first + CHUNK]);
            }
        }
    }

    #[test]
    fn inputs_that_are_not_finite_make_products_that_are_not() {
        let row = row(Quant::Q8_0, 2, 3);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = vec![1.0; 64];
            x[40] = bad;
            let mut out = [0.0];
            dots(Quant::Q8_0, &row, &[RoundedRow::new(&x)], &mut out);
            assert!(!out[0].is_finite(), "{bad}: {out:?}");
        }
        let mut out = [f32::NAN];
        dots(Quant::Q8_0, &row, &[RoundedRow::new(&[0.0; 64])], &mut out);
        assert_eq!(out, [0.0]);
    }
}
