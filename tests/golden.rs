//! The decoder against transformers: every family and rope type of `tests/fixtures/golden`.

use crate::common::golden::{Golden, all, check_states, generate, options, worst};
use kvsmith::internal::compute::Precision;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::KvType;
use kvsmith::internal::model::forward::CpuForward;
use kvsmith::internal::model::{Checkpoint, ModelConfig};
use kvsmith::internal::runner::{CpuBackend, Session};
use kvsmith::internal::weight::Stored;

#[test]
fn captured_states_match() {
    for (name, dir) in all() {
        check_states(&name, &Golden::open(&dir));
    }
}

/// A new field in the configuration of all models would turn every artifact into one of another model.
#[test]
fn fingerprints_stay() {
    const EXPECTED: [(&str, &str); 13] = [
        (
            "granite_factors",
            "f8f3d06c8c6d21c98b0667f7ebc2a32f5358481930c40b20db042943e92921a0",
        ),
        (
            "llama_d128",
            "3847e0cffd5c85b3bd452fd0e632419557c74bc891b3200639b8e9656e3e10ac",
        ),
        (
            "llama_default",
            "be30ff827dcd15541b5e8853cf374d809302f8e4495dc98faddee29b96a87987",
        ),
        (
            "llama_linear",
            "a44c4f9d8049ee619d4385fd0fa7db67ea6d6824ec9da704a21b7deb5f069aae",
        ),
        (
            "llama_llama3",
            "1ffefd64c4467029f8ace90780b9bc0e71109df3a558d015177d3a92cce998d3",
        ),
        (
            "llama_yarn",
            "9089d9bc104f3c995d553d87391ed80ba8b540fb137a8c1978b83fe415b2a7c4",
        ),
        (
            "mistral_sliding",
            "b0953028543dfa9ded122bdaf9fe31f03bc5bc1940e7fc845f2e437ca1d1f6ad",
        ),
        (
            "qwen2_bias",
            "b2a59395b56f71937644fa85be57036f9fb6e1c85203b6318d1ec300958522a0",
        ),
        (
            "qwen2_sliding",
            "0272f16d8ebfe5912650f65b27b1d619a9f827592e1c5eca47cc67503c244231",
        ),
        (
            "qwen3_moe_mixed",
            "8cc2827e4e729f0c0d4d174ee057add27ba4bd015f65e0e2af9f4578900e8a79",
        ),
        (
            "qwen3_norm",
            "af7d15e276f01d0d134c18f088aab59e85d85d4afcc2449ec7c00c84d2a10fdf",
        ),
        (
            "qwen3_yarn",
            "8ac1ed947adf6f054c7f7a556174e3e5dfbb1030fbb9fd10880963e13c826259",
        ),
        (
            "smollm3_nope",
            "74b7fcb4dc9e35e56e3d4e4c1e08d0347b0df3ab981ce1bafdf241c2fb2709c6",
        ),
    ];
    assert_eq!(all().len(), EXPECTED.len());
    for ((name, dir), expected) in all().into_iter().zip(EXPECTED) {
        let config = ModelConfig::load(&dir).unwrap();
        let fingerprint = Checkpoint::open(&dir).unwrap().fingerprint(&config).unwrap();
        assert_eq!((name.as_str(), fingerprint.as_str()), expected);
    }
}

/// Plans count weights from the configuration alone.
#[test]
fn weights_are_counted_as_layers_have_them() {
    for (name, dir) in all() {
        let decoder = Golden::open(&dir).decoder;
        for (i, [all, read]) in decoder.config.layer_weights().into_iter().enumerate() {
            let layer = decoder.layer(i).unwrap();
            let weights = layer.weights().into_iter();
            let counted: usize = weights.map(|weight| weight.rows() * weight.cols()).sum();
            assert_eq!(all, counted as f64, "{name} {i}");
            // All have one type.
            assert_eq!(
                read / all,
                layer.read_bytes() as f64 / layer.bytes() as f64,
                "{name} {i}"
            );
        }
    }
}

/// Rounded inputs change the logits of models in bf16 a little, and those of other models not at all.
#[test]
fn prompts_in_bf16_are_near_those_in_f32() {
    for (name, dir) in all() {
        let golden = Golden::open(&dir);
        let decoder = &golden.decoder;
        let logits = |precision| {
            let forward = Box::new(CpuForward::with_precision(decoder, precision).unwrap());
            let backend = CpuBackend::new(
                forward,
                golden.method("full").as_ref(),
                options("1.0", KvType::F32),
                64,
            );
            Session::new(backend).prefill(&golden.ids).unwrap()
        };
        let (exact, rounded) = (logits(Precision::F32), logits(Precision::Bf16));
        let off = worst(&exact, &rounded);
        if decoder.stored().unwrap() != Stored::Float(Float::Bf16) {
            assert_eq!(off, 0.0, "{name}");
            continue;
        }
        let largest = exact.iter().fold(f32::MIN, |a, x| a.max(*x));
        let spread = largest - exact.iter().fold(f32::MAX, |a, x| a.min(*x));
        // An input is off by up to 2^-8 of it, in each of at most four layers.
        assert!(off > 0.0 && off < 0.05 * spread, "{name}: {off} of {spread}");
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
