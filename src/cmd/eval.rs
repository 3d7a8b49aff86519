//! `kvsmith eval`: what methods lose against full attention.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::run::{Reading, parse_budget, parse_window};
use super::{open_model, print, print_json};
use crate::artifact::Artifact;
use crate::cli::{Global, parse_count};
use crate::corpus::{self, Corpus};
use crate::error::{Error, Result};
use crate::method::{self, Method, MethodName};
use crate::model::Decoder;
use crate::model::tokenizer::Tokenizer;
use crate::progress::Log;
use crate::runner::budget::Budget;
use crate::runner::eval::{Panel, Report, Variant};

/// Arguments of `eval`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens", "needles"]).required(true)))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Text files: .txt is one document, .jsonl one per line (field `text`)
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,
    /// Token ids instead of text: a JSON array of arrays, one per document
    #[arg(long, value_name = "FILE.json")]
    tokens: Option<PathBuf>,
    /// Questions instead of text: JSON lines {prompt, answer} or {prompt_tokens, answer_tokens}
    #[arg(long, value_name = "F.jsonl")]
    needles: Option<PathBuf>,
    /// Methods to hold against full attention
    #[arg(long, value_name = "A,B", value_delimiter = ',', required = true, value_enum)]
    methods: Vec<MethodName>,
    /// Budgets of each method: fractions of the context, or numbers of positions
    #[arg(long, value_name = "X,Y", value_delimiter = ',', default_value = "0.06", value_parser = parse_budget)]
    budgets: Vec<Budget>,
    /// Last tokens of each block that are fed one by one
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse_window)]
    decode: usize,
    /// Report each layer and KV head
    #[arg(long)]
    per_head: bool,
    /// Longest block (default: 16384, or the model's longest context if that is less)
    #[arg(long, value_name = "N", value_parser = parse_count)]
    seq_len: Option<usize>,
    /// Most tokens of text
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = parse_count)]
    max_tokens: usize,
    /// Tokens of random UUIDs to add
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = parse_count)]
    uuid_tokens: usize,
    #[command(flatten)]
    reading: Reading,
}

/// Tokens that an answer may take beyond its own, for tokens without text.
const SLACK: usize = 8;

/// Runs `eval`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.cpu_only("eval")?;
    let decoder = open_model(&args.model, log)?;
    let artifact = args.reading.open(&decoder, log)?;
    let methods = args.methods.iter().map(|name| {
        let made = args
            .reading
            .method(*name, artifact.as_ref(), &decoder, global.seed);
        made.map(|method| (*name, method))
    });
    let methods: Vec<(MethodName, Method)> = methods.collect::<Result<_>>()?;
    let pairs: Vec<(MethodName, &Method, Budget)> = methods
        .iter()
        .flat_map(|(name, method)| args.budgets.iter().map(move |b| (*name, method, *b)))
        .collect();
    let variants = pairs.iter().map(|(_, method, budget)| Variant {
        method,
        budget: *budget,
    });
    let options = args.reading.options(Budget::Fraction(1.0), artifact.as_ref())?;
    let mut panel = Panel::new(&decoder, variants.collect(), options)?;
    let found = match &args.needles {
        Some(path) => needles(args, path, &decoder, &mut panel, log)?,
        None => blocks(args, global, &decoder, &mut panel)?,
    };
    let rows: Vec<Value> = pairs
        .iter()
        .zip(&panel.reports)
        .map(|((name, _, budget), report)| row(args, *name, *budget, report, artifact.as_ref()))
        .collect::<Result<_>>()?;
    if global.json {
        let mut out = json!({ "device": device, "rows": rows });
        if let (Some(out), Some(found)) = (out.as_object_mut(), found.as_object()) {
            out.extend(found.clone());
        }
        return print_json(&out);
    }
    print(&table(&rows, args.needles.is_some()))
}

/// Text or tokens, block by block; what was measured on.
fn blocks(args: &Args, global: &Global, decoder: &Decoder, panel: &mut Panel) -> Result<Value> {
    let log = global.log();
    let source = match &args.tokens {
        Some(path) => corpus::Source::Tokens(path.clone()),
        None => corpus::Source::Text(args.text.clone()),
    };
    let options = corpus::Options {
        seq_len: args.seq_len,
        max_tokens: args.max_tokens,
        uuid_tokens: args.uuid_tokens,
        holdout: 0.0,
        seed: global.seed,
    };
    let corpus = Corpus::load(&args.model, &decoder.config, &source, &options)?;
    decoder.check_ids(&corpus.ids)?;
    let usable: Vec<_> = (0..corpus.n_blocks())
        .map(|b| corpus.block(b))
        .filter(|b| b.len() > 1)
        .collect();
    if usable.is_empty() {
        return Err(Error::failed("no block has more than one token").hint("give more text"));
    }
    let steps: usize = usable.iter().map(|b| args.decode.min(b.len() - 1)).sum();
    log.note(&format!(
        "evaluating {} tokens in {} blocks, {steps} of them decoded",
        corpus.n_tokens(),
        usable.len()
    ));
    let progress = log.progress(steps as u64, "steps");
    for (i, block) in usable.iter().enumerate() {
        progress.stage(format!("block {} of {}", i + 1, usable.len()));
        panel.block(&corpus.ids[block.clone()], args.decode, &mut || {
            progress.advance(1)
        })?;
    }
    drop(progress);
    Ok(json!({ "tokens": corpus.n_tokens(), "blocks": usable.len(), "steps": steps }))
}

/// A question of a needle file.
struct Needle {
    prompt: Vec<u32>,
    answer: Answer,
}

enum Answer {
    Text(String),
    Ids(Vec<u32>),
}

impl Needle {
    /// # Errors
    /// A line that is neither of the two forms, or without a prompt or an answer.
    fn parse(line: &str, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let value: Value =
            serde_json::from_str(line).map_err(|e| Error::failed(format!("not a JSON object: {e}")))?;
        let text = |key: &str| value.get(key).and_then(Value::as_str);
        let ids = |key: &str| serde_json::from_value::<Vec<u32>>(value.get(key)?.clone()).ok();
        let needle = match (text("prompt"), text("answer")) {
            (Some(prompt), Some(answer)) => {
                let tokenizer = tokenizer.ok_or_else(|| {
                    Error::failed("the model has no tokenizer.json for a prompt of text")
                        .hint("give prompt_tokens and answer_tokens")
                })?;
                Self {
                    prompt: tokenizer.encode(prompt)?,
                    answer: Answer::Text(answer.trim().to_string()),
                }
            }
            _ => match (ids("prompt_tokens"), ids("answer_tokens")) {
                (Some(prompt), Some(answer)) => Self {
                    prompt,
                    answer: Answer::Ids(answer),
                },
                _ => {
                    return Err(Error::failed("the line has no prompt with its answer")
                        .hint("{\"prompt\": .., \"answer\": ..} or {\"prompt_tokens\": [..], \"answer_tokens\": [..]}"));
                }
            },
        };
        let empty = match &needle.answer {
            Answer::Text(text) => text.is_empty(),
            Answer::Ids(ids) => ids.is_empty(),
        };
        if empty || needle.prompt.is_empty() {
            return Err(Error::failed("the prompt or the answer is empty"));
        }
        Ok(needle)
    }

    /// Whether what was said starts with the answer; `None` while it may still come to that.
    fn found(&self, said: &[u32], tokenizer: Option<&Tokenizer>) -> Result<Option<bool>> {
        match (&self.answer, tokenizer) {
            (Answer::Text(answer), Some(tokenizer)) => {
                let text = tokenizer.decode(said)?;
                let text = text.trim_start().trim_end_matches('\u{fffd}');
                Ok(match text.starts_with(answer) {
                    true => Some(true),
                    false if answer.starts_with(text.trim_end()) => None,
                    false => Some(false),
                })
            }
            (Answer::Ids(answer), _) => {
                let n = said.len().min(answer.len());
                Ok(match said[..n] == answer[..n] {
                    false => Some(false),
                    true if n == answer.len() => Some(true),
                    true => None,
                })
            }
            (Answer::Text(_), None) => Ok(Some(false)),
        }
    }
}

/// Questions, one by one; what was measured on.
fn needles(args: &Args, path: &Path, decoder: &Decoder, panel: &mut Panel, log: Log) -> Result<Value> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", &e))?;
    let tokenizer = match args.model.join("tokenizer.json").exists() {
        true => Some(Tokenizer::open(&args.model, &decoder.config)?),
        false => None,
    };
    let tokenizer = tokenizer.as_ref();
    let mut all = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty()) {
        let context = |e: Error| e.context(format!("{}, line {}", path.display(), i + 1));
        let needle = Needle::parse(line, tokenizer).map_err(context)?;
        decoder.check_ids(&needle.prompt).map_err(context)?;
        all.push(needle);
    }
    if all.is_empty() {
        return Err(Error::failed(format!("{} has no line", path.display())));
    }
    let longest = all.iter().map(|n| n.prompt.len()).max().unwrap_or(0);
    if longest > decoder.config.max_position_embeddings {
        log.warn(&format!(
            "prompts of up to {longest} tokens are longer than the model's context of {}",
            decoder.config.max_position_embeddings
        ));
    }
    let progress = log.progress(all.len() as u64, "needles");
    let mut full = 0;
    for needle in &all {
        let own = match &needle.answer {
            Answer::Text(text) => text.len(),
            Answer::Ids(ids) => ids.len(),
        };
        let found = |said: &[u32]| needle.found(said, tokenizer);
        full += usize::from(panel.needle(&needle.prompt, own + SLACK, &found)?);
        progress.advance(1);
    }
    drop(progress);
    let accuracy = full as f64 / all.len() as f64;
    Ok(json!({ "needles": all.len(), "full_needle_accuracy": accuracy }))
}

/// One row of the result.
fn row(
    args: &Args,
    name: MethodName,
    budget: Budget,
    report: &Report,
    artifact: Option<&Artifact>,
) -> Result<Value> {
    let on_text = args.needles.is_none();
    let scores = report.scores();
    let text = |x: f64| if on_text { json!(x) } else { Value::Null };
    let accuracy = match report.needles {
        (0, _) => Value::Null,
        (asked, found) => json!(found as f64 / asked as f64),
    };
    let mut row = json!({
        "method": name.as_str(),
        "budget": budget.value(),
        "recall": text(scores.recall),
        "mass": text(scores.mass),
        "output_error": text(scores.output_error),
        "kl": text(report.kl()),
        "needle_accuracy": accuracy,
        "kv_read_fraction": report.kv_read_fraction(),
        "exact_dot_fraction": report.exact_dot_fraction(),
        "bypass_fraction": report.bypass_fraction(),
        "index_bits_per_token": report.index_bits_per_token(),
        "constant_bytes": method::constant_bytes(name, artifact)?,
    });
    if args.per_head && on_text {
        let heads = report.heads.iter().enumerate().flat_map(|(layer, heads)| {
            heads.iter().enumerate().map(move |(head, scores)| {
                let s = scores.mean();
                json!({
                    "layer": layer, "kv_head": head,
                    "recall": s.recall, "mass": s.mass, "output_error": s.output_error,
                })
            })
        });
        row["per_head"] = heads.collect();
    }
    Ok(row)
}

/// The rows for people.
fn table(rows: &[Value], needles: bool) -> String {
    let measured: &[(&str, &str)] = match needles {
        true => &[("needle_accuracy", "needles")],
        false => &[
            ("recall", "recall"),
            ("mass", "mass"),
            ("output_error", "error"),
            ("kl", "KL nats"),
        ],
    };
    let mut out = format!("{:<10} {:>7}", "method", "budget");
    for (_, title) in measured {
        out += &format!(" {title:>8}");
    }
    out += &format!(" {:>7} {:>7} {:>10}\n", "reads", "dots", "index bits");
    let number = |row: &Value, key: &str| row[key].as_f64().unwrap_or(0.0);
    for row in rows {
        let name = row["method"].as_str().unwrap_or("");
        out += &format!("{name:<10} {:>7}", number(row, "budget"));
        for (key, _) in measured {
            out += &format!(" {:>8.4}", number(row, key));
        }
        out += &format!(
            " {:>6.1}% {:>6.1}% {:>10.1}\n",
            100.0 * number(row, "kv_read_fraction"),
            100.0 * number(row, "exact_dot_fraction"),
            number(row, "index_bits_per_token")
        );
        for head in row["per_head"].as_array().into_iter().flatten() {
            let place = format!("  layer {} head {}", head["layer"], head["kv_head"]);
            out += &format!("{place:<18}");
            for key in ["recall", "mass", "output_error"] {
                out += &format!(" {:>8.4}", number(head, key));
            }
            out += "\n";
        }
    }
    out
}
