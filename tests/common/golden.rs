//! The models of `tests/fixtures/golden`, and what transformers computed with them.

use std::path::{Path, PathBuf};

use kvsmith::internal::compute::linear::FEW;
use kvsmith::internal::cuda::check_model;
use kvsmith::internal::kv::budget::Budget;
use kvsmith::internal::kv::map::ModelMaps;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::sample::greedy;
use kvsmith::internal::kv::{KvType, Limits};
use kvsmith::internal::method::Method;
use kvsmith::internal::model::{Decoder, ModelConfig, States};
use kvsmith::internal::runner::{DecodeOptions, Session};
use kvsmith::internal::store::Store;
use ndarray::{Array1, Array3, s};

use super::{all_golden, method, prepared, relative_error};

pub struct Golden {
    pub decoder: Decoder,
    store: Store,
    pub ids: Vec<u32>,
}

impl Golden {
    pub fn open(dir: &Path) -> Self {
        let store = Store::open(&dir.join("golden.safetensors")).unwrap();
        let n = store.bytes("ids").unwrap().len() / 4;
        Self {
            decoder: Decoder::open(dir).unwrap(),
            ids: store.read("ids", &[n]).unwrap(),
            store,
        }
    }

    /// Reads a tensor, `[heads,n,d]`.
    pub fn tensor(&self, name: &str, heads: usize) -> Array3<f32> {
        let shape = [heads, self.ids.len(), self.decoder.config.head_dim];
        Array3::from_shape_vec(shape, self.store.read(name, &shape).unwrap()).unwrap()
    }

    pub fn logits(&self) -> Vec<f32> {
        self.store
            .read("logits", &[self.decoder.config.vocab_size])
            .unwrap()
    }

    pub fn greedy(&self) -> Vec<u32> {
        self.store.read("greedy", &[24]).unwrap()
    }

    pub fn method(&self, name: &str) -> Box<dyn Method> {
        prepared(method(name), None, &self.decoder)
    }
}

/// Computes the logits after a prompt without a cache: with exact products, whatever the type of the weights. `tap` sees the states
/// and the rotated keys of each layer.
pub fn exact_logits(
    decoder: &Decoder,
    ids: &[u32],
    mut tap: impl FnMut(usize, &States, &Array3<f32>),
) -> Array1<f32> {
    let mut hidden = decoder.embed(ids).unwrap();
    for i in 0..decoder.config.n_layers() {
        let layer = decoder.layer(i).unwrap();
        layer.forward(decoder.ropes.layer(i), hidden.view_mut(), |states, k_rope| {
            tap(i, states, k_rope)
        });
    }
    // Rows that are few would be rounded for quantised weights.
    let last = hidden.slice(s![-(FEW as isize + 1).., ..]);
    decoder
        .logits_by(&decoder.head, last)
        .unwrap()
        .row(FEW)
        .to_owned()
}

/// Fails unless a prompt's states and logits are those of transformers.
pub fn check_states(name: &str, golden: &Golden) {
    let c = &golden.decoder.config;
    let logits = exact_logits(&golden.decoder, &golden.ids, |i, states, k_rope| {
        let check = |tensor: &str, heads, actual: &Array3<f32>| {
            let expected = golden.tensor(&format!("layer{i}.{tensor}"), heads);
            let error = relative_error(actual, &expected);
            assert!(error < 1e-4, "{name} layer {i} {tensor}: {error}");
        };
        check("q_pre", c.n_heads, &states.q);
        check("k_pre", c.n_kv_heads, &states.k);
        check("v", c.n_kv_heads, &states.v);
        // The k that attention used, both ours and that of transformers.
        check("k_rope", c.n_kv_heads, k_rope);
    });
    let off = worst(&logits, &golden.logits().into());
    assert!(off < 1e-3, "{name}: logits off by {off}");
}

/// Lists the name and the folder of every golden model.
pub fn all() -> Vec<(String, PathBuf)> {
    let named = all_golden().map(|dir| {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        (name, dir)
    });
    named.collect()
}

/// Lists those that the kernels for NVIDIA GPUs can run.
pub fn for_cuda() -> Vec<(String, PathBuf)> {
    let can = |dir: &PathBuf| check_model(&ModelConfig::load(dir).unwrap()).is_ok();
    let found: Vec<_> = all().into_iter().filter(|(_, dir)| can(dir)).collect();
    assert_eq!(found.len(), 10);
    found
}

pub fn options(budget: &str, kv: KvType) -> DecodeOptions {
    DecodeOptions {
        limits: Limits {
            sinks: 2,
            window: 4,
            ..Limits::new(budget.parse::<Budget>().unwrap())
        },
        kv,
        packed: Center::Median.into(),
        maps: ModelMaps::HADAMARD,
        granule: 64,
    }
}

/// Returns the first `n` greedy tokens after a prompt, and the logits before each token.
pub fn generate(session: &mut Session, ids: &[u32], n: usize) -> (Vec<u32>, Vec<Array1<f32>>) {
    let mut logits = vec![session.prefill(ids).unwrap()];
    let mut out = Vec::new();
    loop {
        let next = greedy(logits[out.len()].view()).unwrap();
        out.push(next);
        if out.len() == n {
            return (out, logits);
        }
        logits.push(session.step(next).unwrap());
    }
}

/// Returns the largest absolute difference.
pub fn worst(a: &Array1<f32>, b: &Array1<f32>) -> f32 {
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}
