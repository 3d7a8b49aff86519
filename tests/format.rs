//! Artifacts of earlier versions: each is read as before, or refused with the command that makes it again.

use crate::common::{Scratch, documents, golden, json_lines, kvsmith, root};
use serde_json::Value;

/// A file beside the artifact of format 1.
fn fixture(name: &str) -> String {
    root()
        .join("tests/fixtures/artifact")
        .join(name)
        .display()
        .to_string()
}

fn model() -> String {
    golden("llama_default").display().to_string()
}

/// The format that this version writes.
fn own_format(scratch: &Scratch) -> u64 {
    let tokens = scratch.tokens("own.json", &documents(&[60, 60], 1));
    let calibrate = format!("calibrate --model {} --tokens {tokens} --size 4", model());
    let path = scratch.make("own.safetensors", &calibrate);
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let manifest: Value = serde_json::from_str(header["__metadata__"]["kvsmith"].as_str().unwrap()).unwrap();
    manifest["format"].as_u64().unwrap()
}

#[test]
fn an_artifact_of_format_1_runs_or_is_refused_by_name() {
    let scratch = Scratch::new();
    let (model, artifact) = (model(), fixture("format-1.safetensors"));
    let inspected = kvsmith(&format!("inspect {artifact} --verify --model {model} --json"));
    if inspected.code != Some(0) && own_format(&scratch) != 1 {
        inspected.fails(1, "format 1", "kvsmith calibrate");
        return;
    }
    let inspected = inspected.json();
    let sections: Vec<&String> = inspected["sections"].as_object().unwrap().keys().collect();
    assert_eq!(sections, ["a2ats", "lfps", "sign"]);
    let runs: Vec<Value> = serde_json::from_slice(&std::fs::read(fixture("runs.json")).unwrap()).unwrap();
    assert_eq!(runs.len(), sections.len());
    for run in runs {
        let options = run["options"].as_str().unwrap();
        let prompt = fixture("prompt.json");
        let arguments =
            format!("run --model {model} --artifact {artifact} --tokens {prompt} --json {options}");
        // On the CPU: the tokens were recorded there.
        let found = kvsmith(&format!("{arguments} --device cpu")).json();
        assert_eq!(found["ids"], run["ids"], "{options}");
    }
}

/// Every method reads its section as the program did that wrote it: the same tokens, and in every step, layer and KV head the same
/// positions.
#[test]
fn sections_of_an_earlier_build_give_its_tokens_and_choices() {
    let scratch = Scratch::new();
    let (model, artifact) = (model(), fixture("all-sections.safetensors"));
    let inspected = kvsmith(&format!("inspect {artifact} --verify --model {model} --json")).json();
    let sections: Vec<&String> = inspected["sections"].as_object().unwrap().keys().collect();
    let expected = [
        "a2ats",
        "doublesparsity",
        "lfps",
        "sign",
        "tail",
        "triattention",
        "wpq",
    ];
    assert_eq!(sections, expected);
    let runs = std::fs::read(fixture("all-sections.json")).unwrap();
    let runs: Vec<Value> = serde_json::from_slice(&runs).unwrap();
    assert!(runs.len() > 12, "{}", runs.len());
    for (i, run) in runs.iter().enumerate() {
        let options = run["options"].as_str().unwrap();
        let (prompt, trace) = (fixture("prompt.json"), scratch.path(&format!("trace-{i}")));
        let arguments = format!("run --model {model} --artifact {artifact} --tokens {prompt} {options}");
        let found = kvsmith(&format!("{arguments} --device cpu --trace {trace} --json")).json();
        assert_eq!(found["ids"], run["ids"], "{options}");
        let trace = json_lines(&std::fs::read_to_string(trace).unwrap());
        let chosen: Vec<&Value> = trace.iter().map(|line| &line["positions"]).collect();
        assert_eq!(
            chosen,
            run["trace"].as_array().unwrap().iter().collect::<Vec<_>>(),
            "{options}"
        );
    }
}

#[test]
fn a_file_of_another_format_is_refused_with_the_command_that_makes_it_again() {
    let scratch = Scratch::new();
    let original = std::fs::read(fixture("format-1.safetensors")).unwrap();
    let claim = b"\\\"format\\\":1,";
    let places: Vec<usize> = (0..original.len() - claim.len())
        .filter(|at| original[*at..].starts_with(claim))
        .collect();
    assert_eq!(places.len(), 1);
    for digit in [b'0', b'7'] {
        let mut bytes = original.clone();
        bytes[places[0] + claim.len() - 2] = digit;
        let path = scratch.write("other.safetensors", &bytes);
        let prompt = fixture("prompt.json");
        for command in [
            format!("inspect {path}"),
            format!("inspect {path} --verify --model {}", model()),
            format!(
                "run --model {} --artifact {path} --tokens {prompt} --method lfps",
                model()
            ),
            format!(
                "pack {path} --model {} -o {}",
                model(),
                scratch.path("packed.safetensors")
            ),
        ] {
            let outcome = kvsmith(&command);
            outcome.fails(1, "other.safetensors", "kvsmith calibrate");
            outcome.fails(1, &format!("format {}", own_format(&scratch)), "");
        }
    }
}
