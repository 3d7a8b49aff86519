//! A needle file, for a model with a tokenizer.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::cmd::eval::needles::{Feeding, Reader};
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::tokenizer::Tokenizer;
use kvsmith_fuzz::{Folder, model, one_thread};
use libfuzzer_sys::fuzz_target;

struct Base {
    folder: Folder,
    decoder: Decoder,
    tokenizer: Tokenizer,
}

static BASE: LazyLock<Base> = LazyLock::new(|| {
    one_thread();
    let decoder = Decoder::open(&model()).expect("a model");
    let tokenizer = Tokenizer::open(&model(), &decoder.config).expect("a tokenizer");
    Base {
        folder: Folder::new(),
        decoder,
        tokenizer,
    }
});

fuzz_target!(|data: &[u8]| {
    let base = &*BASE;
    let path = base.folder.write("needles.jsonl", data);
    let reader = Reader {
        decoder: &base.decoder,
        tokenizer: Some(&base.tokenizer),
        decode_prompt: 16,
        feeding: Feeding::Decode,
    };
    let _ = reader.read(&path);
});
