//! `verdict`: equal to what `eval` measures on the held-out text, and how `run` and `inspect` use it.

use std::path::Path;

use crate::common::*;
use kvsmith::artifact::{Artifact, Verdict};
use kvsmith::method::sections::SECTIONS;
use serde_json::{Value, json};

fn verdict_of(path: &str) -> Verdict {
    let artifact = Artifact::open(Path::new(path), SECTIONS).unwrap();
    artifact.manifest.quality.methods.expect("a verdict")
}

/// Every method, budget and metric of a verdict are those of `eval`, which runs the whole model step by step.
#[test]
fn it_is_what_eval_measures() {
    for (name, lengths, seq_len, holdout) in [
        ("llama_default", &[140, 90, 140][..], 140, 0.5),
        ("qwen2_sliding", &[120, 120], 120, 0.5),
        // Of an only block the end is held out.
        ("qwen3_norm", &[150], 150, 0.2),
    ] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let text = documents(lengths, 3);
        let tokens = scratch.tokens("tokens.json", &text);
        let methods = "topk,a2ats,selfindex,lfps,ctkvr,wpq,streaming,wpq+tail";
        let art = scratch.make(
            "art",
            &format!(
                "calibrate --model {model} --tokens {tokens} --seq-len {seq_len} --holdout {holdout} --size 8 --seed 2 \
                 --verdict-methods {methods} --verdict-reads 0.6,0.9 --verdict-steps 11"
            ),
        );
        let artifact = Artifact::open(Path::new(&art), SECTIONS).unwrap();
        let held_out = &artifact.manifest.origin.calibration.held_out;
        let verdict = verdict_of(&art);
        assert_eq!(
            (verdict.blocks, verdict.steps),
            (held_out.len(), 11 * held_out.len()),
            "{name}"
        );
        assert_eq!(verdict.rows.len(), 2 * methods.split(',').count());
        // Documents are no longer than blocks, so that they are the blocks.
        let blocks: Vec<Vec<u32>> = held_out
            .iter()
            .map(|(b, _, end)| text[*b][..*end].to_vec())
            .collect();
        let blocks = scratch.tokens("blocks.json", &blocks);
        for row in &verdict.rows {
            let Some(own) = &row.measured else {
                assert!(
                    row.bytes_read_fraction > row.reads_target,
                    "{name} {}",
                    row.method
                );
                continue;
            };
            let eval = kvsmith(&format!(
                "eval --model {model} --artifact {art} --tokens {blocks} --seq-len {seq_len} --decode 11 --kv bf16 --seed 2 \
                 --methods {} --budgets {} --per-head --json",
                row.method, own.budget
            ))
            .json();
            let theirs = &eval["rows"][0];
            let what = format!("{name} {} {}", row.method, own.budget);
            for (key, own) in [
                ("kl", own.kl),
                ("kl_median", own.kl_median),
                ("kl_p99", own.kl_p99),
                ("top1_equal", own.top1_equal),
                ("perplexity_ratio", own.perplexity_ratio),
                ("recall", own.recall),
                ("mass", own.mass),
                ("output_error", own.output_error),
                ("bytes_read_fraction", row.bytes_read_fraction),
                ("index_bits_per_token", own.index_bits_per_token),
            ] {
                let value = theirs[key].as_f64().unwrap_or_else(|| panic!("{what}: no {key}"));
                // Products of other shapes round otherwise, and five digits are stored: 2e-4 seen.
                let off = (value - own).abs();
                assert!(
                    off <= 5e-4 * value.abs() + 1e-6,
                    "{what}: {key} {own}, by eval {value}"
                );
            }
            for head in theirs["per_head"].as_array().unwrap() {
                let at = |of: &[Vec<f64>]| {
                    let place = |key: &str| head[key].as_u64().unwrap() as usize;
                    of[place("layer")][place("kv_head")]
                };
                for (key, own) in [
                    ("recall", at(&own.heads.recall)),
                    ("output_error", at(&own.heads.output_error)),
                ] {
                    let value = head[key].as_f64().unwrap();
                    assert!(
                        (value - own).abs() <= 5e-4 * value.abs() + 1e-6,
                        "{what}: {key} of {head}, {own}"
                    );
                }
            }
        }
    }
}

/// The bundled model: shares of the bytes are met, and a run takes what is recommended unless it is told otherwise.
#[test]
fn a_run_takes_what_is_recommended() {
    let scratch = Scratch::new();
    let model = root().join("calib-data/model").display().to_string();
    let text = scratch.tokens("text.json", &documents(&[900, 900, 900], 4));
    let input =
        format!("--model {model} --tokens {text} --seq-len 900 --holdout 0.3 --size 64 --wrope-position 400");
    let art = scratch.make("art", &format!("calibrate {input} --verdict-steps 24"));
    let verdict = verdict_of(&art);
    for row in verdict.rows.iter().filter(|row| row.measured.is_some()) {
        let share = row.bytes_read_fraction / row.reads_target;
        // Other steps than those in which the budget was found; thresholds and lists let some methods read less.
        let may_be_less = ["lfps", "ctkvr"].contains(&row.method.as_str());
        assert!(
            (0.9..1.1).contains(&share) || may_be_less && share < 1.1,
            "{} {share}",
            row.method
        );
    }
    let (row, of) = verdict.usual().expect("a recommendation");
    assert_ne!(row.method, "topk");
    let prompt = scratch.tokens("prompt.json", &documents(&[200], 5));
    let run = format!("run --model {model} --artifact {art} --tokens {prompt} --max-new 2 --json");
    let told = kvsmith(&run);
    assert!(
        told.stderr.contains("as recommended by the artifact"),
        "{}",
        told.stderr
    );
    let json = told.json();
    assert_eq!(
        (&json["method"], &json["budget"]),
        (&json!(row.method), &json!(of.budget))
    );
    let chosen = kvsmith(&format!("{run} --budget 0.5"));
    assert!(!chosen.stderr.contains("recommended"), "{}", chosen.stderr);
    assert_eq!(chosen.json()["method"], "a2ats");
    let chosen = kvsmith(&format!("{run} --method selfindex")).json();
    assert_eq!(
        (&chosen["method"], &chosen["budget"]),
        (&json!("selfindex"), &json!(0.06))
    );

    let shown = kvsmith(&format!("inspect {art}")).ok();
    let first = shown.stdout.lines().next().unwrap_or_default().to_owned();
    let line = format!("--method {} --budget {}", row.method, of.budget);
    assert!(
        first.starts_with("recommended") && shown.stdout.contains(&line),
        "{}",
        shown.stdout
    );
    for line in shown.stdout.lines().filter(|line| !line.contains(&art)) {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let json = kvsmith(&format!("inspect {art} --json")).json();
    assert_eq!(json["methods"], serde_json::to_value(&verdict).unwrap());

    // Without a verdict all is as before.
    let plain = scratch.make("plain", &format!("calibrate {input} --no-verdict"));
    let json = kvsmith(&run.replace(&art, &plain)).json();
    assert_eq!(
        (&json["method"], &json["budget"]),
        (&json!("a2ats"), &json!(0.06))
    );
    assert_eq!(
        kvsmith(&format!("inspect {plain} --json")).json()["methods"],
        Value::Null
    );
}

#[test]
fn a_text_that_is_not_the_artifacts_is_refused() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60, 60], 1));
    let art = scratch.make(
        "art",
        &format!("calibrate --model {model} --tokens {tokens} --size 4 --no-verdict"),
    );
    let out = scratch.path("out");
    let with = |text: &str, more: &str| format!("verdict {art} --model {model} {text} -o {out} {more}");
    let other = scratch.tokens("other.json", &documents(&[60, 60], 2));
    kvsmith(&with(&format!("--tokens {other}"), "")).fails(1, "another text", "--seed");
    kvsmith(&with(&format!("--tokens {tokens}"), "--seed 9")).fails(1, "another text", "--holdout");
    let none = kvsmith(&with("", ""));
    assert!(
        none.code == Some(2) && none.stderr.contains("--dump <DIR>"),
        "{}",
        none.stderr
    );
    let model = checkpoint("qwen2_bias");
    kvsmith(&format!(
        "verdict {art} --model {model} --tokens {tokens} -o {out}"
    ))
    .fails(1, "another model", "calibrate");
    assert!(!Path::new(&out).exists());

    let model = checkpoint("llama_default");
    let whole = scratch.make(
        "whole",
        &format!("calibrate --model {model} --tokens {tokens} --size 4 --holdout 0"),
    );
    kvsmith(&format!(
        "verdict {whole} --model {model} --tokens {tokens} --holdout 0 -o {out}"
    ))
    .fails(1, "no text was held out", "--holdout");
}

/// The fits took long: an artifact whose verdict fails is there, and the error says how to add one.
#[test]
fn an_artifact_without_its_verdict_is_kept() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60, 60], 1));
    let (art, plain) = (scratch.path("art"), scratch.path("plain"));
    let calibrate =
        format!("calibrate --model {model} --tokens {tokens} --size 4 --holdout 0.5 --wpq-bits none");
    kvsmith(&format!("{calibrate} --verdict-methods wpq -o {art}")).fails(2, "wpq", "kvsmith verdict");
    kvsmith(&format!("{calibrate} --no-verdict -o {plain}")).ok();
    assert_eq!(std::fs::read(&art).unwrap(), std::fs::read(&plain).unwrap());
    kvsmith(&format!("inspect {art} --verify")).ok();
}

#[test]
fn a_dump_has_its_own_text() {
    let refused = kvsmith("verdict art --model m --dump d --max-tokens 5 -o out");
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("--max-tokens"), "{}", refused.stderr);
}
