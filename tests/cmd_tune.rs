//! `tune`: sensitivities are what `eval` measures of plans that change some KV heads, and plans keep their limits.

use std::path::Path;

use crate::common::*;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::method::sections::SECTIONS;
use serde_json::{Value, json};

fn read(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// What serves a KV head, as an item of a head plan.
fn item(of: &Value) -> Value {
    let kv = of["kv"].as_str().unwrap();
    let formats = match kv.split_once(',') {
        Some((keys, values)) => [keys.trim_start_matches("k="), values.trim_start_matches("v=")],
        None => [kv, kv],
    };
    json!({"method": of["method"], "budget": of["budget"], "keys": formats[0], "values": formats[1]})
}

/// Each sensitivity is the loss of a plan that serves these KV heads in this way, and all others by full attention over f32.
#[test]
fn sensitivities_are_what_eval_measures() {
    for (name, lengths, seq_len, per, options) in [
        (
            "llama_default",
            &[140, 90, 140][..],
            140,
            "head",
            "--kv bf16 --kv int4 --kv int4+4",
        ),
        (
            "qwen2_sliding",
            &[120, 120],
            120,
            "layer",
            "--kv k=int8,v=int2 --methods wpq,selfindex,full",
        ),
    ] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let text = documents(lengths, 3);
        let tokens = scratch.tokens("tokens.json", &text);
        let input = format!("--model {model} --tokens {tokens} --seq-len {seq_len} --holdout 0.5 --seed 2");
        let art = scratch.make("art", &format!("calibrate {input} --size 8 --no-verdict"));
        let artifact = Artifact::open(Path::new(&art), SECTIONS).unwrap();
        let held_out = &artifact.manifest.origin.calibration.held_out;
        let blocks: Vec<Vec<u32>> = held_out
            .iter()
            .map(|(b, _, end)| text[*b][..*end].to_vec())
            .collect();
        let blocks = scratch.tokens("blocks.json", &blocks);
        let plan = scratch.path("plan.json");
        kvsmith(&format!(
            "tune {art} {input} --limit kl=1 --budgets 0.1,0.3 --per {per} --blocks {} --steps 11 {options} -o {plan}",
            held_out.len()
        ))
        .ok();
        let found = read(&plan);
        let of = &found["sensitivities"];
        let [layers, kv_heads] =
            ["n_layers", "n_kv_heads"].map(|key| of["sizes"][key].as_u64().unwrap() as usize);
        let units = of["kl"].as_array().unwrap();
        let ways = of["ways"].as_array().unwrap();
        assert_eq!(
            units.len(),
            layers * if per == "head" { kv_heads } else { 1 },
            "{name}"
        );
        assert_eq!(of["steps"].as_u64().unwrap(), 11 * held_out.len() as u64);
        let mut compared = 0;
        for (unit, row) in units.iter().enumerate() {
            for (way, serving) in ways.iter().enumerate() {
                // A part of all, in every layer.
                if (unit + way) % 3 != 0 {
                    continue;
                }
                let full = json!({"method": "full", "budget": 1, "keys": "f32", "values": "f32"});
                let mut heads = vec![vec![full; kv_heads]; layers];
                match per {
                    "head" => heads[unit / kv_heads][unit % kv_heads] = item(serving),
                    _ => heads[unit].fill(item(serving)),
                }
                let heads: Vec<Value> = heads.into_iter().map(|heads| json!({ "heads": heads })).collect();
                let one = scratch.path("one.json");
                std::fs::write(&one, json!({"head_plan": {"layers": heads}}).to_string()).unwrap();
                let eval = kvsmith(&format!(
                    "eval --model {model} --artifact {art} --tokens {blocks} --seq-len {seq_len} --decode 11 --seed 2 \
                     --head-plan {one} --methods full --budgets 1 --json"
                ))
                .json();
                let rows = eval["rows"].as_array().unwrap();
                let theirs = rows.last().unwrap()["kl"].as_f64().unwrap();
                let own = row[way].as_f64().unwrap();
                // Products of other shapes round otherwise, and five digits are stored.
                assert!(
                    (own - theirs).abs() <= 1e-3 * theirs + 1e-9,
                    "{name} unit {unit} {serving}: {own}, by eval {theirs}"
                );
                compared += usize::from(theirs > 1e-7);
            }
        }
        assert!(compared >= 5, "{name}: {compared}");
    }
}

/// The bundled model, from a measurement to a run and on to other limits.
#[test]
fn a_plan_keeps_its_limit() {
    let scratch = Scratch::new();
    let model = root().join("calib-data/model").display().to_string();
    let tokens = scratch.tokens("text.json", &documents(&[700; 5], 4));
    let input = format!("--model {model} --tokens {tokens} --seq-len 700 --holdout 0.6");
    let art = scratch.make("art", &format!("calibrate {input} --size 16 --no-verdict"));
    let plan = scratch.path("plan.json");
    let tune = format!("tune {art} {input} --blocks 1 --check 2 --steps 12 --length 700");
    let told = kvsmith(&format!("{tune} --limit bytes=40% --json -o {plan}"));
    let json = told.json();
    let file = read(&plan);
    assert_eq!(json["head_plan"], file["head_plan"]);
    assert!(json.get("sensitivities").is_none());
    assert_eq!(json["limit"], json!({"of": "bytes", "most": 0.4}));
    assert_eq!(
        (&json["least"], &json["checked"]["blocks"]),
        (&json!("kl"), &json!(2))
    );
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap_or_else(|| panic!("{key} of {of}"));
    let expected = &json["expected"];
    assert!(number(expected, "bytes") <= 0.4 && number(expected, "bytes") > 0.3);
    assert!(number(&json, "bound") <= number(expected, "kl"));
    assert!(number(expected, "kl") <= number(&json["uniform"], "kl"));
    // What was expected is what is measured on other text.
    let checked = &json["checked"]["plan"];
    let share = number(checked, "bytes") / number(expected, "bytes");
    assert!((0.95..1.05).contains(&share), "{share}");
    assert!(number(checked, "kl") > 0.0);
    // `eval` and `run` serve the heads as the plan says.
    let held_out = &Artifact::open(Path::new(&art), SECTIONS)
        .unwrap()
        .manifest
        .origin
        .calibration
        .held_out;
    assert!(held_out.len() >= 2, "{held_out:?}");
    let prompt = scratch.tokens("prompt.json", &documents(&[300], 5));
    let run = kvsmith(&format!(
        "run --model {model} --artifact {art} --tokens {prompt} --max-new 2 --head-plan {plan} --json"
    ))
    .json();
    assert_eq!(run["head_plan"], file["head_plan"]);
    // For another limit nothing is measured; for the same one the plan is the same.
    let again = |limit: &str, more: &str| {
        let other = scratch.path("again.json");
        kvsmith(&format!(
            "tune --from {plan} --limit {limit} --overwrite -o {other} {more}"
        ))
        .ok();
        read(&other)
    };
    let same = again("bytes=0.4", "");
    assert_eq!(same["head_plan"], file["head_plan"]);
    assert_eq!(same["sensitivities"], file["sensitivities"]);
    assert!(same["checked"].is_null());
    let less = again("memory=0.3", "");
    assert!(number(&less["expected"], "memory") <= 0.3);
    let bytes = again("kl=0.001", "");
    let memory = again("kl=0.001", "--least memory");
    for (of, key) in [(&bytes, "bytes"), (&memory, "memory")] {
        assert!(number(&of["expected"], "kl") <= 0.001);
        let other = if key == "bytes" { &memory } else { &bytes };
        assert!(number(&of["expected"], key) <= number(&other["expected"], key));
    }
    // Times of `bench decode` decide between what was timed.
    let times = scratch.path("times.json");
    let row = |method: &str, budget: f64, ms: f64| {
        json!({"method": method, "budget": budget, "kv": "bf16", "context": 700, "batch": 1, "median_s": ms / 1e3,
               "device": "cpu", "weight_bytes": 1000})
    };
    let rows = [
        row("full", 0.06, 30.0),
        row("wpq", 0.01, 10.0),
        row("wpq", 0.2, 20.0),
    ];
    std::fs::write(
        &times,
        json!({"command": "bench decode", "rows": rows}).to_string(),
    )
    .unwrap();
    let timed = again("ms=15", &format!("--times {times}"));
    assert!(number(&timed["expected"], "ms") <= 15.0 && number(&timed["expected"], "ms") > 13.0);
    let text = timed["head_plan"].to_string();
    assert!(
        text.contains("wpq") && !text.contains("streaming") && !text.contains("int"),
        "{text}"
    );
    // What cannot be is said.
    let fails = |arguments: &str, code: i32, says: &str, hint: &str| {
        let other = scratch.path("never.json");
        kvsmith(&format!("tune {arguments} -o {other}")).fails(code, says, hint);
        assert!(!Path::new(&other).exists(), "{arguments}");
    };
    fails(
        &format!("--from {plan} --limit bytes=0.001"),
        1,
        "no plan of these choices",
        "raise the limit",
    );
    fails(
        &format!("--from {plan} --limit ms=10"),
        1,
        "was timed",
        "bench decode",
    );
    fails(
        &format!("--from {plan} --limit kl=1 --least kl"),
        2,
        "--least kl",
        "bytes",
    );
    fails(
        &format!("--from {plan} --limit rows=1"),
        2,
        "limit `rows=1` is invalid: expected kl=X",
        "",
    );
    fails(
        &format!("--from {times} --limit kl=1"),
        1,
        "no key `sensitivities`",
        "kvsmith tune",
    );
    fails(
        &format!("--from {plan} --limit ms=1 --times {plan}"),
        1,
        "not a document of `bench decode`",
        "--json",
    );
    fails(
        &format!("--from {plan} --limit kl=1 --blocks 2"),
        2,
        "--blocks",
        "",
    );
    fails(
        &format!("--from {tokens} --limit kl=1"),
        1,
        "no key `sensitivities`",
        "",
    );
    let cut = scratch.write("cut.json", "{");
    fails(
        &format!("--from {cut} --limit kl=1"),
        1,
        "not valid JSON",
        "kvsmith wrote",
    );
    let refused = kvsmith(&format!("tune --from {plan} --limit kl=1 -o {plan} --overwrite"));
    refused.fails(2, "is an input of this command", "another name");
    kvsmith(&format!("tune --from {plan} --limit kl=1 -o {times} --overwrite")).fails(
        2,
        "not written by kvsmith",
        "",
    );
    kvsmith(&format!(
        "tune --from {plan} --limit kl=1 -o {}",
        scratch.path("again.json")
    ))
    .fails(2, "already exists", "--overwrite");
}

/// Of a limit that nothing meets, one learns after the measurement, which is kept.
#[test]
fn a_measurement_is_kept_whatever_follows() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[140, 90, 140], 3));
    let input = format!("--model {model} --tokens {tokens} --seq-len 140 --holdout 0.5");
    let art = scratch.make("art", &format!("calibrate {input} --size 8 --no-verdict"));
    let (plan, again) = (scratch.path("plan.json"), scratch.path("again.json"));
    let tune = format!("tune {art} {input} --kv bf16 --kv int4 --kv bf16 --budgets 0.2,0.2");
    let late = kvsmith(&format!("{tune} --limit bytes=0.001 -o {plan}"));
    late.fails(1, "no plan of these choices", "raise the limit");
    assert!(
        late.stderr.contains("with the sensitivities alone"),
        "{}",
        late.stderr
    );
    let found = read(&plan);
    assert!(found.get("head_plan").is_none());
    // What was given twice was measured once: wpq, streaming, and full attention over int4.
    assert_eq!(found["sensitivities"]["ways"].as_array().unwrap().len(), 3);
    kvsmith(&format!("tune --from {plan} --limit kl=1 -o {again}")).ok();
    // Only full attention over bf16: there is nothing to measure.
    kvsmith(&format!(
        "tune {art} {input} --kv bf16 --methods full --limit bytes=1.1 --overwrite -o {again}"
    ))
    .ok();
    assert_eq!(read(&again)["expected"]["kl"], json!(0.0));
    kvsmith(&format!("{tune} --limit ms=3 --overwrite -o {again}")).fails(2, "--times", "bench decode");
}

/// Another model's artifact is refused, and other text is used whole; nothing is measured on text that was fitted.
#[test]
fn other_models_are_refused_and_other_text_is_used() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[140, 90, 140], 3));
    let input = format!("--tokens {tokens} --seq-len 140 --holdout 0.5");
    let art = scratch.make(
        "art",
        &format!("calibrate --model {model} {input} --size 8 --no-verdict"),
    );
    let plan = scratch.path("plan.json");
    let tune = |model: &str, input: &str| {
        kvsmith(&format!(
            "tune {art} --model {model} {input} --limit kl=1 -o {plan}"
        ))
    };
    tune(&checkpoint("qwen2_sliding"), &input).fails(1, "model", "");
    let other = scratch.tokens("other.json", &documents(&[140, 60, 140, 100], 9));
    let whole =
        format!("--tokens {other} --other-text --seq-len 140 --blocks 2 --check 8 --steps 5 --overwrite");
    tune(&model, &whole.replace(" --other-text", "")).fails(1, "calibrated on another text", "--other-text");
    // The calibration text with other flags, and with more behind it, is no other text.
    let longer = [documents(&[140, 90, 140], 3), documents(&[140], 9)].concat();
    let longer = scratch.tokens("longer.json", &longer);
    for own in [&tokens, &longer] {
        tune(
            &model,
            &format!("--tokens {own} --other-text --seq-len 140 --seed 5"),
        )
        .fails(1, "calibrated on this text", "held out");
    }
    let used = tune(&model, &whole);
    used.ok();
    let found = read(&plan);
    assert_eq!(found["sensitivities"]["other_text"], json!(true));
    // The document of 60 tokens is too short beside the others.
    assert_eq!(found["sensitivities"]["steps"], json!(10));
    assert_eq!(found["checked"]["blocks"], json!(1));
    std::fs::remove_file(&plan).unwrap();
    let without = scratch.make(
        "without",
        &format!(
            "calibrate --model {model} --tokens {tokens} --seq-len 140 --holdout 0 --size 8 --no-verdict"
        ),
    );
    kvsmith(&format!(
        "tune {without} --model {model} --tokens {tokens} --seq-len 140 --holdout 0 --limit kl=1 -o {plan}"
    ))
    .fails(1, "no text was held out", "--holdout");
    assert!(!Path::new(&plan).exists());
}
