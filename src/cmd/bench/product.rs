//! The yardstick of kernels that multiply: a plain product of two matrices.

use std::time::Instant;

use ndarray::{Array2, Axis};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::report::{median, number, print_row, random_points};
use crate::compute::gemm;
use crate::error::Result;

/// Measures how long `work` takes.
pub fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// Adds the rate of `flop` at the median time, and its share of the product's `rates` in the same run, in GFLOP/s.
pub fn set_against(result: &mut Value, flop: f64, rates: Vec<f64>) {
    let (own, rate) = (flop / number(result, "median_s") * 1e-9, median(rates));
    result["gflops"] = json!(own);
    result["gemm_gflops"] = json!(rate);
    result["gemm_share"] = json!(own / rate);
}

/// Prints a result that [`set_against`] has completed.
pub fn print_rate(row: &Value) -> Result<()> {
    let number = |name: &str| number(row, name);
    print_row(
        row,
        &format!(
            "{:.2} ms, {:.0} GFLOP/s, {:.0} % of a plain product's {:.0}",
            number("median_s") * 1e3,
            number("gflops"),
            number("gemm_share") * 100.0,
            number("gemm_gflops"),
        ),
    )
}

/// Square matrices whose product is timed, a part of the rows per thread.
pub struct Product {
    x: Array2<f32>,
    out: Array2<f32>,
}

impl Product {
    /// Rows and columns.
    const SIZE: usize = 2048;

    /// Random matrices.
    pub fn new(seed: u64) -> Self {
        Self {
            x: random_points(1, Self::SIZE, Self::SIZE, seed).index_axis_move(Axis(0), 0),
            out: Array2::zeros((Self::SIZE, Self::SIZE)),
        }
    }

    /// GFLOP/s of one product.
    pub fn rate(&mut self) -> f64 {
        let rows = Self::SIZE.div_ceil(rayon::current_num_threads());
        let x = &self.x;
        let out = self.out.axis_chunks_iter_mut(Axis(0), rows).into_par_iter();
        let time = seconds(|| {
            out.zip(x.axis_chunks_iter(Axis(0), rows).into_par_iter())
                .for_each(|(out, rows)| gemm(out, false, rows, x.view()));
        });
        std::hint::black_box(&self.out);
        2.0 * (Self::SIZE as f64).powi(3) / time * 1e-9
    }
}
