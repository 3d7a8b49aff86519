//! `kvsmith run`: generates text with exact or sparse attention, from one prompt or in turns.

mod batch;
mod choice;
mod compare;
mod conversation;
mod lines;
mod prefer;
mod report;
mod stop;
mod turns;
mod written;

use std::path::{Path, PathBuf};

use super::args::{Global, model_folder};
use super::named::{Named, NamedParser};
use super::output;
use super::reading::{Reading, in_full, parse_budget};
use super::{device_for, open_model};
use crate::artifact::Artifact;
use crate::cmd::flags::{at_least_1, at_least_one, not_negative, parse_count, share, share_or_zero};
use crate::cmd::terminal::Log;
use crate::compute::device::Device;
use crate::cuda::ROWS;
use crate::cuda::backend::CudaBackend;
use crate::cuda::host::HostBackend;
use crate::cuda::room::{Extent, Source};
use crate::error::{Error, Result};
use crate::kv::sample::{Sampler, Sampling};
use crate::kv::{Budget, KvType};
use crate::method::Method;
use crate::method::registry::{FULL, MethodName};
use crate::model::Decoder;
use crate::runner::{CpuBackend, Options, Session};
use batch::{Batch, Prompts, SEQUENCES};
use choice::{Ask, Choice};
use compare::Comparison;
use conversation::{Conversation, End, Reply};
use prefer::Prefer;
use turns::Turns;

/// Arguments of `run`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("input")))]
#[command(group(
    clap::ArgGroup::new("source").args(["prompt", "prompt_file", "tokens", "chat", "batch"]).required(true).multiple(true)
))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the id of a model in the Hugging Face cache, such as
    /// Qwen/Qwen3-0.6B
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    model: PathBuf,
    /// Text of the prompt; - reads stdin
    #[arg(help_heading = "Input", long, value_name = "T", group = "input")]
    prompt: Option<String>,
    /// File with the text of the prompt; - reads stdin
    #[arg(help_heading = "Input", long, value_name = "F", group = "input")]
    prompt_file: Option<PathBuf>,
    /// File with the token ids of the prompt: a JSON array that contains one array (with --chat, one array per turn)
    #[arg(help_heading = "Input", long, value_name = "F", group = "input")]
    tokens: Option<PathBuf>,
    /// Answer every line of this file, several at a time. Each line is a JSON object with `prompt`, or `messages` for the
    /// model's chat template, and perhaps `id` and `max_new`. The same command continues a stopped run
    #[arg(help_heading = "Input", long, value_name = "FILE.jsonl", group = "input", requires = "output", conflicts_with_all = ["chat", "trace", "compare"])]
    batch: Option<PathBuf>,
    /// With --batch: file for the replies, a JSON object per line, each written when it ends
    #[arg(short, long, value_name = "FILE.jsonl", requires = "batch")]
    output: Option<PathBuf>,
    /// With --batch: most prompts at a time. Up to 4, a reply is exactly that of a run of its own
    #[arg(help_heading = "Input", long, value_name = "N", default_value_t = SEQUENCES, value_parser = at_least_one, requires = "batch")]
    sequences: usize,
    /// Hold a conversation on one KV cache: each line of stdin is a user message, and the prompt, if given, is the
    /// first message
    #[arg(help_heading = "Input", long)]
    chat: bool,
    /// With --chat: system message for the model's chat template
    #[arg(
        help_heading = "Input",
        long,
        value_name = "T",
        requires = "chat",
        conflicts_with = "tokens"
    )]
    system: Option<String>,
    /// Method that chooses the positions each decode step reads; NAME+tail is the same as --method NAME --tail. Without
    /// --method and --budget, both come from the artifact's recommendation, if it has one. Without a recommendation, or
    /// if only --budget is given: the first of wpq, a2ats, selfindex and lfps with a section in the artifact, else full
    #[arg(help_heading = "Method", long, value_parser = NamedParser)]
    method: Option<Named>,
    /// Run the prompt with each of these methods, and say where their texts part from the first one's
    #[arg(help_heading = "Method", long, value_name = "A,B", value_delimiter = ',', value_parser = NamedParser, conflicts_with_all = ["chat", "method", "trace"])]
    compare: Vec<Named>,
    /// Number of positions that the method may choose per KV head and step: a fraction of the context (0.06 or 6%; 1
    /// or `all` reads everything) or, above 1, a number of positions. Sinks, window, index and keys that are read
    /// only to rank do not count. Without --method and --budget, both come from the artifact's recommendation, if it
    /// has one. Without a recommendation, or if only --method is given: 0.06
    #[arg(help_heading = "Method", long, value_name = "X", value_parser = parse_budget)]
    budget: Option<Budget>,
    /// Which of the settings within the limits of the artifact's verdict to use; only without --method and --budget
    #[arg(help_heading = "Method", long, value_enum, value_name = "WHAT", default_value_t, conflicts_with_all = ["method", "budget", "compare"])]
    prefer: Prefer,
    /// Maximum number of tokens to generate (with --chat, per reply)
    #[arg(help_heading = "Generation", long, value_name = "N", default_value_t = 128, value_parser = parse_count)]
    max_new: usize,
    /// Continue beyond the model's context (max_position_embeddings), where its answers get worse
    #[arg(help_heading = "Generation", long)]
    beyond_context: bool,
    /// Do not stop at the model's stop tokens
    #[arg(help_heading = "Generation", long)]
    ignore_eos: bool,
    /// Write the positions that the method chose to this file: one JSON line per step, layer and KV head
    #[arg(help_heading = "Output", long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Sampling temperature; 0 always takes the most probable token
    #[arg(help_heading = "Generation", long, value_name = "T", default_value_t = 0.0, value_parser = not_negative)]
    temperature: f64,
    /// Sample from the K most probable tokens (default: no limit)
    #[arg(help_heading = "Generation", long, value_name = "K", value_parser = at_least_one)]
    top_k: Option<usize>,
    /// Sample from the smallest set of tokens whose total probability reaches P (above 0, at most 1; 1 = all tokens)
    #[arg(help_heading = "Generation", long, value_name = "P", default_value_t = 1.0, value_parser = share)]
    top_p: f64,
    /// Sample only from tokens with at least P times the probability of the most probable token (at least 0, below 1;
    /// 0 = all tokens)
    #[arg(help_heading = "Generation", long, value_name = "P", default_value_t = 0.0, value_parser = share_or_zero)]
    min_p: f64,
    /// Penalise tokens that already occurred: divide their positive logits by X and multiply their negative logits by
    /// X (at least 1; 1 = no penalty)
    #[arg(help_heading = "Generation", long, value_name = "X", default_value_t = 1.0, value_parser = at_least_1)]
    repetition_penalty: f64,
    /// End a reply before this text; can be given more than once
    #[arg(help_heading = "Generation", long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    #[command(flatten)]
    reading: Reading,
}

impl Args {
    /// Returns how tokens are chosen.
    fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
        }
    }

    /// Lists the files and folders that the command reads.
    fn inputs(&self) -> Vec<&Path> {
        let files = [&self.prompt_file, &self.tokens, &self.batch]
            .into_iter()
            .flatten();
        let files = files.chain(self.reading.artifact()).chain([&self.model]);
        files.map(PathBuf::as_path).collect()
    }
}

/// Generated positions for which caches on the CPU reserve room; they grow when it is used up.
const RESERVED: usize = 4096;

/// Runs `run`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_model_device("run")?;
    args.reading.check(device.as_ref())?;
    let decoder = open_model(&args.model, log)?;
    let on_gpu = device.cuda().is_some();
    let device = device_for(device, &decoder, global)?;
    let decoder = args.reading.rounded(decoder, device.as_ref())?;
    let on_cpu = (on_gpu && device.cuda().is_none()).then_some("the model runs on the CPU");
    for flag in ["top-k", "top-p", "min-p"] {
        if args.temperature == 0.0 && global.given.iter().any(|given| given == flag) {
            log.warn(&format!("--{flag} has no effect without --temperature"));
        }
    }
    let source = Prompted::open(args, &decoder, global)?;
    let open = |path: &PathBuf| args.reading.open(path, &decoder, log);
    let artifact = args.reading.artifact().map(open).transpose()?;
    let source = match source {
        Prompted::Turns(turns) if !args.compare.is_empty() => {
            let methods: Vec<MethodName> = args.compare.iter().map(|named| named.method).collect();
            args.reading.warn_of_unused(&methods, global);
            let comparison = Comparison {
                args,
                global,
                device: device.as_ref(),
                decoder: &decoder,
                artifact: artifact.as_ref(),
                on_cpu,
            };
            return comparison.run(turns);
        }
        source => source,
    };
    let ask = Ask {
        artifact: artifact.as_ref(),
        decoder: &decoder,
        device: device.as_ref(),
    };
    let choice = Choice::of(args, &ask, source.longest(args), global)?;
    args.reading.warn_of_unused(&[choice.method], global);
    if choice.method == FULL && args.budget.is_some() {
        log.warn("--budget has no effect here: full attention reads everything");
    }
    let reading = &args.reading;
    let method = reading.method(
        choice.method,
        choice.tail,
        reading.params(),
        artifact.as_ref(),
        &decoder,
        global,
    )?;
    let options = reading.options(choice.budget, choice.kv, artifact.as_ref(), device.as_ref())?;
    note_of_doubts(args, artifact.as_ref(), options.kv, log);
    let ready = Ready {
        args,
        global,
        device: device.as_ref(),
        decoder: &decoder,
        artifact: artifact.as_ref(),
        method: method.as_ref(),
        options,
        choice,
        on_cpu,
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
    fn open(args: &Args, decoder: &'a Decoder, global: &Global) -> Result<Self> {
        if let Some(path) = &args.batch {
            let prompts = Prompts::read(path, args, decoder)?;
            prompts.warn(global);
            return Ok(Self::Batch(prompts));
        }
        let turns = Turns::open(args, decoder, global.log())?;
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

/// What prompts are answered with.
struct Ready<'a> {
    args: &'a Args,
    global: &'a Global,
    device: &'a dyn Device,
    decoder: &'a Decoder,
    artifact: Option<&'a Artifact>,
    method: &'a dyn Method,
    options: Options,
    choice: Choice,
    /// What to say if the model runs on the CPU although there is a GPU.
    on_cpu: Option<&'static str>,
}

impl Ready<'_> {
    /// Answers one prompt, or the turns of a conversation.
    fn converse(&self, mut turns: Turns) -> Result<()> {
        let Ready {
            args,
            global,
            decoder,
            method,
            options,
            choice,
            ..
        } = *self;
        let log = global.log();
        // Opened before the weights are loaded, and dropped after the session that writes to it.
        let create = |path| output::Lines::create(path, &args.inputs(), global);
        let mut lines = args.trace.as_ref().map(|path| create(path)).transpose()?;
        loop {
            let known = turns.known();
            let (mut session, fallback) =
                open_session(args, global, self.device, decoder, method, options, known)?;
            let of_device = [self.on_cpu, fallback].into_iter().flatten().map(str::to_owned);
            if let Some(lines) = &mut lines {
                session.trace(std::io::BufWriter::new(lines));
            }
            let mut conversation = Conversation {
                args,
                global,
                kv: options.kv,
                fallbacks: of_device.chain(in_full(method)).collect(),
                choice,
                artifact: self.artifact,
                full_heads: method.full_heads(),
                session,
                turns: &mut turns,
                sampler: Sampler::new(args.sampling(), global.seed),
                replies: Vec::new(),
                steps_s: Vec::new(),
                full_step_s: None,
            };
            let end = conversation.run();
            conversation.session.finish_trace()?;
            if matches!(end, Ok(End::Reset)) {
                conversation.note()?;
                log.note("starting a new conversation");
                continue;
            }
            // The replies so far are reported, however the conversation ended.
            if end.is_ok() || !conversation.replies.is_empty() {
                if end.is_ok() {
                    conversation.time_in_full()?;
                }
                conversation.report(self.device.name())?;
            }
            drop(conversation);
            return match end {
                Ok(_) => lines.map_or(Ok(()), output::Lines::finish),
                Err(e) => Err(e),
            };
        }
    }
}

/// A budget of fewer positions than this is perhaps meant as a percentage.
const FEW_POSITIONS: usize = 100;

/// Notes settings that are perhaps not what was meant.
fn note_of_doubts(args: &Args, artifact: Option<&Artifact>, kv: KvType, log: Log) {
    if let Some(Budget::Count(n)) = args.budget
        && n < FEW_POSITIONS
    {
        log.note(&format!(
            "--budget {n} means {n} positions; write {n}% for a share of the context"
        ));
    }
    let verdict = artifact.and_then(|artifact| artifact.manifest.quality.methods.as_ref());
    if let Some(verdict) = verdict.filter(|verdict| kv.float().is_none() && verdict.kv != kv.as_str()) {
        log.note(&format!(
            "the losses in the artifact were measured with a {} cache, not with a {} one; `kvsmith eval --kv {}` measures it",
            verdict.kv,
            kv.as_str(),
            kv.as_str()
        ));
    }
}

/// Opens a session on a device, for prompts of which `known` tokens are known already. With a GPU, caches and selection
/// are on it if the method can run there; otherwise they are on the CPU, which the second value then says.
fn open_session<'a>(
    args: &Args,
    global: &Global,
    device: &'a dyn Device,
    decoder: &'a Decoder,
    method: &dyn Method,
    options: Options,
    known: usize,
) -> Result<(Session<'a>, Option<&'static str>)> {
    let reserved = known + args.max_new.min(RESERVED);
    let Some(driver) = device.cuda() else {
        return Ok((Session::on_cpu(decoder, method, options, reserved)?, None));
    };
    let log = global.log();
    let source = Source {
        driver,
        decoder,
        precision: global.precision,
    };
    // Caches and indexes on the device do not grow.
    let expected = known + args.max_new;
    let extent = match args.chat {
        true => {
            let capacity = expected.max(decoder.config.max_position_embeddings);
            // How long messages will be is not known; the last one ends the context.
            let prompt = capacity - known.max(ROWS).min(capacity)..capacity;
            Extent { capacity, prompt }
        }
        false => Extent {
            capacity: expected,
            prompt: 0..known,
        },
    };
    let tell = |text: &str| log.detail(text);
    match args.reading.on_host() {
        false if CudaBackend::can(method, &options, args.chat) => {
            let backend = source.session(method, options, &extent, &tell)?;
            Ok((Session::new(backend), None))
        }
        true if HostBackend::can(method, &options, args.chat) => {
            log.note("the KV cache is in the machine's memory, the index on the device");
            let backend = source.host_session(method, options, expected, &extent, &tell)?;
            Ok((Session::new(backend), None))
        }
        _ => {
            let fallback = "the KV cache and the selection are on the CPU";
            log.note(fallback);
            let forward = Box::new(source.forward(&extent, &tell)?);
            let backend = CpuBackend::new(forward, method, options, reserved);
            Ok((Session::new(backend), Some(fallback)))
        }
    }
}
