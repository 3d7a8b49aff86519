//! `tokenizer.json` files that ask for endless work or memory, or on which the library panics: each ends soon, with an
//! error or with a result, and takes little memory.

mod common;

use std::path::Path;
use std::time::{Duration, Instant};

use common::*;
use kvsmith::internal::error::Error;
use kvsmith::internal::model::ModelConfig;
use kvsmith::internal::model::tokenizer::Tokenizer;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};

const TEXT: &str = "The quick brown fox, 123 \u{fdfa} \u{e9}lan \u{6f22}\u{5b57} <s>\n\n  aaaaaaaaa";

/// A tokenizer.json with these parts, and plain others.
fn with(parts: Value) -> Value {
    let mut whole: Value = serde_json::from_str(&tokenizer(Value::Null)).unwrap();
    let (whole_map, parts) = (whole.as_object_mut().unwrap(), parts.as_object().unwrap());
    whole_map.extend(parts.clone());
    whole
}

/// Base64, padded.
fn base64(bytes: &[u8]) -> String {
    let digits = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let group = |three: &[u8]| -> String {
        let n = (0..3).fold(0, |n, i| n << 8 | u32::from(*three.get(i).unwrap_or(&0)));
        let digit = |i: usize| {
            if i > three.len() {
                '='
            } else {
                char::from(digits[(n >> (18 - 6 * i)) as usize & 63])
            }
        };
        (0..4).map(digit).collect()
    };
    bytes.chunks(3).map(group).collect()
}

/// A normalizer with a table of SentencePiece: a trie of 32-bit units behind its length in bytes, and texts.
fn charsmap(trie_bytes: u32, trie: &[u32], texts: &[u8]) -> Value {
    let words = [&[trie_bytes], trie].concat();
    let words: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    json!({ "type": "Precompiled", "precompiled_charsmap": base64(&[&words, texts].concat()) })
}

/// A trie that has one entry: `a` becomes the first text.
fn trie_of_a() -> Vec<u32> {
    let mut units = vec![0; 1024];
    units[usize::from(b'a')] = u32::from(b'a') | 1 << 8 | 0x200 << 10;
    units
}

fn sequence(kind: &str, part: &Value, times: usize) -> Value {
    json!({ "type": "Sequence", kind: vec![part; times] })
}

/// Writes a tokenizer.json into the folder of a model.
struct Model {
    scratch: Scratch,
    dir: String,
    config: ModelConfig,
}

impl Model {
    fn new() -> Self {
        let scratch = Scratch::new();
        let dir = scratch.model("model", "llama_default");
        let config = ModelConfig::load(Path::new(&dir)).unwrap();
        Self { scratch, dir, config }
    }

    /// Opens the tokenizer, tokenises a text and makes a text of the ids.
    fn round(&self, file: &[u8], text: &str) -> Result<(Vec<u32>, String), Error> {
        self.scratch.write("model/tokenizer.json", file);
        let tokenizer = Tokenizer::open(Path::new(&self.dir), &self.config)?;
        let ids = tokenizer.encode(text)?;
        let decoded = tokenizer.decode(&ids)?;
        Ok((ids, decoded))
    }
}

/// The most memory that this process and those that it has waited for had, in MiB.
fn peak_mib() -> i64 {
    let peak = |who| {
        // SAFETY: a plain struct of numbers, which the call fills.
        let usage = unsafe {
            let mut usage: libc::rusage = std::mem::zeroed();
            assert_eq!(libc::getrusage(who, &mut usage), 0);
            usage
        };
        usage.ru_maxrss >> 10
    };
    peak(libc::RUSAGE_SELF).max(peak(libc::RUSAGE_CHILDREN))
}

/// Hostile files with what their errors say.
fn cases() -> Vec<(Value, &'static str)> {
    let double = json!({ "type": "Replace", "pattern": { "String": "a" }, "content": "aa" });
    let bytes = json!({ "type": "ByteLevel" });
    let prepend = json!({ "type": "Prepend", "prepend": "x".repeat(1 << 20) });
    let piece = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let template = |single: Value, special: Value| {
        json!({ "post_processor": {
            "type": "TemplateProcessing", "single": single, "pair": [piece], "special_tokens": special,
        } })
    };
    let bos = json!({ "SpecialToken": { "id": "<s>", "type_id": 0 } });
    let many = json!({ "<s>": { "id": "<s>", "ids": vec![1; 50_000], "tokens": vec!["<s>"; 50_000] } });
    let limit = "limit";
    let word = json!({
        "id": 3, "content": "aaaa", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": true, "special": false,
    });
    vec![
        // A length of 4 GB, then of what is there; one entry of a megabyte for each `a`.
        (with(json!({ "normalizer": charsmap(u32::MAX, &[], b"") })), limit),
        (with(json!({ "normalizer": charsmap(4096, &[0; 1024], b"") })), ""),
        (
            with(json!({ "normalizer": charsmap(4096, &trie_of_a(), &[b'x'; 1 << 20]) })),
            "",
        ),
        // Normalizers that multiply the text, the added tokens too.
        (
            with(json!({ "normalizer": sequence("normalizers", &double, 40) })),
            limit,
        ),
        (
            with(json!({ "normalizer": sequence("normalizers", &bytes, 40) })),
            limit,
        ),
        (
            with(json!({ "normalizer": sequence("normalizers", &prepend, 40) })),
            limit,
        ),
        (
            with(json!({ "normalizer": sequence("normalizers", &double, 40), "added_tokens": [word] })),
            limit,
        ),
        // Post-processors that repeat it.
        (
            with(template(json!(vec![piece.clone(); 20_000]), json!({}))),
            limit,
        ),
        (with(template(json!(vec![bos.clone(); 5000]), many)), limit),
        (with(template(json!([bos]), json!({}))), "contradict"),
        // Decoders that multiply it.
        (
            with(json!({ "decoder": sequence("decoders", &double, 5) })),
            "its decoder can make a text",
        ),
        (
            with(json!({ "decoder": {
                "type": "Replace", "pattern": { "Regex": "." }, "content": "x".repeat(1000),
            } })),
            "its decoder can make a text",
        ),
        (
            with(
                json!({ "decoder": { "type": "Strip", "content": "a", "start": 1u64 << 40, "stop": 1u64 << 40 } }),
            ),
            "",
        ),
        // Numbers beyond all measure.
        (
            with(json!({ "pre_tokenizer": { "type": "FixedLength", "length": 0 } })),
            "contradict",
        ),
        (
            with(json!({ "pre_tokenizer": { "type": "FixedLength", "length": 1u64 << 63 } })),
            "",
        ),
        (
            with(json!({ "padding": {
                "strategy": { "Fixed": 1_000_000_000_000_u64 }, "direction": "Right", "pad_to_multiple_of": 1u64 << 62,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "",
            } })),
            "",
        ),
        (
            with(json!({ "truncation": {
                "direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 1u64 << 62,
            } })),
            "",
        ),
        (
            with(json!({ "model": {
                "type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "",
                "max_input_chars_per_word": 1u64 << 63, "vocab": { "<unk>": u32::MAX, "": 1, "a": 2 },
            } })),
            "",
        ),
        (
            with(json!({ "model": {
                "type": "BPE", "vocab": { "a": 0, "aa": 1 }, "merges": [["a", "a"]],
                "continuing_subword_prefix": "xxxxx",
            } })),
            "contradict",
        ),
        // Patterns that are too large, or try everything.
        (with(split("(((((a{1000}){1000}){1000}){1000}){1000})")), "regex"),
        (
            with(split(&format!("{}a{}", "(".repeat(50_000), ")".repeat(50_000)))),
            "nested",
        ),
        (with(split("(?:(?=a)a){4000000000}")), ""),
        (with(split(r"(?:a+)+(?!a)c|(a*)*\1b")), ""),
        (with(sequence_of_splits(4000)), limit),
    ]
}

fn split(pattern: &str) -> Value {
    json!({ "pre_tokenizer": {
        "type": "Split", "pattern": { "Regex": pattern }, "behavior": "Isolated", "invert": false,
    } })
}

/// Patterns each of which takes megabytes.
fn sequence_of_splits(times: usize) -> Value {
    let part = &split(r"\w{80}")["pre_tokenizer"];
    json!({ "pre_tokenizer": sequence("pretokenizers", part, times) })
}

#[test]
fn hostile_tokenizers_end_soon() {
    let model = Model::new();
    let text = TEXT.repeat(50);
    for (file, culprit) in cases() {
        let file = file.to_string();
        let start = Instant::now();
        let outcome = model.round(file.as_bytes(), &text);
        let (took, shown) = (start.elapsed(), file.chars().take(300).collect::<String>());
        assert!(took < Duration::from_secs(10), "{took:?}: {shown}");
        assert!(peak_mib() < 900, "{} MiB: {shown}", peak_mib());
        let Err(error) = outcome else {
            assert_eq!(culprit, "", "no error: {shown}");
            continue;
        };
        let limits = ["MB of memory or is nested too deeply", "does not finish"];
        let said = error.to_string();
        let expected = match culprit {
            "limit" => limits.into_iter().any(|limit| said.contains(limit)),
            _ => said.contains(culprit),
        };
        assert!(expected, "{said}: {shown}");
        assert!(
            error
                .advice()
                .is_some_and(|hint| hint.contains("tokenizer.json again")),
            "{said}"
        );
        assert_eq!(error.exit_code(), 1);
    }
}

/// Tokenizers of every kind, with small vocabularies.
fn kinds() -> Vec<Value> {
    let letters: Vec<String> = "\u{2581}abcdefghijklmnopqrstuvwxyz,.0123456789 \u{120}\u{10a}"
        .chars()
        .map(String::from)
        .collect();
    let pieces = [
        "<unk>",
        "<s>",
        "</s>",
        "th",
        "the",
        "\u{2581}the",
        "aa",
        "aaaa",
        "<0x0A>",
        "##a",
    ];
    let tokens: Vec<&str> = pieces
        .into_iter()
        .chain(letters.iter().map(String::as_str))
        .collect();
    let vocab: Map<String, Value> = tokens
        .iter()
        .zip(0..)
        .map(|(t, id)| (t.to_string(), json!(id)))
        .collect();
    let scored: Vec<Value> = tokens
        .iter()
        .zip(1..)
        .map(|(t, i)| json!([t, -0.5 * f64::from(i)]))
        .collect();
    let merges = json!([
        ["t", "h"],
        ["th", "e"],
        ["\u{2581}", "the"],
        ["a", "a"],
        ["aa", "aa"]
    ]);
    let bytes =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let metaspace =
        json!({ "type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true });
    let replace =
        |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let single = json!([{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }]);
    let template = json!({
        "type": "TemplateProcessing", "single": single, "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }],
        "special_tokens": { "<s>": { "id": "<s>", "ids": [1], "tokens": ["<s>"] } },
    });
    vec![
        with(json!({
            "pre_tokenizer": {
                "type": "Sequence", "pretokenizers": [
                    split(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+(?!\S)|\s+")["pre_tokenizer"],
                    { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false },
                ],
            },
            "post_processor": { "type": "Sequence", "processors": [bytes, template] },
            "decoder": bytes,
            "model": {
                "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": true,
                "vocab": vocab, "merges": merges,
            },
        })),
        with(json!({
            "normalizer": { "type": "Sequence", "normalizers": [
                { "type": "Prepend", "prepend": "\u{2581}" }, replace(" ", "\u{2581}"),
            ] },
            "pre_tokenizer": null,
            "post_processor": template,
            "decoder": { "type": "Sequence", "decoders": [
                replace("\u{2581}", " "), { "type": "ByteFallback" }, { "type": "Fuse" },
                { "type": "Strip", "content": " ", "start": 1, "stop": 0 },
            ] },
            "model": {
                "type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
                "vocab": vocab, "merges": ["t h", "th e", "a a"],
            },
        })),
        with(json!({
            "normalizer": { "type": "Sequence", "normalizers": [
                charsmap(4096, &trie_of_a(), b"xyz\0bc\0"), { "type": "NFKC" }, { "type": "Strip", "strip_left": true, "strip_right": false },
            ] },
            "pre_tokenizer": metaspace,
            "post_processor": template,
            "decoder": metaspace,
            "model": { "type": "Unigram", "unk_id": 0, "vocab": scored, "byte_fallback": false },
        })),
        with(json!({
            "normalizer": { "type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true },
            "pre_tokenizer": { "type": "BertPreTokenizer" },
            "post_processor": { "type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1] },
            "decoder": { "type": "WordPiece", "prefix": "##", "cleanup": true },
            "model": {
                "type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100, "vocab": vocab,
            },
        })),
        with(json!({
            "normalizer": { "type": "Sequence", "normalizers": [{ "type": "Lowercase" }, { "type": "StripAccents" }, { "type": "NFD" }] },
            "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
                { "type": "Digits", "individual_digits": true }, { "type": "Punctuation", "behavior": "Isolated" },
                { "type": "CharDelimiterSplit", "delimiter": " " }, { "type": "FixedLength", "length": 5 },
            ] },
            "post_processor": { "type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": true, "add_prefix_space": true },
            "decoder": { "type": "CTC", "pad_token": "<unk>", "word_delimiter_token": "|", "cleanup": true },
            "truncation": { "direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 2 },
            "padding": {
                "strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "<unk>",
            },
        })),
    ]
}

/// Changes one place of a JSON value at random: a number, a text, a list, an object or anything at all.
fn mutate(value: &mut Value, rng: &mut ChaCha8Rng) {
    let count = value.as_array().map_or(0, Vec::len) + value.as_object().map_or(0, Map::len);
    if count > 0 && rng.gen_bool(0.8) {
        let i = rng.gen_range(0..count);
        let child = match value {
            Value::Array(list) => list.get_mut(i),
            Value::Object(map) => map.values_mut().nth(i),
            _ => None,
        };
        return mutate(child.unwrap(), rng);
    }
    let numbers = [
        0,
        1,
        2,
        3,
        255,
        1 << 31,
        u64::from(u32::MAX),
        1 << 40,
        i64::MAX as u64,
        u64::MAX,
    ];
    let texts = [
        "", "a", " ", "\u{2581}", "<s>", "\0", "\u{fffd}", "(a+)+$", "(?=", "$1", "A", "B", "##",
    ];
    *value = match (value.take(), rng.gen_range(0..6)) {
        (Value::Array(mut list), 0) if !list.is_empty() => {
            list.remove(rng.gen_range(0..list.len()));
            Value::Array(list)
        }
        (Value::Array(list), 1) if !list.is_empty() => {
            let times = *[2, 10, 40].choose(rng).unwrap();
            list.iter().cloned().cycle().take(list.len() * times).collect()
        }
        (Value::Object(mut map), 0..3) if !map.is_empty() => {
            let name = map.keys().nth(rng.gen_range(0..map.len())).unwrap().clone();
            map.remove(&name);
            Value::Object(map)
        }
        (Value::String(text), 0..3) if !text.is_empty() => {
            let mut chars: Vec<char> = text.chars().collect();
            let i = rng.gen_range(0..chars.len());
            match rng.gen_range(0..3) {
                0 => chars[i] = char::from(rng.gen_range(32..127)),
                1 => chars.truncate(i),
                _ => chars = chars.repeat(*[2, 1000].choose(rng).unwrap()),
            }
            json!(chars.into_iter().collect::<String>())
        }
        (Value::Bool(own), 0..4) => json!(!own),
        (_, 0 | 1) => json!(numbers.choose(rng)),
        (_, 2) => json!([-1.0, 1e308, -1e-300].choose(rng)),
        (_, 3) => json!(texts.choose(rng)),
        (_, 4) => Value::Null,
        (_, _) => json!([{}]),
    };
}

#[test]
fn changed_tokenizers_work_or_say_why_not() {
    let model = Model::new();
    let kinds = kinds();
    for kind in &kinds {
        let (ids, _) = model.round(kind.to_string().as_bytes(), TEXT).unwrap();
        assert!(ids.len() > 5, "{ids:?}");
    }
    let mut rng = ChaCha8Rng::seed_from_u64(0);
    let (mut worked, mut failed) = (0, 0);
    for _ in 0..200 {
        let mut file = kinds.choose(&mut rng).unwrap().clone();
        for _ in 0..rng.gen_range(1..4) {
            mutate(&mut file, &mut rng);
        }
        let start = Instant::now();
        match model.round(file.to_string().as_bytes(), TEXT) {
            Ok(_) => worked += 1,
            Err(error) => {
                failed += 1;
                assert!(error.advice().is_some(), "{error}: {file}");
                assert_eq!(error.exit_code(), 1, "{error}: {file}");
            }
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{file}");
    }
    assert!(worked > 20 && failed > 20, "{worked} worked, {failed} failed");
    assert!(peak_mib() < 900, "{} MiB", peak_mib());
}
