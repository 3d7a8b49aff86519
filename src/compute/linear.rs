//! Products with checkpoint weights, which stay in their stored type.

use half::slice::HalfFloatSliceExt;
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
                        // bf16 needs no widened copy, where the file happens to be aligned.
                        let bf16 = match self.weight.dtype() {
                            Float::Bf16 => bytemuck::try_cast_slice::<u8, u16>(bytes).ok(),
                            _ => None,
                        };
                        if bf16.is_none() {
                            widen(&self.weight, row, 1, scratch);
                        }
                        for (y, x) in column.iter_mut().zip(&rows) {
                            *y = bias + bf16.map_or_else(|| simd::dot(scratch, x), |w| simd::dot_bf16(w, x));
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
