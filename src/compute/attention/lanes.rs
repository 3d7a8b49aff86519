//! Arithmetic on sixteen f32 lanes, in the registers of each instruction set.
//!
//! Plain loops over arrays of sixteen values take three to ten times as long, because the compiler does not keep
//! several arrays in registers.

use half::{bf16, f16};

/// Values per vector.
pub const LANES: usize = 16;

/// An instruction set's arithmetic on vectors of [`LANES`] values, with the same bits on every instruction set.
///
/// A value of an implementing type proves that the machine has the instructions of that type.
pub trait Simd: Copy {
    /// A vector in registers.
    type Vector: Copy;

    fn load(self, from: &[f32; LANES]) -> Self::Vector;

    fn store(self, v: Self::Vector) -> [f32; LANES];

    fn splat(self, x: f32) -> Self::Vector;

    /// Returns `a b + c`, rounded once.
    fn mul_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;

    #[inline(always)]
    fn widen_bf16(self, from: &[bf16; LANES]) -> Self::Vector {
        let mut wide = [0.0; LANES];
        for l in 0..LANES {
            wide[l] = f32::from_bits(u32::from(from[l].to_bits()) << 16);
        }
        self.load(&wide)
    }

    /// Widens the values at even indices into one vector, and those at odd indices into another.
    #[inline(always)]
    fn widen_pairs_bf16(self, from: &[bf16; 2 * LANES]) -> [Self::Vector; 2] {
        [0, 1].map(|parity| self.widen_bf16(&std::array::from_fn(|l| from[2 * l + parity])))
    }

    #[inline(always)]
    fn widen_f16(self, from: &[f16; LANES]) -> Self::Vector {
        let mut wide = [0.0; LANES];
        for l in 0..LANES {
            wide[l] = widen_f16(from[l]);
        }
        self.load(&wide)
    }

    /// Widens integers, exactly.
    #[inline(always)]
    fn widen_i8(self, from: &[i8; LANES]) -> Self::Vector {
        let mut wide = [0.0; LANES];
        for l in 0..LANES {
            wide[l] = f32::from(from[l]);
        }
        self.load(&wide)
    }

    /// Returns the value of an f16 in every lane.
    #[inline(always)]
    fn splat_f16(self, x: f16) -> Self::Vector {
        self.splat(widen_f16(x))
    }

    fn mul(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;

    /// Flips the sign of each lane whose bit in `lanes` is set.
    fn flip(self, v: Self::Vector, lanes: u16) -> Self::Vector;

    /// Returns the four values `Q step + zero`, rounded twice, of a step and a zero point, in every run of four lanes.
    #[inline(always)]
    fn levels(self, [step, zero]: [f16; 2]) -> Self::Vector {
        let (step, zero) = (widen_f16(step), widen_f16(zero));
        let mut levels = [0.0; LANES];
        for (l, x) in levels.iter_mut().enumerate() {
            *x = (l % 4) as f32 * step + zero;
        }
        self.load(&levels)
    }

    /// Looks up sixteen 2-bit numbers in [`Simd::levels`].
    #[inline(always)]
    fn two_bits(self, codes: u32, levels: Self::Vector) -> Self::Vector {
        let levels = self.store(levels);
        let mut wide = [0.0; LANES];
        for (l, x) in wide.iter_mut().enumerate() {
            *x = levels[(codes >> (2 * l) & 3) as usize];
        }
        self.load(&wide)
    }

    /// Returns the sum of the lanes of each vector. Lanes are added by halves.
    #[inline(always)]
    fn sums(self, vectors: &[Self::Vector; LANES]) -> [f32; LANES] {
        let mut sums = [0.0; LANES];
        for (sum, v) in sums.iter_mut().zip(vectors) {
            let mut lanes = self.store(*v);
            for half in [8, 4, 2, 1] {
                for l in 0..half {
                    lanes[l] += lanes[l + half];
                }
            }
            *sum = lanes[0];
        }
        sums
    }
}

/// Returns the value of an f16, computed without a branch.
#[inline(always)]
pub fn widen_f16(x: f16) -> f32 {
    /// 2^112: the difference between the exponents of f16 and f32.
    const SHIFT: f32 = f32::from_bits(0x7780_0000);
    let bits = u32::from(x.to_bits());
    let (sign, rest) = ((bits & 0x8000) << 16, (bits & 0x7fff) << 13);
    let special = if rest >= 0x0f80_0000 { 0x7f80_0000 } else { 0 };
    f32::from_bits((f32::from_bits(rest) * SHIFT).to_bits() | special | sign)
}

/// Returns `a b + c`, rounded once, on machines without a fused multiply-add instruction.
#[inline(always)]
pub(crate) fn fused(a: f32, b: f32, c: f32) -> f32 {
    // The product is exact in f64. If the f64 sum is inexact, its last bit is set (round to odd), so that the final
    // rounding to f32 is right.
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    let back = sum - product;
    let error = (product - (sum - back)) + (c - back);
    let bits = sum.to_bits();
    let odd = if (error > 0.0) == (sum > 0.0) {
        bits.wrapping_add(1)
    } else {
        bits.wrapping_sub(1)
    };
    let inexact = error.abs() > 0.0;
    let bits = if inexact && bits & 1 == 0 { odd } else { bits };
    f64::from_bits(bits) as f32
}

/// Arithmetic as loops over arrays. With `FUSED`, the machine has the instruction behind [`f32::mul_add`].
#[derive(Clone, Copy)]
pub struct Plain<const FUSED: bool>;

impl<const FUSED: bool> Simd for Plain<FUSED> {
    type Vector = [f32; LANES];

    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> [f32; LANES] {
        *from
    }

    #[inline(always)]
    fn store(self, v: [f32; LANES]) -> [f32; LANES] {
        v
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; LANES] {
        [x; LANES]
    }

    #[inline(always)]
    fn mul_add(self, a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        let mut out = c;
        for l in 0..LANES {
            out[l] = if FUSED {
                a[l].mul_add(b[l], c[l])
            } else {
                fused(a[l], b[l], c[l])
            };
        }
        out
    }

    #[inline(always)]
    fn mul(self, mut a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        for l in 0..LANES {
            a[l] *= b[l];
        }
        a
    }

    #[inline(always)]
    fn add(self, mut a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        for l in 0..LANES {
            a[l] += b[l];
        }
        a
    }

    #[inline(always)]
    fn flip(self, mut v: [f32; LANES], lanes: u16) -> [f32; LANES] {
        for (l, x) in v.iter_mut().enumerate() {
            *x = f32::from_bits(x.to_bits() ^ u32::from(lanes) >> l << 31);
        }
        v
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86;
