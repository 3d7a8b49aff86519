//! `run`: tokens, trace and numbers of every method.

use crate::common::*;
use kvsmith::internal::method::registry::METHODS;
use serde_json::{Value, json};

/// A golden checkpoint with its prompt and an artifact.
struct Model<'a> {
    scratch: Scratch,
    name: &'a str,
    /// `--model`, `--artifact` and `--tokens`.
    files: String,
}

impl<'a> Model<'a> {
    fn new(name: &'a str) -> Self {
        let scratch = Scratch::new();
        let model = scratch.model("model", name);
        let prompt = scratch.tokens("prompt.json", &[golden_ids(name, "ids")]);
        let texts = scratch.tokens("texts.json", &documents(&[60, 60], 1));
        let calibrate = format!("calibrate --model {model} --tokens {texts} --size 8 --peers");
        let artifact = scratch.make("art", &calibrate);
        let files = format!("--model {model} --artifact {artifact} --tokens {prompt}");
        Self { scratch, name, files }
    }

    /// Runs with `--json`; stop tokens are ignored.
    #[track_caller]
    fn run(&self, options: &str) -> Value {
        kvsmith(&format!("run {} --json --ignore-eos {options}", self.files)).json()
    }

    fn prompt_len(&self) -> usize {
        golden_ids(self.name, "ids").len()
    }
}

#[test]
fn every_method_with_the_whole_budget_is_exact() {
    for dir in all_golden() {
        let name = dir.file_name().unwrap().to_str().unwrap();
        let model = Model::new(name);
        let expected = json!(golden_ids(name, "greedy"));
        for method in METHODS.iter().map(|m| m.as_str()) {
            let json = model.run(&format!(
                "--max-new 24 --sinks 1 --window 2 --budget 1.0 --method {method}"
            ));
            assert_eq!(json["ids"], expected, "{name} {method}");
            assert_eq!(json["kv_read_fraction"], json!(1.0), "{name} {method}");
        }
        // As a number of positions too, and with a static set that covers everything.
        assert_eq!(
            model.run("--max-new 24 --window 1 --budget 4096")["ids"],
            expected,
            "{name}"
        );
        assert_eq!(
            model.run("--max-new 24 --window 4096 --budget 2")["ids"],
            expected,
            "{name}"
        );
    }
}

#[test]
fn json_has_the_contracts_keys() {
    let model = Model::new("llama_default");
    let json = model.run("--max-new 5 --method a2ats --budget 0.25");
    for key in ["prefill_s", "decode_s", "tokens_per_s", "kv_read_fraction"] {
        assert!(json[key].as_f64().is_some_and(|v| v >= 0.0), "{key}: {json}");
    }
    assert!(json["kv_read_fraction"].as_f64().unwrap() <= 1.0);
    assert_eq!(
        (&json["method"], &json["budget"]),
        (&json!("a2ats"), &json!(0.25))
    );
    assert_eq!(model.run("--max-new 1 --budget 0.25")["method"], "wpq");
    assert_eq!(
        (&json["device"], &json["prompt_tokens"]),
        (&json!("cpu"), &json!(model.prompt_len()))
    );
    assert_eq!(json["ids"].as_array().unwrap().len(), 5);
    assert_eq!(json["text"], json!(""), "there is no text without a tokenizer");
    // Two layers, two KV heads, 17 + 5 positions, of which the last was not fed: rows of 16 f32, K
    // and V; codes of two bytes, of which a growing vector may hold up to twice as many.
    assert_eq!(json["kv_bytes"], json!(2 * 2 * 22 * 2 * 16 * 4));
    let codes = 2 * 2 * 21 * 2;
    assert!(
        (codes..=2 * codes).contains(&json["index_bytes"].as_u64().unwrap()),
        "{json}"
    );

    assert_eq!(model.run("--max-new 5 --budget 7")["budget"], json!(7.0));
    let full = model.run("--max-new 5 --method full");
    assert_eq!(
        (&full["method"], &full["budget"], &full["index_bytes"]),
        (&json!("full"), &json!(0.06), &json!(0))
    );
    let one = model.run("--max-new 1");
    assert_eq!(
        (&one["ids"], &one["kv_read_fraction"]),
        (&json!([golden_ids(model.name, "greedy")[0]]), &json!(1.0))
    );
    assert_eq!(model.run("--max-new 0")["ids"], json!([]));

    // Without an artifact the method is `full`; the text alone goes to stdout without --json.
    let files = model.files.replace("--artifact", "--overwrite --trace");
    let plain = kvsmith(&format!("run {files} --max-new 3 -q")).ok();
    let greedy = &golden_ids(model.name, "greedy")[..3];
    assert_eq!(
        plain.stdout.trim(),
        greedy.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")
    );
    assert_eq!(plain.stderr, "");
}

#[test]
fn the_trace_tells_what_was_read() {
    // Layers, KV heads and the model's own window per layer.
    for (name, g, windows) in [
        ("llama_default", 2, &[None, None][..]),
        ("qwen2_sliding", 2, &[None, Some(12), Some(12)]),
        ("mistral_sliding", 1, &[Some(16), Some(16)]),
    ] {
        let model = Model::new(name);
        let trace = model.scratch.path("trace");
        let (sinks, window, new, prompt) = (2, 3, 12, model.prompt_len());
        for method in METHODS.iter().map(|m| m.as_str()) {
            for budget in ["0.2", "0.01", "5", "1.0"] {
                let json = model.run(&format!(
                    "--max-new {new} --sinks {sinks} --window {window} --budget {budget} --method {method} --overwrite --trace {trace}"
                ));
                let what = format!("{name} {method} {budget}");
                let rows = json_lines(&std::fs::read_to_string(&trace).unwrap());
                assert_eq!(rows.len(), (new - 1) * windows.len() * g, "{what}");
                let (mut rows, mut fraction) = (rows.iter(), 0.0);
                for step in 0..new - 1 {
                    for (layer, model_window) in windows.iter().enumerate() {
                        let end = prompt + step + 1;
                        let start = model_window.map_or(0, |w| end.saturating_sub(w));
                        let n = end - start;
                        let x: f64 = budget.parse().unwrap();
                        let b = if x <= 1.0 {
                            ((x * n as f64).floor() as usize).max(1)
                        } else {
                            x as usize
                        };
                        let last = (end - window).max(start);
                        let first = sinks.clamp(start, last);
                        for kv_head in 0..g {
                            let row = rows.next().unwrap();
                            let key = json!([row["step"], row["layer"], row["kv_head"]]);
                            assert_eq!(key, json!([step, layer, kv_head]), "{what}");
                            let positions: Vec<usize> =
                                serde_json::from_value(row["positions"].clone()).unwrap();
                            assert!(positions.windows(2).all(|w| w[0] < w[1]), "{what}: {row}");
                            // Neither in the static set nor outside the model's window.
                            assert!(
                                positions.iter().all(|p| (first..last).contains(p)),
                                "{what}: {row}"
                            );
                            if method != "full" {
                                assert!(positions.len() <= b, "{what}: {row}");
                            }
                            if ["topk", "random", "streaming"].contains(&method) {
                                assert_eq!(positions.len(), b.min(last - first), "{what}: {row}");
                            }
                            let read = first - start + end - last + positions.len();
                            fraction += read as f64 / (n * g) as f64;
                        }
                    }
                }
                fraction /= ((new - 1) * windows.len()) as f64;
                // `quest` and `lfps` may read more than they select.
                let told = json["kv_read_fraction"].as_f64().unwrap();
                if ["full", "topk", "random", "streaming", "a2ats"].contains(&method) {
                    assert!(
                        (told - fraction).abs() < 1e-9,
                        "{what}: {told} instead of {fraction}"
                    );
                } else {
                    assert!(told >= fraction - 1e-9, "{what}: {told} below {fraction}");
                }
            }
        }
    }
}

#[test]
fn stop_tokens_end_the_text() {
    let model = Model::new("llama_default");
    let greedy = golden_ids(model.name, "greedy");
    // The first token that is not like those before it.
    let at = (4..24).find(|i| !greedy[..*i].contains(&greedy[*i])).unwrap();
    let run = |options: &str| {
        let length = if options.contains("--max-new") {
            ""
        } else {
            "--max-new 24"
        };
        let files = &model.files;
        kvsmith(&format!("run {files} --method full --json {length} {options}")).json()
    };
    assert_eq!(run("")["ids"], json!(greedy));
    for eos in [json!(greedy[at]), json!([2, greedy[at]])] {
        model.scratch.write(
            "model/generation_config.json",
            json!({ "eos_token_id": eos }).to_string(),
        );
        assert_eq!(run("")["ids"], json!(greedy[..=at]), "ends with the stop token");
        assert_eq!(run("--ignore-eos")["ids"], json!(greedy));
        // Room for this many positions is not taken before they come.
        assert_eq!(run("--max-new 4294967295")["ids"], json!(greedy[..=at]));
    }
    // The config's own id counts where generation_config.json has none.
    let generation = model.scratch.path("model/generation_config.json");
    std::fs::remove_file(generation).unwrap();
    edit_json(
        &model.scratch.path("model/config.json"),
        &json!({ "eos_token_id": greedy[0] }),
    );
    assert_eq!(run("")["ids"], json!(greedy[..1]));
}

#[test]
fn sampling_is_fixed_by_the_seed() {
    let model = Model::new("qwen2_bias");
    let run = |options: &str| model.run(&format!("--max-new 16 --method full {options}"))["ids"].clone();
    let warm = run("--temperature 1.5 --seed 1");
    assert_eq!(run("--temperature 1.5 --seed 1"), warm);
    assert_eq!(run("--temperature 1.5 --seed 1 --threads 1"), warm);
    assert!((2..5).any(|seed| run(&format!("--temperature 1.5 --seed {seed}")) != warm));
    let greedy = json!(golden_ids(model.name, "greedy")[..16]);
    assert_eq!(run("--seed 7"), greedy, "greedy ignores the seed");
    assert_eq!(
        run("--temperature 1.5 --top-p 0.000001 --seed 7"),
        greedy,
        "a nucleus of one token"
    );
}

#[test]
fn random_choice_is_fixed_by_the_seed() {
    let model = Model::new("mistral_sliding");
    let trace = |seed: u64| {
        let path = model.scratch.path("trace");
        model.run(&format!(
            "--max-new 8 --sinks 0 --window 1 --method random --budget 5 --seed {seed} --overwrite --trace {path}"
        ));
        std::fs::read_to_string(path).unwrap()
    };
    let first = trace(1);
    assert_eq!(trace(1), first);
    assert_ne!(trace(2), first);
}

/// A cache that holds its rows as they are keeps no full-precision tokens, so that none come first.
#[test]
fn full_precision_tokens_are_those_of_the_2_bit_cache() {
    let data = root().join("calib-data").display().to_string();
    let scratch = Scratch::new();
    let text = std::fs::read_to_string(format!("{data}/heldout.txt")).unwrap();
    let prompt = scratch.path("prompt.txt");
    std::fs::write(&prompt, text.chars().take(6000).collect::<String>()).unwrap();
    let trace = |options: &str| {
        let path = scratch.path("trace");
        kvsmith(&format!(
            "run --model {data}/model --prompt-file {prompt} --max-new 6 --ignore-eos --window 16 --budget 160 --json \
             --method selfindex --overwrite --trace {path} {options}"
        ))
        .ok();
        std::fs::read_to_string(path).unwrap()
    };
    for kv in ["f32", "f16", "bf16"] {
        let [some, none] = ["", "--sign-full 0"].map(|options| trace(&format!("--kv {kv} {options}")));
        assert_eq!(some, none, "{kv}");
    }
    assert_ne!(trace("--kv 2bit"), trace("--kv 2bit --sign-full 0"));
}

/// Numbers of any size in a flag end in tokens or in a usage error.
#[test]
fn extreme_flags() {
    let model = Model::new("qwen2_sliding");
    const CASES: &str = "
        ctkvr     | --ct-probes 4096
        ctkvr     | --ct-probes 18446744073709551615 --ct-centroids 18446744073709551615
        ctkvr     | --ct-centroids 1 --ct-update 18446744073709551615
        ctkvr     | --budget 999999999999999
        lfps      | --lfps-rows 4294967295 --lfps-prior 1e308 --lfps-alpha 1e308
        lfps      | --lfps-rows 0 --lfps-alpha 0 --lfps-theta 1e-300
        lfps      | --lfps-threshold budget --lfps-theta 1 --sinks 0 --window 1
        a2ats     | --topk-per-query-head 1e-300
        a2ats     | --topk-per-query-head 1
        selfindex | --sinks 4294967295 --window 4294967295
        selfindex | --budget 1e-300 --kv 2bit --sinks 0 --window 1
        selfindex | --sign-full 0 --kv 2bit --plain-keys
        selfindex | --sign-full 4294967295 --kv 2bit --sign-centroids signs
        ctkvr     | --ct-choose even
        ctkvr     | --ct-list 1e308
        ctkvr     | --ct-list 1e308 --ct-centroids 4096
        ctkvr     | --ct-choose random --ct-centroids 1
        quest     | --budget 16 --sinks 0 --window 1
        quest     | --budget 16 --page 64
        pqcache   | --pq-groups 1 --pq-bits 4 --sinks 4294967295
        pqcache   | --pq-groups 8 --pq-bits 8 --sinks 0 --window 1
        randsign  | --sinks 0 --window 1
        snapkv    | --budget 2 --sinks 0 --window 1
    ";
    for [method, options] in table(CASES) {
        let mut all = format!("--max-new 12 --method {method} {options}");
        for (flag, usual) in [("--sinks", "--sinks 1 --window 2"), ("--budget", "--budget 3")] {
            if !options.contains(flag) {
                all += &format!(" {usual}");
            }
        }
        let json = model.run(&all);
        assert_eq!(json["ids"].as_array().unwrap().len(), 12, "{method} {options}");
    }
    for options in [
        "--page 0",
        "--page 48",
        "--ct-probes 0",
        "--ct-centroids 0",
        "--pq-groups 0",
        "--pq-bits 3",
        "--pq-bits 9",
        "--lfps-theta nan",
        "--lfps-alpha -1",
        "--lfps-rows 1e3",
        "--topk-per-query-head 0",
        "--lfps-threshold none",
        "--sign-centroids none",
        "--kv 3bit",
    ] {
        kvsmith(&format!("run {} {options}", model.files)).fails(2, "", "");
    }
    kvsmith(&format!("run {} --method pqcache --pq-groups 3", model.files)).fails(
        2,
        "--pq-groups 3 does not divide the",
        "divisor of",
    );
}

/// Every method makes the same choices with one thread and with several.
#[test]
fn threads_change_nothing() {
    for name in ["qwen2_sliding", "llama_d128"] {
        let model = Model::new(name);
        let trace = model.scratch.path("trace");
        for method in METHODS.iter().map(|m| m.as_str()) {
            for kv in ["f32", "2bit"] {
                let run = |threads: usize| {
                    let json = model.run(&format!(
                        "--max-new 12 --sinks 1 --window 2 --budget 0.3 --method {method} --kv {kv} \
                         --threads {threads} --overwrite --trace {trace}"
                    ));
                    (json["ids"].clone(), std::fs::read_to_string(&trace).unwrap())
                };
                assert_eq!(run(1), run(3), "{name} {method} {kv}");
            }
        }
    }
}

/// What a position costs in 2 bits: a sign, a 2-bit magnitude and a 2-bit value per channel, and a
/// scale and a zero point of 16 bits for K and for V per 32 channels or part of them.
#[test]
fn a_2_bit_cache_has_its_size() {
    for (name, layers, g, d) in [
        ("llama_d128", 2, 2, 128),
        ("llama_default", 2, 2, 16),
        ("qwen3_norm", 2, 1, 80),
    ] {
        let model = Model::new(name);
        let config: Value =
            serde_json::from_slice(&std::fs::read(golden(name).join("config.json")).unwrap()).unwrap();
        let of = |key: &str| config[key].as_u64().unwrap_or(0) as usize;
        assert_eq!(
            (of("num_hidden_layers"), of("num_key_value_heads")),
            (layers, g),
            "{name}"
        );
        assert!(config.get("head_dim").is_none() || of("head_dim") == d, "{name}");
        let bytes = |prompt: usize, method: &str| {
            let ids = model.scratch.tokens("long.json", &documents(&[prompt], 3));
            let files = model.files.rsplit_once("--tokens").unwrap().0;
            let json = kvsmith(&format!(
                "run {files} --tokens {ids} --json --max-new 1 --method {method} --kv 2bit"
            ))
            .json();
            json["kv_bytes"].as_u64().unwrap() as usize
        };
        let row = d / 8 + 2 * d / 4 + 2 * 4 * d.div_ceil(32);
        if d == 128 {
            assert_eq!(row * 8, 896);
        }
        for method in ["selfindex", "full", "lfps"] {
            let (short, long) = (bytes(100, method), bytes(164, method));
            assert_eq!(long - short, 64 * layers * g * row, "{name} {method}");
            // Besides: 64 positions in half precision with their numbers, center and scale.
            let fixed = layers * g * (2 * 64 * (2 * d + 4) + 2 * 4 * d);
            assert_eq!(short, 101 * layers * g * row + fixed, "{name} {method}");
        }
    }
}

#[test]
fn narrow_caches_hold_half() {
    for name in ["llama_default", "qwen2_sliding"] {
        let model = Model::new(name);
        let full = model.run("--max-new 8 --method full --kv f32");
        for kv in ["f16", "bf16"] {
            for method in METHODS.iter().map(|m| m.as_str()) {
                let json = model.run(&format!("--max-new 8 --method {method} --budget 0.5 --kv {kv}"));
                assert_eq!(json["ids"].as_array().unwrap().len(), 8);
                let bytes = |json: &Value| json["kv_bytes"].as_u64().unwrap();
                assert_eq!(2 * bytes(&json), bytes(&full), "{name} {kv} {method}");
            }
        }
        // f16 holds these small values well enough for the same tokens.
        assert_eq!(
            model.run("--max-new 8 --method full --kv f16")["ids"],
            full["ids"]
        );
    }
}

#[test]
fn prompts_of_text() {
    let model = Model::new("llama_default");
    model
        .scratch
        .write("model/tokenizer.json", tokenizer(Value::Null));
    let prompt = model.scratch.write("prompt.txt", "a prompt");
    let files = format!("--model {}", model.scratch.path("model"));
    let run = format!("run {files} --max-new 6 --ignore-eos --json");
    let from_file = kvsmith(&format!("{run} --prompt-file {prompt}")).json();
    assert_eq!(from_file["prompt_tokens"], json!(8));
    let same = command(&run).args(["--prompt", "a prompt"]).output().unwrap();
    let same = Outcome::from_output(same).json();
    assert_eq!(same["ids"], from_file["ids"]);
    let ids = model.scratch.tokens("ids.json", &[character_ids("a prompt")]);
    let by_ids = kvsmith(&format!("{run} --tokens {ids}")).json();
    assert_eq!(
        (&by_ids["ids"], &by_ids["text"]),
        (&from_file["ids"], &from_file["text"])
    );
    // Ids below 43 have a character; special tokens and unknown ids have none.
    let ids: Vec<usize> = serde_json::from_value(from_file["ids"].clone()).unwrap();
    let character = |id: usize| ALPHABET.chars().nth(id.wrapping_sub(3));
    let text: String = ids.into_iter().filter_map(character).collect();
    assert_eq!(from_file["text"], json!(text));
}

/// An artifact that claims this model's fingerprint and has tensors of other sizes.
#[test]
fn an_artifact_of_other_sizes_is_refused() {
    let own = Model::new("llama_default");
    let other = Model::new("llama_d128");
    let (art, crafted) = (other.scratch.path("art"), own.scratch.path("crafted"));
    let json = kvsmith(&format!("inspect --json {}", own.scratch.path("art"))).json();
    let fingerprint = json["model"]["fingerprint"].as_str().unwrap().to_owned();
    resealed(&art, &crafted, |manifest| {
        manifest["model"]["fingerprint"] = json!(fingerprint)
    });
    // The helper itself does no harm.
    resealed(&art, &own.scratch.path("same"), |_| ());
    kvsmith(&format!("inspect --verify {}", own.scratch.path("same"))).ok();
    let model = own.scratch.path("model");
    let prompt = own.scratch.path("prompt.json");
    for more in ["", "--force"] {
        let run = format!("run --model {model} --tokens {prompt} --artifact {crafted} {more}");
        kvsmith(&run).fails(1, "4 query and 2 KV heads of 128", "calibrate");
    }
    let inspect = format!("inspect --verify --model {model} {crafted}");
    kvsmith(&inspect).fails(1, "other sizes", "calibrate");
}

#[test]
fn a_stop_text_ends_the_reply() {
    let model = Model::new("llama_default");
    let tokenizer = tokenizer(Value::Null);
    model.scratch.write("model/tokenizer.json", tokenizer);
    let whole = model.run("--max-new 30");
    let text = whole["text"].as_str().unwrap();
    assert_eq!(whole["stop_reason"], "length");
    // A stop text without spaces, which would divide the arguments.
    let mut pairs = (3..text.len() - 2).filter_map(|at| text.get(at..at + 2));
    let stop = pairs.rfind(|pair| !pair.contains(' ')).unwrap();
    let first = text.find(stop).unwrap();
    let ended = model.run(&format!("--max-new 30 --stop {stop} --stop nothing-like-it"));
    assert_eq!(ended["text"], text[..first]);
    assert_eq!(ended["stop_reason"], "stop");
    let ids = ended["ids"].as_array().unwrap();
    assert_eq!(ids[..], whole["ids"].as_array().unwrap()[..ids.len()]);
    let shown = kvsmith(&format!(
        "run {} --ignore-eos --max-new 30 --stop {stop}",
        model.files
    ))
    .ok();
    assert_eq!(shown.stdout, format!("{}\n", &text[..first]));
    std::fs::remove_file(model.scratch.path("model/tokenizer.json")).unwrap();
    kvsmith(&format!("run {} --stop x", model.files)).fails(2, "--stop needs", "tokenizer.json");
}

#[test]
fn flags_of_the_sampler_act() {
    let model = Model::new("llama_default");
    let ids = |options: &str| model.run(&format!("--max-new 12 {options}"))["ids"].clone();
    let greedy = ids("");
    assert_eq!(ids("--temperature 2 --top-k 1"), greedy);
    assert_eq!(ids("--temperature 2 --min-p 0.999"), greedy);
    assert_ne!(ids("--temperature 5"), greedy);
    assert_ne!(ids("--repetition-penalty 100"), greedy);
    let warned = kvsmith(&format!("run {} --max-new 1 --top-k 3 --min-p 0.1", model.files)).ok();
    for flag in ["--top-k", "--min-p"] {
        let warning = format!("{flag} has no effect without --temperature");
        assert!(warned.stderr.contains(&warning), "{}", warned.stderr);
    }
}

/// `wpq` quantises rotated keys, and `lfps` learns distances: neither knows what lies beyond the calibrated blocks.
#[test]
fn contexts_beyond_the_calibrated_blocks_get_a_warning() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    let texts = scratch.tokens("texts.json", &documents(&[60, 60], 1));
    let calibrate = format!("calibrate --model {model} --tokens {texts} --size 8 --seq-len 40");
    let artifact = scratch.make("art", &calibrate);
    let says = "was calibrated on blocks of at most 40 tokens and loses more at";
    for (tokens, method, warns) in [
        (30, "wpq", false),
        (36, "wpq", true),
        (36, "lfps", true),
        (36, "a2ats", false),
        (36, "topk", false),
    ] {
        let prompt = scratch.tokens(&format!("prompt-{tokens}.json"), &documents(&[tokens], 2));
        let options = format!("--model {model} --artifact {artifact} --tokens {prompt}");
        let run = kvsmith(&format!("run {options} --max-new 8 --method {method}")).ok();
        assert_eq!(
            run.stderr.contains(says),
            warns,
            "{method} at {tokens}: {}",
            run.stderr
        );
    }
    let eval = kvsmith(&format!(
        "eval --model {model} --artifact {artifact} --tokens {texts} --decode 4 --methods wpq,topk,lfps"
    ));
    let both =
        "warning: wpq and lfps were calibrated on blocks of at most 40 tokens and lose more at 60 tokens; ";
    assert!(eval.ok().stderr.contains(both));
}
