//! `kvsmith run`: generation with exact or sparse attention.

use std::path::PathBuf;
use std::time::Instant;

use serde_json::json;

use super::{open_model, print, print_json};
use crate::artifact::Artifact;
use crate::cli::{Global, parse_count};
use crate::corpus::read_tokens;
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::method::{Method, MethodName, Params, default_method};
use crate::model::tokenizer::{TextStream, Tokenizer};
use crate::model::{Decoder, ModelConfig};
use crate::progress::{Log, size};
use crate::runner::budget::Budget;
use crate::runner::kv::KvType;
use crate::runner::sample::Sampler;
use crate::runner::{Options, Session};

/// Arguments of `run`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("input").required(true)))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// What `kvsmith calibrate` made for this model
    #[arg(long, value_name = "ART.safetensors")]
    artifact: Option<PathBuf>,
    /// Prompt text
    #[arg(long, value_name = "T", group = "input")]
    prompt: Option<String>,
    /// File with the prompt text
    #[arg(long, value_name = "F", group = "input")]
    prompt_file: Option<PathBuf>,
    /// Prompt as token ids: a JSON array with one array
    #[arg(long, value_name = "F", group = "input")]
    tokens: Option<PathBuf>,
    /// How decode steps choose what they read (default: a2ats, where the artifact has it, else full)
    #[arg(long, value_enum)]
    method: Option<MethodName>,
    /// Positions chosen per KV head and step: a fraction of the context (up to 1) or a whole number
    #[arg(long, value_name = "X", default_value = "0.06", value_parser = parse_budget)]
    budget: Budget,
    /// Most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = parse_count)]
    max_new: usize,
    /// First positions that are always read
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = parse_count)]
    sinks: usize,
    /// Last positions that are always read, the current one included
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse_window)]
    window: usize,
    /// Element type of the KV cache
    #[arg(long, value_enum, default_value_t = KvType::F32)]
    kv: KvType,
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
    methods: Params,
    /// Use an artifact of another model, if its sizes fit
    #[arg(long)]
    force: bool,
}

/// Generated positions that the caches have room for from the start; they grow beyond.
const RESERVED: usize = 4096;

fn parse_budget(text: &str) -> std::result::Result<Budget, String> {
    text.parse().map_err(|e: Error| match e.advice() {
        Some(hint) => format!("{e}: expected {hint}"),
        None => e.to_string(),
    })
}

fn parse_window(text: &str) -> std::result::Result<usize, String> {
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
    let device = global.cpu_only("run")?;
    let decoder = open_model(&args.model, log)?;
    let (ids, tokenizer) = prompt(args, &decoder, log)?;
    decoder.check_ids(&ids)?;
    let total = ids.len().saturating_add(args.max_new);
    if args.top_p < 1.0 && args.temperature == 0.0 {
        log.warn("--top-p does nothing without --temperature");
    }
    if total > decoder.config.max_position_embeddings {
        log.warn(&format!(
            "{total} positions are more than the model's context of {}",
            decoder.config.max_position_embeddings
        ));
    }
    let artifact = args
        .artifact
        .as_ref()
        .map(|p| open_artifact(p, &decoder, args.force, log))
        .transpose()?;
    let name = args.method.unwrap_or_else(|| default_method(artifact.as_ref()));
    let method = Method::new(
        name,
        artifact.as_ref(),
        &decoder.rope,
        decoder.config.head_dim,
        &args.methods,
        global.seed,
    )?;
    let options = Options {
        sinks: args.sinks,
        window: args.window,
        budget: args.budget,
        kv: args.kv,
        center: args.methods.selfindex.center(artifact.as_ref())?,
    };
    let mut session = Session::new(&decoder, &method, options, ids.len() + args.max_new.min(RESERVED))?;
    if let Some(path) = &args.trace {
        let file = std::fs::File::create(path).map_err(|e| Error::io(path, "write", &e))?;
        session.trace(Box::new(std::io::BufWriter::new(file)));
    }
    log.note(&format!(
        "prefill: {} tokens, {} of KV cache",
        ids.len(),
        size(ids.len() * kv_bytes_per_token(&decoder.config, args.kv))
    ));
    let mut stream = TextStream::new(tokenizer.as_ref());
    let generation = generate(args, global, &mut session, &ids, &mut stream)?;
    session.finish_trace()?;
    let Generation {
        ids: generated,
        prefill_s,
        decode_s,
        stopped,
    } = generation;
    // The first token comes from the prefill; each decode step makes one more.
    let steps = generated.len().saturating_sub(1);
    let tokens_per_s = if steps > 0 { steps as f64 / decode_s } else { 0.0 };
    log.note(&format!(
        "{}: {} tokens, prefill {prefill_s:.2} s, decode {decode_s:.2} s ({tokens_per_s:.1} tokens/s), {:.1} % of the KV rows read, index {} beside {} of KV",
        name.as_str(),
        generated.len(),
        100.0 * session.kv_read_fraction(),
        size(session.index_bytes()),
        size(session.kv_bytes()),
    ));
    if global.json {
        print_json(&json!({
            "ids": generated,
            "text": stream.text(),
            "method": name.as_str(),
            "budget": args.budget.value(),
            "prompt_tokens": ids.len(),
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "tokens_per_s": tokens_per_s,
            "kv_read_fraction": session.kv_read_fraction(),
            "exact_dot_fraction": session.exact_dot_fraction(),
            "bypass_fraction": session.bypass_fraction(),
            "index_bytes": session.index_bytes(),
            "kv_bytes": session.kv_bytes(),
            "device": device,
        }))?;
    }
    if stopped {
        Err(Error::interrupted())
    } else {
        Ok(())
    }
}

/// Keys and values of one position, over all layers and KV heads.
fn kv_bytes_per_token(c: &ModelConfig, kv: KvType) -> usize {
    c.n_layers * c.n_kv_heads * kv.bytes_per_position(c.head_dim)
}

/// What a generation gave.
struct Generation {
    ids: Vec<u32>,
    prefill_s: f64,
    decode_s: f64,
    /// Whether the user stopped it.
    stopped: bool,
}

/// Runs the prompt and decodes until a stop token, the limit or an interrupt, showing the text.
fn generate(
    args: &Args,
    global: &Global,
    session: &mut Session,
    prompt: &[u32],
    stream: &mut TextStream,
) -> Result<Generation> {
    let show = |text: &str| match text {
        "" => Ok(()),
        _ if global.json => Ok(()),
        text => print(text),
    };
    let mut sampler = Sampler::new(args.temperature, args.top_p, global.seed);
    let start = Instant::now();
    let mut logits = session.prefill(prompt)?;
    let prefill_s = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let mut ids = Vec::new();
    let mut stopped = false;
    while ids.len() < args.max_new {
        let next = sampler.next(logits.as_slice().unwrap_or(&[]));
        ids.push(next);
        show(&stream.push(next)?)?;
        let ended = !args.ignore_eos && session.is_stop_token(next);
        if ended || ids.len() == args.max_new {
            break;
        }
        stopped = interrupt::requested();
        if stopped {
            break;
        }
        logits = session.step(next)?;
    }
    show(&stream.finish()?)?;
    show("\n")?;
    Ok(Generation {
        ids,
        prefill_s,
        decode_s: start.elapsed().as_secs_f64(),
        stopped,
    })
}

/// The prompt's ids, and the tokenizer where the model has one.
fn prompt(args: &Args, decoder: &Decoder, log: Log) -> Result<(Vec<u32>, Option<Tokenizer>)> {
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", &e))?,
        (None, None) => {
            let path = args.tokens.as_deref().unwrap_or(std::path::Path::new(""));
            let mut documents = read_tokens(path)?;
            let (Some(ids), true) = (documents.pop(), documents.is_empty()) else {
                return Err(Error::failed(format!(
                    "{} must hold exactly one document",
                    path.display()
                )));
            };
            if !args.model.join("tokenizer.json").exists() {
                return Ok((ids, None));
            }
            let tokenizer = Tokenizer::open(&args.model, &decoder.config)
                .map_err(|e| log.warn(&format!("{e}; the text is not shown")))
                .ok();
            return Ok((ids, tokenizer));
        }
    };
    let tokenizer = Tokenizer::open(&args.model, &decoder.config)?;
    let ids = tokenizer.encode(&text)?;
    if ids.is_empty() {
        return Err(Error::failed("the prompt has no tokens").hint("give some text"));
    }
    Ok((ids, Some(tokenizer)))
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
