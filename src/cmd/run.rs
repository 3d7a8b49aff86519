//! `kvsmith run`: generates text with exact or sparse attention, from one prompt or in turns.

mod args;
mod batch;
mod compare;
mod conversation;
mod lines;
mod prefer;
mod ready;
mod report;
mod setting;
mod stop;
mod turns;
mod written;

use std::path::PathBuf;

pub use self::args::Args;
use super::args::Global;
use super::reading::note_of_plan;
use super::{device_for, open_model};
use crate::artifact::{Artifact, Verdict};
use crate::cmd::terminal::Log;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::plan::Plan;
use crate::method::registry::{FULL, MethodName};
use crate::model::Model;
use batch::{Batch, Prompts};
use compare::Comparison;
use prefer::Prefer;
use ready::{Opened, Ready};
use setting::{Ask, RunSetting};
use turns::Turns;

/// Runs `run`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_model_device("run")?;
    args.reading.check(device.as_ref())?;
    let model = open_model(&args.model, log)?;
    let on_gpu = device.cuda().is_some();
    let device = device_for(device, &model.decoder, global)?;
    let model = args.reading.rounded(model, device.as_ref())?;
    let decoder = &model.decoder;
    let on_cpu = (on_gpu && device.cuda().is_none()).then_some("the model runs on the CPU");
    for flag in ["top-k", "top-p", "min-p"] {
        if args.temperature == 0.0 && global.given.iter().any(|given| given == flag) {
            log.warn(&format!("--{flag} has no effect without --temperature"));
        }
    }
    let source = Prompted::open(args, &model, global)?;
    let open = |path: &PathBuf| args.reading.open(path, decoder, log);
    let artifact = args.reading.artifact().map(open).transpose()?;
    let opened = Opened {
        args,
        global,
        device: device.as_ref(),
        decoder,
        artifact: artifact.as_ref(),
        on_cpu,
    };
    let source = match source {
        Prompted::Turns(turns) if !args.compare.is_empty() => {
            let methods: Vec<MethodName> = args.compare.iter().map(|named| named.method).collect();
            args.reading.warn_of_unused(&methods, None, &[], global);
            return Comparison(&opened).run(turns);
        }
        source => source,
    };
    // The plan of the artifact is a recommendation, which flags that choose replace.
    let follows = args.method.is_none() && args.budget.is_none() && args.prefer == Prefer::Bytes;
    let plan = args.reading.head_plan(
        (args.method, args.budget),
        decoder.config.sizes(),
        artifact.as_ref().filter(|_| follows),
        global,
    )?;
    if let Some(plan) = plan.as_ref().filter(|_| !args.reading.has_plan()) {
        note_of_plan(plan, "--method and --budget", log);
    }
    let ask = Ask {
        plan: plan.as_ref(),
        artifact: artifact.as_ref(),
        decoder,
        device: device.as_ref(),
    };
    let setting = RunSetting::choose(args, &ask, source.longest(args), global)?;
    args.reading
        .warn_of_unused(&setting.methods(), plan.as_ref(), &[], global);
    if setting.methods() == [FULL] && args.budget.is_some() {
        log.warn("--budget has no effect here: full attention reads everything");
    }
    let (method, options) = opened.prepare(setting)?;
    let kv = setting.plan.map_or(Some(options.kv), Plan::kv);
    note_of_doubts(args, artifact.as_ref(), kv, log);
    let ready = Ready {
        opened: &opened,
        method: method.as_ref(),
        options,
        setting,
    };
    match source {
        Prompted::Turns(turns) => ready.converse(turns),
        Prompted::Batch(prompts) => Batch(&ready).run(prompts),
    }
}

/// Where the prompts come from.
enum Prompted<'a> {
    /// One prompt, or the turns of a conversation.
    Turns(Turns<'a>),
    /// The lines of `--batch`.
    Batch(Prompts),
}

impl<'a> Prompted<'a> {
    fn open(args: &Args, model: &'a Model, global: &Global) -> Result<Self> {
        if let Some(path) = &args.batch {
            if args.prefer == Prefer::Time {
                let error = Error::usage(
                    "--prefer time may choose another method each time, so that no batch could be continued",
                );
                return Err(error.hint("give --method and --budget"));
            }
            let prompts = Prompts::read(path, args, model)?;
            prompts.warn(global);
            return Ok(Self::Batch(prompts));
        }
        let turns = Turns::open(args, model, global.log())?;
        if !args.stop.is_empty() && turns.tokenizer.is_none() {
            return Err(
                Error::usage("--stop needs a tokenizer, but the model has no tokenizer.json")
                    .hint("remove --stop, or add the model's tokenizer.json"),
            );
        }
        Ok(Self::Turns(turns))
    }

    /// Returns how many positions the longest context is expected to have.
    fn longest(&self, args: &Args) -> usize {
        match self {
            Self::Turns(turns) => turns.known() + args.max_new,
            Self::Batch(prompts) => prompts.longest(),
        }
    }
}

/// A budget of fewer positions than this is perhaps meant as a percentage.
const FEW_POSITIONS: usize = 100;

/// Notes settings that are perhaps not what was meant.
fn note_of_doubts(args: &Args, artifact: Option<&Artifact>, kv: Option<KvType>, log: Log) {
    if let Some(Budget::Count(n)) = args.budget
        && n < FEW_POSITIONS
    {
        log.note(&format!(
            "--budget {n} means {n} positions; write {n}% for a share of the context"
        ));
    }
    let verdict = artifact.and_then(|artifact| artifact.manifest.quality.methods.as_ref());
    let other =
        |verdict: &&Verdict| kv.is_some_and(|kv| kv.float().is_none() && verdict.kv != kv.to_string());
    if let (Some(verdict), Some(kv)) = (verdict.filter(other), kv) {
        log.note(&format!(
            "the losses in the artifact were measured with a {} cache, not with a {kv} one; `kvsmith eval --kv {kv}` measures it",
            verdict.kv
        ));
    }
}
