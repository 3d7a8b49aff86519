//! `verdict`: equal to what `eval` measures on the same text, what it recommends, and how `run` and `inspect` use it.

use std::path::Path;

use crate::common::*;
use kvsmith::internal::artifact::{Artifact, Verdict};
use kvsmith::internal::method::sections::SECTIONS;
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
        let mut measured = Vec::new();
        for row in &verdict.rows {
            match &row.measured {
                Some(own) => measured.push((row.method.as_str(), "bf16", own, row.bytes_read_fraction)),
                None => assert!(
                    row.bytes_read_fraction > row.reads_target,
                    "{name} {}",
                    row.method
                ),
            }
        }
        assert_eq!(verdict.formats.len(), 5);
        for of in &verdict.formats {
            measured.push(("full", &of.kv, &of.measured, of.size_fraction));
        }
        for (method, kv, own, read) in measured {
            let eval = kvsmith(&format!(
                "eval --model {model} --artifact {art} --tokens {blocks} --seq-len {seq_len} --decode 11 --kv {kv} --seed 2 \
                 --methods {method} --budgets {} --per-head --json",
                own.budget
            ))
            .json();
            let theirs = &eval["rows"][0];
            let what = format!("{name} {method} {} {kv}", own.budget);
            for (key, own) in [
                ("kl", own.kl),
                ("kl_median", own.kl_median),
                ("kl_p99", own.kl_p99),
                ("top1_equal", own.top1_equal),
                ("perplexity_ratio", own.perplexity_ratio),
                ("recall", own.recall),
                ("mass", own.mass),
                ("output_error", own.output_error),
                ("uncompressed_read_fraction", read),
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

/// With `--verdict-rows`, methods are measured over rows of that type, and it is recommended.
#[test]
fn methods_are_measured_over_rows_of_a_type() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let text = documents(&[140, 140], 3);
    let tokens = scratch.tokens("tokens.json", &text);
    let art = scratch.make(
        "art",
        &format!(
            "calibrate --model {model} --tokens {tokens} --seq-len 140 --holdout 0.5 --size 8 --verdict-methods topk,streaming \
             --verdict-reads 0.6 --verdict-steps 11 --verdict-kl 9 --verdict-rows int2"
        ),
    );
    let artifact = Artifact::open(Path::new(&art), SECTIONS).unwrap();
    let [(block, ..)] = artifact.manifest.origin.calibration.held_out[..] else {
        panic!("one block is held out");
    };
    let block = scratch.tokens("block.json", &text[block..=block]);
    let verdict = verdict_of(&art);
    assert_eq!(verdict.kv, "int2");
    let served = &artifact.manifest.head_plan.as_ref().unwrap()["layers"][0]["heads"][0];
    assert_eq!(
        (&served["keys"], &served["values"]),
        (&json!("int2"), &json!("int2"))
    );
    for row in &verdict.rows {
        let own = row.measured.as_ref().unwrap();
        let kl = |kv: &str| {
            let eval = kvsmith(&format!(
                "eval --model {model} --artifact {art} --tokens {block} --seq-len 140 --decode 11 --kv {kv} --methods {} --budgets {} --json",
                row.method, own.budget
            ));
            eval.json()["rows"][0]["kl"].as_f64().unwrap()
        };
        let (theirs, floats) = (kl("int2"), kl("bf16"));
        // A row that is rounded otherwise changes the loss by some parts in a thousand.
        assert!((own.kl - theirs).abs() < 0.02 * theirs, "{} {theirs}", own.kl);
        assert!((own.kl - floats).abs() > 0.1 * own.kl, "{} {floats}", own.kl);
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
    let art = scratch.make(
        "art",
        &format!("calibrate {input} --verdict-steps 24 --verdict-kl 9"),
    );
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
    // By time, the machine decides among the settings within the limits and full attention.
    let prefer = kvsmith(&format!("{run} --prefer time"));
    assert!(prefer.stderr.contains("full attention"), "{}", prefer.stderr);
    let prefer = prefer.json();
    let within = verdict.smallest_within(verdict.limit());
    let mut settings: Vec<_> = within
        .map(|(row, of)| (json!(row.method), json!(of.budget)))
        .collect();
    assert!(!settings.is_empty());
    settings.push((json!("full"), json!(0.06)));
    let setting = (prefer["method"].clone(), prefer["budget"].clone());
    assert!(settings.contains(&setting), "{setting:?} of {settings:?}");
    let plain = format!("run --model {model} --artifact {art} --tokens {prompt} --prefer time");
    kvsmith(&format!("{plain} --method wpq")).fails(2, "--prefer", "");
    kvsmith(&format!("{plain} --tail")).fails(2, "tail", "--prefer");
    kvsmith(&format!("run --model {model} --tokens {prompt} --prefer time")).fails(
        2,
        "there is none",
        "verdict",
    );
    let chosen = kvsmith(&format!("{run} --budget 0.5"));
    assert!(!chosen.stderr.contains("recommended"), "{}", chosen.stderr);
    assert_eq!(chosen.json()["method"], "wpq");
    let chosen = kvsmith(&format!("{run} --method selfindex")).json();
    assert_eq!(
        (&chosen["method"], &chosen["budget"]),
        (&json!("selfindex"), &json!(0.06))
    );

    let shown = kvsmith(&format!("inspect {art}")).ok();
    let line = format!("--method {} --budget {}", row.method, of.budget);
    assert!(
        shown.stdout.contains("\nrecommended") && shown.stdout.contains(&line),
        "{}",
        shown.stdout
    );
    let format = verdict.format_with(of).expect("int8 loses next to nothing");
    assert!(
        shown
            .stdout
            .contains(&format!("cache: --kv {} should fit", format.kv)),
        "{}",
        shown.stdout
    );
    let whole = kvsmith(&format!("inspect {art} -v")).ok().stdout;
    let (_, formats) = whole
        .split_once("full attention over caches of other types\n")
        .expect("a table");
    let lines: Vec<&str> = formats.lines().skip(1).take(5).collect();
    assert_eq!((lines.len(), verdict.formats.len()), (5, 5));
    for (line, of) in lines.iter().zip(&verdict.formats) {
        let start = format!(
            "{:<22} {:>5.1}% {:>7.4} ",
            of.kv,
            100.0 * of.size_fraction,
            of.measured.kl
        );
        assert!(line.starts_with(&start) && line.len() <= 80, "{line}");
    }
    for line in shown.stdout.lines().filter(|line| !line.contains(&art)) {
        assert!(line.chars().count() <= 80, "{line}");
    }
    let json = kvsmith(&format!("inspect {art} --json")).json();
    assert_eq!(json["methods"], serde_json::to_value(&verdict).unwrap());

    // Without a verdict all is as before.
    let plain = scratch.make("plain", &format!("calibrate {input} --no-verdict"));
    let json = kvsmith(&run.replace(&art, &plain)).json();
    assert_eq!((&json["method"], &json["budget"]), (&json!("wpq"), &json!(0.06)));
    assert_eq!(
        kvsmith(&format!("inspect {plain} --json")).json()["methods"],
        Value::Null
    );
}

/// The bundled model on text beyond the calibration's: 20 blocks of text, 8 of UUIDs, and intervals.
fn with_text_beyond(options: &str) -> (Scratch, String, String, Outcome) {
    let scratch = Scratch::new();
    let root = root();
    let at = |path: &str| root.join(path).display().to_string();
    let input = format!(
        "--model {} --text {} --max-tokens 600 --uuid-tokens 100 --seq-len 150",
        at("calib-data/model"),
        at("calib-data/text.txt")
    );
    let verdict = format!("--verdict-tokens 3000 --verdict-steps 4 {options}");
    let out = scratch.path("art");
    let fit = "--size 16 --iterations 2 --wrope-position 60";
    let made = kvsmith(&format!("calibrate {input} {fit} {verdict} -o {out}")).ok();
    let chain = format!("{input} {verdict}");
    let plain = scratch.make("plain", &format!("calibrate {input} {fit} --no-verdict"));
    let by_hand = scratch.make("by-hand", &format!("verdict {plain} {chain}"));
    assert!(
        std::fs::read(&out).unwrap() == std::fs::read(&by_hand).unwrap(),
        "the verdict by hand differs"
    );
    (scratch, out, input, made)
}

#[test]
fn it_is_measured_on_text_beyond_the_calibration() {
    let (scratch, art, input, made) =
        with_text_beyond("--verdict-reads 0.8,0.95 --verdict-methods wpq,topk,selfindex");
    let verdict = verdict_of(&art);
    let texts = serde_json::to_value(&verdict.texts).unwrap();
    assert_eq!(
        texts,
        json!([
            { "kind": "text", "length": 150, "blocks": 20, "beyond": 20, "steps": 80 },
            { "kind": "uuid", "length": 150, "blocks": 8, "beyond": 8, "steps": 32 },
        ])
    );
    assert_eq!((verdict.blocks, verdict.steps), (20, 80));
    assert_eq!(verdict.lengths(), [150]);
    // Nothing but the tokens after the calibration's: those of a longer text are the same.
    let model = root().join("calib-data/model").display().to_string();
    let text = root().join("calib-data/text.txt").display().to_string();
    let dump = scratch.make(
        "dump",
        &format!("dump --model {model} --text {text} --max-tokens 3600 --uuid-tokens 0 --seq-len 150"),
    );
    let ids = read_tensors(format!("{dump}/tokens.safetensors"))["ids"].u32s();
    let blocks: Vec<Vec<u32>> = ids[600..].chunks(150).map(<[u32]>::to_vec).collect();
    assert_eq!(blocks.len(), 20);
    let blocks = scratch.tokens("blocks.json", &blocks);
    for row in &verdict.rows {
        let of = row.measured.as_ref().expect("measured");
        let intervals = of.intervals.expect("20 blocks have an interval");
        assert!(of.dropped_after.is_none());
        assert!(
            intervals.kl[0] < of.kl && of.kl < intervals.kl[1],
            "{} {intervals:?}",
            row.method
        );
        assert_eq!(of.others.len(), 1);
        let eval = kvsmith(&format!(
            "eval --model {model} --artifact {art} --tokens {blocks} --seq-len 150 --decode 4 --kv bf16 --methods {} \
             --budgets {} --json",
            row.method, of.budget
        ))
        .json();
        let theirs = &eval["rows"][0];
        for (key, own) in [
            ("kl", of.kl),
            ("kl_p99", of.kl_p99),
            ("top1_equal", of.top1_equal),
        ] {
            let value = theirs[key].as_f64().unwrap();
            // As in `it_is_what_eval_measures`.
            assert!(
                (value - own).abs() <= 5e-4 * value.abs() + 1e-6,
                "{} {key} {own}, by eval {value}",
                row.method
            );
        }
        // Resampled from the same blocks with the same seed.
        for (i, own) in intervals.kl.iter().enumerate() {
            let value = theirs["intervals"]["kl"][i].as_f64().unwrap();
            assert!(
                (value - own).abs() <= 1e-3 * value.abs() + 1e-6,
                "{} {own}, by eval {value}",
                row.method
            );
        }
    }
    // Blocks of 150 tokens are too short for questions.
    assert!(verdict.probe.is_none());
    let why = verdict.not_probed.clone().expect("a reason");
    assert!(why.contains("too short"), "{why}");
    assert!(
        made.stderr.contains("recommended: ") && made.stderr.contains("not probed"),
        "{}",
        made.stderr
    );
    assert!(!made.stderr.contains("a guess"), "{}", made.stderr);
    let shown = kvsmith(&format!("inspect {art} -v")).ok().stdout;
    assert!(shown.contains("limits checked on texts of 150 tokens"), "{shown}");
    assert!(
        shown.contains("means on 8 blocks of 150 tokens of UUIDs, 32 steps"),
        "{shown}"
    );

    // `run` follows the recommendation, and warns beyond the lengths that were measured.
    let warning = "measured only up to 150";
    for (length, warns) in [(100, false), (149, true)] {
        let prompt = scratch.tokens("prompt.json", &documents(&[length], 5));
        let run = kvsmith(&format!(
            "run --model {model} --artifact {art} --tokens {prompt} --max-new 2 --ignore-eos --json"
        ))
        .ok();
        assert!(
            run.stderr.contains("as recommended by the artifact"),
            "{}",
            run.stderr
        );
        assert_eq!(run.stderr.contains(warning), warns, "{}", run.stderr);
        let own = kvsmith(&format!(
            "run --model {model} --artifact {art} --tokens {prompt} --max-new 2 --ignore-eos --method wpq --budget 0.5"
        ))
        .ok();
        assert!(!own.stderr.contains(warning), "{}", own.stderr);
    }

    // Another length of the text is another text.
    let out = scratch.path("other");
    let other = input.replace("--max-tokens 600", "--max-tokens 450");
    kvsmith(&format!("verdict {art} {other} -o {out}")).fails(1, "another text", "--max-tokens");

    // The bytes depend neither on the number of threads nor on the verdict that was there.
    let again = "--verdict-tokens 3000 --verdict-steps 4 --verdict-reads 0.8,0.95 --verdict-methods wpq,topk,selfindex";
    let one = scratch.make("one", &format!("verdict {art} {input} {again} --threads 1"));
    assert!(
        std::fs::read(&art).unwrap() == std::fs::read(&one).unwrap(),
        "one thread"
    );
}

/// Rows that lose more than three times the limit after 8 blocks are not measured further, and that is said.
#[test]
fn rows_that_lose_too_much_are_dropped() {
    let (_scratch, art, _, made) =
        with_text_beyond("--verdict-reads 0.8 --verdict-methods wpq,streaming --verdict-kl 0.000001");
    let verdict = verdict_of(&art);
    for row in &verdict.rows {
        let of = row.measured.as_ref().expect("measured");
        assert!(of.kl > 3e-6, "{} {}", row.method, of.kl);
        assert_eq!(of.dropped_after, Some(8));
        assert!(of.intervals.is_none() && of.others.is_empty() && of.probe.is_none());
    }
    assert!(made.stderr.contains("dropped after 8 blocks"), "{}", made.stderr);
    assert!(!made.stderr.contains("recommended"), "{}", made.stderr);
    assert!(verdict.usual().is_none());
    let shown = kvsmith(&format!("inspect {art} -v")).ok().stdout;
    assert!(shown.contains("dropped"), "{shown}");
}

/// With few blocks there are no intervals: the recommendation is a guess, and everything says so.
#[test]
fn a_recommendation_from_little_text_is_a_guess() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[200, 200], 1));
    let out = scratch.path("art");
    let made = kvsmith(&format!(
        "calibrate --model {model} --tokens {tokens} --seq-len 100 --size 4 --verdict-reads 0.95 --verdict-methods lfps -o {out}"
    ))
    .ok();
    assert!(
        made.stderr.contains("a guess: measured on 1 block of text"),
        "{}",
        made.stderr
    );
    assert!(made.stderr.contains("not probed"), "{}", made.stderr);
    let verdict = verdict_of(&out);
    assert!(verdict.is_guess() && verdict.not_probed.is_some());
    let shown = kvsmith(&format!("inspect {out}")).ok().stdout;
    assert!(shown.contains("a guess: measured on 1 block of text"), "{shown}");
    let prompt = scratch.tokens("prompt.json", &documents(&[40], 5));
    let run = kvsmith(&format!(
        "run --model {model} --artifact {out} --tokens {prompt} --max-new 2"
    ))
    .ok();
    assert!(run.stderr.contains("a guess"), "{}", run.stderr);
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
    // It does not have the name of a whole artifact.
    assert!(std::fs::metadata(&art).is_err());
    let art = scratch.path("art.unjudged.safetensors");
    assert_eq!(std::fs::read(&art).unwrap(), std::fs::read(&plain).unwrap());
    kvsmith(&format!("inspect {art} --verify")).ok();
}

#[test]
fn a_dump_has_its_own_text() {
    let refused = kvsmith("verdict art --model m --dump d --max-tokens 5 -o out");
    assert_eq!(refused.code, Some(2));
    assert!(refused.stderr.contains("--max-tokens"), "{}", refused.stderr);
}
