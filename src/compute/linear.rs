//! Products with checkpoint weights, which stay in their stored type.

use half::slice::HalfFloatSliceExt;
use multiversion::multiversion;
use ndarray::{ArrayView2, ArrayViewMut2, Axis};
use rayon::prelude::*;

use super::{gemm, pieces, simd};
use crate::model::weights::{Float, Weight};

/// Output channels that one task converts to f32 and multiplies.
const PANEL: usize = 128;
/// Input rows of one task.
const ROWS: usize = 1024;
/// Up to this many input rows, rows of the weight are used straight from their stored type.
const FEW: usize = 4;

/// A projection: `y = x W^T + b`.
pub struct Linear {
    /// W `[out, in]`.
    pub weight: Weight,
    /// b `[out]`.
    pub bias: Option<Vec<f32>>,
}

impl Linear {
    /// Applies the projection to every row of `x`.
    ///
    /// # Shapes
    /// x `[m, in]` (rows contiguous), out `[m, out]`.
    ///
    /// # Numerics
    /// f32 products and sums of the exactly widened weights.
    pub fn forward(&self, x: ArrayView2<f32>, mut out: ArrayViewMut2<f32>) {
        if x.nrows() <= FEW {
            self.forward_few(x, out);
            return;
        }
        let mut tasks = Vec::new();
        for (r, rows) in out.axis_chunks_iter_mut(Axis(0), ROWS).enumerate() {
            for (p, panel) in pieces(rows, Axis(1), PANEL).into_iter().enumerate() {
                tasks.push((r, p, panel));
            }
        }
        let k = self.weight.cols();
        tasks.into_par_iter().for_each_init(
            || vec![0.0; PANEL * k],
            |scratch, (r, p, mut panel)| {
                let (m, n) = panel.dim();
                let w = &mut scratch[..n * k];
                widen(&self.weight, p * PANEL, n, w);
                let x = x.slice(ndarray::s![r * ROWS..r * ROWS + m, ..]);
                // The slice has exactly n * k elements.
                if let Ok(w) = ArrayView2::from_shape((n, k), &*w) {
                    gemm(panel.view_mut(), false, x, w.t());
                }
                if let Some(bias) = &self.bias {
                    for mut row in panel.rows_mut() {
                        for (y, b) in row.iter_mut().zip(&bias[p * PANEL..]) {
                            *y += b;
                        }
                    }
                }
            },
        );
    }

    fn forward_few(&self, x: ArrayView2<f32>, mut out: ArrayViewMut2<f32>) {
        let k = self.weight.cols();
        let rows: Vec<Vec<f32>> = x.rows().into_iter().map(|r| r.to_vec()).collect();
        out.axis_chunks_iter_mut(Axis(1), PANEL)
            .into_par_iter()
            .enumerate()
            .for_each_init(
                || vec![0.0; k],
                |scratch, (p, mut panel)| {
                    for (j, mut column) in panel.columns_mut().into_iter().enumerate() {
                        let row = p * PANEL + j;
                        let bytes = self.weight.row_bytes(row, 1);
                        let bias = self.bias.as_ref().map_or(0.0, |b| b[row]);
                        let bf16 = self.weight.dtype() == Float::Bf16;
                        if !bf16 {
                            widen(&self.weight, row, 1, scratch);
                        }
                        for (y, x) in column.iter_mut().zip(&rows) {
                            *y = bias
                                + if bf16 {
                                    dot_bf16(bytes, x)
                                } else {
                                    simd::dot(scratch, x)
                                };
                        }
                    }
                },
            );
    }
}

/// Rows `first..first + count` of a weight as f32.
pub fn widen(weight: &Weight, first: usize, count: usize, out: &mut [f32]) {
    let bytes = weight.row_bytes(first, count);
    if weight.dtype() == Float::F16
        && let Ok(values) = bytemuck::try_cast_slice::<u8, half::f16>(bytes)
    {
        values.convert_to_f32_slice(out);
        return;
    }
    weight.dtype().read(bytes, out);
}

/// Dot product of stored bf16 values with an f32 vector.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn dot_bf16(bytes: &[u8], x: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut acc = [[0.0f32; LANES]; 4];
    let (wide_w, wide_x) = (bytes.chunks_exact(8 * LANES), x.chunks_exact(4 * LANES));
    let (tail_w, tail_x) = (wide_w.remainder(), wide_x.remainder());
    let widen = |w: &[u8]| f32::from_bits(u32::from(u16::from_le_bytes([w[0], w[1]])) << 16);
    for (w, x) in wide_w.zip(wide_x) {
        for (s, acc) in acc.iter_mut().enumerate() {
            for l in 0..LANES {
                acc[l] += widen(&w[2 * (s * LANES + l)..]) * x[s * LANES + l];
            }
        }
    }
    let mut sum = 0.0;
    for (w, x) in tail_w.chunks_exact(2).zip(tail_x) {
        sum += widen(w) * x;
    }
    let [a, b, c, d] = acc;
    for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
        sum += (a + b) + (c + d);
    }
    sum
}
