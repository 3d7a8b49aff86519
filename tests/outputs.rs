//! No command replaces an input, a file that is not kvsmith's or, without `--overwrite`, a result of kvsmith.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use crate::common::*;

/// A checkpoint, its tokens, a dump and one result of every kind.
struct Files {
    scratch: Scratch,
    model: String,
    tokens: String,
    dump: String,
    artifact: String,
    section: String,
    moments: String,
    codebook: String,
    trace: String,
}

impl Files {
    fn new() -> Self {
        let scratch = Scratch::new();
        let model = scratch.model("model", "llama_default");
        let tokens = scratch.tokens("tokens.json", &documents(&[60, 60], 1));
        let dump = scratch.make(
            "dump",
            &format!("dump --queries --model {model} --tokens {tokens}"),
        );
        let artifact = scratch.make(
            "art",
            &format!("calibrate --model {model} --tokens {tokens} --size 8"),
        );
        let section = scratch.make("signs", &format!("signs --dump {dump}"));
        let moments = scratch.make("moments", &format!("moments --dump {dump}"));
        let codebook = scratch.make("codebook", "bench kmeans --n 40 --dim 8 --size 4 --runs 1");
        let prompt = scratch.tokens("prompt.json", &documents(&[20], 2));
        let trace = scratch.path("trace");
        kvsmith(&format!(
            "run --model {model} --tokens {prompt} --max-new 3 --trace {trace}"
        ))
        .ok();
        Self {
            scratch,
            model,
            tokens,
            dump,
            artifact,
            section,
            moments,
            codebook,
            trace,
        }
    }

    /// Commands that write a file, without its name.
    fn commands(&self) -> Vec<String> {
        let Self {
            model,
            tokens,
            dump,
            section,
            artifact,
            ..
        } = self;
        let prompt = self.scratch.path("prompt.json");
        vec![
            format!("calibrate --model {model} --tokens {tokens} --size 8 -o"),
            format!("signs --dump {dump} -o"),
            format!("moments --dump {dump} -o"),
            format!("pack {section} --model {model} -o"),
            "bench kmeans --n 40 --dim 8 --size 4 --runs 1 -o".to_owned(),
            format!("run --model {model} --artifact {artifact} --tokens {prompt} --max-new 3 --trace"),
        ]
    }
}

/// Runs a command that must fail before any work, and leave a file as it was.
#[track_caller]
fn refused(command: &str, path: &str, more: &str, culprit: &str, hint: &str) {
    let before = std::fs::read(path).unwrap();
    kvsmith(&format!("{command} {path} {more}")).fails(2, culprit, hint);
    assert_eq!(std::fs::read(path).unwrap(), before, "{command} {path}");
}

#[test]
fn inputs_stay() {
    let files = Files::new();
    let weights = format!("{}/model.safetensors", files.model);
    let states = format!("{}/tokens.safetensors", files.dump);
    let prompt = files.scratch.path("prompt.json");
    let commands = files.commands();
    let inputs: [(usize, &str, &str); 10] = [
        (0, &weights, "is a file of"),
        (0, &files.tokens, "is an input"),
        (1, &states, "is a file of"),
        (2, &states, "is a file of"),
        (3, &files.section, "is an input"),
        (3, &weights, "is a file of"),
        (5, &weights, "is a file of"),
        (5, &files.artifact, "is an input"),
        (5, &prompt, "is an input"),
        (5, &format!("{}/config.json", files.model), "is a file of"),
    ];
    for (command, path, culprit) in inputs {
        let command = &commands[command];
        for more in ["", "--overwrite"] {
            refused(command, path, more, culprit, "choose another name");
        }
    }
    // By another name of the same file.
    let link = files.scratch.path("link");
    symlink(&files.tokens, &link).unwrap();
    refused(&commands[0], &link, "", "is an input", "choose another name");
}

#[test]
fn foreign_files_stay() {
    let files = Files::new();
    let scratch = &files.scratch;
    let foreign = [
        scratch.write("notes.txt", "the only copy"),
        scratch.write("rows.jsonl", "{\"step\": 1, \"layer\": 2}\n"),
        scratch.write(
            "other.safetensors",
            safetensors(
                "{\"x\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
                &[7],
            ),
        ),
    ];
    for command in files.commands() {
        for path in &foreign {
            for more in ["", "--overwrite"] {
                refused(
                    &command,
                    path,
                    more,
                    "was not written by kvsmith",
                    "choose another name",
                );
            }
        }
    }
}

#[test]
fn results_are_replaced_if_asked() {
    let files = Files::new();
    let results = [
        &files.artifact,
        &files.section,
        &files.moments,
        &files.codebook,
        &files.trace,
    ];
    for command in files.commands() {
        for result in results {
            let is_input = command.contains(&format!("{result} "));
            let copy = files.scratch.path("copy");
            std::fs::copy(result, &copy).unwrap();
            refused(&command, &copy, "", "already exists", "--overwrite");
            if !is_input {
                kvsmith(&format!("{command} {copy} --overwrite")).ok();
            }
        }
    }
    // An empty file has nothing to lose.
    let empty = files.scratch.write("empty", "");
    kvsmith(&format!("{} {empty}", files.commands()[2])).ok();
}

#[test]
fn a_replaced_file_keeps_its_mode_and_its_links() {
    let files = Files::new();
    let mode = |path: &str| std::fs::metadata(path).unwrap().mode() & 0o777;
    let command = &files.commands()[2];
    std::fs::set_permissions(&files.moments, std::fs::Permissions::from_mode(0o600)).unwrap();
    let link = files.scratch.path("link");
    symlink(&files.moments, &link).unwrap();
    kvsmith(&format!("{command} {link} --overwrite")).ok();
    assert_eq!(mode(&files.moments), 0o600);
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    // A link to nothing, and one to itself.
    let dangling = files.scratch.path("dangling");
    symlink(files.scratch.path("nothing"), &dangling).unwrap();
    let looping = files.scratch.path("looping");
    symlink(&looping, &looping).unwrap();
    for link in [dangling, looping] {
        let outcome = kvsmith(&format!("{command} {link}"));
        outcome.fails(
            1,
            "a symbolic link whose target does not exist",
            "remove the link",
        );
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}

/// A trace that was cut short leaves no file; a pipe gets the lines as they come.
#[test]
fn traces_are_complete_or_not_there() {
    let files = Files::new();
    let prompt = files.scratch.path("prompt.json");
    let trace = files.scratch.path("new-trace");
    let run = format!("run --model {} --tokens {prompt} --max-new 3", files.model);
    kvsmith(&format!("{run} --trace {trace} --method topk --budget 1000000")).ok();
    assert!(!std::fs::read(&trace).unwrap().is_empty());
    kvsmith(&format!("{run} --trace /dev/null")).ok();
    let kept = std::fs::read(&files.trace).unwrap();
    // A run that breaks off in its first step.
    edit_tensors(&files.model, |tensors| {
        tensors.get_mut("model.norm.weight").unwrap().bytes.fill(0xff);
    });
    let outcome = kvsmith(&format!("{run} --overwrite --trace {}", files.trace));
    outcome.fails(1, "NaN or infinite", "");
    assert_eq!(std::fs::read(&files.trace).unwrap(), kept);
    let left = files
        .scratch
        .list("")
        .into_iter()
        .filter(|name| name.starts_with(".kvsmith-"));
    assert_eq!(left.count(), 0);
}

/// Names that are not UTF-8 can be written and are shown as far as they can.
#[test]
fn names_need_not_be_utf8() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    let files = Files::new();
    for command in files.commands().iter().filter(|command| command.ends_with("-o")) {
        let name = OsStr::from_bytes(b"na\xffme");
        let path = std::path::Path::new(&files.scratch.path("")).join(name);
        let mut command = crate::common::command(command);
        let outcome = Outcome::from_output(command.arg(&path).arg("--json").output().unwrap());
        let json = outcome.json();
        let shown =
            |value: &serde_json::Value| value.as_str().is_some_and(|text| text.ends_with("na\u{fffd}me"));
        assert!(
            json["rows"].is_array() || json.as_object().unwrap().values().any(shown),
            "{json}"
        );
        std::fs::remove_file(path).unwrap();
    }
}

/// The contents of the files in a folder.
fn contents(folder: &str) -> Vec<(String, Vec<u8>)> {
    let names = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = names
        .filter(|path| path.is_file())
        .map(|path| (path.display().to_string(), std::fs::read(&path).unwrap()))
        .collect();
    files.sort();
    files
}

/// A folder that is something else is neither filled nor emptied.
#[test]
fn folders_of_others_stay() {
    let files = Files::new();
    let Files {
        model, tokens, dump, ..
    } = &files;
    let out = files.scratch.path("new");
    let calibrate = |work: &str, out: &str| {
        format!("calibrate --model {model} --tokens {tokens} --size 8 --overwrite -o {out} --work {work}")
    };
    let foreign = files.scratch.path("foreign");
    std::fs::create_dir(&foreign).unwrap();
    files.scratch.write("foreign/lock", "somebody's");
    files.scratch.write("foreign/tokens.safetensors", "somebody's");
    files
        .scratch
        .write("foreign/layer-00001.safetensors", "somebody's");
    let inside = files.scratch.path("foreign/out");
    let dump_to = |folder: &str| format!("dump --model {model} --tokens {tokens} -o {folder}");
    for (command, folder, culprit, hint) in [
        (
            calibrate(dump, &out),
            dump,
            "a file `layer-00000.safetensors`",
            "an empty folder",
        ),
        (
            calibrate(&foreign, &out),
            &foreign,
            "a file `layer-00001.safetensors`",
            "an empty folder",
        ),
        (calibrate(model, &out), model, "is an input", "an empty folder"),
        (
            calibrate(&foreign, &inside),
            &foreign,
            "is inside the --work folder",
            "write the output elsewhere",
        ),
        (
            dump_to(dump),
            dump,
            "already contains a dump",
            "choose another folder",
        ),
        (
            dump_to(&foreign),
            &foreign,
            "other files than a dump",
            "a new folder",
        ),
        (
            dump_to(&foreign) + " --overwrite",
            &foreign,
            "a file `tokens.safetensors`",
            "an empty folder",
        ),
        (dump_to(model), model, "is an input", "an empty folder"),
    ] {
        let before = contents(folder);
        kvsmith(&command).fails(2, culprit, hint);
        assert!(contents(folder) == before, "{command}");
    }
    assert!(!files.scratch.list("").contains(&"new".to_owned()));
}

/// A dump that fails takes what it wrote with it, and nothing else.
#[test]
fn a_failed_dump_leaves_what_was_there() {
    let files = Files::new();
    let Files { model, tokens, .. } = &files;
    let folder = files.scratch.path("folder");
    std::fs::create_dir(&folder).unwrap();
    files.scratch.write("folder/notes.txt", "the only copy");
    files
        .scratch
        .write("folder/layer-00009.safetensors", "another file of the user's");
    let before = contents(&folder);
    edit_tensors(model, |tensors| {
        let name = "model.layers.1.self_attn.k_proj.weight";
        tensors.get_mut(name).unwrap().bytes.fill(0xff);
    });
    let outcome = kvsmith(&format!(
        "dump --model {model} --tokens {tokens} --overwrite -o {folder}"
    ));
    outcome.fails(1, "NaN or infinite", "");
    assert!(contents(&folder) == before);
}

/// Unfinished files are removed once their process is dead for certain, and only then.
#[test]
fn unfinished_files_of_dead_processes_go() {
    let files = Files::new();
    let folder = files.scratch.path("folder");
    std::fs::create_dir(&folder).unwrap();
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let here: String = boot.chars().filter(char::is_ascii_hexdigit).take(12).collect();
    let dead = format!("folder/.kvsmith-{here}-1-abcdef.part");
    let alive = format!("folder/.kvsmith-{here}-2-abcdef.part");
    let others = [
        "folder/.kvsmith-x.part",
        "folder/.kvsmith-1-x.part.txt",
        "folder/x.part",
    ];
    let write = |name: &str| files.scratch.write(name, "unfinished");
    write(&dead);
    others.iter().for_each(|name| drop(write(name)));
    // Somebody, here this test, still has it open.
    let lock = std::fs::File::options().write(true).open(write(&alive)).unwrap();
    lock.lock().unwrap();
    let command = format!("moments --dump {} --overwrite -o {folder}/out", files.dump);
    kvsmith(&command).ok();
    let mut expected: Vec<String> = others
        .iter()
        .map(|name| name["folder/".len()..].to_owned())
        .collect();
    expected.push("out".to_owned());
    let with_alive = |expected: &[String]| {
        let mut names = [expected, &[alive["folder/".len()..].to_owned()]].concat();
        names.sort();
        names
    };
    assert_eq!(files.scratch.list("folder"), with_alive(&expected));
    drop(lock);
    kvsmith(&command).ok();
    expected.sort();
    assert_eq!(files.scratch.list("folder"), expected);
}

/// Another computer's, on a disk that only this one has: a disk that was moved, or this computer before it was started
/// again.
#[test]
fn unfinished_files_from_before_a_restart_go() {
    let files = Files::new();
    // A file system in memory is this computer's alone.
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let name = folder.path().join(".kvsmith-000000000000-1-abcdef.part");
    std::fs::write(&name, "unfinished").unwrap();
    let out = folder.path().join("out");
    kvsmith(&format!("moments --dump {} -o {}", files.dump, out.display())).ok();
    assert!(!name.exists() && out.exists());
}

/// Of two commands that write the same new file, the one that ends last keeps its result under another name; if both have
/// the same result, there is nothing to keep.
#[test]
fn two_commands_with_one_output() {
    let files = Files::new();
    let Files { model, tokens, .. } = &files;
    let scratch = &files.scratch;
    let others = scratch.tokens("others.json", &documents(&[200], 77));
    let out = scratch.path("same.safetensors");
    let other = scratch.path("same-2.safetensors");
    // The first one waits for its text, which comes through a pipe, while the second one writes.
    let race = |late: &str| {
        let _ = std::fs::remove_file(&out);
        let calibrate = |tokens: &str| {
            format!("calibrate --model {model} --tokens {tokens} --size 2 --no-verdict -o {out}")
        };
        let pipe = scratch.path("pipe.json");
        let _ = std::fs::remove_file(&pipe);
        let path = std::ffi::CString::new(pipe.clone()).unwrap();
        // SAFETY: the path ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        let waiting = start(&calibrate(&pipe));
        // Opening the pipe waits until the program reads it, after it has claimed its output.
        let mut feed = std::fs::OpenOptions::new().write(true).open(&pipe).unwrap();
        kvsmith(&calibrate(tokens)).ok();
        std::io::Write::write_all(&mut feed, &std::fs::read(late).unwrap()).unwrap();
        drop(feed);
        Outcome::from_output(waiting.wait_with_output().unwrap())
    };
    race(tokens).ok();
    assert!(std::fs::metadata(&other).is_err());
    race(&others).fails(1, "another process wrote", "different outputs");
    for (path, of) in [(&out, tokens), (&other, &others)] {
        let alone = scratch.path("alone.safetensors");
        kvsmith(&format!(
            "calibrate --model {model} --tokens {of} --size 2 --no-verdict --overwrite -o {alone}"
        ))
        .ok();
        assert_eq!(std::fs::read(path).unwrap(), std::fs::read(&alone).unwrap());
    }
}
