//! `kvsmith bench`: speed on shapes of real models, or on given data.

mod cpu_head;
mod cpu_step;
mod cuda_step;
mod decode;
mod encode;
mod model_step;
mod prefill;
mod product;
mod report;
mod timed;

use std::path::PathBuf;
use std::time::Instant;

use clap::Subcommand;
use ndarray::{Array3, Axis};
use serde_json::json;

use self::decode::DecodeArgs;
use self::encode::EncodeArgs;
use self::model_step::ModelArgs;
use self::prefill::PrefillArgs;
use self::report::{median, number, print_row, random_points, read_points, row};
use super::print_json;
use crate::cmd::args::Global;
use crate::compute::device::Device;
use crate::error::{Error, Result};
use crate::flags::at_least_one;
use crate::interrupt;
use crate::method::a2ats::FitInit;
use crate::stats::kmeans::{self, Init, KMeansFit, KMeansParams};
use crate::store::{self, Output, Tensor};

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
    /// Give keys their codewords, on the CPU
    Encode(EncodeArgs),
    /// Project and attend the positions of a prompt, one layer, on the CPU
    Prefill(PrefillArgs),
    /// Choose the positions of one decode step of one layer
    Retrieve(DecodeArgs),
    /// Choose and attend them
    Attend(DecodeArgs),
    /// Decode steps of a whole model with random weights, on an NVIDIA GPU
    Decode(ModelArgs),
}

#[derive(clap::Args, Debug)]
struct KMeansArgs {
    /// Fit these points (tensor `x` f32 `[n,d]`) instead of random ones
    #[arg(long, value_name = "FILE")]
    points: Option<PathBuf>,
    /// Write the codebook (tensor `codebook` f32 `[M,d]`)
    #[arg(short, long, value_name = "CODEBOOK")]
    output: Option<PathBuf>,
    /// Heads of random points, each fitted on its own
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = at_least_one, conflicts_with = "points")]
    heads: usize,
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
    /// End once a pass lowers the objective by less than this share
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = crate::flags::share_or_zero)]
    min_gain: f64,
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
    match &args.what {
        What::Kmeans(args) => bench_kmeans(args, global),
        What::Encode(args) => encode::run(args, global),
        What::Prefill(args) => prefill::run(args, global),
        What::Retrieve(args) => decode::run(args, false, global),
        What::Attend(args) => decode::run(args, true, global),
        What::Decode(args) => model_step::run(args, global),
    }
}

fn bench_kmeans(args: &KMeansArgs, global: &Global) -> Result<()> {
    let output = args.output.as_ref().map(|p| Output::create(p)).transpose()?;
    let device = global.open_device()?;
    let points = match &args.points {
        Some(path) => read_points(path)?.insert_axis(Axis(0)),
        None => {
            let values = args
                .n
                .checked_mul(args.dim)
                .and_then(|v| v.checked_mul(args.heads));
            if values.is_none_or(|v| v > MAX_VALUES) {
                return Err(Error::usage(format!(
                    "--heads {} x --n {} x --dim {} is too large",
                    args.heads, args.n, args.dim
                )));
            }
            random_points(args.heads, args.n, args.dim, global.seed)
        }
    };
    let FitInit::KMeansPlusPlus = args.init;
    let params = KMeansParams {
        size: args.size,
        iterations: args.iterations,
        min_gain: args.min_gain,
        init: Init::KMeansPlusPlus,
        seed: global.seed,
    };
    let mut times = Vec::new();
    for _ in 0..args.runs.max(1) {
        times.push(Times::of(device.as_ref(), &points, &params, global)?);
    }
    let (heads, n, d) = points.dim();
    let last = times.last().expect("at least one run");
    if let Some(output) = output {
        let values: Vec<f32> = last.fits.iter().flat_map(|fit| &fit.codebook).copied().collect();
        let shape = [heads, args.size, d];
        let shape = if heads == 1 { &shape[1..] } else { &shape[..] };
        store::write(output, &[Tensor::new("codebook", shape, &values)], None)?;
    }
    let assignments: usize = last.fits.iter().map(|fit| fit.inertia.len()).sum();
    let inertia: f64 = last.fits.iter().filter_map(|fit| fit.inertia.last()).sum();
    let passes = last.passes.len();
    // Nominal: every point against every centroid, once per assignment, skipped or not.
    let flop = 2.0 * (n * d) as f64 * args.size as f64 * assignments as f64;
    let shape = format!("{heads} x {n} x {d}, {} centroids, {passes} passes", args.size);
    let total = times.iter().map(|t| t.total).collect();
    let mut row = row("kmeans", &shape, device.name(), total);
    row["gflops"] = json!(flop / number(&row, "median_s") * 1e-9);
    row["inertia"] = json!(inertia);
    row["upload_s"] = json!(median(times.iter().map(|t| t.upload).collect()));
    row["seed_s"] = json!(median(times.iter().map(|t| t.seed).collect()));
    row["pass_s"] = json!(median(times.iter().flat_map(|t| t.passes.clone()).collect()));
    if let Some(adapter) = device.adapter() {
        row["adapter"] = json!(adapter);
    }
    if global.json {
        return print_json(&json!({ "rows": [row] }));
    }
    let number = |name: &str| number(&row, name);
    print_row(
        &row,
        &format!(
            "median {:.3} s of {} (min {:.3}, max {:.3}), seeding {:.3} s, a pass {:.4} s, \
         {:.0} GFLOP/s nominal, inertia {inertia:.6e}",
            number("median_s"),
            times.len(),
            number("min_s"),
            number("max_s"),
            number("seed_s"),
            number("pass_s"),
            number("gflops"),
        ),
    )
}

/// One timed fit of all heads, in as many groups as the device asks for; seconds.
struct Times {
    fits: Vec<KMeansFit>,
    total: f64,
    /// Of the points.
    upload: f64,
    /// Seeding and the first assignment.
    seed: f64,
    /// Each pass, over all heads.
    passes: Vec<f64>,
}

impl Times {
    fn of(device: &dyn Device, points: &Array3<f32>, params: &KMeansParams, global: &Global) -> Result<Self> {
        let (_, n, d) = points.dim();
        let log = global.log();
        let start = Instant::now();
        let (mut upload, mut seed, mut passes) = (0.0, 0.0, vec![0.0; 0]);
        let mut fits = Vec::new();
        let at_once = device.heads_at_once(n, d, params.size).max(1);
        for group in points.axis_chunks_iter(Axis(0), at_once) {
            let mut lap = Instant::now();
            let mut since = || {
                std::mem::replace(&mut lap, Instant::now())
                    .elapsed()
                    .as_secs_f64()
            };
            let mut points = device.points(group.to_owned())?;
            upload += since();
            let mut on_pass = |pass: usize, inertia: f64| {
                let seconds = since();
                log.detail(&format!("{pass:3} {seconds:8.4} s {inertia:.6e}"));
                if pass == 0 {
                    seed += seconds;
                } else {
                    passes.resize(passes.len().max(pass), 0.0);
                    passes[pass - 1] += seconds;
                }
                interrupt::flow()
            };
            let seeds: Vec<u64> = (0..group.len_of(Axis(0)))
                .map(|head| params.seed + (fits.len() + head) as u64)
                .collect();
            fits.extend(kmeans::cluster(points.as_mut(), params, &seeds, &mut on_pass)?);
        }
        Ok(Self {
            fits,
            total: start.elapsed().as_secs_f64(),
            upload,
            seed,
            passes,
        })
    }
}
