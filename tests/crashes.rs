//! A process that is killed, or finds the disk full, at any change that it makes on the disk (`src/disk/mod.rs`): no
//! existing file is lost, and no file is half written. The same command then gives the same bytes as a run that was not
//! stopped, and leaves nothing else behind. One change in five is tried; KVSMITH_EVERY=1 tries all.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::*;

/// More changes than any command here makes.
const ENOUGH: usize = 400;

/// The files below a folder, with their content.
fn files(folder: &str) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.display().to_string();
            if path.is_dir() {
                open.push(name)
            } else {
                drop(found.insert(name, std::fs::read(path).unwrap()))
            }
        }
    }
    found
}

/// A command that writes `out` into a folder.
struct Case {
    /// The command, with OUT for the folder.
    command: &'static str,
    /// Added when it runs again.
    again: &'static str,
    /// The smallest number of changes that it can do with.
    at_least: usize,
}

const CASES: [Case; 7] = [
    Case {
        command: "calibrate --model MODEL --tokens TOKENS --size 4 --work OUT/work -o OUT/out",
        again: "--resume",
        at_least: 60,
    },
    Case {
        command: "dump --queries --model MODEL --tokens TOKENS -o OUT/out",
        again: "",
        at_least: 30,
    },
    Case {
        command: "moments --dump DUMP -o OUT/out",
        again: "",
        at_least: 7,
    },
    Case {
        command: "signs --dump DUMP -o OUT/out",
        again: "",
        at_least: 7,
    },
    Case {
        command: "pack SECTION --model MODEL -o OUT/out",
        again: "",
        at_least: 7,
    },
    Case {
        command: "bench kmeans --n 40 --dim 8 --size 4 --runs 1 -o OUT/out",
        again: "",
        at_least: 6,
    },
    Case {
        command: "run --model MODEL --tokens TOKENS --max-new 2 --trace OUT/out",
        again: "",
        at_least: 5,
    },
];

/// What the commands read.
struct Inputs {
    scratch: Scratch,
    names: [(&'static str, String); 4],
}

impl Inputs {
    fn new() -> Self {
        let scratch = Scratch::new();
        let model = checkpoint("llama_default");
        let tokens = scratch.tokens("tokens.json", &documents(&[40], 1));
        let dump = scratch.make(
            "dump",
            &format!("dump --queries --model {model} --tokens {tokens}"),
        );
        let section = scratch.make("section", &format!("codebook --size 4 --dump {dump}"));
        let names = [
            ("MODEL", model),
            ("TOKENS", tokens),
            ("DUMP", dump),
            ("SECTION", section),
        ];
        Self { scratch, names }
    }

    /// A folder with a file of somebody else's.
    fn folder(&self, name: &str) -> String {
        let folder = self.scratch.path(name);
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(format!("{folder}/notes.txt"), "the only copy").unwrap();
        folder
    }

    /// Runs a command with its output in `folder`, with a fault or without.
    fn run(&self, command: &str, folder: &str, fault: Option<String>) -> Outcome {
        let names = self.names.iter();
        let command = names.fold(command.replace("OUT", folder), |text, (name, path)| {
            text.replace(name, path)
        });
        let mut command = crate::common::command(&command);
        command.envs(fault.map(|fault| ("KVSMITH_DISK_FAULT", fault)));
        Outcome::from_output(command.output().unwrap())
    }

    /// The files of a run that nobody stopped, by their names below `folder`.
    fn reference(&self, case: &Case) -> (String, BTreeMap<String, Vec<u8>>) {
        let straight = self.folder(&format!("straight-{}", case.command.split(' ').next().unwrap()));
        self.run(case.command, &straight, None).ok();
        (straight.clone(), files(&straight))
    }
}

/// The same files below another folder.
fn moved(files: &BTreeMap<String, Vec<u8>>, from: &str, to: &str) -> BTreeMap<String, Vec<u8>> {
    let rename = |(name, bytes): (&String, &Vec<u8>)| (name.replacen(from, to, 1), bytes.clone());
    files.iter().map(rename).collect()
}

/// Names of the files that differ, for messages.
fn difference(a: &BTreeMap<String, Vec<u8>>, b: &BTreeMap<String, Vec<u8>>) -> Vec<String> {
    let names = a
        .keys()
        .chain(b.keys())
        .filter(|name| a.get(*name) != b.get(*name));
    names.cloned().collect()
}

/// Tells whether a run ended with a complete result: a file, or a folder with its manifest.
fn is_complete(folder: &str) -> bool {
    let out = format!("{folder}/out");
    Path::new(&out).is_file() || Path::new(&format!("{out}/manifest.json")).exists()
}

#[test]
fn killed_at_any_change() {
    let (inputs, step) = (Inputs::new(), one_in(5));
    for (i, case) in CASES.iter().enumerate() {
        let (straight, reference) = inputs.reference(case);
        let mut at = i % step;
        loop {
            let what = format!("{} killed at change {at}", case.command);
            let folder = inputs.folder("killed");
            let expected = moved(&reference, &straight, &folder);
            let outcome = inputs.run(case.command, &folder, Some(format!("kill:{at}")));
            if outcome.code == Some(0) {
                assert!(difference(&files(&folder), &expected).is_empty(), "{what}");
                std::fs::remove_dir_all(&folder).unwrap();
                break;
            }
            assert_eq!(outcome.code, None, "{what}: {}", outcome.stderr);
            // What has its final name is complete.
            for (name, bytes) in files(&folder) {
                let final_name = expected.get(&name);
                let unfinished = name.contains("/out/") && !is_complete(&folder);
                assert!(
                    final_name.is_none_or(|of| *of == bytes) || unfinished,
                    "{what}: {name}"
                );
            }
            let is_folder = Path::new(&format!("{folder}/out/manifest.json")).exists();
            if !is_folder {
                let more = if is_complete(&folder) { "--overwrite" } else { "" };
                let again = format!("{} {} {more}", case.command, case.again);
                let outcome = inputs.run(&again, &folder, None);
                assert_eq!(outcome.code, Some(0), "{what}, again: {}", outcome.stderr);
            }
            let left = files(&folder);
            assert!(
                left == expected,
                "{what}, again: {:?}",
                difference(&left, &expected)
            );
            std::fs::remove_dir_all(&folder).unwrap();
            at += step;
            assert!(at < ENOUGH, "{what}");
        }
        assert!(at >= case.at_least, "{}: only {at} changes", case.command);
    }
}

#[test]
fn a_disk_that_is_full_from_any_change_on() {
    let (inputs, step) = (Inputs::new(), one_in(5));
    for (i, case) in CASES.iter().enumerate() {
        let (straight, reference) = inputs.reference(case);
        let mut at = i % step;
        let folder = inputs.folder("full");
        let before = files(&folder);
        let expected = moved(&reference, &straight, &folder);
        loop {
            let what = format!("{} with a full disk from change {at} on", case.command);
            let outcome = inputs.run(case.command, &folder, Some(format!("full:{at}")));
            if outcome.code == Some(0) {
                break;
            }
            // A run has printed its tokens by then, so that its stdout is not empty.
            let (code, stderr) = (outcome.code, outcome.stderr);
            let says =
                |line: &str, text: &str| stderr.lines().any(|l| l.starts_with(line) && l.contains(text));
            let told = says("error: ", "No space left on device") && says("hint: ", "free some disk space");
            assert!(code == Some(1) && told, "{what}: {stderr}");
            let mut left = files(&folder);
            // Finished layers stay for the next run.
            left.retain(|name, _| !name.contains("/work/") || name.ends_with(".part"));
            assert!(left == before, "{what}: {:?}", difference(&left, &before));
            let _ = std::fs::remove_dir_all(format!("{folder}/work"));
            at += step;
            assert!(at < ENOUGH, "{what}");
        }
        let left = files(&folder);
        assert!(
            left == expected,
            "{}: {:?}",
            case.command,
            difference(&left, &expected)
        );
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(at >= case.at_least / 2, "{}: only {at} changes", case.command);
    }
}

/// A result is replaced whole or not at all.
#[test]
fn killed_while_a_result_is_replaced() {
    let inputs = Inputs::new();
    let older = inputs.folder("older");
    inputs
        .run("moments --wrope-position 3 --dump DUMP -o OUT/out", &older, None)
        .ok();
    let case = &CASES[2];
    let (straight, reference) = inputs.reference(case);
    let [old, new] = [(&older, files(&older)), (&straight, reference)]
        .map(|(folder, files)| files[&format!("{folder}/out")].clone());
    assert!(old != new);
    let command = format!("{} --overwrite", case.command);
    let (mut olds, mut news) = (0, 0);
    for at in 0..ENOUGH {
        let folder = inputs.folder("replaced");
        let out = format!("{folder}/out");
        std::fs::write(&out, &old).unwrap();
        let outcome = inputs.run(&command, &folder, Some(format!("kill:{at}")));
        let found = std::fs::read(&out).unwrap();
        assert!(found == old || found == new, "change {at}");
        olds += usize::from(found == old);
        news += usize::from(found == new);
        std::fs::remove_dir_all(&folder).unwrap();
        if outcome.code == Some(0) {
            break;
        }
    }
    assert!(olds >= 5 && news >= 2, "{olds} {news}");
}

/// Of several processes with one work folder, one works; the others say so and change nothing.
#[test]
fn one_process_per_work_folder() {
    let inputs = Inputs::new();
    let (straight, reference) = inputs.reference(&CASES[0]);
    let expected = &reference[&format!("{straight}/out")];
    let work = inputs.scratch.path("work");
    let [model, tokens] = [&inputs.names[0].1, &inputs.names[1].1];
    let mut refused = 0;
    // Where the processors are busy, processes may run one after the other for a while.
    for round in 0..60 {
        if round >= 5 && refused > 0 {
            break;
        }
        let out = |i: usize| inputs.scratch.path(&format!("out-{round}-{i}"));
        let runs: Vec<_> = (0..4)
            .map(|i| {
                start(&format!(
                    "calibrate --model {model} --tokens {tokens} --size 4 --work {work} --resume -o {}",
                    out(i)
                ))
            })
            .collect();
        let mut finished = 0;
        for (i, run) in runs.into_iter().enumerate() {
            let outcome = Outcome::from_output(run.wait_with_output().unwrap());
            if outcome.code == Some(0) {
                assert!(std::fs::read(out(i)).unwrap() == *expected);
                finished += 1;
            } else {
                outcome.fails(1, "another process is using", "choose another folder");
                assert!(!Path::new(&out(i)).exists());
                refused += 1;
            }
        }
        // Who made the folder may not be who filled it, so it may stay, empty.
        assert!(finished > 0);
        assert!(!Path::new(&work).exists() || files(&work).is_empty());
    }
    assert!(refused > 0, "no two ever met");
}
