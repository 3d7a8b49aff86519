//! Products of quantised rows with inputs of 8 bits.

use multiversion::multiversion;
use multiversion::target::match_target;

use super::{CHUNK, Quant};

/// Rows of inputs for which a chunk is decoded once.
const ROWS: usize = 4;
/// Rows of a weight that are multiplied together where the machine has AVX512-VNNI.
pub(super) const AT_ONCE: usize = 4;
/// Partial sums of a row: lane l sums the products of the values 4 l to 4 l + 3 of all chunks.
const LANES: usize = 8;

/// A row of inputs with 8 bits per value, and a scale for each chunk: value i is about `scales[i / 32] * codes[i / 32][i % 32]`.
pub struct RoundedRow {
    pub(super) codes: Vec<[i8; CHUNK]>,
    pub(super) scales: Vec<f32>,
    /// The sum of each chunk's rounded values.
    pub(super) sums: Vec<f32>,
    /// The sums of every four codes.
    fours: Vec<[i32; LANES]>,
}

impl RoundedRow {
    /// Rounds the values of whole chunks to a grid of which each chunk's largest one is the 127th point. A chunk with a value
    /// that is not finite has the scale NaN.
    pub fn new(x: &[f32]) -> Self {
        let mut row = Self {
            codes: Vec::new(),
            scales: Vec::new(),
            sums: Vec::new(),
            fours: Vec::new(),
        };
        round(x, &mut row);
        row
    }
}

/// Appends the rounded values of whole chunks to a row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2"))]
fn round(x: &[f32], row: &mut RoundedRow) {
    for x in x.as_chunks::<CHUNK>().0 {
        let (mut largest, mut is_finite) = (0.0f32, true);
        for x in x {
            largest = largest.max(x.abs());
            is_finite &= x.is_finite();
        }
        let scale = if is_finite { largest / 127.0 } else { f32::NAN };
        // A chunk of zeros, or of numbers so small that their scale is zero.
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let (mut codes, mut fours) = ([0i8; CHUNK], [0i32; LANES]);
        for (code, x) in codes.iter_mut().zip(x) {
            *code = (x * inverse).round_ties_even() as i8;
        }
        for (sum, codes) in fours.iter_mut().zip(codes.as_chunks::<4>().0) {
            *sum = i32::from(codes[0]) + i32::from(codes[1]) + i32::from(codes[2]) + i32::from(codes[3]);
        }
        let mut sum = 0;
        for four in fours {
            sum += four;
        }
        row.sums.push(scale * sum as f32);
        row.codes.push(codes);
        row.scales.push(scale);
        row.fours.push(fours);
    }
}

/// Computes the products of quantised rows of one length with rounded rows of inputs.
///
/// # Shapes
/// outs `[inputs][rows]`.
///
/// # Numerics
/// Four integer products are summed exactly, and these sums in f32: eight of them, chunk by chunk. The bits are the same on
/// every instruction set and do not depend on the number of rows.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512vnni+f16c", "x86_64+avx2+f16c"))]
pub fn dots(quant: Quant, rows: &[&[u8]], x: &[RoundedRow], outs: &mut [&mut [f32]]) {
    assert_eq!(x.len(), outs.len(), "as many outputs as inputs");
    for (x, outs) in x.chunks(ROWS).zip(outs.chunks_mut(ROWS)) {
        match_target! {
            "x86_64+avx512f+avx512bw+avx512vl+avx512vnni+f16c" => {
                for (i, rows) in rows.chunks(AT_ONCE).enumerate() {
                    // The last row stands for those that are missing.
                    let mut all = [rows[rows.len() - 1]; AT_ONCE];
                    all[..rows.len()].copy_from_slice(rows);
                    // SAFETY: this arm is chosen only on machines with AVX-512 F, BW, VL and VNNI, and F16C.
                    let products = unsafe { vnni::dots(quant, &all, x) };
                    for (out, products) in outs.iter_mut().zip(products) {
                        out[i * AT_ONCE..][..rows.len()].copy_from_slice(&products[..rows.len()]);
                    }
                }
            },
            _ => {
                for (r, row) in rows.iter().enumerate() {
                    let mut products = [0.0; ROWS];
                    let products = &mut products[..x.len()];
                    match_target! {
                        // SAFETY: this arm is chosen only on machines with AVX2 and F16C.
                        "x86_64+avx2+f16c" => unsafe { x86::dots(quant, row, x, products) },
                        _ => plain(quant, row, x, products),
                    }
                    for (out, product) in outs.iter_mut().zip(products) {
                        out[r] = *product;
                    }
                }
            },
        }
    }
}

/// Implements [`dots`] for one row and at most [`ROWS`] rows of inputs in plain Rust.
pub(super) fn plain(quant: Quant, row: &[u8], x: &[RoundedRow], out: &mut [f32]) {
    let (mut sums, mut offsets) = ([[0.0; LANES]; ROWS], [0.0; ROWS]);
    let (values, bytes) = quant.block();
    for (b, block) in row.chunks_exact(bytes).enumerate() {
        for at in 0..values / CHUNK {
            let (i, chunk) = (b * values / CHUNK + at, quant.chunk(block, at));
            for ((x, sums), offset) in x.iter().zip(&mut sums).zip(&mut offsets) {
                let product = |j: usize| i32::from(chunk.codes[j]) * i32::from(x.codes[i][j]);
                for (l, sum) in sums.iter_mut().enumerate() {
                    let four: i32 = (4 * l..4 * l + 4).map(product).sum();
                    *sum += chunk.scales[2 * l / LANES] * x.scales[i] * four as f32;
                }
                if quant.has_offset() {
                    *offset += chunk.offset * x.sums[i];
                }
            }
        }
    }
    for ((out, sums), offset) in out.iter_mut().zip(sums).zip(offsets) {
        *out = joined(sums) + offset;
    }
}

/// Adds the lanes, in the order of vector registers that are halved.
fn joined(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

#[cfg(target_arch = "x86_64")]
pub(super) mod vnni;
#[cfg(target_arch = "x86_64")]
pub(super) mod x86;
