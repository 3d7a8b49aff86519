//! A GGUF file: its metadata, the configuration, tokenizer and chat template in them, and the model.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::model::chat::ChatTemplate;
use kvsmith::internal::model::tokenizer::Tokenizer;
use kvsmith::internal::model::{Decoder, ModelConfig};
use kvsmith_fuzz::{Folder, one_thread, small_model};
use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<Folder> = LazyLock::new(|| {
    one_thread();
    Folder::with_copies(&small_model(), &[])
});

fuzz_target!(|data: &[u8]| {
    FOLDER.write("model.gguf", data);
    let path = FOLDER.dir().join("model.gguf");
    let Ok(config) = ModelConfig::load(&path) else {
        return;
    };
    config.sizes().check().expect("valid sizes");
    if let Ok(tokenizer) = Tokenizer::open(&path, &config) {
        let _ = tokenizer.encode("a text");
    }
    let _ = ChatTemplate::open(&path);
    if let Ok(decoder) = Decoder::open(&path) {
        let layer = decoder.layer(0).expect("a layer");
        let weights = layer.weights();
        assert!(
            weights
                .iter()
                .all(|weight| weight.to_vec().len() == weight.rows() * weight.cols())
        );
    }
});
