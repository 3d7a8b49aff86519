//! `kvsmith eval`: measures what methods lose against full attention.

mod also;
mod args;
mod blocks;
mod material;
pub mod needles;
mod plan;
mod reads;
mod rows;
mod table;

use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::Global;
use super::named::Named;
use super::reading::{Reading, note_of_plan};
use super::{device_for, merge, open_model, print, print_json};
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::Budget;
use crate::method::Method;
use crate::method::plan::Plan;
use crate::method::registry::{FULL, MethodName, oracle};
use crate::method::sections::SECTIONS;
use crate::model::Decoder;
use crate::runner::DecodeOptions;
use crate::runner::eval::{Bootstrap, Evaluation, FEWEST, Variant};
pub use args::Args;
use material::Material;
use plan::Entry;
use rows::Measurements;

/// Runs `eval`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    if args.named().next().is_some() || args.reading.has_plan() {
        return eval(args, None, global);
    }
    let path = args.reading.artifact().ok_or_else(|| {
        Error::usage("eval needs methods")
            .hint("name some with --methods, such as topk,streaming, or give --artifact")
    })?;
    let artifact = Artifact::open(path, SECTIONS)?;
    if args.reads.is_empty() && Plan::given(&artifact)?.is_some() {
        return eval(args, Some(&artifact), global);
    }
    let mut args = args.clone();
    args.methods = Named::calibrated(&artifact, &[oracle(), FULL]);
    eval(&args, None, global)
}

/// Measures the methods that are named, or the head plan of the artifact that it `follows`.
fn eval(args: &Args, follows: Option<&Artifact>, global: &Global) -> Result<()> {
    let log = global.log();
    args.check_source()?;
    args.check_question(global)?;
    let device = global.open_model_device("eval")?;
    args.reading.check(device.as_ref())?;
    let model = open_model(&args.model, log)?;
    let device = device_for(device, &model.decoder, global)?;
    let model = args.reading.rounded(model, device.as_ref())?;
    let decoder = &model.decoder;
    let head_plan = args
        .reading
        .head_plan((None, None), decoder.config.sizes(), follows, global)?;
    if let Some(plan) = head_plan.as_ref().filter(|_| follows.is_some()) {
        note_of_plan(plan, "--methods", log);
    }
    let planned = head_plan.iter().flat_map(Plan::methods);
    let named: Vec<MethodName> = args.named().map(|named| named.method).chain(planned).collect();
    args.reading
        .warn_of_unused(&named, head_plan.as_ref(), &args.also_kv, global);
    args.warn_of_unused(head_plan.is_some(), global);
    let artifacts = args.artifacts().map(|path| args.reading.open(path, decoder, log));
    let artifacts: Vec<Artifact> = artifacts.collect::<Result<_>>()?;
    let entries = plan::entries(args, &artifacts, head_plan.is_some());
    let method = |entry: &Entry| {
        let Named { method, tail } = entry.named;
        let artifact = artifacts.get(entry.artifact);
        if let Some(plan) = head_plan.as_ref().filter(|_| entry.is_plan) {
            return args.reading.planned(plan, artifact, decoder, global);
        }
        let own = args.reading.params();
        let params = entry
            .also
            .map_or_else(|| own.clone(), |also| args.also[also].params(own));
        args.reading
            .method(method, tail, &params, artifact, decoder, global)
    };
    let methods: Vec<Box<dyn Method>> = entries.iter().map(method).collect::<Result<_>>()?;
    let options = |artifact| {
        let whole = Budget::Fraction(1.0);
        let options = args.reading.options(
            whole,
            None,
            head_plan.as_ref(),
            &args.also_kv,
            artifact,
            device.as_ref(),
        );
        options.map(|options| DecodeOptions {
            granule: args.granule(),
            ..options
        })
    };
    for other in artifacts.iter().skip(1) {
        if options(Some(other))?.packed != options(artifacts.first())?.packed {
            return Err(
                Error::usage("the artifacts take signs relative to different centers")
                    .hint("choose one center with --center"),
            );
        }
    }
    let options = options(artifacts.first())?;
    let asked = args.needles.is_some() && model.has_tokenizer();
    let tokenizer = asked.then(|| model.tokenizer()).transpose()?;
    let material = Material::open(args, global, &model, tokenizer.as_ref())?;
    let longest = material.longest();
    let context = decoder.config.max_position_embeddings;
    for artifact in &artifacts {
        Reading::warn_beyond_calibration(&named, artifact, longest, context, log);
    }
    if longest > context && args.needles.is_none() {
        log.warn(&format!(
            "the longest text has {longest} tokens, more than the model's context of {context} tokens; lower --seq-len"
        ));
    }
    let evaluation = |budgets: &[(usize, Budget)]| -> Result<Evaluation<'_>> {
        let variant = |&(index, budget): &(usize, Budget)| Variant {
            method: methods[index].as_ref(),
            number: plan::number(&entries, index),
            budget,
            kv: entries[index].kv,
        };
        let forward = global.machine(device.as_ref(), &log).forward(decoder, longest)?;
        let variants = budgets.iter().map(variant).collect();
        Ok(Evaluation::new(forward, variants, options.clone()))
    };
    let plan = plan::rows(args, &entries, head_plan.as_ref(), log, &mut |budgets, sample| {
        let mut evaluation = evaluation(budgets)?;
        material.sample(args, &mut evaluation, sample, log)?;
        let share = |variant: usize| {
            let [read, moved] = evaluation.uncompressed_fractions(variant);
            let share = if args.granule == 1 { read } else { moved };
            let nothing = || {
                Error::invalid("the first lines decode nothing, so that --reads has nothing to measure")
                    .hint("begin with a line whose answer has several tokens, or use --budgets")
            };
            share.ok_or_else(nothing)
        };
        (0..budgets.len()).map(share).collect()
    })?;
    let budgets: Vec<_> = plan.iter().filter_map(|p| Some((p.entry, p.budget?))).collect();
    if budgets.is_empty() && !global.json {
        let least = plan.iter().filter_map(|p| p.reads).map(|[_, least]| least);
        return Err(Error::invalid(format!(
            "no method can read as little as --reads asks for: the least is {:.1}% of the bytes",
            100.0 * least.fold(1.0, f64::min)
        ))
        .hint("raise --reads, or give longer text"));
    }
    let mut evaluation = evaluation(&budgets)?;
    let (found, stopped) = material.evaluate(args, global, &mut evaluation)?;
    let intervals = Bootstrap::new(material.units(&evaluation), global.seed);
    if intervals.is_none() {
        log.note(&format!(
            "no confidence intervals: at least {FEWEST} blocks of text or lines of questions are needed"
        ));
    }
    let table = Measurements {
        args,
        plan: &plan,
        evaluation: &evaluation,
        entries: &entries,
        head_plan: head_plan.as_ref(),
        artifacts: &artifacts,
        intervals: intervals.as_ref(),
    };
    let rows = table.rows()?;
    if global.json {
        let mut out = json!({ "device": device.name(), "rows": rows, "differences": table.differences() });
        merge(&mut out, &found);
        merge(&mut out, &conditions(args, decoder, &artifacts, &options)?);
        if let Some(plan) = &head_plan {
            out["kv"] = json!(plan.kv());
        }
        print_json(global, &out)?;
    } else {
        let asked = args.needles.as_ref().map(|_| args.question);
        let counted = match args.granule {
            1 => "uncompressed_read_fraction",
            _ => "uncompressed_moved_fraction",
        };
        let questions = asked.map(|feeding| (feeding, &evaluation.full));
        print(&table::text(&rows, questions, counted))?;
    }
    if stopped {
        Err(Error::interrupted())
    } else {
        Ok(())
    }
}

/// Describes what was measured, so that nobody takes it for another model or artifact.
fn conditions(
    args: &Args,
    decoder: &Decoder,
    artifacts: &[Artifact],
    options: &DecodeOptions,
) -> Result<Value> {
    let files = args.artifacts().zip(artifacts);
    let artifact = |(file, artifact): (&PathBuf, &Artifact)| json!({ "file": file, "sections_sha256": artifact.manifest.sections_sha256() });
    Ok(json!({
        "fingerprint": decoder.checkpoint.fingerprint(&decoder.config)?,
        "artifacts": files.map(artifact).collect::<Vec<_>>(),
        "kv": options.kv,
        "rotation": args.reading.rotation_name(artifacts.first()),
        "whole_rows": args.reading.whole_rows(),
        "weights": decoder.stored()?.name(),
        "sinks": options.limits.sinks,
        "window": options.limits.window,
        "granule": options.granule,
        "reads_granule": args.granule,
    }))
}
