//! The program with `--device cuda` from end to end, on a driver that runs the kernels on the CPU, and every
//! way in which a driver can refuse.

mod bench;
mod checked;
mod chips;
#[path = "../common/mod.rs"]
mod common;
#[path = "../backends/emulated.rs"]
mod emulated;
mod libraries;
mod memory;
mod model;
mod noticed;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use common::{Outcome, kept, root};
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::compute::cuda::kernels;
use kvsmith::internal::method::a2ats;
use kvsmith::internal::method::sections::SECTIONS;
use libtest_mimic::{Arguments, Trial};

/// A test of a stand-in, given its folder.
type Check = fn(&Path);

/// What FAKE_CUDA breaks, and what the message must say.
const REFUSALS: [(&str, &str); 5] = [
    ("no_device", "finds no NVIDIA GPU"),
    ("none", "finds no NVIDIA GPU"),
    ("stub", "cannot start the driver"),
    ("old_chip", "compute capability 7.5; kvsmith needs 8.0 or later"),
    ("no_image", "do not support this GPU"),
];

fn main() -> ExitCode {
    let driver = if kernels::are_built_in() {
        build()
    } else {
        Err("this build has no kernels built in; `make cuda` fetches an nvcc".to_owned())
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
    add("run_planned", model::run_planned);
    add("constant_heads", model::constant_heads);
    add("run_rounded", model::run_rounded);
    add("host", model::host);
    add("chat", model::chat);
    add("eval", model::eval);
    add("dump", model::dump);
    add("cublas", model::cublas);
    add("gpu_check_passes", checked::passes);
    add("gpu_check_fails", checked::fails);
    add("gpu_check_refused", checked::refused);
    add("gpu_by_name", checked::by_name);
    add("cublas_places", libraries::places);
    add("cublas_missing", libraries::missing);
    add("cublas_recorded", libraries::recorded);
    add("room", model::room);
    add("small", model::small);
    add("memory_estimates", memory::estimates);
    add("memory_fitting", memory::fitting);
    add("memory_of_a_batch", memory::batch);
    add("memory_of_other_commands", memory::other_commands);
    add("unfit", model::unfit);
    add("everything", model::everything);
    add("not_finite", model::not_finite);
    add("not_finite_key", model::not_finite_key);
    add("largest", chips::largest);
    add("same_tokens", chips::same_tokens);
    add("recorded_launches", chips::recorded_launches);
    add("an_old_driver", chips::old_driver);
    add("check_script", chips::check_script);
    add("check_script_parts", chips::check_script_parts);
    add("check_script_killed", chips::check_script_killed);
    add("check_script_limits", chips::check_script_limits);
    for kernel in noticed::kernels() {
        trials.push(Trial::test(format!("gpu_check_notices::{kernel}"), move || {
            noticed::check(kernel);
            Ok(())
        }));
    }
    trials.push(Trial::test("gpu_check_documented", || {
        noticed::is_documented();
        Ok(())
    }));
    // An nvcc of the machine's own may be of CUDA 13.
    let made_by = kernels::image((9, 0)).and_then(kernels::made_by_cuda);
    let is_new = made_by.is_some_and(|made_by| made_by > 12);
    if is_new {
        eprintln!("versions, before_overlaps: ignored, the kernels are those of a compiler of CUDA 13");
    }
    let of_old_drivers: [(&str, Check); 2] = [
        ("versions", chips::versions),
        ("before_overlaps", chips::before_overlaps),
    ];
    for (name, check) in of_old_drivers {
        let driver = driver.clone();
        let trial = Trial::test(name, move || {
            check(&driver?);
            Ok(())
        });
        trials.push(trial.with_ignored_flag(ignored || is_new));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The folder of the driver, built once for each state of its sources.
fn build() -> Result<PathBuf, String> {
    const FLAGS: [&str; 8] = [
        "-std=c++20",
        "-O3",
        "-shared",
        "-fPIC",
        "-ffp-contract=off",
        "-Wno-unknown-pragmas",
        "-DKVSMITH_EMULATE",
        "-I",
    ];
    let source = root().join("tests/cuda_driver/libcuda.cpp");
    let kernels = root().join("kernels");
    let mut files: Vec<PathBuf> = kernels
        .read_dir()
        .map_err(|e| e.to_string())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .chain([source.clone()])
        .collect();
    files.sort();
    let sources: Vec<Vec<u8>> = files
        .iter()
        .map(std::fs::read)
        .collect::<std::io::Result<_>>()
        .map_err(|e| e.to_string())?;
    kept("libcuda", (FLAGS, sources), |folder| {
        std::fs::create_dir_all(folder).map_err(|e| e.to_string())?;
        let output = Command::new("g++")
            .args(FLAGS)
            .arg(kernels)
            .arg(source)
            .arg("-o")
            .arg(folder.join("libcuda.so"))
            .output()
            .map_err(|e| format!("g++ does not run ({e}); on Debian or Ubuntu: apt-get install g++"))?;
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    })
}

/// The folder of what nvcc said of the kernels.
fn reports() -> &'static Path {
    Path::new(option_env!("KVSMITH_KERNEL_REPORTS").unwrap_or_default())
}

/// A folder with a stand-in for one of NVIDIA's libraries, of this name here.
fn library(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let made = Command::new("g++")
        .args(["-std=c++20", "-O2", "-shared", "-fPIC", "-o"])
        .arg(folder.path().join(format!("{name}.so")))
        .arg(root().join(format!("tests/cuda_driver/{name}.cpp")))
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    folder
}

/// The program in the repository, on the stand-in's driver.
fn command(driver: &Path, arguments: &str) -> Command {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let mut command = common::command(arguments);
    command
        .current_dir(root())
        .env("LD_LIBRARY_PATH", format!("{}:{path}", driver.display()))
        // Whether there is a cuBLAS on this machine makes no difference.
        .env("KVSMITH_CUBLAS", "")
        .env("FAKE_CUDA_REPORT", reports().join("sm_90.txt"));
    command
}

/// Runs the program on a driver that fails as `wrong` says.
fn run_wrong(driver: &Path, wrong: &str, arguments: &str) -> Outcome {
    let mut command = command(driver, arguments);
    Outcome::from_output(command.env("FAKE_CUDA", wrong).output().unwrap())
}

/// Calibrates the bundled model, one small codebook a head, on a driver that fails as `wrong` says.
fn calibrated(driver: &Path, wrong: &str, device: &str, out: &Path) -> Outcome {
    let arguments = format!(
        "calibrate --json -v --model calib-data/model --text calib-data/text.txt --max-tokens 256 --uuid-tokens 0 \
         --size 8 --wrope-position 64 --seq-len 256 --verdict-tokens 256 --precision f32 --iterations 3 --device {device} -o {}",
        out.display()
    );
    run_wrong(driver, wrong, &arguments)
}

fn refusals(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    for (wrong, expected) in REFUSALS {
        let Outcome { code, stderr, .. } =
            calibrated(driver, wrong, "cuda", &dir.path().join("a.safetensors"));
        assert_eq!(code, Some(3), "{wrong}: {stderr}");
        assert!(stderr.contains(expected), "{wrong}: {stderr}");
        assert!(stderr.contains("hint: "), "{wrong}: {stderr}");
        assert!(!stderr.contains("panicked"), "{wrong}: {stderr}");
    }
}

fn auto_falls_back(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let outcome = calibrated(driver, "no_device", "auto", &dir.path().join("a.safetensors"));
    let text = outcome.ok().stderr;
    assert!(text.contains("device: cpu"), "{text}");
    assert!(text.contains("finds no NVIDIA GPU"), "-v tells why: {text}");
}

fn no_memory(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a.safetensors");
    let Outcome { code, stderr, .. } = calibrated(driver, "no_memory", "cuda", &out);
    assert_ne!(code, Some(0));
    assert!(
        stderr.contains("out of GPU memory") && stderr.contains("MiB"),
        "{stderr}"
    );
    assert!(!out.exists(), "no artifact is left behind");
}

fn broken_kernel(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a.safetensors");
    let Outcome { code, stderr, .. } = calibrated(driver, "broken", "cuda", &out);
    assert_ne!(code, Some(0), "{stderr}");
    assert!(stderr.contains("a copy from the GPU failed"), "{stderr}");
}

/// The inertia of every head agrees with the CPU's, and the artifact says where it was made.
fn calibrate(driver: &Path) {
    let dir = tempfile::tempdir().unwrap();
    let inertia = |device: &str| {
        let out = dir.path().join(format!("{device}.safetensors"));
        let text = calibrated(driver, "", device, &out).ok().stderr;
        if device == "cuda" {
            assert!(
                text.contains(
                    "device: cuda (Fake GPU, compute capability 9.0, CUDA 13.0, products by kvsmith)"
                ),
                "{text}"
            );
            assert!(text.contains("the CUDA kernels are built in"), "{text}");
        }
        let inspected = common::kvsmith(&format!("inspect --verify --json {}", out.display())).json();
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
