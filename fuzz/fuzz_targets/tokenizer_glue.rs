//! `tokenizer.json`: opened, then text encoded and the ids decoded.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::model::ModelConfig;
use kvsmith::internal::model::tokenizer::{TextStream, Tokenizer};
use kvsmith_fuzz::{Folder, config, json, share_counters};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

const TEXTS: [&str; 3] = ["", "a b", "The caf\u{e9} is \u{1f600}\u{301}  open.\n<s>12"];

struct Base {
    folder: Folder,
    config: ModelConfig,
    tokenizers: Vec<Value>,
}

static BASE: LazyLock<Base> = LazyLock::new(|| {
    share_counters();
    let bases = include_str!("../tokenizers.jsonl").lines();
    let tokenizers = bases
        .map(|line| serde_json::from_str(line).expect("valid JSON"))
        .collect();
    let folder = Folder::new();
    folder.write(
        "tokenizer_config.json",
        br#"{"add_bos_token": true, "bos_token": "a"}"#,
    );
    Base {
        folder,
        config: config(),
        tokenizers,
    }
});

fuzz_target!(|data: &[u8]| {
    let base = &*BASE;
    base.folder.write("tokenizer.json", &json(data, &base.tokenizers));
    let Ok(tokenizer) = Tokenizer::open(base.folder.dir(), &base.config) else {
        return;
    };
    // Every text is tokenised in a process of its own, which takes longer than all the rest.
    let text = TEXTS[data.len() % TEXTS.len()];
    let ids = match data.len() % 2 {
        0 => tokenizer.encode(text),
        _ => tokenizer.encode_raw(text),
    };
    let Ok(ids) = ids else {
        return;
    };
    let _ = tokenizer.decode(&ids);
    let mut stream = TextStream::new(Some(&tokenizer));
    for id in ids.into_iter().chain([0, 7, u32::MAX]) {
        let _ = stream.push(id);
    }
    let _ = stream.finish();
});
