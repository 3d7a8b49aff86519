//! The models of `tests/fixtures/golden`, and what transformers computed with them.

use std::path::{Path, PathBuf};

use kvsmith::kv::KvType;
use kvsmith::kv::budget::Budget;
use kvsmith::kv::packed::Center;
use kvsmith::kv::sample::greedy;
use kvsmith::method::Method;
use kvsmith::model::Decoder;
use kvsmith::runner::{Options, Session};
use kvsmith::store::Store;
use ndarray::{Array1, Array3};

use super::{all_golden, method, prepared};

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

/// Lists the name and the folder of every golden model.
pub fn all() -> Vec<(String, PathBuf)> {
    let named = all_golden().map(|dir| {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        (name, dir)
    });
    named.collect()
}

pub fn options(budget: &str, kv: KvType) -> Options {
    Options {
        sinks: 2,
        window: 4,
        budget: budget.parse::<Budget>().unwrap(),
        kv,
        packed: Center::Median.into(),
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
