//! `kvsmith bench decode` on the CPU: the steps of `kvsmith run`, over caches that are filled with random rows.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use rayon::prelude::*;
use serde_json::json;

use super::model_step::{ModelArgs, STEPS, configs};
use super::report::{Results, Times, against_read_loop, check_memory, free_bytes, measure};
use super::timed::{listed, methods, warn_of_unused, without};
use crate::cmd::args::Global;
use crate::cmd::flags::WeightsFlag;
use crate::cmd::{merge, open_model};
use crate::env;
use crate::error::{Error, Result};
use crate::method::bench::{Bench, TimedLayer};
use crate::method::full::Full;
use crate::method::registry::MethodName;
use crate::method::{Place, Ranking};
use crate::model::forward::CpuForward;
use crate::model::{Decoder, Forward as _, ModelConfig, folder, random};
use crate::runner::{Counts, Engine, FilledHead, SequenceId};
use crate::timing::{BenchHead, LayerSetting, bandwidth};

/// The token that every step feeds.
const TOKEN: u32 = 0;

/// Times every combination of model, context and method.
pub(super) fn run(args: &ModelArgs, global: &Global) -> Result<()> {
    if let Some(name) = without(&args.methods, |_| true) {
        return Err(
            Error::usage(format!("`bench decode` does not time method `{name}`"))
                .hint(format!("--methods accepts {}", listed(&methods(|_| true)))),
        );
    }
    warn_of_unused(&args.methods, global);
    let quant = args.weights.map(WeightsFlag::quant);
    // What cannot be timed is refused before anything is.
    let open = |path: &PathBuf| -> Result<(String, Decoder)> {
        let decoder = open_model(path, global.log())?.rounded(quant)?.decoder;
        Ok((folder::name(path), decoder))
    };
    let opened = args.model.as_ref().map(open).transpose()?;
    let drawn = match &opened {
        Some((_, decoder)) => {
            check(args, &decoder.config, 0.0)?;
            Vec::new()
        }
        None => configs(args)?,
    };
    for (_, config) in &drawn {
        check(args, config, random::bytes(config))?;
    }
    let mut timing = Timing {
        args,
        bandwidth: bandwidth(args.runs),
        results: Results::new(global),
        full: BTreeMap::new(),
        seed: global.seed,
    };
    global.log().note(&format!(
        "read bandwidth of a plain loop: {:.1} GB/s",
        timing.bandwidth
    ));
    let outcome = match &opened {
        Some((name, decoder)) => timing.all(name, &CpuForward::new(decoder)?),
        None => drawn.into_iter().try_for_each(|(name, config)| {
            let decoder = random::decoder(config)?.rounded(quant)?;
            let layers =
                (0..decoder.config.n_layers()).map(|i| random::layer(&decoder.config, i)?.rounded(quant));
            let forward = CpuForward::of(&decoder, layers.collect::<Result<_>>()?);
            timing.all(&name, &forward)
        }),
    };
    timing.results.finish_after(outcome)
}

/// What all combinations have in common.
struct Timing<'a> {
    args: &'a ModelArgs,
    /// Of a plain read loop, in GB/s.
    bandwidth: f64,
    results: Results<'a>,
    /// Median seconds of a step with full attention, by shape.
    full: BTreeMap<String, f64>,
    seed: u64,
}

impl Timing<'_> {
    /// Times every context and method with one model.
    fn all(&mut self, name: &str, forward: &CpuForward) -> Result<()> {
        let args = self.args;
        for &context in &args.context {
            for &sequences in &args.caches.batch {
                for &method in &args.methods {
                    env::check()?;
                    if let Some(bench) = method.bench() {
                        self.add(name, forward, [sequences, context], (method, bench))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Times the steps of one method and adds the result.
    fn add(
        &mut self,
        name: &str,
        forward: &CpuForward,
        [sequences, context]: [usize; 2],
        (method, bench): (MethodName, &'static dyn Bench),
    ) -> Result<()> {
        let (args, caches, c) = (self.args, &self.args.caches, &forward.decoder().config);
        let options = caches.options();
        let layer = TimedLayer {
            sequences: 1,
            kv_heads: c.n_kv_heads,
            head_dim: c.head_dim,
            context,
            ranking: Ranking::Fast,
            seed: self.seed,
        };
        let group = c.n_heads / c.n_kv_heads;
        let setting = LayerSetting::attending(
            (options.limits, caches.kv),
            args.parameters.0.clone(),
            layer,
            group,
            method,
            bench,
        );
        // No sequence is opened, so that nothing asks this method.
        let unasked = |_: &Place| Full;
        let mut engine = Engine::new(Box::new(forward), &unasked, options);
        let heads = (0..sequences).map(|_| filled(&setting, c.n_layers()));
        let ids = heads.map(|heads| engine.adopt(heads?, context));
        let ids: Vec<SequenceId> = ids.collect::<Result<_>>()?;
        let fed: Vec<(SequenceId, u32)> = ids.iter().map(|id| (*id, TOKEN)).collect();
        let mut steps = 0;
        let times = measure(args.runs, || {
            let start = Instant::now();
            for _ in 0..STEPS {
                engine.step(&fed)?;
                steps += 1;
            }
            Ok(start.elapsed().as_secs_f64() / STEPS as f64)
        })?;
        let times = Times::from(times);
        let counts: Vec<Vec<Counts>> = ids.iter().map(|id| engine.counts(*id)).collect::<Result<_>>()?;
        let counts: Counts = counts.concat().into_iter().sum();
        let rows = counts.bytes().unwrap_or_default() as f64 / steps as f64;
        let moved = forward.bytes() as f64 + rows;
        let rate = sequences as f64 / times.median;
        let [kv_bytes, index_bytes] = engine.bytes();
        let weights = forward.decoder().head.weight.stored().name();
        let mut more = json!({
            "tokens_per_s": rate, "kv_read_fraction": engine.shares(ids[0])?.read,
            "bytes_read_fraction": counts.bytes_fraction(), "granule": options.granule,
            "bytes_moved_fraction": counts.moved_fraction(),
            "scratch_bytes_fraction": counts.scratch_fraction(),
            "bytes": moved, "weights": weights, "weight_bytes": forward.bytes(), "index_bytes": index_bytes,
            "kv_bytes": kv_bytes, "batch": sequences, "context": context, "method": method.as_str(),
        });
        let (rates, said) = against_read_loop(moved, times.median, self.bandwidth);
        merge(&mut more, &rates);
        let batch = match sequences {
            1 => String::new(),
            n => format!("batch {n}, "),
        };
        let shape = format!(
            "{batch}{name}, {weights} weights, {context} positions, {}, budget {}",
            caches.kv,
            caches.budget.value()
        );
        let [median, min, max] = [times.median, times.min, times.max].map(|seconds| 1e3 * seconds);
        let mut says = vec![
            format!("{rate:.1} tokens/s"),
            format!("median {median:.2} ms per step (min {min:.2}, max {max:.2})"),
            said,
        ];
        if !bench.retrieves() {
            self.full.insert(shape.clone(), times.median);
        } else if let Some(full) = self.full.get(&shape) {
            let speedup = full / times.median;
            more["speedup_over_full"] = json!(speedup);
            says.push(format!("{speedup:.2} times as fast as full attention"));
        }
        let label = format!("decode {}", method.as_str());
        self.results.add([&label, &shape, "cpu"], &times, &more, &says)
    }
}

/// Fails if `weights` bytes and the largest caches, without indexes, do not fit into the free memory.
fn check(args: &ModelArgs, c: &ModelConfig, weights: f64) -> Result<()> {
    let context = args.context.iter().copied().max().unwrap_or_default();
    let most = args.caches.batch.iter().copied().max().unwrap_or(1);
    let what = format!("{context} positions and {} runs", args.runs);
    check_memory(
        &what,
        weights + most as f64 * args.cache_bytes(c, context),
        free_bytes(),
        "reduce --context, --batch or --runs, or use a smaller model",
    )
}

/// Makes the caches and indexes of all layers. The heads of one layer are drawn, those of the others are copies at other
/// addresses.
fn filled(setting: &LayerSetting, layers: usize) -> Result<Vec<Vec<FilledHead>>> {
    let new = setting.bench.heads(&setting.layer, &setting.params)?;
    let heads = (0..setting.layer.kv_heads).into_par_iter();
    let heads = heads.map(|i| BenchHead::new(setting, &new, i, setting.layer.seed.wrapping_add(i as u64)));
    let first: Vec<BenchHead> = heads.collect::<Result<_>>()?;
    let parts = |head: BenchHead| (head.kv, head.retriever);
    let copies = (1..layers).map(|_| first.iter().map(|head| parts(head.copied())).collect());
    let mut all: Vec<Vec<_>> = copies.collect();
    all.push(first.into_iter().map(parts).collect());
    Ok(all)
}
