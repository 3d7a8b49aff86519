//! Defects that were found once and must not come back.

use std::os::unix::process::CommandExt;

use crate::common::*;
use kvsmith::internal::compute::{attention, reference};
use kvsmith::internal::kv::{RowCache, RowStore};
use kvsmith::internal::model::ModelConfig;
use kvsmith::internal::model::tokenizer::Tokenizer;
use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

/// A lossy chain of f32 sums shows at 128K positions first.
#[test]
fn decode_attention_at_128k_positions() {
    let (n, d) = (131_072, 16);
    let mut rng = ChaCha8Rng::seed_from_u64(11);
    let mut random =
        |rows: usize, scale: f32| Array2::from_shape_simple_fn((rows, d), || rng.gen_range(-scale..scale));
    // Small scores: the weights are about equal, so every position counts; values share an offset.
    let (q, k, v) = (random(2, 0.2), random(n, 1.0), random(n, 1.0) + 3.0);
    let store = |x: &Array2<f32>| {
        let mut rows = RowStore::<f32>::new(d, n);
        rows.extend(x.view());
        rows
    };
    let positions: Vec<u32> = (0..n as u32).collect();
    let mut out = Array2::zeros((2, d));
    attention::decode(q.view(), &store(&k), &store(&v), &positions, out.view_mut());
    for (q, out) in q.rows().into_iter().zip(out.rows()) {
        let exact = reference::attention(q, k.view(), v.view(), 0..n);
        for (a, e) in out.iter().zip(&exact) {
            // Exponentials and products are good to a few units of 2^-24 of a value near 3.
            assert!((f64::from(*a) - e).abs() < 3.0 * 8.0 * 2f64.powi(-24), "{a} {e}");
        }
    }
}

/// Training scripts leave truncation and padding in tokenizer.json.
#[test]
fn a_stored_truncation_does_not_cut_the_text() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    let mut tokenizer: Value = serde_json::from_str(&tokenizer(Value::Null)).unwrap();
    tokenizer["truncation"] =
        json!({ "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0 });
    tokenizer["padding"] = json!({
        "strategy": { "Fixed": 64 }, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
    });
    std::fs::write(format!("{model}/tokenizer.json"), tokenizer.to_string()).unwrap();
    let text = "abc def abc def abc def";
    let prompt = scratch.write("prompt.txt", text);
    let json = kvsmith(&format!(
        "run --model {model} --prompt-file {prompt} --max-new 1 --json"
    ))
    .json();
    assert_eq!(json["prompt_tokens"], json!(character_ids(text).len()));
}

/// Short documents share a process, long ones have their own; the limit holds for all of them together.
#[test]
fn documents_are_tokenised_as_one_by_one() {
    let model = root().join("calib-data/model");
    let tokenizer = Tokenizer::open(&model, &ModelConfig::load(&model).unwrap()).unwrap();
    let words = "The quick brown fox, 123 times. ";
    // One document is longer than 1 MiB, and so are two others together.
    let lengths = [1, 33_000, 3, 0, 2, 17_000, 17_000, 1, 5, 7];
    let documents: Vec<String> = lengths.iter().map(|n| words.repeat(*n)).collect();
    let one_by_one: Vec<Vec<u32>> = documents.iter().map(|d| tokenizer.encode(d).unwrap()).collect();
    let encode = |limit| tokenizer.encode_documents(&documents, limit).unwrap();
    assert!(encode(usize::MAX) == one_by_one);
    let firsts: usize = one_by_one[..6].iter().map(Vec::len).sum();
    for (limit, n) in [(0, 0), (1, 1), (firsts, 6), (firsts + 5, 7)] {
        let cut = encode(limit);
        assert_eq!((cut.len(), cut.concat().len()), (n, limit));
        assert!(one_by_one.concat().starts_with(&cut.concat()));
    }
}

/// The same ids in other blocks are another calibration.
#[test]
fn the_calibration_names_its_blocks() {
    let scratch = Scratch::new();
    let ids = documents(&[500], 3).remove(0);
    let model = checkpoint("llama_default");
    let calibration = |cut: usize| {
        let tokens = scratch.tokens("tokens.json", &[ids[..cut].to_vec(), ids[cut..].to_vec()]);
        let command = format!("calibrate --model {model} --tokens {tokens} --holdout 0 --size 8");
        let out = scratch.make(&format!("{cut}.safetensors"), &command);
        kvsmith(&format!("inspect {out} --json")).json()["calibration"].clone()
    };
    let (a, b) = (calibration(300), calibration(200));
    assert_eq!(a["ids_sha256"], b["ids_sha256"]);
    assert_ne!(a, b);
}

/// `nohup` has us ignore the hang-up of a terminal.
#[test]
fn an_ignored_signal_stays_ignored() {
    let ignored = |disposition: libc::sighandler_t| {
        let mut command = command("bench kmeans --n 20000 --dim 16 --size 64 --runs 40 -q");
        command
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        // SAFETY: `signal` may be called between fork and exec.
        let mut child = unsafe {
            command.pre_exec(move || {
                libc::signal(libc::SIGHUP, disposition);
                libc::signal(libc::SIGTERM, libc::SIG_DFL);
                Ok(())
            })
        }
        .spawn()
        .unwrap();
        // The mask of ignored signals, once the program has installed its handlers.
        let status = format!("/proc/{}/status", child.id());
        let mask = |name: &str| -> u64 {
            let status = std::fs::read_to_string(&status).unwrap_or_default();
            let line = status.lines().find(|l| l.starts_with(name)).unwrap_or("x:\t0");
            u64::from_str_radix(line.split_whitespace().nth(1).unwrap(), 16).unwrap()
        };
        let bit = |signal: libc::c_int| 1u64 << (signal - 1);
        while mask("SigCgt:") & bit(libc::SIGTERM) == 0 && child.try_wait().unwrap().is_none() {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        let mask = mask("SigIgn:");
        child.kill().unwrap();
        child.wait().unwrap();
        (mask & bit(libc::SIGHUP) != 0, mask & bit(libc::SIGTERM) != 0)
    };
    assert_eq!(ignored(libc::SIG_IGN), (true, false));
    assert_eq!(ignored(libc::SIG_DFL), (false, false));
}

/// A stop token of generation_config.json replaces that of config.json.
#[test]
fn generation_config_replaces_stop_tokens() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    edit_json(&format!("{model}/config.json"), &json!({ "eos_token_id": 5 }));
    let eos = || {
        kvsmith::internal::model::ModelConfig::load(std::path::Path::new(&model))
            .unwrap()
            .eos_token_ids
    };
    scratch.write(
        "model/generation_config.json",
        json!({ "eos_token_id": [7, 9] }).to_string(),
    );
    assert_eq!(eos(), [7, 9]);
    scratch.write(
        "model/generation_config.json",
        json!({ "temperature": 1.0 }).to_string(),
    );
    assert_eq!(eos(), [5]);
}
