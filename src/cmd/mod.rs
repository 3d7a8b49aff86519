//! The subcommands, one file each: a command checks its arguments, calls the modules below, and reports the result.

pub mod args;
pub mod bench;
pub mod calibrate;
pub mod completions;
pub mod dump;
pub mod eval;
pub mod examples;
pub mod flags;
pub mod gpu_check;
pub mod inspect;
pub mod merge;
pub mod moments;
mod named;
mod output;
pub mod pack;
mod parameters;
pub mod plan;
mod reading;
pub mod removed;
pub mod report;
pub mod run;
pub mod sections;
mod share;
pub mod signals;
pub mod status;
mod task;
pub mod terminal;
pub mod tune;
pub mod verdict;

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use serde_json::{Value, json};

use crate::cmd::terminal::{Log, with_flags};
use crate::compute::cpu::Cpu;
use crate::compute::device::Device;
use crate::corpus::{Corpus, Reserve};
use crate::error::{Error, Result};
use crate::model::{Decoder, Model, ModelConfig};
use crate::runner::verdict::Wanted;
use crate::wording::{counted, harmless, size};
use args::{Global, Input};

/// The version of the documents of `--json`; within a version, members may be added, but none changes its meaning.
const SCHEMA: u32 = 1;

/// Prints the one document of `--json`: what every document has, and `members`. Control characters that JSON leaves
/// unescaped, such as U+009B, are escaped too.
fn print_json(global: &Global, members: &Value) -> Result<()> {
    global.printed.store(true, Ordering::Relaxed);
    print_document(&global.command, members)
}

fn print_document(command: &str, members: &Value) -> Result<()> {
    print(&document(command, members))
}

/// Returns a document on a line of its own: what every document has, and `members`.
fn document(command: &str, members: &Value) -> String {
    let mut document = json!({
        "schema": SCHEMA,
        "command": command,
        "version": env!("CARGO_PKG_VERSION"),
    });
    merge(&mut document, members);
    let mut text = String::new();
    for c in document.to_string().chars() {
        if c.is_control() {
            text += &format!("\\u{:04x}", u32::from(c))
        } else {
            text.push(c)
        }
    }
    text + "\n"
}

/// Prints to stdout, which may be full or closed. Control characters are escaped only if stdout is a terminal, which
/// would obey them: a file or a pipe gets the text as it is.
fn print(text: &str) -> Result<()> {
    use std::io::{IsTerminal, Write};
    let mut out = std::io::stdout().lock();
    let text = if out.is_terminal() {
        harmless(text)
    } else {
        text.into()
    };
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| Error::stdout(&e))
}

/// Prints the document of a command that failed, unless the command has printed one: an interrupted command may already
/// have reported its results.
///
/// # Errors
/// Stdout is full or closed.
pub fn print_failure(global: &Global, error: &Error) -> Result<()> {
    if !global.json || global.printed.load(Ordering::Relaxed) {
        return Ok(());
    }
    print_json(global, &failure(error))
}

fn failure(error: &Error) -> Value {
    json!({ "error": {
        "kind": error.kind().name(), "message": with_flags(&error.to_string()), "hint": error.advice().map(with_flags),
        "exit_code": error.exit_code(),
    }})
}

/// Prints the document of `--json` for a command line that could not be read.
///
/// # Errors
/// Stdout is full or closed.
pub fn print_refusal(command: &str, error: &Error) -> Result<()> {
    print_document(command, &failure(error))
}

/// Notes what a command has written, and prints its document of `--json`.
fn finish(global: &Global, note: &str, output: &Path, members: &Value) -> Result<()> {
    global.log().note(note);
    if !global.json {
        return Ok(());
    }
    let mut document = json!({ "output": output.display().to_string() });
    merge(&mut document, members);
    print_json(global, &document)
}

/// Borrows paths.
fn paths(owned: &[PathBuf]) -> Vec<&Path> {
    owned.iter().map(PathBuf::as_path).collect()
}

/// Adds the members of an object to another.
fn merge(object: &mut Value, more: &Value) {
    if let (Some(object), Some(more)) = (object.as_object_mut(), more.as_object()) {
        object.extend(more.clone());
    }
}

/// Opens a model and logs its sizes.
fn open_model(path: &Path, log: Log) -> Result<Model> {
    let model = Model::open(path)?;
    let c = model.config();
    log.note(&format!(
        "model: {}, {}, {} query and {} KV heads of {} channels, {} of weights",
        c.model_type,
        counted(c.n_layers(), "layer"),
        c.n_heads,
        c.n_kv_heads,
        c.head_dim,
        size(model.decoder.checkpoint.total_bytes())
    ));
    Ok(model)
}

/// Reads the calibration input and logs its length.
fn load_corpus(model: &Model, input: &Input, global: &Global) -> Result<Corpus> {
    load_texts(&model.path, model.config(), input, None, global).map(|(corpus, _)| corpus)
}

/// Reads the calibration input and what a verdict wants beyond it, and logs the length of the former.
fn load_texts(
    dir: &Path,
    config: &ModelConfig,
    input: &Input,
    wanted: Option<Wanted>,
    global: &Global,
) -> Result<(Corpus, Reserve)> {
    let log = global.log();
    input.text.warn_of_field(log);
    let options = input.options(global.seed);
    let beyond = wanted.map(|wanted| wanted.beyond(options.block_length(config)));
    let (corpus, reserve) =
        Corpus::load_with_reserve(dir, config, &input.source(), &options, beyond.unwrap_or_default())?;
    config.check_ids(&reserve.text)?;
    config.check_ids(&reserve.uuids)?;
    config.check_ids(&corpus.ids)?;
    let held_out = corpus.n_held_out();
    log.note(&format!(
        "input: {} in {} of at most {}; {} held out",
        counted(corpus.n_tokens(), "token"),
        counted(corpus.n_blocks(), "block"),
        counted(corpus.seq_len, "token"),
        counted(held_out, "token")
    ));
    let manifest = corpus.manifest();
    log.note(&manifest.used());
    for line in manifest.used_by_document() {
        log.detail(&line);
    }
    let text = corpus.n_text_tokens();
    if input.tokens.is_none() && text < input.max_tokens && input.max_tokens < u32::MAX as usize {
        log.note(&format!(
            "the text has only {text} tokens, fewer than --max-tokens {}",
            input.max_tokens
        ));
    }
    if reserve.is_cut {
        let measured = match reserve.text.len() {
            0 => String::new(),
            n => format!("; {n} tokens of it are measured on"),
        };
        log.note(&format!(
            "the text goes on after --max-tokens {}: nothing is fitted to the rest{measured}",
            input.max_tokens
        ));
    }
    if held_out * 4 > corpus.n_tokens() {
        log.note("more than a quarter of the tokens is held out, because whole blocks are; to hold out less, lower --holdout or --seq-len");
    }
    let longest = corpus.longest_block();
    if longest > config.max_position_embeddings {
        log.warn(&format!(
            "blocks of {longest} tokens are longer than the model's context of {} tokens; lower --seq-len",
            config.max_position_embeddings
        ));
    }
    Ok((corpus, reserve))
}

/// Warns of a WRoPE position that does not occur.
fn check_wrope_position(given: Option<usize>, config: &ModelConfig, log: Log) {
    let context = config.max_position_embeddings;
    if let Some(position) = given.filter(|position| *position >= context) {
        log.warn(&format!(
            "--wrope-position {position} is outside the model's context of {context} tokens; half of the context is a good choice"
        ));
    }
}

/// Returns the device for a command that does all its work on the model's device: the CPU if the GPU cannot run the
/// model.
fn device_for(device: Box<dyn Device>, decoder: &Decoder, global: &Global) -> Result<Box<dyn Device>> {
    let can_run = global.machine(device.as_ref(), &global.log()).can_run(decoder)?;
    Ok(if can_run { device } else { Box::new(Cpu) })
}
