//! `dump` and `moments`: the dump folder, its content, and which inputs are accepted.

use std::path::Path;

use crate::common::*;
use half::{bf16, f16};
use kvsmith::internal::compute::pairs;
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::forward::Rows;
use ndarray::{Array1, Array3, ArrayView1, ArrayView3, Axis, concatenate};
use serde_json::{Value, json};

/// Runs `dump` into `name` and returns the folder.
#[track_caller]
fn dump(scratch: &Scratch, model: &str, name: &str, options: &str) -> String {
    scratch.make(name, &format!("dump --model {model} {options}"))
}

fn tokens_of(dump: &str) -> RawTensors {
    read_tensors(format!("{dump}/tokens.safetensors"))
}

fn manifest_of(dump: &str) -> Value {
    serde_json::from_slice(&std::fs::read(format!("{dump}/manifest.json")).unwrap()).unwrap()
}

#[test]
fn the_folder_is_that_of_the_contract() {
    let scratch = Scratch::new();
    for (name, layers, h, g, d) in [("llama_default", 2, 4, 2, 16), ("qwen2_sliding", 3, 4, 2, 8)] {
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(&[25, 13], 1));
        for (options, states, dtype) in [
            ("", &["k_pre"][..], "BF16"),
            ("--queries --dtype f16", &["k_pre", "q_pre"], "F16"),
            ("--values --queries --dtype f32", &["k_pre", "q_pre", "v"], "F32"),
        ] {
            let _ = std::fs::remove_dir_all(scratch.path("dump"));
            let out = dump(&scratch, &model, "dump", &format!("--tokens {tokens} {options}"));
            let mut files: Vec<String> = (0..layers).map(|i| format!("layer-{i:05}.safetensors")).collect();
            files.extend(["manifest.json", "moments.safetensors", "tokens.safetensors"].map(String::from));
            assert_eq!(scratch.list("dump"), files);
            for file in &files[..layers] {
                let tensors = read_tensors(format!("{out}/{file}"));
                assert_eq!(tensors.keys().collect::<Vec<_>>(), states);
                for (state, tensor) in tensors {
                    let heads = if state == "q_pre" { h } else { g };
                    assert_eq!(
                        (tensor.dtype.as_str(), tensor.shape),
                        (dtype, vec![heads, 38, d]),
                        "{state}"
                    );
                }
            }
            let shapes = |tensors: &RawTensors| -> Vec<String> {
                tensors
                    .iter()
                    .map(|(name, t)| format!("{name} {} {:?}", t.dtype, t.shape))
                    .collect()
            };
            assert_eq!(
                shapes(&tokens_of(&out)),
                [
                    "block_start U32 [3]",
                    "held_out U8 [38]",
                    "ids U32 [38]",
                    "position U32 [38]"
                ]
            );
            assert_eq!(
                shapes(&read_tensors(format!("{out}/moments.safetensors"))),
                [
                    format!("count U64 [{layers}, {g}]"),
                    format!("sum_qq F64 [{layers}, {g}, {d}, {d}]"),
                    format!("sum_qq_pre F64 [{layers}, {g}, {d}, {d}]"),
                    format!("sum_qq_rope F64 [{layers}, {g}, {d}, {d}]"),
                ]
            );
        }
    }
}

#[test]
fn tokens_are_cut_into_blocks() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let texts = documents(&[25, 0, 10, 11], 3);
    let tokens = scratch.tokens("tokens.json", &texts);
    let out = dump(
        &scratch,
        &model,
        "dump",
        &format!("--tokens {tokens} --seq-len 10"),
    );
    let t = tokens_of(&out);
    assert_eq!(t["ids"].u32s(), texts.concat());
    assert_eq!(t["block_start"].u32s(), [0, 10, 20, 25, 35, 45, 46]);
    let positions: Vec<u32> = [10, 10, 5, 10, 10, 1].iter().flat_map(|n| 0..*n).collect();
    assert_eq!(t["position"].u32s(), positions);

    let calibration = &manifest_of(&out)["calibration"];
    assert_eq!(
        (&calibration["tokens"], &calibration["blocks"]),
        (&json!(46), &json!(6))
    );
    // What is held out is the same in the manifest and in the tensor.
    let mut held_out = vec![0u8; 46];
    for range in calibration["held_out"].as_array().unwrap() {
        let at = |i: usize| range[i].as_u64().unwrap() as usize;
        let start = [0, 10, 20, 25, 35, 45][at(0)];
        held_out[start + at(1)..start + at(2)].fill(1);
    }
    assert_eq!(t["held_out"].bytes, held_out);
    assert!(held_out.contains(&1));

    // Without --seq-len, documents stay whole up to the model's context of 128.
    let long = scratch.tokens("long.json", &documents(&[200], 3));
    let yarn = checkpoint("llama_yarn");
    let out = dump(&scratch, &yarn, "whole", &format!("--tokens {long}"));
    assert_eq!(tokens_of(&out)["block_start"].u32s(), [0, 128, 200]);
}

#[test]
fn hold_out_rules() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    // Blocks of 4 tokens, share, blocks held out.
    for (blocks, share, expected) in [
        (2, "0.05", 1),
        (10, "0.05", 1),
        (10, "0.25", 3),
        (10, "0.24", 2),
        (9, "0.5", 5),
        (10, "0.99", 9),
        (7, "0", 0),
    ] {
        let tokens = scratch.tokens("tokens.json", &documents(&[4 * blocks], 4));
        let mut seen = Vec::new();
        for seed in 0..6 {
            let name = format!("{blocks}-{share}-{seed}");
            let options = format!("--tokens {tokens} --seq-len 4 --holdout {share} --seed {seed}");
            let out = dump(&scratch, &model, &name, &options);
            let held_out = tokens_of(&out)["held_out"].bytes.clone();
            let whole: Vec<u8> = held_out.chunks(4).map(|block| block[0]).collect();
            assert!(
                held_out
                    .chunks(4)
                    .all(|block| block.iter().all(|x| *x == block[0])),
                "whole blocks"
            );
            assert_eq!(
                whole.iter().filter(|x| **x == 1).count(),
                expected,
                "{blocks} blocks, {share}"
            );
            seen.push(whole);
        }
        if expected > 0 {
            assert!(seen.iter().any(|w| *w != seen[0]), "the seed draws the blocks");
        }
    }
    // The last part of an only block.
    for (n, share, expected) in [
        (40, "0.05", 2),
        (40, "0.5", 20),
        (3, "0.05", 1),
        (2, "0.9", 1),
        (1, "0.5", 0),
        (9, "0", 0),
    ] {
        let tokens = scratch.tokens("tokens.json", &documents(&[n], 4));
        let name = format!("only-{n}-{share}");
        let out = dump(
            &scratch,
            &model,
            &name,
            &format!("--tokens {tokens} --holdout {share}"),
        );
        let held_out: Vec<u8> = (0..n).map(|i| u8::from(i >= n - expected)).collect();
        assert_eq!(tokens_of(&out)["held_out"].bytes, held_out, "{n} tokens, {share}");
    }
}

/// Two documents of two blocks, and one of a single block, which the draw of seed 0 begins with: something of each is
/// fitted, and manifest, log and `inspect` say how much.
#[test]
fn a_large_document_is_never_held_out_as_a_whole() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[128, 128, 64], 4));
    let out = scratch.path("dump");
    let options = "--seq-len 64 --holdout 0.1 --queries --values";
    let made = kvsmith(&format!(
        "dump --model {model} --tokens {tokens} {options} -o {out}"
    ));
    assert!(
        made.stderr.contains("text: 256 tokens fitted, 64 held out"),
        "{}",
        made.stderr
    );
    let calibration = manifest_of(&out)["calibration"].clone();
    let held_out: Vec<[usize; 3]> = serde_json::from_value(calibration["held_out"].clone()).unwrap();
    let [[block, 0, 64]] = held_out[..] else {
        panic!("{held_out:?}");
    };
    assert_ne!(block, 4);
    let document = |first: usize, blocks: usize| {
        let held_out = if (first..first + blocks).contains(&block) {
            64
        } else {
            0
        };
        json!({ "first_block": first, "blocks": blocks, "fitted_tokens": 64 * blocks - held_out, "held_out_tokens": held_out })
    };
    assert_eq!(
        calibration["documents"],
        json!([document(0, 2), document(2, 2), document(4, 1)])
    );
    assert_eq!(
        calibration["kinds"],
        json!([{ "kind": "text", "blocks": 5, "fitted_tokens": 256, "held_out_tokens": 64 }])
    );
    let art = scratch.make("art", &format!("signs --dump {out}"));
    let shown = kvsmith(&format!("inspect {art} -v")).ok().stdout;
    assert!(shown.contains("text: 256 tokens fitted, 64 held out"), "{shown}");
    assert!(
        shown.contains("document in block 4: 64 tokens fitted, 0 held out"),
        "{shown}"
    );
    // A dump of an earlier version does not say, and its sections go with those of the same text.
    reseal_dump(&out, |manifest| {
        let calibration = manifest["calibration"].as_object_mut().unwrap();
        calibration.remove("kinds");
        calibration.remove("documents");
    });
    let old = scratch.make("old", &format!("priors --dump {out}"));
    let shown = kvsmith(&format!("inspect {old} -v")).ok().stdout;
    assert!(!shown.contains("fitted,"), "{shown}");
    scratch.make("joined", &format!("pack {art} {old} --model {model}"));
    // What a manifest says must be so.
    reseal_dump(&out, |manifest| {
        manifest["calibration"]["kinds"] =
            json!([{ "kind": "text", "blocks": 5, "fitted_tokens": 257, "held_out_tokens": 63 }]);
        manifest["calibration"]["documents"] = json!([]);
    });
    kvsmith(&format!("signs --dump {out} -o {}", scratch.path("none"))).fails(
        1,
        "`calibration` does not match",
        "recreate",
    );
}

/// Keys, queries and values of every layer, those of all blocks in a row.
fn states(model: &str, blocks: &[Vec<u32>]) -> Vec<[Array3<f32>; 3]> {
    let decoder = Decoder::open(Path::new(model)).unwrap();
    let blocks: Vec<Vec<Rows>> = blocks.iter().map(|ids| captured(&decoder, ids)).collect();
    let layer = |i: usize| {
        let parts: [fn(&Rows) -> ArrayView3<f32>; 3] =
            [|s| s.k.pre.view(), |s| s.q.pre.view(), |s| s.v.view()];
        parts.map(|part| {
            let all: Vec<_> = blocks.iter().map(|layers| part(&layers[i])).collect();
            concatenate(Axis(1), &all).unwrap()
        })
    };
    (0..decoder.config.n_layers()).map(layer).collect()
}

#[test]
fn states_are_those_of_the_model_rounded_to_the_dtype() {
    let scratch = Scratch::new();
    for name in ["llama_llama3", "qwen2_bias", "mistral_sliding"] {
        let model = checkpoint(name);
        let texts = documents(&[40, 7], 5);
        let tokens = scratch.tokens("tokens.json", &texts);
        let expected = states(&model, &texts);
        for dtype in ["f32", "f16", "bf16"] {
            let options = format!("--tokens {tokens} --queries --values --dtype {dtype}");
            let out = dump(&scratch, &model, &format!("{name}-{dtype}"), &options);
            for (i, of_layer) in expected.iter().enumerate() {
                let tensors = read_tensors(format!("{out}/layer-{i:05}.safetensors"));
                for (state, values) in ["k_pre", "q_pre", "v"].iter().zip(of_layer) {
                    let bytes: Vec<u8> = match dtype {
                        "f32" => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
                        "f16" => values
                            .iter()
                            .flat_map(|x| f16::from_f32(*x).to_le_bytes())
                            .collect(),
                        _ => values
                            .iter()
                            .flat_map(|x| bf16::from_f32(*x).to_le_bytes())
                            .collect(),
                    };
                    assert_eq!(tensors[*state].bytes, bytes, "{name} {dtype} layer {i} {state}");
                }
            }
        }
    }
}

/// Prompts in bf16 need weights in bf16, and a processor that has instructions for them.
#[test]
fn prompts_are_multiplied_in_bf16_on_request() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_llama3");
    let texts = documents(&[40], 5);
    let tokens = scratch.tokens("tokens.json", &texts);
    let command = |model: &str, name: &str| {
        let out = scratch.path(name);
        format!("dump --model {model} --tokens {tokens} --dtype f32 --precision bf16 --device cpu -o {out}")
    };
    let (needs, hint) = ("needs weights in BF16", "omit --precision");
    kvsmith(&command(&checkpoint("qwen2_bias"), "other")).fails(2, needs, hint);
    let bundled = root().join("calib-data/model");
    let run = format!(
        "run --model {} --prompt word --max-new 1 --device cpu --precision bf16",
        bundled.display()
    );
    kvsmith(&format!("{run} --weights q8")).fails(2, needs, hint);
    let rounded = kvsmith(&command(&model, "rounded"));
    if pairs::check().is_err() {
        rounded.fails(1, "AVX512-BF16", hint);
        kvsmith(&run).fails(1, "AVX512-BF16", hint);
        return;
    }
    rounded.ok();
    kvsmith(&run).ok();
    // The dump and what is made from it say so, and are not joined with what was made without.
    let (rounded, plain) = (scratch.path("rounded"), scratch.path("plain"));
    kvsmith(&format!(
        "dump --model {model} --tokens {tokens} --dtype f32 --device cpu -o {plain}"
    ))
    .ok();
    let signs = |dump: &str, name: &str| scratch.make(name, &format!("signs --dump {dump} --device cpu"));
    let parts = [signs(&rounded, "rounded-signs"), signs(&plain, "plain-signs")];
    let precision = |part: &str| kvsmith(&format!("inspect {part} --json")).json()["precision"].clone();
    assert_eq!(
        parts.each_ref().map(|part| precision(part)),
        [json!("bf16"), Value::Null]
    );
    let wpq = scratch.make("wpq", &format!("wpq --dump {rounded} --device cpu"));
    let packed = format!(
        "pack {} {wpq} --model {model} -o {}",
        parts[1],
        scratch.path("packed")
    );
    kvsmith(&packed).fails(1, "different values of `precision`", "same dump");
    let expected = &states(&model, &texts)[0][0];
    let found = read_tensors(format!("{}/layer-00000.safetensors", scratch.path("rounded")));
    let found: Vec<f32> = bytemuck::pod_collect_to_vec(&found["k_pre"].bytes);
    let largest = expected.iter().fold(0.0f32, |a, x| a.max(x.abs()));
    let off = expected.iter().zip(found).map(|(a, b)| (a - b).abs());
    let off = off.fold(0.0, f32::max);
    assert!(off > 0.0 && off < 0.05 * largest, "{off} of {largest}");
}

/// Angular frequencies and attention factor of two golden checkpoints, written out.
fn frequencies(name: &str, d: usize) -> (Vec<f64>, f64) {
    let plain: Vec<f64> = (0..d / 2)
        .map(|i| 10_000f64.powf(-(2.0 * i as f64) / d as f64))
        .collect();
    // Both YaRN models stretch a context of 32 by 4.
    let yarn = |fast: f64, slow: f64| {
        let turns = |count: f64| {
            d as f64 * (32.0 / (count * 2.0 * std::f64::consts::PI)).ln() / (2.0 * 10_000f64.ln())
        };
        let (low, high) = (
            turns(fast).floor().max(0.0),
            turns(slow).ceil().min(d as f64 - 1.0),
        );
        let mixed = plain.iter().enumerate().map(|(i, w)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            w / 4.0 * ramp + w * (1.0 - ramp)
        });
        mixed.collect()
    };
    match name {
        "llama_yarn" => (yarn(32.0, 1.0), 0.1 * 4f64.ln() + 1.0),
        "qwen3_yarn" => (yarn(4.0, 0.5), 1.25),
        _ => (plain, 1.0),
    }
}

#[test]
fn moments_are_sums_of_rotated_queries() {
    let scratch = Scratch::new();
    for (name, h, g, d) in [
        ("qwen2_sliding", 4, 2, 8),
        ("llama_yarn", 3, 1, 16),
        ("qwen3_yarn", 2, 1, 128),
    ] {
        let model = checkpoint(name);
        let tokens = scratch.tokens("tokens.json", &documents(&[100, 90, 60], 6));
        for position in [2048usize, 0, 7] {
            let which = format!("--tokens {tokens} --queries --dtype f32 --wrope-position {position}");
            let out = dump(&scratch, &model, &format!("{name}-{position}"), &which);
            let held_out = tokens_of(&out)["held_out"].bytes.clone();
            let kept: Vec<usize> = (0..held_out.len()).filter(|i| held_out[*i] == 0).collect();
            assert!(kept.len() < held_out.len());
            let moments = read_tensors(format!("{out}/moments.safetensors"));
            let own = tokens_of(&out)["position"].u32s();
            let counts = moments["count"].u64s();
            assert!(
                counts.into_iter().all(|n| n == (kept.len() * h / g) as u64),
                "{name}"
            );
            let (frequencies, factor) = frequencies(name, d);
            let rotate = |q: ArrayView1<f32>, position: usize| {
                let mut rotated = Array1::zeros(d);
                for (i, w) in frequencies.iter().enumerate() {
                    // The model takes the angle in f32.
                    let (sin, cos) = f64::from(position as f32 * *w as f32).sin_cos();
                    let (a, b) = (f64::from(q[i]), f64::from(q[i + d / 2]));
                    rotated[i] = factor * (a * cos - b * sin);
                    rotated[i + d / 2] = factor * (b * cos + a * sin);
                }
                rotated
            };
            let at_b = |q: ArrayView1<f32>, _: usize| rotate(q, position);
            let before = |q: ArrayView1<f32>, _: usize| q.mapv(f64::from);
            let at_own = |q: ArrayView1<f32>, row: usize| rotate(q, own[row] as usize);
            type Rotate<'a> = &'a dyn Fn(ArrayView1<f32>, usize) -> Array1<f64>;
            let tensors: [(&str, Rotate); 3] = [
                ("sum_qq", &at_b),
                ("sum_qq_pre", &before),
                ("sum_qq_rope", &at_own),
            ];
            for (tensor, rotated) in tensors {
                for (layer, sums) in moments[tensor].f64s().chunks(g * d * d).enumerate() {
                    let q = read_tensors(format!("{out}/layer-{layer:05}.safetensors"))["q_pre"].f32s();
                    let q = ArrayView3::from_shape((h, held_out.len(), d), &q).unwrap();
                    // A2ATS, arXiv 2502.12665, Eq. 10 and 13, in f64.
                    let mut exact = Array3::<f64>::zeros((g, d, d));
                    for (head, q) in q.outer_iter().enumerate() {
                        for i in &kept {
                            let qt = rotated(q.row(*i), *i);
                            let mut exact = exact.index_axis_mut(Axis(0), head / (h / g));
                            exact += &(&qt.view().insert_axis(Axis(1)) * &qt.view().insert_axis(Axis(0)));
                        }
                    }
                    for (head, (sum, exact)) in sums.chunks(d * d).zip(exact.outer_iter()).enumerate() {
                        let exact = exact.as_slice().unwrap();
                        let norm = |x: &[f64]| x.iter().map(|v| v * v).sum::<f64>().sqrt();
                        let difference: Vec<f64> = sum.iter().zip(exact).map(|(a, b)| a - b).collect();
                        // Up to 256 products are summed in f32: 256 x 2^-24 at the very most.
                        let error = norm(&difference) / norm(exact);
                        assert!(
                            error < 1.6e-5,
                            "{name} position {position} {tensor} layer {layer} head {head}: {error}"
                        );
                    }
                }
            }
        }
    }
}

/// The sums before rotation do not depend on the position, so that runs over other text merge whatever theirs was.
#[test]
fn only_one_sum_depends_on_the_position() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_yarn");
    let tokens = scratch.tokens("tokens.json", &documents(&[50, 30], 7));
    let moments = |position: usize| {
        let options = format!("--tokens {tokens} --wrope-position {position}");
        let out = dump(&scratch, &model, &format!("at-{position}"), &options);
        read_tensors(format!("{out}/moments.safetensors"))
    };
    let (mut near, mut far) = (moments(3), moments(2048));
    assert_ne!(near.remove("sum_qq"), far.remove("sum_qq"));
    assert_eq!(
        near.keys().collect::<Vec<_>>(),
        ["count", "sum_qq_pre", "sum_qq_rope"]
    );
    assert_eq!(near, far);
}

#[test]
fn the_moments_command_gives_the_same_bytes() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_yarn");
    let tokens = scratch.tokens("tokens.json", &documents(&[50, 300, 20], 7));
    let options = format!("--tokens {tokens} --queries --dtype f32");
    let standard = dump(&scratch, &model, "standard", &options);
    let near = dump(&scratch, &model, "near", &format!("{options} --wrope-position 9"));
    let read = |path: &str| std::fs::read(path).unwrap();
    let again = scratch.path("again");
    for (from, position, of) in [
        (&standard, "", &standard),
        (&standard, "--wrope-position 9", &near),
        (&near, "", &near),
    ] {
        scratch.make("again", &format!("moments --dump {from} {position}"));
        assert_eq!(read(&again), read(&format!("{of}/moments.safetensors")));
    }
    assert_ne!(read(&again), read(&format!("{standard}/moments.safetensors")));
}

/// A copy of a golden checkpoint with a tokenizer.
fn text_model(scratch: &Scratch, name: &str, post_processor: Value, config: Option<Value>) -> String {
    let model = scratch.model(name, "llama_default");
    std::fs::write(format!("{model}/tokenizer.json"), tokenizer(post_processor)).unwrap();
    if let Some(config) = config {
        std::fs::write(format!("{model}/tokenizer_config.json"), config.to_string()).unwrap();
    }
    model
}

#[test]
fn documents_and_uuids() {
    let scratch = Scratch::new();
    let model = text_model(&scratch, "model", Value::Null, None);
    let a = scratch.write("a.txt", "one document\nof two lines");
    let b = scratch.write(
        "b.jsonl",
        "{\"text\": \"first\"}\n\n{\"text\": \"second one\", \"n\": 1}\n{\"text\": \"\"}\n",
    );
    let text = "one document\nof two lines";
    let out = dump(
        &scratch,
        &model,
        "all",
        &format!("--text {a} {b} --uuid-tokens 0"),
    );
    let t = tokens_of(&out);
    let expected = [text, "first", "second one"].map(character_ids);
    assert_eq!(t["ids"].u32s(), expected.concat());
    assert_eq!(t["block_start"].u32s(), [0, 25, 30, 40]);

    // A byte order mark and Windows line ends are not text.
    let marked = scratch.write(
        "c.jsonl",
        "\u{feff}{\"text\": \"first\"}\r\n{\"text\": \"second one\"}\r\n",
    );
    let marks = dump(
        &scratch,
        &model,
        "marked",
        &format!("--text {marked} --uuid-tokens 0"),
    );
    assert_eq!(tokens_of(&marks)["ids"].u32s(), expected[1..].concat());

    let out = dump(
        &scratch,
        &model,
        "cut",
        &format!("--text {a} {b} --uuid-tokens 0 --max-tokens 28"),
    );
    assert_eq!(
        tokens_of(&out)["ids"].u32s(),
        [&character_ids(text)[..], &character_ids("fir")].concat()
    );

    // UUIDs come after the text, in blocks of their own, of which some are held out.
    let uuids = |name: &str, seed: u64| {
        let options = format!("--text {a} --max-tokens 12 --uuid-tokens 100 --seq-len 40 --seed {seed}");
        tokens_of(&dump(&scratch, &model, name, &options))
    };
    let t = uuids("uuids", 3);
    let ids = t["ids"].u32s();
    assert_eq!(t["block_start"].u32s(), [0, 12, 52, 92, 112]);
    assert_eq!(ids[..12], character_ids(text)[..12]);
    let character = |id: &u32| ALPHABET.chars().nth(*id as usize - 3).unwrap();
    let written: String = ids[12..].iter().map(character).collect();
    let list: Vec<&str> = written.split(", ").collect();
    assert_eq!(list.len(), 3, "{written}");
    for uuid in &list[..2] {
        let parts: Vec<usize> = uuid.split('-').map(str::len).collect();
        assert_eq!(parts, [8, 4, 4, 4, 12], "{written}");
        assert!(
            uuid.chars().all(|c| c == '-' || c.is_ascii_hexdigit()),
            "{written}"
        );
    }
    assert_ne!(list[0], list[1]);
    let held_out = &t["held_out"].bytes;
    assert_eq!(
        held_out[..12],
        [&[0u8; 11][..], &[1]].concat(),
        "the last part of the only text block"
    );
    let blocks = [&held_out[12..52], &held_out[52..92], &held_out[92..]];
    assert_eq!(
        blocks.iter().filter(|b| b[0] == 1).count(),
        1,
        "one block of UUIDs"
    );
    assert_eq!(uuids("same", 3), t);
    assert_ne!(uuids("other", 4)["ids"].u32s(), ids);
}

#[test]
fn special_tokens() {
    let template = json!({
        "type": "TemplateProcessing", "pair": [],
        "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
        "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
    });
    let text = character_ids("text");
    // The tokenizer's post-processor, tokenizer_config.json, and the token before the text; 1 is that of config.json.
    const CASES: &str = r#"
        none  | null                                                           |
        none  | {"add_bos_token": false, "bos_token": "</s>"}                  |
        none  | {"bos_token": "</s>"}                                          |
        none  | {"add_bos_token": true, "bos_token": "</s>"}                   | 2
        none  | {"add_bos_token": true, "bos_token": {"content": "</s>"}}      | 2
        none  | {"add_bos_token": true, "bos_token": null}                     | 1
        <s>   | null                                                           | 1
        <s>   | {"add_bos_token": true, "bos_token": "</s>"}                   | 1
    "#;
    for [processor, config, bos] in table(CASES) {
        let bos: Option<u32> = bos.parse().ok();
        let expected: Vec<u32> = bos.into_iter().chain(text.clone()).collect();
        let post_processor = if processor == "none" {
            &Value::Null
        } else {
            &template
        };
        let read: Option<Value> = serde_json::from_str(config).unwrap();
        let scratch = Scratch::new();
        let model = text_model(&scratch, "model", post_processor.clone(), read);
        let file = scratch.write("text.txt", "text");
        let out = dump(
            &scratch,
            &model,
            "dump",
            &format!("--text {file} --uuid-tokens 0"),
        );
        assert_eq!(tokens_of(&out)["ids"].u32s(), expected, "{processor} {config}");
    }
    let scratch = Scratch::new();
    let unknown = json!({ "add_bos_token": true, "bos_token": "<begin>" });
    let model = text_model(&scratch, "model", Value::Null, Some(unknown));
    let file = scratch.write("text.txt", "text");
    let arguments = format!("dump --model {model} --text {file} -o {}", scratch.path("dump"));
    kvsmith(&arguments).fails(1, "bos_token `<begin>` is not in tokenizer.json", "");
}

#[test]
fn json_output() {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[30], 8));
    let out = scratch.path("dump");
    let json = kvsmith(&format!(
        "dump --model {model} --tokens {tokens} -o {out} --wrope-position 64 --json --device cpu"
    ))
    .json();
    assert_eq!(
        (&json["tokens"], &json["layers"], &json["device"]),
        (&json!(30), &json!(2), &json!("cpu"))
    );
    let quiet = kvsmith(&format!(
        "dump --model {model} --tokens {tokens} -o {out}2 --wrope-position 64 -q"
    ))
    .ok();
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str()), ("", ""));
    let same = |name: &str| {
        std::fs::read(format!("{out}/{name}")).unwrap() == std::fs::read(format!("{out}2/{name}")).unwrap()
    };
    assert!(
        scratch.list("dump").iter().all(|name| same(name)),
        "the same bytes again"
    );
}
