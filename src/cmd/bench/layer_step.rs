//! `kvsmith bench retrieve` and `bench attend`: one decode step of one layer on shapes of real models, with random
//! data. No checkpoint and no artifact is needed.

use std::collections::BTreeMap;

use serde_json::json;

use super::cuda_step;
use super::report::{Results, Times, against_read_loop, check_memory, free_bytes, measure};
use super::timed::{check, methods_help, ranking_help, warn_of_unused};
use crate::cmd::args::Global;
use crate::cmd::flags::{Trimmed, at_least_one};
use crate::cmd::merge;
use crate::cmd::parameters::{self, BenchFlags, choice, kv_type};
use crate::compute::DeviceKind;
use crate::compute::cuda::Cuda;
use crate::env;
use crate::error::{Error, Result};
use crate::kv::cuda::format;
use crate::kv::cuda::rows::CudaFormat;
use crate::kv::{Budget, KvType, Limits, Shape};
use crate::method::Ranking;
use crate::method::bench::{Bench, TimedLayer};
use crate::method::registry::MethodName;
use crate::numbers::plain;
use crate::runner::DecodeOptions;
use crate::timing::{self, CpuSteps, LayerSetting};

#[derive(clap::Args, Debug)]
pub struct LayerArgs {
    /// Attention shapes: llama-3.1-8b, qwen2.5-14b, mistral-7b, or query heads/KV heads x channels, such as 32/8x128
    #[arg(
        long,
        value_name = "S,..",
        value_delimiter = ',',
        default_value = "llama-3.1-8b",
        value_parser = parse_shape
    )]
    shapes: Vec<[usize; 3]>,
    /// Numbers of positions in the cache, up to 16M, such as 8192 or 8K
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "8K,32K,128K", value_parser = parse_context)]
    context: Vec<usize>,
    #[arg(
        long,
        value_name = "M,..",
        value_delimiter = ',',
        default_value = "full,a2ats,selfindex,wpq",
        value_parser = Trimmed(parameters::method()),
        hide_possible_values = true,
        help = methods_help()
    )]
    methods: Vec<MethodName>,
    #[command(flatten)]
    caches: Caches,
    #[command(flatten)]
    parameters: BenchFlags,
    #[arg(long, value_parser = choice::<Ranking>(), default_value_t = Ranking::Fast, help = ranking_help())]
    ranking: Ranking,
    /// Number of timed runs
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    runs: usize,
}

/// The caches that steps read, and how much they choose.
#[derive(clap::Args, Debug)]
pub struct Caches {
    /// Numbers of sequences per step
    #[arg(long, value_name = "B,..", value_delimiter = ',', default_value = "1", value_parser = parse_batch)]
    pub batch: Vec<usize>,
    /// Budget per KV head and step, as in `kvsmith run`: a fraction of the context or, above 1, a number of positions
    #[arg(long, value_name = "X", default_value = "0.06")]
    pub budget: Budget,
    /// Type of the KV cache, or k=TYPE,v=TYPE for keys and values apart; only f32, f16 and bf16 are available on a GPU
    #[arg(long, value_parser = kv_type(), value_name = "TYPE", default_value_t = KvType::BF16)]
    pub kv: KvType,
}

impl Caches {
    /// Returns the options of the steps of a model.
    pub fn options(&self) -> DecodeOptions {
        DecodeOptions::new(self.budget, self.kv)
    }
}

/// Returns the format of random rows on a GPU for these methods.
///
/// # Errors
/// Rows that cannot be on a GPU, or that only a prompt gives; a method whose index there reads rows of floats, with others.
pub fn gpu_format(kv: KvType, methods: &[MethodName]) -> Result<&'static dyn CudaFormat> {
    let refused = |what: String| Error::usage(what).hint("use --device cpu");
    let reads = |method: &&MethodName| method.bench().is_some_and(Bench::ranks_floats_on_cuda);
    if let Some(method) = methods.iter().find(reads).filter(|_| kv.float().is_none()) {
        let name = method.as_str();
        return Err(refused(format!(
            "`bench` supports --kv {kv} with method `{name}` on the CPU only"
        )));
    }
    let format = format::holding(kv).filter(|format| format.has_random_rows());
    format.ok_or_else(|| refused(format!("`bench` supports --kv {kv} on the CPU only")))
}

/// Parses the query heads, KV heads and channels of a layer: a model's, or numbers as in 32/8x128.
fn parse_shape(text: &str) -> std::result::Result<[usize; 3], String> {
    let text = text.trim();
    let numbers = || {
        let (n_heads, rest) = text.split_once('/')?;
        let (kv_heads, head_dim) = rest.split_once('x')?;
        Some([
            n_heads.parse().ok()?,
            kv_heads.parse().ok()?,
            head_dim.parse().ok()?,
        ])
    };
    let [h, g, d] = match text {
        "llama-3.1-8b" | "mistral-7b" => [32, 8, 128],
        "qwen2.5-14b" => [40, 8, 128],
        _ => {
            numbers().ok_or("expected a model name, or query heads/KV heads x channels, such as 32/8x128")?
        }
    };
    if h == 0 || g == 0 || d == 0 || h % g != 0 || d % 32 != 0 || h.max(d) > 1024 {
        return Err(
            "query heads must be a multiple of KV heads and channels a multiple of 32, at most 1024 of each"
                .to_owned(),
        );
    }
    Ok([h, g, d])
}

/// Parses a number of positions, as in 8192, 8K or 1M.
pub(super) fn parse_context(text: &str) -> std::result::Result<usize, String> {
    let n = plain(text).parse::<usize>().ok();
    n.filter(|n| (1..=16 << 20).contains(n))
        .ok_or_else(|| "expected a number of positions from 1 to 16M".to_owned())
}

/// Parses a number of sequences.
fn parse_batch(text: &str) -> std::result::Result<usize, String> {
    match plain(text).parse() {
        Ok(n @ 1..=65_535) => Ok(n),
        _ => Err("expected a whole number from 1 to 65535".to_owned()),
    }
}

/// Opens the GPU if the steps are to run on one.
fn open_cuda(args: &LayerArgs, global: &Global) -> Result<Option<Cuda>> {
    match global.device {
        DeviceKind::Wgpu => {
            let error = Error::device("`bench` cannot time decode steps on device `wgpu`");
            Err(error.hint("use --device cpu or --device cuda"))
        }
        DeviceKind::Cuda => {
            gpu_format(args.caches.kv, &args.methods)?;
            global.open_cuda().map(Some)
        }
        _ => Ok(None),
    }
}

/// Times every combination; `attends` tells `bench attend` from `bench retrieve`.
pub fn run(args: &LayerArgs, attends: bool, global: &Global) -> Result<()> {
    check(&args.methods, args.ranking, global.device)?;
    warn_of_unused(&args.methods, global);
    let cuda = open_cuda(args, global)?;
    let driver = cuda.as_ref().map(Cuda::driver);
    let mut settings = settings(args, attends, global.seed);
    if driver.is_some() && !attends {
        without_rows(&mut settings, global)?;
    }
    let free = match driver {
        Some(driver) => driver.free_bytes()? as usize,
        None => free_bytes(),
    };
    for setting in &settings {
        check_memory(
            &setting.shape(),
            setting.bytes(),
            free,
            "reduce --context or --batch",
        )?;
    }
    let bandwidth = match driver {
        Some(driver) => cuda_step::bandwidth(driver, args.runs)?,
        None => timing::bandwidth(args.runs),
    };
    global
        .log()
        .note(&format!("read bandwidth of a plain loop: {bandwidth:.1} GB/s"));
    let mut results = Results::new(global);
    // GB/s of scattered reads, keyed by the bytes of a row.
    let mut scattered = BTreeMap::new();
    // Median seconds of full attention, by shape.
    let mut full = BTreeMap::new();
    let outcome = settings.into_iter().try_for_each(|setting| {
        env::check()?;
        let (device, times, bytes, mut more) = match driver {
            Some(driver) => {
                let mut steps = cuda_step::CudaSteps::new(driver, &setting)?;
                let times = measure(args.runs, || steps.run())?;
                let bytes = setting.moved_bytes();
                let share = bytes as f64 / setting.visible_bytes() as f64;
                ("cuda", times, bytes, json!({ "bytes_read_fraction": share }))
            }
            None => {
                let row = setting.key_bytes();
                let rate = *scattered
                    .entry(row)
                    .or_insert_with(|| timing::scattered(row, args.runs));
                let mut steps = CpuSteps::new(&setting)?;
                let times = measure(args.runs, || steps.run())?;
                let share = steps.scored_share();
                let mut more = steps.shares();
                merge(
                    &mut more,
                    &json!({ "scored_share": share, "scattered_loop_gbytes_per_s": rate }),
                );
                ("cpu", times, steps.bytes, more)
            }
        };
        let times = Times::from(times);
        let (rates, said) = against_read_loop(bytes as f64, times.median, bandwidth);
        merge(&mut more, &rates);
        more["bytes"] = json!(bytes);
        let [median, min, max] = [times.median, times.min, times.max].map(|seconds| 1e6 * seconds);
        let mut says = vec![
            format!("median {median:.1} us (min {min:.1}, max {max:.1})"),
            said,
        ];
        if !setting.bench.retrieves() {
            full.insert(setting.shape(), times.median);
        } else if let Some(full) = full.get(&setting.shape()) {
            let speedup = full / times.median;
            more["speedup_over_full"] = json!(speedup);
            says.push(format!("{speedup:.1} times as fast as full attention"));
        }
        results.add([&setting.name(), &setting.shape(), device], &times, &more, &says)
    });
    results.finish_after(outcome)
}

/// Leaves out the methods that need the cache's rows to choose: on a GPU, `bench retrieve` has none.
///
/// # Errors
/// The command line names such a method.
fn without_rows(settings: &mut Vec<LayerSetting>, global: &Global) -> Result<()> {
    let needs = |setting: &LayerSetting| setting.bench.chooses_by_rows();
    let is_named = global.given.iter().any(|flag| flag == "methods");
    if let Some(setting) = settings.iter().find(|setting| is_named && needs(setting)) {
        let name = setting.method.as_str();
        let error = Error::usage(format!("`bench retrieve` does not time method `{name}` on a GPU"));
        return Err(error.hint("use `bench attend`, or --device cpu"));
    }
    settings.retain(|setting| !needs(setting));
    Ok(())
}

/// Lists every combination; without attending, only the methods that retrieve.
fn settings(args: &LayerArgs, attends: bool, seed: u64) -> Vec<LayerSetting> {
    let mut out = Vec::new();
    for &[n_heads, kv_heads, head_dim] in &args.shapes {
        for &context in &args.context {
            for &sequences in &args.caches.batch {
                let layer = TimedLayer {
                    shape: Shape {
                        sequences,
                        kv_heads,
                        group: n_heads / kv_heads,
                        head_dim,
                        capacity: context,
                    },
                    ranking: args.ranking,
                    seed,
                };
                let timed = args.methods.iter().filter_map(|m| Some((*m, m.bench()?)));
                let timed = timed.filter(|(_, bench)| attends || bench.retrieves());
                out.extend(timed.map(|(method, bench)| LayerSetting {
                    limits: Limits::new(args.caches.budget),
                    kv: args.caches.kv,
                    params: args.parameters.0.clone(),
                    layer,
                    method,
                    bench,
                    attends,
                }));
            }
        }
    }
    out
}
