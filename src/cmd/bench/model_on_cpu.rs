//! `kvsmith bench decode` on the CPU: the steps of `kvsmith run`, over caches that are filled with random rows.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use rayon::prelude::*;
use serde_json::{Map, json};

use super::model_step::{ModelArgs, STEPS, configs};
use super::report::{Results, Times, against_read_loop, check_memory, free_bytes, measure};
use super::timed::{listed, methods, warn_of_unused, without};
use crate::cmd::args::Global;
use crate::cmd::flags::WeightsFlag;
use crate::cmd::reading::{PLANNED, read_plan};
use crate::cmd::{merge, open_model};
use crate::env;
use crate::error::{Error, Result};
use crate::kv::Budget;
use crate::method::bench::{Bench, NewHead, TimedLayer};
use crate::method::full::Full;
use crate::method::named::Named;
use crate::method::plan::{HeadPlan, Plan};
use crate::method::registry::MethodName;
use crate::method::{Place, Ranking};
use crate::model::forward::CpuForward;
use crate::model::{Decoder, Forward as _, ModelConfig, folder, random};
use crate::runner::{Counts, DecodeOptions, Engine, FilledHead, SequenceId};
use crate::timing::{BenchHead, LayerSetting, bandwidth};

/// The token that every step feeds.
const TOKEN: u32 = 0;

/// Times every combination of model, context, number of sequences, and method or head plan.
pub(super) fn run(args: &ModelArgs, global: &Global) -> Result<()> {
    if let Some(name) = without(&args.methods, |_| true) {
        return Err(
            Error::usage(format!("`bench decode` does not time method `{name}`"))
                .hint(format!("--methods accepts {}", listed(&methods(|_| true)))),
        );
    }
    let quant = args.weights.map(WeightsFlag::quant);
    // What cannot be timed is refused before anything is.
    let open = |path: &PathBuf| -> Result<(String, Decoder)> {
        let decoder = open_model(path, global.log())?.rounded(quant)?.decoder;
        Ok((folder::name(path), decoder))
    };
    let opened = args.model.as_ref().map(open).transpose()?;
    let drawn = match &opened {
        Some(_) => Vec::new(),
        None => configs(args)?,
    };
    let shapes = drawn.iter().map(|(_, config)| (config, random::bytes(config)));
    let shapes = opened
        .iter()
        .map(|(_, decoder)| (&decoder.config, 0.0))
        .chain(shapes);
    let (mut asked, mut plans) = (args.methods.clone(), Vec::new());
    for (config, weights) in shapes {
        let planned = planned(args, config)?;
        check(args, config, planned.as_ref(), weights)?;
        asked.extend(planned.iter().flat_map(Plan::methods));
        plans.push(planned);
    }
    let mut plans = plans.into_iter().flatten();
    warn_of_unused(&asked, global);
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
        Some((name, decoder)) => timing.all(name, &CpuForward::new(decoder)?, plans.next()),
        None => drawn.into_iter().try_for_each(|(name, config)| {
            let decoder = random::decoder(config)?.rounded(quant)?;
            let layers =
                (0..decoder.config.n_layers()).map(|i| random::layer(&decoder.config, i)?.rounded(quant));
            let forward = CpuForward::with_layers(&decoder, layers.collect::<Result<_>>()?);
            timing.all(&name, &forward, plans.next())
        }),
    };
    timing.results.finish_after(outcome)
}

/// Reads the head plan, if there is one, for a model.
///
/// # Errors
/// A file that is no plan for such a model; a KV head whose steps cannot be timed.
fn planned(args: &ModelArgs, config: &ModelConfig) -> Result<Option<Plan>> {
    let Some(path) = &args.head_plan else {
        return Ok(None);
    };
    let plan = read_plan(path, config.sizes())?;
    for (layer, kv_head, head) in plan.heads() {
        if head.method.tail || head.method.method.bench().is_none() {
            let why = format!(
                "{}: layer {layer}, KV head {kv_head}: `bench decode` does not time method `{}`",
                path.display(),
                head.method
            );
            return Err(
                Error::usage(why).hint(format!("it times {}, without tails", listed(&methods(|_| true))))
            );
        }
    }
    Ok(Some(plan))
}

/// What all combinations have in common.
struct Timing<'a> {
    args: &'a ModelArgs,
    /// Of a plain read loop, in GB/s.
    bandwidth: f64,
    results: Results<'a>,
    /// Median seconds of a step with full attention, by model, context and number of sequences.
    full: BTreeMap<String, f64>,
    seed: u64,
}

/// How the KV heads are served in timed steps.
struct Served {
    /// What results name as the method.
    name: &'static str,
    plan: Plan,
    /// Whether its speed is compared with that of full attention.
    retrieves: bool,
}

impl Served {
    /// Serves all KV heads with one method.
    fn alike(method: MethodName, bench: &dyn Bench, args: &ModelArgs, c: &ModelConfig) -> Self {
        let head = HeadPlan {
            method: Named { method, tail: false },
            params: Map::new(),
            budget: args.caches.budget,
            kv: args.caches.kv,
        };
        Self {
            name: method.as_str(),
            plan: Plan::uniform(c.sizes(), &head),
            retrieves: bench.retrieves(),
        }
    }

    fn planned(plan: Plan) -> Self {
        Self {
            name: PLANNED,
            plan,
            retrieves: true,
        }
    }

    /// Returns what holds for all KV heads; each has the budget and the formats of its own plan.
    fn options(&self, args: &ModelArgs) -> DecodeOptions {
        DecodeOptions {
            limits: self.plan.limits(args.caches.budget),
            ..args.caches.options()
        }
    }

    /// Describes cache and budget.
    fn text(&self) -> String {
        match (self.plan.kv(), self.plan.budget()) {
            (Some(kv), Some(budget)) => format!("{kv}, budget {}", budget.value()),
            _ => self.plan.text(),
        }
    }
}

impl Timing<'_> {
    /// Times every context, number of sequences, and method or head plan with one model.
    fn all(&mut self, name: &str, forward: &CpuForward, planned: Option<Plan>) -> Result<()> {
        let (args, c) = (self.args, &forward.decoder().config);
        let timed = args
            .methods
            .iter()
            .filter_map(|method| Some((*method, method.bench()?)));
        let mut all: Vec<Served> = timed
            .map(|(method, bench)| Served::alike(method, bench, args, c))
            .collect();
        all.extend(planned.map(Served::planned));
        for &context in &args.context {
            for &sequences in &args.caches.batch {
                for served in &all {
                    env::check()?;
                    self.add(name, forward, [sequences, context], served)?;
                }
            }
        }
        Ok(())
    }

    /// Times the steps of one method or plan and adds the result.
    fn add(
        &mut self,
        name: &str,
        forward: &CpuForward,
        [sequences, context]: [usize; 2],
        served: &Served,
    ) -> Result<()> {
        let (args, c) = (self.args, &forward.decoder().config);
        let options = served.options(args);
        let layer = TimedLayer {
            shape: c.sizes().shape(1, context),
            ranking: Ranking::Fast,
            seed: self.seed,
        };
        // No sequence is opened, so that nothing asks this method.
        let unasked = |_: &Place| Full;
        let mut engine = Engine::new(Box::new(forward), &unasked, options.clone());
        let heads = (0..sequences).map(|_| filled(&served.plan, args, layer));
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
            "uncompressed_read_fraction": counts.uncompressed_fraction(),
            "uncompressed_moved_fraction": counts.uncompressed_moved_fraction(),
            "scratch_bytes_fraction": counts.scratch_fraction(),
            "bytes": moved, "weights": weights, "weight_bytes": forward.bytes(), "index_bytes": index_bytes,
            "kv_bytes": kv_bytes, "batch": sequences, "context": context, "method": served.name,
            "budget": served.plan.budget(), "kv": served.plan.kv(),
        });
        let (rates, said) = against_read_loop(moved, times.median, self.bandwidth);
        merge(&mut more, &rates);
        let batch = match sequences {
            1 => String::new(),
            n => format!("batch {n}, "),
        };
        let sizes = format!("{batch}{name}, {weights} weights, {context} positions");
        let shape = format!("{sizes}, {}", served.text());
        let [median, min, max] = [times.median, times.min, times.max].map(|seconds| 1e3 * seconds);
        let mut says = vec![
            format!("{rate:.1} tokens/s"),
            format!("median {median:.2} ms per step (min {min:.2}, max {max:.2})"),
            said,
        ];
        if served.name == PLANNED {
            more["head_plan"] = served.plan.json();
        }
        if !served.retrieves {
            self.full.insert(sizes, times.median);
        } else if let Some(full) = self.full.get(&sizes) {
            let speedup = full / times.median;
            more["speedup_over_full"] = json!(speedup);
            says.push(format!("{speedup:.2} times as fast as full attention"));
        }
        let label = format!("decode {}", served.name);
        self.results.add([&label, &shape, "cpu"], &times, &more, &says)
    }
}

/// Fails if `weights` bytes and the largest caches, without indexes, do not fit into the free memory.
fn check(args: &ModelArgs, c: &ModelConfig, plan: Option<&Plan>, weights: f64) -> Result<()> {
    let context = args.context.iter().copied().max().unwrap_or_default();
    let most = args.caches.batch.iter().copied().max().unwrap_or(1);
    let heads = plan.into_iter().flat_map(Plan::heads);
    let planned: usize = heads
        .map(|(_, _, head)| head.kv.bytes_per_position(c.head_dim))
        .sum();
    let position = args.position_bytes(c).max(planned);
    let what = format!("{context} positions and {} runs", args.runs);
    check_memory(
        &what,
        weights + most as f64 * args.cache_bytes(position, context),
        free_bytes(),
        "reduce --context, --batch or --runs, or use a smaller model",
    )
}

/// KV heads of all layers that are served in the same way.
struct Alike<'p> {
    plan: &'p HeadPlan,
    setting: LayerSetting,
    new: Box<NewHead>,
    /// For each index of a KV head: the head that was drawn for it, and how many layers still need it.
    drawn: Vec<(Option<BenchHead>, usize)>,
}

/// Makes the caches and indexes of all layers. For each way in which it is served, a KV head is drawn once; other layers get
/// copies at other addresses.
fn filled(plan: &Plan, args: &ModelArgs, layer: TimedLayer) -> Result<Vec<Vec<FilledHead>>> {
    let limits = plan.limits(Budget::USUAL);
    let mut ways: Vec<Alike> = Vec::new();
    for (_, kv_head, head) in plan.heads() {
        let at = match ways.iter().position(|way| way.plan == head) {
            Some(at) => at,
            None => {
                let method = head.method.method;
                let bench = method
                    .bench()
                    .ok_or_else(|| Error::internal(format!("no benchmark of method {method:?}")))?;
                let params = args.parameters.0.with(&head.params, &bench.parameters())?;
                let new = bench.heads(&layer, &params)?;
                let own = (limits.with_budget(head.budget), head.kv);
                ways.push(Alike {
                    plan: head,
                    setting: LayerSetting::attending(own, params, layer, method, bench),
                    new,
                    drawn: (0..layer.shape.kv_heads).map(|_| (None, 0)).collect(),
                });
                ways.len() - 1
            }
        };
        ways[at].drawn[kv_head].1 += 1;
    }
    for Alike {
        setting, new, drawn, ..
    } in &mut ways
    {
        drawn
            .par_iter_mut()
            .enumerate()
            .filter(|(_, (_, layers))| *layers > 0)
            .try_for_each(|(i, (head, _))| {
                *head = Some(BenchHead::new(
                    setting,
                    new,
                    i,
                    layer.seed.wrapping_add(i as u64),
                )?);
                Ok::<(), Error>(())
            })?;
    }
    let mut of_head = |kv_head: usize, head: &HeadPlan| {
        let (drawn, layers) = &mut ways.iter_mut().find(|way| way.plan == head)?.drawn[kv_head];
        *layers -= 1;
        let own = match *layers {
            0 => drawn.take()?,
            _ => drawn.as_ref()?.copied(),
        };
        Some(FilledHead {
            kv: own.kv,
            retriever: own.retriever,
            budget: head.budget,
        })
    };
    let mut of_layer = |heads: &Vec<HeadPlan>| {
        heads
            .iter()
            .enumerate()
            .map(|(i, head)| of_head(i, head))
            .collect()
    };
    let all: Option<Vec<Vec<FilledHead>>> = plan.layers.iter().map(&mut of_layer).collect();
    all.ok_or_else(|| Error::internal("a KV head of the plan was not drawn"))
}
