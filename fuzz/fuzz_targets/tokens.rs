//! A file of token ids, cut into blocks of which some are held out. The first byte says how long and how many.
#![no_main]

use std::sync::LazyLock;

use kvsmith::internal::corpus::{Corpus, CorpusOptions, read_tokens};
use kvsmith_fuzz::{Folder, Input};
use libfuzzer_sys::fuzz_target;

static FOLDER: LazyLock<Folder> = LazyLock::new(Folder::new);

fuzz_target!(|data: &[u8]| {
    let mut input = Input::new(data);
    let how = input.byte();
    let Ok(documents) = read_tokens(&FOLDER.write("tokens.json", input.rest())) else {
        return;
    };
    let seq_len = usize::from(how % 8);
    let options = CorpusOptions {
        seq_len: None,
        max_tokens: 0,
        uuid_tokens: Some(0),
        holdout: f64::from(how / 8) / 24.0,
        seed: u64::from(how),
    };
    let Ok(corpus) = Corpus::cut(&documents, vec![7; usize::from(how % 3)], seq_len, &options) else {
        return;
    };
    let (n, manifest) = (corpus.n_tokens(), corpus.manifest());
    assert!((0..corpus.n_blocks()).all(|b| !corpus.block(b).is_empty() && corpus.block(b).end <= n));
    assert!(corpus.longest_block() <= seq_len);
    assert_eq!(corpus.positions().len(), n);
    let kept = corpus.kept().iter().filter(|kept| **kept).count();
    assert!(kept > 0 && kept + manifest.held_out_tokens == n);
});
