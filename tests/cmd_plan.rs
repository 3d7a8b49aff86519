//! `plan` against the memory and disk that `calibrate` and `dump` then take, and `calibrate --plan`.

mod common;

use std::path::Path;

use common::*;
use serde_json::Value;

/// Bytes of a file, or of the files of a folder.
fn bytes(path: &str) -> f64 {
    let path = Path::new(path);
    if path.is_file() {
        return path.metadata().unwrap().len() as f64;
    }
    let files = std::fs::read_dir(path).unwrap();
    files
        .map(|file| file.unwrap().metadata().unwrap().len() as f64)
        .sum()
}

#[track_caller]
fn close(planned: &Value, taken: f64, what: &str) {
    let planned = planned.as_f64().unwrap();
    assert!(
        (planned / taken - 1.0).abs() < 0.1,
        "{what}: {planned} planned, {taken} taken"
    );
}

#[test]
fn disk_is_what_is_taken() {
    // Shapes of heads, codebooks and texts, of which each makes another term the largest.
    for (name, lengths, options) in [
        ("llama_default", vec![900; 4], "--size 512"),
        ("llama_default", vec![150; 20], "--size 16 --wpq-bits none"),
        ("qwen3_norm", vec![700; 6], "--size 1024 --seq-len 400"),
        ("mistral_sliding", vec![2000; 2], "--size 64 --no-verdict"),
        ("qwen2_bias", vec![400; 9], "--size 256"),
    ] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(&lengths, 1));
        let flags = format!("--model {model} --tokens {tokens}");
        let plan = kvsmith(&format!("plan {flags} {options} --no-probe --json")).json();
        let (art, dump) = (scratch.path("art"), scratch.path("dump"));
        kvsmith(&format!("calibrate {flags} {options} -o {art}")).ok();
        close(
            &plan["artifact_bytes"],
            bytes(&art),
            &format!("{name} {options}: artifact"),
        );
        let cut = if options.contains("--seq-len") {
            "--seq-len 400"
        } else {
            ""
        };
        kvsmith(&format!("dump {flags} {cut} --queries --values -o {dump}")).ok();
        close(
            &plan["dump_bytes"],
            bytes(&dump),
            &format!("{name} {options}: dump"),
        );
    }
}

#[test]
fn weights_and_text_need_not_be_there() {
    let scratch = Scratch::new();
    let model = scratch.path("model");
    std::fs::create_dir(&model).unwrap();
    std::fs::copy(
        golden("llama_default/config.json"),
        format!("{model}/config.json"),
    )
    .unwrap();
    let plan = kvsmith(&format!(
        "plan --model {model} --max-tokens 3000 --uuid-tokens 0 --size 32 --no-probe --json"
    ))
    .json();
    assert_eq!(plan["weights_found"], false);
    assert_eq!(plan["tokens"], 3000);
    assert_eq!(plan["seconds"], Value::Null);
    let shown = kvsmith(&format!(
        "plan --model {model} --max-tokens 3000 --uuid-tokens 0 --size 32 --no-probe"
    ))
    .ok();
    assert!(shown.stdout.contains("no text given"), "{}", shown.stdout);
    assert!(
        shown.stdout.lines().all(|line| line.chars().count() <= 80),
        "{}",
        shown.stdout
    );
}

#[test]
fn stages_are_those_of_the_calibration() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_d128");
    let tokens = scratch.tokens("tokens.json", &documents(&[300; 5], 1));
    let art = scratch.path("art");
    let flags = format!("calibrate --model {model} --tokens {tokens} --size 16 -o {art}");
    let plan = kvsmith(&format!("{flags} --plan --json")).ok();
    assert!(!Path::new(&art).exists(), "a plan writes nothing");
    let shown = kvsmith(&format!("{flags} --plan -q")).ok().stdout;
    assert!(shown.lines().all(|line| line.chars().count() <= 80), "{shown}");
    // The small calibration that is timed says nothing.
    assert!(!plan.stderr.contains("recommended"), "{}", plan.stderr);
    let (plan, made) = (plan.json(), kvsmith(&format!("{flags} --json")).json());
    let names = |of: &Value| -> Vec<Value> {
        of["stages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|stage| stage["name"].clone())
            .collect()
    };
    assert_eq!(names(&plan), names(&made));
    for of in [&plan, &made] {
        let seconds = of["stages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|stage| number(stage, "seconds"));
        let sum: f64 = seconds.inspect(|seconds| assert!(*seconds > 0.0)).sum();
        assert!(sum <= number(of, "seconds") * 1.001);
    }
    let methods = plan["methods"].as_array().unwrap();
    assert_eq!(methods[0]["method"], "full");
    assert!(
        methods
            .iter()
            .all(|of| of["step_seconds"][0].as_f64().unwrap() > 0.0)
    );
    // The bytes of a cache of this shape: 2 KV heads of its channels in every layer, K and V in bf16.
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(golden("llama_d128/config.json")).unwrap()).unwrap();
    let of = |key: &str| config[key].as_u64().unwrap();
    let d = config["head_dim"]
        .as_u64()
        .unwrap_or_else(|| of("hidden_size") / of("num_attention_heads"));
    let token = 2 * 2 * d * of("num_key_value_heads") * of("num_hidden_layers");
    let bf16 = plan["caches"]
        .as_array()
        .unwrap()
        .iter()
        .find(|cache| cache["kv"] == "bf16")
        .unwrap();
    assert_eq!(bf16["bytes_per_token"], token);
}
