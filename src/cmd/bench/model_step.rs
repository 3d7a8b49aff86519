//! `kvsmith bench decode`: decode steps of a whole model with random caches; on a GPU, with random weights.

use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use serde_json::json;

use super::layer_step::{Caches, gpu_format, parse_context};
use super::report::{Results, Times, against_read_loop, measure};
use super::timed::{listed, methods, warn_of_unused, without};
use super::{cuda_step, model_on_cpu};
use crate::cmd::args::{Global, model_folder};
use crate::cmd::flags::{Trimmed, WeightsFlag, at_least_one};
use crate::cmd::merge;
use crate::cmd::parameters::{self, BenchFlags};
use crate::compute::DeviceKind;
use crate::compute::Workload;
use crate::compute::cpu::Cpu;
use crate::compute::cuda::driver::Driver;
use crate::compute::device::Device;
use crate::cuda::backend::CudaBackend;
use crate::cuda::room;
use crate::cuda::{Body, check_model};
use crate::env;
use crate::error::{Error, ErrorKind, Result};
use crate::method::bench::{Bench, TimedOnCuda};
use crate::method::registry::MethodName;
use crate::model::fields::read_json;
use crate::model::{ModelConfig, random};
use crate::runner::{Backend, Counts, DecodeOptions};
use crate::wording::size;

/// Steps of a run; on a GPU, they are launched before the host waits for the device.
pub(super) const STEPS: usize = 10;
/// More memory than any GPU has.
const MOST_BYTES: f64 = 1e14;

#[derive(clap::Args, Debug)]
pub struct ModelArgs {
    /// Models whose shapes are timed, with random weights in bf16
    #[arg(
        long,
        value_name = "S,..",
        value_delimiter = ',',
        default_value = "llama-3.2-1b",
        value_parser = Trimmed(PossibleValuesParser::new(SHAPES.map(|(name, _)| name)))
    )]
    shapes: Vec<String>,
    /// Time the model described by this config.json instead, with random weights in bf16
    #[arg(long, value_name = "FILE", conflicts_with = "shapes")]
    config: Option<PathBuf>,
    /// On the CPU: time the model in this folder instead, with its own weights
    #[arg(long, value_name = "DIR", conflicts_with_all = ["shapes", "config"], value_parser = model_folder())]
    pub model: Option<PathBuf>,
    /// On the CPU: round the weights to 8 or 4 bits
    #[arg(long, value_enum)]
    pub weights: Option<WeightsFlag>,
    /// Numbers of positions in the cache, up to 16M, such as 8192 or 8K
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "8K,128K", value_parser = parse_context)]
    pub context: Vec<usize>,
    #[arg(
        long,
        value_name = "M,..",
        value_delimiter = ',',
        default_value = "full,selfindex,wpq",
        value_parser = Trimmed(parameters::method()),
        hide_possible_values = true,
        help = methods_help()
    )]
    pub methods: Vec<MethodName>,
    /// On the CPU: time a head plan too, a JSON file as of `run --head-plan`; it has budgets and row formats of its own
    #[arg(long, value_name = "FILE.json")]
    pub head_plan: Option<PathBuf>,
    #[command(flatten)]
    pub caches: Caches,
    #[command(flatten)]
    pub parameters: BenchFlags,
    /// Number of timed runs of ten steps each
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one)]
    pub runs: usize,
}

impl ModelArgs {
    /// Counts the bytes of caches of which one position of all layers has this many, for one sequence of `context` positions,
    /// after all steps; as an f64, in which no product overflows.
    pub(super) fn cache_bytes(&self, position: usize, context: usize) -> f64 {
        (context as f64 + STEPS as f64 * (self.runs as f64 + 1.0)) * position as f64
    }

    /// Counts the bytes of a position of all layers in the format of the flags.
    pub(super) fn position_bytes(&self, c: &ModelConfig) -> usize {
        c.n_layers() * c.n_kv_heads * self.caches.kv.bytes_per_position(c.head_dim)
    }
}

fn on_cuda(bench: &dyn Bench) -> bool {
    bench.timed_on_cuda() != TimedOnCuda::Nothing
}

fn methods_help() -> String {
    let more = listed(&methods(|bench| !on_cuda(bench)));
    format!(
        "Methods to time: {}; on the CPU also {more}",
        methods(on_cuda).join(", ")
    )
}

/// Times every combination; a combination that does not fit into memory is left out with a warning.
pub fn run(args: &ModelArgs, global: &Global) -> Result<()> {
    let settings = match global.device {
        DeviceKind::Wgpu => {
            return Err(Error::device("`bench` cannot time decode steps on device `wgpu`")
                .hint("use --device cpu or --device cuda"));
        }
        DeviceKind::Cpu => None,
        // What a GPU cannot do is refused before one is opened, or done on the CPU.
        DeviceKind::Auto => settings(args, global).ok(),
        DeviceKind::Cuda => Some(settings(args, global)?),
    };
    let device: Box<dyn Device> = match (&settings, global.device) {
        (None, _) => Box::new(Cpu),
        (_, DeviceKind::Cuda) => Box::new(global.open_cuda()?),
        _ => global.open_device(Workload::Fits)?,
    };
    match (settings, device.cuda()) {
        (Some(settings), Some(driver)) => on_gpu(args, &settings, driver, global),
        _ => model_on_cpu::run(args, global),
    }
}

/// Lists every combination for a GPU.
///
/// # Errors
/// What a GPU cannot do; data larger than any GPU.
fn settings<'a>(args: &'a ModelArgs, global: &Global) -> Result<Vec<ModelSetting<'a>>> {
    if args.weights.is_some() {
        return Err(
            Error::usage("`bench decode --weights` is available on the CPU only")
                .hint("omit --weights, or use --device cpu"),
        );
    }
    if args.model.is_some() {
        return Err(
            Error::usage("`bench decode --model` is available on the CPU only")
                .hint("use --device cpu, or --config with the model's config.json"),
        );
    }
    if args.head_plan.is_some() {
        return Err(
            Error::usage("`bench decode --head-plan` is available on the CPU only")
                .hint("omit --head-plan, or use --device cpu"),
        );
    }
    if let Some(name) = without(&args.methods, on_cuda) {
        return Err(
            Error::usage(format!("`bench decode` does not time method `{name}`"))
                .hint(format!("--methods accepts {}", listed(&methods(on_cuda)))),
        );
    }
    gpu_format(args.caches.kv, &args.methods)?;
    // The top bit stays clear, since small numbers are added to the seed.
    let all = combinations(args, global.seed as u32 & (u32::MAX >> 1))?;
    all.iter().try_for_each(ModelSetting::check)?;
    Ok(all)
}

/// Times every combination on a GPU.
fn on_gpu(args: &ModelArgs, settings: &[ModelSetting], driver: &dyn Driver, global: &Global) -> Result<()> {
    warn_of_unused(&args.methods, global);
    let bandwidth = cuda_step::bandwidth(driver, args.runs)?;
    let log = global.log();
    log.note(&format!("read bandwidth of a plain loop: {bandwidth:.1} GB/s"));
    let mut results = Results::new(global);
    let mut left_out = None;
    let outcome = settings.iter().try_for_each(|setting| {
        env::check()?;
        match setting.add(driver, bandwidth, &mut results) {
            Err(e) if e.kind() == ErrorKind::Memory => {
                log.warn(&format!("{}: {e}", setting.shape()));
                left_out = Some(e);
                Ok(())
            }
            result => result,
        }
    });
    match left_out {
        Some(e) if outcome.is_ok() && results.is_empty() => {
            Err(e.hint("reduce --context or --batch, or use --kv bf16"))
        }
        _ => results.finish_after(outcome),
    }
}

/// One combination of model, method and caches.
struct ModelSetting<'a> {
    args: &'a ModelArgs,
    name: String,
    config: ModelConfig,
    context: usize,
    batch: usize,
    method: MethodName,
    bench: &'static dyn Bench,
    seed: u32,
}

/// Lists every combination.
fn combinations(args: &ModelArgs, seed: u32) -> Result<Vec<ModelSetting<'_>>> {
    let mut out = Vec::new();
    for (name, config) in configs(args)? {
        for &context in &args.context {
            for &batch in &args.caches.batch {
                let timed = args.methods.iter().filter_map(|m| Some((*m, m.bench()?)));
                out.extend(timed.map(|(method, bench)| ModelSetting {
                    args,
                    name: name.clone(),
                    config: config.clone(),
                    context,
                    batch,
                    method,
                    bench,
                    seed,
                }));
            }
        }
    }
    Ok(out)
}

impl ModelSetting<'_> {
    fn shape(&self) -> String {
        let caches = &self.args.caches;
        let (b, name, n, budget) = (self.batch, &self.name, self.context, caches.budget.value());
        format!("batch {b}, {name}, {n} positions, {}, budget {budget}", caches.kv)
    }

    /// Fails for a model that GPUs cannot run, and if the data are larger than the memory of any GPU, so that later sizes
    /// cannot overflow.
    fn check(&self) -> Result<()> {
        check_model(&self.config)?;
        let rows = self
            .args
            .cache_bytes(self.args.position_bytes(&self.config), self.context);
        let need = random::bytes(&self.config) + self.batch as f64 * rows;
        if need <= MOST_BYTES {
            return Ok(());
        }
        let need = size(need as usize);
        let what = format!("{}: the data needs {need}, more than any GPU has", self.shape());
        Err(Error::usage(what).hint("reduce --context, --batch or --runs, or use a smaller model"))
    }

    /// Makes the model and its caches, with random contents.
    fn backend<'d>(
        &self,
        driver: &'d dyn Driver,
        options: DecodeOptions,
        context: usize,
    ) -> Result<CudaBackend<'d>> {
        let body = Body::random(driver, self.config.clone(), self.seed)?;
        let sizes = [self.batch, context, STEPS * (self.args.runs + 1)];
        CudaBackend::random(
            body,
            self.bench,
            &self.args.parameters.0,
            options,
            sizes,
            self.seed,
        )
    }

    /// Times the steps and adds the result.
    fn add(&self, driver: &dyn Driver, bandwidth: f64, results: &mut Results<'_>) -> Result<()> {
        let (args, caches) = (self.args, &self.args.caches);
        let options = caches.options();
        let weights = random::bytes(&self.config);
        room::check(
            driver,
            self.context,
            &|driver, context| self.backend(driver, options.clone(), context).map(drop),
            "reduce --context or --batch",
        )?;
        let mut backend = self.backend(driver, options, self.context)?;
        let mut steps = 0;
        let times = measure(args.runs, || {
            let all = driver
                .timed(&mut || (steps..steps + STEPS).try_for_each(|step| backend.advance(step, None)))?;
            steps += STEPS;
            backend.choices()?;
            Ok(all / STEPS as f64)
        })?;
        let times = Times::from(times);
        let read = backend.shares(steps)?.read;
        let counts: Counts = backend.counts()?.into_iter().sum();
        let share = counts.bytes_fraction();
        let moved = weights + read * (backend.position_bytes() * self.context) as f64;
        let rate = self.batch as f64 / times.median;
        let mut more = json!({
            "adapter": driver.adapter(), "tokens_per_s": rate, "kv_read_fraction": read,
            "bytes_read_fraction": share, "granule": backend.granule(),
            "bytes_moved_fraction": counts.moved_fraction(),
            "uncompressed_read_fraction": counts.uncompressed_fraction(),
            "uncompressed_moved_fraction": counts.uncompressed_moved_fraction(),
            "scratch_bytes_fraction": counts.scratch_fraction(), "bytes": moved,
        });
        let (rates, said) = against_read_loop(moved, times.median, bandwidth);
        merge(&mut more, &rates);
        let [median, min, max] = [times.median, times.min, times.max].map(|seconds| 1e3 * seconds);
        let says = [
            format!("median {median:.3} ms per step (min {min:.3}, max {max:.3})"),
            format!("{rate:.1} tokens/s"),
            said,
        ];
        let name = format!("decode {}", self.method.as_str());
        results.add([&name, &self.shape(), "cuda"], &times, &more, &says)
    }
}

/// Models whose shapes can be timed: hidden and intermediate size, layers, query heads, KV heads, channels per head, and
/// tokens of the vocabulary.
const SHAPES: [(&str, [usize; 7]); 7] = [
    ("smollm2-135m", [576, 1536, 30, 9, 3, 64, 49_152]),
    ("qwen3-0.6b", [1024, 3072, 28, 16, 8, 128, 151_936]),
    ("llama-3.2-1b", [2048, 8192, 16, 32, 8, 64, 128_256]),
    ("qwen3-4b", [2560, 9728, 36, 32, 8, 128, 151_936]),
    ("mistral-7b", [4096, 14_336, 32, 32, 8, 128, 32_768]),
    ("llama-3.1-8b", [4096, 14_336, 32, 32, 8, 128, 128_256]),
    ("qwen2.5-14b", [5120, 13_824, 48, 40, 8, 128, 152_064]),
];

/// Lists the models with their configurations.
pub(super) fn configs(args: &ModelArgs) -> Result<Vec<(String, ModelConfig)>> {
    if let Some(path) = &args.config {
        let config = ModelConfig::parse(&read_json(path)?).map_err(|e| e.context(path.display()))?;
        return Ok(vec![(path.display().to_string(), config)]);
    }
    let shapes = args.shapes.iter();
    let shapes = shapes.filter_map(|asked| SHAPES.iter().find(|(name, _)| name == asked));
    let config = |(name, sizes): &(&str, [usize; 7])| {
        let [hidden, intermediate, layers, heads, kv_heads, head_dim, vocab] = sizes;
        let config = json!({
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": intermediate,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "head_dim": head_dim, "vocab_size": vocab, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
            "max_position_embeddings": 131_072, "tie_word_embeddings": true, "hidden_act": "silu",
        });
        Ok(((*name).to_owned(), ModelConfig::parse(&config)?))
    };
    shapes.map(config).collect()
}
