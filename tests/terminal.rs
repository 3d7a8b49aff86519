//! What is printed on a terminal: it fits into 80 columns, and control characters from files are printed as escapes.

use std::fs::File;
use std::io::Read;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::ptr::null_mut;

use crate::common::*;
use serde_json::{Value, json};

/// Opens a terminal of so many columns: our side and the program's.
fn terminal(columns: u16) -> (File, OwnedFd) {
    let (mut ours, mut theirs) = (0, 0);
    let mut size = libc::winsize {
        ws_row: 24,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the places and the size are valid, and the other arguments may be null.
    let made = unsafe {
        libc::openpty(
            &raw mut ours,
            &raw mut theirs,
            null_mut(),
            null_mut(),
            &raw mut size,
        )
    };
    assert_eq!(made, 0);
    // SAFETY: nobody else owns the new descriptors.
    unsafe { (File::from_raw_fd(ours), OwnedFd::from_raw_fd(theirs)) }
}

/// Runs the program with a terminal of so many columns as stdout and stderr; returns what it printed there, and whether it
/// succeeded.
fn shown(columns: u16, mut command: Command) -> (String, bool) {
    let (mut ours, theirs) = terminal(columns);
    let mut child = command
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .stdout(Stdio::from(theirs.try_clone().unwrap()))
        .stderr(Stdio::from(theirs))
        .spawn()
        .unwrap();
    // It holds the program's side of the terminal.
    drop(command);
    let mut bytes = Vec::new();
    // Reading a terminal whose other side is closed fails.
    let _ = ours.read_to_end(&mut bytes);
    let text = String::from_utf8(bytes).unwrap();
    (text, child.wait().unwrap().success())
}

/// Runs the program in a folder on a terminal; returns the lines that it printed, those of progress bars included, without
/// escape sequences.
fn lines_on_terminal(dir: &str, arguments: &str) -> Vec<String> {
    let mut command = command(arguments);
    command.current_dir(dir);
    let (text, is_fine) = shown(80, command);
    assert!(is_fine, "{arguments}: {text}");
    let mut plain = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => {
                chars.by_ref().skip(1).find(char::is_ascii_alphabetic);
            }
            c => plain.push(c),
        }
    }
    plain.split(['\r', '\n']).map(str::to_owned).collect()
}

/// Every command that prints tables, summaries or progress.
#[test]
fn everything_fits_into_80_columns() {
    let scratch = Scratch::new();
    scratch.model("model", "llama_d128");
    scratch.tokens("texts.json", &documents(&[120; 24], 3));
    scratch.tokens("prompt.json", &documents(&[300], 4));
    let dir = scratch.path("");
    for (arguments, said) in [
        (
            "calibrate --model model --tokens texts.json --size 8 --seq-len 120 --holdout 0.2 --verdict-steps 8 -o art",
            "elapsed, ",
        ),
        ("dump --model model --tokens texts.json -o dump", "elapsed, "),
        ("inspect art", "(-v shows"),
        ("inspect art -v", "noise 2"),
        ("inspect art --layer 1 --head 0", "output error"),
        (
            "run --model model --tokens prompt.json --artifact art --method a2ats --max-new 20 --ignore-eos",
            "elapsed, ",
        ),
        (
            "run --model model --tokens prompt.json --method full --max-new 2 --ignore-eos",
            "choices read everything",
        ),
        (
            "eval --model model --tokens texts.json --artifact art --methods a2ats,selfindex+tail --decode 4",
            "elapsed, ",
        ),
        (
            "eval --model model --tokens texts.json --artifact art --methods a2ats,wpq --reads 70%,90% --decode 4",
            "read",
        ),
        (
            "bench attend --shapes 40/8x128 --context 1K --batch 2 --methods full,a2ats,selfindex --runs 1 --size 64 --device cpu",
            "as full attention",
        ),
        (
            "bench kmeans --heads 2 --n 4000 --dim 32 --size 16 --runs 1 --device cpu",
            "inertia",
        ),
        (
            "bench prefill --tokens 64 --hidden 256 --intermediate 256 --heads 4 --kv-heads 2 --runs 1 --device cpu",
            "GFLOP/s",
        ),
        ("report art -o report.html", "wrote"),
    ] {
        let lines = lines_on_terminal(&dir, arguments);
        // A sentence may be broken between any two words, as its figures have it.
        let words: Vec<&str> = lines.iter().flat_map(|line| line.split_whitespace()).collect();
        let words = words.join(" ") + " ";
        assert!(words.contains(said), "{arguments}: {lines:#?}");
        let long: Vec<&String> = lines.iter().filter(|line| line.chars().count() > 80).collect();
        assert!(long.is_empty(), "{arguments}: {long:#?}");
    }
}

/// Runs the program with a terminal as stdout; what it printed there.
fn on_terminal(arguments: &str) -> String {
    let (mut ours, theirs) = terminal(80);
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
    let table = kvsmith(&format!("inspect {art} -v")).ok().stdout;
    assert!(
        table.contains("llama\\u{9b}2J\\u{1b}[2J\\u{7f}") && !obeyed(&table),
        "{table:?}"
    );
    let json = kvsmith(&format!("inspect --json {art}")).ok();
    assert!(!obeyed(&json.stdout), "{:?}", json.stdout);
    assert_eq!(json.json()["model"]["model_type"], json!(hostile));
}

/// Lines are as long as the terminal is wide, up to 120 columns, and errors and hints have colours where they may.
#[test]
fn width_and_colours_are_those_of_the_terminal() {
    let wrong = format!("inspect {}", vec!["word"; 60].join("-and-another/"));
    let longest = |columns: u16| {
        let mut plan = command("plan --no-probe --model nowhere/at/all");
        plan.env("NO_COLOR", "1");
        let (shown, _) = shown(columns, plan);
        assert!(!shown.contains('\u{1b}'), "{shown:?}");
        shown
            .lines()
            .map(|line| line.trim_end().chars().count())
            .max()
            .unwrap()
    };
    let (narrow, usual, wide, widest) = (longest(50), longest(80), longest(110), longest(300));
    assert!(narrow <= 50 && narrow < usual && usual <= 80, "{narrow} {usual}");
    assert!(
        usual < wide && wide <= 110 && wide <= widest && widest <= 120,
        "{wide} {widest}"
    );
    let (coloured, _) = shown(80, command(&wrong));
    assert!(
        coloured.contains("\u{1b}[31m") && coloured.contains("error:"),
        "{coloured:?}"
    );
    assert!(
        coloured.contains("\u{1b}[36m") && coloured.contains("hint:"),
        "{coloured:?}"
    );
    // Where there is no terminal, nothing is coloured.
    assert!(!kvsmith(&wrong).stderr.contains('\u{1b}'));
}
