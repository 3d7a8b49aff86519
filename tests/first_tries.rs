//! What a newcomer types first: models by their id, text of any kind, prompts from stdin, numbers with units, and
//! checkpoints of other formats; and messages where a command would otherwise silently do nothing.

use std::io::Write as _;
use std::path::Path;
use std::process::Stdio;

use crate::common::*;
use flate2::Compression;
use flate2::write::GzEncoder;
use kvsmith::internal::dump::Dump;
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
    Outcome::from_output(child.wait_with_output().unwrap())
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
        Outcome::from_output(command.env(variable, value).output().unwrap())
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
    for name in ["model-q4.gguf", "renamed"] {
        run(&scratch.write(name, "GGUF")).fails(
            1,
            "the file ends before its header does",
            "download it again",
        );
    }
    run(&scratch.write("weights.pth", "PK\x03\x04..")).fails(1, "is a PyTorch file", "safetensors");
    run(&scratch.write("model.safetensors", "..")).fails(
        1,
        "a single file of a checkpoint",
        "the folder that contains this file",
    );
    run(&folder("gguf", &["a-q4.gguf", "README.md"])).fails(
        1,
        "is no GGUF file, although its name says so",
        "download it again",
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
    run(&model).fails(1, "but it contains weights in GGUF", "the GGUF file itself");
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
    Outcome::from_output(empty.arg("").output().unwrap()).fails(1, "the prompt is empty", "give a prompt");
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
    let rows = Outcome::from_output(rows).json()["rows"].clone();
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
    // Two tokens take one position more than the prompt, since the last one is not fed.
    let said = run(39, "").ok().stderr;
    assert!(
        !said.contains("warning") && said.contains("full: 2 tokens"),
        "{said}"
    );
    let said = run(40, "").ok().stderr;
    assert!(said.contains("full: 1 token\n"), "{said}");
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
        ["--wpq-words has no effect without section `wpq`"]
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
            "--size has no effect here: it applies to method a2ats only",
            "--lfps-theta has no effect here: it applies to method lfps only",
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
    for (command, name) in [
        ("", "kvsmith"),
        ("calibrate", "kvsmith-calibrate"),
        ("bench kmeans", "kvsmith-bench-kmeans"),
    ] {
        let page = kvsmith(&format!("man {command}")).ok().stdout;
        let title = format!(".TH {name} ");
        for part in [&title, ".SH \"EXIT STATUS\"", ".SH ENVIRONMENT", "NO_COLOR"] {
            assert!(page.contains(part), "{command}: {part}");
        }
        assert_eq!(page.matches(".TH ").count(), 1, "{command}");
    }
    kvsmith("man nothing").fails(2, "there is no command `nothing`", "--help");
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
        "rotation",
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

/// Help has the options of every command only where they act, and begins with the commands that most people need.
#[test]
fn help_leaves_out_what_does_nothing() {
    let hidden = [
        ("--seed", ["inspect", "man", "pack", "report"].as_slice()),
        ("--overwrite", &["inspect", "man", "eval", "status"]),
        ("--threads", &["completions", "man", "status"]),
    ];
    for (option, commands) in hidden {
        for command in commands {
            let help = kvsmith(&format!("{command} --help")).ok().stdout;
            assert!(!help.contains(option), "{command} {option}");
        }
        let help = kvsmith("calibrate --help").ok().stdout;
        assert!(help.contains(option), "{option}");
    }
    // They are accepted everywhere.
    kvsmith("man --seed 1 --threads 1 --overwrite").ok();
    let usage =
        "Usage: kvsmith calibrate [OPTIONS] --model <MODEL> <--text <FILE>...|--tokens <FILE.json>> --output";
    let help = kvsmith("calibrate --help").ok().stdout;
    assert!(help.contains(usage), "{help}");
    let help = kvsmith("--help").ok().stdout;
    let (first, _) = help.split_once("\n\nMore commands:\n  bench ").unwrap();
    let (_, first) = first.split_once("\nCommands:\n").unwrap();
    assert_eq!(first.lines().count(), 6, "{first}");
    let at = |command: &str| {
        help.find(&format!("\n  {command} "))
            .unwrap_or_else(|| panic!("{command}: {help}"))
    };
    let order = [
        "plan",
        "calibrate",
        "inspect",
        "report",
        "run",
        "eval",
        "dump",
        "codebook",
        "pack",
        "man",
    ]
    .map(at);
    assert!(order.is_sorted(), "{help}");
}

/// What is perhaps not meant is said: a budget of a few positions, a cache of another type than the losses were measured
/// with, a page that is called something else.
#[test]
fn doubtful_settings_are_named() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let art = scratch.make(
        "art",
        &format!(
            "calibrate --model {model} --tokens {tokens} --seq-len 100 --size 4 --holdout 0.4 --verdict-reads 0.97 \
             --verdict-methods streaming --sections sign"
        ),
    );
    let prompt = scratch.tokens("prompt.json", &documents(&[90], 5));
    let run = |options: &str| {
        let run = format!("run --model {model} --artifact {art} --tokens {prompt} --max-new 2 {options}");
        kvsmith(&run).ok().stderr
    };
    let said = run("--method streaming --budget 6");
    assert!(said.contains("--budget 6 means 6 positions; write 6%"), "{said}");
    let said = run("--method streaming --budget 6%");
    assert!(!said.contains("positions; write"), "{said}");
    let doubt = "measured with a bf16 cache, not with a 2bit one";
    for (kv, is_said) in [("2bit", true), ("bf16", false), ("f32", false)] {
        let said = run(&format!("--method selfindex --budget 0.2 --kv {kv}"));
        assert_eq!(said.contains(doubt), is_said, "{kv}: {said}");
    }
    for name in ["page.pdf", "page.json"] {
        let path = scratch.path(name);
        kvsmith(&format!("report {art} -o {path}")).fails(2, "a report is an HTML page", ".html");
        assert!(!Path::new(&path).exists());
    }
    for name in ["page.HTM", "page"] {
        kvsmith(&format!("report {art} -o {}", scratch.path(name))).ok();
    }
}

/// A run says what a step takes, and what it takes with full attention.
#[test]
fn a_run_says_what_it_gains() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let prompt = scratch.tokens("prompt.json", &documents(&[200], 5));
    let run = |options: &str| {
        kvsmith(&format!(
            "run --model {model} --tokens {prompt} --ignore-eos {options}"
        ))
        .ok()
    };
    let said = run("--method streaming --budget 0.1 --max-new 24").stderr;
    // The last token of the reply is not fed.
    assert!(
        said.contains("at 223 positions, a step takes ") && said.contains("with full attention "),
        "{said}"
    );
    let json = run("--method streaming --budget 0.1 --max-new 24 --json").json();
    assert!(json["step_s"].as_f64().unwrap() > 0.0, "{json}");
    assert!(json["full_step_s"].as_f64().unwrap() > 0.0, "{json}");
    // Fewer steps say nothing about time, full attention has nothing to be compared with, and 2-bit rows would be copied.
    for options in [
        "--method streaming --max-new 8",
        "--method full --max-new 24",
        "--method streaming --kv 2bit --max-new 24",
    ] {
        let json = run(&format!("{options} --json")).json();
        assert_eq!(json["full_step_s"], Value::Null, "{options}");
    }
}

/// What is printed can be typed: the usage line of `verdict`, and a method as `verdict` recommends it.
#[test]
fn printed_commands_can_be_typed() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let art = scratch.make(
        "art",
        &format!(
            "calibrate --model {model} --tokens {tokens} --seq-len 100 --size 4 --holdout 0.4 --no-verdict"
        ),
    );
    let help = kvsmith("verdict --help").ok().stdout;
    assert!(help.contains("Usage: kvsmith verdict <ART> --model"), "{help}");
    let text = scratch.write("text.txt", "some text");
    kvsmith(&format!(
        "verdict --model {model} --text {text} {art} -o {}",
        scratch.path("out")
    ))
    .fails(2, "required arguments were not provided", "put ART before --text");
    let judged = scratch.make(
        "judged",
        &format!(
            "verdict {art} --model {model} --tokens {tokens} --seq-len 100 --holdout 0.4 --verdict-reads 0.97 \
             --verdict-methods streaming+tail --verdict-kl 10"
        ),
    );
    let shown = kvsmith(&format!("inspect {judged}")).ok().stdout;
    assert!(shown.contains("--method streaming --tail --budget"), "{shown}");
    let prompt = scratch.tokens("prompt.json", &documents(&[90], 5));
    let run = |options: &str| {
        kvsmith(&format!(
            "run --model {model} --artifact {judged} --tokens {prompt} --max-new 6 {options} --json"
        ))
        .ok()
    };
    let recommended = run("");
    assert!(
        recommended.stderr.contains("streaming+tail: 6 tokens"),
        "{}",
        recommended.stderr
    );
    let recommended = recommended.json();
    let budget = recommended["budget"].as_f64().unwrap();
    let typed = run(&format!("--method streaming+tail --budget {budget} --kv bf16"));
    assert!(
        typed.stderr.contains("streaming+tail: 6 tokens"),
        "{}",
        typed.stderr
    );
    // The recommendation was measured with a cache in bf16, and is followed with one.
    let typed = typed.json();
    for key in ["ids", "method", "tail", "kv_bytes", "bytes_read"] {
        assert_eq!(typed[key], recommended[key], "{key}");
    }
    kvsmith("run --prompt Hello world").fails(
        2,
        "unexpected argument 'world'",
        "put text with spaces in quotes",
    );
    kvsmith("bench attend --positions 4096").fails(
        2,
        "--positions",
        "--context sets the number of positions",
    );
}

/// A table of questions shows full attention, and how many questions there were.
#[test]
fn a_table_of_questions_has_its_baseline() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let line =
        |seed| json!({ "prompt_tokens": documents(&[90], seed)[0], "answer_tokens": [3, 4] }).to_string();
    let needles = scratch.write("needles.jsonl", [line(1), line(2), line(3)].join("\n"));
    let eval = |options: &str| kvsmith(&format!("eval --model {model} --needles {needles} {options}"));
    let shown = eval("--methods streaming --window 16 --reads 0.5").ok().stdout;
    assert!(
        shown.contains("\nfull ")
            && shown.contains("\n3 questions in 3 lines, ")
            && shown.contains("\nanswered share of"),
        "{shown}"
    );
    let nothing = eval("--methods streaming --window 16 --reads 0.01");
    nothing.fails(1, "no method can read as little", "raise --reads");
    kvsmith(&format!("eval --model {model} --needles {needles}")).fails(2, "eval needs methods", "--methods");
    // Without --methods: those of the artifact, and full attention.
    let tokens = scratch.tokens("tokens.json", &documents(&[200], 1));
    let calibrate = format!("calibrate --model {model} --tokens {tokens} --no-verdict --sections sign,wpq");
    let art = scratch.make("art", &calibrate);
    let json = eval(&format!("--artifact {art} --json")).ok().json();
    let methods: Vec<&str> = json["rows"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["method"].as_str().unwrap())
        .collect();
    assert_eq!(methods, ["full", "topk", "selfindex", "wpq"]);
    kvsmith(&format!("{calibrate},nothing -o {}", scratch.path("no"))).fails(2, "nothing", "");
}

/// The table of `eval` explains its columns, and names what it shares with `inspect` as `inspect` does.
#[test]
fn a_table_of_losses_explains_itself() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let shown = kvsmith(&format!(
        "eval --model {model} --tokens {tokens} --methods streaming,topk --budgets 0.5 --decode 8"
    ))
    .ok()
    .stdout;
    let headings: Vec<&str> = shown.lines().filter(|line| line.starts_with("method ")).collect();
    assert_eq!(headings.len(), 2, "{shown}");
    let names = [
        "KL", "recall", "mass", "error", "top-1", "ppl/full", "read", "rows", "dots", "bits",
    ];
    for name in names {
        assert!(headings.iter().any(|line| line.contains(name)), "{name}: {shown}");
        assert!(shown.contains(&format!("\n{name:<9}")), "{name}: {shown}");
    }
    assert!(shown.contains("p50 and p99"), "{shown}");
    // Shares are percentages in every table.
    let streaming = shown.lines().find(|line| line.starts_with("streaming")).unwrap();
    assert_eq!(streaming.matches('%').count(), 4, "{streaming}");
}

/// `inspect` fits on a screen and ends with what to do; everything else is shown with -v.
#[test]
fn an_artifact_is_shown_on_one_screen() {
    let scratch = Scratch::new();
    let model = scratch.model("tiny-llama", "llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[300], 1));
    let art = scratch.make(
        "art",
        &format!("calibrate --model {model} --tokens {tokens} --seq-len 100 --size 4 --holdout 0.4 --verdict-reads 0.97 --verdict-methods streaming"),
    );
    let (brief, whole) = (
        kvsmith(&format!("inspect {art}")).ok(),
        kvsmith(&format!("inspect {art} -v")).ok(),
    );
    assert!(brief.stdout.lines().count() <= 15, "{}", brief.stdout);
    assert!(whole.stdout.lines().count() > 30, "{}", whole.stdout);
    for shown in [&brief.stdout, &whole.stdout] {
        assert!(shown.contains("tiny-llama: llama"), "{shown}");
        let at = |text: &str| shown.find(text).unwrap_or_else(|| panic!("{text}: {shown}"));
        assert!(at("calibration") < at("recommended"), "{shown}");
        assert!(shown.contains("the setting that `run` uses"), "{shown}");
    }
    assert!(!brief.stderr.contains("device"), "{}", brief.stderr);
}

/// `status` says what a dump and a work folder are.
#[test]
fn status_knows_its_own_folders() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[60], 1));
    let dump = scratch.make("dump", &format!("dump --model {model} --tokens {tokens}"));
    let shown = kvsmith(&format!("status {dump}")).ok().stdout;
    assert!(
        shown.contains("is complete: 2 layers, 60 tokens") && !shown.contains("problem"),
        "{shown}"
    );
    // A calibration that is killed after its first layer.
    let (work, out) = (scratch.path("work"), scratch.path("out"));
    let killed = (1..60).find_map(|change| {
        let _ = std::fs::remove_dir_all(&work);
        let mut stopped = command(&format!(
            "calibrate --model {model} --tokens {tokens} --size 4 --work {work} --overwrite -o {out}"
        ));
        let outcome = Outcome::from_output(
            stopped
                .env("KVSMITH_DISK_FAULT", format!("kill:{change}"))
                .output()
                .unwrap(),
        );
        let shown = kvsmith(&format!("status {work}"));
        let is_there = outcome.code.is_none() && shown.code == Some(0);
        Some(shown.stdout).filter(|shown| is_there && shown.contains("1 of 2 layers done"))
    });
    let shown = killed.expect("a calibration with one layer");
    assert!(shown.contains("--resume"), "{shown}");
}

/// `run --compare` shows where texts part, and nothing differs from the runs alone.
#[test]
fn texts_are_compared() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let prompt = scratch.tokens("prompt.json", &documents(&[200], 5));
    let run = |options: &str| {
        kvsmith(&format!(
            "run --model {model} --tokens {prompt} --max-new 24 --ignore-eos {options}"
        ))
    };
    let told = run("--compare full,streaming,full --window 8 --budget 2 --json")
        .ok()
        .json();
    let compared = told["compared"].as_array().unwrap();
    let ids = |i: usize| compared[i]["ids"].as_array().unwrap();
    for (i, method) in ["full", "streaming"].into_iter().enumerate() {
        let budget = if method == "full" { "" } else { "--budget 2" };
        let alone = run(&format!("--method {method} --window 8 {budget} --json"))
            .ok()
            .json();
        assert_eq!(compared[i]["method"], *method);
        assert_eq!(&compared[i]["ids"], &alone["ids"], "{method}");
        assert_eq!(
            compared[i]["bytes_read_fraction"], alone["bytes_read_fraction"],
            "{method}"
        );
    }
    let same = ids(0).iter().zip(ids(1)).take_while(|(a, b)| a == b).count();
    assert!(same < 24, "the texts do not part");
    let counts: Vec<_> = compared
        .iter()
        .map(|of| of["same_tokens"].as_u64().unwrap())
        .collect();
    assert_eq!(counts, [24, same as u64, 24]);
    let shown = run("--compare full,streaming,full --window 8 --budget 2")
        .ok()
        .stdout;
    let expected = format!("streaming parts from full after {same} tokens:");
    assert!(
        shown.contains(&expected) && shown.contains("full says what full says: 24 tokens"),
        "{shown}"
    );
    run("--compare full --chat").fails(2, "--compare", "");
}

/// `eval --needles auto` hides facts in the text that is given, and full attention finds them.
#[test]
fn questions_are_made_from_the_text() {
    let root = root();
    let at = |path: &str| root.join(path).display().to_string();
    let eval = |options: &str| {
        kvsmith(&format!(
            "eval --model {} --needles auto --methods topk,streaming --budgets 0.02 {options}",
            at("calib-data/model")
        ))
    };
    let text = format!("--text {}", at("calib-data/text.txt"));
    let asked = eval(&format!("{text} --lengths 1K,1280 --json")).ok().json();
    assert_eq!(asked["needles"], 2 * 20 * 8);
    let full = asked["full_needle_accuracy"].as_f64().unwrap();
    let by_task = asked["full_by_task"].as_array().unwrap();
    let lengths: Vec<_> = by_task.iter().map(|of| of["length"].as_u64().unwrap()).collect();
    assert_eq!(lengths, [1024, 1280]);
    let of = |i: usize| asked["rows"][i]["needle_accuracy"].as_f64().unwrap();
    assert!(
        full > 0.5 && of(0) > 0.5 && of(1) < 0.5 * full,
        "{full} {} {}",
        of(0),
        of(1)
    );
    let again = eval(&format!("{text} --lengths 1K,1280 --json")).ok().json();
    assert_eq!(
        again["rows"][0]["needle_accuracy"],
        asked["rows"][0]["needle_accuracy"]
    );
    eval("").fails(2, "--needles auto needs --text", "give text");
    eval(&format!("{text} --lengths 100")).fails(1, "too short for questions", "--lengths");
    let tokens = Scratch::new();
    let ids = tokens.tokens("tokens.json", &documents(&[60], 1));
    let file = format!("eval --model {} --methods topk", at("calib-data/model"));
    kvsmith(&format!("{file} --needles {ids} {text}")).fails(2, "has its own text", "--needles auto");
    kvsmith(&format!("{file} --tokens {ids} {text}")).fails(2, "exclude each other", "one of them");
}

/// Defaults that follow the text and the model, sections by name, and flags that then do nothing.
#[test]
fn defaults_follow_the_text_and_the_model() {
    let scratch = Scratch::new();
    let root = root();
    let at = |path: &str| root.join(path).display().to_string();
    let calibrate = format!(
        "calibrate --model {} --text {} --seq-len 300 --no-verdict --overwrite -o {}",
        at("calib-data/model"),
        at("calib-data/text.txt"),
        scratch.path("art")
    );
    let kinds = |options: &str| {
        kvsmith(&format!("{calibrate} --sections sign {options}")).ok();
        let json = kvsmith(&format!("inspect {} --json", scratch.path("art"))).json();
        let kinds = json["calibration"]["kinds"].as_array().unwrap().clone();
        let tokens = |kind: &Value| {
            kind["fitted_tokens"].as_u64().unwrap() + kind["held_out_tokens"].as_u64().unwrap()
        };
        let sections: Vec<String> = json["sections"].as_object().unwrap().keys().cloned().collect();
        assert_eq!(sections, ["sign"]);
        kinds.iter().map(tokens).collect::<Vec<_>>()
    };
    assert_eq!(kinds("--max-tokens 1500"), [1500, 300]);
    assert_eq!(kinds("--max-tokens 1500 --uuid-tokens 70"), [1500, 70]);
    assert_eq!(kinds("--max-tokens 1500 --uuid-tokens 0"), [1500]);
    let warned = kvsmith(&format!(
        "{calibrate} --max-tokens 600 --sections sign --size 4 --wpq-directions 8 --verdict-steps 4"
    ))
    .ok()
    .stderr;
    for warning in [
        "--size has no effect without section `a2ats`",
        "--wpq-directions has no effect without section `wpq`",
        "--verdict-steps has no effect with --no-verdict",
    ] {
        assert!(warned.contains(warning), "{warned}");
    }
    assert!(!warned.contains("codebooks:"), "{warned}");
    kvsmith(&format!(
        "{calibrate} --max-tokens 600 --sections wpq --wpq-bits none"
    ))
    .fails(2, "leave no section to make", "--sections");
    let needles = scratch.write(
        "needles.jsonl",
        json!({ "prompt_tokens": vec![5; 90], "answer_tokens": [3] }).to_string(),
    );
    let eval = format!(
        "eval --model {} --needles {needles} --methods streaming --lengths 1K",
        at("calib-data/model")
    );
    let said = kvsmith(&eval).ok().stderr;
    assert!(
        said.contains("--lengths has no effect without --needles auto"),
        "{said}"
    );
}

/// A model is the same under another name: what was made of parts of a text under two names belongs together.
#[test]
fn names_of_models_identify_nothing() {
    let scratch = Scratch::new();
    let models = ["one", "two"].map(|name| scratch.model(name, "llama_default"));
    let tokens = scratch.tokens("tokens.json", &documents(&[60, 60], 1));
    let shard = |i: usize, model: &str| {
        scratch.make(
            &format!("shard-{i}"),
            &format!("dump --model {model} --tokens {tokens} --seq-len 60 --shard {i}/2"),
        )
    };
    let shards = [shard(0, &models[0]), shard(1, &models[1])].join(" ");
    scratch.make("merged", &format!("merge {shards}"));
    let art = scratch.make(
        "art",
        &format!(
            "calibrate --model {} --tokens {tokens} --size 4 --no-verdict",
            models[0]
        ),
    );
    let shown = kvsmith(&format!("inspect {art} --verify --model {}", models[1]))
        .ok()
        .stdout;
    assert!(shown.contains("model        one: llama"), "{shown}");
}
