//! Models in GGUF: the same as the checkpoints that they were made from, and clear errors for anything else.
//!
//! `tests/fixtures/gguf` was written with the Python packages gguf and sentencepiece.

use std::path::{Path, PathBuf};

use kvsmith::internal::kv::KvType;
use kvsmith::internal::model::chat::{ChatTemplate, Message};
use kvsmith::internal::model::tokenizer::Tokenizer;
use kvsmith::internal::model::{Decoder, ModelConfig};
use kvsmith::internal::quant::{CHUNK, Quant};
use kvsmith::internal::runner::Session;
use kvsmith::internal::store::Store;
use ndarray::Array1;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::Value;

use crate::common::golden::{Golden, check_states, exact_logits, generate, options, worst};
use crate::common::{Scratch, checkpoint, kvsmith};

const CASES: [&str; 4] = ["llama_linear", "llama_llama3", "qwen2_bias", "qwen3_yarn"];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/gguf")
        .join(name)
}

/// A golden model, read from GGUF.
fn golden(case: &str) -> Golden {
    let mut golden = Golden::open(Path::new(&checkpoint(case)));
    golden.decoder = Decoder::open(&fixture(&format!("{case}.gguf"))).unwrap();
    golden
}

#[test]
fn states_and_tokens_are_those_of_transformers() {
    for case in CASES {
        let golden = golden(case);
        check_states(case, &golden);
        let prepared = golden.method("full");
        let mut session = Session::on_cpu(
            &golden.decoder,
            prepared.as_ref(),
            options("1.0", KvType::F32),
            64,
        )
        .unwrap();
        let (tokens, _) = generate(&mut session, &golden.ids, 24);
        assert_eq!(tokens, golden.greedy(), "{case}");
    }
}

#[test]
fn the_configuration_is_that_of_the_folder() {
    for case in CASES {
        let of_folder = ModelConfig::load(Path::new(&checkpoint(case))).unwrap();
        let of_file = ModelConfig::load(&fixture(&format!("{case}.gguf"))).unwrap();
        let (mut found, mut expected) = (of_file.canonical(), of_folder.canonical());
        // A GGUF file has it in f32, and relative to the usual factor.
        let factors = [&mut found, &mut expected].map(|config| config["rope"]["attention_factor"].take());
        if let [Some(found), Some(expected)] = factors.map(|factor| factor.as_f64()) {
            assert!(
                (found / expected - 1.0).abs() < 1e-6,
                "{case}: {found} {expected}"
            );
        }
        assert_eq!(found, expected, "{case}");
        assert_eq!(
            of_file.max_position_embeddings, of_folder.max_position_embeddings,
            "{case}"
        );
        assert_eq!(of_file.eos_token_ids, of_folder.eos_token_ids, "{case}");
    }
}

#[test]
fn blocks_are_decoded_as_by_gguf() {
    let store = Store::open(&fixture("blocks.safetensors")).unwrap();
    for (quant, _) in Quant::ALL {
        let name = |part: &str| format!("{}.{part}", quant.name());
        let blocks = store.bytes(&name("blocks")).unwrap().to_vec();
        let (values, bytes) = quant.block();
        let n = blocks.len() / bytes * values;
        assert_eq!(n, 3 * values, "{quant:?}");
        let expected: Vec<f32> = store.read(&name("values"), &[n]).unwrap();
        let mut found = vec![f32::NAN; n];
        quant.read(&blocks, 0, &mut found);
        assert_eq!(found, expected, "{quant:?}");
        assert_eq!(n % CHUNK, 0);
    }
}

#[test]
fn values_are_rounded_as_by_gguf() {
    let store = Store::open(&fixture("blocks.safetensors")).unwrap();
    let values: Vec<f32> = store.read("rounded", &[512]).unwrap();
    for quant in [Quant::Q8_0, Quant::Q4_0] {
        let expected = store.bytes(&format!("rounded.{}", quant.name())).unwrap();
        assert_eq!(quant.round(&values), expected, "{quant:?}");
    }
}

/// Prompts multiply the values themselves; single steps round their inputs to 8 bits.
#[test]
fn steps_of_a_quantised_model_are_close_to_its_prompts() {
    let decoder = Decoder::open(&fixture("mixed.gguf")).unwrap();
    let layer = decoder.layer(0).unwrap();
    let kinds: Vec<&str> = layer.weights().iter().map(|w| w.stored().name()).collect();
    assert_eq!(kinds, ["Q4_K", "Q6_K", "Q5_K", "Q5_1", "Q4_1", "Q6_K", "Q5_0"]);
    assert_eq!(decoder.head.weight.stored().name(), "Q4_0");
    let ids: Vec<u32> = (0..24).map(|i| i * 29 % 64).collect();
    let full = crate::common::prepared(crate::common::method("full"), None, &decoder);
    let mut session = Session::on_cpu(&decoder, full.as_ref(), options("1.0", KvType::F32), 64).unwrap();
    session.prefill(&ids[..6]).unwrap();
    for n in 7..=ids.len() {
        let exact = exact_logits(&decoder, &ids[..n], |_, _, _| ());
        let found = session.step(ids[n - 1]).unwrap();
        let norm = |x: &Array1<f32>| x.dot(x).sqrt();
        let off = norm(&(&found - &exact)) / norm(&exact);
        println!("{n} tokens: logits off by {off:.1e}");
        // A point of the grid is about 1 / 50 of a chunk's root mean square, and rounding is off by 0.3 points: by 0.006 in each of
        // five products in a row, which add up to 0.013; the caches of earlier steps have such errors too.
        assert!(off > 0.0 && off < 0.02, "{n} tokens: logits off by {off}");
    }
}

#[test]
fn byte_level_tokenizers_give_the_same_ids() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib-data/model");
    let config = ModelConfig::load(&folder).unwrap();
    let of_folder = Tokenizer::open(&folder, &config).unwrap();
    let file = fixture("byte_level.gguf");
    let of_file = Tokenizer::open(&file, &ModelConfig::load(&file).unwrap()).unwrap();
    let text = std::fs::read_to_string(folder.with_file_name("text.txt")).unwrap();
    let long: String = text.chars().take(20_000).collect();
    for text in [
        &long,
        "it's 12345  spaces\n\n\ttabs",
        "日本語 <|bos|> naïve 🙂",
        "",
        " ",
    ] {
        let expected = of_folder.encode(text).unwrap();
        assert_eq!(of_file.encode(text).unwrap(), expected, "{text}");
        assert_eq!(
            of_file.encode_raw(text).unwrap(),
            of_folder.encode_raw(text).unwrap()
        );
        assert_eq!(
            of_file.decode(&expected).unwrap(),
            of_folder.decode(&expected).unwrap()
        );
    }
    let template = ChatTemplate::open(&file).unwrap().unwrap();
    let message = Message {
        role: "user".into(),
        content: "hello".to_owned(),
    };
    assert_eq!(template.render(&[message], true).unwrap(), "<|bos|>hello<|eos|>");
}

#[test]
fn sentence_piece_tokenizers_give_the_ids_of_sentencepiece() {
    let file = fixture("sentence_piece.gguf");
    let tokenizer = Tokenizer::open(&file, &ModelConfig::load(&file).unwrap()).unwrap();
    let expected = std::fs::read_to_string(fixture("sentence_piece.json")).unwrap();
    let expected: Vec<Value> = serde_json::from_str(&expected).unwrap();
    assert!(expected.len() > 5);
    for case in expected {
        let text = case["text"].as_str().unwrap();
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).unwrap();
        assert_eq!(tokenizer.encode(text).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids[1..]).unwrap(), text);
    }
}

#[test]
fn commands_take_a_file_or_its_folder() {
    let scratch = Scratch::new();
    let model = fixture("llama_llama3.gguf");
    let folder = scratch.path("models");
    std::fs::create_dir(&folder).unwrap();
    std::fs::copy(&model, Path::new(&folder).join("tiny-q.gguf")).unwrap();
    let tokens = scratch.tokens("tokens.json", &crate::common::documents(&[200; 3], 1));
    let artifact = scratch.path("art");
    kvsmith(&format!(
        "calibrate --model {folder} --tokens {tokens} --size 8 --wrope-position 64 --no-verdict -o {artifact}"
    ))
    .ok();
    let inspected = kvsmith(&format!("inspect {artifact} --json")).ok().json();
    assert_eq!(inspected["model"]["name"], "tiny-q");
    let prompt = scratch.tokens("prompt.json", &crate::common::documents(&[120], 2));
    let run = |model: &str, more: &str| {
        kvsmith(&format!(
            "run --model {model} --artifact {artifact} --method wpq --tokens {prompt} --max-new 4 --json -q {more}"
        ))
    };
    let ids = |model: &str, more: &str| {
        let ids = run(model, more).ok().json()["ids"].clone();
        assert_eq!(ids.as_array().unwrap().len(), 4);
        ids
    };
    let of_file = ids(&model.display().to_string(), "");
    assert_eq!(of_file, ids(&folder, ""));
    // The folder that it was made from is another model.
    run(&checkpoint("llama_llama3"), "").fails(1, "was made for another model", "add --force");
    assert_eq!(of_file, ids(&checkpoint("llama_llama3"), "--force"));
    let plan = kvsmith(&format!("plan --model {folder}")).ok().stdout;
    assert!(plan.contains("tiny-q"), "{plan}");
}

#[test]
fn weights_are_rounded_on_request() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib-data/model");
    let ids: Vec<u32> = (2..26).collect();
    let logits = |weights: Option<Quant>| {
        let mut decoder = Decoder::open(&model).unwrap();
        if let Some(weights) = weights {
            decoder = decoder.rounded(Some(weights)).unwrap();
            assert_eq!(decoder.stored().unwrap().name(), weights.name());
            assert_eq!(decoder.head.weight.stored().name(), weights.name());
        }
        let full = crate::common::prepared(crate::common::method("full"), None, &decoder);
        let mut session = Session::on_cpu(&decoder, full.as_ref(), options("1.0", KvType::F32), 64).unwrap();
        session.prefill(&ids).unwrap()
    };
    let exact = logits(None);
    let size = worst(&exact, &(0.0 * &exact));
    let [eight, four] = [Quant::Q8_0, Quant::Q4_0].map(|quant| worst(&logits(Some(quant)), &exact) / size);
    assert!(eight > 0.0 && eight < 0.05, "{eight}");
    assert!(four > 2.0 * eight, "{four} {eight}");
    // The commands say which they took.
    let scratch = Scratch::new();
    let tokens = scratch.tokens("tokens.json", &crate::common::documents(&[160; 2], 1));
    let eval = format!(
        "eval --model {} --tokens {tokens} --decode 4 --methods streaming --budgets 0.5 --json -q",
        model.display()
    );
    assert_eq!(kvsmith(&eval).ok().json()["weights"], "BF16");
    assert_eq!(
        kvsmith(&format!("{eval} --weights q4")).ok().json()["weights"],
        "Q4_0"
    );
    let bench = format!(
        "bench decode --model {} --context 128 --runs 1 --methods full --device cpu --json -q",
        model.display()
    );
    let bytes = |more: &str| {
        let document = kvsmith(&format!("{bench}{more}")).ok().json();
        document["rows"][0]["weight_bytes"].as_f64().unwrap()
    };
    assert!((bytes(" --weights q8") / bytes("") - 34.0 / 64.0).abs() < 1e-9);
}

/// Replaces a text in a file by another one of the same length.
fn changed(from: &[u8], old: &str, new: &str) -> Vec<u8> {
    assert_eq!(old.len(), new.len());
    let at = from
        .windows(old.len())
        .position(|window| window == old.as_bytes());
    let mut out = from.to_vec();
    out[at.unwrap()..][..new.len()].copy_from_slice(new.as_bytes());
    out
}

#[test]
fn damaged_and_foreign_files_are_refused() {
    let scratch = Scratch::new();
    let whole = std::fs::read(fixture("llama_llama3.gguf")).unwrap();
    let path = scratch.path("model.gguf");
    let fails = |bytes: &[u8], message: &str, hint: &str| {
        std::fs::write(&path, bytes).unwrap();
        kvsmith(&format!("plan --model {path}")).fails(1, message, hint);
        assert_eq!(std::fs::read(&path).unwrap(), bytes, "the file was changed");
    };
    fails(
        &changed(&whole, "\u{5}\0\0\0\0\0\0\0llama", "\u{5}\0\0\0\0\0\0\0gemma"),
        "architecture `gemma` is not supported",
        "supported: llama",
    );
    fails(
        &changed(&whole, "token_embd", "token_embe"),
        "there is no matrix `token_embd.weight`",
        "damaged",
    );
    fails(
        b"GGUF",
        "the file ends before its header does",
        "download it again",
    );
    fails(b"GGML and more", "no GGUF file", "download it again");
    let mut version = whole.clone();
    version[4] = 1;
    fails(
        &version,
        "GGUF version 1 is not supported",
        "supported: versions 2 and 3",
    );
    version[4..8].copy_from_slice(&[0, 0, 0, 3]);
    fails(&version, "is not supported", "big-endian");
    let mut endless = whole.clone();
    endless[8..16].fill(0xff);
    fails(&endless, "too many", "damaged");
    fails(
        &whole[..whole.len() - 100],
        "is outside the file",
        "download it again",
    );
    let mut frequencies = whole.clone();
    let end = frequencies.len();
    // The divisors of the frequencies begin the tensors.
    let at = frequencies
        .windows(4)
        .rposition(|of| of == 8.0f32.to_le_bytes())
        .unwrap_or(end - 4);
    frequencies[at..at + 4].copy_from_slice(&7.5f32.to_le_bytes());
    fails(
        &frequencies,
        "are not those of Llama 3.1's rope",
        "give the Hugging Face folder",
    );
    // Two files in one folder: which one is meant?
    let folder = scratch.path("two");
    std::fs::create_dir(&folder).unwrap();
    for name in ["a.gguf", "b.gguf"] {
        std::fs::write(Path::new(&folder).join(name), &whole).unwrap();
    }
    kvsmith(&format!("plan --model {folder}")).fails(1, "contains weights in GGUF", "the GGUF file itself");
    let artifact = fixture("llama_llama3.gguf").display().to_string();
    kvsmith(&format!("inspect {artifact}")).fails(1, "is a GGUF file, not an artifact", "kvsmith calibrate");
}

/// No length in a header makes the program take memory or read beyond the file.
#[test]
fn every_truncated_or_flipped_header_ends_in_an_error_or_a_model() {
    let scratch = Scratch::new();
    let path = PathBuf::from(scratch.path("model.gguf"));
    let whole = std::fs::read(fixture("sentence_piece.gguf")).unwrap();
    let mut failed = 0;
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    for case in 0..400 {
        let mut bytes = whole.clone();
        match case % 2 {
            0 => bytes.truncate(rng.gen_range(0..whole.len())),
            _ => {
                let at = rng.gen_range(0..2000);
                bytes[at] = rng.r#gen();
            }
        }
        std::fs::write(&path, &bytes).unwrap();
        failed += usize::from(ModelConfig::load(&path).is_err());
    }
    assert!(failed > 200, "{failed}");
}
