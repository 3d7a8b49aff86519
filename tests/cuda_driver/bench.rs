//! Benchmarks of decode steps; their times say nothing here.

use std::path::Path;

use serde_json::Value;

use super::command;
use super::common::{Outcome, number};

fn run(driver: &Path, arguments: &str) -> Outcome {
    let mut command = command(driver, &format!("bench {arguments}"));
    Outcome::from_output(command.env("FAKE_CUDA_MIB", "32").output().unwrap())
}

fn rows(json: &Value) -> &Vec<Value> {
    json["rows"].as_array().expect("rows")
}

/// Steps of one layer.
pub fn one_layer(driver: &Path) {
    for (what, methods) in [("retrieve", 2), ("attend", 4)] {
        let arguments = "--json --device cuda --shapes 4/2x64 --context 300 --batch 1,2 --size 32 --runs 1";
        let json = run(driver, &format!("{what} {arguments}")).json();
        assert_eq!(rows(&json).len(), 2 * methods);
        for row in rows(&json) {
            assert_eq!(row["device"], "cuda");
            assert!(number(row, "median_s") > 0.0, "{row}");
        }
    }
    let arguments =
        "--json --device cuda --shapes 4/2x64 --context 300 --size 32 --runs 1 --kv k=int8,v=bf16";
    let json = run(driver, &format!("attend {arguments}")).json();
    assert_eq!(rows(&json).len(), 4);
    // It chooses with the help of the cache's rows, which `retrieve` has not on a GPU.
    run(
        driver,
        "retrieve --device cuda --shapes 4/2x64 --context 300 --methods wpq",
    )
    .fails(2, "method `wpq` on a GPU", "bench attend");
}

/// Decode steps of a model of two layers.
fn decode_steps(driver: &Path, arguments: &str) -> Outcome {
    let config = "tests/fixtures/golden/llama_d128/config.json";
    let common = format!("--json --device cuda --size 16 --runs 1 --config {config}");
    run(driver, &format!("decode {common} {arguments}"))
}

/// What a step of a whole model moves and how fast, for each batch and method.
pub fn decode(driver: &Path) {
    let arguments = "--context 200 --batch 1,2 --methods full,topk,a2ats,selfindex,wpq";
    let json = decode_steps(driver, arguments).json();
    let rows = rows(&json);
    let names: Vec<&str> = rows.iter().filter_map(|row| row["name"].as_str()).collect();
    assert_eq!(
        names,
        [
            "decode full",
            "decode topk",
            "decode a2ats",
            "decode selfindex",
            "decode wpq"
        ]
        .repeat(2)
    );
    let arguments = "--context 200 --methods full,a2ats,selfindex,wpq --kv int8";
    let bytes = decode_steps(driver, arguments).json();
    // Two layers of 4/2 heads of 128, 16 channels within and 16 between them, 96 tokens, in bf16; keys and values.
    let weights = 2 * (2 * 16 * (8 * 128 + 4 * 128 + 3 * 16) + 96 * 16);
    let position = 2 * 2 * 2 * 128 * 2;
    let of_full = number(&bytes["rows"][0], "bytes");
    assert_eq!(bytes["rows"].as_array().unwrap().len(), 4);
    // A byte for each channel, and two scales of two bytes.
    assert_eq!(of_full, f64::from(weights + 200 * 2 * 2 * 2 * (128 + 4)));
    for (row, batch) in rows.iter().zip([1, 1, 1, 1, 1, 2, 2, 2, 2, 2]) {
        let number = |name: &str| row[name].as_f64().filter(|v| v.is_finite() && *v > 0.0);
        let number = |name: &str| number(name).unwrap_or_else(|| panic!("{name} of {row}"));
        assert_eq!(
            (row["device"].as_str(), row["runs"].as_u64()),
            (Some("cuda"), Some(1))
        );
        assert!(
            row["adapter"]
                .as_str()
                .is_some_and(|name| name.contains("Fake GPU")),
            "{row}"
        );
        let shape = row["shape"].as_str().expect("a shape");
        assert!(
            shape.contains(&format!("batch {batch}, ")) && shape.contains("200 positions"),
            "{shape}"
        );
        assert!(
            number("min_s") <= number("median_s") && number("median_s") <= number("max_s"),
            "{row}"
        );
        assert!((number("tokens_per_s") * number("median_s") / f64::from(batch) - 1.0).abs() < 1e-9);
        let read = number("kv_read_fraction");
        let bytes = f64::from(weights) + read * f64::from(batch * 200 * position);
        assert!((number("bytes") / bytes - 1.0).abs() < 1e-9, "{row}: {bytes}");
        assert!(
            (number("gbytes_per_s") * 1e9 * number("median_s") / bytes - 1.0).abs() < 1e-9,
            "{row}"
        );
        let share = number("gbytes_per_s") / number("read_loop_gbytes_per_s");
        assert!((number("bandwidth_share") / share - 1.0).abs() < 1e-9, "{row}");
        assert!(number("peak_bytes") > 0.0);
        // 68 static positions and at most 13 chosen of 200 to 221.
        match row["name"].as_str() {
            Some("decode full") => assert_eq!(read, 1.0),
            _ => assert!((68.0 / 221.0..81.5 / 200.0).contains(&read), "{row}"),
        }
    }
}

/// A context beyond the memory is said and left out; alone it fails.
pub fn decode_without_room(driver: &Path) {
    let outcome = decode_steps(driver, "--context 100,1M --methods full").ok();
    assert!(
        outcome.stderr.contains("1048576 positions") && outcome.stderr.contains("out of GPU memory"),
        "{}",
        outcome.stderr
    );
    assert_eq!(rows(&outcome.json()).len(), 1);
    let outcome = decode_steps(driver, "--context 1M --methods full");
    outcome.fails(1, "out of GPU memory", "reduce --context");
}
