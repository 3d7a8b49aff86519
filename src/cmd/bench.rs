//! `kvsmith bench`: speed on shapes of real models, or on given data.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Subcommand;
use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

use super::{print, print_json};
use crate::cli::Global;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::method::a2ats::FitInit;
use crate::stats::kmeans::{self, Init, KMeansFit, KMeansParams};
use crate::store::{self, Output, Store, Tensor};

/// Arguments of `bench`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Fit one codebook
    Kmeans(KMeansArgs),
}

#[derive(clap::Args, Debug)]
struct KMeansArgs {
    /// Fit these points (tensor `x` f32 `[n,d]`) instead of random ones
    #[arg(long, value_name = "FILE")]
    points: Option<PathBuf>,
    /// Write the codebook (tensor `codebook` f32 `[M,d]`)
    #[arg(short, long, value_name = "CODEBOOK")]
    output: Option<PathBuf>,
    /// Random points
    #[arg(long, value_name = "N", default_value_t = 81_920, conflicts_with = "points")]
    n: usize,
    /// Channels of the random points
    #[arg(long, value_name = "D", default_value_t = 128, conflicts_with = "points")]
    dim: usize,
    /// Centroids
    #[arg(long, value_name = "M", default_value_t = 4096)]
    size: usize,
    /// Most passes
    #[arg(long, value_name = "N", default_value_t = 25)]
    iterations: usize,
    /// How k-means starts
    #[arg(long, value_enum, default_value_t = FitInit::KMeansPlusPlus)]
    init: FitInit,
    /// Timed runs
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
}

/// Most random values: 16 GB.
const MAX_VALUES: usize = 1 << 32;

/// Runs `bench`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let device = global.cpu_only("bench")?;
    match &args.what {
        What::Kmeans(args) => bench_kmeans(args, global, device),
    }
}

fn bench_kmeans(args: &KMeansArgs, global: &Global, device: &str) -> Result<()> {
    let output = args.output.as_ref().map(|p| Output::create(p)).transpose()?;
    let points = match &args.points {
        Some(path) => read_points(path)?,
        None => {
            let values = args.n.checked_mul(args.dim).filter(|v| *v <= MAX_VALUES);
            if values.is_none() {
                return Err(Error::usage(format!(
                    "--n {} x --dim {} is too large",
                    args.n, args.dim
                )));
            }
            random_points(args.n, args.dim, global.seed)
        }
    };
    let FitInit::KMeansPlusPlus = args.init;
    let params = KMeansParams {
        size: args.size,
        iterations: args.iterations,
        init: Init::KMeansPlusPlus,
        seed: global.seed,
    };
    let mut times = Vec::new();
    let mut last = None;
    for _ in 0..args.runs.max(1) {
        let start = Instant::now();
        last = Some(fit(&points, &params, global)?);
        times.push(start.elapsed().as_secs_f64());
    }
    let Some(fit) = last else { return Ok(()) };
    let (n, d) = points.dim();
    if let Some(output) = output {
        let values: Vec<f32> = fit.codebook.iter().copied().collect();
        let tensor = Tensor::new("codebook", &[args.size, d], &values);
        store::write(output, &[tensor], None)?;
    }
    // Nominal: every point against every centroid, once per assignment, skipped or not.
    let flop = 2.0 * (n * d) as f64 * args.size as f64 * fit.inertia.len() as f64;
    let shape = format!(
        "{n} x {d}, {} centroids, {} passes",
        args.size,
        fit.inertia.len() - 1
    );
    let row = row("kmeans", &shape, device, &mut times, flop);
    if global.json {
        return print_json(&json!({ "rows": [row] }));
    }
    let number = |name: &str| row[name].as_f64().unwrap_or(0.0);
    print(&format!(
        "kmeans {shape}: median {:.3} s of {} (min {:.3}, max {:.3}), {:.0} GFLOP/s nominal, inertia {:.6e}\n",
        number("median_s"),
        times.len(),
        number("min_s"),
        number("max_s"),
        number("gflops"),
        fit.inertia.last().copied().unwrap_or(0.0),
    ))
}

fn fit(points: &Array2<f32>, params: &KMeansParams, global: &Global) -> Result<KMeansFit> {
    let start = Instant::now();
    let log = global.log();
    let mut on_pass = |pass: usize, inertia: f64| {
        log.detail(&format!(
            "{pass:3} {:8.3} s {inertia:.6e}",
            start.elapsed().as_secs_f64()
        ));
        interrupt::flow()
    };
    Ok(kmeans::fit(points.view(), params, &mut on_pass)?)
}

/// One result row: median, least and most of `times` and the rate at the median.
fn row(name: &str, shape: &str, device: &str, times: &mut [f64], flop: f64) -> Value {
    times.sort_by(f64::total_cmp);
    let median = f64::midpoint(times[(times.len() - 1) / 2], times[times.len() / 2]);
    json!({
        "name": name,
        "shape": shape,
        "device": device,
        "median_s": median,
        "min_s": times[0],
        "max_s": times[times.len() - 1],
        "runs": times.len(),
        "gflops": flop / median * 1e-9,
        "peak_bytes": peak_bytes(),
    })
}

fn read_points(path: &Path) -> Result<Array2<f32>> {
    let store = Store::open(path)?;
    let shape = store.specs().find(|s| s.name == "x").map(|s| s.shape.clone());
    let Some([n, d]) = shape.as_deref() else {
        return Err(Error::failed(format!(
            "{} has no tensor `x` of shape [n,d]",
            path.display()
        )));
    };
    let values = store.read::<f32>("x", &[*n, *d])?;
    Array2::from_shape_vec((*n, *d), values).map_err(|e| Error::failed(e.to_string()))
}

/// Correlated normal channels of unequal scale, like whitened keys.
fn random_points(n: usize, d: usize, seed: u64) -> Array2<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    Array2::from_shape_fn((n, d), |(_, c)| {
        // Sum of uniforms: close enough to normal for timing.
        let sum: f32 = (0..4).map(|_| rng.r#gen::<f32>() - 0.5).sum();
        sum / (1.0 + c as f32 / 16.0)
    })
}

/// Peak resident memory of the process; 0 where the system does not tell.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
