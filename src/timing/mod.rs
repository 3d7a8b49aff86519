//! Times of this machine: decode steps of a layer with random data, and what such measurements share.

mod head;
mod quick;
mod setting;
mod step;

use std::time::Instant;

use ndarray::{Array2, Array3, Axis};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use crate::env;
use crate::error::Result;

pub use head::{BenchHead, uniform};
pub use quick::{QuickLayer, QuickStep, RUNS};
pub use setting::{LayerSetting, ROTATED_BYTES};
pub use step::{CpuSteps, bandwidth, scattered};

/// Measures how long `work` takes.
pub fn seconds(work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    start.elapsed().as_secs_f64()
}

/// Returns the middle of some values; 0 of none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n => f64::midpoint(values[(n - 1) / 2], values[n / 2]),
    }
}

/// Measures `runs` times, after one run that warms up.
pub fn measure<T>(runs: usize, mut once: impl FnMut() -> Result<T>) -> Result<Vec<T>> {
    once()?;
    let run = |_| {
        env::check()?;
        once()
    };
    (0..runs).map(run).collect()
}

/// Draws independent, roughly normal channels whose scale falls from the first to the last, `[b,n,d]`.
pub fn random_points(heads: usize, n: usize, d: usize, seed: u64) -> Array3<f32> {
    let mut points = Array3::zeros((heads, n, d));
    let each = points.axis_iter_mut(Axis(0)).into_par_iter().enumerate();
    each.for_each(|(head, mut points)| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(head as u64);
        for ((_, c), value) in points.indexed_iter_mut() {
            // A sum of uniform numbers is close enough to normal for timing.
            let sum: f32 = (0..4).map(|_| rng.r#gen::<f32>() - 0.5).sum();
            *value = sum / (1.0 + c as f32 / 16.0);
        }
    });
    points
}

/// Draws the points of one head, `[n,d]`.
pub fn random_matrix(n: usize, d: usize, seed: u64) -> Array2<f32> {
    random_points(1, n, d, seed).index_axis_move(Axis(0), 0)
}
