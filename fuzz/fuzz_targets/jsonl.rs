//! Documents of a text file, tokenised: `.txt` if the first byte is `t`, else `.jsonl`.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::corpus::TextFiles;
use kvsmith::internal::model::tokenizer::Tokenizer;
use kvsmith_fuzz::{Folder, config, model};
use libfuzzer_sys::fuzz_target;

static BASE: LazyLock<(Folder, Tokenizer)> = LazyLock::new(|| {
    let tokenizer = Tokenizer::open(&model(), &config()).expect("a tokenizer");
    (Folder::new(), tokenizer)
});

fuzz_target!(|data: &[u8]| {
    let (folder, tokenizer) = &*BASE;
    let path = match data {
        [b't', text @ ..] => folder.write("a.txt", text),
        _ => folder.write("a.jsonl", data),
    };
    let files = TextFiles {
        paths: vec![path],
        field: None,
    };
    for ids in files
        .tokenise(&model(), tokenizer, 64, 8)
        .into_iter()
        .flat_map(|read| read.documents)
    {
        assert!(ids.len() <= 64);
        tokenizer.decode(&ids).expect("text");
    }
});
