//! The decoder against transformers: every family and rope type of `tests/fixtures/golden`.

use crate::common::golden::{Golden, all, check_states, generate, options};
use kvsmith::kv::KvType;
use kvsmith::runner::Session;

#[test]
fn captured_states_match() {
    for (name, dir) in all() {
        check_states(&name, &Golden::open(&dir));
    }
}

#[test]
fn greedy_tokens_match() {
    for (name, dir) in all() {
        let golden = Golden::open(&dir);
        for method in [
            "full",
            "topk",
            "random",
            "streaming",
            "quest",
            "pqcache",
            "randsign",
            "snapkv",
        ] {
            let (prepared, options) = (golden.method(method), options("1.0", KvType::F32));
            let mut session = Session::on_cpu(&golden.decoder, prepared.as_ref(), options, 64).unwrap();
            let (tokens, _) = generate(&mut session, &golden.ids, 24);
            assert_eq!(tokens, golden.greedy(), "{name} {method}");
        }
    }
}
