//! Benchmarks of kernels that multiply, compared with a plain product of two matrices in the same run.

use ndarray::{Array2, Axis, s};
use rayon::prelude::*;
use serde_json::json;

use super::report::{Results, Times, measure, median, random_matrix};
use crate::cmd::args::Global;
use crate::compute::DeviceKind;
use crate::compute::gemm;
use crate::error::{Error, Result};
use crate::timing::seconds;

/// Most values of a matrix: 4 GB.
pub const MAX_MATRIX: usize = 1 << 30;

/// Rows and columns of the largest and of the smallest matrix of the plain product.
const SIZES: [usize; 2] = [2048, 512];

/// A benchmark of kernels on the CPU whose results are compared with the plain product of square matrices.
pub struct Comparison<'a> {
    x: Array2<f32>,
    out: Array2<f32>,
    runs: usize,
    results: Results<'a>,
}

impl<'a> Comparison<'a> {
    /// Starts the results of `bench <name>`.
    ///
    /// # Errors
    /// A GPU was asked for.
    pub fn new(name: &str, runs: usize, global: &'a Global) -> Result<Self> {
        if !matches!(global.device, DeviceKind::Auto | DeviceKind::Cpu) {
            let error = Error::device(format!("`bench {name}` runs on the CPU only"));
            return Err(error.hint("use --device cpu"));
        }
        Ok(Self {
            x: random_matrix(SIZES[0], SIZES[0], global.seed),
            out: Array2::zeros((SIZES[0], SIZES[0])),
            runs,
            results: Results::new(global),
        })
    }

    /// Multiplies a random square matrix of this size by itself, its rows divided among the threads: the plain product.
    /// Returns its GFLOP/s.
    fn plain_rate(&mut self, size: usize) -> f64 {
        let rows = size.div_ceil(rayon::current_num_threads());
        let x = self.x.slice(s![..size, ..size]);
        let mut out = self.out.slice_mut(s![..size, ..size]);
        let out = out.axis_chunks_iter_mut(Axis(0), rows).into_par_iter();
        let time = seconds(|| {
            out.zip(x.axis_chunks_iter(Axis(0), rows).into_par_iter())
                .for_each(|(out, rows)| gemm(out, false, rows, x));
        });
        std::hint::black_box(&self.out);
        2.0 * (size as f64).powi(3) / time * 1e-9
    }

    /// Times a kernel of `flop` floating-point operations. Each run is followed by a plain product of about as many
    /// operations, within [`SIZES`], so that other work on the machine slows both alike.
    pub fn add(&mut self, name: &str, shape: &str, flop: f64, mut kernel: impl FnMut()) -> Result<()> {
        let size = ((flop / 2.0).cbrt() as usize).clamp(SIZES[1], SIZES[0]);
        let both = measure(self.runs, || Ok((seconds(&mut kernel), self.plain_rate(size))))?;
        let (times, rates): (Vec<f64>, Vec<f64>) = both.into_iter().unzip();
        let (times, plain) = (Times::from(times), median(rates));
        let rate = flop / times.median * 1e-9;
        let share = rate / plain;
        let more = json!({ "gflops": rate, "gemm_gflops": plain, "gemm_share": share });
        let percent = share * 100.0;
        let says = [
            format!("{:.2} ms, {rate:.0} GFLOP/s", times.median * 1e3),
            format!("{percent:.0}% of the {plain:.0} GFLOP/s of a plain matrix product"),
        ];
        self.results.add([name, shape, "cpu"], &times, &more, &says)
    }

    /// Prints the document of `--json`.
    pub fn finish(self) -> Result<()> {
        self.results.finish()
    }
}
