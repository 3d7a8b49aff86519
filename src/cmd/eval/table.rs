//! What `eval` prints: its rows as tables, with a legend.

use serde_json::{Value, json};

use super::needles::Feeding;
use crate::cmd::terminal::columns;
use crate::method::registry::FULL;
use crate::runner::eval::Answers;
use crate::wording::{counted, wrapped};

/// A column of a table: its title, its width, and what it shows of a row.
type EvalColumn = (&'static str, usize, fn(&Value) -> String);

/// The columns on text.
const ON_TEXT: [EvalColumn; 6] = [
    ("read", 7, |row| share(row, "uncompressed_read_fraction")),
    ("KL nats", 8, |row| decimal(row, "kl")),
    ("95% interval", 16, |row| interval(row, "kl")),
    ("recall", 7, |row| share(row, "recall")),
    ("mass", 7, |row| share(row, "mass")),
    ("error", 7, |row| share(row, "output_error")),
];

/// The columns on needles.
const ON_NEEDLES: [EvalColumn; 3] = [
    ("read", 7, |row| share(row, "uncompressed_read_fraction")),
    ("answered", 8, |row| share(row, "needle_accuracy")),
    ("95% interval", 16, |row| interval(row, "needle_accuracy")),
];

/// The columns that say how much was read, and more of what was lost.
const DETAILS: [EvalColumn; 7] = [
    ("rows", 7, |row| share(row, "kv_read_fraction")),
    ("dots", 7, |row| share(row, "exact_dot_fraction")),
    ("bits", 6, |row| {
        format!("{:.1}", number(row, "index_bits_per_token"))
    }),
    ("top-1", 7, |row| share(row, "top1_equal")),
    ("ppl/full", 8, |row| decimal(row, "perplexity_ratio")),
    ("KL p50", 8, |row| decimal(row, "kl_median")),
    ("KL p99", 8, |row| decimal(row, "kl_p99")),
];

/// A row whose share of the bytes differs from the requested one by more than this fraction of it is marked.
const OFF: f64 = 0.05;

/// Writes the rows as tables; `reads_key` is the key of the bytes that --reads counts, and `questions` says how questions
/// were fed and what full attention answered, if some were asked.
pub fn text(rows: &[Value], questions: Option<(Feeding, &Answers)>, reads_key: &str) -> String {
    let has_choices = rows.iter().any(|row| row["recall"].is_number());
    let (main, details): (&[EvalColumn], &[EvalColumn]) = match questions {
        Some(_) => (&ON_NEEDLES, &DETAILS[..3]),
        None if has_choices => (&ON_TEXT, &DETAILS),
        None => (&ON_TEXT[..3], &DETAILS),
    };
    let (files, flags) = (values_of(rows, "artifact"), values_of(rows, "flags"));
    let place = |row| place(row, &files, &flags);
    let mut out = heading(main);
    let is_full = |row: &Value| row["method"] == FULL.as_str();
    if let Some((_, full)) =
        questions.filter(|_| !rows.iter().any(|row| is_full(row) && !row["budget"].is_null()))
    {
        let whole = json!({ "uncompressed_read_fraction": 1.0, "needle_accuracy": full.accuracy() });
        out += &line(&format!("{:<14} {:>7}", FULL.as_str(), ""), &whole, main);
    }
    for row in rows {
        let least = row["reads_sample"].as_f64().filter(|_| row["budget"].is_null());
        if least.is_some() && is_full(row) {
            continue;
        }
        if let Some(least) = least {
            let target = 100.0 * number(row, "reads_target");
            out += &format!(
                "{}  smallest budget reads {:.1}%, above the target of {target:.1}%\n",
                place(row),
                100.0 * least
            );
            continue;
        }
        out += &line(&place(row), row, main);
        let turns = turn_rows(row);
        for (i, turn) in turns.iter().enumerate().filter(|_| turns.len() > 1) {
            out += &line(&format!("  turn {}", i + 1), turn, main);
        }
        let spans = list(row, "by_position");
        for span in spans.iter().filter(|_| spans.len() > 3) {
            out += &line(&format!("  steps {}-{}", span["first"], span["last"]), span, main);
        }
        for task in list(row, "by_task") {
            let length = task["length"].as_u64().map_or(String::new(), |n| format!(" {n}"));
            let place = format!("  {}{length}", task["task"].as_str().unwrap_or("other"));
            out += &line(&place, &json!({ "needle_accuracy": task["accuracy"] }), main);
        }
        for head in list(row, "per_head") {
            out += &line(
                &format!("  layer {} head {}", head["layer"], head["kv_head"]),
                head,
                main,
            );
        }
    }
    if let Some((feeding, full)) = questions {
        let fed = match feeding {
            Feeding::Decode => "decoded token by token",
            Feeding::Prefill => "prefilled with the prompt, by exact attention",
        };
        out += &format!(
            "{} in {}, {fed}\n",
            counted(full.asked(), "question"),
            counted(full.lines(), "line")
        );
    }
    for row in rows {
        let keys = ["reads_target", "reads_sample", reads_key];
        let [Some(target), Some(sample), Some(read)] = keys.map(|key| row[key].as_f64()) else {
            continue;
        };
        if (read / target - 1.0).abs() > OFF {
            out += &format!(
                "{}: asked for {:.1}%, read {:.1}% ({:.1}% in the search)\n",
                place(row).trim_end(),
                100.0 * target,
                100.0 * read,
                100.0 * sample
            );
        }
    }
    out += "\n";
    out += &heading(details);
    for row in rows.iter().filter(|row| row["kv_read_fraction"].is_number()) {
        out += &line(&place(row), row, details);
    }
    for (i, file) in files.iter().enumerate() {
        out += &format!("\n[{}] {file}", i + 1);
    }
    for (i, flags) in flags.iter().enumerate() {
        out += &format!("\n({}) {flags}", i + 1);
    }
    if !files.is_empty() || !flags.is_empty() {
        out += "\n";
    }
    out + "\n" + &legend(questions.is_some(), has_choices)
}

/// What the columns mean that every table has.
const READ: [(&str, &str); 4] = [
    (
        "read",
        "share of the bytes of all visible keys and values that a step reads, index included",
    ),
    ("rows", "share of the rows of keys and values that a step reads"),
    (
        "dots",
        "share of the keys that are multiplied with the query only to choose",
    ),
    ("bits", "size of the index, per token and KV head"),
];

/// What the columns on text mean.
const LOST: [(&str, &str); 6] = [
    (
        "KL",
        "divergence of the next token's probabilities from those of full attention: the mean over the steps; p50 and p99 are its median and 99th percentile",
    ),
    (
        "recall",
        "share of the positions with the largest scores that the method also chose",
    ),
    ("mass", "share of the attention that falls on what is read"),
    ("error", "relative error of the attention's output"),
    (
        "top-1",
        "share of the steps whose most probable token is that of full attention",
    ),
    ("ppl/full", "perplexity of the text over that with full attention"),
];

/// What the columns on questions mean.
const ANSWERED: [(&str, &str); 1] = [("answered", "share of the questions that were answered right")];

/// The columns of choices, which `--losses-only` leaves out.
const OF_CHOICES: [&str; 3] = ["recall", "mass", "error"];

/// Explains the columns.
fn legend(questions: bool, has_choices: bool) -> String {
    let own = if questions { ANSWERED.as_slice() } else { &LOST };
    let own = own
        .iter()
        .filter(|(name, _)| has_choices || !OF_CHOICES.contains(name));
    let each = own.chain(&READ);
    each.map(|(name, text)| wrapped(&format!("{name:<9}{text}"), columns()) + "\n")
        .collect()
}

/// Lists the artifacts or flags that the rows name, in the order of the rows.
fn values_of<'a>(rows: &'a [Value], key: &str) -> Vec<&'a str> {
    let mut all: Vec<&str> = Vec::new();
    for own in rows.iter().filter_map(|row| row[key].as_str()) {
        if !all.contains(&own) {
            all.push(own);
        }
    }
    all
}

/// Width of a row's name in front of the columns; with the columns, a line has at most 80 characters.
const PLACE: usize = 22;

fn heading(columns: &[EvalColumn]) -> String {
    let titles = columns
        .iter()
        .map(|(title, width, _)| format!(" {title:>width$}"));
    let place = format!("{:<14} {:>7}", "method", "budget");
    format!("{place:<PLACE$}{}\n", titles.collect::<String>())
}

/// Names a row by its method, the number of its flags if it has some, that of its artifact if there are several, and its
/// budget.
fn place(row: &Value, files: &[&str], flags: &[&str]) -> String {
    let budget = match row["budget"].as_f64() {
        Some(budget) if budget <= 1.0 => format!("{budget:.4}"),
        Some(budget) => format!("{budget}"),
        None => "-".to_owned(),
    };
    let number = |key, all: &[&str]| all.iter().position(|own| row[key] == *own);
    let mut name = row["method"].as_str().unwrap_or("").to_owned();
    if let Some(index) = number("flags", flags) {
        name += &format!(" ({})", index + 1);
    }
    if let Some(index) = number("artifact", files) {
        name += &format!(" [{}]", index + 1);
    }
    format!("{name:<14} {budget:>7}")
}

/// Formats what a row, or a part of a row, has in each column.
fn line(place: &str, part: &Value, columns: &[EvalColumn]) -> String {
    let cells = columns
        .iter()
        .map(|(_, width, cell)| format!(" {:>width$}", cell(part)));
    let line = format!("{place:<PLACE$}{}", cells.collect::<String>());
    format!("{}\n", line.trim_end())
}

/// Lists the turns of a row, each in the form of a row.
fn turn_rows(row: &Value) -> Vec<Value> {
    let needles = row["needle_accuracy_by_turn"].as_array();
    let needles = needles.map(|turns| turns.iter().map(|x| json!({ "needle_accuracy": x })).collect());
    needles.unwrap_or_else(|| list(row, "by_turn").to_vec())
}

fn list<'a>(row: &'a Value, key: &str) -> &'a [Value] {
    row[key].as_array().map_or(&[], Vec::as_slice)
}

/// Reads a number of a row, or of a part of a row; 0 if it was not measured.
fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(0.0)
}

/// Formats a number; empty if it was not measured.
fn decimal(row: &Value, key: &str) -> String {
    row[key].as_f64().map_or(String::new(), |x| format!("{x:.4}"))
}

fn share(row: &Value, key: &str) -> String {
    row[key]
        .as_f64()
        .map_or(String::new(), |x| format!("{:.1}%", 100.0 * x))
}

fn interval(row: &Value, key: &str) -> String {
    match [&row["intervals"][key][0], &row["intervals"][key][1]].map(Value::as_f64) {
        [Some(low), Some(high)] => format!("{low:.4}-{high:.4}"),
        _ => String::new(),
    }
}
