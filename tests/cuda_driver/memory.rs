//! What a session needs of the device's memory is known before anything is copied, and close to what it takes.

use std::path::Path;

use super::command;
use super::common::Outcome;
use super::model::write_artifact;

/// Positions of the caches: the rows of a layer are then whole pages of 2 MiB, to which a GPU rounds.
const POSITIONS: usize = 1 << 16;
/// Tokens of the prompt.
const PROMPT: usize = 120;

/// What the program said, and what it did to the device's memory.
struct Used {
    outcome: Outcome,
    /// The most bytes that were allocated.
    most: f64,
    /// Bytes that were copied to the device.
    copied: f64,
}

fn run(driver: &Path, dir: &Path, mib: usize, arguments: &str) -> Used {
    let used = dir.join("used");
    let mut command = command(driver, arguments);
    command
        .env("FAKE_CUDA_MIB", mib.to_string())
        .env("FAKE_CUDA_USE", &used);
    let outcome = Outcome::from_output(command.output().unwrap());
    let text = std::fs::read_to_string(used).unwrap();
    let numbers: Vec<f64> = text.split(' ').map(|n| n.parse().unwrap()).collect();
    Used {
        outcome,
        most: numbers[0],
        copied: numbers[1],
    }
}

/// The amount in MiB after these words.
#[track_caller]
fn mib_after(text: &str, words: &str) -> f64 {
    let (_, rest) = text
        .split_once(words)
        .unwrap_or_else(|| panic!("{words} in {text}"));
    let mut parts = rest.trim_start().split([' ', ',', ';', '\n']);
    let number = parts.next().and_then(|number| number.parse().ok());
    let number = number.unwrap_or_else(|| panic!("{words} in {text}"));
    assert_eq!(parts.next(), Some("MiB"), "{rest}");
    number
}

/// A folder with an artifact and the ids of a prompt.
fn scratch(driver: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_artifact(driver, &dir.path().join("a.safetensors"));
    let ids: Vec<usize> = (0..PROMPT).map(|i| 3 + i * 7 % 900).collect();
    std::fs::write(dir.path().join("ids"), serde_json::to_string(&vec![ids]).unwrap()).unwrap();
    dir
}

/// A run with this many positions that ends after a few tokens.
fn arguments(dir: &Path, positions: usize, more: &str) -> String {
    let at = dir.display();
    format!(
        "run -v --json --device cuda --model calib-data/model --artifact {at}/a.safetensors --tokens {at}/ids --budget 0.1 \
         --window 16 --max-new {} --stop e --stop a --stop t --stop o {more}",
        positions - PROMPT
    )
}

/// For every method: the estimate covers what is allocated and is at most a tenth above it; with a MiB less, the command
/// fails before it copies anything.
pub fn estimates(driver: &Path) {
    let dir = scratch(driver);
    let on_device = [
        "full",
        "topk",
        "streaming",
        "random",
        "a2ats",
        "selfindex",
        "lfps",
        "wpq",
        "ctkvr",
    ];
    let plain = on_device.map(|method| (method, "", true));
    let others = [
        ("full", "--kv f32", true),
        ("full", "--kv 2bit", true),
        ("a2ats", "--kv 2bit", true),
        ("selfindex", "--kv 2bit", true),
        ("wpq", "--kv 2bit", true),
        ("full", "--kv host", true),
        ("a2ats", "--kv host", true),
        ("selfindex", "--kv host", true),
        // The cache is on the CPU.
        ("quest", "", false),
    ];
    for (method, more, is_on_device) in plain.into_iter().chain(others) {
        let name = format!("{method} {more}");
        let arguments = arguments(dir.path(), POSITIONS, &format!("--method {method} {more}"));
        let Used {
            outcome,
            most,
            copied,
        } = run(driver, dir.path(), 1000, &arguments);
        let (said, json) = (outcome.stderr.clone(), outcome.json());
        let fallbacks = json["fallbacks"].as_array().unwrap();
        assert_eq!(fallbacks.is_empty(), is_on_device, "{name}");
        assert!(copied > 4e6, "{name}: the weights are copied");
        let (least, total) = (most / f64::from(1 << 20), mib_after(&said, "together"));
        assert!(
            total >= least && total <= 1.1 * least,
            "{name}: an estimate of {total} MiB, {least} MiB were allocated"
        );
        let enough = total.ceil() as usize;
        let short = run(driver, dir.path(), enough - 1, &arguments);
        short
            .outcome
            .fails(1, "out of GPU memory: the model's weights need", "");
        assert_eq!(short.copied, 0.0, "{name}");
        if is_on_device {
            let caches = format!("of {POSITIONS} positions");
            let mut lines = short.outcome.stderr.lines().rev();
            let error = lines.find(|line| line.starts_with("error: ")).unwrap();
            let parts = ["the model's weights need", &caches, "the index", "the workspaces"];
            let sum: f64 = parts.map(|words| mib_after(error, words)).iter().sum();
            // Every part is rounded up to a tenth.
            assert!((-0.01..0.5).contains(&(sum - total)), "{name}: {sum} of {total}");
        }
        run(driver, dir.path(), enough, &arguments).outcome.ok();
    }
}

/// The positions that the error names fit, and a tenth more do not.
pub fn fitting(driver: &Path) {
    let dir = scratch(driver);
    for (method, mib) in [("full", 100), ("wpq", 100), ("lfps", 150)] {
        let with = |positions| arguments(dir.path(), positions, &format!("--method {method}"));
        let refused = run(driver, dir.path(), mib, &with(1 << 18));
        assert_eq!(refused.outcome.code, Some(1), "{}", refused.outcome.stderr);
        let (_, rest) = refused.outcome.stderr.split_once("are free; about ").unwrap();
        let fitting: usize = rest.split(' ').next().unwrap().parse().unwrap();
        assert!(fitting > 10_000, "{fitting}");
        run(driver, dir.path(), mib, &with(fitting)).outcome.ok();
        let beyond = run(driver, dir.path(), mib, &with(fitting + fitting / 10));
        assert_eq!(
            beyond.outcome.code,
            Some(1),
            "{method}: {fitting} and a tenth more fit"
        );
    }
}

/// `eval` and `bench decode` are refused before anything is copied, too.
pub fn other_commands(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path().display();
    let eval = format!(
        "eval --device cuda --model calib-data/model --artifact {at}/a.safetensors --text calib-data/heldout.txt \
         --max-tokens 400 --methods a2ats"
    );
    let used = run(driver, dir.path(), 4, &eval);
    used.outcome
        .fails(1, "out of GPU memory: the model's weights need", "");
    assert_eq!(used.copied, 0.0);
    let bench = "bench decode --device cuda --size 16 --runs 1 --methods a2ats --context 64K \
                 --config tests/fixtures/golden/llama_d128/config.json";
    let used = run(driver, dir.path(), 64, bench);
    used.outcome
        .fails(1, "the KV cache of 65536 positions", "reduce --context");
}

/// Replies of a batch are those of single runs, with caches on the device or on the host. If the device's memory holds one
/// sequence alone, the others wait for it.
pub fn batch(driver: &Path) {
    let dir = scratch(driver);
    let at = dir.path();
    let prompts = [
        "The lighthouse on the hill",
        "In the morning",
        "A letter came for them",
    ];
    let line = |(i, prompt): (usize, &&str)| {
        serde_json::json!({ "id": i, "prompt": prompt, "max_new": POSITIONS }).to_string()
    };
    let lines: Vec<String> = prompts.iter().enumerate().map(line).collect();
    std::fs::write(at.join("prompts.jsonl"), lines.join("\n")).unwrap();
    for (method, more, where_) in [
        ("wpq", "", "device"),
        ("selfindex", "--kv host", "host"),
        ("quest", "", "cpu"),
    ] {
        let common = format!(
            "-v --json --device cuda --model calib-data/model --artifact {}/a.safetensors --method {method} --budget 0.1 \
             --window 16 --beyond-context --stop e --stop a --stop t {more}",
            at.display()
        );
        let batch = |out: &str, mib: usize, sequences: usize| {
            let arguments = format!(
                "run --batch {0}/prompts.jsonl -o {0}/{out} --sequences {sequences} {common}",
                at.display()
            );
            run(driver, at, mib, &arguments)
        };
        let name = format!("{method}-{where_}");
        let all = batch(&format!("{name}-all"), 1000, 3);
        let said = all.outcome.stderr.clone();
        assert_eq!(all.outcome.json()["batch"]["replies"], 3, "{said}");
        let fell_back = said.contains("the KV cache and the selection are on the CPU");
        assert_eq!(fell_back, where_ == "cpu", "{said}");
        let replies = |out: &str| -> Vec<(u64, serde_json::Value)> {
            let text = std::fs::read_to_string(at.join(out)).unwrap();
            let of = |line: &str| {
                let reply: serde_json::Value = serde_json::from_str(line).unwrap();
                (reply["id"].as_u64().unwrap(), reply["ids"].clone())
            };
            let mut replies: Vec<_> = text.lines().map(of).collect();
            replies.sort_by_key(|(id, _)| *id);
            replies
        };
        let together = replies(&format!("{name}-all"));
        for ((_, ids), prompt) in together.iter().zip(prompts) {
            let mut alone = command(driver, &format!("run --max-new {POSITIONS} {common} --prompt"));
            let alone = Outcome::from_output(alone.arg(prompt).output().unwrap()).json();
            assert_eq!(*ids, alone["ids"], "{name}");
        }
        if where_ != "device" {
            continue;
        }
        // Room for the weights and one sequence, and not for two.
        let mib = mib_after(&said, "together").ceil() as usize;
        let waited = batch(&format!("{name}-waited"), mib, 3);
        waited.outcome.ok();
        assert_eq!(replies(&format!("{name}-waited")), together);
        let (most, all) = (waited.most / f64::from(1 << 20), all.most / f64::from(1 << 20));
        assert!(most <= mib as f64 && all > 1.5 * most, "{most} {all}");
        // Two sequences share the weights: three take less than three times as much as one.
        assert!(all < 2.9 * most, "{most} {all}");
        let short = batch(&format!("{name}-short"), mib - 1, 3);
        short
            .outcome
            .fails(1, "out of GPU memory: the model's weights need", "");
        assert_eq!(short.copied, 0.0);
    }
}
