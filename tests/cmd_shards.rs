//! Calibration on several machines: shards of the text and ranges of layers give the bytes of one machine, whatever
//! their number; a part that is missing, foreign or damaged is refused by name; a task that is killed, repeated or run
//! twice costs that task alone.

use std::collections::BTreeMap;
use std::path::Path;

use crate::common::*;
use serde_json::{Value, json};

/// The commands that fit a section, each with the flags that it gets here.
const SECTIONS: [(&str, &str); 8] = [
    ("codebook", "--size 9 --iterations 6"),
    ("signs", ""),
    ("priors", ""),
    ("wpq", ""),
    ("rotation", ""),
    ("tail", ""),
    ("doublesparsity", ""),
    ("triattention", ""),
];

/// A text and a model to calibrate in parts.
struct Job {
    scratch: Scratch,
    model: String,
    /// The flags of every dump.
    dump: String,
}

impl Job {
    fn new(model: &str, lengths: &[usize], options: &str) -> Self {
        let scratch = Scratch::new();
        let model = checkpoint(model);
        let tokens = scratch.tokens("tokens.json", &documents(lengths, 1));
        let dump = format!("--model {model} --tokens {tokens} {options} --seed 5 --wrope-position 300");
        Self { scratch, model, dump }
    }

    fn dump(&self) -> String {
        format!("dump --dtype f32 --queries --values {}", self.dump)
    }

    /// Makes all shards, the last one first, and returns their folders.
    fn shards(&self, count: usize) -> Vec<String> {
        let shard = |index: usize| {
            let out = self.scratch.path(&format!("shards-{count}/{index}"));
            kvsmith(&format!("{} --shard {index}/{count} -o {out}", self.dump())).ok();
            out
        };
        let mut made: Vec<String> = (0..count).rev().map(shard).collect();
        made.swap(0, count / 2);
        made
    }

    /// Fits every section in these ranges of layers, codebooks with more flags, and packs them.
    fn packed(&self, dumps: &[String], layers: &[&str], name: &str, codebooks: &str) -> String {
        let mut files = Vec::new();
        for (command, flags) in SECTIONS {
            for (i, layers) in layers.iter().enumerate() {
                let out = self.scratch.path(&format!("{name}-{command}-{i}"));
                let dumps = dumps.join(" ");
                let more = if command == "codebook" { codebooks } else { "" };
                kvsmith(&format!(
                    "{command} --dump {dumps} {flags} {more} --seed 5 --layers {layers} -o {out}"
                ))
                .ok();
                files.push(out);
            }
        }
        files.reverse();
        let out = self.scratch.path(name);
        kvsmith(&format!(
            "pack {} --model {} -o {out}",
            files.join(" "),
            self.model
        ))
        .ok();
        out
    }
}

fn read(path: &str) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn any_number_of_shards_and_ranges_gives_the_bytes_of_one_machine() {
    for (model, lengths, options, positions, rest) in [
        (
            "llama_default",
            &[70, 25, 60, 31][..],
            "--seq-len 40",
            "window",
            "1..2",
        ),
        ("qwen2_sliding", &[70, 90, 33], "--seq-len 60", "buckets", "1..3"),
        (
            "qwen3_norm",
            &[90, 20],
            "--holdout 0.5 --seq-len 33",
            "window",
            "1..2",
        ),
    ] {
        let job = Job::new(model, lengths, options);
        let fit = format!("--size 9 --iterations 6 --positions {positions} --peers");
        let direct = job
            .scratch
            .make("direct", &format!("calibrate {} {fit} --no-verdict", job.dump));
        let judged = job.scratch.make(
            "judged",
            &format!("calibrate {} {fit} --verdict-steps 9", job.dump),
        );
        let whole = job.scratch.make("whole", &job.dump());
        for (count, layers) in [(1, &["0/1"][..]), (2, &["1/2", "0/2"]), (4, &["0..1", rest])] {
            let what = format!("{model}, {count} shards, layers {layers:?}");
            let shards = job.shards(count);
            let moments = job
                .scratch
                .make("moments", &format!("merge {}", shards.join(" ")));
            assert!(
                read(&moments) == read(&format!("{whole}/moments.safetensors")),
                "{what}: moments"
            );
            let again = job
                .scratch
                .make("again", &format!("moments --dump {}", shards.join(" ")));
            assert!(read(&moments) == read(&again), "{what}: moments from queries");
            let packed = job.packed(
                &shards,
                layers,
                &format!("packed-{count}"),
                &format!("--positions {positions}"),
            );
            assert!(read(&packed) == read(&direct), "{what}: artifact");
            let dumps = shards.join(" ");
            let verdict = job.scratch.make(
                "verdict",
                &format!(
                    "verdict {packed} --model {} --seed 5 --dump {dumps} --verdict-steps 9",
                    job.model
                ),
            );
            assert!(read(&verdict) == read(&judged), "{what}: verdict");
        }
    }
}

/// The states and sums of shards are those of the whole dump, cut at blocks; a shard has about its share of the tokens.
#[test]
fn shards_are_cut_at_blocks() {
    let job = Job::new(
        "llama_default",
        &[100, 7, 7, 7, 80, 33],
        "--seq-len 50 --holdout 0.3",
    );
    let whole = job.scratch.make("whole", &job.dump());
    let all = read_tensors(format!("{whole}/tokens.safetensors"));
    let blocks = all["block_start"].u32s();
    for count in [1, 2, 3, 7] {
        let (mut ids, mut first_block, mut sums) = (Vec::new(), 0, Vec::new());
        for index in 0..count {
            let out = job.scratch.path(&format!("{count}/{index}"));
            let json = kvsmith(&format!("{} --shard {index}/{count} -o {out} --json", job.dump())).json();
            let tokens = read_tensors(format!("{out}/tokens.safetensors"));
            let own = tokens["ids"].u32s();
            assert_eq!(json["tokens"], own.len());
            let starts = tokens["block_start"].u32s();
            let first = blocks[first_block];
            let expected = &blocks[first_block..first_block + starts.len()];
            assert!(starts.iter().zip(expected).all(|(own, all)| own + first == *all));
            first_block += starts.len() - 1;
            // Off by at most half a block at either end.
            let ideal = blocks[blocks.len() - 1] as f64 / f64::from(count);
            assert!((own.len() as f64 - ideal).abs() <= 50.0, "{count}: {}", own.len());
            ids.extend(own);
            let layer = read_tensors(format!("{out}/layer-00001.safetensors"));
            assert_eq!(layer["sum_qq_pre"].shape[0], starts.len() - 1);
            let values = layer["sum_qq_pre"].f64s();
            let size = values.len() / (starts.len() - 1);
            sums.extend(values.chunks(size).map(<[f64]>::to_vec));
        }
        assert_eq!(ids, all["ids"].u32s());
        assert_eq!(first_block + 1, blocks.len());
        // Added in the order of the blocks, the sums are those of the whole.
        let moments = read_tensors(format!("{whole}/moments.safetensors"))["sum_qq_pre"].f64s();
        let mut total = vec![0.0; sums[0].len()];
        for block in &sums {
            total
                .iter_mut()
                .zip(block)
                .for_each(|(total, more)| *total += more);
        }
        assert_eq!(total, moments[total.len()..2 * total.len()]);
    }
    let out = job.scratch.path("none");
    kvsmith(&format!("{} --shard 0/9 -o {out}", job.dump())).fails(2, "8 blocks", "at most 8 shards");
    kvsmith(&format!("{} --shard 3/3 -o {out}", job.dump())).fails(2, "3/3", "");
}

/// What does not belong together is refused by name, with the command that makes it.
#[test]
fn parts_that_do_not_fit_are_refused() {
    let job = Job::new("llama_default", &[70, 60], "--seq-len 40");
    let mut shards = job.shards(3);
    shards.sort();
    let [zero, one, two] = &shards[..] else {
        panic!("three shards");
    };
    let out = job.scratch.path("out");
    let signs = |dumps: &str| kvsmith(&format!("signs --dump {dumps} -o {out}"));
    signs(&format!("{zero} {two}")).fails(1, "1 of 3 shards of the dump are missing: 1", "--shard 1/3");
    signs(two).fails(
        1,
        "2 of 3 shards of the dump are missing: 0, 1",
        "--queries --values --dtype f32",
    );
    signs(&format!("{zero} {one} {zero} {two}")).fails(1, "both shard 0/3", "once");
    let whole = job.scratch.make("whole", &job.dump());
    signs(&format!("{whole} {zero}")).fails(1, "not shards of one dump", "--shard I/N");
    for (what, command) in [
        ("the text", job.dump().replace("--seq-len 40", "--seq-len 41")),
        ("--dtype", job.dump().replace("f32", "bf16")),
        ("--queries", job.dump().replace("--queries", "")),
        ("--wrope-position", job.dump().replace("300", "299")),
        ("the model", job.dump().replace("llama_default", "llama_linear")),
    ] {
        let other = job.scratch.make("other", &format!("{command} --shard 1/3"));
        signs(&format!("{zero} {other} {two}")).fails(1, what, "kvsmith dump --model");
        kvsmith(&format!("merge {zero} {other} {two} -o {out}")).fails(1, what, "kvsmith dump --model");
        std::fs::remove_dir_all(&other).unwrap();
    }
    // Another version of the program.
    let other = job.scratch.path("version");
    copy_dir(Path::new(one), Path::new(&other));
    reseal_dump(&other, |manifest| manifest["tool_version"] = json!("0.0.9"));
    signs(&format!("{zero} {other} {two}")).fails(1, "the version of kvsmith", "--shard");
    // Damage: of the states, the sums, and the manifest.
    for (file, at) in [
        ("layer-00001.safetensors", 3000),
        ("tokens.safetensors", 700),
        ("manifest.json", 40),
    ] {
        let damaged = job.scratch.path("damaged");
        copy_dir(Path::new(one), Path::new(&damaged));
        let path = format!("{damaged}/{file}");
        let mut bytes = read(&path);
        let at = at.min(bytes.len() - 1);
        bytes[at] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let outcome = signs(&format!("{zero} {damaged} {two}"));
        assert!(outcome.stderr.contains("damaged"), "{file}: {}", outcome.stderr);
        outcome.fails(1, file, "");
        std::fs::remove_dir_all(&damaged).unwrap();
    }
    // Numbers that no dump has.
    for (shard, culprit) in [
        (
            json!({ "index": 1, "count": u64::MAX, "blocks": { "start": 1, "end": 2 } }),
            "`shard` is invalid",
        ),
        (
            json!({ "index": 3, "count": 3, "blocks": { "start": 1, "end": 2 } }),
            "`shard` is invalid",
        ),
        (
            json!({ "index": 1, "count": 3, "blocks": { "start": 2, "end": 1 } }),
            "`shard` is invalid",
        ),
        (
            json!({ "index": 1, "count": 3, "blocks": { "start": 0, "end": 1 } }),
            "`shard` does not match",
        ),
    ] {
        let forged = job.scratch.path("forged");
        copy_dir(Path::new(one), Path::new(&forged));
        reseal_dump(&forged, |manifest| manifest["shard"] = shard);
        signs(&format!("{zero} {forged} {two}")).fails(1, culprit, "recreate");
        std::fs::remove_dir_all(&forged).unwrap();
    }
    assert!(!Path::new(&out).exists());
}

#[test]
fn layers_are_joined_without_gaps() {
    let job = Job::new("llama_default", &[70, 60], "--seq-len 40");
    let whole = job.scratch.make("whole", &job.dump());
    let part = |name: &str, layers: &str, flags: &str| {
        let out = job.scratch.path(name);
        kvsmith(&format!(
            "codebook --dump {whole} --layers {layers} {flags} -o {out}"
        ))
        .ok();
        out
    };
    let first = part("first", "0..1", "--size 9");
    let last = part("last", "1..2", "--size 9");
    let all = part("all", "0..2", "--size 9");
    let other = part("other", "1..2", "--size 8");
    let out = job.scratch.path("packed");
    let pack = |files: &[&String]| {
        let files: Vec<&str> = files.iter().map(|file| file.as_str()).collect();
        kvsmith(&format!(
            "pack {} --model {} --overwrite -o {out}",
            files.join(" "),
            job.model
        ))
    };
    pack(&[&first]).fails(1, "layers 1..2 of section `a2ats` are missing", "--layers 1..2");
    pack(&[&last]).fails(1, "layers 0..1 of section `a2ats` are missing", "--layers 0..1");
    pack(&[&first, &last, &last]).fails(1, "layer 1 of section `a2ats` is given twice", "once");
    pack(&[&all, &all]).fails(1, "section `a2ats` is given twice", "once");
    pack(&[&first, &other]).fails(1, "different options", "same options");
    pack(&[&last, &first]).ok();
    let joined = read(&out);
    pack(&[&all]).ok();
    assert!(read(&out) == joined);
    // A part is no artifact.
    let one = job.scratch.tokens("one.json", &documents(&[20], 1));
    for command in [
        format!("inspect {first}"),
        format!(
            "run --model {} --artifact {first} --tokens {} --max-new 1",
            job.model, one
        ),
        format!(
            "verdict {first} --model {} --dump {whole} -o {out} --overwrite",
            job.model
        ),
    ] {
        kvsmith(&command).fails(1, "only layers 0..1 of 2", "kvsmith pack");
    }
    let fit = |layers: &str| {
        kvsmith(&format!(
            "signs --dump {whole} --layers {layers} -o {}",
            job.scratch.path("x")
        ))
    };
    fit("1..3").fails(2, "the model has 2 layers", "the last one is 1");
    fit("0/3").fails(2, "3 tasks", "");
    fit("1..1").fails(2, "--layers", "");
    // A part that says that it has other layers than it has.
    let forged = job.scratch.path("forged");
    for layers in [
        json!({ "start": 0, "end": 2 }),
        json!({ "start": 1, "end": 3 }),
        json!({ "start": 1, "end": 1 }),
    ] {
        resealed(&first, &forged, |manifest| manifest["layers"] = layers);
        kvsmith(&format!(
            "pack {forged} {last} --model {} -o {out} --overwrite",
            job.model
        ))
        .fails(1, "", "");
    }
    resealed(&first, &forged, |manifest| {
        manifest["layers"] = json!({ "start": 1, "end": 2 })
    });
    pack(&[&first, &forged]).ok();
    assert!(read(&out) != joined);
}

/// Finished parts are recognised, by the scheduler's numbers too; others are not replaced.
#[test]
fn finished_parts_are_not_made_again() {
    let job = Job::new("llama_default", &[70, 60], "--seq-len 40");
    let out = job.scratch.path("shard");
    let run = |command: &str, variables: &[(&str, &str)]| {
        let mut command = crate::common::command(command);
        Outcome::from_output(command.envs(variables.iter().copied()).output().unwrap())
    };
    let slurm = [
        ("SLURM_ARRAY_TASK_ID", "5"),
        ("SLURM_ARRAY_TASK_COUNT", "3"),
        ("SLURM_ARRAY_TASK_MIN", "3"),
        ("SLURM_ARRAY_TASK_STEP", "2"),
    ];
    let auto = format!("{} --shard auto -o {out} --json", job.dump());
    assert_eq!(run(&auto, &slurm).json()["skipped"], false);
    let time = |path: &str| std::fs::metadata(path).unwrap().modified().unwrap();
    let before = time(&format!("{out}/manifest.json"));
    // The same shard by every way to number it.
    for (flag, variables) in [
        ("auto", &slurm[..]),
        ("auto/3", &[("JOB_COMPLETION_INDEX", "1")]),
        ("auto/3", &[("SLURM_ARRAY_TASK_ID", "1")]),
        ("1/3", &[]),
    ] {
        let command = auto.replace("--shard auto", &format!("--shard {flag}"));
        assert_eq!(run(&command, variables).json()["skipped"], true, "{flag}");
    }
    run(&auto, &[]).fails(
        2,
        "neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX",
        "--shard I/N",
    );
    kvsmith(&auto.replace("--shard auto", "--shard 2/3")).fails(1, "its shard differs", "another folder");
    kvsmith(&auto.replace("--shard auto", "--shard 1/3").replace("f32", "f16")).fails(1, "--dtype", "");
    assert_eq!(time(&format!("{out}/manifest.json")), before);

    let shards = job.shards(3).join(" ");
    let part = job.scratch.path("part");
    let codebook = format!("codebook --dump {shards} --size 9 --layers 1/2 -o {part} --json");
    assert_eq!(kvsmith(&codebook).json()["skipped"], false);
    let before = time(&part);
    for (flag, variables) in [("1..2", &[][..]), ("auto/2", &[("JOB_COMPLETION_INDEX", "1")])] {
        let command = codebook.replace("--layers 1/2", &format!("--layers {flag}"));
        assert_eq!(run(&command, variables).json()["skipped"], true, "{flag}");
    }
    for (change, to) in [
        ("--size 9", "--size 8"),
        ("1/2", "0/2"),
        ("--size 9", "--size 9 --seed 1"),
    ] {
        kvsmith(&codebook.replace(change, to)).fails(2, "exists, and its", "another name");
    }
    assert_eq!(time(&part), before);
    // --overwrite replaces a part, but no other file.
    std::fs::write(&part, "cut off").unwrap();
    kvsmith(&codebook).fails(1, "part", "");
    kvsmith(&codebook.replace("-o", "--overwrite -o")).fails(2, "not written by kvsmith", "");
    kvsmith(&codebook.replace(&part, &format!("{part}-2"))).ok();
    let again = codebook.replace(&part, &format!("{part}-2 --overwrite"));
    assert_eq!(kvsmith(&again).json()["skipped"], false);
}

/// The files below a folder with their content, but for the notes of tasks.
fn files(folder: &str) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(below) = open.pop() {
        for entry in std::fs::read_dir(&below).unwrap() {
            let path = entry.unwrap().path();
            let name = path.display().to_string();
            if path.is_dir() {
                open.push(name);
            } else if !name.ends_with(".task.json") {
                found.insert(name.replacen(folder, "", 1), std::fs::read(path).unwrap());
            }
        }
    }
    found
}

/// A task that is killed at any change on the disk leaves nothing under the name of its output, or all of it; the same
/// command then completes it and removes what the killed one left.
#[test]
fn killed_tasks_are_done_again() {
    let job = Job::new("llama_default", &[40, 30], "--seq-len 30");
    let shards = job.shards(2).join(" ");
    for command in [
        format!("{} --shard 1/2", job.dump()),
        format!("codebook --dump {shards} --size 4 --layers 0..1"),
    ] {
        let straight = job.scratch.path("straight");
        std::fs::create_dir(&straight).unwrap();
        kvsmith(&format!("{command} -o {straight}/out")).ok();
        let expected = files(&straight);
        let mut kills = 0;
        for at in (0..400).step_by(3) {
            let folder = job.scratch.path("killed");
            std::fs::create_dir(&folder).unwrap();
            let full = format!("{command} -o {folder}/out");
            let mut killed = crate::common::command(&full);
            let outcome = Outcome::from_output(
                killed
                    .env("KVSMITH_DISK_FAULT", format!("kill:{at}"))
                    .output()
                    .unwrap(),
            );
            if outcome.code.is_none() {
                kills += 1;
                let there = files(&folder);
                let named = there.iter().filter(|(name, _)| name.starts_with("/out"));
                assert!(
                    named.clone().all(|(name, bytes)| expected[name] == *bytes),
                    "{command}, change {at}"
                );
                kvsmith(&full).ok();
            }
            let left = files(&folder);
            let names: Vec<&String> = left.keys().collect();
            assert!(left == expected, "{command}, change {at}: {names:?}");
            std::fs::remove_dir_all(&folder).unwrap();
            if outcome.code.is_some() {
                break;
            }
        }
        assert!(kills > 3, "{command}: {kills}");
        std::fs::remove_dir_all(&straight).unwrap();
    }
}

/// Tasks that run twice at the same time both succeed, and leave one result.
#[test]
fn duplicated_tasks_are_harmless() {
    let job = Job::new("llama_default", &[400, 300, 200], "--seq-len 300");
    let folder = job.scratch.path("twice");
    std::fs::create_dir(&folder).unwrap();
    let command = format!("{} --shard 0/2 -o {folder}/out", job.dump());
    let children: Vec<_> = (0..4).map(|_| start(&command)).collect();
    for child in children {
        Outcome::from_output(child.wait_with_output().unwrap()).ok();
    }
    assert_eq!(job.scratch.list("twice"), [".out.task.json", "out"]);
    let alone = job.scratch.path("alone");
    kvsmith(&format!("{} --shard 0/2 -o {alone}", job.dump())).ok();
    assert!(files(&format!("{folder}/out")) == files(&alone));

    let other = job.scratch.path("other");
    kvsmith(&format!("{} --shard 1/2 -o {other}", job.dump())).ok();
    let command = format!("codebook --dump {alone} {other} --size 30 --layers 0..1 -o {folder}/part");
    let children: Vec<_> = (0..4).map(|_| start(&command)).collect();
    for child in children {
        Outcome::from_output(child.wait_with_output().unwrap()).ok();
    }
    assert_eq!(
        job.scratch.list("twice"),
        [".out.task.json", ".part.task.json", "out", "part"]
    );
}

/// `status` counts what is there, names what is missing and failed, and finds what does not belong.
#[test]
fn status_tells_what_is_missing() {
    let job = Job::new("llama_default", &[70, 60, 50], "--seq-len 40");
    let work = job.scratch.path("work");
    let dump = |index: usize| {
        kvsmith(&format!(
            "{} --shard {index}/4 -o {work}/tokens/{index}",
            job.dump()
        ))
        .ok();
    };
    std::fs::create_dir(&work).unwrap();
    let status = || kvsmith(&format!("status {work} --json")).json();
    assert_eq!(status()["shards"]["count"], Value::Null);
    dump(0);
    dump(2);
    let now = status();
    assert_eq!(
        (&now["shards"]["count"], &now["shards"]["missing"]),
        (&json!(4), &json!([1, 3]))
    );
    assert_eq!(now["shards"]["left_s"], Value::Null);
    // A task that failed says why; a killed one has not been heard of.
    let wrong = job.dump().replace("--dtype f32", "--dtype f16");
    kvsmith(&format!("{wrong} --shard 0/4 -o {work}/tokens/0")).fails(1, "another dump", "");
    let failing = job.dump().replace("tokens.json", "absent.json");
    kvsmith(&format!("{failing} --shard 1/4 -o {work}/tokens/1")).fails(1, "absent.json", "");
    let note = |part: &str, updated: u64, done: u64| {
        json!({
            "kind": "kvsmith task", "command": "dump", "part": part, "state": "running", "host": "node7",
            "process": 3, "updated_unix_s": updated, "seconds": 30.0, "done": done, "total": 100,
        })
    };
    let write = |name: &str, note: Value| {
        std::fs::write(format!("{work}/tokens/.{name}.task.json"), note.to_string())
    };
    write("3", note("3/4", 1000, 50)).unwrap();
    let now = status();
    let failed = now["shards"]["failed"].as_array().unwrap();
    assert_eq!(failed.len(), 2, "{now}");
    assert!(failed[0]["error"].as_str().unwrap().contains("absent.json"));
    assert_eq!(
        (&failed[1]["part"], &failed[1]["host"]),
        (&json!("3/4"), &json!("node7"))
    );
    let text = kvsmith(&format!("status {work}")).ok().stdout;
    assert!(
        text.contains("2 of 4 shards done") && text.contains("missing      1, 3"),
        "{text}"
    );
    assert!(
        text.contains("3/4: silent for") && text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    // At work, half done after 30 s: 30 s are left, and those of the task that waits for a place.
    let unix = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    write("3", note("3/4", unix, 50)).unwrap();
    std::fs::remove_file(format!("{work}/tokens/.1.task.json")).unwrap();
    let now = status();
    assert_eq!(now["shards"]["running"][0]["part"], "3/4");
    let left = now["shards"]["left_s"].as_f64().unwrap();
    assert!((30.0..40.0).contains(&left), "{left}");
    std::fs::remove_file(format!("{work}/tokens/.3.task.json")).unwrap();
    dump(1);
    dump(3);
    assert_eq!(status()["shards"]["left_s"], 0.0);
    let shards: Vec<String> = (0..4).map(|i| format!("{work}/tokens/{i}")).collect();
    std::fs::create_dir(format!("{work}/layers")).unwrap();
    kvsmith(&format!(
        "signs --dump {} --layers 1..2 -o {work}/layers/signs-1.safetensors",
        shards.join(" ")
    ))
    .ok();
    assert_eq!(status()["sections"]["signs"]["missing"], json!([0]));
    kvsmith(&format!(
        "signs --dump {} --layers 0..1 -o {work}/layers/signs-0.safetensors",
        shards.join(" ")
    ))
    .ok();
    let text = kvsmith(&format!("status {work}")).ok().stdout;
    assert!(text.contains("kvsmith pack"), "{text}");
    // A shard with other options.
    let half = job.dump().replace("f32", "bf16");
    kvsmith(&format!("{half} --shard 1/4 -o {work}/tokens/half")).ok();
    assert!(status()["problems"].to_string().contains("different options"));
    std::fs::remove_dir_all(format!("{work}/tokens/half")).unwrap();
    // Another job's part, and a damaged one.
    let other = Job::new("llama_default", &[70, 60, 51], "--seq-len 40");
    kvsmith(&format!("{} --shard 0/4 -o {work}/tokens/other", other.dump())).ok();
    std::fs::write(format!("{work}/layers/cut.safetensors"), "cut off").unwrap();
    let problems = status()["problems"].to_string();
    assert!(
        problems.contains("another model or text") && problems.contains("cut.safetensors"),
        "{problems}"
    );
    kvsmith("status /absent").fails(1, "/absent", "path");
}
