//! The model that `make real` prepares, against transformers; its texts, and the tasks made from them.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::common::golden::{exact_logits, generate, options};
use crate::common::{Scratch, json_lines, make_tasks, method, number, prepared, root};
use kvsmith::internal::kv::KvType;
use kvsmith::internal::kv::sample::greedy;
use kvsmith::internal::model::chat::{ChatTemplate, Message};
use kvsmith::internal::model::tokenizer::Tokenizer;
use kvsmith::internal::model::{Decoder, ModelConfig};
use kvsmith::internal::runner::Session;
use kvsmith::internal::store::hex;
use ndarray::Array1;
use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// What transformers computed, `tests/fixtures/real/smollm2.json`.
#[derive(Deserialize)]
struct Fixture {
    weights_sha256: String,
    prompts: Vec<Prompt>,
    encodings: Vec<Encoding>,
    chats: Vec<Chat>,
}

#[derive(Deserialize)]
struct Prompt {
    text: String,
    ids: Vec<u32>,
    /// Logits after the prompt by token id: the largest, and those of fixed ids.
    logits: HashMap<usize, f32>,
    best: u32,
    greedy: Vec<u32>,
}

#[derive(Deserialize)]
struct Encoding {
    text: String,
    ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Chat {
    messages: Vec<Value>,
    add_generation_prompt: bool,
    text: String,
}

fn fixture() -> Fixture {
    let text = std::fs::read_to_string(root().join("tests/fixtures/real/smollm2.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The folder of the model.
fn model() -> PathBuf {
    let folder = std::env::var_os("KVSMITH_REAL").expect("KVSMITH_REAL names what `make real` made");
    PathBuf::from(folder).join("model")
}

/// The GGUF file from which the folder's weights were dequantised and rounded to bf16.
fn gguf() -> PathBuf {
    let folder = model().with_file_name("gguf");
    folder.join("SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// The SHA-256 of a file.
fn digest(path: &Path) -> String {
    hex(&Sha256::digest(std::fs::read(path).unwrap()))
}

fn tokenizer() -> Tokenizer {
    Tokenizer::open(&model(), &ModelConfig::load(&model()).unwrap()).unwrap()
}

#[test]
#[ignore = "needs a real model; `make real` makes it and runs this test"]
fn weights_are_those_of_transformers() {
    let weights = model().join("model.safetensors");
    assert_eq!(digest(&weights), fixture().weights_sha256);
}

/// Largest error of a logit, as a share of the largest logit. Both sides compute in f32 in different orders.
const TOLERANCE: f32 = 1e-4;

/// Returns by how much logits differ from those of transformers, as a share of the largest one, and prints it.
fn off(what: &str, logits: &Array1<f32>, prompt: &Prompt) -> f32 {
    let largest = prompt.logits.values().fold(0.0f32, |m, x| m.max(x.abs()));
    let each = prompt.logits.iter();
    let off = each.map(|(id, expected)| (logits[*id] - expected).abs());
    let off = off.fold(0.0, f32::max) / largest;
    println!(
        "{what}, {} tokens: logits off by {off:.1e} of the largest",
        prompt.ids.len()
    );
    off
}

#[test]
#[ignore = "needs a real model; `make real` makes it and runs this test"]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    let decoder = Decoder::open(&model()).unwrap();
    for prompt in fixture().prompts {
        assert_eq!(prompt.greedy.len(), 24);
        let full = prepared(method("full"), None, &decoder);
        let mut session = Session::on_cpu(&decoder, full.as_ref(), options("1.0", KvType::F32), 64).unwrap();
        let (tokens, logits) = generate(&mut session, &prompt.ids, prompt.greedy.len());
        assert!(off("folder", &logits[0], &prompt) < TOLERANCE);
        assert_eq!(tokens, prompt.greedy);
        assert_eq!(tokens[0], prompt.best);
    }
}

/// The folder's weights are those of the file, rounded to bf16, of which transformers computed the logits. The file's own weights,
/// multiplied exactly, give logits that are close; an output projection that rounds its inputs to 8 bits moves them further.
#[test]
#[ignore = "needs a real model; `make real` makes it and runs this test"]
fn the_gguf_file_is_the_same_model() {
    let decoder = Decoder::open(&gguf()).unwrap();
    for prompt in fixture().prompts {
        let exact = exact_logits(&decoder, &prompt.ids, |_, _, _| ());
        assert!(off("GGUF, exact products", &exact, &prompt) < 0.005);
        assert_eq!(greedy(exact.view()).unwrap(), prompt.best);
        let full = prepared(method("full"), None, &decoder);
        let mut session = Session::on_cpu(&decoder, full.as_ref(), options("1.0", KvType::F32), 64).unwrap();
        let rounded = session.prefill(&prompt.ids).unwrap();
        assert!(off("GGUF, rounded inputs", &rounded, &prompt) < 0.02);
    }
}

#[test]
#[ignore = "needs a real model; `make real` makes it and runs this test"]
fn token_ids_are_those_of_transformers() {
    let fixture = fixture();
    let of_file = Tokenizer::open(&gguf(), &ModelConfig::load(&gguf()).unwrap()).unwrap();
    for tokenizer in [tokenizer(), of_file] {
        let prompts = fixture.prompts.iter().map(|prompt| (&prompt.text, &prompt.ids));
        let texts = fixture.encodings.iter().map(|row| (&row.text, &row.ids));
        for (text, ids) in texts.chain(prompts) {
            assert_eq!(&tokenizer.encode(text).unwrap(), ids, "{text:?}");
        }
    }
}

#[test]
#[ignore = "needs a real model; `make real` makes it and runs this test"]
fn chats_are_those_of_transformers() {
    let template = ChatTemplate::open(&model()).unwrap().expect("a chat template");
    for chat in fixture().chats {
        let message = |message: &Value| Message {
            role: message["role"].as_str().unwrap().to_owned().into(),
            content: message["content"].as_str().unwrap().to_owned(),
        };
        let messages: Vec<Message> = chat.messages.iter().map(message).collect();
        let text = template.render(&messages, chat.add_generation_prompt).unwrap();
        assert_eq!(text, chat.text);
    }
}

/// The files of a folder of texts, and the fewest tokens that each has.
const TEXTS: [(&str, usize, usize); 2] = [("text", 5, 60_000), ("final", 3, 25_000)];

#[test]
#[ignore = "needs a real model; `make real` makes it and runs this test"]
fn texts_are_as_listed_and_the_sets_apart() {
    let real = model().with_file_name("");
    for (folder, files, fewest) in TEXTS {
        let folder = real.join(folder);
        let manifest = std::fs::read_to_string(folder.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_str(&manifest).unwrap();
        assert_eq!(manifest["files"].as_object().unwrap().len(), files);
        for (name, facts) in manifest["files"].as_object().unwrap() {
            let file = folder.join(name);
            assert_eq!(facts["sha256"], digest(&file), "{name}");
            let tokens = tokenizer()
                .encode(&std::fs::read_to_string(file).unwrap())
                .unwrap()
                .len();
            println!("{name}: {tokens} tokens");
            assert!(tokens >= fewest, "{name}: {tokens} tokens");
        }
    }
    let text = |name: &str| std::fs::read_to_string(real.join(name)).unwrap();
    let calib = ["text/handbook-calib.txt", "text/python-calib.txt"]
        .map(text)
        .concat();
    let calib: HashSet<&str> = calib.lines().collect();
    let others = [
        "text/handbook-valid.txt",
        "text/python-valid.txt",
        "final/prose-final.txt",
        "final/source-final.txt",
        "final/dialogue-final.txt",
    ];
    for name in others {
        let other = text(name);
        // Lines of dialogue and of source are shorter than paragraphs, and short ones may be equal by chance.
        let long: Vec<&str> = other.lines().filter(|line| line.len() > 60).collect();
        let both = long.iter().filter(|line| calib.contains(**line)).count();
        assert!(!long.is_empty(), "{name}: no long line");
        assert!(
            both * 100 < long.len(),
            "{name}: {both} of {} lines are calibration text too",
            long.len()
        );
    }
}

#[test]
#[ignore = "needs a real model; `make real` makes it and runs this test"]
fn tasks_have_the_length_that_was_asked_for() {
    let (folder, scratch, tokenizer) = (model(), Scratch::new(), tokenizer());
    let haystack = folder.with_file_name("text").join("handbook-calib.txt");
    let file = folder.join("tokenizer.json");
    let arguments = format!("--lengths 1024,8192 --per-task 2 --tokenizer {}", file.display());
    let lines = make_tasks(&scratch.path("tasks.jsonl"), &haystack, &arguments);
    for line in json_lines(&lines) {
        let parts = ["prompt", "question", "answer"];
        let text: String = match line["turns"].as_array() {
            Some(turns) => turns
                .iter()
                .flat_map(|turn| parts.map(|part| turn[part].as_str().unwrap()))
                .collect(),
            None => parts[..2]
                .iter()
                .map(|part| line[*part].as_str().unwrap())
                .collect(),
        };
        let tokens = tokenizer.encode(&text).unwrap().len() as f64;
        let length = number(&line, "length");
        let share = (tokens + 40.0) / length;
        assert!(
            (0.97..=1.0).contains(&share),
            "{}: {tokens} tokens for {length}",
            line["task"]
        );
    }
}
