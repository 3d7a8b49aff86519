//! `kvsmith inspect`: what is in an artifact, and whether it is intact.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::{model_manifest, open_model, print, print_json};
use crate::artifact::{Artifact, short};
use crate::cmd::args::Global;
use crate::error::{Error, Result};
use crate::method::lfps::priors;
use crate::method::{a2ats, selfindex};
use crate::progress::size;

/// Arguments of `inspect`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Artifact or section file
    #[arg(value_name = "ART")]
    artifact: PathBuf,
    /// Only this layer
    #[arg(long, value_name = "I")]
    layer: Option<usize>,
    /// Only this KV head
    #[arg(long, value_name = "C")]
    head: Option<usize>,
    /// Check every digest and every value
    #[arg(long)]
    verify: bool,
    /// With --verify: check also that it was made for this model
    #[arg(long, value_name = "DIR", requires = "verify")]
    model: Option<PathBuf>,
}

/// Heads listed as the worst.
const WORST: usize = 5;

/// Runs `inspect`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    global.cpu_only("inspect")?;
    let artifact = Artifact::open(&args.artifact)?;
    let sizes = artifact.sizes;
    let outside = |what: &str, given: usize, count: usize| {
        Error::usage(format!(
            "--{what} {given} does not exist: the artifact has {count}"
        ))
    };
    if let Some(i) = args.layer.filter(|i| *i >= sizes.n_layers) {
        return Err(outside("layer", i, sizes.n_layers));
    }
    if let Some(i) = args.head.filter(|i| *i >= sizes.n_kv_heads) {
        return Err(outside("head", i, sizes.n_kv_heads));
    }
    if args.verify {
        artifact.verify()?;
        if let Some(dir) = &args.model {
            let model = model_manifest(&open_model(dir, global.log())?, global.log())?;
            artifact.check_model(model["fingerprint"].as_str().unwrap_or(""))?;
        }
    }
    let rows = rows(&artifact, args);
    if global.json {
        return print_json(&json!({
            "model": artifact.manifest["model"],
            "calibration": artifact.manifest["calibration"],
            "sections": artifact.manifest["sections"],
            "tool_version": artifact.manifest["tool_version"],
            "device": artifact.manifest["device"],
            "file_bytes": artifact.store.file_bytes(),
            "verified": args.verify,
            "rows": rows,
        }));
    }
    let mut text = summary(&artifact, args);
    if args.layer.is_some() && args.head.is_some() {
        for row in &rows {
            text += &detail(row);
        }
    } else {
        for (section, _) in artifact.sections() {
            let rows: Vec<&Value> = rows.iter().filter(|r| r["section"] == json!(section)).collect();
            text += &match section.as_str() {
                a2ats::SECTION => table(&rows, sizes.n_layers, &A2ATS_COLUMNS) + A2ATS_LEGEND + &worst(&rows),
                selfindex::SECTION => table(&rows, sizes.n_layers, &SIGN_COLUMNS) + SIGN_LEGEND,
                priors::SECTION => table(&rows, sizes.n_layers, &LFPS_COLUMNS) + LFPS_LEGEND,
                _ => String::new(),
            };
        }
    }
    if args.verify {
        text += "verified: every digest and every value\n";
    }
    print(&text)
}

/// One object per section, layer and head.
fn rows(artifact: &Artifact, args: &Args) -> Vec<Value> {
    let mut rows = Vec::new();
    for (section, _) in artifact.sections() {
        for (layer, heads) in artifact.quality(section).into_iter().flatten().enumerate() {
            for (head, quality) in heads.iter().enumerate() {
                if args.layer.is_some_and(|l| l != layer) || args.head.is_some_and(|h| h != head) {
                    continue;
                }
                let mut row = quality.clone();
                if !row.is_object() {
                    continue;
                }
                row["section"] = json!(section);
                row["layer"] = json!(layer);
                row["head"] = json!(head);
                rows.push(row);
            }
        }
    }
    rows
}

/// Model, calibration and sections.
fn summary(artifact: &Artifact, args: &Args) -> String {
    let m = &artifact.manifest;
    let s = artifact.sizes;
    let text = |v: &Value| v.as_str().unwrap_or("?").to_string();
    let mut out = format!(
        "artifact     {}, {}, made by kvsmith {} on {}\n",
        args.artifact.display(),
        size(artifact.store.file_bytes()),
        text(&m["tool_version"]),
        text(&m["device"]),
    );
    out += &format!(
        "model        {}, {} layers, {} query and {} KV heads of {}, rope {}, fingerprint {}\n",
        text(&m["model"]["model_type"]),
        s.n_layers,
        s.n_heads,
        s.n_kv_heads,
        s.head_dim,
        text(&m["model"]["rope"]["rope_type"]),
        short(m["model"]["fingerprint"].as_str().unwrap_or("?")),
    );
    let c = &m["calibration"];
    out += &format!(
        "calibration  {} tokens in {} blocks, {} held out, seed {}\n",
        c["tokens"], c["blocks"], c["held_out_tokens"], c["seed"]
    );
    for (name, p) in artifact.sections() {
        let bytes: usize = artifact
            .store
            .specs()
            .filter(|t| t.name.split('.').next() == Some(name.as_str()))
            .map(|t| artifact.store.bytes(&t.name).map_or(0, <[u8]>::len))
            .sum();
        out += &format!("section      {name}, {}", size(bytes));
        if name == a2ats::SECTION {
            out += &format!(
                ": {} codewords per KV head, at most {} k-means passes, WRoPE position {}, seed {}",
                p["codebook_size"], p["iterations"], p["wrope_position"], p["seed"]
            );
        }
        if let Some(center) = p["center"].as_str() {
            out += &format!(": signs around the {center} of each block");
        }
        if name == priors::SECTION {
            out += &format!(
                ": per query head, at most {} rows and {} anchors",
                p["max_rows"], p["max_anchors"]
            );
        }
        out += "\n";
    }
    out
}

fn number(row: &Value, name: &str) -> Option<f64> {
    row.get(name).and_then(Value::as_f64)
}

/// Mean of an array: a row's value over the query heads of its KV head.
fn mean(row: &Value, name: &str) -> Option<f64> {
    let values: Vec<f64> = row
        .get(name)?
        .as_array()?
        .iter()
        .filter_map(Value::as_f64)
        .collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Share of the variance of held-out keys (of calibration keys if none) that is left as error.
fn unexplained(row: &Value) -> Option<f64> {
    let error = number(row, "held_out_inertia").or_else(|| number(row, "inertia"))?;
    let variance = number(row, "variance")?;
    (variance > 0.0).then(|| error / variance)
}

/// A column of a table: heading, how a number is shown, and where it comes from.
type Column = (&'static str, fn(f64) -> String, fn(&Value) -> Option<f64>);

const A2ATS_COLUMNS: [Column; 7] = [
    ("inertia", |v| format!("{v:.3}"), |r| number(r, "inertia")),
    (
        "held out",
        |v| format!("{v:.3}"),
        |r| number(r, "held_out_inertia"),
    ),
    ("of variance", percent, unexplained),
    (
        "entropy/bits",
        |v| format!("{v:.2}"),
        |r| number(r, "usage_entropy_bits"),
    ),
    ("unused", |v| format!("{v:.0}"), |r| number(r, "unused_codewords")),
    ("condition", |v| format!("{v:.1e}"), |r| number(r, "condition")),
    ("passes", |v| format!("{v:.0}"), |r| number(r, "iterations")),
];
const A2ATS_LEGEND: &str =
    "(means over the KV heads; inertia = squared error per key in the metric of the queries)\n";
const SIGN_COLUMNS: [Column; 3] = [
    (
        "sign entropy/bits",
        |v| format!("{v:.3}"),
        |r| number(r, "sign_entropy_bits"),
    ),
    (
        "pattern entropy/bits",
        |v| format!("{v:.2}"),
        |r| number(r, "pattern_entropy_bits"),
    ),
    (
        "empty patterns",
        |v| format!("{v:.1}"),
        |r| number(r, "empty_patterns"),
    ),
];
const SIGN_LEGEND: &str = "(means over the KV heads; at most 1 bit per sign, 4 per pattern)\n";
const LFPS_COLUMNS: [Column; 8] = [
    ("rows", |v| format!("{v:.0}"), |r| number(r, "rows")),
    ("lambda", |v| format!("{v:.2}"), |r| mean(r, "lambda")),
    ("sink mass", percent, |r| mean(r, "sink_mean")),
    ("bypassed", percent, |r| mean(r, "p_bypass")),
    ("95 % mass in", percent, |r| mean(r, "k_fraction")),
    ("alpha", |v| format!("{v:.2}"), |r| mean(r, "alpha")),
    ("gamma", |v| format!("{v:.3}"), |r| mean(r, "gamma")),
    ("same after 32", percent, |r| mean(r, "persist_32")),
];
const LFPS_LEGEND: &str = "(means over the query heads; bypassed = share of rows with a sparsity above 0.85;
95 % mass in = that share of the positions; same after 32 = overlap of the best 2 %)\n";

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Means per layer.
fn table(rows: &[&Value], n_layers: usize, columns: &[Column]) -> String {
    let mut out = String::from("\nlayer");
    columns
        .iter()
        .for_each(|(heading, ..)| out += &format!("  {heading:>9}"));
    out += "\n";
    for layer in 0..n_layers {
        let of = || rows.iter().filter(|r| r["layer"] == json!(layer));
        if of().next().is_none() {
            continue;
        }
        out += &format!("{layer:>5}");
        for (heading, show, value) in columns {
            let values: Vec<f64> = of().filter_map(|r| value(r)).collect();
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            let text = if values.is_empty() {
                "-".to_string()
            } else {
                show(mean)
            };
            out += &format!("  {text:>width$}", width = heading.len().max(9));
        }
        out += "\n";
    }
    out
}

/// The heads whose codebooks explain held-out keys least.
fn worst(rows: &[&Value]) -> String {
    let mut ranked: Vec<(f64, &Value)> = rows.iter().filter_map(|r| Some((unexplained(r)?, *r))).collect();
    ranked.sort_by(|a, b| b.0.total_cmp(&a.0));
    let mut out = String::from("\nworst heads (share of the variance left on held-out keys)\n");
    for (share, row) in ranked.iter().take(WORST) {
        out += &format!(
            "  layer {:>3}  head {:>3}  {:.1} %\n",
            row["layer"],
            row["head"],
            100.0 * share
        );
    }
    out
}

/// Everything that is known of one head.
fn detail(row: &Value) -> String {
    let section = row["section"].as_str().unwrap_or("?");
    let mut out = format!("\n{section}, layer {}, KV head {}\n", row["layer"], row["head"]);
    for (name, value) in row.as_object().into_iter().flatten() {
        if ["layer", "head", "section"].contains(&name.as_str()) {
            continue;
        }
        let text = match value {
            Value::Array(items) => items
                .iter()
                .map(|v| v.as_f64().map_or(v.to_string(), |x| format!("{x:.4}")))
                .collect::<Vec<_>>()
                .join(" "),
            other => other.to_string(),
        };
        out += &format!("  {name:<20} {text}\n");
    }
    out
}
