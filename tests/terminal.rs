//! A terminal does not obey what files say: control characters are printed as escapes.

mod common;

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Stdio;
use std::ptr::null_mut;

use common::*;
use serde_json::{Value, json};

/// Runs the program with a terminal as stdout; what it printed there.
fn on_terminal(arguments: &str) -> String {
    let (mut ours, mut theirs) = (0, 0);
    // SAFETY: both places are valid, and the other arguments may be null.
    let made = unsafe { libc::openpty(&raw mut ours, &raw mut theirs, null_mut(), null_mut(), null_mut()) };
    assert_eq!(made, 0);
    // SAFETY: nobody else owns the new descriptors.
    let (mut ours, theirs) = unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) };
    let mut child = command(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::from(theirs))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut text = Vec::new();
    // Reading a terminal whose other side is closed fails.
    let _ = ours.read_to_end(&mut text);
    assert!(child.wait().unwrap().success());
    String::from_utf8(text).unwrap()
}

fn obeyed(text: &str) -> bool {
    text.chars()
        .any(|c| c.is_control() && !['\n', '\r', '\t'].contains(&c))
}

/// Tokens of a hostile vocabulary: escaped on a terminal, as they are in a file.
#[test]
fn generated_text_does_not_control_the_terminal() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    let mut hostile: Value = serde_json::from_str(&tokenizer(Value::Null)).unwrap();
    let vocab: serde_json::Map<String, Value> =
        (0..96).map(|id| (format!("\u{1b}[2J{id}"), json!(id))).collect();
    hostile["model"]["vocab"] = json!(vocab);
    hostile["model"]["unk_token"] = json!("\u{1b}[2J0");
    hostile["added_tokens"] = json!([]);
    scratch.write("model/tokenizer.json", hostile.to_string());
    let tokens = scratch.tokens("prompt.json", &[vec![5, 6, 7]]);
    let run = format!("run -q --model {model} --tokens {tokens} --max-new 4 --ignore-eos");
    let shown = on_terminal(&run);
    assert!(shown.contains("\\u{1b}[2J") && !obeyed(&shown), "{shown:?}");
    assert!(kvsmith(&run).ok().stdout.contains("\u{1b}[2J"));
}

/// C1 controls, which JSON leaves as they are.
#[test]
fn metadata_does_not_control_the_terminal() {
    let scratch = Scratch::new();
    let (model, texts) = (
        checkpoint("llama_default"),
        scratch.tokens("texts.json", &documents(&[60], 1)),
    );
    let art = scratch.make(
        "art",
        &format!("calibrate --model {model} --tokens {texts} --size 8"),
    );
    let hostile = "llama\u{9b}2J\u{1b}[2J\u{7f}";
    resealed(&art, &art, |manifest| {
        manifest["model"]["model_type"] = json!(hostile);
        manifest["tool_version"] = json!(hostile);
    });
    let table = kvsmith(&format!("inspect {art}")).ok().stdout;
    assert!(
        table.contains("llama\\u{9b}2J\\u{1b}[2J\\u{7f}") && !obeyed(&table),
        "{table:?}"
    );
    let json = kvsmith(&format!("inspect --json {art}")).ok();
    assert!(!obeyed(&json.stdout), "{:?}", json.stdout);
    assert_eq!(json.json()["model"]["model_type"], json!(hostile));
}
