//! Signals and limits: what the system sends or refuses ends in an error, in time, and leaves nothing behind.
#![cfg(target_os = "linux")]

use std::ffi::CString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::*;
use serde_json::{Value, json};

/// A program must end this soon after a signal; itself it takes half.
const BOUND: Duration = Duration::from_secs(10);

/// Waits for a program to end, but not forever.
#[track_caller]
fn ended(mut child: Child) -> Outcome {
    let started = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if started.elapsed() > BOUND {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("no end: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Outcome::from_output(child.wait_with_output().unwrap())
}

/// The program under a limit of the system.
fn limited(arguments: &str, resource: libc::__rlimit_resource_t, bytes: u64) -> Command {
    let mut command = restarting(arguments);
    command.stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: bytes,
    };
    // SAFETY: both calls may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
            match libc::setrlimit(resource, &limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        })
    };
    command
}

#[test]
fn a_limit_of_file_sizes() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[90], 1));
    let input = format!("--model {model} --tokens {tokens}");
    let dump = scratch.make("dump", &format!("dump --queries {input}"));
    let section = scratch.make("section", &format!("codebook --dump {dump} --size 8"));
    let earlier = scratch.make("out", &format!("calibrate --size 8 {input}"));
    let kept = std::fs::read(&earlier).unwrap();
    let work = scratch.path("work");
    let before = scratch.list("");
    for arguments in [
        format!("calibrate --size 8 {input} --overwrite -o {earlier}"),
        format!("codebook --dump {dump} --size 8 --overwrite -o {earlier}"),
        format!("moments --dump {dump} --overwrite -o {earlier}"),
        format!("pack {section} --model {model} --overwrite -o {earlier}"),
        format!(
            "bench kmeans --n 400 --dim 16 --size 64 --runs 1 -o {}",
            scratch.path("codebook")
        ),
        format!(
            "run {input} --max-new 90 --ignore-eos --trace {}",
            scratch.path("trace")
        ),
        format!(
            "calibrate --size 8 {input} --work {work} -o {}",
            scratch.path("other")
        ),
    ] {
        let child = limited(&arguments, libc::RLIMIT_FSIZE, 1024).spawn().unwrap();
        let outcome = ended(child);
        let error = outcome.stderr.lines().find(|line| line.starts_with("error: "));
        assert_eq!(outcome.code, Some(1), "{arguments}: {}", outcome.stderr);
        assert!(
            error.is_some_and(|error| error.contains("File too large")),
            "{arguments}: {}",
            outcome.stderr
        );
        assert!(
            outcome.stderr.contains("hint: "),
            "{arguments}: {}",
            outcome.stderr
        );
        let of_work = scratch.path("work");
        if std::fs::exists(&of_work).unwrap() {
            let parts = scratch
                .list("work")
                .into_iter()
                .filter(|name| name.ends_with(".part"));
            assert_eq!(parts.count(), 0, "{arguments}");
            std::fs::remove_dir_all(&of_work).unwrap();
        }
        assert_eq!(scratch.list(""), before, "left behind by: {arguments}");
    }
    assert_eq!(std::fs::read(&earlier).unwrap(), kept);
    let new = scratch.path("new");
    let child = limited(&format!("dump {input} -o {new}"), libc::RLIMIT_FSIZE, 1024).spawn();
    ended(child.unwrap()).fails(1, "File too large", "ulimit -f");
    let prefill =
        "bench prefill --tokens 1 --heads 1 --kv-heads 1 --head-dim 32 --hidden 64 --intermediate 64";
    let child = limited(prefill, libc::RLIMIT_FSIZE, 1024).spawn().unwrap();
    ended(child).fails(1, "cannot write a temporary file: File too large", "TMPDIR");
}

/// Makes a pipe with a name.
fn pipe(path: &str) {
    let path = CString::new(path).unwrap();
    // SAFETY: the path is a C string.
    assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
}

/// Cuts a file to nothing.
fn empty(path: &str) {
    File::options()
        .write(true)
        .open(path)
        .unwrap()
        .set_len(0)
        .unwrap();
}

/// The program waits for its tokens while it has the checkpoint mapped.
#[test]
fn a_checkpoint_that_is_cut_while_it_is_mapped() {
    for command in [
        "run --json --max-new 5 --overwrite --trace",
        "run --threads 4 --overwrite --trace",
        "calibrate --size 2 --json -o",
        "dump -o",
    ] {
        let scratch = Scratch::new();
        let model = scratch.model("model", "llama_default");
        let tokens = scratch.path("tokens.json");
        pipe(&tokens);
        let before = scratch.list("");
        let out = scratch.path("out");
        let child = start(&format!("{command} {out} --model {model} --tokens {tokens}"));
        let mut writer = File::options().write(true).open(&tokens).unwrap();
        empty(&format!("{model}/model.safetensors"));
        writer
            .write_all(json!(documents(&[400], 1)).to_string().as_bytes())
            .unwrap();
        drop(writer);
        let outcome = ended(child);
        outcome.fails(1, "model.safetensors", "make sure that no other program writes");
        assert!(outcome.stderr.contains("truncated"), "{}", outcome.stderr);
        assert_eq!(scratch.list(""), before, "{command}");
    }
}

/// The program waits for the model's configuration while it has a section mapped.
#[test]
fn a_section_that_is_cut_while_it_is_mapped() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[90], 1));
    let dump = scratch.make(
        "dump",
        &format!("dump --model {model} --tokens {tokens} --queries"),
    );
    let section = scratch.make("section", &format!("codebook --dump {dump} --size 8"));
    let before = scratch.list("");
    let config = format!("{model}/config.json");
    let text = std::fs::read(&config).unwrap();
    std::fs::remove_file(&config).unwrap();
    pipe(&config);
    let child = start(&format!(
        "pack {section} --model {model} -o {}",
        scratch.path("art")
    ));
    let mut writer = File::options().write(true).open(&config).unwrap();
    empty(&section);
    writer.write_all(&text).unwrap();
    drop(writer);
    let outcome = ended(child);
    outcome.fails(1, &section, "make sure that no other program writes");
    assert_eq!(scratch.list(""), before);
}

/// Sends one SIGTERM to a program that is well under way.
#[track_caller]
fn stops(what: &str, child: Child) -> Outcome {
    std::thread::sleep(Duration::from_millis(300));
    send(&child, libc::SIGTERM);
    let outcome = ended(child);
    assert_eq!(outcome.code, Some(130), "{what}: {}", outcome.stderr);
    outcome
}

/// Replacements that change nothing make a tokenizer slow.
#[test]
fn one_signal_ends_tokenising() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    let mut slow: Value = serde_json::from_str(&tokenizer(Value::Null)).unwrap();
    let replace = json!({ "type": "Replace", "pattern": { "String": "e" }, "content": "e" });
    slow["normalizer"] = json!({ "type": "Sequence", "normalizers": vec![replace; 3000] });
    scratch.write("model/tokenizer.json", slow.to_string());
    let text = scratch.path("text.txt");
    pipe(&text);
    let before = scratch.list("");
    let out = scratch.path("out");
    let child = start(&format!(
        "calibrate --model {model} --text {text} --size 4 -o {out}"
    ));
    let mut writer = File::options().write(true).open(&text).unwrap();
    writer.write_all("the sea ".repeat(60_000).as_bytes()).unwrap();
    drop(writer);
    let outcome = stops("tokenising", child);
    assert!(
        outcome.stderr.contains("error: interrupted"),
        "{}",
        outcome.stderr
    );
    assert_eq!(scratch.list(""), before);
}

#[test]
fn one_signal_ends_a_long_prefill() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[600_000], 1));
    let before = scratch.list("");
    let trace = scratch.path("trace");
    let mut child = start(&format!(
        "run --threads 1 --model {model} --tokens {tokens} --trace {trace} --beyond-context"
    ));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("prefill: 600000 tokens")));
    stops("prefill", child);
    assert!(lines.any(|line| line.unwrap() == "error: interrupted"));
    assert_eq!(scratch.list(""), before);
}

#[test]
fn one_signal_ends_a_benchmark() {
    // Together, because some go on for three seconds.
    std::thread::scope(|scope| {
        for arguments in [
            "kmeans --device cpu --n 100000 --dim 128 --size 60000",
            "encode --n 1M --dim 16 --size 65535",
            "retrieve --device cpu --shapes 1/1x32 --context 128K --methods lfps --lfps-rows 131072",
            "attend --device cpu --shapes 1/1x32 --context 128K --methods lfps --lfps-rows 131072",
        ] {
            scope.spawn(move || stops(arguments, start(&format!("bench {arguments} --threads 1"))));
        }
    });
    let shape = "--tokens 64K --heads 4 --kv-heads 1 --head-dim 32 --hidden 32 --intermediate 32";
    let mut child = start(&format!("bench prefill {shape} --runs 1 --threads 2"));
    // Attention comes after the projections.
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().trim_start().starts_with("prefill down")));
    stops("prefill", child);
}

/// One thread that runs the command and computes, one that waits for Ctrl-C, and the first.
#[test]
fn threads_are_as_many_as_asked_for() {
    let mut child = piped(restarting(
        "bench kmeans --device cpu --n 20000 --dim 16 --size 64 --runs 100000 --threads 1 -q",
    ));
    let threads = format!("/proc/{}/task", child.id());
    let mut most = 0;
    for _ in 0..100 {
        most = std::fs::read_dir(&threads).unwrap().count().max(most);
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(child.try_wait().unwrap().is_none());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(most, 3);
}

#[test]
fn a_tiny_address_space() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[90], 1));
    let out = scratch.path("out");
    let input = format!("--model {model} --tokens {tokens} --device cpu");
    let before = scratch.list("");
    let mut failed = 0;
    // Below this the system cannot load the program, which is not ours to report.
    let least = (1..)
        .map(|step| 5 * step)
        .find(|mib| {
            let child = limited("--version", libc::RLIMIT_AS, mib << 20).spawn().unwrap();
            let outcome = ended(child);
            assert!(*mib < 400, "{}", outcome.stderr);
            outcome.code == Some(0)
        })
        .unwrap();
    for more in [0, 5, 10, 20, 40, 80, 130, 180, 230, 330] {
        let mib = least + more;
        for arguments in [
            "bench kmeans --device cpu --n 200 --dim 8 --size 4 --runs 1".to_owned(),
            format!("run {input} --max-new 3"),
            format!("calibrate {input} --size 4 -o {out}"),
            format!("calibrate {input} --size 4 -o {out} --threads 8"),
        ] {
            let what = format!("{mib} MiB, {arguments}");
            let child = limited(&arguments, libc::RLIMIT_AS, mib << 20).spawn().unwrap();
            println!("{what}");
            let outcome = ended(child);
            match outcome.code {
                Some(0) => {}
                Some(1) => assert!(
                    outcome.stderr.contains("error: ") && outcome.stderr.contains("hint: "),
                    "{what}: {}",
                    outcome.stderr
                ),
                // Rust ends a program that gets no memory so, glibc one whose new thread gets no memory for its
                // thread-local values, and OpenBLAS, before `main`, one that gets no thread.
                None => assert!(
                    [
                        "memory allocation of",
                        "failed to register TLS destructor",
                        "pthread_create failed"
                    ]
                    .iter()
                    .any(|why| outcome.stderr.contains(why)),
                    "{what}: {}",
                    outcome.stderr
                ),
                Some(code) => panic!("{what}: exit code {code}: {}", outcome.stderr),
            }
            failed += usize::from(outcome.code == Some(1));
            let _ = std::fs::remove_file(&out);
            assert_eq!(scratch.list(""), before, "{what}");
        }
    }
    assert!(failed > 4, "{failed}");
}
