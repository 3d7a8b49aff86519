//! `docs/small.md`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde_json::{Value, json};

use super::groups::{BY_LENGTH, METHODS, Measured, SIMILARITY, groups, told};

/// Writes the page from the results.
pub fn page(results: &BTreeMap<String, Value>) -> String {
    let mut out = String::from(
        "# A small model\n\n\
         `make results` writes this page from the bundled model and its held-out text, needles and conversations, which are in\n\
         every checkout. The numbers are in [small/small.json](small/small.json). The model has only 2.2M parameters and a\n\
         context of 2,048 tokens, so `--wrope-position` is 1024. The figures compare the methods on the heads of this model, not\n\
         on yours. Run `kvsmith eval` to measure your model; [results.md](results.md) has a model that people use.\n\n\
         What the columns mean:\n\n\
         - `recall`: share of the positions of `topk` that the method chose\n\
         - `mass`: true probability of the positions attended\n\
         - `output_error`: relative L2 error of the attention output\n\
         - `kl`: KL (Kullback-Leibler divergence) of the next token from full attention, in nats\n\
         - `needle_accuracy`: share of questions answered\n\n\
         `kl` and the answers follow the method's own trajectory, the first three columns that of full attention.\n\
         [json.md](json.md) explains the other columns.\n\n\
         ![recall](small/recall.svg)\n![KL](small/kl.svg)\n![needles](small/needles.svg)\n\n",
    );
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
        let _ = writeln!(out, "## {}\n\n{}\n\n{verdict}", group.title, group.about);
        if verdict.contains("Not reproduced") && !group.why.is_empty() {
            let _ = writeln!(out, "{}", group.why);
        }
        out += "\n";
        let named = group.cases.len() > 1;
        let first = if named { "case" } else { "method | budget" };
        let _ = writeln!(out, "| {first} | {} |", group.columns.join(" | "));
        let columns = group.columns.len() + if named { 1 } else { 2 };
        let _ = writeln!(out, "|{}", "---|".repeat(columns));
        for row in &rows {
            let label = match named {
                true => row.case.to_string(),
                false => format!(
                    "`{}` | {} %",
                    row.row["method"].as_str().unwrap_or(""),
                    100.0 * row.get("budget")
                ),
            };
            let values: Vec<String> = group.columns.iter().map(|c| shown(c, row.get(c))).collect();
            let _ = writeln!(out, "| {label} | {} |", values.join(" | "));
        }
        out += "\n";
        out += &turn_table(&rows);
    }
    out += &length_table(results.get(BY_LENGTH).unwrap_or(&Value::Null));
    out += &similarity_table(results.get(SIMILARITY).unwrap_or(&Value::Null));
    out += "## Pictures\n\n\
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
    let mut out = "## Needles by length\n\nShare of needles that greedy decoding answers at a budget of 6 %, by length of the \
         prompt. `topk` covers the most mass, but it is not an upper bound on the answers.\n\n"
        .to_string();
    if let Some(longest) = lengths.last() {
        let full = longest["full"].as_f64().unwrap_or(f64::NAN);
        for method in ["wpq", "a2ats", "selfindex", "lfps", "ctkvr"] {
            let loss = 100.0 * (full - accuracy(longest, method));
            let verdict = if loss <= 3.0 { "within" } else { "not within" };
            let _ = writeln!(
                out,
                "`{method}` is {verdict} 3 points of full attention at 2,000 tokens ({loss:.1} points)."
            );
        }
    }
    out += "\n| method |";
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
            let _ = write!(out, " {:.1} % |", 100.0 * x);
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
    let mut out = format!(
        "## Codebooks of two inputs\n\nThe similarity of the codebooks of two texts is the mean, over the codewords of one text, of \
         the largest cosine with a codeword of the other, averaged over both directions (Eq. 7 of A2ATS; plain metric, 256 \
         codewords, 20,000 tokens per text). The paper reports more than 0.9 before rotation for most layers, and about 0.85 after it.\n\n{}\n\n\
         | layer | before rotation | after rotation |\n|---|---|---|\n",
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
        "budget" => format!("{} %", 100.0 * x),
        _ => format!("{:.1} %", 100.0 * x),
    }
}
