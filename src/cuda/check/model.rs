//! Small random models: states, prompts and steps against those of the CPU.
//!
//! Both compute in f32, in other orders of sums. The bounds are those of the tests on checkpoints of transformers: 1e-4 of
//! the largest state of a layer, and 1e-3 of the largest logit.

use std::path::Path;

use ndarray::{Array2, Array3};
use serde_json::{Value, json};

use super::case::{Case, normal, normals, rng, upload};
use crate::compute::Precision;
use crate::compute::comparison::Comparison;
use crate::compute::cuda::driver::Driver;
use crate::cuda::backend::CudaBackend;
use crate::cuda::layers::CudaLayers;
use crate::cuda::{Body, FiniteCheck};
use crate::disk::Output;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::kv::{Budget, KvType, Limits};
use crate::method::Method;
use crate::method::declaration::Ask;
use crate::method::params::MethodParams;
use crate::method::plan::Plan;
use crate::method::registry::METHODS;
use crate::model::forward::{CpuLayers, Layers};
use crate::model::{Decoder, States};
use crate::runner::{DecodeOptions, Session};
use crate::store::{Spec, Writer};

const AREA: &str = "models";

/// Tokens of the prompt, and steps after it.
const PROMPT: usize = 40;
const STEPS: usize = 4;

/// A model's configuration and the type of its weights.
type Make = fn() -> (Value, Float);

pub fn cases() -> Vec<Case> {
    let models: [(&str, Make); 2] = [
        ("qwen3 in bf16, 4/2 heads x 128", with_norms),
        ("qwen2 in f32, 4/2 heads x 80, sliding window", with_biases),
    ];
    let mut cases = Vec::new();
    for (name, make) in models {
        cases.push(Case::new(AREA, format!("states of {name}"), move |watched| {
            with_decoder(make, |decoder| states(watched, decoder))
        }));
        for method in ["full", "topk", "streaming", "random", "selfindex", "ctkvr"] {
            let name = format!("a prompt and {STEPS} steps of {name}, {method} with a budget of everything");
            cases.push(Case::new(AREA, name, move |watched| {
                with_decoder(make, |decoder| {
                    session(watched, decoder, prepared(method, decoder)?.as_ref())
                })
            }));
        }
        let planned = format!("a prompt and {STEPS} steps of {name}, a method per KV head");
        cases.push(Case::new(AREA, planned, move |watched| {
            with_decoder(make, |decoder| {
                session(watched, decoder, planned_heads(decoder)?.as_ref())
            })
        }));
        cases.push(Case::new(AREA, format!("a NaN in {name}"), move |watched| {
            with_decoder(make, |decoder| not_finite(watched, decoder))
        }));
    }
    cases
}

fn with_norms() -> (Value, Float) {
    let config = json!({
        "model_type": "qwen3", "hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 300, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "max_position_embeddings": 512, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    (config, Float::Bf16)
}

fn with_biases() -> (Value, Float) {
    let config = json!({
        "model_type": "qwen2", "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 80, "vocab_size": 200, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "max_position_embeddings": 512, "tie_word_embeddings": true, "hidden_act": "silu",
        "use_sliding_window": true, "sliding_window": 24, "max_window_layers": 1,
    });
    (config, Float::F32)
}

/// Writes a random checkpoint to a temporary folder, and opens it.
fn with_decoder(make: Make, check: impl FnOnce(&Decoder) -> Result<Comparison>) -> Result<Comparison> {
    let failed = |e: std::io::Error| {
        Error::system(format!("cannot write a temporary folder: {e}")).hint("set TMPDIR to another folder")
    };
    let folder = tempfile::tempdir().map_err(failed)?;
    let (config, kind) = make();
    std::fs::write(folder.path().join("config.json"), config.to_string()).map_err(failed)?;
    write_weights(&folder.path().join("model.safetensors"), &config, kind)?;
    check(&Decoder::open(folder.path())?)
}

/// Lists the tensors of a checkpoint with their shapes.
fn tensors(config: &Value) -> Vec<(String, Vec<usize>)> {
    let size = |name: &str| config[name].as_u64().unwrap_or(0) as usize;
    let (hidden, inner, d) = (size("hidden_size"), size("intermediate_size"), size("head_dim"));
    let (q, kv) = (size("num_attention_heads") * d, size("num_key_value_heads") * d);
    let ends = [
        ("model.embed_tokens.weight", vec![size("vocab_size"), hidden]),
        ("lm_head.weight", vec![size("vocab_size"), hidden]),
        ("model.norm.weight", vec![hidden]),
    ];
    let layer = [
        ("input_layernorm.weight", vec![hidden]),
        ("post_attention_layernorm.weight", vec![hidden]),
        ("self_attn.q_norm.weight", vec![d]),
        ("self_attn.k_norm.weight", vec![d]),
        ("self_attn.q_proj.weight", vec![q, hidden]),
        ("self_attn.k_proj.weight", vec![kv, hidden]),
        ("self_attn.v_proj.weight", vec![kv, hidden]),
        ("self_attn.q_proj.bias", vec![q]),
        ("self_attn.k_proj.bias", vec![kv]),
        ("self_attn.v_proj.bias", vec![kv]),
        ("self_attn.o_proj.weight", vec![hidden, q]),
        ("mlp.gate_proj.weight", vec![inner, hidden]),
        ("mlp.up_proj.weight", vec![inner, hidden]),
        ("mlp.down_proj.weight", vec![hidden, inner]),
    ];
    let is_qwen3 = config["model_type"] == "qwen3";
    let is_part = |name: &str| {
        if is_qwen3 {
            !name.ends_with("bias")
        } else {
            !name.ends_with("q_norm.weight") && !name.ends_with("k_norm.weight") && name != "lm_head.weight"
        }
    };
    let mut all: Vec<(String, Vec<usize>)> = ends.map(|(name, shape)| (name.to_owned(), shape)).into();
    for i in 0..size("num_hidden_layers") {
        all.extend(
            layer
                .iter()
                .map(|(name, shape)| (format!("model.layers.{i}.{name}"), shape.clone())),
        );
    }
    all.retain(|(name, _)| is_part(name));
    all
}

fn write_weights(path: &Path, config: &Value, kind: Float) -> Result<()> {
    let dtype = match kind {
        Float::F32 => safetensors::Dtype::F32,
        Float::F16 => safetensors::Dtype::F16,
        Float::Bf16 => safetensors::Dtype::BF16,
    };
    let tensors = tensors(config);
    let specs: Vec<Spec> = tensors
        .iter()
        .map(|(name, shape)| Spec::with_dtype(name, dtype, shape))
        .collect();
    let writer = Writer::new(Output::create(path)?, &specs, None)?;
    let mut rng = rng(11);
    for (name, shape) in &tensors {
        let scale = match (name.contains("embed"), shape.len()) {
            (true, _) => 1.0,
            (_, 1) => 0.1,
            _ => 1.0 / (shape[1] as f32).sqrt(),
        };
        let center = if name.contains("norm") { 1.0 } else { 0.0 };
        let values = (0..shape.iter().product()).map(|_: usize| center + scale * normal(&mut rng));
        let mut bytes = Vec::new();
        kind.write(&values.collect::<Vec<f32>>(), &mut bytes);
        writer.put(name, 0, &bytes)?;
    }
    writer.finish()
}

/// Compares numbers that may differ by a share of the largest one.
fn alike(all: &mut Comparison, found: &[f32], expected: &[f32], share: f64, what: &str) {
    let largest = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let bound = share * f64::from(largest);
    all.equal(&found.len(), &expected.len(), || format!("length of {what}"));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        all.close(f64::from(*found), f64::from(*expected), bound, || {
            format!("{what}, value {i}")
        });
    }
}

fn ids(decoder: &Decoder, n: usize) -> Vec<u32> {
    (0..n)
        .map(|i| ((i * i + 7 * i + 3) % decoder.config.vocab_size) as u32)
        .collect()
}

/// Compares the states of every layer, and what it puts out.
fn states(driver: &dyn Driver, decoder: &Decoder) -> Result<Comparison> {
    let (on_device, on_cpu) = (
        CudaLayers::new(driver, decoder, Precision::F32)?,
        CpuLayers(decoder, Precision::F32),
    );
    let mut all = Comparison::default();
    let mut hidden: Array2<f32> = decoder.embed(&ids(decoder, PROMPT))?;
    for number in 0..decoder.config.n_layers() {
        let run = |layers: &dyn Layers, hidden: &mut Array2<f32>| -> Result<Vec<Array3<f32>>> {
            let mut seen = Vec::new();
            let mut tap = |states: &States| {
                seen = vec![states.q.clone(), states.k.clone(), states.v.clone()];
                Ok(())
            };
            layers.open(number)?.forward(hidden.view_mut(), &mut tap)?;
            Ok(seen)
        };
        let mut theirs = hidden.clone();
        let (found, expected) = (run(&on_device, &mut theirs)?, run(&on_cpu, &mut hidden)?);
        for ((name, found), expected) in ["queries", "keys", "values"].iter().zip(&found).zip(&expected) {
            let values = |x: &Array3<f32>| x.iter().copied().collect::<Vec<_>>();
            alike(
                &mut all,
                &values(found),
                &values(expected),
                1e-4,
                &format!("{name} of layer {number}"),
            );
        }
        let values = |x: &Array2<f32>| x.iter().copied().collect::<Vec<_>>();
        alike(
            &mut all,
            &values(&theirs),
            &values(&hidden),
            1e-4,
            &format!("output of layer {number}"),
        );
    }
    Ok(all)
}

fn prepared(name: &str, decoder: &Decoder) -> Result<Box<dyn Method>> {
    let ask = Ask {
        artifact: None,
        ropes: &decoder.ropes,
        sizes: decoder.config.sizes(),
        params: &MethodParams::default(),
        seed: 0,
    };
    let method = METHODS.iter().find(|method| method.as_str() == name);
    let unknown = || Error::internal(format!("no method {name}"));
    method.ok_or_else(unknown)?.prepare(&ask)
}

/// Prepares a head plan in which the KV heads of a layer have different methods.
fn planned_heads(decoder: &Decoder) -> Result<Box<dyn Method>> {
    let sizes = decoder.config.sizes();
    let names = ["topk", "selfindex", "full", "streaming"];
    let head = |layer: usize, kv_head: usize| {
        let name = names[(layer + kv_head) % names.len()];
        json!({ "method": name, "budget": 1.0, "keys": KvType::F32.keys, "values": KvType::F32.values })
    };
    let layer = |layer: usize| {
        let heads = (0..sizes.n_kv_heads).map(|kv_head| head(layer, kv_head));
        json!({ "heads": heads.collect::<Vec<_>>() })
    };
    let layers: Vec<Value> = (0..sizes.n_layers).map(layer).collect();
    Plan::read(json!({ "layers": layers }))?.prepare(&Ask {
        artifact: None,
        ropes: &decoder.ropes,
        sizes,
        params: &MethodParams::default(),
        seed: 0,
    })
}

/// Compares the logits of a session on the device, whose method may choose everything, with those of full attention on
/// the CPU.
fn session(driver: &dyn Driver, decoder: &Decoder, method: &dyn Method) -> Result<Comparison> {
    let whole = Budget::Fraction(1.0);
    let options = DecodeOptions {
        limits: Limits {
            sinks: 2,
            window: 4,
            ..Limits::new(whole)
        },
        ..DecodeOptions::new(whole, KvType::F32)
    };
    let room = PROMPT + STEPS;
    let body = Body::load(driver, decoder, Precision::F32)?;
    let mut found = Session::new(CudaBackend::new(body, method, options.clone(), 1, room)?);
    let full = prepared("full", decoder)?;
    let mut expected = Session::on_cpu(decoder, full.as_ref(), options, room)?;
    let all_ids = ids(decoder, room);
    let mut all = Comparison::default();
    let mut compare = |found: ndarray::Array1<f32>, expected: ndarray::Array1<f32>, when: &str| {
        alike(
            &mut all,
            &found.to_vec(),
            &expected.to_vec(),
            1e-3,
            &format!("logits after {when}"),
        );
    };
    let prompt = &all_ids[..PROMPT];
    compare(found.prefill(prompt)?, expected.prefill(prompt)?, "the prompt");
    for (i, id) in all_ids[PROMPT..].iter().enumerate() {
        compare(found.step(*id)?, expected.step(*id)?, &format!("step {i}"));
    }
    let read = found.shares()?.read;
    all.close(read, 1.0, 1e-9, || "share of the rows that is read".to_owned());
    Ok(all)
}

/// Checks that a NaN is found, and that finite numbers are not taken for one.
fn not_finite(driver: &dyn Driver, decoder: &Decoder) -> Result<Comparison> {
    let body = Body::load(driver, decoder, Precision::F32)?;
    let mut all = Comparison::default();
    let values = normals(&mut rng(3), 5000);
    for at in [None, Some(4321), Some(4999)] {
        let mut values = values.clone();
        if let Some(at) = at {
            values[at] = f32::NAN;
        }
        let finite = FiniteCheck::new(driver)?;
        finite.look(&upload(driver, &values)?, values.len(), 1)?;
        let found = finite.check(&body).is_err();
        all.equal(&found, &at.is_some(), || {
            format!("whether a NaN is found among 5000 numbers, its place being {at:?}")
        });
    }
    Ok(all)
}
