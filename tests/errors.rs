//! Every failure says so: exit code, what caused it, a hint, and nothing left behind.

use crate::common::*;
use kvsmith::internal::cmd::removed::{REMOVED, Removed};
use serde_json::{Value, json};

const REFETCH: &str = "download it again";

/// Runs `dump`, `calibrate` and `run` on a broken model: each must fail alike and leave nothing.
#[track_caller]
fn model_fails(scratch: &Scratch, model: &str, culprit: &str, hint: &str) {
    let tokens = scratch.tokens("tokens.json", &documents(&[30, 20], 1));
    let prompt = scratch.tokens("prompt.json", &documents(&[9], 2));
    let before = scratch.list("");
    let dump = scratch.path("dump");
    for arguments in [
        format!("dump --values --model {model} --tokens {tokens} -o {dump}"),
        format!(
            "calibrate --size 4 --model {model} --tokens {tokens} -o {}",
            scratch.path("art")
        ),
        format!("run --model {model} --tokens {prompt} --max-new 3"),
    ] {
        kvsmith(&arguments).fails(1, culprit, hint);
        assert_eq!(scratch.list(""), before, "left behind by: {arguments}");
    }
}

fn delete(model: &str, file: &str) {
    std::fs::remove_file(format!("{model}/{file}")).unwrap();
}

fn cut(model: &str, file: &str, bytes: usize) {
    let path = format!("{model}/{file}");
    let data = std::fs::read(&path).unwrap();
    assert!(bytes < data.len());
    std::fs::write(path, &data[..bytes]).unwrap();
}

/// What breaks a model folder, the culprit and the hint that must be named.
type Broken = (fn(&str), &'static str, &'static str);

#[track_caller]
fn all_fail(from: &str, cases: &[Broken]) {
    for (edit, culprit, hint) in cases {
        let scratch = Scratch::new();
        let model = scratch.model("model", from);
        edit(&model);
        model_fails(&scratch, &model, culprit, hint);
    }
}

#[test]
fn missing_and_truncated_files() {
    const WEIGHTS: &str = "model.safetensors";
    const SHARD: &str = "model-00002-of-00002.safetensors";
    fn config(model: &str, text: &str) {
        std::fs::write(format!("{model}/config.json"), text).unwrap();
    }
    fn rename(model: &str) {
        let weights = format!("{model}/{WEIGHTS}");
        std::fs::rename(weights, format!("{model}/pytorch_model.bin")).unwrap();
    }
    let neither = "has neither model.safetensors nor";
    let gone: Broken = (
        |m| std::fs::remove_dir_all(m).unwrap(),
        "does not exist",
        "give --model",
    );
    all_fail(
        "llama_default",
        &[
            gone,
            (
                |m| delete(m, "config.json"),
                "it has no config.json",
                "the folder of a Hugging Face checkpoint",
            ),
            (|m| config(m, "{"), "not valid JSON", ""),
            (|m| config(m, "[]"), "a JSON object", ""),
            (|m| delete(m, WEIGHTS), neither, ""),
            (rename, neither, "convert pytorch_model.bin"),
            (|m| cut(m, WEIGHTS, 20_000), WEIGHTS, REFETCH),
            (|m| cut(m, WEIGHTS, 100), WEIGHTS, REFETCH),
            (|m| cut(m, WEIGHTS, 0), WEIGHTS, REFETCH),
        ],
    );
    all_fail(
        "llama_llama3",
        &[
            (|m| cut(m, SHARD, 15_000), SHARD, REFETCH),
            (|m| delete(m, SHARD), SHARD, "download the missing shard"),
        ],
    );
}

#[test]
fn index_that_lies() {
    const CASES: &str = "
        extra | model-00001-of-00002.safetensors          | contains `extra.weight`, but it does not
        Q     | model-00001-of-00002.safetensors          | contains `model.layers.1.self_attn.q_proj.weight`
        Q     | model-00003-of-00003.safetensors          | model-00003-of-00003.safetensors, which does not exist
        Q     | ../model/model-00002-of-00002.safetensors | has no valid file name
    ";
    for [name, file, culprit] in table(CASES) {
        let name = format!("{name}.weight").replace('Q', "model.layers.1.self_attn.q_proj");
        let scratch = Scratch::new();
        let model = scratch.model("model", "llama_llama3");
        let path = format!("{model}/model.safetensors.index.json");
        let mut index: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        index["weight_map"][name] = json!(file);
        std::fs::write(&path, index.to_string()).unwrap();
        model_fails(&scratch, &model, culprit, "");
    }
}

#[test]
fn headers_that_lie() {
    let header = |len: u64, text: &str| [&len.to_le_bytes(), text.as_bytes()].concat();
    let tensor = |shape: &str, offsets: &str| {
        let text = format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#);
        safetensors(&text, &[0; 16])
    };
    let overlapping = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
        "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    let cases = [
        ("length beyond the file", header(1 << 20, "{}")),
        ("length 2^63", header(1 << 63, "{}")),
        ("length 2^64 - 1", header(u64::MAX, "{}")),
        ("not JSON", safetensors("tensors!", &[])),
        ("not UTF-8", [&2u64.to_le_bytes()[..], &[0xff, 0xfe]].concat()),
        ("data missing", tensor("[4]", "[0,32]")),
        ("offsets out of range", tensor("[4]", "[4294967296,4294967312]")),
        ("offsets backwards", tensor("[4]", "[16,0]")),
        ("offsets that are not the shape's", tensor("[3]", "[0,16]")),
        (
            "shape product that overflows",
            tensor("[4294967296,4294967296,4294967296]", "[0,16]"),
        ),
        (
            "shape product that overflows to its size",
            tensor("[4611686018427387905,4]", "[0,16]"),
        ),
        ("a negative shape", tensor("[-4]", "[0,16]")),
        ("overlapping tensors", safetensors(overlapping, &[0; 12])),
        ("data that no tensor has", safetensors("{}", &[0; 64])),
    ];
    for (what, bytes) in cases {
        println!("{what}");
        let scratch = Scratch::new();
        let model = scratch.model("model", "llama_default");
        std::fs::write(format!("{model}/model.safetensors"), &bytes).unwrap();
        model_fails(&scratch, &model, "model.safetensors", REFETCH);
        // Our own files are read with the same care.
        let artifact = scratch.write("art.safetensors", &bytes);
        kvsmith(&format!("inspect {artifact}")).fails(1, "art.safetensors", "");
    }
}

/// Each row of `cases` has fields that break the configuration of a model, the culprit and the hint.
#[track_caller]
fn configs_fail(from: &str, cases: &str) {
    for [fields, culprit, hint] in table(cases) {
        let scratch = Scratch::new();
        let model = scratch.model("model", from);
        edit_json(
            &format!("{model}/config.json"),
            &serde_json::from_str(fields).unwrap(),
        );
        model_fails(&scratch, &model, culprit, hint);
    }
}

#[test]
fn configs_that_are_not_supported() {
    const CASES: &str = r#"
        {"model_type": "gpt2"} | model_type `gpt2` | supported: granite, llama, mistral, qwen2, qwen3, qwen3_moe, smollm3
        {"model_type": "\u001b[2Jgpt2"} | model_type `\u{1b}[2Jgpt2` | supported: granite, llama, mistral, qwen2, qwen3, qwen3_moe, smollm3
        {"model_type": null} | `model_type` is missing |
        {"rope_scaling": {"rope_type": "longrope"}} | `longrope` | default, linear, llama3
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}} | `dynamic` | default, linear
        {"rope_scaling": {"type": "linear"}} | `rope_scaling.factor` is missing |
        {"rope_scaling": {"type": "linear", "factor": -1}} | out of range |
        {"rope_scaling": {"type": "linear", "factor": 1e-39}} | rope settings | `rope_scaling`
        {"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 1e39}} | rope settings | `rope_scaling`
        {"rope_scaling": null, "rope_parameters": {"full_attention": {"rope_type": "default"}}} | `full_attention` | one rope for all
        {"rope_theta": 0} | rope_theta 0 |
        {"layer_types": ["full_attention", "chunked_attention"]} | chunked_attention | supported:
        {"layer_types": ["full_attention"]} | `layer_types` has 1 entries for 2 layers |
        {"layer_types": ["full_attention", "sliding_attention"]} | layer 1 | `sliding_window`
        {"hidden_act": "gelu"} | hidden_act `gelu` | supported: silu
        {"partial_rotary_factor": 0.5} | partial_rotary_factor 0.5 | every channel
        {"head_dim": 18} | head_dim 18 | multiple of 4
        {"head_dim": 2147483644} | head_dim 2147483644 | at most
        {"num_key_value_heads": 3} | not a multiple of num_key_value_heads 3 |
        {"head_dim": null, "hidden_size": 18} | hidden_size 18 is not a multiple |
        {"num_hidden_layers": 1099511627776} | `num_hidden_layers` = 1099511627776 |
        {"num_attention_heads": 2147483648} | `num_attention_heads` = 2147483648 |
        {"num_hidden_layers": 100000} | num_hidden_layers 100000 |
        {"num_hidden_layers": 0} | `num_hidden_layers` is 0 |
        {"num_hidden_layers": "two"} | `num_hidden_layers` |
        {"vocab_size": 1099511627776} | `vocab_size` = 1099511627776 |
        {"rms_norm_eps": -1.0} | rms_norm_eps -1 |
        {"eos_token_id": "two"} | `eos_token_id` |
        {"tie_word_embeddings": "yes"} | `tie_word_embeddings` |
    "#;
    configs_fail("llama_default", CASES);
    const GRANITE: &str = r#"
        {"logits_scaling": 0} | logits_scaling 0 | from 1e-6
        {"attention_multiplier": -0.5} | attention_multiplier -0.5 | from 1e-6
        {"embedding_multiplier": 1e30} | embedding_multiplier 1000000000000000000000000000000 | from 1e-6
        {"residual_multiplier": "much"} | `residual_multiplier` |
    "#;
    configs_fail("granite_factors", GRANITE);
    const NOPE: &str = r#"
        {"no_rope_layers": [1, 0]} | `no_rope_layers` is not a list of zeros and ones for all 4 layers |
        {"no_rope_layers": "all"} | `no_rope_layers` |
        {"no_rope_layers": null, "no_rope_layer_interval": 0} | `no_rope_layer_interval` is 0 |
        {"use_sliding_window": false} | layer 1 is `sliding_attention` | `sliding_window`
    "#;
    configs_fail("smollm3_nope", NOPE);
    const MIXTURE: &str = r#"
        {"num_experts_per_tok": 6} | 6 of 5 experts per token | `num_experts_per_tok`
        {"num_experts": 1000000000} | 2 of 1000000000 experts per token | at most 4096
        {"mlp_only_layers": "none"} | `mlp_only_layers` |
        {"mlp_only_layers": []} | no tensor `model.layers.1.mlp.gate.weight` |
        {"num_experts": 6} | layers.0.mlp.gate.weight` has shape [5, 16] |
        {"moe_intermediate_size": 32} | layers.0.mlp.experts.0.gate_proj.weight` has shape [16, 16] |
    "#;
    configs_fail("qwen3_moe_mixed", MIXTURE);
}

#[test]
fn configs_that_contradict_the_weights() {
    const CASES: &str = r#"
        {"vocab_size": 97} | embed_tokens.weight` has shape [96, 16] | SAME
        {"hidden_size": 20} | requires [96, 20] | SAME
        {"intermediate_size": 1073741824} | layers.0.mlp.gate_proj.weight` has shape [16, 16] | SAME
        {"num_attention_heads": 8} | layers.0.self_attn.q_proj.weight` has shape [64, 16] | SAME
        {"num_key_value_heads": 4} | layers.0.self_attn.k_proj.weight` has shape [32, 16] | SAME
        {"head_dim": 32} | layers.0.self_attn.q_proj.weight` has shape [64, 16] | SAME
        {"num_hidden_layers": 3} | no tensor `model.layers.2. | SAME
        {"attention_bias": true} | no tensor `model.layers.0.self_attn.q_proj.bias` | SAME
        {"model_type": "qwen3"} | no tensor `model.layers.0.self_attn.q_norm.weight` | SAME
    "#;
    let same = "use config.json and weights that belong to the same model";
    configs_fail("llama_default", &CASES.replace("SAME", same));
    let bias = r#"{"attention_bias": false} | layers.0.self_attn.q_proj.bias | `attention_bias`"#;
    configs_fail("llama_yarn", bias);
}

#[test]
fn missing_and_quantised_tensors() {
    const UP: &str = "model.layers.1.mlp.up_proj.weight";
    let scratch = Scratch::new();
    let model = scratch.model("missing", "llama_default");
    edit_tensors(&model, |t| drop(t.remove(UP).unwrap()));
    model_fails(
        &scratch,
        &model,
        "no tensor `model.layers.1.mlp.up_proj.weight`",
        "same model",
    );
    for dtype in ["I8", "U8", "F8_E4M3"] {
        let scratch = Scratch::new();
        let model = scratch.model("quantised", "llama_default");
        edit_tensors(&model, |tensors| {
            let up = tensors.get_mut(UP).unwrap();
            up.dtype = dtype.to_string();
            up.bytes.truncate(up.bytes.len() / 2);
        });
        model_fails(
            &scratch,
            &model,
            &format!("up_proj.weight` has dtype {dtype}"),
            "BF16, F16, F32",
        );
    }
}

#[test]
fn a_nan_in_the_weights_is_named() {
    // Everything that a dump reads; `down` and `o` of the last layer are not among it.
    let layers = ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj"].map(|p| (0, p));
    let mlp = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"].map(|p| (0, p));
    let states = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
    let mut names: Vec<String> = layers
        .into_iter()
        .chain(mlp)
        .chain(states.map(|p| (0, p)))
        .chain(states.map(|p| (1, p)))
        .map(|(i, part)| format!("model.layers.{i}.{part}.weight"))
        .collect();
    names.extend(
        ["q_proj", "k_proj", "v_proj", "o_proj"].map(|p| format!("model.layers.0.self_attn.{p}.bias")),
    );
    names.extend(["gate_proj", "down_proj"].map(|p| format!("model.layers.1.mlp.{p}.bias")));
    names.push("model.norm.weight".to_string());
    for name in names {
        let scratch = Scratch::new();
        let model = scratch.model("model", "llama_yarn");
        poison(&model, &name, 5);
        model_fails(
            &scratch,
            &model,
            &format!("tensor `{name}` contains a NaN or infinite value"),
            REFETCH,
        );
    }
}

/// Makes element `i` of a bf16 tensor NaN.
fn poison(model: &str, name: &str, i: usize) {
    edit_tensors(model, |tensors| {
        let t = tensors.get_mut(name).unwrap();
        assert_eq!(t.dtype, "BF16");
        t.bytes[2 * i..2 * i + 2].copy_from_slice(&[0xc0, 0x7f]);
    });
}

#[test]
fn a_nan_matters_only_where_it_is_read() {
    let scratch = Scratch::new();
    let tokens = scratch.tokens("tokens.json", &[vec![5, 6, 7, 8, 9]]);
    let dump = |model: &str, name: &str| {
        let out = scratch.path(name);
        kvsmith(&format!("dump --model {model} --tokens {tokens} -o {out}"))
    };
    let run = |model: &str| kvsmith(&format!("run --model {model} --tokens {tokens} --max-new 2"));
    let row = |id: usize| {
        let model = scratch.model(&format!("row{id}"), "llama_default");
        poison(&model, "model.embed_tokens.weight", id * 16 + 3);
        model
    };
    let culprit = "`model.embed_tokens.weight` contains a NaN or infinite value in row 7";
    dump(&row(7), "d7").fails(1, culprit, REFETCH);
    run(&row(7)).fails(1, culprit, REFETCH);
    dump(&row(40), "d40").ok();

    let model = scratch.model("head", "llama_default");
    poison(&model, "lm_head.weight", 100);
    dump(&model, "dump").ok();
    run(&model).fails(
        1,
        "tensor `lm_head.weight` contains a NaN or infinite value (element 100)",
        REFETCH,
    );
}

#[test]
fn token_files() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    const CASES: &str = r#"
        outside  | [[1, 2, 95, 96]]  | token id 96 (at index 3) is outside the model's vocabulary of 96 tokens | belong to this model
        huge     | [[4294967295, 1]] | token id 4294967295 (at index 0) | belong to this model
        above    | [[4294967296]]    | | array of arrays
        negative | [[-1]]            | | array of arrays
        fraction | [[1.5]]           | | array of arrays
        flat     | [1, 2]            | | array of arrays
        object   | {"ids": [1]}      | | array of arrays
        words    | one two           | | array of arrays
        nothing  |                   | | array of arrays
    "#;
    for [name, content, culprit, hint] in table(CASES) {
        let file = format!("{name}: ");
        let culprit = if culprit.is_empty() { &file } else { culprit };
        let tokens = scratch.write(name, content);
        for command in ["dump -o OUT", "calibrate -o OUT --size 2", "run"] {
            let arguments = format!("{command} --model {model} --tokens {tokens}");
            kvsmith(&arguments.replace("OUT", &scratch.path("out"))).fails(1, culprit, hint);
        }
    }
    for (name, content, of_run) in [
        ("none", "[]", "must contain exactly one document"),
        ("empty", "[[]]", "the prompt has no tokens"),
    ] {
        let tokens = scratch.write(name, content);
        let out = scratch.path("out");
        for command in ["dump", "calibrate --size 2"] {
            let outcome = kvsmith(&format!("{command} -o {out} --model {model} --tokens {tokens}"));
            outcome.fails(
                1,
                "the input contains no tokens",
                "at least one non-empty document",
            );
        }
        kvsmith(&format!("run --model {model} --tokens {tokens}")).fails(1, of_run, "");
    }
    let two = scratch.write("two", "[[3], [4]]");
    kvsmith(&format!("run --model {model} --tokens {two}")).fails(1, "exactly one document", "");
    let missing = scratch.path("missing");
    kvsmith(&format!("run --model {model} --tokens {missing}")).fails(
        1,
        "missing",
        "check that the path exists",
    );
    assert!(!scratch.list("").contains(&"out".to_string()));
}

#[test]
fn text_files() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    let text = scratch.write("text.txt", "some text");
    let out = scratch.path("out");
    let dump = |text: &str| {
        let options = "--uuid-tokens 0";
        kvsmith(&format!("dump --model {model} -o {out} {options} --text {text}"))
    };
    for command in [
        "dump -o OUT --text",
        "calibrate -o OUT --size 2 --text",
        "run --prompt-file",
    ] {
        let outcome = kvsmith(&format!("{command} {text} --model {model}").replace("OUT", &out));
        outcome.fails(1, "tokenizer.json does not exist", "--tokens");
    }
    std::fs::write(format!("{model}/tokenizer.json"), "{}").unwrap();
    dump(&text).fails(1, "tokenizer.json cannot be used", "");
    // One token, unknown, for any text.
    let coarse = json!({
        "version": "1.0", "added_tokens": [],
        "model": { "type": "WordLevel", "vocab": { "?": 0 }, "unk_token": "?" },
    });
    std::fs::write(format!("{model}/tokenizer.json"), coarse.to_string()).unwrap();
    let uuids = format!("dump --model {model} -o {out} --uuid-tokens 99 --text {text}");
    kvsmith(&uuids).fails(1, "produces only 1 tokens from ", "--uuid-tokens 0");
    std::fs::write(format!("{model}/tokenizer.json"), tokenizer(Value::Null)).unwrap();
    for (name, content, culprit, hint) in [
        (
            "a.jsonl",
            &b"{\"text\": \"x\"}\n\n{\"body\": \"y\"}"[..],
            "a.jsonl line 3: field `text` is missing or not a string",
            "",
        ),
        (
            "b.jsonl",
            b"{\"text\": 3}",
            "b.jsonl line 1: field `text` is missing or not a string",
            "",
        ),
        (
            "c.jsonl",
            b"{\"text\": \"x\"}\nplain",
            "c.jsonl line 2: not valid JSON",
            "",
        ),
        ("d.txt", b"good \xff bad", "d.txt is not UTF-8 text (byte 5)", ""),
        ("e.parquet", b"PAR1", "e.parquet is a Parquet file", "JSON lines"),
        ("g.txt", b"", "the input contains no tokens", "non-empty"),
        ("h.jsonl", b"\n", "the input contains no tokens", "non-empty"),
    ] {
        dump(&scratch.write(name, content)).fails(1, culprit, hint);
    }
    dump(&scratch.path("missing.txt")).fails(1, "missing.txt", "check that the path exists");
    dump(&format!("{text} --max-tokens 0")).fails(1, "the input contains no tokens", "--max-tokens");
    let empty = scratch.write("empty.txt", "");
    for chat in ["", "--chat"] {
        let run = format!("run --model {model} --prompt-file {empty} {chat}");
        kvsmith(&run).fails(1, "the prompt is empty", "give a prompt");
    }
    assert!(!scratch.list("").contains(&"out".to_string()));
}

#[test]
fn fit_options_that_cannot_work() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[40], 1));
    let out = scratch.path("out");
    const CASES: &str = "
        --size 39               | 1 | a codebook of 39 codewords cannot be fitted to 38 tokens | use a --size of at most 2
        --size 0                | 2 | --size 0       |
        --size 65536            | 2 | --size 65536   |
        --size 2 --holdout 1    | 2 | --holdout 1    |
        --size 2 --holdout=-0.1 | 2 | --holdout -0.1 |
        --size 2 --holdout NaN  | 2 | --holdout NaN  |
        --size 2 --seq-len 0    | 2 | --seq-len      |
    ";
    for [options, code, culprit, hint] in table(CASES) {
        let input = format!("--model {model} --tokens {tokens}");
        let outcome = kvsmith(&format!("calibrate {input} -o {out} {options}"));
        outcome.fails(code.parse().unwrap(), culprit, hint);
    }
    assert_eq!(scratch.list(""), ["tokens.json"]);
    let dump = scratch.make("dump", &format!("dump --model {model} --tokens {tokens}"));
    kvsmith(&format!("codebook --dump {dump} -o {out}")).fails(
        1,
        "a codebook of 4096 codewords cannot be fitted",
        "use a --size of at most 2",
    );
}

#[test]
fn removed_options_name_what_replaces_them() {
    for Removed {
        commands,
        option,
        value,
        instead,
    } in &REMOVED
    {
        let given = match value {
            Some(value) => format!("{option} {value}"),
            None => (*option).to_owned(),
        };
        let culprit = format!("`{given}` was removed");
        for command in *commands {
            let command = match *command {
                "bench" => "bench retrieve",
                command => command,
            };
            for used in [
                format!("{command} {given}"),
                format!("{command} {}", given.replace(' ', "=")),
            ] {
                kvsmith(&used).fails(2, &culprit, instead);
            }
            let help = kvsmith(&format!("{command} --help")).ok().stdout;
            let help: Vec<&str> = help.split_whitespace().collect();
            assert_eq!(help.contains(option), value.is_some(), "{command} {option}");
            assert!(value.is_none_or(|value| !help.iter().any(|word| word.contains(value))));
        }
    }
    // The document of --json, quotes around another method's flags, and commands that never had the option.
    let refused = kvsmith("run --json --ct-expand 2");
    let document: Value = serde_json::from_str(&refused.stdout).unwrap();
    assert_eq!(document["error"]["message"], "`--ct-expand` was removed");
    assert!(document["error"]["hint"].as_str().unwrap().contains("--ct-list"));
    let mut also = command("eval --model m --tokens t --methods topk");
    let also = Outcome::from_output(also.args(["--also", "ctkvr --ct-cap 0.2"]).output().unwrap());
    assert_eq!(also.code, Some(2));
    assert!(
        also.stderr.contains("--ct-cap` was removed: use --ct-centroids"),
        "{}",
        also.stderr
    );
    let other = kvsmith("dump --ct-expand 2");
    assert!(!other.stderr.contains("removed"), "{}", other.stderr);
}

#[test]
fn outputs_that_cannot_be_written_are_found_first() {
    let scratch = Scratch::new();
    // A model that would fail in its first layer, had the work begun.
    let model = scratch.model("model", "llama_default");
    poison(&model, "model.layers.0.self_attn.q_proj.weight", 0);
    let healthy = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[40], 1));
    let dump = format!("dump --queries --model {healthy} --tokens {tokens}");
    let dump = scratch.make("dump", &dump);
    let section = scratch.make("section", &format!("codebook --size 2 --dump {dump}"));
    let folder = scratch.path("folder");
    std::fs::create_dir(&folder).unwrap();
    // Replacing a device by a file would not be what anybody asked for.
    let device = scratch.path("device");
    std::os::unix::fs::symlink("/dev/null", &device).unwrap();
    let before = scratch.list("");
    for (out, culprit, hint) in [
        (
            scratch.path("none/out"),
            "none does not exist",
            "create the folder",
        ),
        (folder, "folder", ""),
        (device, "device: it is not a regular file", ""),
        (format!("{tokens}/out"), "tokens.json/out", ""),
    ] {
        for command in [
            format!("calibrate --size 2 --model {model} --tokens {tokens} -o"),
            // The folder is no model at all.
            format!("calibrate --size 2 --model {dump} --tokens {tokens} -o"),
            format!("pack {section} --model {dump} -o"),
            format!("moments --dump {dump} -o"),
            format!("codebook --size 2 --dump {dump} -o"),
        ] {
            kvsmith(&format!("{command} {out}")).fails(1, culprit, hint);
        }
    }
    let trace = |out: String| kvsmith(&format!("run --model {model} --tokens {tokens} --trace {out}"));
    trace(scratch.path("none/out")).fails(1, "none does not exist", "create the folder");
    trace(scratch.path("folder")).fails(1, "folder", "");
    let nested = format!("{tokens}/out");
    kvsmith(&format!("dump --model {model} --tokens {tokens} -o {nested}")).fails(1, "tokens.json/out", "");
    kvsmith(&format!("dump --model {model} --tokens {tokens} -o {tokens}")).fails(2, "tokens.json", "");
    kvsmith(&format!("dump --model {model} --tokens {tokens} -o {section}")).fails(1, "section", "");
    assert_eq!(scratch.list(""), before);
}

#[test]
fn dumps_and_sections_that_do_not_fit_together() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let a = scratch.tokens("a.json", &documents(&[40], 1));
    let b = scratch.tokens("b.json", &documents(&[40], 2));
    let path = |name: &str| scratch.path(name);
    for (tokens, name, options) in [
        (&a, "da", "--queries"),
        (&b, "db", "--queries"),
        (&a, "plain", ""),
    ] {
        scratch.make(name, &format!("dump --model {model} --tokens {tokens} {options}"));
    }
    let again = format!("dump --model {model} --tokens {a} -o {}", path("da"));
    let before = scratch.list("da");
    kvsmith(&again).fails(2, "already contains a dump", "choose another folder");
    assert_eq!(scratch.list("da"), before);

    let moments = |dump: &str| kvsmith(&format!("moments --dump {} -o {}", path(dump), path("m")));
    moments("plain").fails(1, "plain contains no queries", "--queries");
    let tail = |dump: &str| kvsmith(&format!("tail --dump {} -o {}", path(dump), path("s")));
    tail("plain").fails(1, "plain contains no queries", "--queries");
    tail("da").fails(1, "da contains no values", "--queries --values");
    moments("nothing").fails(1, "does not contain a complete dump", "kvsmith dump");
    scratch.make("mb", &format!("moments --dump {}", path("db")));
    let foreign = format!("codebook --size 2 --dump {} --moments {}", path("da"), path("mb"));
    kvsmith(&format!("{foreign} -o {}", path("s"))).fails(1, "mb was not made from", "the same dump");

    for (dump, section) in [("da", "sa"), ("db", "sb")] {
        scratch.make(section, &format!("codebook --size 2 --dump {}", path(dump)));
    }
    let other = checkpoint("llama_d128");
    const CASES: &str = "
        DIR/sa DIR/sb                   | model | different values of `calibration`          | from the same dump
        DIR/sa DIR/sa                   | model | section `a2ats` is given twice   |
        DIR/sa                          | other | sa was made for another model    |
        DIR/da/moments.safetensors      | model | moments.safetensors is not an artifact |
        DIR/da/layer-00000.safetensors  | model | layer-00000.safetensors was not written by kvsmith |
    ";
    for [sections, made_for, culprit, hint] in table(CASES) {
        let model = if made_for == "model" { &model } else { &other };
        let files = sections.replace("DIR", path("").trim_end_matches('/'));
        kvsmith(&format!("pack {files} --model {model} -o {}", path("art"))).fails(1, culprit, hint);
    }
    for name in ["m", "s", "art"] {
        assert!(!scratch.list("").contains(&name.to_string()), "{name}");
    }
}

#[test]
fn artifacts_of_another_model() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[40], 1));
    let calibrate = format!("calibrate --size 2 --model {model} --tokens {tokens}");
    let artifact = scratch.make("art", &calibrate);

    let twin = scratch.model("twin", "llama_default");
    edit_tensors(&twin, |t| t.get_mut("model.norm.weight").unwrap().bytes[0] ^= 1);
    let stranger = checkpoint("qwen3_norm");
    let run = |model: &str, force: &str| {
        let files = format!("--model {model} --artifact {artifact} --tokens {tokens}");
        kvsmith(&format!("run {files} --max-new 2 --json {force}"))
    };
    let culprit = "art was made for another model";
    run(&twin, "").fails(1, culprit, "--force");
    // No force makes other sizes fit.
    let sizes = "art was made for a model of other sizes";
    run(&stranger, "").fails(1, sizes, "calibrate this model");
    run(&stranger, "--force").fails(1, sizes, "calibrate this model");
    let forced = run(&twin, "--force").ok();
    assert!(forced.stderr.contains("warning: "), "{}", forced.stderr);
    assert!(!run(&model, "").ok().stderr.contains("warning: "));

    let verify = |model: &str| kvsmith(&format!("inspect {artifact} --verify --model {model}"));
    verify(&model).ok();
    verify(&twin).fails(1, culprit, "");
    verify(&stranger).fails(1, culprit, "");
}

#[test]
fn devices_that_cannot_do_it() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[40], 1));
    let out = scratch.path("out");
    for command in [
        format!("dump --model {model} --tokens {tokens} -o {out}"),
        format!("priors --dump {out} -o {out}"),
        format!("pack {tokens} --model {model} -o {out}"),
    ] {
        for device in ["wgpu", "cuda"] {
            kvsmith(&format!("{command} --device {device}")).fails(3, device, "--device");
        }
    }
    let auto = kvsmith(&format!("run --model {model} --tokens {tokens} --max-new 1")).ok();
    assert!(
        auto.stderr.contains("device: "),
        "auto names its choice: {}",
        auto.stderr
    );
    assert_eq!(scratch.list(""), ["tokens.json"]);
}

#[test]
fn wrong_use() {
    let model = checkpoint("llama_default");
    const CASES: &str = "
        | Usage
        frobnicate | frobnicate
        run --model MODEL | --prompt
        run --model MODEL --tokens t --prompt x | --prompt
        run --model MODEL --tokens t --budget 0 | 0
        run --model MODEL --tokens t --budget=-0.5 | -0.5
        run --model MODEL --tokens t --budget 1.5 | 1.5
        run --model MODEL --tokens t --budget nan | nan
        run --model MODEL --tokens t --budget inf | inf
        run --model MODEL --tokens t --budget many | many
        run --model MODEL --tokens t --window 0 | --window
        run --model MODEL --tokens t --sinks x | --sinks
        run --model MODEL --tokens t --threads 0 | --threads
        run --model MODEL --tokens t --threads 18446744073709551615 | --threads
        run --model MODEL --tokens t --max-new 18446744073709551615 | --max-new
        dump --model MODEL -o out --tokens t --wrope-position 18446744073709551615 | --wrope-position
        dump --model MODEL -o out --text t.txt --max-tokens 18446744073709551615 | --max-tokens
        dump --model MODEL -o out --text t.txt --uuid-tokens 18446744073709551615 | --uuid-tokens
        calibrate --model MODEL -o out --text t.txt --uuid-tokens 4294967295 | --uuid-tokens
        run --model MODEL --tokens t --method guess | guess
        run --model MODEL --tokens t --device tpu | tpu
        run --model MODEL --tokens t --temperature=-1 | --temperature
        run --model MODEL --tokens t --top-p 0 | --top-p
        run --model MODEL --tokens t -q -v | -v
        dump --model MODEL -o out | --text
        dump --model MODEL -o out --tokens t --text x.txt | --text
        calibrate --model MODEL -o out --tokens t --resume | --work
        calibrate --model MODEL -o out --tokens t --iterations=-1 | --iterations
        inspect art --model MODEL | --verify
    ";
    for [arguments, culprit] in table(CASES) {
        let outcome = kvsmith(&arguments.replace("MODEL", &model));
        assert_eq!(outcome.code, Some(2), "{arguments}: {}", outcome.stderr);
        assert!(
            outcome.stderr.contains(culprit),
            "{arguments}: {}",
            outcome.stderr
        );
        assert_eq!(outcome.stdout, "", "{arguments}");
    }
    let scratch = Scratch::new();
    let tokens = scratch.tokens("tokens.json", &[vec![3, 4, 5]]);
    let arguments = format!("run --model {model} --tokens {tokens} --method a2ats");
    kvsmith(&arguments).fails(2, "--method a2ats needs --artifact", "kvsmith calibrate");
    for arguments in ["--help", "--version", "run --help"] {
        let outcome = kvsmith(arguments).ok();
        assert!(
            !outcome.stdout.is_empty() && outcome.stderr.is_empty(),
            "{arguments}"
        );
    }
}

#[test]
fn a_stdout_that_takes_nothing() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[40], 1));
    let calibrate = format!("calibrate --size 2 --model {model} --tokens {tokens}");
    let artifact = scratch.make("art", &calibrate);
    let run = format!("run --model {model} --tokens {tokens} --max-new 3");
    for arguments in [
        format!("inspect {artifact}"),
        format!("inspect {artifact} --json"),
        run.clone(),
        run + " --json",
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let outcome = Outcome::from_output(command(&arguments).stdout(full).output().unwrap());
        outcome.fails(1, "cannot write to stdout: No space left on device", "");
    }
}

/// A tiny file system, unmounted when dropped.
struct SmallDisk(std::ffi::CString);

impl SmallDisk {
    /// `None` where this process may not mount.
    fn mount(path: &str, size: &str) -> Option<Self> {
        let path = std::ffi::CString::new(path).unwrap();
        let options = std::ffi::CString::new(format!("size={size}")).unwrap();
        // SAFETY: all pointers are C strings that outlive the call.
        let code = unsafe {
            libc::mount(
                c"tmpfs".as_ptr(),
                path.as_ptr(),
                c"tmpfs".as_ptr(),
                0,
                options.as_ptr().cast(),
            )
        };
        (code == 0).then_some(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // SAFETY: the path is a C string.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}

#[test]
fn a_full_disk() {
    let scratch = Scratch::new();
    let disk = scratch.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let Some(_mounted) = SmallDisk::mount(&disk, "200k") else {
        println!("skipped: this user may not mount a file system");
        return;
    };
    let model = checkpoint("llama_d128");
    let tokens = scratch.tokens("tokens.json", &documents(&[200], 1));
    let earlier = scratch.make("disk/out", "bench kmeans --n 40 --dim 8 --size 4 --runs 1");
    let kept = std::fs::read(&earlier).unwrap();
    let input = format!("--model {model} --tokens {tokens}");
    let dump = scratch.make("dump", &format!("dump --queries {input}"));
    let section = scratch.make("section", &format!("codebook --dump {dump} --size 16"));
    for command in [
        format!("calibrate --size 16 {input} --overwrite -o {earlier}"),
        format!(
            "calibrate --size 16 {input} -o {} --work {disk}/work",
            scratch.path("art")
        ),
        format!("codebook --dump {dump} --size 16 --overwrite -o {earlier}"),
        format!("moments --dump {dump} --overwrite -o {earlier}"),
        format!("pack {section} --model {model} --overwrite -o {earlier}"),
    ] {
        kvsmith(&command).fails(1, "No space left on device", "free some disk space");
        assert!(
            scratch.list("disk").iter().all(|f| f == "out" || f == "work"),
            "{:?}",
            scratch.list("disk")
        );
    }
    assert!(!scratch.list("").contains(&"art".to_string()));
    kvsmith(&format!("dump {input} -o {disk}/dump")).fails(1, "the dump needs", "use fewer tokens");
    assert_eq!(std::fs::read(earlier).unwrap(), kept);

    std::fs::write(format!("{disk}/fill"), vec![0; 1 << 20]).unwrap_err();
    let run = format!("run {input} --max-new 200 --ignore-eos --json --overwrite --trace {disk}/out");
    kvsmith(&run).fails(1, "cannot write the trace", "");
}

/// A tokenizer.json that the library parses, and panics over when it is used.
#[test]
fn a_tokenizer_that_contradicts_itself() {
    let scratch = Scratch::new();
    let model = scratch.model("model", "llama_default");
    let processor = json!({
        "type": "TemplateProcessing",
        "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
        "special_tokens": {},
    });
    scratch.write("model/tokenizer.json", tokenizer(processor));
    let run = kvsmith(&format!("run --model {model} --prompt text --max-new 3"));
    run.fails(1, "contradict each other", "tokenizer.json again");
    assert!(!run.stderr.contains("panicked"), "{}", run.stderr);
}
