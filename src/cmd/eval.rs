//! `kvsmith eval`: measures what methods lose against full attention.

mod also;
mod blocks;
mod material;
pub mod needles;
mod plan;
mod reads;
mod rows;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::args::{Global, Text, model_folder};
use super::named::{Named, NamedParser};
use super::reading::Reading;
use super::verdict::ORACLE;
use super::{device_for, forward_on, merge, open_model, print, print_json};
use crate::artifact::Artifact;
use crate::error::{Error, Kind, Result};
use crate::flags::{parse_count, parse_count_or_all, parse_positive_count, parse_share};
use crate::kv::Budget;
use crate::method::registry::{FULL, MethodName};
use crate::method::sections::SECTIONS;
use crate::method::{CPU_GRANULE, Method};
use crate::model::Decoder;
use crate::model::tokenizer::Tokenizer;
use crate::runner::Options;
use crate::runner::eval::{Bootstrap, Evaluation, FEWEST, Variant};
use also::Also;
use material::Material;
use needles::Feeding;
use plan::{BudgetOf, Entry};
use rows::Measurements;

/// The largest number of bytes that `--granule` takes.
const MOST_GRANULE: usize = 4096;

/// Arguments of `eval`.
#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens", "needles"]).required(true).multiple(true)))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, or the id of a model in the Hugging Face cache, such as Qwen/Qwen3-0.6B
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    model: PathBuf,
    /// Read token ids instead of text: a JSON array of arrays, one per document
    #[arg(help_heading = "Input", long, value_name = "FILE.json")]
    tokens: Option<PathBuf>,
    /// Ask questions instead of comparing texts: JSON lines {prompt, answer}, {prompt_tokens, answer_tokens}, or
    /// conversations {turns: [..]} of such turns. A `question` is fed token by token after the prompt; with several
    /// `answers`, the score is the share of the answers found. `auto` hides facts in --text and asks for them
    #[arg(help_heading = "Input", long, value_name = "F.jsonl")]
    needles: Option<PathBuf>,
    /// With --needles auto: tokens of the texts in which facts are hidden; there are 20 texts of each length, with eight
    /// questions each
    #[arg(help_heading = "Input", long, value_name = "N,M", value_delimiter = ',', default_value = "2048", value_parser = parse_positive_count)]
    lengths: Vec<usize>,
    /// Number of tokens at the end of a needle's prompt that are fed one by one if its line has no `question`. With
    /// 0, the first token of the answer comes from exact attention
    #[arg(help_heading = "Input", long, value_name = "N", default_value_t = 16, value_parser = parse_count)]
    decode_prompt: usize,
    /// How questions are fed: `decode` feeds them token by token after the prompt, so that the method's own reads must
    /// answer them; `prefill` feeds them with the prompt, by exact attention, as most papers do, and only the answer is
    /// decoded
    #[arg(help_heading = "Input", long, value_enum, default_value_t = Feeding::Decode)]
    question: Feeding,
    /// Methods to compare with full attention. NAME+tail also estimates the attention to positions that are not read;
    /// it needs the section `tail` of --artifact (default, without --also: every method with a section in --artifact, and
    /// topk and full)
    #[arg(help_heading = "Measurement", long, value_name = "A,B", value_delimiter = ',', value_parser = NamedParser)]
    methods: Vec<Named>,
    /// Measure a further row, on the same steps: a method with these flags, such as --also "lfps --lfps-theta 0.85".
    /// Flags of the method that are not in the quotes have their defaults, even if they are given outside. NAME need not
    /// be in --methods. May be given several times
    #[arg(help_heading = "Measurement", long, value_name = "NAME --FLAG X", value_parser = Also::parse)]
    also: Vec<Also>,
    /// Budgets to measure each method with; NAME=X applies to the method NAME only. A budget is a fraction of the
    /// context (0.06 or 6%) or, above 1, a number of positions. The static set, the index and keys that are read only
    /// to rank do not count
    #[arg(help_heading = "Measurement", long, value_name = "X,Y", value_delimiter = ',', default_value = "0.06", value_parser = BudgetOf::parse)]
    budgets: Vec<BudgetOf>,
    /// Instead of --budgets: shares of the bytes of all visible keys and values that a step may read, index included,
    /// such as 0.05,0.1. kvsmith searches for the budget of each method on some of the blocks or lines
    #[arg(help_heading = "Measurement", long, value_name = "F,G", value_delimiter = ',', value_parser = parse_share, conflicts_with = "budgets")]
    reads: Vec<f64>,
    /// Number of bytes that memory moves at once, a power of two up to 4096. --reads counts bytes as such a memory moves
    /// them: whatever is read, whole granules. With 1, each byte that is read counts once
    #[arg(help_heading = "Measurement", long, value_name = "N", default_value_t = 1, value_parser = parse_granule)]
    granule: usize,
    /// Number of tokens at the end of each turn that are decoded one by one
    #[arg(help_heading = "Measurement", long, value_name = "N", default_value_t = 64, value_parser = parse_positive_count)]
    decode: usize,
    /// Cut each block of text into this number of equal turns
    #[arg(help_heading = "Measurement", long, value_name = "N", default_value_t = 1, value_parser = parse_positive_count, conflicts_with = "needles")]
    turns: usize,
    /// Also report each layer and KV head
    #[arg(help_heading = "Measurement", long)]
    per_head: bool,
    /// Maximum block length in tokens; longer documents are cut into blocks (default: 16384, or the model's context
    /// if it is shorter)
    #[arg(help_heading = "Text", long, value_name = "N", value_parser = parse_count)]
    seq_len: Option<usize>,
    /// Maximum number of text tokens to read; `all` for no limit
    #[arg(help_heading = "Text", long, value_name = "N", default_value_t = 65_536, value_parser = parse_count_or_all)]
    max_tokens: usize,
    /// Number of tokens of random UUIDs to add to the text
    #[arg(help_heading = "Text", long, value_name = "N", default_value_t = 0, value_parser = parse_count)]
    uuid_tokens: usize,
    /// More artifacts to compare with --artifact: each method is also measured with every artifact that has its
    /// section, on the same steps
    #[arg(
        help_heading = "Measurement",
        long,
        value_name = "ART2,ART3",
        value_delimiter = ',',
        requires = "artifact"
    )]
    against: Vec<PathBuf>,
    #[command(flatten)]
    text: Text,
    #[command(flatten)]
    reading: Reading,
}

impl Args {
    /// Returns the files of the artifacts, beginning with that of `--artifact`.
    fn artifacts(&self) -> impl Iterator<Item = &PathBuf> {
        self.reading.artifact().into_iter().chain(&self.against)
    }

    /// Returns the granule in which moved bytes count: that of `--granule`, or a cache line of the CPU.
    fn granule(&self) -> usize {
        match self.granule {
            1 => CPU_GRANULE,
            granule => granule,
        }
    }

    /// Returns the methods of `--methods` and of `--also`.
    fn named(&self) -> impl Iterator<Item = Named> {
        let others = self.also.iter().map(|also| also.named);
        self.methods.iter().copied().chain(others)
    }
}

impl Args {
    /// Tells whether questions are made from the text.
    fn makes_questions(&self) -> bool {
        self.needles
            .as_ref()
            .is_some_and(|path| path == Path::new("auto"))
    }

    /// Fails unless there is one source of text or questions.
    fn check_source(&self) -> Result<()> {
        let (has_text, has_tokens) = (self.text.is_given(), self.tokens.is_some());
        let wrong = |what: &str, hint: &str| Err(Error::usage(what).hint(hint));
        match (self.needles.is_some(), self.makes_questions()) {
            _ if has_text && has_tokens => {
                wrong("--text and --tokens exclude each other", "give one of them")
            }
            (true, true) if !has_text => wrong(
                "--needles auto needs --text",
                "give text in which facts are hidden",
            ),
            (true, false) if has_text || has_tokens => wrong(
                "a file of --needles has its own text",
                "omit --text and --tokens, or give --needles auto",
            ),
            _ => Ok(()),
        }
    }

    /// Fails if the command asks both to decode the end of prompts and to prefill questions.
    fn check_question(&self, global: &Global) -> Result<()> {
        let is_given = global.given.iter().any(|given| given == "decode-prompt");
        match self.question == Feeding::Prefill && is_given && self.decode_prompt > 0 {
            true => Err(Error::usage(
                "--decode-prompt decodes the end of a prompt, which --question prefill prefills",
            )
            .hint("omit one of the two flags")),
            false => Ok(()),
        }
    }

    /// Warns of flags of `eval` that have no effect.
    fn warn_of_unused(&self, global: &Global) {
        let (log, given) = (global.log(), |flag: &str| {
            global.given.iter().any(|given| given == flag)
        });
        if self.named().all(|named| named.method == FULL) {
            for flag in ["budgets", "reads"].into_iter().filter(|flag| given(flag)) {
                log.warn(&format!(
                    "--{flag} has no effect here: full attention reads everything"
                ));
            }
        }
        if self.needles.is_none() {
            for flag in ["decode-prompt", "question", "lengths"]
                .into_iter()
                .filter(|flag| given(flag))
            {
                log.warn(&format!("--{flag} has no effect without --needles"));
            }
        } else if !self.makes_questions() && given("lengths") {
            log.warn("--lengths has no effect without --needles auto");
        }
        self.text.warn_of_field(log);
    }
}

/// Runs `eval`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    match args.named().next() {
        Some(_) => eval(args, global),
        None => {
            let mut args = args.clone();
            args.methods = usual_methods(args.reading.artifact())?;
            eval(&args, global)
        }
    }
}

/// Lists the methods that are measured if none is named.
fn usual_methods(artifact: Option<&PathBuf>) -> Result<Vec<Named>> {
    let path = artifact.ok_or_else(|| {
        Error::usage("eval needs methods")
            .hint("name some with --methods, such as topk,streaming, or give --artifact")
    })?;
    let artifact = Artifact::open(path, SECTIONS)?;
    Ok(Named::calibrated(&artifact, &[ORACLE, FULL.as_str()]))
}

fn eval(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    args.check_source()?;
    args.check_question(global)?;
    let device = global.open_model_device("eval")?;
    args.reading.check(device.as_ref())?;
    let decoder = open_model(&args.model, log)?;
    let device = device_for(device, &decoder, global)?;
    let named: Vec<MethodName> = args.named().map(|named| named.method).collect();
    args.reading.warn_of_unused(&named, global);
    args.warn_of_unused(global);
    let artifacts = args
        .artifacts()
        .map(|path| args.reading.open(path, &decoder, log));
    let artifacts: Vec<Artifact> = artifacts.collect::<Result<_>>()?;
    let entries = plan::entries(args, &artifacts);
    let method = |entry: &Entry| {
        let Named { method, tail } = entry.named;
        let artifact = artifacts.get(entry.artifact);
        let own = &args.reading.methods;
        let params = entry
            .also
            .map_or_else(|| own.clone(), |also| args.also[also].params(own));
        args.reading
            .method(method, tail, &params, artifact, &decoder, global)
    };
    let methods: Vec<Box<dyn Method>> = entries.iter().map(method).collect::<Result<_>>()?;
    let options = |artifact| {
        let whole = Budget::Fraction(1.0);
        let options = args.reading.options(whole, None, artifact, device.as_ref());
        options.map(|options| Options {
            granule: args.granule(),
            ..options
        })
    };
    for other in artifacts.iter().skip(1) {
        if options(Some(other))?.packed != options(artifacts.first())?.packed {
            return Err(
                Error::usage("the artifacts take signs relative to different centres")
                    .hint("choose one centre with --center"),
            );
        }
    }
    let options = options(artifacts.first())?;
    let tokenizer = tokenizer(args, &decoder)?;
    let material = Material::open(args, global, &decoder, tokenizer.as_ref())?;
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
        };
        let forward = forward_on(device.as_ref(), &decoder, longest, global)?;
        let variants = budgets.iter().map(variant).collect();
        Ok(Evaluation::new(forward, variants, options))
    };
    let plan = plan::rows(args, &entries, log, &mut |budgets| {
        let mut evaluation = evaluation(budgets)?;
        material.sample(args, &mut evaluation, log)?;
        let share = |variant: usize| {
            let share = match args.granule {
                1 => evaluation.bytes_fraction(variant),
                _ => evaluation.moved_fraction(variant),
            };
            let nothing = || {
                Error::failed("the first lines decode nothing, so that --reads has nothing to measure")
                    .hint("begin with a line whose answer has several tokens, or use --budgets")
            };
            share.ok_or_else(nothing)
        };
        (0..budgets.len()).map(share).collect()
    })?;
    let budgets: Vec<_> = plan.iter().filter_map(|p| Some((p.entry, p.budget?))).collect();
    if budgets.is_empty() && !global.json {
        let least = plan.iter().filter_map(|p| p.reads).map(|[_, least]| least);
        return Err(Error::failed(format!(
            "no method can read as little as --reads asks for: the least is {:.1} % of the bytes",
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
        artifacts: &artifacts,
        intervals: intervals.as_ref(),
    };
    let rows = table.rows()?;
    if global.json {
        let mut out = json!({ "device": device.name(), "rows": rows, "differences": table.differences() });
        merge(&mut out, &found);
        merge(&mut out, &conditions(args, &decoder, &artifacts, &options)?);
        print_json(global, &out)?;
    } else {
        let asked = args.needles.as_ref().map(|_| args.question);
        let counted = match args.granule {
            1 => "bytes_read_fraction",
            _ => "bytes_moved_fraction",
        };
        let questions = asked.map(|feeding| (feeding, &evaluation.full));
        print(&rows::text(&rows, questions, counted))?;
    }
    match stopped {
        true => Err(Error::interrupted()),
        false => Ok(()),
    }
}

/// Parses a number of bytes that memory moves at once.
fn parse_granule(text: &str) -> std::result::Result<usize, String> {
    let granule = parse_positive_count(text)?;
    match granule.is_power_of_two() && granule <= MOST_GRANULE {
        true => Ok(granule),
        false => Err(format!("not a power of two up to {MOST_GRANULE}")),
    }
}

/// Describes what was measured, so that nobody takes it for another model or artifact.
fn conditions(args: &Args, decoder: &Decoder, artifacts: &[Artifact], options: &Options) -> Result<Value> {
    let files = args.artifacts().zip(artifacts);
    let artifact = |(file, artifact): (&PathBuf, &Artifact)| json!({ "file": file, "sections_sha256": artifact.manifest.sections_sha256() });
    Ok(json!({
        "fingerprint": decoder.checkpoint.fingerprint(&decoder.config)?,
        "artifacts": files.map(artifact).collect::<Vec<_>>(),
        "kv": options.kv.as_str(),
        "sinks": options.sinks,
        "window": options.window,
        "granule": options.granule,
        "reads_granule": args.granule,
    }))
}

/// Tells whether the user stopped the work after `done` steps; a stop before the first step stays an error.
fn is_stopped(result: Result<()>, done: usize) -> Result<bool> {
    match result {
        // What was measured so far is still reported.
        Err(e) if e.kind() == Kind::Interrupted && done > 0 => Ok(true),
        other => other.map(|()| false),
    }
}

/// Opens the model's tokenizer if needles are given and the model has one.
fn tokenizer(args: &Args, decoder: &Decoder) -> Result<Option<Tokenizer>> {
    let exists = args.needles.is_some() && args.model.join("tokenizer.json").exists();
    let tokenizer = exists.then(|| Tokenizer::open(&args.model, &decoder.config));
    tokenizer.transpose()
}
