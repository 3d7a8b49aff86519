//! Layers and whole passes with the caches on the CPU.

use kvsmith::internal::compute::Precision;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::cuda::forward::CudaForward;
use kvsmith::internal::cuda::layers::CudaLayers;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::KvType;
use kvsmith::internal::model::Decoder;
use kvsmith::internal::model::forward::{CpuForward, CpuLayers, Forward, Layers};
use kvsmith::internal::runner::{CpuBackend, Engine, Session};
use ndarray::{Array1, Array2, Array3, s};

use super::Check;
use super::common::golden::{Golden, exact_logits, for_cuda, generate, options, worst};
use super::common::{method, prepared, relative_error, root};
use super::near_ties::greedy_agreeing;
use super::rounded::{logits, rounding};

pub fn cases() -> Vec<(String, Check)> {
    let mut cases: Vec<(String, Check)> = Vec::new();
    for (name, dir) in for_cuda() {
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| captured_states(driver, &Golden::open(&golden));
        cases.push((format!("layers::{name}"), Box::new(check)));
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| greedy_tokens(driver, &Golden::open(&golden));
        cases.push((format!("forward::{name}"), Box::new(check)));
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| sequences(driver, &Golden::open(&golden));
        cases.push((format!("sequences::{name}"), Box::new(check)));
        let check = move |driver: &dyn Driver| rounded(driver, &Golden::open(&dir));
        cases.push((format!("rounded::{name}"), Box::new(check)));
    }
    cases.push(("quantised::mixed".to_owned(), Box::new(quantised)));
    cases
}

/// As `captured_states_match` of tests/golden.rs.
fn captured_states(driver: &dyn Driver, golden: &Golden) {
    let c = &golden.decoder.config;
    let layers = CudaLayers::new(driver, &golden.decoder, Precision::F32).unwrap();
    let mut hidden: Array2<f32> = golden.decoder.embed(&golden.ids).unwrap();
    for i in 0..c.n_layers() {
        let check = |name: &str, heads, actual: &Array3<f32>| {
            let error = relative_error(actual, &golden.tensor(&format!("layer{i}.{name}"), heads));
            assert!(error < 1e-4, "layer {i} {name}: {error}");
        };
        let layer = layers.open(i).unwrap();
        let projected = layer.project(hidden.view()).unwrap();
        let mut seen = false;
        let mut tap = |states: &kvsmith::internal::model::States| {
            seen = true;
            check("q_pre", c.n_heads, &states.q);
            check("k_pre", c.n_kv_heads, &states.k);
            check("v", c.n_kv_heads, &states.v);
            assert_eq!(states.q, projected.q);
            assert_eq!(states.k, projected.k);
            assert_eq!(states.v, projected.v);
            Ok(())
        };
        let (mut ours, mut theirs) = (hidden.clone(), hidden.clone());
        layer.forward(hidden.view_mut(), &mut tap).unwrap();
        assert!(seen);
        // The rest of the layer after any attention, such as that of fewer positions.
        let width = c.n_heads * c.head_dim;
        let attended =
            Array2::from_shape_fn((hidden.nrows(), width), |(i, j)| ((i * width + j) as f32).sin());
        layer.finish(ours.view_mut(), attended.view()).unwrap();
        let on_cpu = CpuLayers(&golden.decoder, Precision::F32);
        on_cpu
            .open(i)
            .unwrap()
            .finish(theirs.view_mut(), attended.view())
            .unwrap();
        let size = theirs.iter().fold(0.0f32, |size, x| size.max(x.abs()));
        let off = ours
            .iter()
            .zip(&theirs)
            .fold(0.0f32, |off, (a, b)| off.max((a - b).abs()));
        assert!(off < 1e-4 * size, "layer {i} finish: off by {off} of {size}");
    }
    let (decoder, last) = (&golden.decoder, golden.ids.len() - 1);
    let logits = decoder
        .logits_by(&decoder.head, hidden.slice(s![last.., ..]))
        .unwrap();
    let logits = logits.row(0).to_owned();
    let off = worst(&logits, &golden.logits().into());
    assert!(off < 1e-3, "logits off by {off}");
}

/// Compares the greedy tokens and the logits of a session on a device with those of its twin on the CPU, over two turns.
/// Returns false where it ended at a near tie.
pub fn same_replies(session: &mut Session, twin: &mut Session, golden: &Golden) -> bool {
    let mut prompt = golden.ids.clone();
    for (turn, n) in [24, 6].into_iter().enumerate() {
        let before = twin.positions() + prompt.len();
        let (found, logits) = generate(session, &prompt, n);
        let (tokens, expected) = generate(twin, &prompt, n);
        if turn == 0 {
            assert_eq!(tokens, golden.greedy(), "the CPU's");
        }
        let agreeing = greedy_agreeing(&golden.decoder, &found, &expected, before);
        // Logits depend on the tokens before them.
        for (a, b) in logits.iter().zip(&expected).take(agreeing + 1) {
            assert!(worst(a, b) < 1e-3, "logits off by {}", worst(a, b));
        }
        if agreeing < n {
            return false;
        }
        prompt = vec![*tokens.last().unwrap(), 5, 6, 7, 8];
    }
    true
}

/// Sequences of different lengths in one step: each row is rotated to the position of its own sequence.
fn sequences(driver: &dyn Driver, golden: &Golden) {
    let method = golden.method("full");
    let options = options("1.0", KvType::F32);
    let on_gpu = CudaForward::new(driver, &golden.decoder, Precision::F32).unwrap();
    let on_cpu = CpuForward::new(&golden.decoder).unwrap();
    let forwards: [Box<dyn Forward>; 2] = [Box::new(on_gpu), Box::new(on_cpu)];
    let [found, expected] = forwards.map(|forward| {
        let mut engine = Engine::new(forward, method.as_ref(), options.clone());
        let mut logits = Vec::new();
        let prompts = [3, 6, 5].map(|n| &golden.ids[..n]);
        let ids = prompts.map(|prompt| {
            let id = engine.open(32).unwrap();
            logits.push(engine.prefill(id, prompt).unwrap());
            id
        });
        for step in 0..3 {
            let fed = ids.map(|id| (id, golden.ids[step]));
            logits.extend(engine.step(&fed).unwrap());
        }
        logits
    });
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let off = worst(found, expected);
        assert!(off < 1e-3, "logits {i} off by {off}");
    }
}

/// Tokens and logits with exact attention on the CPU, over two turns.
fn greedy_tokens(driver: &dyn Driver, golden: &Golden) {
    for method in ["full", "snapkv"] {
        let method = golden.method(method);
        let options = options("1.0", KvType::F32);
        let forward = CudaForward::new(driver, &golden.decoder, Precision::F32).unwrap();
        let mut session = Session::new(CpuBackend::new(
            Box::new(forward),
            method.as_ref(),
            options.clone(),
            64,
        ));
        let mut twin = Session::on_cpu(&golden.decoder, method.as_ref(), options.clone(), 64).unwrap();
        same_replies(&mut session, &mut twin, golden);
    }
}

/// The weights of a GGUF file become f16 on a device: each moves by at most 2^-11 of itself, in five products in a row.
fn quantised(driver: &dyn Driver) {
    let decoder = Decoder::open(&root().join("tests/fixtures/gguf/mixed.gguf")).unwrap();
    let ids: Vec<u32> = (0..12).map(|i| i * 29 % 64).collect();
    let full = prepared(method("full"), None, &decoder);
    let forward = CudaForward::new(driver, &decoder, Precision::F32).unwrap();
    let options = options("1.0", KvType::F32);
    let mut session = Session::new(CpuBackend::new(
        Box::new(forward),
        full.as_ref(),
        options.clone(),
        64,
    ));
    let found = session.prefill(&ids).unwrap();
    let exact = exact_logits(&decoder, &ids, |_, _, _| ());
    let norm = |x: &Array1<f32>| x.dot(x).sqrt();
    let off = norm(&(&found - &exact)) / norm(&exact);
    assert!(off > 0.0 && off < 5.0 / 2048.0, "logits off by {off}");
}

/// Logits after a prompt whose products have rounded inputs: those of the same roundings in f64. Sums in f32 make one
/// rounding in thousands fall the other way, so what is left must be a small part of what rounding changes.
fn rounded(driver: &dyn Driver, golden: &Golden) {
    let body = |precision| {
        let forward = CudaForward::new(driver, &golden.decoder, precision).unwrap();
        let method = golden.method("full");
        let options = options("1.0", KvType::F32);
        let mut session = Session::new(CpuBackend::new(
            Box::new(forward),
            method.as_ref(),
            options.clone(),
            64,
        ));
        session.prefill(&golden.ids).unwrap()
    };
    let actual = body(Precision::Auto);
    let round = rounding(&golden.decoder);
    let expected = logits(&golden.decoder, &golden.ids, round);
    let exact = logits(&golden.decoder, &golden.ids, |v| v);
    let off = |a: &dyn Fn(usize) -> f64, b: &[f64]| -> f64 {
        let squares = b.iter().enumerate().map(|(i, b)| (a(i) - b).powi(2));
        squares.sum::<f64>().sqrt()
    };
    let of_rounding = off(&|i| expected[i], &exact);
    let left = off(&|i| f64::from(actual[i]), &expected);
    let norm = off(&|_| 0.0, &exact);
    // What f32 alone leaves, as in tests/golden.rs.
    let bound = 0.2 * of_rounding + 1e-5 * norm;
    assert!(left < bound, "off by {left}, rounding by {of_rounding}");
    // With weights of 16 bits something was rounded.
    let sixteen = golden.decoder.layer(0).unwrap().k.weight.float() != Float::F32;
    assert_eq!(of_rounding > 1e-4 * norm, sixteen, "{of_rounding} of {norm}");
    assert_eq!(body(Precision::F32) != actual, sixteen);
}
