//! The documents of `--json` are as docs/reference/json.md describes them.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::*;
use serde_json::{Value, json};

/// The type of a key that is described in the row of its list or object.
const ANY: &str = "any";

/// The keys of docs/reference/json.md by command, each with its types.
fn described() -> BTreeMap<String, BTreeMap<String, String>> {
    let page = std::fs::read_to_string(root().join("docs/reference/json.md")).unwrap();
    let mut commands: BTreeMap<String, BTreeMap<String, String>> = BTreeMap::new();
    let mut current: Vec<&str> = Vec::new();
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            current = title.split(", ").collect();
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let ["", key, types, meaning, ""] = cells[..]
            && let Some(key) = key.strip_prefix('`').and_then(|key| key.strip_suffix('`'))
        {
            // The keys within a list or an object stand in its own row, without types.
            let within = if types.contains("list") { "[]" } else { "" };
            let listed = meaning.split_once("Keys: ").map_or("", |(_, listed)| listed);
            let is_key = |name: &&str| name.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '_'));
            for command in &current {
                let keys = commands.entry((*command).to_owned()).or_default();
                let before = keys.insert(key.to_owned(), types.to_owned());
                assert_eq!(before, None, "{command} has {key} twice");
                for name in listed.split('`').skip(1).step_by(2).filter(is_key) {
                    let nested = keys.entry(format!("{key}{within}.{name}"));
                    nested.or_insert_with(|| ANY.to_owned());
                }
            }
        }
    }
    commands
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "list",
        Value::Object(_) => "object",
    }
}

type Types = BTreeMap<String, BTreeSet<&'static str>>;

/// Adds the keys of an object, after a prefix, with the types of their values; those of the objects in a list as
/// `list[].key` and those of an object as `object.key`, if the page describes any of them.
fn add(object: &Value, prefix: &str, described: &BTreeMap<String, String>, out: &mut Types) {
    let is_described = |within: &str| described.keys().any(|key| key.starts_with(within));
    for (key, value) in object.as_object().unwrap() {
        let name = format!("{prefix}{key}");
        out.entry(name.clone()).or_default().insert(type_of(value));
        let (of_list, of_object) = (format!("{name}[]."), format!("{name}."));
        match value {
            Value::Array(items) if is_described(&of_list) => {
                items.iter().for_each(|item| add(item, &of_list, described, out));
            }
            Value::Object(_) if is_described(&of_object) => add(value, &of_object, described, out),
            _ => {}
        }
    }
}

/// Compares the documents of a command, taken together, with its section of the page.
fn compare(command: &str, documents: &[Value]) {
    let page = described();
    let (common, own) = (&page["Every command"], &page[command]);
    // Rows of these have more keys, which depend on the section or the benchmark.
    let is_open = command.starts_with("bench") || command == "inspect";
    let mut seen = BTreeSet::new();
    for document in documents {
        assert_eq!(document["schema"], 1);
        assert_eq!(document["command"], command);
        assert_eq!(document["version"], env!("CARGO_PKG_VERSION"));
        let mut found = Types::new();
        add(document, "", own, &mut found);
        for (key, types) in found {
            let Some(described) = own.get(&key).or_else(|| common.get(&key)) else {
                assert!(
                    is_open && key.contains("[]."),
                    "{command} prints `{key}`, which the page does not have"
                );
                continue;
            };
            for of in types {
                let is_described = described == ANY || described.split(" or ").any(|name| name == of);
                assert!(
                    is_described,
                    "`{key}` of {command} is {of}, on the page {described}"
                );
            }
            seen.insert(key);
        }
    }
    let missing: Vec<&String> = own.keys().filter(|key| !seen.contains(*key)).collect();
    assert!(missing.is_empty(), "{command} does not print {missing:?}");
    let writes = !is_open && !["eval", "plan", "status"].contains(&command);
    assert_eq!(seen.contains("output"), writes, "{command}");
    assert!(
        command.starts_with("bench") || seen.contains("device"),
        "{command}"
    );
}

#[test]
fn every_command_prints_what_the_page_says() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60; 4], 1));
    let prompt = scratch.tokens("prompt.json", &documents(&[40], 2));
    let needles =
        json!({ "prompt_tokens": documents(&[40], 3)[0], "answer_tokens": [7], "task": "one", "length": 40 });
    let needles = scratch.write("needles.jsonl", needles.to_string());
    let bundled = root().join("calib-data/model").display().to_string();
    let batch = scratch.write("batch.jsonl", json!({ "prompt": "One prompt" }).to_string());
    let path = |name: &str| scratch.path(name);
    let json = |command: &str| kvsmith(&format!("{command} --json -q")).json();
    let dump = path("dump");
    compare(
        "dump",
        &[json(&format!(
            "dump --model {model} --tokens {tokens} --queries --values --holdout 0.3 -o {dump}"
        ))],
    );
    let moments =
        |options: &str, name: &str| json(&format!("moments --dump {dump} {options} -o {}", path(name)));
    compare(
        "moments",
        &[
            moments("--wrope-position 9", "moments"),
            moments("--rope standard", "own"),
        ],
    );
    for (command, options) in [
        ("codebook", "--size 8"),
        ("signs", ""),
        ("priors", ""),
        ("wpq", ""),
        ("rotation", ""),
        ("tail", ""),
        ("doublesparsity", ""),
        ("triattention", ""),
    ] {
        compare(
            command,
            &[json(&format!(
                "{command} --dump {dump} {options} -o {}",
                path(command)
            ))],
        );
    }
    compare("merge", &[json(&format!("merge {dump} -o {}", path("merged")))]);
    std::fs::create_dir_all(path("unfinished")).unwrap();
    let mark = json!({ "kind": "work folder", "process": 1, "made": true, "run": "", "files": ["hidden.safetensors", "layer-00000.safetensors"] });
    scratch.write("unfinished/state.json", mark.to_string());
    compare("status", &[json(&format!("status {}", path("")))]);
    std::fs::remove_dir_all(path("unfinished")).unwrap();
    let heads = |method: &str| json!({"heads": [{"repeat": 2, "method": method}]});
    let plan = json!({"head_plan": {"layers": [heads("topk"), heads("full")]}});
    let plan = scratch.write("plan.json", plan.to_string());
    let (plain, art) = (path("plain"), path("art"));
    let sections = [path("codebook"), path("signs"), path("wpq")].join(" ");
    compare(
        "pack",
        &[json(&format!("pack {sections} --model {model} -o {plain}"))],
    );
    let with_plan = path("with-plan");
    json(&format!(
        "pack {plain} --model {model} --head-plan {plan} -o {with_plan}"
    ));
    compare(
        "verdict",
        &[json(&format!(
            "verdict {plain} --model {model} --dump {dump} -o {}",
            path("judged")
        ))],
    );
    let calibrate = format!("calibrate --model {model} --tokens {tokens} --size 8 --holdout 0.3");
    // Methods are timed only where heads have a multiple of 32 channels.
    let wide = checkpoint("llama_d128");
    let planned = |options: &str| {
        json(&format!(
            "plan --model {wide} --no-verdict --tokens {tokens} --size 8 {options}"
        ))
    };
    let shards = |options: &str| planned(&format!("--shards auto {options}"));
    compare(
        "plan",
        &[
            planned("--no-probe"),
            shards(""),
            shards("--no-probe --tasks-at-once 2"),
        ],
    );
    let without = json(&format!("{calibrate} --no-verdict -o {}", path("without")));
    compare("calibrate", &[json(&format!("{calibrate} -o {art}")), without]);
    let tuned = path("tuned.json");
    let others = scratch.tokens("others.json", &documents(&[60; 4], 9));
    let tune = format!("--tokens {others} --other-text --blocks 1 --check 2 --limit kl=9");
    compare(
        "tune",
        &[
            json(&format!("tune {art} --model {model} {tune} -o {tuned}")),
            json(&format!(
                "tune --from {tuned} --limit memory=0.9 -o {}",
                path("again.json")
            )),
        ],
    );
    compare(
        "inspect",
        &[
            json(&format!("inspect {art}")),
            json(&format!("inspect {plain}")),
            json(&format!("inspect {with_plan}")),
        ],
    );
    compare(
        "report",
        &[json(&format!(
            "report {art} --against {plain} -o {}",
            path("page.html")
        ))],
    );
    let run = format!("run --model {model} --artifact {art} --max-new 3");
    let chat = json(&format!("{run} --chat --tokens {tokens}"));
    compare(
        "run",
        &[
            json(&format!("{run} --tokens {prompt} --ignore-eos")),
            json(&format!(
                "{run} --tokens {prompt} --ignore-eos --head-plan {plan}"
            )),
            chat,
            json(&format!(
                "run --model {model} --artifact {art} --compare full,wpq --tokens {prompt} --max-new 2"
            )),
            json(&format!(
                "run --model {bundled} --method full --batch {batch} --max-new 2 -o {}",
                path("replies")
            )),
        ],
    );
    let eval = format!("eval --model {model} --artifact {art} --methods topk,wpq --decode 5");
    let many = scratch.tokens("many.json", &documents(&[12; 20], 4));
    compare(
        "eval",
        &[
            json(&format!(
                "{eval} --tokens {tokens} --per-head --against {}",
                path("without")
            )),
            json(&format!("{eval} --tokens {tokens} --reads 0.01,0.9")),
            json(&format!("{eval} --tokens {tokens} --head-plan {plan}")),
            Outcome::from_output(
                command(&format!("{eval} --tokens {tokens} --json"))
                    .args(["--also", "lfps --lfps-theta 0.85", "--also-kv", "int8"])
                    .output()
                    .unwrap(),
            )
            .json(),
            json(&format!(
                "{eval} --tokens {many} --sinks 1 --window 2 --budgets 2"
            )),
            json(&format!(
                "{eval} --tokens {many} --sinks 1 --window 2 --budgets 2 --losses-only"
            )),
            json(&format!("{eval} --needles {needles}")),
            json(&format!("{eval} --tokens {tokens} --budgets topk=2,wpq=3")),
        ],
    );
}

#[test]
fn every_benchmark_prints_what_the_page_says() {
    for (name, options) in [
        ("kmeans", "--n 300 --dim 8 --size 4"),
        ("encode", "--n 300 --dim 24 --size 50"),
        (
            "prefill",
            "--tokens 64 --heads 2 --kv-heads 1 --head-dim 32 --hidden 64 --intermediate 64",
        ),
        ("retrieve", "--shapes 4/2x32 --context 1K --methods a2ats,lfps"),
        ("attend", "--shapes 4/2x32 --context 1K --methods full,selfindex"),
    ] {
        let document = kvsmith(&format!("bench {name} --device cpu --runs 1 {options} --json -q")).json();
        compare(&format!("bench {name}"), &[document]);
    }
}

#[test]
fn failures_are_documents_too() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[20], 1));
    let page = described();
    for (command, code) in [
        (
            format!("run --model {} --tokens {tokens}", scratch.path("none")),
            1,
        ),
        (format!("run --model {model} --tokens {tokens} --threads 0"), 2),
        ("bench encode --device cuda".to_owned(), 3),
        (format!("run --model {model} --no-such-flag"), 2),
        ("eval --budgets".to_owned(), 2),
    ] {
        let failed = kvsmith(&format!("{command} --json"));
        assert_eq!(failed.code, Some(code), "{command}: {}", failed.stderr);
        let document: Value = serde_json::from_str(&failed.stdout).unwrap();
        assert_eq!(document["schema"], 1);
        assert_eq!(document["command"], command.split(" -").next().unwrap());
        let error = &document["error"];
        assert_eq!(error["exit_code"], code);
        let message = error["message"].as_str().unwrap();
        assert!(
            failed.stderr.contains(&format!("error: {message}\n")),
            "{command}: {}",
            failed.stderr
        );
        match error["hint"].as_str() {
            // Those of the command line are in its own words on stderr.
            Some(hint) if !hint.contains("--help") => {
                assert!(failed.stderr.contains(&format!("hint: {hint}\n")));
            }
            Some(_) => assert!(failed.stderr.contains("--help")),
            None => assert!(!failed.stderr.contains("hint: ")),
        }
        let keys: Vec<String> = error
            .as_object()
            .unwrap()
            .keys()
            .map(|key| format!("error.{key}"))
            .collect();
        let described: Vec<&String> = page["A failure"].keys().filter(|key| key.contains('.')).collect();
        assert_eq!(keys.iter().collect::<Vec<_>>(), described);
        // Without --json stdout stays empty.
        assert_eq!(kvsmith(&command).stdout, "");
    }
}
