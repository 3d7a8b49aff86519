//! The decoder against transformers: every family and rope type of `tests/fixtures/golden`.

use crate::common::golden::{Golden, all, generate, options, worst};
use crate::common::relative_error;
use kvsmith::kv::KvType;
use kvsmith::runner::Session;
use ndarray::{Array2, Array3};

#[test]
fn captured_states_match() {
    for (name, dir) in all() {
        let golden = Golden::open(&dir);
        let c = &golden.decoder.config;
        let mut hidden: Array2<f32> = golden.decoder.embed(&golden.ids).unwrap();
        for i in 0..c.n_layers {
            let layer = golden.decoder.layer(i).unwrap();
            layer.forward(&golden.decoder.rope, hidden.view_mut(), |states, k_rope| {
                let check = |tensor: &str, heads, actual: &Array3<f32>| {
                    let expected = golden.tensor(&format!("layer{i}.{tensor}"), heads);
                    let error = relative_error(actual, &expected);
                    assert!(error < 1e-4, "{name} layer {i} {tensor}: {error}");
                };
                check("q_pre", c.n_heads, &states.q_pre);
                check("k_pre", c.n_kv_heads, &states.k_pre);
                check("v", c.n_kv_heads, &states.v);
                // The k that attention used, both ours and that of transformers.
                check("k_rope", c.n_kv_heads, k_rope);
            });
        }
        let logits = golden.decoder.logits(hidden.row(golden.ids.len() - 1)).unwrap();
        let off = worst(&logits, &golden.logits().into());
        assert!(off < 1e-3, "{name}: logits off by {off}");
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
