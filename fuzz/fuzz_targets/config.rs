//! `config.json`: the model configuration, its rotary embedding and a checkpoint that is opened with it.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::model::rope::Rope;
use kvsmith::internal::model::{Decoder, ModelConfig, ModelManifest};
use kvsmith_fuzz::{Folder, json, one_thread, small_model};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

/// A copy of a small checkpoint, and the configurations to change.
static BASE: LazyLock<(Folder, Vec<Value>)> = LazyLock::new(|| {
    one_thread();
    let folder = Folder::with_copies(&small_model(), &["model.safetensors", "config.json"]);
    let golden = small_model();
    let golden = golden.parent().expect("a parent");
    let config = |name: &str| {
        let text = std::fs::read(golden.join(name).join("config.json")).expect("a configuration");
        serde_json::from_slice(&text).expect("valid JSON")
    };
    let names = [
        "llama_default",
        "llama_llama3",
        "llama_yarn",
        "llama_linear",
        "mistral_sliding",
        "qwen2_sliding",
    ];
    let bases = names.into_iter().chain(["qwen3_yarn"]).map(config).collect();
    (folder, bases)
});

fuzz_target!(|data: &[u8]| {
    let (folder, bases) = &*BASE;
    let text = json(data, bases);
    let Ok(value) = serde_json::from_slice::<Value>(&text) else {
        return;
    };
    let Ok(config) = ModelConfig::parse(&value) else {
        return;
    };
    config.sizes().check().expect("valid sizes");
    let manifest = ModelManifest::new("model", &config, "0").expect("a manifest");
    manifest.check().expect("a valid manifest");
    assert_eq!(config.group() * config.n_kv_heads, config.n_heads);
    let table = Rope::new(&config.rope, config.head_dim).table(0..2);
    assert!(
        table
            .parts()
            .iter()
            .flat_map(|part| part.iter())
            .all(|x| x.is_finite())
    );
    folder.write("config.json", &text);
    if let Ok(decoder) = Decoder::open(folder.dir()) {
        decoder.embed(&[1]).expect("a valid model");
    }
});
