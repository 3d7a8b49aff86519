//! What tests use of kvsmith itself: methods by name, states of models.

use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::kv::Rotated;
use kvsmith::internal::method::Method;
use kvsmith::internal::method::declaration::Ask;
use kvsmith::internal::method::params::MethodParams;
use kvsmith::internal::method::registry::{METHODS, MethodName};
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::forward::Rows;
use kvsmith::internal::model::layer::rotated;
use kvsmith::internal::model::rope::{Rope, RopeConfig, RopeScaling};
use serde_json::Value;
use std::path::Path;

use super::{Scratch, documents};

/// Lists every method.
pub fn methods() -> impl Iterator<Item = MethodName> {
    METHODS.iter().copied()
}

/// Finds the method of this name.
pub fn method(name: &str) -> MethodName {
    let found = methods().find(|m| m.as_str() == name);
    found.unwrap_or_else(|| panic!("no method {name}"))
}

/// Prepares a method for a model, with the default parameters.
pub fn prepared(name: MethodName, artifact: Option<&Artifact>, decoder: &Decoder) -> Box<dyn Method> {
    let ask = Ask {
        artifact,
        ropes: &decoder.ropes,
        sizes: decoder.config.sizes(),
        params: &MethodParams::default(),
        seed: 0,
    };
    name.prepare(&ask).unwrap()
}

/// A checkpoint with an artifact of all sections, and token ids.
pub struct Calibrated {
    pub decoder: Decoder,
    pub artifact: Artifact,
    pub ids: Vec<u32>,
    _scratch: Scratch,
}

impl Calibrated {
    /// Calibrates a checkpoint with few tokens, and draws `n` ids.
    pub fn new(dir: &Path, n: usize) -> Self {
        let scratch = Scratch::new();
        let tokens = scratch.tokens("tokens.json", &documents(&[80, 60], 1));
        let little = "--size 8 --iterations 1 --peers --no-verdict";
        let calibrate = format!("calibrate --model {} --tokens {tokens} {little}", dir.display());
        let out = scratch.make("art", &calibrate);
        Self {
            decoder: Decoder::open(dir).unwrap(),
            artifact: Artifact::open(out.as_ref(), SECTIONS).unwrap(),
            ids: documents(&[n], 2).remove(0),
            _scratch: scratch,
        }
    }
}

/// Checks that the KV heads of the first layer, whose inputs depend on the fed tokens only, chose what the methods that serve
/// them choose alone: lines of traces. Returns the number of these lines.
pub fn same_in_first_layer<'a>(found: &[Value], alone: impl Fn(usize) -> &'a [Value]) -> usize {
    let own: Vec<&Value> = found.iter().filter(|line| line["layer"] == 0).collect();
    let has_positions = |line: &&Value| line["positions"].as_array().is_some_and(|of| !of.is_empty());
    assert!(own.iter().any(has_positions));
    for line in &own {
        let same = |other: &&Value| {
            ["step", "layer", "kv_head"]
                .iter()
                .all(|key| other[key] == line[key])
        };
        let kv_head = line["kv_head"].as_u64().unwrap() as usize;
        assert_eq!(Some(*line), alone(kv_head).iter().find(same));
    }
    own.len()
}

/// Returns the names of all methods, as a flag lists them.
pub fn method_list() -> String {
    let names: Vec<&str> = methods().map(|method| method.as_str()).collect();
    names.join(",")
}

/// Makes a rope without scaling.
pub fn plain_rope(d: usize) -> Rope {
    let config = RopeConfig {
        theta: 1e4,
        scaling: RopeScaling::Default,
    };
    Rope::new(&config, d)
}

/// A vector rotated to a position by [`plain_rope`], and how far each channel of it may be off in f32. An angle in f32 is
/// off by its size times 2^-24, at most the position times that, and every turn by 64 positions adds a rounding.
pub fn rotated_to(vector: &[f64], position: usize) -> (Vec<f64>, Vec<f64>) {
    let d = vector.len();
    let (mut out, mut bounds) = (vec![0.0; d], vec![0.0; d]);
    for i in 0..d / 2 {
        let angle = position as f64 * f64::from(1e4f64.powf(-2.0 * i as f64 / d as f64) as f32);
        let (low, high) = (vector[i], vector[i + d / 2]);
        out[i] = low * angle.cos() - high * angle.sin();
        out[i + d / 2] = high * angle.cos() + low * angle.sin();
        let bound = (2 * position + 16) as f64 / f64::from(1u32 << 24) * low.hypot(high);
        (bounds[i], bounds[i + d / 2]) = (bound, bound);
    }
    (out, bounds)
}

/// Computes the queries, keys and values of every layer along a document.
pub fn captured(decoder: &Decoder, ids: &[u32]) -> Vec<Rows> {
    let mut hidden = decoder.embed(ids).unwrap();
    let layer = |i: usize| {
        let mut out = None;
        let rope = decoder.ropes.layer(i);
        let table = rope.table(0..ids.len());
        let layer = decoder.layer(i).unwrap();
        layer.forward(rope, hidden.view_mut(), |s, k_rope| {
            out = Some(Rows {
                q: Rotated {
                    pre: s.q.clone(),
                    rope: rotated(&s.q, &table),
                },
                k: Rotated {
                    pre: s.k.clone(),
                    rope: k_rope.clone(),
                },
                v: s.v.clone(),
            });
        });
        out.unwrap()
    };
    (0..decoder.config.n_layers()).map(layer).collect()
}
