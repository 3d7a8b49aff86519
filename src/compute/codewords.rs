//! Dot products of a few queries with every codeword of a codebook.

use half::f16;
use multiversion::multiversion;
use ndarray::{Array2, ArrayView2};

use super::attention::widen_f16;
use super::blocks::{PANEL, PanelLine};
use super::layout::elements_mut;

/// Queries that are multiplied with a panel in one pass over it.
const QUERIES: usize = 4;

/// Codewords in panels of [`PANEL`], stored coordinate by coordinate: `[panels,d]` lines.
#[derive(Clone, Debug)]
enum CodewordPanels {
    /// In half precision.
    Half(Vec<PanelLine<f16>>),
    /// In single precision, used if f16 does not hold every value exactly.
    Single(Vec<PanelLine<f32>>),
}

/// A codebook `[M,d]`, kept in half precision if that loses nothing.
#[derive(Clone, Debug)]
pub struct Codewords {
    size: usize,
    d: usize,
    lines: CodewordPanels,
}

impl Codewords {
    /// Packs codewords `[M,d]`.
    pub fn new(codewords: ArrayView2<f32>) -> Self {
        let (size, d) = codewords.dim();
        assert!(size > 0 && d > 0, "a codebook {size} x {d} is empty");
        let is_half = |x: &f32| x.is_finite() && f16::from_f32(*x).to_f32().to_bits() == x.to_bits();
        let lines = if codewords.iter().all(is_half) {
            CodewordPanels::Half(pack(codewords, f16::ZERO, f16::from_f32))
        } else {
            CodewordPanels::Single(pack(codewords, 0.0, |x| x))
        };
        Self { size, d, lines }
    }

    /// Returns the dot products of queries `[r,d]` with every codeword: `[r,M]`.
    ///
    /// # Numerics
    /// One fused multiply-add in f32 per coordinate, in order.
    pub fn products(&self, queries: ArrayView2<f32>) -> Array2<f32> {
        let queries: Vec<Vec<f32>> = queries.rows().into_iter().map(|row| row.to_vec()).collect();
        let mut out = Array2::zeros((queries.len(), self.size));
        let parts = elements_mut(&mut out).chunks_mut(QUERIES * self.size);
        for (queries, out) in queries.chunks(QUERIES).zip(parts) {
            match &self.lines {
                CodewordPanels::Half(lines) => by_half(queries, lines, self.d, out),
                CodewordPanels::Single(lines) => by_single(queries, lines, self.d, out),
            }
        }
        out
    }

    /// Returns the bytes that [`Self::products`] reads.
    pub fn bytes(&self) -> usize {
        match &self.lines {
            CodewordPanels::Half(lines) => size_of_val(&lines[..]),
            CodewordPanels::Single(lines) => size_of_val(&lines[..]),
        }
    }
}

fn pack<T: Copy>(codewords: ArrayView2<f32>, zero: T, of: impl Fn(f32) -> T) -> Vec<PanelLine<T>> {
    let (size, d) = codewords.dim();
    let mut lines = vec![PanelLine([zero; PANEL]); size.div_ceil(PANEL) * d];
    for (i, codeword) in codewords.rows().into_iter().enumerate() {
        for (line, x) in lines[i / PANEL * d..].iter_mut().zip(codeword) {
            line.0[i % PANEL] = of(*x);
        }
    }
    lines
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
fn by_half(queries: &[Vec<f32>], lines: &[PanelLine<f16>], d: usize, out: &mut [f32]) {
    all(queries, lines, d, out, widen_f16);
}

#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
fn by_single(queries: &[Vec<f32>], lines: &[PanelLine<f32>], d: usize, out: &mut [f32]) {
    all(queries, lines, d, out, |x| x);
}

#[inline(always)]
fn all<T: Copy>(
    queries: &[Vec<f32>],
    lines: &[PanelLine<T>],
    d: usize,
    out: &mut [f32],
    of: impl Fn(T) -> f32,
) {
    match queries {
        [a, b, c, d_] => some([a, b, c, d_], lines, d, out, of),
        [a, b, c] => some([a, b, c], lines, d, out, of),
        [a, b] => some([a, b], lines, d, out, of),
        [a] => some([a], lines, d, out, of),
        _ => unreachable!("{} queries of at most {QUERIES}", queries.len()),
    }
}

#[expect(clippy::needless_range_loop, reason = "iterators keep it from vectorising")]
#[inline(always)]
fn some<T: Copy, const R: usize>(
    queries: [&Vec<f32>; R],
    lines: &[PanelLine<T>],
    d: usize,
    out: &mut [f32],
    of: impl Fn(T) -> f32,
) {
    let size = out.len() / R;
    for (p, panel) in lines.chunks_exact(d).enumerate() {
        let mut sums = [[0.0f32; PANEL]; R];
        for (j, line) in panel.iter().enumerate() {
            let mut codewords = [0.0f32; PANEL];
            for l in 0..PANEL {
                codewords[l] = of(line.0[l]);
            }
            for r in 0..R {
                let x = queries[r][j];
                for l in 0..PANEL {
                    sums[r][l] = x.mul_add(codewords[l], sums[r][l]);
                }
            }
        }
        let (first, len) = (p * PANEL, PANEL.min(size - p * PANEL));
        for r in 0..R {
            out[r * size + first..][..len].copy_from_slice(&sums[r][..len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    #[test]
    fn products_are_fused_sums_in_order() {
        let mut number = numbers(1);
        let mut next = || (number() >> 8) as f32 / (1 << 23) as f32 - 1.0;
        for (size, d, r) in [
            (1, 1, 1),
            (31, 4, 2),
            (32, 128, 4),
            (33, 80, 5),
            (100, 64, 9),
            (65, 3, 0),
        ] {
            let any = Array2::from_shape_simple_fn((size, d), &mut next);
            // Half-precision values of every magnitude, the smallest included.
            let half = any.mapv(|x| f16::from_f32(x * x * x * 1e-3).to_f32());
            let queries = Array2::from_shape_simple_fn((r, d), &mut next);
            for (codewords, bytes) in [(&any, 4), (&half, 2)] {
                let packed = Codewords::new(codewords.view());
                assert_eq!(packed.bytes(), size.div_ceil(PANEL) * PANEL * d * bytes);
                let products = packed.products(queries.view());
                assert_eq!(products.dim(), (r, size));
                for ((a, c), product) in products.indexed_iter() {
                    let pairs = queries.row(a).to_vec().into_iter().zip(codewords.row(c).to_vec());
                    let expected = pairs.fold(0.0f32, |sum, (x, c)| x.mul_add(c, sum));
                    assert_eq!(product.to_bits(), expected.to_bits(), "{size} {d} {a} {c}");
                }
            }
        }
    }
}
