//! The limits of real chips: shared memory and launches as compute capabilities 8.0, 8.6 and 9.0 have them, drivers that
//! are older than the kernels, and `scripts/gpu_check.sh` on the stand-in.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvsmith::internal::method::registry::METHODS;
use serde_json::Value;

use super::common::{Outcome, no_cache, root};
use super::model::write_artifact;
use super::{command, library, reports};

/// Runs the program on a chip of this compute capability.
fn on_chip(driver: &Path, chip: u32, arguments: &str) -> Outcome {
    let mut command = command(driver, arguments);
    // The code for 8.0 runs on 8.6 too; later chips than 9.0 get the PTX of 9.0.
    let report = reports().join(format!("sm_{}.txt", if chip < 90 { 80 } else { 90 }));
    command
        .env("FAKE_CUDA_MIB", "512")
        .env("FAKE_CUDA_CHIP", chip.to_string())
        .env("FAKE_CUDA_REPORT", report);
    Outcome::from_output(command.output().unwrap())
}

/// The documented largest codebook, 12,288 codewords, and query group, 16 heads, on the smallest chip; `same_tokens` has 128
/// channels.
pub fn largest(driver: &Path) {
    let arguments = "bench retrieve --json --device cuda --shapes 16/1x32 --context 200 --size 12288 --methods a2ats --runs 1";
    let row = &on_chip(driver, 86, arguments).json()["rows"][0];
    assert_eq!(row["name"], "retrieve a2ats");
}

/// Prompts and steps of heads of 128 channels give the same tokens on every chip.
pub fn same_tokens(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    let ids: Vec<u32> = (3..90).collect();
    std::fs::write(dir.path().join("ids"), serde_json::to_string(&[ids]).unwrap()).unwrap();
    let tokens = |chip| {
        let arguments = format!(
            "run --json --device cuda --model tests/fixtures/golden/llama_d128 --tokens {at}/ids --method full --kv bf16 \
             --ignore-eos --max-new 4"
        );
        on_chip(driver, chip, &arguments).json()["ids"].clone()
    };
    let expected = tokens(90);
    assert!(
        expected.as_array().is_some_and(|ids| ids.len() == 4),
        "{expected}"
    );
    for chip in [80, 86] {
        assert_eq!(tokens(chip), expected, "{chip}");
    }
}

/// Counts the launches of each layer of a step's graph, which must be equal, and all others.
fn launches(graph: &str, layers: usize) -> (usize, usize) {
    let kernels: Vec<&str> = graph.split_whitespace().collect();
    let is_start = |i: usize| kernels[i] == "append_rows" && (i == 0 || kernels[i - 1] != "append_rows");
    let starts: Vec<usize> = (0..kernels.len()).filter(|i| is_start(*i)).collect();
    assert_eq!(starts.len(), layers, "{graph}");
    let each = starts[1] - starts[0];
    for pair in starts.windows(2) {
        assert_eq!(pair[1] - pair[0], each, "{graph}");
    }
    (each, kernels.len() - each * layers)
}

/// The launches of a decode step, as docs/dev/gpu.md lists them.
pub fn recorded_launches(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    write_artifact(driver, &dir.path().join("a.safetensors"));
    std::fs::write(
        dir.path().join("prompt"),
        "The key and the value of a token, ".repeat(12),
    )
    .unwrap();
    let doc = std::fs::read_to_string(root().join("docs/dev/gpu.md")).unwrap();
    let mut found = BTreeMap::new();
    for method in METHODS.iter() {
        let name = method.as_str();
        let log = dir.path().join(name);
        let arguments = format!(
            "run -q --json --model calib-data/model --artifact {at}/a.safetensors --prompt-file {at}/prompt --method {name} \
             --budget 0.1 --window 16 --max-new 3 --ignore-eos --device cuda"
        );
        let mut command = command(driver, &arguments);
        Outcome::from_output(command.env("FAKE_CUDA_LOG", &log).output().unwrap()).ok();
        if let Ok(graphs) = std::fs::read_to_string(&log) {
            let graph = graphs.lines().next().expect("a graph");
            let (each, others) = launches(graph, 4);
            found.insert(name.to_owned(), each);
            let said = format!("Besides these, a step has {others} launches.");
            assert!(doc.contains(&said), "docs/dev/gpu.md: {said} ({name})");
        }
    }
    let (_, table) = doc
        .split_once("| method | launches per layer |\n|---|---|\n")
        .expect("a table");
    let rows = table.lines().take_while(|line| line.starts_with("| "));
    let documented: BTreeMap<String, usize> = rows
        .map(|line| {
            let cells: Vec<&str> = line
                .split('|')
                .map(|cell| cell.trim().trim_matches('`'))
                .collect();
            (cells[1].to_owned(), cells[2].parse().expect("a number"))
        })
        .collect();
    assert_eq!(documented, found, "docs/dev/gpu.md, and what was recorded");
}

/// A driver of CUDA 12.2 has no dependencies across which a launch may begin early: the launches of a step are recorded
/// without them, in the same order, and give the same tokens.
pub fn before_overlaps(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().display();
    let ids: Vec<u32> = (3..90).collect();
    std::fs::write(dir.path().join("ids"), serde_json::to_string(&[ids]).unwrap()).unwrap();
    let run = |version: &str| {
        let log = dir.path().join(version);
        let mut command = command(
            driver,
            &format!(
                "run -q --json --device cuda --model tests/fixtures/golden/llama_d128 --tokens {at}/ids --method topk \
                 --budget 0.3 --window 16 --ignore-eos --max-new 4"
            ),
        );
        command
            .env("FAKE_CUDA_LOG", &log)
            .env("FAKE_CUDA_VERSION", version);
        let ids = Outcome::from_output(command.output().unwrap()).json()["ids"].clone();
        (ids, std::fs::read_to_string(log).expect("a graph"))
    };
    let (old, new) = (run("12020"), run("12030"));
    assert!(old.1.contains("attend_bfloat_128"), "{}", old.1);
    assert_eq!(old, new);
}

/// One step of attention.
const STEP: &str =
    "bench attend -v --json --device cuda --shapes 2/1x64 --context 100 --methods full --runs 1";

/// The images load on drivers of CUDA 12.0 and later. Later chips than 9.0 get PTX, which needs one of 12.4.
pub fn versions(driver: &Path) {
    let run = |chip: u32, version: u32| {
        let mut command = command(driver, STEP);
        command
            .env("FAKE_CUDA_CHIP", chip.to_string())
            .env("FAKE_CUDA_VERSION", version.to_string());
        Outcome::from_output(command.output().unwrap())
    };
    for (chip, oldest) in [
        (80, 12_000),
        (86, 12_000),
        (90, 12_000),
        (100, 12_040),
        (120, 12_040),
    ] {
        for version in [oldest, 12_090, 13_000] {
            let outcome = run(chip, version);
            assert_eq!(outcome.code, Some(0), "{chip} {version}: {}", outcome.stderr);
        }
        run(chip, oldest - 10).fails(
            3,
            "the driver is too old for the kernels",
            "update the NVIDIA driver",
        );
    }
}

/// A driver that is older than the kernels takes those of its own compiler; without one it is refused.
pub fn old_driver(driver: &Path) {
    let nvrtc = library("libnvrtc");
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let run = |with: bool| {
        let mut command = command(driver, STEP);
        if with {
            let folders = [nvrtc.path(), driver].map(|p| p.display().to_string()).join(":");
            command.env("LD_LIBRARY_PATH", format!("{folders}:{path}"));
        }
        Outcome::from_output(command.env("FAKE_CUDA_VERSION", "11080").output().unwrap())
    };
    let with = run(true);
    assert!(
        with.stderr.contains("stand-in NVRTC: --gpu-architecture=sm_90"),
        "{}",
        with.stderr
    );
    assert_eq!(with.code, Some(0), "{}", with.stderr);
    let without = run(false);
    assert_eq!(without.code, Some(3), "{}", without.stderr);
    assert!(
        without.stderr.contains("the driver is too old"),
        "{}",
        without.stderr
    );
}

/// A folder as `make gpu-kit` makes it; its tests are scripts that say what tests say, and take `seconds`.
fn kit(driver: &Path, seconds: u32, fails: &str) -> tempfile::TempDir {
    let kit = tempfile::tempdir().unwrap();
    let at = |name: &str| kit.path().join(name);
    let write = |name: &str, text: &str| {
        std::fs::write(at(name), text).unwrap();
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_kvsmith"), at("kvsmith")).unwrap();
    std::os::unix::fs::symlink(root().join("calib-data"), at("calib-data")).unwrap();
    std::os::unix::fs::symlink(driver, at("lib")).unwrap();
    let random_model = root().join("benches/make_random_model.py");
    std::os::unix::fs::symlink(random_model, at("make_random_model.py")).unwrap();
    for name in ["backends", "decode", "cuda_model", "cmd_device"] {
        let result = if name == fails {
            "echo 'test result: FAILED. 1 passed; 1 failed'; exit 101"
        } else {
            "echo 'test result: ok. 5 passed; 0 failed'"
        };
        write(name, &format!("#!/bin/sh\nsleep {seconds}\n{result}\n"));
    }
    kit
}

fn gpu_check(kit: &Path, out: &Path) -> Command {
    let mut command = Command::new("sh");
    command
        .arg(root().join("scripts/gpu_check.sh"))
        .args([kit, out])
        .arg("quick")
        .env("FAKE_CUDA_MIB", "64")
        .env("XDG_CACHE_HOME", no_cache())
        // Without a sanitizer and a profiler of the machine's own.
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn report(out: &Path) -> Value {
    let text = std::fs::read_to_string(out.join("gpu.json")).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The status of each part.
fn statuses(report: &Value) -> BTreeMap<String, String> {
    let parts = report["parts"].as_array().expect("parts").iter();
    let text = |part: &Value, key: &str| part[key].as_str().expect("a text").to_owned();
    parts
        .map(|part| (text(part, "name"), text(part, "status")))
        .collect()
}

/// The whole check runs on the stand-in; a test that fails is a failure, a tool that is not there is not.
pub fn check_script(driver: &Path) {
    let out = tempfile::tempdir().unwrap();
    let kit = kit(driver, 0, "decode");
    let outcome = Outcome::from_output(gpu_check(kit.path(), out.path()).output().unwrap());
    assert_eq!(outcome.code, Some(1), "{}", outcome.stderr);
    assert!(outcome.stderr.contains("failed: decode"), "{}", outcome.stderr);
    assert!(outcome.stdout.len() < 10_000);
    assert!(std::fs::read_dir(out.path()).unwrap().count() <= 4);
    let report = report(out.path());
    let expected = [
        ("gpu-check", "passed"),
        ("backends", "passed"),
        ("decode", "failed"),
        ("model", "passed"),
        ("calibrate", "passed"),
        ("attend", "passed"),
        ("attend-mean", "passed"),
        ("retrieve", "passed"),
        ("decode-long", "passed"),
        ("decode-short", "passed"),
        ("kernels", "not checked"),
        ("kmeans-one", "passed"),
        ("prefill", "passed"),
        ("calibrate-layers", "passed"),
        ("memcheck", "not checked"),
        ("racecheck", "not checked"),
    ];
    let expected = expected.map(|(name, status)| (name.to_owned(), status.to_owned()));
    assert_eq!(statuses(&report), BTreeMap::from(expected), "{report}");
    for name in [
        "attend",
        "attend-mean",
        "retrieve",
        "decode-long",
        "decode-short",
        "kmeans-one",
    ] {
        assert!(
            report["bench"][name]["rows"][0]["median_s"].is_number(),
            "{name}: {report}"
        );
    }
    assert!(report["bench"]["prefill"]["prefill_s"].is_number(), "{report}");
    let stages = &report["bench"]["calibrate-layers"]["stages"];
    assert!(
        stages.as_array().is_some_and(|stages| stages.len() > 3),
        "{report}"
    );
    let adapter = report["adapter"].as_str().expect("an adapter");
    assert!(
        adapter.starts_with("Fake GPU, compute capability 9.0, CUDA 13.0, products by "),
        "{adapter}"
    );
    let text = std::fs::read_to_string(out.path().join("gpu.json")).unwrap();
    assert!(
        text.starts_with("{\n  \"adapter\": \""),
        "the adapter comes first: {text}"
    );
}

/// Parts can be named; a calibration that is stopped leaves the times of its finished stages.
pub fn check_script_parts(driver: &Path) {
    let out = tempfile::tempdir().unwrap();
    let kit = kit(driver, 0, "");
    let program = kit.path().join("kvsmith");
    std::fs::remove_file(&program).unwrap();
    // Says what a calibration says, and ends as one that is stopped.
    let stopped = "#!/bin/sh\necho 'layer 0: capture 1.500 s\nlayer 0: codebooks 0.250 s\nlayer 1: capture 2.000 s' >&2\n\
        sleep 0.1\nexit 124\n";
    std::fs::write(&program, stopped).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let run = |part: &str| {
        let mut command = Command::new("sh");
        command.arg(root().join("scripts/gpu_check.sh"));
        Outcome::from_output(command.args([kit.path(), out.path()]).arg(part).output().unwrap())
    };
    let outcome = run("calibrate-layers");
    assert_eq!(outcome.code, Some(0), "{} {}", outcome.stdout, outcome.stderr);
    let report = report(out.path());
    assert_eq!(statuses(&report).len(), 1, "{report}");
    let stages =
        serde_json::json!([{ "name": "capture", "seconds": 3.5 }, { "name": "codebooks", "seconds": 0.25 }]);
    assert_eq!(report["bench"]["calibrate-layers"]["stages"], stages);
    let wrong = run("calibrat");
    assert_eq!(wrong.code, Some(2));
    assert!(wrong.stderr.contains("`calibrat` is no part"), "{}", wrong.stderr);
}

/// Killed at any time, it leaves a whole document of what it had.
pub fn check_script_killed(driver: &Path) {
    let out = tempfile::tempdir().unwrap();
    let kit = kit(driver, 1, "");
    let mut child = gpu_check(kit.path(), out.path()).spawn().unwrap();
    let start = Instant::now();
    let has_parts = || {
        let text = std::fs::read_to_string(out.path().join("gpu.json")).unwrap_or_default();
        // Whole whenever it is there.
        let known: Value = serde_json::from_str(&text).unwrap_or_default();
        assert!(text.is_empty() || known["parts"].is_array(), "{text}");
        text.contains("\"name\": \"decode\"")
    };
    while !has_parts() {
        assert!(start.elapsed() < Duration::from_secs(60), "no part has ended");
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let statuses = statuses(&report(out.path()));
    assert_eq!(statuses["backends"], "passed");
    assert_eq!(statuses["decode"], "passed");
    assert!(!statuses.contains_key("racecheck"), "{statuses:?}");
}

/// The limits of all parts but the sanitizers', which take what is left, add up to less than what the script may take.
pub fn check_script_limits(_: &Path) {
    let script = std::fs::read_to_string(root().join("scripts/gpu_check.sh")).unwrap();
    let limit = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let commands = ["tests", "bench", "kernels", "measure", "calibrate", "run"];
        let at = words.iter().position(|w| commands.contains(w))?;
        // `run` names the log first.
        let at = at + usize::from(words[at] == "run");
        let (name, limit) = (*words.get(at + 1)?, words.get(at + 2)?.parse::<u32>().ok()?);
        (name != "calibrate-8b").then_some(limit)
    };
    let limits: Vec<u32> = script.lines().filter_map(limit).collect();
    assert_eq!(limits.len(), 17, "{limits:?}");
    // `peers` has 20 s to look for PyTorch, and the random model of four layers 31 s to be written.
    assert!(script.contains("timeout 20 python3") && script.contains("timeout \"$((15 + 4 * $1))\" python3"));
    assert!(limits.iter().sum::<u32>() + 51 < 530, "{limits:?}");
    assert!(script.contains("deadline=$((start + 530))"));
}
