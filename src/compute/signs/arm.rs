//! Sums of table entries with NEON.

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

/// Interleaves the bytes of the first half of the registers with those of the second half.
#[inline]
#[target_feature(enable = "neon")]
fn shuffle<const W: usize>(r: [uint8x16_t; W]) -> [uint8x16_t; W] {
    interleave!(r, vzip1q_u8, vzip2q_u8)
}
