//! What benchmarks share: result rows, medians, random points, memory.

use std::path::Path;

use ndarray::{Array2, Array3, Axis};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::cmd::print;
use crate::error::{Error, Result};
use crate::store::Store;

pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n => f64::midpoint(values[(n - 1) / 2], values[n / 2]),
    }
}

/// Makes a result row with the median, the least and the most of `times`.
pub fn row(name: &str, shape: &str, device: &str, mut times: Vec<f64>) -> Value {
    times.sort_by(f64::total_cmp);
    json!({
        "name": name,
        "shape": shape,
        "device": device,
        "min_s": times[0],
        "max_s": times[times.len() - 1],
        "runs": times.len(),
        "median_s": median(times),
        "peak_bytes": proc_bytes("/proc/self/status", "VmHWM:").unwrap_or(0),
    })
}

/// Adds the bytes per second at the median time, and the share of a plain read loop's `bandwidth` in GB/s.
pub fn add_bandwidth(row: &mut Value, bytes: f64, bandwidth: f64) {
    let rate = bytes / number(row, "median_s") * 1e-9;
    row["gbytes_per_s"] = json!(rate);
    row["read_loop_gbytes_per_s"] = json!(bandwidth);
    row["bandwidth_share"] = json!(rate / bandwidth);
}

/// A number of a result row.
pub fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or(0.0)
}

/// Prints a result row: its name, its shape and what it `says`.
pub fn print_row(row: &Value, says: &str) -> Result<()> {
    let text = |name: &str| row[name].as_str().unwrap_or("");
    print(&format!("{} ({}): {says}\n", text("name"), text("shape")))
}

pub fn read_points(path: &Path) -> Result<Array2<f32>> {
    let store = Store::open(path)?;
    let shape = store.specs().find(|s| s.name == "x").map(|s| s.shape.clone());
    let Some([n, d]) = shape.as_deref() else {
        return Err(Error::failed(format!(
            "{} has no tensor `x` of shape [n,d]",
            path.display()
        )));
    };
    let values = store.read::<f32>("x", &[*n, *d])?;
    Ok(Array2::from_shape_vec((*n, *d), values)?)
}

/// Correlated normal channels of unequal scale, like whitened keys, `[b,n,d]`.
pub fn random_points(heads: usize, n: usize, d: usize, seed: u64) -> Array3<f32> {
    let mut points = Array3::zeros((heads, n, d));
    let each = points.axis_iter_mut(Axis(0)).into_par_iter().enumerate();
    each.for_each(|(head, mut points)| {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(head as u64);
        for ((_, c), value) in points.indexed_iter_mut() {
            // Sum of uniforms: close enough to normal for timing.
            let sum: f32 = (0..4).map(|_| rng.r#gen::<f32>() - 0.5).sum();
            *value = sum / (1.0 + c as f32 / 16.0);
        }
    });
    points
}

/// Reads an amount of memory from a file of `/proc`, in bytes; `None` where the system does not tell.
pub fn proc_bytes(path: &str, label: &str) -> Option<usize> {
    let text = std::fs::read_to_string(path).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(label))?;
    let kib: usize = line.split_whitespace().next()?.parse().ok()?;
    Some(kib * 1024)
}
