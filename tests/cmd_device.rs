//! Calibration with `--device`: the bundled model on every available device, against the CPU. A device that is not
//! available shows as ignored, with the reason; a separate test checks that asking for it fails.

mod common;

use std::process::ExitCode;

use common::*;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::compute::{self, Workload};
use kvsmith::internal::method::sections::SECTIONS;
use libtest_mimic::{Arguments, Trial};
use serde_json::{Value, json};

/// A check of one device.
type Check = fn(&str);

fn main() -> ExitCode {
    let mut trials = Vec::from(trials![
        no_vulkan_driver,
        auto_is_not_wgpu,
        other_commands_stay_on_the_cpu,
    ]);
    for (name, device) in [
        ("wgpu", compute::DeviceKind::Wgpu),
        ("cuda", compute::DeviceKind::Cuda),
    ] {
        let missing = compute::open(device, Workload::Fits, &|_| false, &|_| {}).err();
        if let Some(reason) = &missing {
            eprintln!("{name}: ignored, {reason}");
        }
        let there = missing.is_none();
        let test = |check: &str, run: Check, ignored: bool| {
            let run = move || {
                run(name);
                Ok(())
            };
            Trial::test(format!("{name}::{check}"), run).with_ignored_flag(ignored)
        };
        trials.push(test("calibrate", calibrate_agrees_with_the_cpu, !there));
        trials.push(test("chain", the_chain_by_hand_is_the_same, !there));
        trials.push(test("absent", asking_for_it_fails, there));
    }
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The bundled model and text, little of it.
fn input() -> String {
    let (model, text) = (
        root().join("calib-data/model"),
        root().join("calib-data/text.txt"),
    );
    format!(
        "--model {} --text {} --max-tokens 1536 --uuid-tokens 0 --seq-len 512 --wrope-position 1024 --seed 3",
        model.display(),
        text.display()
    )
}

/// The options of a calibration of which only the device matters.
const LITTLE: &str = "--size 8 --iterations 1 --wpq-bits none --no-verdict";

/// What the program says on stderr, less what a driver says there.
fn calibrate(device: &str, fit: &str, output: &str) -> Value {
    let done = kvsmith(&format!(
        "calibrate {} {fit} --no-verdict --precision f32 --device {device} -o {output}",
        input()
    ))
    .ok();
    let noted = done
        .stderr
        .lines()
        .any(|line| line.starts_with(&format!("device: {device} (")));
    assert_eq!(noted, device != "cpu", "{}", done.stderr);
    let told = match device {
        "cuda" => "the priors, the maps of rows and the tails run on the CPU",
        _ => "the model, the priors, the maps of rows and the tails run on the CPU",
    };
    assert_eq!(done.stderr.contains(told), device != "cpu", "{}", done.stderr);
    json!(Artifact::open(output.as_ref(), SECTIONS).unwrap().manifest)
}

fn calibrate_agrees_with_the_cpu(device: &str) {
    let scratch = Scratch::new();
    let fit = "--size 48 --iterations 8";
    let expected = calibrate("cpu", fit, &scratch.path("cpu"));
    let found = calibrate(device, fit, &scratch.path("device"));
    let model = root().join("calib-data/model");
    kvsmith(&format!(
        "inspect --verify --model {} {}",
        model.display(),
        scratch.path("device")
    ))
    .ok();
    assert_eq!(
        (&found["device"], &expected["device"]),
        (&json!(device), &json!("cpu"))
    );
    let mut heads = 0;
    for (layer, layers) in quality(&found).iter().zip(quality(&expected)).enumerate() {
        let (found, expected) = (layers.0.as_array().unwrap(), layers.1.as_array().unwrap());
        assert_eq!(found.len(), expected.len());
        for (head, (found, expected)) in found.iter().zip(expected).enumerate() {
            for name in ["inertia", "variance"] {
                let (found, expected) = (found[name].as_f64().unwrap(), expected[name].as_f64().unwrap());
                assert!(
                    (found - expected).abs() <= 1e-4 * expected,
                    "{name} of layer {layer}, head {head}: {found}, on the CPU {expected}"
                );
            }
            heads += 1;
        }
    }
    assert_eq!(heads, 8);
}

/// The quality of the codebooks, per layer and head.
fn quality(manifest: &Value) -> Vec<Value> {
    manifest["quality"]["a2ats"].as_array().unwrap().clone()
}

/// One device gives the same bytes, whichever command it is asked by.
fn the_chain_by_hand_is_the_same(device: &str) {
    let scratch = Scratch::new();
    let path = |file: &str| scratch.path(file);
    let fit = "--size 16 --iterations 3";
    calibrate(device, fit, &path("direct"));
    // wgpu cannot run the model.
    let model = if device == "wgpu" { "cpu" } else { device };
    let states = "--dtype f32 --queries --values --precision f32";
    let dump = scratch.make("dump", &format!("dump {states} {} --device {model}", input()));
    let on = format!("--dump {dump} --device {device}");
    let moments = scratch.make("moments", &format!("moments {on}"));
    let codebook = format!("codebook {on} --moments {moments} {fit} --seed 3");
    let codebook = scratch.make("a2ats", &codebook);
    let signs = scratch.make("signs", &format!("signs {on}"));
    let priors = scratch.make("priors", &format!("priors --dump {dump}"));
    let wpq = scratch.make("wpq", &format!("wpq {on} --moments {moments} --seed 3"));
    let rotation = format!("rotation --dump {dump} --moments {moments}");
    let rotation = scratch.make("rotation", &rotation);
    let tail = scratch.make("tail", &format!("tail --dump {dump} --seed 3"));
    let model = root().join("calib-data/model");
    let pack = format!(
        "pack {signs} {tail} {rotation} {priors} {wpq} {codebook} --model {}",
        model.display()
    );
    scratch.make("packed", &pack);
    let (direct, packed) = (read_tensors(path("direct")), read_tensors(path("packed")));
    for (name, tensor) in &direct {
        assert!(
            packed[name].bytes == tensor.bytes,
            "{name}: direct and packed differ"
        );
    }
    let bytes = |file: &str| std::fs::read(path(file)).unwrap();
    assert!(bytes("direct") == bytes("packed"), "direct and packed differ");
}

fn asking_for_it_fails(device: &str) {
    let scratch = Scratch::new();
    let output = scratch.path("art");
    kvsmith(&format!("calibrate {} --device {device} -o {output}", input())).fails(3, "", "--device cpu");
    assert!(!std::path::Path::new(&output).exists());
}

/// Neither a driver nor an adapter: the loader is shown an empty list.
fn no_vulkan_driver() {
    let scratch = Scratch::new();
    let output = scratch.path("art");
    let run = |device: &str| {
        let mut command = command(&format!(
            "calibrate {} {LITTLE} --device {device} -o {output}",
            input()
        ));
        for variable in ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"] {
            command.env(variable, scratch.path("none.json"));
        }
        Outcome::from_output(command.output().unwrap())
    };
    run("wgpu").fails(3, "wgpu found no adapter", "mesa-vulkan-drivers");
    assert!(!std::path::Path::new(&output).exists(), "no fallback");
    run("cpu").ok();
}

fn auto_is_not_wgpu() {
    let scratch = Scratch::new();
    let calibrate = format!("calibrate {} {LITTLE}", input());
    let output = scratch.make("art", &calibrate);
    let manifest = Artifact::open(output.as_ref(), SECTIONS).unwrap().manifest;
    assert_ne!(manifest.device, "wgpu");
}

fn other_commands_stay_on_the_cpu() {
    let scratch = Scratch::new();
    let dump = format!("dump {} --device wgpu -o {}", input(), scratch.path("dump"));
    kvsmith(&dump).fails(3, "`dump` cannot run on device `wgpu`", "--device cpu");
    for device in ["wgpu", "cuda"] {
        kvsmith(&format!("inspect --device {device} x")).fails(3, "cannot run on device", "--device cpu");
    }
}
