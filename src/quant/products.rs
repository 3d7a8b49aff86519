//! Products of quantised rows with inputs of 8 bits.

use multiversion::multiversion;
use multiversion::target::match_target;

use super::{CHUNK, Quant};

/// Rows of inputs for which a chunk is decoded once.
const ROWS: usize = 4;
/// Partial sums of a row: lane l sums the products of the values 4 l to 4 l + 3 of all chunks.
const LANES: usize = 8;

/// A row of inputs with 8 bits per value, and a scale for each chunk: value i is about `scales[i / 32] * codes[i / 32][i % 32]`.
pub struct RoundedRow {
    pub(super) codes: Vec<[i8; CHUNK]>,
    pub(super) scales: Vec<f32>,
    /// The sum of each chunk's rounded values.
    pub(super) sums: Vec<f32>,
}

impl RoundedRow {
    /// Rounds the values of whole chunks to a grid of which each chunk's largest one is the 127th point. A chunk with a value
    /// that is not finite has the scale NaN.
    pub fn new(x: &[f32]) -> Self {
        let mut row = Self {
            codes: Vec::new(),
            scales: Vec::new(),
            sums: Vec::new(),
        };
        for x in x.chunks_exact(CHUNK) {
            let scale = match x.iter().all(|x| x.is_finite()) {
                true => x.iter().fold(0.0f32, |a, x| a.max(x.abs())) / 127.0,
                false => f32::NAN,
            };
            // A chunk of zeros, or of numbers so small that their scale is zero.
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            let codes = std::array::from_fn(|i| (x[i] * inverse).round_ties_even() as i8);
            let sum: i32 = codes.iter().map(|code: &i8| i32::from(*code)).sum();
            row.sums.push(scale * sum as f32);
            row.codes.push(codes);
            row.scales.push(scale);
        }
        row
    }
}

/// Computes the products of a quantised row with rounded rows of inputs.
///
/// # Numerics
/// Four integer products are summed exactly, and these sums in f32: eight of them, chunk by chunk. The bits are the same on
/// every instruction set and do not depend on the number of rows.
#[multiversion(targets("x86_64+avx2+f16c"))]
pub fn dots(quant: Quant, row: &[u8], x: &[RoundedRow], out: &mut [f32]) {
    for (x, out) in x.chunks(ROWS).zip(out.chunks_mut(ROWS)) {
        match_target! {
            // SAFETY: this arm is chosen only on machines with AVX2 and F16C.
            "x86_64+avx2+f16c" => unsafe { x86::dots(quant, row, x, out) },
            _ => plain(quant, row, x, out),
        }
    }
}

/// Implements [`dots`] for at most [`ROWS`] rows in plain Rust.
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
                *offset += chunk.offset * x.sums[i];
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
mod x86;
