//! `kvsmith bench kmeans`: times the fit of a codebook.

use std::path::{Path, PathBuf};
use std::time::Instant;

use ndarray::{Array2, Array3, Axis};
use serde_json::json;

use super::report::{Results, Times, check_memory, free_bytes, median, random_points};
use crate::cmd::args::Global;
use crate::cmd::flags::at_least_one;
use crate::cmd::terminal::Log;
use crate::cmd::{merge, output};
use crate::compute::Workload;
use crate::compute::device::Device;
use crate::env;
use crate::error::{Error, Result};
use crate::stats::kmeans::{self, Init, KMeansFit, KMeansParams, MAX_SIZE};
use crate::store::{self, Store, Tensor};

#[derive(clap::Args, Debug)]
pub struct KMeansArgs {
    /// Fit the points in this safetensors file (tensor `x` f32 `[n,d]`) instead of random points
    #[arg(long, value_name = "FILE")]
    points: Option<PathBuf>,
    /// Safetensors file to write the codebook to (tensor `codebook` f32 `[M,d]`)
    #[arg(short, long, value_name = "CODEBOOK")]
    output: Option<PathBuf>,
    /// Number of heads with random points; each gets its own fit
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = at_least_one, conflicts_with = "points")]
    heads: usize,
    /// Number of random points per head
    #[arg(long, value_name = "N", default_value_t = 81_920, value_parser = at_least_one, conflicts_with = "points")]
    n: usize,
    /// Channels per random point
    #[arg(long, value_name = "D", default_value_t = 128, value_parser = at_least_one, conflicts_with = "points")]
    dim: usize,
    /// Number of centroids
    #[arg(long, value_name = "M", default_value_t = 4096, value_parser = parse_size)]
    size: usize,
    /// Maximum number of k-means passes
    #[arg(long, value_name = "N", default_value_t = 25)]
    iterations: usize,
    /// Stop when a pass lowers the mean squared distance by less than this share (at least 0, below 1; 0 = continue
    /// until no point changes its centroid)
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = crate::cmd::flags::share_or_zero)]
    min_gain: f64,
    /// Number of timed runs
    #[arg(long, value_name = "N", default_value_t = 3)]
    runs: usize,
}

/// Most random values: 16 GB.
const MAX_VALUES: usize = 1 << 32;

/// Parses a number of centroids.
pub(super) fn parse_size(text: &str) -> std::result::Result<usize, String> {
    let size = text.parse().ok().filter(|size| (1..=MAX_SIZE).contains(size));
    size.ok_or_else(|| format!("expected a whole number from 1 to {MAX_SIZE}"))
}

impl KMeansArgs {
    /// Checks the sizes of random points.
    fn check(&self) -> Result<()> {
        let (heads, n, d) = (self.heads, self.n, self.dim);
        let shape = format!("--heads {heads} x --n {n} x --dim {d}");
        let hint = "reduce --heads, --n or --dim";
        let values = n.checked_mul(d).and_then(|v| v.checked_mul(heads));
        if values.is_none_or(|v| v > MAX_VALUES) {
            return Err(Error::usage(format!("{shape} is too large")).hint(hint));
        }
        // Two copies of the points; a code, a distance and bounds for each point; the centroids before and after a
        // pass.
        let each = n as f64 * (8.0 * d as f64 + 24.0) + 8.0 * self.size as f64 * d as f64;
        check_memory(&shape, heads as f64 * each, free_bytes(), hint)
    }
}

/// Runs `bench kmeans`.
pub fn run(args: &KMeansArgs, global: &Global) -> Result<()> {
    let inputs: Vec<&Path> = args.points.iter().map(PathBuf::as_path).collect();
    let output = args.output.as_ref();
    let output = output
        .map(|path| output::create(path, &inputs, global))
        .transpose()?;
    if args.points.is_none() {
        args.check()?;
    }
    let device = global.open_device(Workload::Fits)?;
    let points = match &args.points {
        Some(path) => read_points(path)?.insert_axis(Axis(0)),
        None => random_points(args.heads, args.n, args.dim, global.seed),
    };
    let params = KMeansParams {
        size: args.size,
        iterations: args.iterations,
        min_gain: args.min_gain,
        init: Init::KMeansPlusPlus,
        seed: global.seed,
    };
    let fit = |_| TimedFit::run(device.as_ref(), &points, &params, global.log());
    let fits: Vec<TimedFit> = (0..args.runs.max(1)).map(fit).collect::<Result<_>>()?;
    if let (Some(output), Some(last)) = (output, fits.last()) {
        let values: Vec<f32> = last.heads.iter().flat_map(|fit| &fit.codebook).copied().collect();
        let (heads, _, d) = points.dim();
        let shape = [heads, args.size, d];
        let shape = if heads == 1 { &shape[1..] } else { &shape[..] };
        store::write(output, &[Tensor::new("codebook", shape, &values)], None)?;
    }
    report(&fits, points.dim(), args.size, device.as_ref(), global)
}

/// Reads the tensor `x` f32 `[n,d]` of a file.
fn read_points(path: &Path) -> Result<Array2<f32>> {
    let store = Store::open(path)?;
    let shape = store.specs().find(|s| s.name == "x").map(|s| s.shape.clone());
    let Some([n, d]) = shape.as_deref() else {
        let what = format!("{} has no tensor `x` of shape [n,d]", path.display());
        return Err(
            Error::invalid(what).hint("give --points a safetensors file that contains this tensor in f32")
        );
    };
    let values = store.read::<f32>("x", &[*n, *d])?;
    Ok(Array2::from_shape_vec((*n, *d), values)?)
}

/// Reports the times of all fits, and the inertia of the last one.
fn report(
    fits: &[TimedFit],
    (heads, n, d): (usize, usize, usize),
    size: usize,
    device: &dyn Device,
    global: &Global,
) -> Result<()> {
    let last = fits.last().expect("at least one run");
    let assignments: usize = last.heads.iter().map(|fit| fit.inertia.len()).sum();
    let inertia: f64 = last.heads.iter().filter_map(|fit| fit.inertia.last()).sum();
    // Nominal operations: each assignment counts every point with every centroid, even pairs that are skipped.
    let flop = 2.0 * (n * d) as f64 * size as f64 * assignments as f64;
    let times = Times::from(fits.iter().map(|fit| fit.total).collect::<Vec<f64>>());
    let gflops = flop / times.median * 1e-9;
    let upload = median(fits.iter().map(|fit| fit.upload).collect());
    let seed = median(fits.iter().map(|fit| fit.seed).collect());
    let pass = median(fits.iter().flat_map(|fit| fit.passes.clone()).collect());
    let mut more = json!({
        "gflops": gflops, "inertia": inertia, "upload_s": upload, "seed_s": seed, "pass_s": pass,
    });
    if let Some(adapter) = device.adapter() {
        merge(&mut more, &json!({ "adapter": adapter }));
    }
    let Times { median, min, max, .. } = times;
    let says = [
        format!(
            "median {median:.3} s over {} runs (min {min:.3}, max {max:.3})",
            fits.len()
        ),
        format!("seeding {seed:.3} s, {pass:.4} s per pass"),
        format!("{gflops:.0} GFLOP/s nominal"),
        format!("inertia {inertia:.6e}"),
    ];
    let shape = format!(
        "{heads} x {n} x {d}, {size} centroids, {} passes",
        last.passes.len()
    );
    let mut results = Results::new(global);
    results.add(["kmeans", &shape, device.name()], &times, &more, &says)?;
    results.finish()
}

/// One fit of all heads, in as many groups as the device needs, and the seconds of its parts.
#[derive(Default)]
struct TimedFit {
    heads: Vec<KMeansFit>,
    total: f64,
    /// Seconds of uploading the points.
    upload: f64,
    /// Seconds of seeding and the first assignment.
    seed: f64,
    /// Seconds of each pass, over all heads.
    passes: Vec<f64>,
}

impl TimedFit {
    fn run(device: &dyn Device, points: &Array3<f32>, params: &KMeansParams, log: Log) -> Result<Self> {
        let (_, n, d) = points.dim();
        let start = Instant::now();
        let mut timed = Self::default();
        let at_once = device.heads_at_once(n, d, params.size).max(1);
        for group in points.axis_chunks_iter(Axis(0), at_once) {
            let mut lap = Instant::now();
            let mut since = || {
                std::mem::replace(&mut lap, Instant::now())
                    .elapsed()
                    .as_secs_f64()
            };
            let mut points = device.points(group.to_owned())?;
            timed.upload += since();
            let mut on_pass = |pass: usize, inertia: f64| {
                let seconds = since();
                log.detail(&format!("pass {pass:3}: {seconds:8.4} s, inertia {inertia:.6e}"));
                if pass == 0 {
                    timed.seed += seconds;
                } else {
                    timed.passes.resize(timed.passes.len().max(pass), 0.0);
                    timed.passes[pass - 1] += seconds;
                }
                env::flow()
            };
            let heads = timed.heads.len()..timed.heads.len() + group.len_of(Axis(0));
            let seeds: Vec<u64> = heads.map(|head| params.seed.wrapping_add(head as u64)).collect();
            let fits = kmeans::cluster(points.as_mut(), params, &seeds, &mut on_pass)?;
            timed.heads.extend(fits);
        }
        timed.total = start.elapsed().as_secs_f64();
        Ok(timed)
    }
}
