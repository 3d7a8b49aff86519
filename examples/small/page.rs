//! The tables of the small model in `docs/dev/replication.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::groups::{BY_LENGTH, METHODS, Measured, SIMILARITY, groups, told, wrapped};

/// The lines of `docs/dev/replication.md` around the tables.
const MARKS: [&str; 2] = ["<!-- small -->\n", "<!-- end of small -->\n"];

/// Returns the page with the tables of these results between the marks; `None` if the page has no marks.
pub fn replaced(page: &str, results: &BTreeMap<String, Value>) -> Option<String> {
    let (before, rest) = page.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    Some([before, MARKS[0], tables(results).as_str(), MARKS[1], after].concat())
}

/// Writes the tables of the results.
fn tables(results: &BTreeMap<String, Value>) -> String {
    let mut out =
        String::from("![recall](small/recall.svg)\n![KL](small/kl.svg)\n![needles](small/needles.svg)\n\n");
    for group in groups() {
        let Some(cases) = results.get(group.name).and_then(Value::as_array) else {
            continue;
        };
        let rows: Vec<Measured> = cases
            .iter()
            .flat_map(|c| {
                let label = c["case"].as_str().unwrap_or("");
                let rows = c["rows"].as_array().map_or(&[][..], Vec::as_slice);
                rows.iter().map(move |row| Measured { case: label, row })
            })
            .collect();
        let verdict = (group.verdict)(&rows);
        let about = wrapped(group.about);
        let _ = writeln!(out, "### {}\n\n{about}\n\n{verdict}", group.title);
        if verdict.contains("Not reproduced") && !group.why.is_empty() {
            let _ = writeln!(out, "\n{}", wrapped(group.why));
        }
        out += "\n";
        let named = group.cases.len() > 1;
        let first = if named { "case" } else { "method | budget" };
        let _ = writeln!(out, "| {first} | {} |", group.columns.join(" | "));
        let columns = group.columns.len() + if named { 1 } else { 2 };
        let _ = writeln!(out, "|{}", "---|".repeat(columns));
        for row in &rows {
            let label = if named {
                row.case.to_string()
            } else {
                format!(
                    "`{}` | {}%",
                    row.row["method"].as_str().unwrap_or(""),
                    100.0 * row.get("budget")
                )
            };
            let values: Vec<String> = group.columns.iter().map(|c| shown(c, row.get(c))).collect();
            let _ = writeln!(out, "| {label} | {} |", values.join(" | "));
        }
        out += "\n";
        out += &turn_table(&rows);
    }
    out += &length_table(results.get(BY_LENGTH).unwrap_or(&Value::Null));
    out += &similarity_table(results.get(SIMILARITY).unwrap_or(&Value::Null));
    out += "### Pictures\n\n\
            ![second moment](small/moment.svg)\n![slash profile](small/slash.svg)\n![codeword usage](small/usage.svg)\n";
    out
}

/// Writes the results of a group by turn, if it has several turns.
fn turn_table(rows: &[Measured]) -> String {
    let series = |m: &Measured, metric: &str| -> Vec<f64> {
        let turns = match metric {
            "needle_accuracy" | "full_needle_accuracy" => {
                m.row[format!("{metric}_by_turn")].as_array().cloned()
            }
            _ => m.row["by_turn"]
                .as_array()
                .map(|turns| turns.iter().map(|t| t[metric].clone()).collect()),
        };
        let turns = turns.unwrap_or_default();
        turns.iter().map(|x| x.as_f64().unwrap_or(f64::NAN)).collect()
    };
    let mut lines: Vec<(&str, &str, Vec<f64>)> = Vec::new();
    for metric in ["needle_accuracy", "recall", "kl"] {
        if let (Some(any), "needle_accuracy") = (rows.first(), metric) {
            lines.push((metric, "full", series(any, "full_needle_accuracy")));
        }
        lines.extend(rows.iter().map(|m| (metric, m.case, series(m, metric))));
    }
    lines.retain(|(_, _, turns)| !turns.is_empty());
    let Some(turns) = lines.iter().map(|(_, _, turns)| turns.len()).max() else {
        return String::new();
    };
    let heads: Vec<String> = (1..=turns).map(|turn| format!("turn {turn}")).collect();
    let mut out = format!(
        "| | case | {} |\n|---|---|{}\n",
        heads.join(" | "),
        "---|".repeat(turns)
    );
    for (metric, case, turns) in lines {
        let values: Vec<String> = turns.iter().map(|x| shown(metric, *x)).collect();
        let _ = writeln!(out, "| {metric} | {case} | {} |", values.join(" | "));
    }
    out + "\n"
}

fn length_table(lengths: &Value) -> String {
    let lengths = lengths.as_array().map_or(&[][..], Vec::as_slice);
    let accuracy = |at: &Value, method: &str| -> f64 {
        let mut rows = at["rows"].as_array().into_iter().flatten();
        let row = rows.find(|r| r["method"] == json!(method));
        row.and_then(|r| r["needle_accuracy"].as_f64())
            .unwrap_or(f64::NAN)
    };
    let about = "Share of needles that greedy decoding answers at a budget of 6%, by length of the prompt. `topk` covers \
                 the most mass, but it is not an upper bound on the answers.";
    let mut out = format!("### Needles by length\n\n{}\n\n", wrapped(about));
    out += "| method |";
    for at in lengths {
        let _ = write!(out, " {} tokens |", at["length"]);
    }
    let _ = writeln!(out, "\n|---|{}", "---|".repeat(lengths.len()));
    for method in std::iter::once("full").chain(METHODS.split(',')) {
        let _ = write!(out, "| `{method}` |");
        for at in lengths {
            let x = match method {
                "full" => at["full"].as_f64().unwrap_or(f64::NAN),
                _ => accuracy(at, method),
            };
            let _ = write!(out, " {:.1}% |", 100.0 * x);
        }
        out += "\n";
    }
    out + "\n"
}

fn similarity_table(rows: &Value) -> String {
    let of = |rope: &str| -> Vec<f64> {
        let rows = rows
            .as_array()
            .into_iter()
            .flatten()
            .filter(|r| r["rope"] == json!(rope));
        rows.filter_map(|r| r["similarity"].as_f64()).collect()
    };
    let (before, after) = (of("windowed"), of("standard"));
    let holds = before.iter().zip(&after).all(|(b, a)| b > a);
    let about = "The similarity of the codebooks of two texts is the mean, over the codewords of one text, of the largest \
                 cosine with a codeword of the other, averaged over both directions (Eq. 7 of A2ATS; plain metric, 256 \
                 codewords, 20,000 tokens per text). The paper reports more than 0.9 before rotation for most layers, and \
                 about 0.85 after it.";
    let mut out = format!(
        "### Codebooks of two inputs\n\n{}\n\n{}\n\n| layer | before rotation | after rotation |\n|---|---|---|\n",
        wrapped(about),
        told(
            holds,
            "codebooks are more similar before rotation, in every layer"
        )
    );
    for (layer, (b, a)) in before.iter().zip(&after).enumerate() {
        let _ = writeln!(out, "| {layer} | {b:.3} | {a:.3} |");
    }
    out + "\n"
}

fn shown(column: &str, x: f64) -> String {
    match column {
        _ if x.is_nan() => "".to_string(),
        "kl" | "output_error" | "recall" | "mass" => format!("{x:.3}"),
        "index_bits_per_token" => format!("{x:.1}"),
        "constant_bytes" => format!("{x:.0}"),
        "budget" => format!("{}%", 100.0 * x),
        _ => format!("{:.1}%", 100.0 * x),
    }
}
