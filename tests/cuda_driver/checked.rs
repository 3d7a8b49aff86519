//! `kvsmith gpu-check`, and which device `--device auto` takes with and without its result.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use kvsmith::internal::compute::cuda::kernels;
use kvsmith::internal::cuda::check::UNCHECKED;
use serde_json::Value;

use super::command;
use super::common::{Outcome, root};

/// The emulation takes its time on a machine that does other things meanwhile.
const ANY_TIME: &str = "--seconds 3600";

/// Kernels that `gpu-check` launches: all but those of benchmarks.
pub fn launched() -> impl Iterator<Item = &'static str> {
    let all = kernels::ALL.iter().map(|kernel| kernel.name);
    all.filter(|name| !UNCHECKED.contains(name))
}

/// Runs the program with a cache folder of its own, on a driver with these settings.
fn run(driver: &Path, cache: &Path, settings: &[(&str, &str)], arguments: &str) -> Outcome {
    let mut command = command(driver, arguments);
    command.env("XDG_CACHE_HOME", cache);
    command.envs(settings.iter().copied());
    Outcome::from_output(command.output().unwrap())
}

/// The files in a cache folder.
fn stamps(cache: &Path) -> Vec<PathBuf> {
    let Ok(found) = cache.join("kvsmith").read_dir() else {
        return Vec::new();
    };
    found.map(|entry| entry.unwrap().path()).collect()
}

/// A check that passed: its document, and the stamp's name and text.
struct Passed {
    document: Value,
    name: String,
    text: Vec<u8>,
}

/// Runs `gpu-check` once for all tests.
fn passed(driver: &Path) -> &'static Passed {
    static PASSED: OnceLock<Passed> = OnceLock::new();
    PASSED.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let cache = dir.path().join("a cache");
        let document = run(driver, &cache, &[], &format!("gpu-check --json {ANY_TIME}")).json();
        let [file] = &stamps(&cache)[..] else {
            panic!("one stamp");
        };
        assert_eq!(document["stamp"], file.display().to_string());
        Passed {
            document,
            name: file.file_name().unwrap().to_str().unwrap().to_owned(),
            text: std::fs::read(file).unwrap(),
        }
    })
}

/// Lets `--device auto` use the stand-in: writes the stamp that `gpu-check` would, without its work.
pub fn stamp(driver: &Path, cache: &Path) {
    let Passed { name, text, .. } = passed(driver);
    std::fs::create_dir_all(cache.join("kvsmith")).unwrap();
    std::fs::write(cache.join("kvsmith").join(name), text).unwrap();
}

/// The device that `run` takes with `--device auto`, and what it says.
fn auto(driver: &Path, cache: &Path, settings: &[(&str, &str)]) -> (String, String) {
    let arguments = "run --json --model tests/fixtures/golden/llama_d128 --tokens tests/cuda_driver/ids.json --max-new 2 \
                     --method full --device auto";
    let outcome = run(driver, cache, settings, arguments);
    let said = outcome.stderr.clone();
    (outcome.json()["device"].as_str().unwrap().to_owned(), said)
}

/// A GPU passes: every kernel is launched, the table and the document agree, and `auto` then takes it.
pub fn passes(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let cache = dir.path().join("a cache");
    let (device, said) = auto(driver, &cache, &[]);
    assert_eq!(device, "cpu");
    let notes = said.matches("`kvsmith gpu-check`").count();
    assert!(
        notes == 1 && said.contains("Fake GPU, compute capability 9.0"),
        "{said}"
    );

    let document = &passed(driver).document;
    let keys = document.as_object().unwrap();
    check_documented(keys.keys().map(String::as_str));
    assert_eq!(document["passed"], true);
    assert_eq!(document["failure"], Value::Null);
    let names = document["kernels"].as_array().unwrap().iter();
    let names: BTreeSet<&str> = names.map(|name| name.as_str().unwrap()).collect();
    assert_eq!(names, launched().collect());
    for area in document["areas"].as_array().unwrap() {
        let worst = area["worst"].as_f64().unwrap();
        assert!(worst <= 1.0 && area["cases"].as_u64() > Some(0), "{area}");
        assert!(area["results"].as_u64() > Some(5), "{area}");
    }

    stamp(driver, &cache);
    let [file] = &stamps(&cache)[..] else {
        panic!("one stamp");
    };
    let (device, said) = auto(driver, &cache, &[]);
    assert_eq!(device, "cuda");
    assert!(!said.contains("gpu-check"), "{said}");
    // Another driver, and another chip, have not passed.
    assert_eq!(auto(driver, &cache, &[("FAKE_CUDA_VERSION", "13010")]).0, "cpu");
    assert_eq!(auto(driver, &cache, &[("FAKE_CUDA_CHIP", "80")]).0, "cpu");
    // Nor has another version of kvsmith, or with other products.
    for key in ["program", "adapter"] {
        let text = std::fs::read_to_string(file).unwrap();
        let mut changed: Value = serde_json::from_str(&text).unwrap();
        changed[key] = format!("{} changed", changed[key].as_str().unwrap()).into();
        std::fs::write(file, changed.to_string()).unwrap();
        let (device, said) = auto(driver, &cache, &[]);
        assert_eq!(device, "cpu", "{key}");
        assert_eq!(said.matches("`kvsmith gpu-check`").count(), 1, "{said}");
        std::fs::write(file, text).unwrap();
        assert_eq!(auto(driver, &cache, &[]).0, "cuda");
    }
    for damaged in ["", "{}", "[1]", "{\"gpu\": 3}"] {
        std::fs::write(file, damaged).unwrap();
        assert_eq!(auto(driver, &cache, &[]).0, "cpu", "{damaged}");
    }
}

/// Asked for by name, a GPU is used, with a note if it has not passed.
pub fn by_name(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let untried = |cache: &Path| {
        let arguments = "bench kmeans --json --device cuda --n 300 --dim 16 --size 4 --runs 1";
        let outcome = run(driver, cache, &[], arguments);
        let said = outcome.stderr.clone();
        assert_eq!(outcome.json()["rows"][0]["device"], "cuda");
        said.matches("the GPU is untried").count()
    };
    assert_eq!(untried(&dir.path().join("none")), 1);
    stamp(driver, dir.path());
    assert_eq!(untried(dir.path()), 0);
}

/// What is wrong is named, no stamp is written, and an earlier one is removed.
pub fn fails(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    stamp(driver, dir.path());
    let broken = run(driver, dir.path(), &[("FAKE_CUDA", "broken")], "gpu-check");
    assert_eq!(broken.code, Some(1), "{}", broken.stderr);
    assert!(broken.stdout.contains("failed: "), "{}", broken.stdout);
    assert!(
        broken.stderr.contains("a copy from the GPU failed"),
        "{}",
        broken.stderr
    );
    assert!(stamps(dir.path()).is_empty(), "the stamp is removed");
    stamp(driver, dir.path());
    let late = run(driver, dir.path(), &[], "gpu-check --seconds 0");
    assert_eq!(late.code, Some(1), "{}", late.stderr);
    let said = ["expected at most 0 seconds", "hint: use --device cpu"];
    assert!(
        said.iter().all(|text| late.stderr.contains(text)),
        "{}",
        late.stderr
    );
    assert!(stamps(dir.path()).is_empty(), "the stamp is removed");
    // The last block of one kernel does nothing.
    for (kernel, area) in [("channel_mean", "fits"), ("linear_bfloat", "products")] {
        stamp(driver, dir.path());
        let settings = [("FAKE_CUDA_WRONG", kernel)];
        let wrong = run(
            driver,
            dir.path(),
            &settings,
            &format!("gpu-check --json -q {ANY_TIME}"),
        );
        assert_eq!(wrong.code, Some(1), "{kernel}: {}", wrong.stderr);
        let document: Value = serde_json::from_str(&wrong.stdout).unwrap();
        assert_eq!(document["passed"], false, "{kernel}");
        assert_eq!(document["stamp"], Value::Null, "{kernel}");
        let failure = &document["failure"];
        assert_eq!(failure["area"], area, "{kernel}: {failure}");
        let names = failure["kernels"].as_array().unwrap();
        assert!(names.contains(&kernel.into()), "{kernel}: {failure}");
        for key in ["case", "what", "expected", "found"] {
            let said = failure[key].as_str().unwrap();
            assert!(
                !said.is_empty() && wrong.stderr.contains(said),
                "{kernel} {key}: {said}"
            );
        }
        assert!(stamps(dir.path()).is_empty(), "{kernel}");
        assert_eq!(auto(driver, dir.path(), &[]).0, "cpu");
    }
}

/// Without a GPU, or on another device, there is nothing to check; without a folder, no result to keep.
pub fn refused(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let none = run(driver, dir.path(), &[("FAKE_CUDA", "none")], "gpu-check");
    assert_eq!(none.code, Some(3), "{}", none.stderr);
    let cpu = run(driver, dir.path(), &[], "gpu-check --device cpu");
    assert_eq!(cpu.code, Some(3), "{}", cpu.stderr);
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    run(driver, &file, &[], "gpu-check").fails(1, "cannot write", "");
    let mut command = command(driver, "gpu-check");
    command.env_remove("XDG_CACHE_HOME").env_remove("HOME");
    Outcome::from_output(command.output().unwrap()).fails(
        1,
        "neither XDG_CACHE_HOME nor HOME",
        "set XDG_CACHE_HOME",
    );
    assert!(stamps(dir.path()).is_empty());
}

/// The keys of a document are those of docs/reference/json.md.
fn check_documented<'k>(keys: impl Iterator<Item = &'k str>) {
    let page = std::fs::read_to_string(root().join("docs/reference/json.md")).unwrap();
    let (_, section) = page.split_once("\n## gpu-check\n").expect("a section");
    let section = section.split("\n## ").next().unwrap();
    let rows = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let mut described: BTreeMap<&str, usize> = rows.map(|key| (key, 0)).collect();
    for key in keys.filter(|key| !["schema", "command", "version", "device"].contains(key)) {
        *described
            .get_mut(key)
            .unwrap_or_else(|| panic!("{key} is not on the page")) += 1;
    }
    let own = described.iter().filter(|(key, _)| !key.contains(['.', '[']));
    let missing: Vec<_> = own.filter(|(_, count)| **count == 0).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
