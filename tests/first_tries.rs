//! What a newcomer types first: models by their id, text of any kind, prompts from stdin, numbers with units, and
//! checkpoints of other formats; and messages where a command would otherwise silently do nothing.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use crate::common::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use kvsmith::dump::Dump;
use serde_json::{Value, json};

/// Runs the program with some text on stdin.
#[track_caller]
fn fed(arguments: &str, text: &str) -> Outcome {
    let mut command = command(arguments);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    Outcome::of(child.wait_with_output().unwrap())
}

/// A model with a tokenizer of characters.
fn model(scratch: &Scratch) -> String {
    let model = scratch.model("model", "llama_default");
    scratch.write("model/tokenizer.json", tokenizer(Value::Null));
    model
}

/// The documents of a dump.
fn dumped(dir: &str) -> Vec<Vec<u32>> {
    let corpus = Dump::open(&[dir]).unwrap().corpus;
    (0..corpus.n_blocks())
        .map(|b| corpus.ids[corpus.block(b)].to_vec())
        .collect()
}

#[test]
fn a_model_is_found_in_the_hubs_cache() {
    let scratch = Scratch::new();
    let prompt = scratch.tokens("prompt.json", &documents(&[20], 1));
    let commit = "models--tiny--llama/snapshots/0a1b";
    let folders = ["models--tiny--llama/refs", commit, "models--lone/snapshots/ff00"];
    for folder in folders {
        std::fs::create_dir_all(scratch.path(folder)).unwrap();
    }
    for (folder, from) in [
        (commit, "llama_default"),
        ("models--lone/snapshots/ff00", "qwen2_bias"),
    ] {
        copy_dir(&golden(from), Path::new(&scratch.path(folder)));
    }
    scratch.write("models--tiny--llama/refs/main", "0a1b\n");
    scratch.write("models--tiny--llama/refs/v1", "0a1b");
    let run = |model: &str, variable: &str, value: &str| {
        let mut command = command(&format!(
            "run --model {model} --tokens {prompt} --max-new 4 --json"
        ));
        for name in ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"] {
            command.env_remove(name);
        }
        Outcome::of(command.env(variable, value).output().unwrap())
    };
    let ids = |outcome: Outcome| outcome.json()["ids"].clone();
    let cache = scratch.path("");
    let own = ids(run(&checkpoint("llama_default"), "HF_HUB_CACHE", &cache));
    for model in [
        "tiny/llama",
        "tiny/llama@v1",
        "tiny/llama@0a1b",
        &scratch.path("models--tiny--llama"),
    ] {
        assert_eq!(ids(run(model, "HF_HUB_CACHE", &cache)), own, "{model}");
    }
    let other = ids(run(&checkpoint("qwen2_bias"), "HF_HUB_CACHE", &cache));
    assert_eq!(ids(run("lone", "HF_HUB_CACHE", &cache)), other);
    assert_eq!(
        ids(run(
            &scratch.path("models--lone/snapshots"),
            "HF_HUB_CACHE",
            &cache
        )),
        other
    );
    // The folder of several models names them; that of a single one stands for it.
    run(&cache, "HF_HUB_CACHE", &cache).fails(
        1,
        "is not the folder of a checkpoint",
        "give --model a checkpoint in it: lone, tiny/llama",
    );
    let paths = format!("in it: {0}models--lone, {0}models--tiny--llama", cache);
    run(&cache, "HF_HOME", "/nowhere").fails(1, "is not the folder of a checkpoint", &paths);
    // Outside the hub's layout, a lone checkpoint is named, not taken.
    std::fs::create_dir_all(scratch.path("own")).unwrap();
    copy_dir(&golden("llama_default"), Path::new(&scratch.path("own/model")));
    let own_folder = scratch.path("own");
    run(&own_folder, "HF_HUB_CACHE", &cache).fails(
        1,
        "it has no config.json",
        &format!("in it: {own_folder}/model"),
    );
    std::fs::remove_dir_all(&own_folder).unwrap();

    // The other places of the cache.
    let scratch = Scratch::new();
    let hub = scratch.path("home/hub/models--tiny--llama/snapshots");
    std::fs::create_dir_all(&hub).unwrap();
    copy_dir(&golden("llama_default"), Path::new(&format!("{hub}/0a1b")));
    assert_eq!(ids(run("tiny/llama", "HF_HOME", &scratch.path("home"))), own);
    for lone in ["home", "home/hub"] {
        assert_eq!(ids(run(&scratch.path(lone), "HF_HOME", "")), own, "{lone}");
    }
    std::fs::create_dir_all(scratch.path(".cache")).unwrap();
    std::fs::rename(scratch.path("home"), scratch.path(".cache/huggingface")).unwrap();
    assert_eq!(ids(run("tiny/llama", "HOME", &scratch.path(""))), own);
    assert_eq!(
        ids(run("tiny/llama", "XDG_CACHE_HOME", &scratch.path(".cache"))),
        own
    );

    let none = run("tiny/other", "HF_HUB_CACHE", &scratch.path(""));
    none.fails(
        1,
        "tiny/other does not exist, and the Hugging Face cache at",
        "`hf download tiny/other`",
    );
    let none = run("tiny/llama@v2", "HF_HOME", &scratch.path(".cache/huggingface"));
    none.fails(1, "tiny/llama@v2", "`hf download tiny/llama --revision v2`");
    run("./missing", "HF_HUB_CACHE", &scratch.path("")).fails(1, "./missing does not exist", "config.json");
}

#[test]
fn other_formats_are_named() {
    let scratch = Scratch::new();
    let tokens = scratch.tokens("tokens.json", &documents(&[20], 1));
    let run = |model: &str| kvsmith(&format!("run --model {model} --tokens {tokens}"));
    let folder = |name: &str, files: &[&str]| {
        std::fs::create_dir(scratch.path(name)).unwrap();
        for file in files {
            scratch.write(&format!("{name}/{file}"), "x");
        }
        scratch.path(name)
    };
    run(&scratch.write("model-q4.gguf", "GGUF....")).fails(1, "is a GGUF file", "Hugging Face folder");
    run(&scratch.write("renamed", "GGUF....")).fails(1, "is a GGUF file", "Hugging Face folder");
    run(&scratch.write("weights.pth", "PK\x03\x04..")).fails(1, "is a PyTorch file", "safetensors");
    run(&scratch.write("model.safetensors", "..")).fails(
        1,
        "a single file of a checkpoint",
        "the folder that contains this file",
    );
    run(&folder("gguf", &["a-q4.gguf", "README.md"])).fails(
        1,
        "contains weights in GGUF",
        "Hugging Face folder",
    );
    run(&folder(
        "adapter",
        &["adapter_config.json", "adapter_model.safetensors"],
    ))
    .fails(1, "PEFT adapter", "merge_and_unload");
    run(&folder("meta", &["consolidated.00.pth", "params.json"])).fails(
        1,
        ".pth format",
        "Hugging Face version",
    );
    run(&folder("pickle", &["pytorch_model.bin"])).fails(1, ".bin format", "save_pretrained");
    run(&folder("other", &["README.md"])).fails(
        1,
        "other is not the folder of a checkpoint: it has no config.json",
        "the folder of a Hugging Face checkpoint",
    );
    for name in ["model-q4.gguf", "renamed"] {
        kvsmith(&format!("inspect {}", scratch.path(name))).fails(1, "is a GGUF file", "kvsmith calibrate");
    }

    let text = scratch.write("text.parquet", "PAR1....");
    let model = model(&scratch);
    let dump = format!("dump --model {model} -o {}", scratch.path("dump"));
    kvsmith(&format!("{dump} --text {text}")).fails(1, "is a Parquet file", "to_json");

    for (method, name) in [
        ("awq", "AWQ"),
        ("gptq", "GPTQ"),
        ("bitsandbytes", "bitsandbytes"),
        ("fp8", "FP8"),
        ("mxfp4", "mxfp4"),
    ] {
        let how = json!({ "quant_method": method, "bits": 4 });
        edit_json(
            &format!("{model}/config.json"),
            &json!({ "quantization_config": how }),
        );
        run(&model).fails(1, &format!("quantised ({name})"), "from which it was made");
    }
    std::fs::rename(
        format!("{model}/model.safetensors"),
        format!("{model}/model.gguf"),
    )
    .unwrap();
    edit_json(
        &format!("{model}/config.json"),
        &json!({ "quantization_config": null }),
    );
    run(&model).fails(1, "but it contains weights in GGUF", "Hugging Face folder");
}

#[test]
fn text_of_every_kind_is_read() {
    let scratch = Scratch::new();
    let model = model(&scratch);
    let texts = [
        "a first document.",
        "the second one, zipped.",
        "third",
        "a fourth, of a field",
        "0 the last one",
    ];
    let ids: Vec<Vec<u32>> = texts.iter().map(|text| character_ids(text)).collect();
    let dump = |name: &str, text: &str, stdin: &str| {
        let out = scratch.path(name);
        fed(
            &format!("dump --model {model} --uuid-tokens 0 --text {text} -o {out}"),
            stdin,
        )
        .ok();
        dumped(&out)
    };
    std::fs::create_dir_all(scratch.path("texts/b/deeper")).unwrap();
    scratch.write("texts/a.md", texts[0]);
    scratch.write("texts/picture.png", b"\xff\xfe");
    scratch.write("texts/.hidden.txt", "not this one");
    let zipped = |text: &str| {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(text.as_bytes()).unwrap();
        encoder.finish().unwrap()
    };
    scratch.write("texts/b/b.txt.gz", zipped(texts[1]));
    scratch.write(
        "texts/b/deeper/c.jsonl.gz",
        zipped(&json!({ "text": texts[2] }).to_string()),
    );
    let folder = scratch.path("texts");
    assert_eq!(dump("folder", &folder, ""), ids[..3]);

    let plain = scratch.write("NOTES", texts[0]);
    assert_eq!(dump("plain", &plain, ""), ids[..1]);
    assert_eq!(dump("stdin", "-", texts[4]), ids[4..]);
    let line = json!({ "body": texts[3], "text": 5 }).to_string();
    let lines = scratch.write("fields.ndjson", &line);
    assert_eq!(
        dump("field", &format!("{lines} --text-field body"), ""),
        ids[3..4]
    );
    assert_eq!(dump("lines", "- --text-field body", &line), ids[3..4]);
    assert_eq!(
        dump("both", &format!("{plain} {lines} --text-field body"), ""),
        [ids[0].clone(), ids[3].clone()]
    );

    for (name, texts, warned) in [
        ("warned", plain.clone(), true),
        ("unwarned", format!("{plain} {folder}"), false),
    ] {
        let out = scratch.path(name);
        let dump = format!("dump --model {model} --uuid-tokens 0 --text {texts} --text-field text -o {out}");
        let stderr = kvsmith(&dump).ok().stderr;
        assert_eq!(stderr.contains("--text-field has no effect"), warned, "{stderr}");
    }

    let fails = |text: &str, culprit: &str, hint: &str| {
        kvsmith(&format!(
            "dump --model {model} --text {text} -o {}",
            scratch.path("none")
        ))
        .fails(1, culprit, hint);
    };
    fails(
        &lines,
        "fields.ndjson line 1: field `text` is missing or not a string",
        "--text-field",
    );
    fails(
        &scratch.write("cut.gz", &zipped(texts[1])[..20]),
        "cut.gz cannot be decompressed",
        "damaged",
    );
    std::fs::create_dir(scratch.path("empty")).unwrap();
    fails(&scratch.path("empty"), "contains no text file", ".jsonl");
    fails(&scratch.path("texts/picture.png"), "not UTF-8", "stdin");
    assert!(!Path::new(&scratch.path("none")).exists());
}

/// Chats become text by the model's template, whose special tokens are not added twice.
#[test]
fn chats_are_text_too() {
    let scratch = Scratch::new();
    let model = model(&scratch);
    let chat =
        json!({ "messages": [{ "role": "user", "content": "ask" }, { "role": "tool", "content": "find" }] });
    let chats = scratch.write("chats.jsonl", format!("{chat}\n{}\n", json!({ "text": "plain" })));
    let out = scratch.path("dump");
    let dump = format!("dump --model {model} --uuid-tokens 0 --text {chats} -o {out}");
    kvsmith(&dump).fails(1, "no chat template", "lines with a text");
    scratch.write(
        "model/chat_template.jinja",
        "<s>{% for m in messages %}{{ m.role }} {{ m.content }}.{% endfor %}",
    );
    kvsmith(&dump).ok();
    let rendered = [vec![1], character_ids("user ask.tool find.")].concat();
    assert_eq!(dumped(&out), [rendered, character_ids("plain")]);
    let odd = scratch.write(
        "odd.jsonl",
        json!({ "messages": [{ "role": "user", "content": [1] }] }).to_string(),
    );
    kvsmith(&dump.replace(&chats, &odd).replace(&out, &scratch.path("other"))).fails(
        1,
        "odd.jsonl line 1: `content` of a message is missing or not a string",
        "messages",
    );
}

#[test]
fn prompts_come_from_stdin_too() {
    let scratch = Scratch::new();
    let model = model(&scratch);
    let run = |prompt: &str, stdin: &str| {
        let outcome = fed(
            &format!("run --model {model} {prompt} --max-new 3 --ignore-eos --json"),
            stdin,
        );
        outcome.json()["text"].clone()
    };
    let file = |text: &str| format!("--prompt-file {}", scratch.write("prompt.txt", text));
    let own = run(&file("hello"), "");
    assert_eq!(run("--prompt hello", ""), own);
    for text in ["hello", "hello\n", "hello\r\n"] {
        assert_eq!(run("--prompt -", text), own, "{text:?}");
        assert_eq!(run("--prompt-file -", text), own, "{text:?}");
        assert_eq!(run(&file(text), ""), own, "{text:?}");
    }
    for prompt in ["--prompt -", "--prompt-file -"] {
        let empty = fed(&format!("run --model {model} {prompt}"), "\n");
        empty.fails(1, "the prompt is empty", "give a prompt");
    }
    let mut empty = command(&format!("run --model {model} --prompt"));
    Outcome::of(empty.arg("").output().unwrap()).fails(1, "the prompt is empty", "give a prompt");
    // One newline goes, no more.
    assert_eq!(run("--prompt -", "hello\n\n"), run(&file("hello\n\n"), ""));
    let both = fed(&format!("run --model {model} --prompt - --chat"), "hello\n");
    both.fails(2, "stdin contains the later messages", "--prompt-file");
}

#[test]
fn numbers_have_units_and_a_short_text_is_said() {
    let scratch = Scratch::new();
    let model = model(&scratch);
    let text = scratch.write("text.txt", "a text of some words, over and over. ".repeat(30));
    let dump = |name: &str, options: &str| {
        let out = scratch.path(name);
        let outcome = kvsmith(&format!(
            "dump --model {model} --uuid-tokens 0 --text {text} {options} -o {out}"
        ))
        .ok();
        (dumped(&out), outcome.stderr)
    };
    let (ids, said) = dump("kilo", "--max-tokens 1K --seq-len 0.5K");
    let lengths: Vec<usize> = ids.iter().map(Vec::len).collect();
    assert_eq!(lengths, [512, 512]);
    assert!(!said.contains("fewer than"), "{said}");
    let (all, said) = dump("all", "--max-tokens all");
    assert_eq!(all.concat().len(), 37 * 30);
    assert!(!said.contains("fewer than"), "{said}");
    let (_, said) = dump("short", "--max-tokens 2K");
    assert!(
        said.contains("the text has only 1110 tokens, fewer than --max-tokens 2048"),
        "{said}"
    );

    let tokens = scratch.tokens("tokens.json", &documents(&[60], 2));
    let mut eval = command(&format!(
        "eval --model {model} --tokens {tokens} --decode 9 --json"
    ));
    let rows = eval
        .args(["--methods", "topk, streaming", "--budgets", "20%, all,5"])
        .output()
        .unwrap();
    let rows = Outcome::of(rows).json()["rows"].clone();
    let budgets: Vec<f64> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| number(row, "budget"))
        .collect();
    assert_eq!(budgets, [0.2, 1.0, 5.0, 0.2, 1.0, 5.0]);
}

#[test]
fn a_prompt_beyond_the_context_is_refused() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    edit_json(
        &format!("{model}/config.json"),
        &json!({ "max_position_embeddings": 40 }),
    );
    let run = |length: usize, options: &str| {
        let tokens = scratch.tokens("prompt.json", &documents(&[length], 1));
        kvsmith(&format!(
            "run --model {model} --tokens {tokens} --max-new 2 --ignore-eos {options}"
        ))
    };
    run(41, "").fails(
        1,
        "the prompt has 41 tokens, more than the model's context of 40 tokens",
        "--beyond-context",
    );
    let said = run(41, "--beyond-context").ok().stderr;
    assert!(
        said.contains("warning: the tokens so far and --max-new add up to 43 positions"),
        "{said}"
    );
    let said = run(39, "").ok().stderr;
    assert!(
        said.contains("warning: the tokens so far and --max-new add up to 41 positions")
            && said.contains("prefill took "),
        "{said}"
    );
    assert!(!run(38, "").ok().stderr.contains("warning"));
}

/// The warnings of a command.
fn warnings(outcome: Outcome) -> Vec<String> {
    let said = outcome.ok().stderr;
    said.lines()
        .filter_map(|line| line.strip_prefix("warning: "))
        .map(str::to_owned)
        .collect()
}

#[test]
fn what_does_nothing_is_said() {
    let scratch = Scratch::new();
    let model = model(&scratch);
    let tokens = scratch.tokens("prompt.json", &documents(&[90], 1));
    let run = |options: &str| {
        warnings(kvsmith(&format!(
            "run --model {model} --tokens {tokens} --max-new 2 {options}"
        )))
    };
    assert_eq!(run("--method topk --budget 5"), [""; 0]);
    assert_eq!(run("--method lfps --lfps-theta 0.9"), [""; 0]);
    assert_eq!(run("--method topk --kv 2bit --sign-full 3 --plain-keys"), [""; 0]);
    assert_eq!(
        run("--method topk --kv 2bit --sign-centroids signs"),
        ["--sign-centroids has no effect here: it applies to method selfindex only"]
    );
    assert_eq!(
        run("--method selfindex --sign-full 3 --plain-keys"),
        ["--plain-keys has no effect here: it applies to --kv 2bit only"]
    );
    assert_eq!(
        run("--method topk --force"),
        ["--force has no effect without --artifact"]
    );
    assert_eq!(
        run("--method topk --lfps-theta 0.9 --ct-probes 3 --sign-full 3"),
        [
            "--sign-full has no effect here: it applies to method selfindex and --kv 2bit only",
            "--lfps-theta has no effect here: it applies to method lfps only",
            "--ct-probes has no effect here: it applies to method ctkvr only",
        ]
    );
    assert_eq!(
        run("--budget 5"),
        ["--budget has no effect here: full attention reads everything"]
    );

    let eval = |options: &str| {
        warnings(kvsmith(&format!(
            "eval --model {model} --tokens {tokens} --decode 4 {options}"
        )))
    };
    let nothing = "in every layer, sinks and window cover every visible position, so methods have nothing to choose; give longer \
                   text or a smaller --window";
    assert_eq!(eval("--methods topk,streaming --window 16"), [""; 0]);
    assert_eq!(eval("--methods topk --window 86"), [nothing]);
    assert_eq!(
        eval("--methods topk --window 16 --page 32"),
        ["--page has no effect here: it applies to method quest only"]
    );
    assert_eq!(
        eval("--methods full --budgets 0.1 --window 16 --decode-prompt 4 --question decode"),
        [
            "--budgets has no effect here: full attention reads everything",
            "--decode-prompt has no effect without --needles",
            "--question has no effect without --needles",
        ]
    );

    let calibrate = |options: &str| {
        let out = scratch.path("art");
        warnings(kvsmith(&format!(
            "calibrate --model {model} --tokens {tokens} --size 4 --wrope-position 40 --overwrite -o {out} {options}"
        )))
    };
    let without = calibrate("--no-verdict");
    let said = |options: &str| {
        let mut said = calibrate(&format!("--no-verdict {options}"));
        said.retain(|warning| !without.contains(warning));
        said
    };
    assert_eq!(
        said("--verdict-steps 4"),
        ["--verdict-steps has no effect with --no-verdict"]
    );
    assert_eq!(
        said("--wpq-bits none --wpq-words 16"),
        ["--wpq-words has no effect with --wpq-bits none"]
    );
    assert_eq!(said("--wpq-bits 32 --wpq-words 16"), [""; 0]);

    let bench = |options: &str| {
        warnings(kvsmith(&format!(
            "bench attend --shapes 2/1x32 --context 64 --runs 1 --device cpu {options}"
        )))
    };
    assert_eq!(bench("--methods lfps,a2ats --lfps-theta 0.9 --size 8"), [""; 0]);
    assert_eq!(bench("--methods wpq --wpq-words 256 --wpq-center mean"), [""; 0]);
    assert_eq!(
        bench("--methods full --wpq-words 256 --wpq-center mean"),
        [
            "--wpq-words has no effect here: it applies to method wpq only",
            "--wpq-center has no effect here: it applies to method wpq only",
        ]
    );
    assert_eq!(
        bench("--methods full --lfps-theta 0.9 --size 8"),
        [
            "--lfps-theta has no effect here: it applies to method lfps only",
            "--size has no effect here: it applies to method a2ats only",
        ]
    );

    let layered = checkpoint("qwen2_sliding");
    let said = warnings(kvsmith(&format!(
        "eval --model {layered} --tokens {tokens} --decode 4 --methods topk --window 64"
    )));
    assert!(said.len() == 1 && said[0].starts_with("in layers "), "{said:?}");

    let prompt = |options: &str| {
        warnings(kvsmith(&format!(
            "run --model {model} --prompt hello --max-new 2 {options}"
        )))
    };
    assert_eq!(prompt(""), [""; 0]);
    scratch.write("model/chat_template.jinja", "{{ messages[0].content }}");
    assert_eq!(
        prompt(""),
        ["the model has a chat template, but without --chat the prompt is not formatted with it"]
    );
}

#[test]
fn the_program_describes_itself() {
    let version = kvsmith("--version").ok().stdout;
    for part in [env!("CARGO_PKG_VERSION"), "commit: ", "cpu: ", "cuda kernels: "] {
        assert!(version.contains(part), "{version}");
    }
    assert_eq!(
        kvsmith("-V").ok().stdout,
        format!("kvsmith {}\n", env!("CARGO_PKG_VERSION"))
    );
    for shell in ["bash", "zsh", "fish"] {
        let script = kvsmith(&format!("completions {shell}")).ok().stdout;
        assert!(
            script.contains("verdict") && script.contains("lfps-theta"),
            "{shell}"
        );
    }
    let page = kvsmith("man").ok().stdout;
    for part in [
        ".TH kvsmith ",
        ".TH kvsmith-calibrate ",
        ".TH kvsmith-bench-kmeans ",
    ] {
        assert!(page.contains(part), "{part}");
    }
    // Options stand under headings, the same ones in every command.
    let help = kvsmith("eval --help").ok().stdout;
    for heading in [
        "Text:",
        "Artifact and cache:",
        "Method lfps:",
        "Method ctkvr:",
        "Options of every command:",
    ] {
        assert!(help.lines().any(|line| line == heading), "{heading}");
    }
    for line in kvsmith("--help").ok().stdout.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    // Nothing but the request for help is left over for a list without a heading.
    for (command, headings) in [
        ("run", &["Input", "Method", "Generation", "Output"][..]),
        ("eval", &["Input", "Measurement"]),
        ("calibrate", &["Input", "Work", "Verdict", "Output"]),
    ] {
        let help = kvsmith(&format!("{command} --help")).ok().stdout;
        for heading in headings {
            let heading = format!("{heading}:");
            assert!(
                help.lines().any(|line| line == heading),
                "{command} {heading} {help}"
            );
        }
        let options = help.lines().skip_while(|line| *line != "Options:").skip(1);
        let options = options.take_while(|line| line.is_empty() || line.starts_with(' '));
        let flags: Vec<&str> = options
            .map(str::trim)
            .filter(|line| line.starts_with('-'))
            .collect();
        assert_eq!(flags, ["-h, --help"], "{command}");
        assert!(help.contains("--model <MODEL>"), "{command}: {help}");
        let raw = help.split('<').skip(1).filter_map(|rest| rest.split_once('>'));
        for (name, _) in raw {
            assert!(!name.contains('_'), "{command}: <{name}>");
        }
    }
    // What `bench` lists, it times.
    let help = kvsmith("bench attend --help").ok().stdout;
    assert!(help.contains("[default: full,a2ats,selfindex,wpq]"), "{help}");
    assert!(!help.contains("snapkv"), "{help}");
}

/// Help shows the choice of a device where there is one, and all commands accept it.
#[test]
fn devices_are_in_the_help_of_commands_that_use_them() {
    let on_cpu = [
        "priors",
        "tail",
        "doublesparsity",
        "triattention",
        "pack",
        "inspect",
        "report",
        "completions",
        "man",
    ];
    let on_devices = [
        "dump",
        "moments",
        "codebook",
        "signs",
        "wpq",
        "verdict",
        "calibrate",
        "plan",
        "run",
        "eval",
        "bench",
    ];
    for (commands, shown) in [(&on_cpu[..], false), (&on_devices[..], true)] {
        for command in commands {
            let help = kvsmith(&format!("{command} --help")).ok().stdout;
            for option in ["--device", "--precision"] {
                assert_eq!(help.contains(option), shown, "{command} {option}");
            }
        }
    }
    for command in on_cpu {
        let given = kvsmith(&format!("{command} --device cpu"));
        assert!(!given.stderr.contains("--device"), "{command}: {}", given.stderr);
    }
}
