//! The block-quantised types of GGUF files.
//!
//! Every type stores 32 values with integer codes and a scale, and some with an offset: `x = scale code + offset`. The K types
//! join eight such chunks into a block of 256 values, with the chunks' scales in 6 or 8 bits; Q6_K has two scales per chunk.
//! All are decoded into one form (`Chunk`), from which values and products are computed.
//!
//! The layouts are those of ggml (`block_q4_0` to `block_q6_K`); all numbers are little-endian.

mod products;

use half::f16;

pub use products::{RoundedRow, dots};

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

/// 32 decoded values: value i is `scales[i / 16] * codes[i] + offset`.
struct Chunk {
    codes: [i8; CHUNK],
    scales: [f32; 2],
    offset: f32,
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

    /// Returns whether the values of a chunk have an offset.
    #[inline(always)]
    const fn has_offset(self) -> bool {
        matches!(self, Self::Q4_1 | Self::Q5_1 | Self::Q4K | Self::Q5K)
    }

    /// Returns the bytes of so many values, which fill whole blocks.
    pub fn bytes(self, values: usize) -> usize {
        let (each, bytes) = self.block();
        values / each * bytes
    }

    /// Decodes chunk `at` of a block.
    #[inline(always)]
    fn chunk(self, block: &[u8], at: usize) -> Chunk {
        let (scales, offset) = self.scales(block, at, |bits| f16::from_bits(bits).to_f32_const());
        Chunk {
            codes: self.codes(block, at),
            scales,
            offset,
        }
    }

    /// Decodes the integer codes of chunk `at` of a block.
    #[inline(always)]
    fn codes(self, block: &[u8], at: usize) -> [i8; CHUNK] {
        match self {
            Self::Q4_0 => nibbles(&block[2..], |q| q as i8 - 8),
            Self::Q4_1 => nibbles(&block[4..], |q| q as i8),
            Self::Q5_0 => five_bits(&block[2..], 16),
            Self::Q5_1 => five_bits(&block[4..], 0),
            Self::Q8_0 => std::array::from_fn(|i| block[2 + i] as i8),
            Self::Q4K => quarter(&block[16..], at, |_| 0),
            // The fifth bits, 32 bytes, of which each chunk has one bit; then the lower ones.
            Self::Q5K => quarter(&block[48..], at, |i| (block[16 + i] >> at & 1) << 4),
            Self::Q6K => {
                // The lower 4 bits, then the upper 2, in two sides of 128 values.
                let (side, part) = (at / 4, at % 4);
                let low = &block[64 * side + 32 * (part % 2)..][..CHUNK];
                let high = &block[128 + 32 * side..][..CHUNK];
                std::array::from_fn(|i| {
                    let low = low[i] >> (4 * (part / 2)) & 15;
                    (low | (high[i] >> (2 * part) & 3) << 4) as i8 - 32
                })
            }
        }
    }

    /// Returns the scales of the halves of chunk `at` of a block, and the offset of its values. `widen` widens a number in f16.
    #[inline(always)]
    fn scales(self, block: &[u8], at: usize, widen: impl Fn(u16) -> f32) -> ([f32; 2], f32) {
        let half = |at: usize| widen(u16::from_le_bytes([block[at], block[at + 1]]));
        match self {
            Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => ([half(0); 2], 0.0),
            Self::Q4_1 | Self::Q5_1 => ([half(0); 2], half(2)),
            Self::Q4K | Self::Q5K => {
                let (scale, offset) = six_bits(&block[4..16], at);
                ([half(0) * f32::from(scale); 2], -half(2) * f32::from(offset))
            }
            Self::Q6K => {
                let whole = half(208);
                (
                    [0, 1].map(|i| whole * f32::from(block[192 + 2 * at + i] as i8)),
                    0.0,
                )
            }
        }
    }

    /// Decodes the values from `first` on of a row's bytes; `first` and the values are whole chunks.
    #[inline(always)]
    pub fn read(self, row: &[u8], first: usize, out: &mut [f32]) {
        assert!(
            first.is_multiple_of(CHUNK) && out.len().is_multiple_of(CHUNK),
            "whole chunks"
        );
        let (values, bytes) = self.block();
        for (i, out) in out.chunks_exact_mut(CHUNK).enumerate() {
            let at = first + i * CHUNK;
            let block = &row[at / values * bytes..][..bytes];
            self.chunk(block, at % values / CHUNK).values(out);
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
    /// Computes the 32 values.
    #[inline(always)]
    fn values(&self, out: &mut [f32]) {
        for (h, out) in out.chunks_exact_mut(CHUNK / 2).enumerate() {
            for (out, code) in out.iter_mut().zip(&self.codes[h * CHUNK / 2..]) {
                *out = self.scales[h] * f32::from(*code) + self.offset;
            }
        }
    }
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
    let low = nibbles(&bytes[4..], |q| q as i8);
    std::array::from_fn(|i| (low[i] | ((high >> i & 1) << 4) as i8) - minus)
}

/// Decodes chunk `at` of the K types with 4 bits: two chunks share 32 bytes. `high` gives the upper bits of a code.
#[inline(always)]
fn quarter(bytes: &[u8], at: usize, high: impl Fn(usize) -> u8) -> [i8; CHUNK] {
    let bytes = &bytes[at / 2 * CHUNK..][..CHUNK];
    std::array::from_fn(|i| (bytes[i] >> (4 * (at % 2)) & 15 | high(i)) as i8)
}

/// Reads the scale and the offset of chunk `at`, in 6 bits, of the 12 bytes that a block has for them.
#[inline(always)]
fn six_bits(packed: &[u8], at: usize) -> (u8, u8) {
    if at < 4 {
        (packed[at] & 63, packed[at + 4] & 63)
    } else {
        // The upper two bits are those of the first chunks' bytes.
        (
            packed[at + 4] & 15 | packed[at - 4] >> 6 << 4,
            packed[at + 4] >> 4 | packed[at] >> 6 << 4,
        )
    }
}

#[cfg(test)]
mod tests;
