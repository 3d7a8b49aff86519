//! The program with `--device cuda` from end to end, on a driver that runs the kernels on the CPU, and every
//! way in which a driver can refuse.

mod bench;
mod model;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Output};

use kvsmith::artifact::Artifact;
use kvsmith::compute::cuda::kernels;
use kvsmith::method::a2ats;
use kvsmith::method::sections::SECTIONS;
use libtest_mimic::{Arguments, Trial};
use serde_json::Value;

/// What FAKE_CUDA breaks, and what the message must say.
const REFUSALS: [(&str, &str); 6] = [
    ("no_device", "finds no NVIDIA GPU"),
    ("none", "finds no NVIDIA GPU"),
    ("stub", "the driver does not start"),
    ("old_chip", "compute capability 7.5; 8.0 or later is needed"),
    ("no_image", "not for this GPU"),
    ("old_driver", "the driver is too old"),
];

fn main() -> ExitCode {
    let driver = match kernels::are_built_in() {
        true => build(),
        false => Err("this build has no kernels built in; `make cuda` fetches an nvcc".to_owned()),
    };
    if let Err(reason) = &driver {
        eprintln!("ignored, {reason}");
    }
    let ignored = driver.is_err();
    let mut trials = Vec::new();
    let mut add = |name: &str, check: fn(&Path)| {
        let driver = driver.clone();
        let trial = Trial::test(name, move || {
            check(&driver?);
            Ok(())
        });
        trials.push(trial.with_ignored_flag(ignored));
    };
    add("refusals", refusals);
    add("auto_falls_back", auto_falls_back);
    add("no_memory", no_memory);
    add("broken_kernel", broken_kernel);
    add("calibrate", calibrate);
    add("bench", bench::one_layer);
    add("bench_decode", bench::decode);
    add("bench_decode_without_room", bench::decode_without_room);
    add("run", model::run);
    add("run_rounded", model::run_rounded);
    add("host", model::host);
    add("chat", model::chat);
    add("eval", model::eval);
    add("dump", model::dump);
    add("cublas", model::cublas);
    add("room", model::room);
    add("small", model::small);
    add("unfit", model::unfit);
    add("everything", model::everything);
    add("not_finite", model::not_finite);
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of the driver, built once for each state of its sources.
fn build() -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libcuda");
    std::fs::create_dir_all(&folder).map_err(|e| e.to_string())?;
    let (source, library) = (
        root().join("tests/cuda_driver/libcuda.cpp"),
        folder.join("libcuda.so"),
    );
    let age = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
    let kernels = root().join("kernels").read_dir().map_err(|e| e.to_string())?;
    let sources = kernels
        .filter_map(|entry| Some(entry.ok()?.path()))
        .chain([source.clone()]);
    let newest = sources.filter_map(|path| age(&path)).max();
    if age(&library) > newest {
        return Ok(folder);
    }
    let output = Command::new("g++")
        .args([
            "-std=c++20",
            "-O2",
            "-shared",
            "-fPIC",
            "-ffp-contract=off",
            "-Wno-unknown-pragmas",
        ])
        .args(["-DKVSMITH_EMULATE", "-I"])
        .arg(root().join("kernels"))
        .arg(source)
        .arg("-o")
        .arg(&library)
        .output()
        .map_err(|e| format!("g++ does not run ({e}); on Debian or Ubuntu: apt-get install g++"))?;
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(folder)
}

/// Calibrates the bundled model, one small codebook a head, on a driver that fails as `wrong` says.
fn kvsmith(driver: &Path, wrong: &str, device: &str, out: &Path) -> Output {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    Command::new(env!("CARGO_BIN_EXE_kvsmith"))
        .current_dir(root())
        .env("LD_LIBRARY_PATH", format!("{}:{path}", driver.display()))
        .env("FAKE_CUDA", wrong)
        .args([
            "calibrate",
            "--json",
            "-v",
            "--model",
            "calib-data/model",
            "--text",
            "calib-data/text.txt",
        ])
        .args([
            "--max-tokens",
            "256",
            "--uuid-tokens",
            "0",
            "--size",
            "8",
            "--wrope-position",
            "64",
        ])
        .args([
            "--precision",
            "f32",
            "--iterations",
            "3",
            "--device",
            device,
            "-o",
        ])
        .arg(out)
        .output()
        .expect("kvsmith runs")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn refusals(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    for (wrong, expected) in REFUSALS {
        let output = kvsmith(driver, wrong, "cuda", &dir.path().join("a.safetensors"));
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(3), "{wrong}: {text}");
        assert!(text.contains(expected), "{wrong}: {text}");
        assert!(text.contains("hint: "), "{wrong}: {text}");
        assert!(!text.contains("panicked"), "{wrong}: {text}");
    }
}

fn auto_falls_back(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let output = kvsmith(driver, "no_device", "auto", &dir.path().join("a.safetensors"));
    let text = stderr(&output);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("device: cpu"), "{text}");
    assert!(text.contains("finds no NVIDIA GPU"), "-v tells why: {text}");
}

fn no_memory(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a.safetensors");
    let output = kvsmith(driver, "no_memory", "cuda", &out);
    let text = stderr(&output);
    assert!(!output.status.success());
    assert!(
        text.contains("out of GPU memory") && text.contains("MiB"),
        "{text}"
    );
    assert!(!out.exists(), "no artifact is left behind");
}

fn broken_kernel(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let output = kvsmith(driver, "broken", "cuda", &dir.path().join("a.safetensors"));
    let text = stderr(&output);
    assert!(!output.status.success());
    assert!(text.contains("a copy from the GPU failed"), "{text}");
}

/// The inertia of every head agrees with the CPU's, and the artifact says where it was made.
fn calibrate(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let inertia = |device: &str| {
        let out = dir.path().join(format!("{device}.safetensors"));
        let output = kvsmith(driver, "", device, &out);
        assert!(output.status.success(), "{device}: {}", stderr(&output));
        if device == "cuda" {
            let text = stderr(&output);
            assert!(
                text.contains("device: cuda (Fake GPU, compute capability 9.0, CUDA 13.0)"),
                "{text}"
            );
            assert!(text.contains("the CUDA kernels are built in"), "{text}");
        }
        let inspect = Command::new(env!("CARGO_BIN_EXE_kvsmith"))
            .args(["inspect", "--verify", "--json"])
            .arg(&out)
            .output()
            .expect("kvsmith runs");
        assert!(inspect.status.success(), "{}", stderr(&inspect));
        let inspected: Value = serde_json::from_slice(&inspect.stdout).unwrap();
        assert_eq!(inspected["device"], device);
        let artifact = Artifact::open(&out, SECTIONS).unwrap();
        let section = artifact.section(a2ats::SECTION).expect("how good each head is");
        let heads = section.quality.iter().flatten();
        heads
            .map(|head| head["inertia"].as_f64().expect("an inertia"))
            .collect::<Vec<f64>>()
    };
    let (cuda, cpu) = (inertia("cuda"), inertia("cpu"));
    assert_eq!(cuda.len(), cpu.len());
    assert!(!cpu.is_empty());
    for (head, (cuda, cpu)) in cuda.iter().zip(&cpu).enumerate() {
        assert!((cuda - cpu).abs() <= 1e-4 * cpu, "head {head}: {cuda} {cpu}");
    }
}
