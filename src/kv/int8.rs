//! Cached rows in 8 bits: symmetric, with one scale per 64 channels.

use half::f16;
use ndarray::ArrayView1;

use super::layout::Layout;
use super::map::RowMap;
use super::qkv::Part;
use super::rows::{Format, RowCache, RowForm, RowStore, RowUnits};
use crate::compute::attention::lanes::Simd;
use crate::compute::attention::{ChunkedRows, LANES, Segment};
use crate::float::f16_at_least;
use crate::parameters::Word;
use crate::prefetch::prefetch_row;

/// Channels that share a scale.
const GROUP: usize = 64;
/// Chunks of [`LANES`] channels in a group.
const CHUNKS: usize = GROUP / LANES;
/// The largest code.
const MOST: f32 = 127.0;

/// The format `int8`, of keys and of values.
pub(super) struct Int8s;

impl Format for Int8s {
    fn word(&self) -> Word {
        Word {
            name: "int8",
            help: "8 bits, and a scale in f16 per 64 channels",
        }
    }

    fn arrays(&self, _: Part, d: usize) -> [Option<usize>; 2] {
        [Some(Int8::width(d)), None]
    }

    fn cache(&self, _: Part, d: usize, capacity: usize, _: Layout, _: &RowMap) -> Box<dyn RowCache> {
        Box::new(RowStore::<Int8>::new(d, capacity))
    }
}

/// A row: a code per channel, then a little-endian scale per [`GROUP`] channels; the last group may be shorter.
///
/// # Numerics
/// The scale s is the largest magnitude of the group over 127, rounded up to f16, or the largest f16 if that is less. A
/// channel x is stored as `round(x / s)`, within -127 and 127, and read as the code times s, which is exact in f32.
#[derive(Clone, Copy)]
pub(super) struct Int8;

impl RowUnits for Int8 {
    type Unit = u8;

    fn width(d: usize) -> usize {
        d + 2 * d.div_ceil(GROUP)
    }
}

impl RowForm for Int8 {
    type Rows<'a> = Codes<'a>;

    fn is_chunked(d: usize) -> bool {
        d.is_multiple_of(LANES)
    }

    fn store(row: ArrayView1<f32>, to: &mut [u8]) {
        let (codes, scales) = to.split_at_mut(row.len());
        let groups = codes.chunks_mut(GROUP).zip(scales.as_chunks_mut().0);
        for ((codes, scale), first) in groups.zip((0..).step_by(GROUP)) {
            let group = || row.iter().skip(first).take(codes.len());
            let largest = group().fold(0.0, |most: f32, x| most.max(x.abs()));
            let step = f16_at_least(largest / MOST);
            *scale = step.to_le_bytes();
            if step == f16::ZERO {
                continue;
            }
            let step = step.to_f32();
            let rounded: Vec<i8> = group()
                .map(|x| (x / step).round().clamp(-MOST, MOST) as i8)
                .collect();
            codes.copy_from_slice(bytemuck::cast_slice(&rounded));
        }
    }

    fn read<'o>(row: &'o [u8], scratch: &'o mut [f32]) -> &'o [f32] {
        let (codes, scales) = row.split_at(scratch.len());
        let groups = scratch.chunks_mut(GROUP).zip(codes.chunks(GROUP));
        for ((to, codes), scale) in groups.zip(scales.as_chunks().0) {
            let step = f16::from_le_bytes(*scale).to_f32();
            for (x, code) in to.iter_mut().zip(codes) {
                *x = f32::from(*code as i8) * step;
            }
        }
        scratch
    }

    fn rows<'a>(segments: &'a [Segment<'a, u8>], d: usize) -> Codes<'a> {
        Codes {
            rows: segments[0].rows,
            d,
        }
    }
}

/// Rows in 8 bits, for the kernels.
#[derive(Clone, Copy)]
pub(super) struct Codes<'a> {
    rows: &'a [u8],
    d: usize,
}

impl<'a> ChunkedRows for Codes<'a> {
    const PAIRS: bool = false;
    type Row = &'a [u8];

    #[inline(always)]
    fn chunks(self) -> usize {
        self.d / LANES
    }

    #[inline(always)]
    fn row(self, position: u32) -> &'a [u8] {
        let width = Int8::width(self.d);
        &self.rows[position as usize * width..][..width]
    }

    #[inline(always)]
    fn prefetch(self, position: u32) {
        prefetch_row(self.rows, position as usize, Int8::width(self.d));
    }

    #[inline(always)]
    unsafe fn widen<S: Simd, const N: usize>(self, simd: S, row: &'a [u8], at: usize) -> [S::Vector; N] {
        let mut wide = [simd.splat(0.0); N];
        for (i, wide) in wide.iter_mut().enumerate() {
            let chunk = at + i;
            // SAFETY: the caller guarantees that the row has this chunk, and it has a scale for each group of chunks.
            let (codes, scale) = unsafe {
                let codes = row.as_ptr().add(chunk * LANES).cast::<[i8; LANES]>().read();
                let scale = row
                    .as_ptr()
                    .add(self.d + 2 * (chunk / CHUNKS))
                    .cast::<[u8; 2]>()
                    .read();
                (codes, f16::from_le_bytes(scale))
            };
            *wide = simd.mul(simd.widen_i8(&codes), simd.splat_f16(scale));
        }
        wide
    }
}

#[cfg(test)]
mod tests {
    use super::super::rows::checks;
    use super::*;

    fn read_back(row: &[f32]) -> (Vec<u8>, Vec<f32>) {
        let mut units = vec![0; Int8::width(row.len())];
        Int8::store(ArrayView1::from(row), &mut units);
        let mut out = vec![0.0; row.len()];
        Int8::read(&units, &mut out);
        (units, out)
    }

    #[test]
    fn a_small_row_has_these_bytes() {
        let (units, out) = read_back(&[127.0, -127.0, 1.4, -0.6, 0.0]);
        assert_eq!(units, [127, 129, 1, 255, 0, 0x00, 0x3c]);
        assert_eq!(out, [127.0, -127.0, 1.0, -1.0, 0.0]);
    }

    #[test]
    fn an_error_is_at_most_half_a_step_and_extremes_stay_finite() {
        let mut number = crate::testing::numbers(5);
        for d in [1, 20, 64, 65, 128, 130] {
            let mut random = || (number() >> 8) as f32 / (1 << 23) as f32 - 1.0;
            let row: Vec<f32> = (0..d).map(|i| random() * 10f32.powi(i % 7 - 3)).collect();
            let (_, out) = read_back(&row);
            for (group, read) in row.chunks(GROUP).zip(out.chunks(GROUP)) {
                let largest = group.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                // The scale is rounded up to 11 bits, or to a multiple of 2^-24; a channel over the scale is rounded to 24 bits.
                let step = largest / MOST * (1.0 + 2f32.powi(-10)) + 2f32.powi(-24);
                let bound = (0.5 + MOST * 2f32.powi(-24)) * step;
                assert!(group.iter().zip(read).all(|(x, y)| (x - y).abs() <= bound), "{d}");
            }
        }
        for extreme in [1e30, 1e-30, f32::MAX, f32::MIN_POSITIVE] {
            let (_, out) = read_back(&[extreme, -extreme, 0.0]);
            assert!(out.iter().all(|x| x.is_finite()) && out[2] == 0.0, "{extreme}");
        }
        assert_eq!(read_back(&[0.0; 70]).1, [0.0; 70]);
    }

    #[test]
    fn every_instruction_set_reads_the_same_rows() {
        checks::every_instruction_set_reads_the_same_rows::<Int8>();
    }

    #[test]
    fn rows_are_attended_as_they_are_read() {
        for d in [64, 80, 128, 20] {
            let error = checks::error_of_attention(d, |d| Box::new(RowStore::<Int8>::new(d, 0)));
            assert_eq!(error, 0.0, "{d}");
        }
    }
}
