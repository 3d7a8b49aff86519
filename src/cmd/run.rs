//! `kvsmith run`: generation with exact or sparse attention, of one prompt or in turns.

mod turns;

use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;

use super::{device_for, open_model, print, print_json};
use crate::artifact::Artifact;
use crate::cmd::args::Global;
use crate::compute::device::Device;
use crate::cuda::Body;
use crate::cuda::forward::CudaForward;
use crate::cuda::host::HostSession;
use crate::cuda::session::CudaSession;
use crate::dump::Sizes;
use crate::error::{Error, Kind, Result};
use crate::flags::parse_count;
use crate::interrupt;
use crate::kv::Budget;
use crate::kv::KvType;
use crate::kv::sample::Sampler;
use crate::method::{Method, MethodName, Params, default_method};
use crate::model::tokenizer::TextStream;
use crate::model::{Decoder, ModelConfig};
use crate::progress::{Log, size};
use crate::runner::{Generate, Options, Session};
use turns::Turns;

/// Where and how keys and values are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kv {
    /// IEEE binary32
    F32,
    /// IEEE binary16
    F16,
    /// bfloat16
    Bf16,
    /// Signs, 2-bit magnitudes and 2-bit values, with 64 positions in f16 (Self-Indexing KVCache)
    #[value(name = "2bit")]
    TwoBit,
    /// On CUDA: bfloat16 in the machine's memory; contexts may be larger than the GPU's
    Host,
}

/// What a method has and may read: the options that `run` and `eval` share.
#[derive(clap::Args, Debug)]
#[group(skip)]
pub(super) struct Reading {
    /// What `kvsmith calibrate` made for this model
    #[arg(long, value_name = "ART.safetensors")]
    artifact: Option<PathBuf>,
    /// First positions that are always read
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = parse_count)]
    sinks: usize,
    /// Last positions that are always read, the current one included
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse_window)]
    window: usize,
    /// Element type of the KV cache (default: f32 on the CPU, bf16 on CUDA)
    #[arg(long, value_enum)]
    kv: Option<Kv>,
    #[command(flatten)]
    pub(super) methods: Params,
    /// Use an artifact of another model, if its sizes fit
    #[arg(long)]
    force: bool,
}

impl Reading {
    /// Opens the artifact, if one is given, and checks that it fits the model.
    pub(super) fn open(&self, decoder: &Decoder, log: Log) -> Result<Option<Artifact>> {
        let path = self.artifact.as_ref();
        path.map(|p| open_artifact(p, decoder, self.force, log))
            .transpose()
    }

    /// The options of a session.
    pub(super) fn options(
        &self,
        budget: Budget,
        artifact: Option<&Artifact>,
        device: &dyn Device,
    ) -> Result<Options> {
        Ok(Options {
            sinks: self.sinks,
            window: self.window,
            budget,
            kv: self.kv_type(device),
            packed: self.methods.selfindex.layout(artifact)?,
        })
    }

    /// Whether the caches stay in the machine's memory although the model is on a GPU.
    fn on_host(&self) -> bool {
        self.kv == Some(Kv::Host)
    }

    /// Checks what the device has of the options.
    pub(super) fn check(&self, device: &dyn Device) -> Result<()> {
        if self.on_host() && device.cuda().is_none() {
            return Err(Error::usage("--kv host is for --device cuda")
                .hint("on the CPU every cache is in the machine's memory: use --kv bf16"));
        }
        Ok(())
    }

    /// The type of the cache.
    fn kv_type(&self, device: &dyn Device) -> KvType {
        match self.kv {
            Some(Kv::F32) => KvType::F32,
            Some(Kv::F16) => KvType::F16,
            Some(Kv::Bf16 | Kv::Host) => KvType::Bf16,
            Some(Kv::TwoBit) => KvType::TwoBit,
            None if device.cuda().is_some() => KvType::Bf16,
            None => KvType::F32,
        }
    }

    /// A method of this model.
    pub(super) fn method(
        &self,
        name: MethodName,
        artifact: Option<&Artifact>,
        decoder: &Decoder,
        seed: u64,
    ) -> Result<Method> {
        let d = decoder.config.head_dim;
        Method::new(name, artifact, &decoder.rope, d, &self.methods, seed)
    }
}

/// Arguments of `run`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("input")))]
#[command(group(
    clap::ArgGroup::new("source").args(["prompt", "prompt_file", "tokens", "chat"]).required(true).multiple(true)
))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Prompt text
    #[arg(long, value_name = "T", group = "input")]
    prompt: Option<String>,
    /// File with the prompt text
    #[arg(long, value_name = "F", group = "input")]
    prompt_file: Option<PathBuf>,
    /// Prompt as token ids: a JSON array with one array (with --chat, one per turn)
    #[arg(long, value_name = "F", group = "input")]
    tokens: Option<PathBuf>,
    /// Go on in turns on one cache: user messages are lines of stdin, after the prompt if one is given
    #[arg(long)]
    chat: bool,
    /// System message of the model's chat template
    #[arg(long, value_name = "T", requires = "chat", conflicts_with = "tokens")]
    system: Option<String>,
    /// How decode steps choose what they read (default: the first of a2ats, selfindex and lfps that the artifact is for, else full)
    #[arg(long, value_enum)]
    method: Option<MethodName>,
    /// Positions chosen per KV head and step: a fraction of the context (up to 1) or a whole number
    #[arg(long, value_name = "X", default_value = "0.06", value_parser = parse_budget)]
    budget: Budget,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_count)]
    max_new: usize,
    /// Do not stop at the model's stop tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Write the selected positions, a JSON line per step, layer and KV head
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Sampling temperature; 0 is greedy
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = parse_temperature)]
    temperature: f64,
    /// Sample from the smallest set of tokens with this much probability
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = parse_top_p)]
    top_p: f64,
    #[command(flatten)]
    reading: Reading,
}

/// Generated positions that the caches have room for from the start; they grow beyond.
const RESERVED: usize = 4096;

pub(super) fn parse_budget(text: &str) -> std::result::Result<Budget, String> {
    text.parse().map_err(|e: Error| match e.advice() {
        Some(hint) => format!("{e}: expected {hint}"),
        None => e.to_string(),
    })
}

pub(super) fn parse_window(text: &str) -> std::result::Result<usize, String> {
    match parse_count(text) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number of at least 1".to_string()),
    }
}

fn parse_temperature(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        _ => Err("expected a number of at least 0".to_string()),
    }
}

fn parse_top_p(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("expected a number above 0 and at most 1".to_string()),
    }
}

/// Runs `run`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_model_device("run")?;
    args.reading.check(device.as_ref())?;
    let decoder = open_model(&args.model, log)?;
    let device = device_for(device, &decoder, global)?;
    let turns = Turns::open(args, &decoder, log)?;
    if args.top_p < 1.0 && args.temperature == 0.0 {
        log.warn("--top-p does nothing without --temperature");
    }
    let artifact = args.reading.open(&decoder, log)?;
    let name = args.method.unwrap_or_else(|| default_method(artifact.as_ref()));
    let method = args
        .reading
        .method(name, artifact.as_ref(), &decoder, global.seed)?;
    let options = args
        .reading
        .options(args.budget, artifact.as_ref(), device.as_ref())?;
    let mut session = session_on(args, global, device.as_ref(), &decoder, &method, options, &turns)?;
    if let Some(path) = &args.trace {
        let file = std::fs::File::create(path).map_err(|e| Error::io(path, "write", &e))?;
        session.trace(Box::new(std::io::BufWriter::new(file)));
    }
    let mut talk = Talk {
        args,
        global,
        session,
        turns,
        sampler: Sampler::new(args.temperature, args.top_p, global.seed),
        replies: Vec::new(),
    };
    let stopped = talk.converse()?;
    talk.session.finish_trace()?;
    talk.report(name, device.name())?;
    if stopped {
        Err(Error::interrupted())
    } else {
        Ok(())
    }
}

/// The conversation on a device: caches and selection are there too where the method can, else on the CPU.
fn session_on<'a>(
    args: &Args,
    global: &Global,
    device: &'a dyn Device,
    decoder: &'a Decoder,
    method: &Method,
    options: Options,
    turns: &Turns,
) -> Result<Box<dyn Generate<'a> + 'a>> {
    let Some(driver) = device.cuda() else {
        let capacity = turns.known() + args.max_new.min(RESERVED);
        return Ok(Box::new(Session::new(decoder, method, options, capacity)?));
    };
    let (chat, on_host) = (args.chat, args.reading.on_host());
    let is_resident = !on_host && CudaSession::can(method, &options, chat);
    if !(is_resident || on_host && HostSession::can(method, &options, chat)) {
        global.log().note("the KV cache and the selection are on the CPU");
        let capacity = turns.known() + args.max_new.min(RESERVED);
        let forward = Box::new(CudaForward::new(driver, decoder, global.precision)?);
        return Ok(Box::new(Session::on(forward, method, options, capacity)));
    }
    // Caches on the device do not grow.
    let known = turns.known() + args.max_new;
    let capacity = match args.chat {
        true => known.max(decoder.config.max_position_embeddings),
        false => known,
    };
    let body = Body::load(driver, decoder, global.precision)?;
    if !is_resident {
        global
            .log()
            .note("the KV cache is in the machine's memory, the index on the device");
        return Ok(Box::new(HostSession::new(
            body,
            method,
            options,
            [known, capacity],
        )?));
    }
    Ok(Box::new(CudaSession::new(body, method, options, 1, capacity)?))
}

/// Keys and values of one position, over all layers and KV heads.
fn kv_bytes_per_token(c: &ModelConfig, kv: KvType) -> usize {
    c.n_layers * c.n_kv_heads * kv.bytes_per_position(c.head_dim)
}

/// What one turn gave.
struct Reply {
    ids: Vec<u32>,
    text: String,
    /// Tokens of the turn's prompt.
    prompt_tokens: usize,
    prefill_s: f64,
    decode_s: f64,
    /// Whether a stop token ended it.
    ended: bool,
    /// Whether the user stopped it.
    stopped: bool,
}

impl Reply {
    /// What was said.
    fn without_stop_token(&self) -> &[u32] {
        &self.ids[..self.ids.len() - usize::from(self.ended)]
    }
}

/// A run under way: prompts and replies in turns on one cache; a run without --chat has one turn.
struct Talk<'a> {
    args: &'a Args,
    global: &'a Global,
    session: Box<dyn Generate<'a> + 'a>,
    turns: Turns<'a>,
    sampler: Sampler,
    replies: Vec<Reply>,
}

impl Talk<'_> {
    /// Takes turns until there are no more; returns whether the user stopped it.
    fn converse(&mut self) -> Result<bool> {
        loop {
            match self.turn() {
                Ok(None) => return Ok(false),
                Ok(Some(reply)) => {
                    let stopped = reply.stopped;
                    self.replies.push(reply);
                    if stopped {
                        return Ok(true);
                    }
                }
                // What earlier turns gave is still told.
                Err(e) if e.kind() == Kind::Interrupted && !self.replies.is_empty() => return Ok(true),
                Err(e) => return Err(e),
            }
        }
    }

    /// Feeds the next turn and lets the model reply; `None` at the end.
    fn turn(&mut self) -> Result<Option<Reply>> {
        let log = self.global.log();
        let last = self.replies.last();
        let Some(mut ids) = self.turns.next(last)? else {
            return Ok(None);
        };
        let mut prompt_tokens = ids.len();
        // The last token of a reply was not fed yet, unless the prompt repeats it as a stop token.
        if let Some(reply) = last
            && let Some(id) = reply.ids.last()
        {
            if reply.ended && ids.first() == Some(id) {
                prompt_tokens -= 1;
            } else {
                ids.insert(0, *id);
            }
        }
        let config = self.turns.config();
        let total = (self.session.len() + ids.len()).saturating_add(self.args.max_new);
        if total > config.max_position_embeddings {
            log.warn(&format!(
                "{total} positions are more than the model's context of {}",
                config.max_position_embeddings
            ));
        }
        let chat = self.args.chat;
        if !chat {
            log.note(&format!(
                "prefill: {} tokens, {} of KV cache",
                ids.len(),
                size(ids.len() * kv_bytes_per_token(config, self.session.kv_type()))
            ));
        }
        let mut reply = self.generate(&ids)?;
        reply.prompt_tokens = prompt_tokens;
        if chat {
            log.note(&format!(
                "turn {}: {prompt_tokens} tokens in {:.2} s, {} tokens out in {:.2} s",
                self.replies.len() + 1,
                reply.prefill_s,
                reply.ids.len(),
                reply.decode_s
            ));
        }
        Ok(Some(reply))
    }

    /// Runs the prompt and decodes until a stop token, the limit or an interrupt, showing the text.
    fn generate(&mut self, prompt: &[u32]) -> Result<Reply> {
        let show = |text: &str| match text {
            "" => Ok(()),
            _ if self.global.json => Ok(()),
            text => print(text),
        };
        let mut stream = TextStream::new(self.turns.tokenizer());
        let start = Instant::now();
        let logits = self.session.prefill(prompt)?;
        let mut next = self.sampler.next(logits.as_slice().unwrap_or(&[]));
        let prefill_s = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let mut ids = Vec::new();
        let (mut ended, mut stopped) = (false, false);
        while ids.len() < self.args.max_new {
            ids.push(next);
            show(&stream.push(next)?)?;
            ended = !self.args.ignore_eos && self.session.is_stop_token(next);
            if ended || ids.len() == self.args.max_new {
                break;
            }
            stopped = interrupt::requested();
            if stopped {
                break;
            }
            next = self.session.next(next, &mut self.sampler)?;
        }
        show(&stream.finish()?)?;
        show("\n")?;
        Ok(Reply {
            ids,
            text: stream.text().to_string(),
            prompt_tokens: prompt.len(),
            prefill_s,
            decode_s: start.elapsed().as_secs_f64(),
            ended,
            stopped,
        })
    }

    /// Says what all turns took, and prints the document of --json.
    fn report(&self, name: MethodName, device: &str) -> Result<()> {
        let Self { session, replies, .. } = self;
        let read = session.kv_read_fraction()?;
        let ids: Vec<u32> = replies.iter().flat_map(|r| r.ids.iter().copied()).collect();
        let prefill_s: f64 = replies.iter().fold(0.0, |sum, r| sum + r.prefill_s);
        let decode_s: f64 = replies.iter().fold(0.0, |sum, r| sum + r.decode_s);
        // The first token of a reply comes from the prefill; each decode step makes one more.
        let steps: usize = replies.iter().map(|r| r.ids.len().saturating_sub(1)).sum();
        let tokens_per_s = if steps > 0 { steps as f64 / decode_s } else { 0.0 };
        self.global.log().note(&format!(
            "{}: {} tokens, prefill {prefill_s:.2} s, decode {decode_s:.2} s ({tokens_per_s:.1} tokens/s), {:.1} % of the KV rows read, index {} beside {} of KV",
            name.as_str(),
            ids.len(),
            100.0 * read,
            size(session.index_bytes()),
            size(session.kv_bytes()),
        ));
        if !self.global.json {
            return Ok(());
        }
        let texts: Vec<&str> = replies.iter().map(|r| r.text.as_str()).collect();
        let mut result = json!({
            "ids": ids,
            "text": self.turns.tokenizer().map_or(String::new(), |_| texts.join("\n")),
            "method": name.as_str(),
            "budget": self.args.budget.value(),
            "prompt_tokens": replies.iter().map(|r| r.prompt_tokens).sum::<usize>(),
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "tokens_per_s": tokens_per_s,
            "kv_read_fraction": read,
            "exact_dot_fraction": session.exact_dot_fraction()?,
            "bypass_fraction": session.bypass_fraction()?,
            "index_bytes": session.index_bytes(),
            "kv_bytes": session.kv_bytes(),
            "device": device,
        });
        if self.args.chat {
            let turn = |r: &Reply| {
                json!({
                    "ids": r.ids,
                    "text": r.text,
                    "prompt_tokens": r.prompt_tokens,
                    "prefill_s": r.prefill_s,
                    "decode_s": r.decode_s,
                })
            };
            result["turns"] = replies.iter().map(turn).collect();
        }
        print_json(&result)
    }
}

/// Opens an artifact and checks that it fits the model.
fn open_artifact(path: &std::path::Path, decoder: &Decoder, force: bool, log: Log) -> Result<Artifact> {
    let artifact = Artifact::open(path)?;
    let c = &decoder.config;
    let own = Sizes {
        n_layers: c.n_layers,
        n_heads: c.n_heads,
        n_kv_heads: c.n_kv_heads,
        head_dim: c.head_dim,
    };
    let fingerprint = decoder.checkpoint.fingerprint(c)?;
    if let Err(e) = artifact.check_model(&fingerprint) {
        if artifact.sizes != own {
            return Err(e);
        }
        if !force {
            return Err(
                e.hint("calibrate this model; --force uses the artifact all the same, since its sizes fit")
            );
        }
        log.warn(&format!("{e}; used all the same because of --force"));
    }
    Ok(artifact)
}
