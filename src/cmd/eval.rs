//! `kvsmith eval`: measures what methods lose against full attention.

pub mod needles;

use std::path::PathBuf;

use serde_json::{Value, json};

use super::args::Global;
use super::reading::{Reading, parse_budget};
use super::{device_for, forward_on, merge, open_model, print, print_json};
use crate::artifact::Artifact;
use crate::corpus::{self, Corpus};
use crate::error::{Error, Kind, Result};
use crate::flags::{parse_count, parse_positive_count};
use crate::kv::Budget;
use crate::method::Method;
use crate::method::registry::{MethodName, constant_bytes};
use crate::model::Decoder;
use crate::runner::eval::{Evaluation, Variant, VariantReport, decoded, turns_of};

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
    /// Questions instead of text: JSON lines {prompt, answer} or {prompt_tokens, answer_tokens}, or
    /// conversations of such turns, {turns: [..]}
    #[arg(long, value_name = "F.jsonl")]
    needles: Option<PathBuf>,
    /// Methods to hold against full attention
    #[arg(long, value_name = "A,B", value_delimiter = ',', required = true, value_enum)]
    methods: Vec<MethodName>,
    /// Budgets of each method: fractions of the context, or numbers of positions
    #[arg(long, value_name = "X,Y", value_delimiter = ',', default_value = "0.06", value_parser = parse_budget)]
    budgets: Vec<Budget>,
    /// Last tokens of each turn that are fed one by one
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse_positive_count)]
    decode: usize,
    /// Equal turns that each block of text is cut into
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = parse_positive_count, conflicts_with = "needles")]
    turns: usize,
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

/// Runs `eval`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_model_device("eval")?;
    args.reading.check(device.as_ref())?;
    let decoder = open_model(&args.model, log)?;
    let device = device_for(device, &decoder, global)?;
    let artifact = args.reading.open(&decoder, log)?;
    let method = |name: &MethodName| args.reading.method(*name, artifact.as_ref(), &decoder, global);
    let methods: Vec<Box<dyn Method>> = args.methods.iter().map(method).collect::<Result<_>>()?;
    let variants = methods.iter().flat_map(|method| {
        args.budgets.iter().map(|budget| Variant {
            method: method.as_ref(),
            budget: *budget,
        })
    });
    let options = args
        .reading
        .options(Budget::Fraction(1.0), artifact.as_ref(), device.as_ref())?;
    let mut evaluation = Evaluation::new(
        forward_on(device.as_ref(), &decoder, global)?,
        variants.collect(),
        options,
    );
    let (found, stopped) = match &args.needles {
        Some(path) => needles::run(path, &args.model, &decoder, &mut evaluation, log)?,
        None => blocks(args, global, &decoder, &mut evaluation)?,
    };
    let pairs = args
        .methods
        .iter()
        .flat_map(|name| args.budgets.iter().map(|budget| (*name, *budget)));
    let rows: Vec<Value> = pairs
        .zip(&evaluation.reports)
        .map(|((name, budget), report)| row(args, name, budget, report, artifact.as_ref()))
        .collect::<Result<_>>()?;
    if global.json {
        let mut out = json!({ "device": device.name(), "rows": rows });
        merge(&mut out, &found);
        print_json(&out)?;
    } else {
        print(&table(&rows, args.needles.is_some()))?;
    }
    match stopped {
        true => Err(Error::interrupted()),
        false => Ok(()),
    }
}

/// Tells whether the user stopped the work after `done` steps; a stop before the first step stays an error.
fn is_stopped(result: Result<()>, done: usize) -> Result<bool> {
    match result {
        // What was measured so far is still reported.
        Err(e) if e.kind() == Kind::Interrupted && done > 0 => Ok(true),
        other => other.map(|()| false),
    }
}

/// Evaluates text or tokens block by block; returns how much was evaluated, and whether the user stopped it.
fn blocks(
    args: &Args,
    global: &Global,
    decoder: &Decoder,
    evaluation: &mut Evaluation,
) -> Result<(Value, bool)> {
    let log = global.log();
    let source = match &args.tokens {
        Some(path) => corpus::CorpusSource::Tokens(path.clone()),
        None => corpus::CorpusSource::Text(args.text.clone()),
    };
    let options = corpus::CorpusOptions {
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
        .filter(|b| b.len() / args.turns > 1)
        .collect();
    if usable.is_empty() {
        return Err(match args.turns {
            1 => Error::failed("no block has more than one token").hint("give more text"),
            n => Error::failed(format!("no block has two tokens for each of {n} turns"))
                .hint("give longer documents, or fewer --turns"),
        });
    }
    let turns = |n: usize| turns_of(n, args.turns).map(|turn| decoded(turn.len(), args.decode));
    let steps: usize = usable.iter().flat_map(|b| turns(b.len())).sum();
    log.note(&format!(
        "evaluating {} tokens in {} blocks, {steps} of them decoded",
        corpus.n_tokens(),
        usable.len()
    ));
    let progress = log.progress(steps as u64, "steps");
    let (mut done, mut finished, mut stopped) = (0, 0, false);
    for (i, block) in usable.iter().enumerate() {
        progress.stage(format!("block {} of {}", i + 1, usable.len()));
        let ids = &corpus.ids[block.clone()];
        let result = evaluation.block(ids, args.turns, args.decode, &mut || {
            done += 1;
            progress.advance(1);
        });
        stopped = is_stopped(result, done)?;
        if stopped {
            break;
        }
        finished += 1;
    }
    drop(progress);
    let found =
        json!({ "tokens": corpus.n_tokens(), "blocks": finished, "turns": args.turns, "steps": done });
    Ok((found, stopped))
}

/// Returns the row of one method and budget.
fn row(
    args: &Args,
    name: MethodName,
    budget: Budget,
    report: &VariantReport,
    artifact: Option<&Artifact>,
) -> Result<Value> {
    let on_text = args.needles.is_none();
    let shares = report.shares();
    let mut row = json!({
        "method": name.as_str(),
        "budget": budget.value(),
        "needle_accuracy": report.answers.accuracy(),
        "kv_read_fraction": shares.read,
        "exact_dot_fraction": shares.products,
        "bypass_fraction": shares.bypassed,
        "index_bits_per_token": report.index_bits_per_token(),
        "constant_bytes": constant_bytes(name, artifact)?,
    });
    if on_text {
        merge(&mut row, &json!(report.whole()));
        row["by_turn"] = json!(report.turns);
    } else {
        merge(
            &mut row,
            &json!({ "recall": null, "mass": null, "output_error": null, "kl": null }),
        );
        row["needle_accuracy_by_turn"] = json!(report.answers);
    }
    if args.per_head && on_text {
        let heads = report.heads.iter().enumerate().flat_map(|(layer, heads)| {
            heads.iter().enumerate().map(move |(head, of)| {
                let mut row = json!({ "layer": layer, "kv_head": head });
                merge(&mut row, &json!(of));
                row
            })
        });
        row["per_head"] = heads.collect();
    }
    Ok(row)
}

/// Writes the rows as a table.
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
    let keys: Vec<&str> = measured.iter().map(|(key, _)| *key).collect();
    for row in rows {
        let name = row["method"].as_str().unwrap_or("");
        let place = format!("{name:<10} {:>7}", number(row, "budget"));
        out += &line(&place, row, &keys);
        out += &format!(
            " {:>6.1}% {:>6.1}% {:>10.1}\n",
            100.0 * number(row, "kv_read_fraction"),
            100.0 * number(row, "exact_dot_fraction"),
            number(row, "index_bits_per_token")
        );
        let turns = turn_rows(row);
        for (i, turn) in turns.iter().enumerate().filter(|_| turns.len() > 1) {
            let place = format!("  turn {}", i + 1);
            out += &(line(&place, turn, &keys) + "\n");
        }
        for head in row["per_head"].as_array().into_iter().flatten() {
            let place = format!("  layer {} head {}", head["layer"], head["kv_head"]);
            out += &(line(&place, head, &["recall", "mass", "output_error"]) + "\n");
        }
    }
    out
}

/// Lists the turns of a row, each in the form of a row.
fn turn_rows(row: &Value) -> Vec<Value> {
    let needles = row["needle_accuracy_by_turn"].as_array();
    let needles = needles.map(|turns| turns.iter().map(|x| json!({ "needle_accuracy": x })).collect());
    needles
        .or_else(|| row["by_turn"].as_array().cloned())
        .unwrap_or_default()
}

/// Reads a number of a row, or of a part of one; 0 where it was not measured.
fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(0.0)
}

/// Writes the numbers under `keys` of a row, or of a part of one, after its `place`.
fn line(place: &str, part: &Value, keys: &[&str]) -> String {
    let numbers = keys.iter().map(|key| format!(" {:>8.4}", number(part, key)));
    format!("{place:<18}") + &numbers.collect::<String>()
}
