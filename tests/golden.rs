//! The decoder against transformers: every family and rope type of `tests/fixtures/golden`.

mod common;

use std::path::PathBuf;

use common::{all_golden, prepared, relative_error};
use kvsmith::kv::packed::Center;
use kvsmith::kv::{Budget, KvType, sample};
use kvsmith::model::Decoder;
use kvsmith::runner::{Options, Session};
use kvsmith::store::Store;
use ndarray::{Array2, Array3};

struct Golden {
    dir: PathBuf,
    decoder: Decoder,
    store: Store,
    ids: Vec<u32>,
}

impl Golden {
    fn open(dir: PathBuf) -> Self {
        let decoder = Decoder::open(&dir).unwrap();
        let store = Store::open(&dir.join("golden.safetensors")).unwrap();
        let n = store.bytes("ids").unwrap().len() / 4;
        let ids = store.read("ids", &[n]).unwrap();
        Self {
            dir,
            decoder,
            store,
            ids,
        }
    }

    fn tensor(&self, name: &str, heads: usize) -> Array3<f32> {
        let shape = [heads, self.ids.len(), self.decoder.config.head_dim];
        Array3::from_shape_vec(shape, self.store.read(name, &shape).unwrap()).unwrap()
    }
}

#[test]
fn captured_states_match() {
    for golden in all_golden().map(Golden::open) {
        let c = &golden.decoder.config;
        let mut hidden: Array2<f32> = golden.decoder.embed(&golden.ids).unwrap();
        for i in 0..c.n_layers {
            let layer = golden.decoder.layer(i).unwrap();
            layer.forward(&golden.decoder.rope, hidden.view_mut(), |states, k_rope| {
                let check = |name: &str, heads, actual: &Array3<f32>| {
                    let error = relative_error(actual, &golden.tensor(&format!("layer{i}.{name}"), heads));
                    assert!(error < 1e-4, "{} layer {i} {name}: {error}", golden.dir.display());
                };
                check("q_pre", c.n_heads, &states.q_pre);
                check("k_pre", c.n_kv_heads, &states.k_pre);
                check("v", c.n_kv_heads, &states.v);
                // The k that attention used, both ours and that of transformers.
                check("k_rope", c.n_kv_heads, k_rope);
            });
        }
        let logits = golden.decoder.logits(hidden.row(golden.ids.len() - 1)).unwrap();
        let expected: Vec<f32> = golden.store.read("logits", &[c.vocab_size]).unwrap();
        let worst = logits
            .iter()
            .zip(&expected)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(worst < 1e-3, "{}: logits off by {worst}", golden.dir.display());
    }
}

/// Greedy tokens of `method` at `budget`, through the runner.
fn greedy(golden: &Golden, method: &str, budget: &str) -> Vec<u32> {
    let method = prepared(common::method(method), None, &golden.decoder);
    let options = Options {
        sinks: 2,
        window: 4,
        budget: budget.parse::<Budget>().unwrap(),
        kv: KvType::F32,
        packed: Center::Median.into(),
    };
    let mut session = Session::on_cpu(&golden.decoder, method.as_ref(), options, 64).unwrap();
    let mut logits = session.prefill(&golden.ids).unwrap();
    let mut out = Vec::new();
    while out.len() < 24 {
        let next = sample::greedy(logits.view()).unwrap();
        out.push(next);
        logits = session.step(next).unwrap();
    }
    out
}

#[test]
fn greedy_tokens_match() {
    for golden in all_golden().map(Golden::open) {
        let expected: Vec<u32> = golden.store.read("greedy", &[24]).unwrap();
        for method in ["full", "topk", "random", "streaming", "quest", "snapkv"] {
            assert_eq!(
                greedy(&golden, method, "1.0"),
                expected,
                "{} {}",
                golden.dir.display(),
                method
            );
        }
    }
}
