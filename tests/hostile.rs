//! Inputs without an end, texts that a terminal would obey, limits that are very low, and folders of others.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

/// Makes a file of so many bytes that take no room.
fn sparse(path: &str, bytes: u64) {
    File::create(path).unwrap().set_len(bytes).unwrap();
}

/// The lengths of a dump's files are compared before they are read.
#[test]
fn files_of_a_dump_without_an_end() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let dump = scratch.make("dump", &format!("dump --model {model} --tokens {tokens}"));
    let out = scratch.path("out");
    for name in ["tokens.safetensors", "moments.safetensors"] {
        let (path, kept) = (format!("{dump}/{name}"), scratch.path("kept"));
        std::fs::rename(&path, &kept).unwrap();
        symlink("/dev/zero", &path).unwrap();
        let fit = || kvsmith(&format!("codebook --dump {dump} --size 4 -o {out}"));
        fit().fails(
            1,
            &format!("{name} does not match its digest"),
            "recreate the dump",
        );
        std::fs::remove_file(&path).unwrap();
        sparse(&path, 1 << 40);
        fit().fails(
            1,
            &format!("{name} does not match its digest"),
            "recreate the dump",
        );
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(&kept, &path).unwrap();
    }
    kvsmith(&format!("codebook --dump {dump} --size 4 -o {out}")).ok();
}

/// A text is read no farther than its tokens are needed: a small file may be a large text.
#[test]
fn a_compressed_text_of_gigabytes_is_read_in_part() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    scratch.write("model/tokenizer.json", tokenizer(Value::Null));
    let words = "abcdefghij klmnop\n".repeat(1 << 16);
    for (name, line) in [
        ("text.txt.gz", words.clone()),
        ("text.jsonl.gz", json!({ "text": words }).to_string() + "\n"),
    ] {
        let path = scratch.path(name);
        let mut gz = GzEncoder::new(File::create(&path).unwrap(), Compression::fast());
        for _ in 0..400 {
            gz.write_all(line.as_bytes()).unwrap();
        }
        gz.finish().unwrap();
        let out = scratch.path(&format!("{name}-dump"));
        // 450 MB of text, in a program that may take 2 GiB, of which a process for tokenising needs its part.
        let kvsmith = env!("CARGO_BIN_EXE_kvsmith");
        let limited = format!(
            "ulimit -v 3000000; {kvsmith} dump --threads 1 --model {model} --text {path} --max-tokens 100 --uuid-tokens 0 -o {out}"
        );
        let outcome = Outcome::from_output(Command::new("sh").args(["-c", &limited]).output().unwrap()).ok();
        assert!(
            outcome.stderr.contains("the text goes on after --max-tokens 100"),
            "{}",
            outcome.stderr
        );
    }
}

/// The same tokens, however the text is stored and however much of it follows.
#[test]
fn a_text_that_is_cut_has_the_same_tokens() {
    let scratch = Scratch::new();
    let model = root().join("calib-data/model").display().to_string();
    let text = std::fs::read_to_string(root().join("calib-data/text.txt")).unwrap();
    let dumped = |name: &str, options: &str| {
        let command = format!("dump --model {model} --uuid-tokens 0 --seq-len 200 {options}");
        let dump = scratch.make(name, &command);
        read_tensors(format!("{dump}/tokens.safetensors"))["ids"].u32s()
    };
    let part: String = text.chars().take(40_000).collect();
    let (whole, short) = (
        scratch.write("whole.txt", &text),
        scratch.write("short.txt", &part),
    );
    let ids = dumped("a", &format!("--text {whole} --max-tokens 1000"));
    assert_eq!(ids.len(), 1000);
    assert_eq!(dumped("b", &format!("--text {short} --max-tokens 1000")), ids);
    let line = |text: &str| json!({ "text": text }).to_string();
    let lines = scratch.write("lines.jsonl", [line(&part), line("and more")].join("\n"));
    assert_eq!(dumped("c", &format!("--text {lines} --max-tokens 1000")), ids);
    // Lines that are read one by one, with a document across the limit.
    let many: Vec<String> = part.split_inclusive('\n').map(line).collect();
    let many = scratch.write("many.jsonl", many.join("\n"));
    let some = dumped("d", &format!("--text {many} --max-tokens 500"));
    let more = dumped("e", &format!("--text {many} --max-tokens 700"));
    assert_eq!(some[..], more[..500]);
}

#[test]
fn a_line_of_a_chat_without_an_end() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    scratch.write("model/tokenizer.json", tokenizer(Value::Null));
    let mut child = command(&format!("run --model {model} --chat"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let feed = std::thread::spawn(move || {
        let part = vec![b'a'; 1 << 20];
        // The program closes the pipe.
        while stdin.write_all(&part).is_ok() {}
    });
    Outcome::from_output(child.wait_with_output().unwrap()).fails(
        1,
        "more than 64 MiB",
        "one message per line",
    );
    feed.join().unwrap();
}

/// Notes are short, and what they say is shown as text.
#[test]
fn notes_of_tasks_are_bounded_and_harmless() {
    let scratch = Scratch::new();
    std::fs::create_dir_all(scratch.path("work")).unwrap();
    let note = |changes: Value| {
        let mut note = json!({
            "kind": "kvsmith task", "command": "dump", "part": "0/2", "state": "failed", "host": "here", "process": 1,
            "updated_unix_s": 1, "seconds": 1.0, "done": 1, "total": 2, "error": "it broke",
        });
        note.as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        scratch.write("work/.out.task.json", note.to_string());
        kvsmith(&format!("status {}", scratch.path("work"))).ok().stdout
    };
    let names = scratch.list("work");
    assert!(names.is_empty());
    let plain = note(json!({}));
    assert!(plain.contains("it broke"), "{plain}");
    let obeyed = note(json!({ "error": "\u{1b}[31mred\u{202e}", "host": "h\u{9b}2J" }));
    assert!(obeyed.contains("red"), "{obeyed}");
    assert!(!obeyed.contains(['\u{1b}', '\u{202e}', '\u{9b}']), "{obeyed:?}");
    // Progress that no task makes.
    let now = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs();
    for changes in [
        json!({ "seconds": 1e308, "done": 1, "total": 1_000_000 }),
        json!({ "seconds": -5.0 }),
        json!({ "done": 9, "total": 2 }),
    ] {
        let mut running = json!({ "state": "running", "error": null, "updated_unix_s": now });
        running
            .as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        let shown = note(running);
        assert!(!shown.contains("inf") && !shown.contains("running "), "{shown}");
    }
    sparse(&scratch.path("work/.out.task.json"), 8 << 30);
    let shown = kvsmith(&format!("status {}", scratch.path("work"))).ok().stdout;
    assert!(!shown.contains("failed"), "{shown}");
}

#[test]
fn help_on_a_full_disk_is_an_error() {
    let kvsmith = env!("CARGO_BIN_EXE_kvsmith");
    for help in ["--help", "--version", "run --help"] {
        let full = format!("{kvsmith} {help} > /dev/full");
        let outcome = Outcome::from_output(Command::new("sh").args(["-c", &full]).output().unwrap());
        outcome.fails(1, "cannot write to stdout", "free some disk space");
        let closed = format!("{kvsmith} {help} | head -c 1");
        Outcome::from_output(Command::new("sh").args(["-c", &closed]).output().unwrap()).ok();
    }
}

#[test]
fn a_small_stack_is_enough() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let prompt = scratch.tokens("prompt.json", &documents(&[20], 1));
    let kvsmith = env!("CARGO_BIN_EXE_kvsmith");
    for arguments in [
        "--version".to_owned(),
        format!("run --model {model} --tokens {prompt} --max-new 2"),
    ] {
        let limited = format!("ulimit -s 64; {kvsmith} {arguments}");
        Outcome::from_output(Command::new("sh").args(["-c", &limited]).output().unwrap()).ok();
    }
}

/// A dump replaces nothing but a dump.
#[test]
fn a_dump_leaves_the_files_of_others() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let others = scratch.tokens("others.json", &documents(&[70], 2));
    let dir = scratch.path("d");
    std::fs::create_dir_all(&dir).unwrap();
    let foreign = scratch.write("d/thesis.txt", "years of work");
    let dump = |tokens: &str, options: &str| {
        kvsmith(&format!(
            "dump --model {model} --tokens {tokens} -o {dir} {options}"
        ))
    };
    dump(&tokens, "").fails(2, "contains other files than a dump", "--overwrite");
    dump(&tokens, "--overwrite").ok();
    let fresh = |tokens: &str, name: &str| {
        let other = scratch.make(name, &format!("dump --model {model} --tokens {tokens}"));
        std::fs::read(format!("{other}/manifest.json")).unwrap()
    };
    let manifest = || std::fs::read(format!("{dir}/manifest.json")).unwrap();
    assert_eq!(manifest(), fresh(&tokens, "a"));
    dump(&others, "").fails(2, "already contains a dump", "--overwrite");
    assert_eq!(manifest(), fresh(&tokens, "b"));
    dump(&others, "--overwrite").ok();
    assert_eq!(manifest(), fresh(&others, "c"));
    kvsmith(&format!(
        "codebook --dump {dir} --size 4 -o {}",
        scratch.path("out")
    ))
    .ok();
    assert_eq!(std::fs::read_to_string(&foreign).unwrap(), "years of work");
    // Without files of others, the folder is replaced as a whole; beside it nothing is left.
    std::fs::remove_file(&foreign).unwrap();
    dump(&tokens, "--overwrite").ok();
    assert_eq!(manifest(), fresh(&tokens, "e"));
    let beside = scratch.list("");
    assert!(beside.iter().all(|name| !name.starts_with('.')), "{beside:?}");
    // A dump of something else is none.
    scratch.write("d/manifest.json", "{}");
    dump(&tokens, "--overwrite").fails(1, "manifest.json", "");
}

/// An artifact gets its name when it is whole: a calibration that is stopped in its verdict continues with it.
#[test]
fn a_verdict_that_is_interrupted_is_taken_up() {
    let scratch = Scratch::new();
    let model = root().join("calib-data/model").display().to_string();
    let text = root().join("calib-data/text.txt").display().to_string();
    let (work, out) = (scratch.path("work"), scratch.path("art.safetensors"));
    let calibrate = format!(
        "calibrate --model {model} --text {text} --max-tokens 600 --uuid-tokens 100 --seq-len 300 --sections sign \
         --verdict-tokens 24000 --verdict-reads 0.5 -o {out}"
    );
    let stopped = |options: &str, signal: i32| {
        let mut child = piped(command(&format!("{calibrate} {options}")));
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut said = String::new();
        while !said.contains("\nverdict: ") {
            said += &format!("\n{}", lines.next().expect("a verdict").unwrap());
        }
        send(&child, signal);
        lines.for_each(|line| said += &format!("\n{}", line.unwrap()));
        assert_eq!(child.wait().unwrap().code(), Some(130), "{said}");
        assert!(std::fs::metadata(&out).is_err(), "{said}");
        said
    };
    let said = stopped(&format!("--work {work}"), libc::SIGTERM);
    assert!(said.contains("add --resume to repeat the verdict"), "{said}");
    let said = stopped(&format!("--work {work} --resume"), libc::SIGINT);
    assert!(said.contains("add --resume to repeat the verdict"), "{said}");
    // The layers do without the verdict too.
    let copied = scratch.path("copied");
    copy_dir(Path::new(&work), Path::new(&copied));
    let plain = scratch.path("plain.safetensors");
    let other = calibrate.replace(&out, &plain);
    kvsmith(&format!("{other} --work {copied} --resume --no-verdict")).ok();
    kvsmith(&format!("inspect {plain} --verify")).ok();
    let resumed = kvsmith(&format!("{calibrate} --work {work} --resume")).ok();
    assert!(resumed.stderr.contains("recommended: "), "{}", resumed.stderr);
    assert!(std::fs::metadata(&work).is_err());
    let whole = std::fs::read(&out).unwrap();
    std::fs::remove_file(&out).unwrap();
    // Without a work folder, everything but the verdict is kept under another name.
    let said = stopped("", libc::SIGTERM);
    let spare = scratch.path("art.unjudged.safetensors");
    assert_eq!(std::fs::read(&spare).unwrap(), std::fs::read(&plain).unwrap());
    assert!(
        said.contains(&format!("{spare} has everything but the verdict")),
        "{said}"
    );
    kvsmith(&format!(
        "verdict {spare} --model {model} --text {text} --max-tokens 600 --uuid-tokens 100 --seq-len 300 \
         --verdict-tokens 24000 --verdict-reads 0.5 -o {out}"
    ))
    .ok();
    assert!(std::fs::read(&out).unwrap() == whole, "by hand");
}

/// A process that is killed while it replaces a dump leaves the old dump, the new one, or a folder that the same command
/// completes.
#[test]
fn a_dump_is_replaced_or_replaceable() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let texts = [1, 2].map(|seed| scratch.tokens(&format!("{seed}.json"), &documents(&[60], seed)));
    let fresh = |i: usize| {
        let dump = scratch.make(
            &format!("fresh-{i}"),
            &format!("dump --model {model} --tokens {}", texts[i]),
        );
        std::fs::read(format!("{dump}/manifest.json")).unwrap()
    };
    let (old, new) = (fresh(0), fresh(1));
    let dir = scratch.path("d");
    let dump = |i: usize| format!("dump --model {model} --tokens {} --overwrite -o {dir}", texts[i]);
    let manifest = || std::fs::read(format!("{dir}/manifest.json")).ok();
    let mut unfinished = 0;
    for change in 1.. {
        let _ = std::fs::remove_dir_all(&dir);
        kvsmith(&dump(0)).ok();
        scratch.write("d/thesis.txt", "years of work");
        let mut killed = command(&dump(1));
        let killed = killed
            .env("KVSMITH_DISK_FAULT", format!("kill:{change}"))
            .output()
            .unwrap();
        let found = manifest();
        assert!(
            found.as_ref().is_none_or(|found| [&old, &new].contains(&found)),
            "{change}"
        );
        unfinished += usize::from(found.is_none());
        if killed.status.success() {
            assert!(found == Some(new) && unfinished > 2, "{unfinished}");
            break;
        }
        kvsmith(&dump(1)).ok();
        assert_eq!(manifest().as_ref(), Some(&new), "{change}");
        kvsmith(&format!(
            "codebook --dump {dir} --size 4 --overwrite -o {}",
            scratch.path("out")
        ))
        .ok();
        let foreign = std::fs::read_to_string(scratch.path("d/thesis.txt"));
        assert_eq!(foreign.unwrap(), "years of work", "{change}");
    }
}
