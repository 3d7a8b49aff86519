//! `kvsmith bench decode`: decode steps of a whole model with random weights and caches.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::{Value, json};

use super::cuda_step;
use super::decode::{Caches, SINKS, WINDOW, float, parse_context};
use super::report::{add_bandwidth, number, print_row, row};
use super::timed::{listed, methods, without};
use crate::cmd::args::Global;
use crate::cmd::print_json;
use crate::compute::cuda::Cuda;
use crate::compute::cuda::driver::Driver;
use crate::cuda::Body;
use crate::cuda::backend::CudaBackend;
use crate::error::{Error, Kind, Result};
use crate::flags::{DeviceFlag, at_least_one};
use crate::interrupt;
use crate::kv::packed::Center;
use crate::method::bench::Bench;
use crate::method::registry::MethodName;
use crate::model::ModelConfig;
use crate::model::fields::read_json;
use crate::runner::{Backend, Options};

/// Steps between two waits for the device.
const STEPS: usize = 10;

#[derive(clap::Args, Debug)]
pub struct ModelArgs {
    /// Models: llama-3.1-8b, qwen2.5-14b, mistral-7b
    #[arg(
        long,
        value_name = "S,..",
        value_delimiter = ',',
        default_value = "llama-3.1-8b",
        value_parser = ["llama-3.1-8b", "qwen2.5-14b", "mistral-7b"]
    )]
    shapes: Vec<String>,
    /// A model's config.json instead
    #[arg(long, value_name = "FILE", conflicts_with = "shapes")]
    config: Option<PathBuf>,
    /// Positions in the cache, in numbers or as 8K to 1M
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "8K,128K", value_parser = parse_context)]
    context: Vec<usize>,
    #[arg(
        long,
        value_name = "M,..",
        value_delimiter = ',',
        default_value = "full,a2ats",
        help = methods_help()
    )]
    methods: Vec<MethodName>,
    #[command(flatten)]
    caches: Caches,
    /// Timed runs of ten steps
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one)]
    runs: usize,
}

fn on_cuda(bench: &dyn Bench) -> bool {
    bench.timed().model_on_cuda
}

fn methods_help() -> String {
    let names: Vec<&str> = methods(on_cuda).iter().map(|m| m.as_str()).collect();
    format!("How steps choose what they read: {}", names.join(", "))
}

/// Times every combination; what does not fit is said and left out.
pub fn run(args: &ModelArgs, global: &Global) -> Result<()> {
    if matches!(global.device, DeviceFlag::Cpu | DeviceFlag::Wgpu) {
        return Err(Error::device("`bench decode` needs an NVIDIA GPU")
            .hint("use --device cuda; on the CPU `run` says how many tokens a second a checkpoint gives"));
    }
    if let Some(name) = without(&args.methods, on_cuda) {
        return Err(
            Error::usage(format!("`bench decode` does not time method `{name}`"))
                .hint(format!("--methods takes {}", listed(&methods(on_cuda)))),
        );
    }
    float(args.caches.kv)?;
    let gpu = Cuda::open()?;
    let driver = gpu.driver();
    let bandwidth = cuda_step::bandwidth(driver, args.runs)?;
    let log = global.log();
    log.note(&format!("a plain read loop: {bandwidth:.1} GB/s"));
    let mut rows = Vec::new();
    let mut left_out = None;
    for (name, config) in configs(args)? {
        for &context in &args.context {
            for &batch in &args.caches.batch {
                for (method, bench) in args.methods.iter().filter_map(|m| Some((*m, m.bench()?))) {
                    interrupt::check()?;
                    let setting = Setting {
                        name: &name,
                        context,
                        batch,
                        method,
                        bench,
                    };
                    match measure(driver, args, global, config.clone(), &setting, bandwidth) {
                        Ok(row) => {
                            if !global.json {
                                print_times(&row)?;
                            }
                            rows.push(row);
                        }
                        Err(e) if e.kind() == Kind::GpuMemory => {
                            log.warn(&format!("{}: {e}", setting.shape(args)));
                            left_out = Some(e);
                        }
                        Err(e) => return Err(e),
                    }
                }
            }
        }
    }
    match left_out {
        Some(e) if rows.is_empty() => Err(e.hint("take a smaller --context or --batch, or --kv bf16")),
        _ if global.json => print_json(&json!({ "rows": rows })),
        _ => Ok(()),
    }
}

/// What is timed.
struct Setting<'a> {
    name: &'a str,
    context: usize,
    batch: usize,
    method: MethodName,
    bench: &'static dyn Bench,
}

impl Setting<'_> {
    fn shape(&self, args: &ModelArgs) -> String {
        let (b, name, n, budget) = (self.batch, self.name, self.context, args.caches.budget.value());
        let kv = args.caches.kv.as_str();
        format!("batch {b}, {name}, {n} positions, {kv}, budget {budget}")
    }
}

fn measure(
    driver: &dyn Driver,
    args: &ModelArgs,
    global: &Global,
    config: ModelConfig,
    setting: &Setting,
    bandwidth: f64,
) -> Result<Value> {
    let options = Options {
        sinks: SINKS,
        window: WINDOW,
        budget: args.caches.budget,
        kv: args.caches.kv,
        packed: Center::Median.into(),
    };
    let (seed, n) = (global.seed as u32, setting.context);
    let weights = Body::random_bytes(&config);
    let body = Body::random(driver, config, seed)?;
    let sizes = [setting.batch, n, STEPS * (args.runs + 1)];
    let mut backend = CudaBackend::random(body, setting.bench, args.caches.size, options, sizes, seed)?;
    let mut times = Vec::new();
    for run in 0..=args.runs {
        interrupt::check()?;
        backend.choices()?;
        let start = Instant::now();
        for step in 0..STEPS {
            backend.advance(run * STEPS + step, None)?;
        }
        backend.choices()?;
        times.push(start.elapsed().as_secs_f64() / STEPS as f64);
    }
    // The first one warmed up.
    let times = times.split_off(1);
    let read = backend.shares(STEPS * (args.runs + 1))?.read;
    let moved = weights as f64 + read * (backend.position_bytes() * n) as f64;
    let name = format!("decode {}", setting.method.as_str());
    let mut row = row(&name, &setting.shape(args), "cuda", times);
    row["adapter"] = json!(driver.adapter());
    row["tokens_per_s"] = json!(setting.batch as f64 / number(&row, "median_s"));
    row["kv_read_fraction"] = json!(read);
    row["bytes"] = json!(moved);
    add_bandwidth(&mut row, moved, bandwidth);
    Ok(row)
}

/// The models and their sizes.
fn configs(args: &ModelArgs) -> Result<Vec<(String, ModelConfig)>> {
    if let Some(path) = &args.config {
        let config = ModelConfig::parse(&read_json(path)?).map_err(|e| e.context(path.display()))?;
        return Ok(vec![(path.display().to_string(), config)]);
    }
    let config = |name: &String| {
        let [hidden, intermediate, layers, heads, vocab] = match name.as_str() {
            "qwen2.5-14b" => [5120, 13_824, 48, 40, 152_064],
            "mistral-7b" => [4096, 14_336, 32, 32, 32_768],
            _ => [4096, 14_336, 32, 32, 128_256],
        };
        let config = json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "max_position_embeddings": 131_072, "tie_word_embeddings": true, "hidden_act": "silu",
        });
        Ok((name.clone(), ModelConfig::parse(&config)?))
    };
    args.shapes.iter().map(config).collect()
}

fn print_times(row: &Value) -> Result<()> {
    let number = |name: &str| number(row, name);
    print_row(
        row,
        &format!(
            "median {:.3} ms a step (min {:.3}, max {:.3}), {:.1} tokens/s, {:.1} GB/s, {:.0} % of a plain read loop",
            1e3 * number("median_s"),
            1e3 * number("min_s"),
            1e3 * number("max_s"),
            number("tokens_per_s"),
            number("gbytes_per_s"),
            100.0 * number("bandwidth_share"),
        ),
    )
}
