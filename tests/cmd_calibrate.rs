//! `calibrate`: the same bytes as running its steps as single commands, with any number of threads, resumed or not.

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use crate::common::*;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::method::sections::SECTIONS;
use serde_json::{Value, json};

fn read(path: &str) -> Vec<u8> {
    std::fs::read(path).unwrap()
}

#[test]
fn it_equals_the_chain_by_hand() {
    // Several blocks, a sharded checkpoint, and an only block of which the end is held out.
    for (name, lengths, options, positions) in [
        ("llama_default", &[70, 25, 60][..], "--seq-len 40", "window"),
        ("llama_llama3", &[150, 90], "--holdout 0.5", "buckets"),
        ("qwen2_sliding", &[70, 90], "--seq-len 60", "buckets"),
        ("qwen3_norm", &[90], "--holdout 0.1", "window"),
    ] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(lengths, 1));
        let input = format!("--model {model} --tokens {tokens} {options} --seed 5 --wrope-position 300");
        let fit = format!("--size 9 --iterations 6 --positions {positions} --peers");
        let path = |file: &str| scratch.path(file);
        let codebook = fit.replace(" --peers", "");
        let direct = scratch.make("direct", &format!("calibrate {input} {fit} --no-verdict"));
        let judged = scratch.make("judged", &format!("calibrate {input} {fit} --verdict-steps 9"));

        let make = |name: &str, command: String| scratch.make(name, &command);
        let dump = make("dump", format!("dump --dtype f32 --queries --values {input}"));
        let moments = make("moments", format!("moments --dump {dump}"));
        for moments in [String::new(), format!("--moments {moments}")] {
            let section = make(
                "section",
                format!("codebook --dump {dump} {moments} {codebook} --seed 5"),
            );
            let signs = make("signs", format!("signs --dump {dump}"));
            let priors = make("priors", format!("priors --dump {dump}"));
            let wpq = make("wpq", format!("wpq --dump {dump} --seed 5"));
            let rotation = make("rotation", format!("rotation --dump {dump}"));
            let tail = make("tail", format!("tail --dump {dump} --seed 5"));
            let peers = ["doublesparsity", "triattention"];
            let peers = peers.map(|section| make(section, format!("{section} --dump {dump}")));
            let peers = peers.join(" ");
            let packed = path("packed");
            let json = kvsmith(&format!(
                "pack {signs} {peers} {tail} {rotation} {priors} {wpq} {section} --model {model} --overwrite -o {packed} --json"
            ));
            assert!(
                json.json()["sections"]
                    .as_array()
                    .unwrap()
                    .contains(&json!("a2ats"))
            );
            assert!(read(&direct) == read(&packed), "{name}: direct and packed differ");
        }
        for text in [input.clone(), format!("--model {model} --seed 5 --dump {dump}")] {
            // The position of the moments is no flag of `verdict`.
            let text = text.replace(" --wrope-position 300", "");
            let packed = path("packed");
            let verdict = make("verdict", format!("verdict {packed} {text} --verdict-steps 9"));
            assert!(
                read(&judged) == read(&verdict),
                "{name}: the verdicts differ, {text}"
            );
        }
        assert!(read(&judged) != read(&direct), "{name}: no verdict");
        kvsmith(&format!("inspect --verify --model {model} {direct}")).ok();
    }
}

#[test]
fn codewords_follow_the_text_and_the_context() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[500, 460], 1));
    let input = format!("--model {model} --tokens {tokens} --holdout 0");
    let size_of = |path: &str| {
        let artifact = Artifact::open(Path::new(path), SECTIONS).unwrap();
        artifact.manifest.sections["a2ats"].params["codebook_size"].clone()
    };
    // 960 tokens are 15 for each of 64 codewords.
    let direct = scratch.path("direct");
    let made = kvsmith(&format!("calibrate {input} -o {direct} --json")).ok();
    assert!(made.stderr.contains("codebooks: 64 codewords"), "{}", made.stderr);
    assert!(made.stderr.contains("(--size 64)"), "{}", made.stderr);
    assert_eq!(
        (&made.json()["codewords"], &size_of(&direct)),
        (&json!(64), &json!(64))
    );
    for threads in [1, 3] {
        let same = scratch.make("same", &format!("calibrate {input} --threads {threads}"));
        assert!(read(&same) == read(&direct), "{threads} threads");
    }
    let dump = scratch.make("dump", &format!("dump --dtype f32 --queries --values {input}"));
    let sections = ["codebook --size 64", "signs", "priors", "wpq", "rotation", "tail"];
    let section = |command: &&str| {
        let (name, _) = command.split_once(' ').unwrap_or((command, ""));
        scratch.make(name, &format!("{command} --dump {dump}"))
    };
    let sections: Vec<String> = sections.iter().map(section).collect();
    let packed = scratch.make("packed", &format!("pack {} --model {model}", sections.join(" ")));
    assert!(read(&packed) == read(&direct), "by hand");
    let given = scratch.make("given", &format!("calibrate {input} --size 9 --context 1M"));
    assert_eq!(size_of(&given), 9);

    let planned = |options: &str| {
        let flags = "--uuid-tokens 0 --holdout 0 --seq-len 1000 --no-probe --json";
        let plan = kvsmith(&format!("plan --model {model} {flags} {options}")).json();
        (
            plan["codewords"].as_u64().unwrap(),
            plan["blocks"].as_u64().unwrap(),
        )
    };
    for (options, expected) in [
        ("--max-tokens 70000 --context 8K", (256, 70)),
        ("--max-tokens 70000 --context 32K", (1024, 70)),
        ("--max-tokens 70000 --context 1M", (4096, 70)),
        ("--max-tokens 60000 --context 1M", (2048, 60)),
        ("--max-tokens 60000 --context 1M --size 9", (9, 60)),
    ] {
        assert_eq!(planned(options), expected, "{options}");
    }
    let config: Value = serde_json::from_slice(&read(&format!("{model}/config.json"))).unwrap();
    let own = format!("--context {}", config["max_position_embeddings"]);
    assert_eq!(planned(""), planned(&own));
    kvsmith(&format!("plan --model {model} --context 0")).fails(2, "--context", "");
}

/// Codes of every size make runs; `none` leaves the section out.
#[test]
fn product_quantisers_of_every_size() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let input = format!("--model {model} --tokens {tokens} --size 8");
    for (options, groups) in [
        ("--wpq-bits 16", 2),
        ("--wpq-bits 32", 4),
        ("--wpq-bits 64", 8),
        ("--wpq-bits 16 --wpq-words 256", 1),
        ("--wpq-bits 64 --wpq-words 256", 4),
        ("--wpq-directions 7", 8),
        ("--wpq-center mean", 8),
    ] {
        let art = scratch.make("art", &format!("calibrate {input} {options}"));
        let params = &Artifact::open(Path::new(&art), SECTIONS)
            .unwrap()
            .manifest
            .sections["wpq"]
            .params;
        assert_eq!(params["groups"], json!(groups), "{options}");
        let eval =
            format!("eval --model {model} --artifact {art} --tokens {tokens} --max-tokens 300 --decode 4");
        let json = kvsmith(&format!(
            "{eval} --methods wpq,random --budgets 20 --sinks 1 --window 4 --json"
        ))
        .json();
        let recall = |row: usize| json["rows"][row]["recall"].as_f64().unwrap();
        assert!(
            recall(0) > 2.0 * recall(1),
            "{options}: {} {}",
            recall(0),
            recall(1)
        );
    }
    let without = scratch.make("without", &format!("calibrate {input} --wpq-bits none"));
    assert!(!Artifact::open(Path::new(&without), SECTIONS).unwrap().has("wpq"));
    kvsmith(&format!(
        "run --model {model} --artifact {without} --tokens {tokens} --method wpq --max-new 1"
    ))
    .fails(2, "section `wpq`", "calibrate");
    let dump = scratch.make("dump", &format!("dump --model {model} --tokens {tokens}"));
    let out = scratch.path("none");
    kvsmith(&format!("wpq --dump {dump} --wpq-bits none -o {out}")).fails(2, "no section", "64");
    kvsmith(&format!("wpq --dump {dump} --wpq-directions 0 -o {out}")).fails(
        2,
        "--wpq-directions 0",
        "at least 1",
    );
}

/// An artifact that looks like one whose codes have one stage.
#[test]
fn product_quantisers_of_one_stage_are_refused() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let art = scratch.make(
        "art",
        &format!("calibrate --model {model} --tokens {tokens} --no-verdict"),
    );
    let earlier = scratch.path("earlier");
    resealed(&art, &earlier, |manifest| {
        let section = &mut manifest["sections"]["wpq"];
        (section["stages"], section["groups"]) = (json!(1), json!(16));
    });
    let run = format!("run --model {model} --tokens {tokens} --max-new 1 --artifact {earlier} --method wpq");
    for command in [format!("inspect {earlier}"), run] {
        kvsmith(&command).fails(
            1,
            "`sections.wpq.stages` is 1, a form that was removed",
            "`kvsmith wpq --dump DIR -o FILE`, or the artifact with `kvsmith calibrate`",
        );
    }
}

/// The manifests of earlier versions do not say how many directions the codes describe, which is all.
#[test]
fn product_quantisers_of_earlier_versions() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let art = scratch.make(
        "art",
        &format!("calibrate --model {model} --tokens {tokens} --size 8 --no-verdict"),
    );
    let old = scratch.path("old");
    resealed(&art, &old, |manifest| {
        let params = manifest["sections"]["wpq"].as_object_mut().unwrap();
        assert_eq!(params.remove("directions"), Some(json!(16)));
    });
    kvsmith(&format!("inspect --verify --model {model} {old}")).ok();
    let rows = |artifact: &str| {
        let eval = format!("eval --model {model} --artifact {artifact} --tokens {tokens} --decode 8");
        let json = kvsmith(&format!(
            "{eval} --methods wpq --budgets 20 --sinks 1 --window 4 --json"
        ))
        .json();
        json["rows"].clone()
    };
    assert_eq!(rows(&old), rows(&art));
}

/// Codes of wide heads describe half of the principal directions, others all, unless a flag says otherwise. What they
/// leave out counts as error, so that more directions explain more.
#[test]
fn directions_of_product_quantisers() {
    let scratch = Scratch::new();
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let dump = |model: &str| {
        scratch.make(
            model,
            &format!("dump --model {} --tokens {tokens}", checkpoint(model)),
        )
    };
    let [wide, narrow] = ["llama_d128", "llama_default"].map(dump);
    let made = |dump: &str, options: &str| {
        let section = scratch.make("section", &format!("wpq --dump {dump} {options}"));
        let artifact = Artifact::open(Path::new(&section), SECTIONS).unwrap();
        let params = &artifact.manifest.sections["wpq"].params;
        let quality = artifact.manifest.quality.sections["wpq"].iter().flatten();
        let share =
            quality.map(|head| head["inertia"].as_f64().unwrap() / head["variance"].as_f64().unwrap());
        let shares: Vec<f64> = share.collect();
        (
            params["directions"].as_u64().unwrap(),
            shares.iter().sum::<f64>() / shares.len() as f64,
        )
    };
    let (half, half_left) = made(&wide, "");
    let (few, few_left) = made(&wide, "--wpq-directions 15");
    assert_eq!((half, few), (64, 16));
    assert!(few_left > half_left && few_left < 1.0, "{few_left} {half_left}");
    assert_eq!(made(&wide, "--wpq-directions all").0, 128);
    assert_eq!(made(&narrow, "").0, 16);
}

#[test]
fn the_ablation_by_hand() {
    let scratch = Scratch::new();
    let model = checkpoint("qwen2_bias");
    let tokens = scratch.tokens("tokens.json", &documents(&[70, 50, 60], 1));
    let make = |name: &str, command: String| scratch.make(name, &command);
    let input = format!("--model {model} --tokens {tokens} --wrope-position 30");
    let dump = make("dump", format!("dump --dtype f32 --queries --values {input}"));
    let mut codebooks = Vec::new();
    for rope in ["windowed", "standard"] {
        let moments = make("moments", format!("moments --dump {dump} --rope {rope}"));
        for metric in ["query-aware", "plain"] {
            let fit = format!("--size 9 --metric {metric}");
            let direct = make(
                "direct",
                format!("calibrate {input} --rope {rope} {fit} --no-verdict"),
            );
            let section = make(
                "section",
                format!("codebook --dump {dump} --moments {moments} {fit}"),
            );
            let by_hand = read_tensors(section);
            for (name, tensor) in read_tensors(&direct) {
                if name.starts_with("a2ats") {
                    assert!(tensor.bytes == by_hand[&name].bytes, "{rope} {metric}: {name}");
                }
            }
            let manifest = Artifact::open(Path::new(&direct), SECTIONS).unwrap().manifest;
            let params = &manifest.sections["a2ats"].params;
            let b = if rope == "windowed" {
                json!(30)
            } else {
                json!(null)
            };
            let space = if rope == "windowed" { "pre" } else { "post" };
            assert_eq!(
                (
                    &params["wrope_position"],
                    &params["rope_space"],
                    &params["metric"]
                ),
                (&b, &json!(space), &json!(metric))
            );
            codebooks.push(by_hand["a2ats.codebook"].bytes.clone());
        }
    }
    for i in 0..4 {
        for j in 0..i {
            assert!(codebooks[i] != codebooks[j], "settings {i} and {j} agree");
        }
    }
}

/// The section of `--positions buckets` in a manifest.
#[test]
fn buckets_are_in_the_manifest() {
    let scratch = Scratch::new();
    let model = checkpoint("qwen2_sliding");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let calibrate = format!("calibrate --model {model} --tokens {tokens} --size 8 --holdout 0");
    let params = |name: &str, options: &str| {
        let made = scratch.make(name, &format!("{calibrate} {options}"));
        let artifact = Artifact::open(Path::new(&made), SECTIONS).unwrap();
        (read(&made), artifact.manifest.sections["a2ats"].params.clone())
    };
    let (window, own) = params("window", "--positions window");
    let (default, _) = params("default", "");
    assert!(window == default, "the default is one position");
    assert!(!own.contains_key("distance_buckets"));
    let (_, params) = params("buckets", "--seq-len 80 --positions buckets");
    assert!(!params.contains_key("wrope_position"));
    assert_eq!(params["rope_space"], "pre");
    let buckets = &params["distance_buckets"];
    // A geometric series from 80 / 32 to the longest block.
    assert_eq!(buckets["edges"], json!([0, 2, 3, 6, 10, 16, 28, 47, 80]));
    // Pairs at each distance of one block of 60: 60 at distance 0, 59 at 1. Layers 1 and 2 have a window of 12.
    let pairs = |distances: std::ops::Range<u64>, window: u64| -> u64 {
        distances.filter(|x| *x < window.min(60)).map(|x| 60 - x).sum()
    };
    let edges: Vec<u64> = serde_json::from_value(buckets["edges"].clone()).unwrap();
    for (layer, window) in [60, 12, 12].into_iter().enumerate() {
        let all = pairs(0..60, window) as f64;
        let expected: Vec<f64> = edges
            .windows(2)
            .map(|e| pairs(e[0]..e[1], window) as f64 / all)
            .collect();
        assert_eq!(buckets["weights"][layer], json!(expected));
    }
    let out = scratch.path("other");
    kvsmith(&format!(
        "{calibrate} --positions buckets --rope standard -o {out}"
    ))
    .fails(2, "--positions buckets", "--rope standard");
}

#[test]
fn one_dump_serves_every_position() {
    for name in ["llama_default", "llama_yarn", "qwen2_bias"] {
        let scratch = Scratch::new();
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(&[70, 50, 60], 1));
        let input = format!("--model {model} --tokens {tokens}");
        let make = |name: &str, command: String| read(&scratch.make(name, &command));
        let dump = |name: &str, options: &str| {
            let command = format!("dump --dtype f32 {options} {input}");
            scratch.make(name, &command)
        };
        // Neither queries nor a second pass of the model are needed for another position.
        let (one, with_queries) = (dump("one", ""), dump("with-queries", "--queries"));
        let own = scratch.make("own", &format!("moments --rope standard --dump {with_queries}"));
        let mut sections = Vec::new();
        for position in [0, 9, 300, 2048] {
            let other = dump(&format!("at-{position}"), &format!("--wrope-position {position}"));
            let expected = make("expected", format!("codebook --size 9 --dump {other}"));
            for source in [
                format!("--dump {one}"),
                format!("--dump {other}"),
                format!("--dump {with_queries} --moments {own}"),
            ] {
                let section = format!("codebook --size 9 --wrope-position {position} {source}");
                assert!(make("section", section) == expected, "{name} {position} {source}");
            }
            let moments = format!("moments --wrope-position {position} --dump {with_queries}");
            assert!(
                make("moments", moments) == read(&format!("{other}/moments.safetensors")),
                "{name} {position}"
            );
            let direct = format!("calibrate --size 9 --wrope-position {position} {input}");
            let direct = read_tensors(scratch.make("direct", &direct));
            for (tensor, by_hand) in read_tensors(scratch.path("section")) {
                assert!(direct[&tensor] == by_hand, "{name} {position} {tensor}");
            }
            sections.push(expected);
        }
        for i in 0..4 {
            assert!(!sections[..i].contains(&sections[i]), "{name}: section {i}");
        }
    }
}

/// Moments as earlier builds wrote them: of one position alone.
#[test]
fn moments_of_one_position_serve_no_other() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_yarn");
    let tokens = scratch.tokens("tokens.json", &documents(&[70, 50, 60], 1));
    let dump = scratch.make(
        "dump",
        &format!("dump --wrope-position 9 --model {model} --tokens {tokens}"),
    );
    let codebook = |options: &str| format!("codebook --size 9 --dump {dump} {options}");
    let expected = read(&scratch.make("expected", &codebook("")));
    let path = format!("{dump}/moments.safetensors");
    let older = scratch.path("older");
    resealed(&path, &older, |manifest| {
        let digests = manifest["sha256"].as_object_mut().unwrap();
        digests.retain(|name, _| ["sum_qq", "count"].contains(&name.as_str()));
    });
    remove_tensors(&older, &["sum_qq_pre", "sum_qq_rope"]);
    let given = format!("--moments {older}");
    for source in [given.clone(), format!("{given} --wrope-position 9")] {
        assert!(
            read(&scratch.make("section", &codebook(&source))) == expected,
            "{source}"
        );
    }
    let out = scratch.path("out");
    for source in ["", given.as_str()] {
        // The dump itself, too, as an earlier build left it.
        std::fs::copy(&older, &path).unwrap();
        reseal_dump(&dump, |manifest| {
            manifest["files"]["moments.safetensors"] =
                json!(kvsmith::internal::store::file_digest(Path::new(&path)).unwrap());
        });
        assert!(
            read(&scratch.make("section", &codebook(source))) == expected,
            "{source}"
        );
        for (options, wanted) in [
            ("--wrope-position 10", "position 10"),
            ("--positions buckets", "buckets of distances"),
        ] {
            kvsmith(&codebook(&format!("{source} {options} -o {out}"))).fails(
                1,
                &format!("the moments are for position 9 only, not for {wanted}"),
                "kvsmith moments --wrope-position",
            );
        }
    }
    assert!(!Path::new(&out).exists());
}

#[test]
fn the_seed_alone_makes_a_difference() {
    let scratch = Scratch::new();
    let model = checkpoint("qwen2_sliding");
    // Long enough that every parallel loop has several pieces.
    let tokens = scratch.tokens("tokens.json", &documents(&[3000, 500], 2));
    let run = |name: &str, options: &str| {
        let command = format!("calibrate --model {model} --tokens {tokens} --size 64 --peers {options}");
        read(&scratch.make(name, &command))
    };
    let first = run("first", "");
    for (name, options) in [
        ("one", "--threads 1"),
        ("three", "--threads 3"),
        // So many that they cluster several KV heads together.
        ("many", "--threads 64"),
        ("again", "--threads 2 --seed 0"),
    ] {
        assert!(run(name, options) == first, "`{options}` changed the bytes");
    }
    run("other", "--seed 1");
    let codebook = |name: &str| read_tensors(scratch.path(name)).remove("a2ats.codebook").unwrap();
    let (first, other) = (codebook("first"), codebook("other"));
    assert_eq!((&first.dtype, &first.shape), (&other.dtype, &other.shape));
    assert!(first.bytes != other.bytes, "another seed gives another codebook");
}

/// A calibration that takes long enough to be stopped.
struct Run {
    scratch: Scratch,
    input: String,
}

impl Run {
    fn new(tokens: usize) -> Self {
        let scratch = Scratch::new();
        let model = checkpoint("qwen2_sliding");
        let file = scratch.tokens("tokens.json", &documents(&vec![500; tokens / 500], 3));
        let input = format!("--model {model} --tokens {file} --seq-len 500 --peers");
        Self { scratch, input }
    }

    fn arguments(&self, out: &str, options: &str) -> String {
        format!("calibrate {} -o {} {options}", self.input, self.scratch.path(out))
    }

    /// Starts it with a work folder and waits for its first finished layer; `None` if it has
    /// finished altogether by then.
    fn start(&self) -> Option<Child> {
        let arguments = self.arguments("stopped", &format!("--work {}", self.scratch.path("work")));
        let mut child = start(&arguments);
        // The hidden states are the last that a finished layer writes.
        let finished_layer = self.scratch.path("work/hidden.safetensors");
        while !Path::new(&finished_layer).exists() {
            if let Some(status) = child.try_wait().unwrap() {
                assert!(
                    status.success(),
                    "{:?}",
                    Outcome::from_output(child.wait_with_output().unwrap()).stderr
                );
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Some(child)
    }

    /// A run that `signal` stopped after its first layer; the input grows until it is slow enough.
    fn stopped_by(signal: i32) -> (Self, Outcome) {
        for doubling in 0..7 {
            let run = Self::new(5_000 << doubling);
            let Some(child) = run.start() else { continue };
            send(&child, signal);
            let outcome = Outcome::from_output(child.wait_with_output().unwrap());
            if outcome.code != Some(0) {
                return (run, outcome);
            }
        }
        panic!("no input was slow enough to be stopped");
    }

    /// Goes on, and compares with a run that nobody stopped.
    fn resume(&self) {
        assert!(
            !Path::new(&self.scratch.path("stopped")).exists(),
            "nothing is written before the end"
        );
        let work = self.scratch.path("work");
        let resumed = kvsmith(&self.arguments("resumed", &format!("--work {work} --resume"))).ok();
        assert!(
            resumed.stderr.contains("resuming at layer "),
            "{}",
            resumed.stderr
        );
        kvsmith(&self.arguments("straight", "")).ok();
        assert!(read(&self.scratch.path("resumed")) == read(&self.scratch.path("straight")));
        assert!(!Path::new(&work).exists(), "a finished run needs no work folder");
    }
}

#[test]
fn a_killed_run_can_be_resumed() {
    let (run, outcome) = Run::stopped_by(libc::SIGKILL);
    assert_eq!(outcome.code, None, "killed");

    // Nobody else may go on in its folder, nor this run by mistake.
    let work = run.scratch.path("work");
    let with = |options: &str| kvsmith(&run.arguments("out", &format!("--work {work} {options}")));
    with("").fails(1, "contains an unfinished run", "--resume");
    for other in [
        "--seed 1",
        "--iterations 7",
        "--holdout 0.2",
        "--wrope-position 9",
    ] {
        with(&format!("--resume {other}")).fails(
            1,
            "contains a run with other inputs or options",
            "seed and options",
        );
    }

    // Every file of it that is damaged is found: flipped, cut, or gone.
    let first_layer = "layer-00000.safetensors";
    for file in [first_layer, "hidden.safetensors"] {
        let path = format!("{work}/{file}");
        let bytes = read(&path);
        let (mut flipped, middle) = (bytes.clone(), bytes.len() / 2);
        flipped[middle] ^= 4;
        for damaged in [&flipped[..], &bytes[..middle], &[]] {
            std::fs::write(&path, damaged).unwrap();
            with("--resume").fails(1, file, "");
        }
        std::fs::write(&path, bytes).unwrap();
    }
    let bytes = read(&format!("{work}/{first_layer}"));
    std::fs::remove_file(format!("{work}/{first_layer}")).unwrap();
    with("--resume").fails(1, first_layer, "start again without --resume");
    std::fs::write(format!("{work}/{first_layer}"), bytes).unwrap();
    let state = read(&format!("{work}/state.json"));
    std::fs::write(format!("{work}/state.json"), "{}").unwrap();
    with("--resume").fails(1, "state.json is damaged", "remove");
    std::fs::write(format!("{work}/state.json"), state).unwrap();
    assert!(!run.scratch.list("").contains(&"out".to_string()));

    run.resume();
}

#[test]
fn an_interrupted_run_can_be_resumed() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        let (run, outcome) = Run::stopped_by(signal);
        outcome.fails(130, "interrupted", "");
        let parts: Vec<String> = run
            .scratch
            .list("")
            .into_iter()
            .filter(|f| f.ends_with(".part"))
            .collect();
        assert!(parts.is_empty(), "left behind: {parts:?}");
        run.resume();
    }
}

/// A run of three layers that was killed after the second.
fn killed_after_two_layers(scratch: &Scratch) -> String {
    let model = checkpoint("qwen2_sliding");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let run = format!("calibrate --model {model} --tokens {tokens} --size 4 --overwrite");
    let work = scratch.path("work");
    let out = scratch.path("out");
    for at in 0.. {
        let _ = std::fs::remove_dir_all(&work);
        let mut stopped = command(&format!("{run} --work {work} -o {out}"));
        let fault = format!("kill:{at}");
        let status = stopped.env("KVSMITH_DISK_FAULT", fault).output().unwrap().status;
        assert_eq!(status.code(), None, "no change leaves two layers");
        let hidden = std::fs::read(format!("{work}/hidden.safetensors")).unwrap_or_default();
        if String::from_utf8_lossy(&hidden).contains("next_layer\\\":2") {
            break;
        }
    }
    run
}

/// Files that are whole but not what the run wrote are refused: mixed up, or edited.
#[test]
fn a_work_folder_with_other_content_is_refused() {
    let scratch = Scratch::new();
    let run = killed_after_two_layers(&scratch);
    let [work, out] = ["work", "out"].map(|name| scratch.path(name));
    let resume = || kvsmith(&format!("{run} --work {work} --resume -o {out}"));
    let [first, second, hidden] =
        ["layer-00000", "layer-00001", "hidden"].map(|name| format!("{work}/{name}.safetensors"));
    let refused = |path: &str, culprit: &str| {
        resume().fails(
            1,
            culprit,
            &format!("remove {work} and start again without --resume"),
        );
        assert!(!Path::new(&out).exists(), "{path}");
    };
    let originals = [&first, &second, &hidden].map(|path| read(path));
    let restore = || {
        for (path, bytes) in [&first, &second, &hidden].iter().zip(&originals) {
            std::fs::write(path, bytes).unwrap();
        }
    };
    // Layers in each other's place, one twice, and hidden states in place of a layer.
    std::fs::write(&first, &originals[1]).unwrap();
    refused(&first, "layer-00000");
    std::fs::write(&second, &originals[0]).unwrap();
    refused(&first, "layer-00000");
    restore();
    std::fs::write(&second, &originals[2]).unwrap();
    refused(&second, "layer-00001");
    restore();
    // Other values, with the digest of before and with one that fits.
    let edits: [(&str, &str, Value); 6] = [
        (&hidden, "next_layer", json!(null)),
        (&hidden, "next_layer", json!("x")),
        (&hidden, "next_layer", json!(3)),
        (&hidden, "next_layer", json!(0)),
        (&second, "layer", json!(0)),
        (&second, "quality", json!([])),
    ];
    for (path, key, value) in edits {
        let name = Path::new(path).file_stem().unwrap().to_str().unwrap();
        resealed(path, path, |manifest| manifest[key] = value.clone());
        refused(path, name);
        restore();
    }
    for (path, from, to) in [
        (&hidden, "next_layer\\\":2", "next_layer\\\":1"),
        (&second, "inertia\\\":", "inertib\\\":"),
    ] {
        let mut bytes = read(path);
        let at = bytes.windows(from.len()).position(|part| part == from.as_bytes());
        let at = at.unwrap_or_else(|| panic!("{path} has no {from}"));
        bytes[at..at + from.len()].copy_from_slice(to.as_bytes());
        std::fs::write(path, bytes).unwrap();
        refused(path, Path::new(path).file_stem().unwrap().to_str().unwrap());
        restore();
    }
    // The mark lists what may be removed: nothing else than the names of such files is believed.
    let mark = format!("{work}/state.json");
    let content = read(&mark);
    for name in ["../out", "/tmp/x", "notes.txt", "layer-1.safetensors"] {
        let mut edited: Value = serde_json::from_slice(&content).unwrap();
        edited["files"][0] = json!(name);
        std::fs::write(&mark, edited.to_string()).unwrap();
        resume().fails(1, "state.json is damaged", "remove");
    }
    std::fs::write(&mark, content).unwrap();
    assert!(resume().ok().stderr.contains("resuming at layer 2"));
}

#[test]
fn a_work_folder_of_a_run_that_was_not_stopped_changes_nothing() {
    let run = Run::new(1000);
    let work = run.scratch.path("work");
    kvsmith(&run.arguments("straight", "")).ok();
    for options in ["", "--resume"] {
        kvsmith(&run.arguments("worked", &format!("--overwrite --work {work} {options}"))).ok();
        assert!(read(&run.scratch.path("worked")) == read(&run.scratch.path("straight")));
        assert!(!Path::new(&work).exists());
    }
}

#[test]
fn json_output() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let out = scratch.path("art");
    let outcome = kvsmith(&format!(
        "calibrate --model {model} --tokens {tokens} --size 4 -o {out} --json"
    ));
    assert!(
        outcome.stderr.contains("warning: only 14.2 keys per codeword"),
        "{}",
        outcome.stderr
    );
    let json = outcome.json();
    assert_eq!(
        (&json["tokens"], &json["layers"], &json["device"]),
        (&json!(60), &json!(2), &json!("cpu"))
    );
    assert_eq!(json["artifact"], json!(out));
}
