//! Conversations with caches and selection on the device.

use kvsmith::compute::cuda::driver::Driver;
use kvsmith::cuda::Body;
use kvsmith::cuda::backend::CudaBackend;
use kvsmith::flags::Precision;
use kvsmith::kv::KvType;
use kvsmith::kv::sample::{Sampler, Sampling};
use kvsmith::runner::{Backend, Session};

use super::Check;
use super::common::golden::{Golden, all, generate, options, worst};

pub fn cases() -> Vec<(String, Check)> {
    let mut cases: Vec<(String, Check)> = Vec::new();
    for (name, dir) in all() {
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| full(driver, &Golden::open(&golden));
        cases.push((format!("session::{name}"), Box::new(check)));
        let golden = dir.clone();
        let check = move |driver: &dyn Driver| everything(driver, &Golden::open(&golden));
        cases.push((format!("everything::{name}"), Box::new(check)));
        if name.starts_with("llama_default") || name.contains("sliding") {
            let check = move |driver: &dyn Driver| batch(driver, &Golden::open(&dir));
            cases.push((format!("batch::{name}"), Box::new(check)));
        }
    }
    cases
}

/// Several sequences at once are what each is alone, from empty caches on.
fn batch(driver: &dyn Driver, golden: &Golden) {
    const STEPS: usize = 20;
    let vocab = golden.decoder.config.vocab_size as u32;
    let token = |sequence: usize, step: usize| (7 + 13 * sequence + 5 * step) as u32 % vocab;
    for (method, budget) in [("full", "1.0"), ("topk", "0.3"), ("streaming", "0.3")] {
        let (method, options) = (golden.method(method), options(budget, KvType::F32));
        let backend = |sequences| {
            let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
            CudaBackend::new(body, method.as_ref(), options, sequences, STEPS + 4).unwrap()
        };
        let mut together = backend(3);
        let mut alone: Vec<_> = (0..3).map(|_| backend(1)).collect();
        for step in 0..STEPS {
            let ids: Vec<u32> = (0..3).map(|s| token(s, step)).collect();
            together.feed(&ids, step, None).unwrap();
            let expected: Vec<u32> = alone
                .iter_mut()
                .zip(&ids)
                .map(|(one, id)| {
                    one.feed(&[*id], step, None).unwrap();
                    one.choices().unwrap()[0]
                })
                .collect();
            assert_eq!(together.choices().unwrap(), expected, "step {step}");
        }
        let read = together.shares(STEPS).unwrap().read;
        let expected: f64 = alone.iter().map(|one| one.shares(STEPS).unwrap().read).sum();
        assert!((read - expected / 3.0).abs() < 1e-9, "{read} {expected}");
    }
}

/// A budget of everything, and caches that are full.
fn everything(driver: &dyn Driver, golden: &Golden) {
    for method in ["topk", "streaming", "random", "selfindex"] {
        let d = golden.decoder.config.head_dim;
        if method == "selfindex" && !d.is_multiple_of(4) {
            continue;
        }
        let method = golden.method(method);
        let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
        let room = golden.ids.len() + 23;
        let backend = CudaBackend::new(body, method.as_ref(), options("1.0", KvType::F32), 1, room).unwrap();
        let mut session = Session::new(backend);
        let (tokens, _) = generate(&mut session, &golden.ids, 24);
        assert_eq!(tokens, golden.greedy());
        assert_eq!(session.shares().unwrap().read, 1.0);
        let mut full = None;
        for _ in 0..9 {
            full = session.step(3).err();
            if full.is_some() {
                break;
            }
        }
        let error = full.expect("the cache is full").to_string();
        assert!(error.contains("has room for"), "{error}");
    }
}

/// Tokens and logits of full attention in f32, over two turns.
fn full(driver: &dyn Driver, golden: &Golden) {
    let method = golden.method("full");
    let options = options("1.0", KvType::F32);
    let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
    let mut session = Session::new(CudaBackend::new(body, method.as_ref(), options, 1, 80).unwrap());
    let mut twin = Session::on_cpu(&golden.decoder, method.as_ref(), options, 80).unwrap();
    let (tokens, logits) = generate(&mut session, &golden.ids, 24);
    assert_eq!(tokens, golden.greedy());
    let (_, expected) = generate(&mut twin, &golden.ids, 24);
    for (a, b) in logits.iter().zip(&expected) {
        assert!(worst(a, b) < 1e-3, "logits off by {}", worst(a, b));
    }
    let turn = [*tokens.last().unwrap(), 5, 6, 7, 8];
    let (actual, expected) = (generate(&mut session, &turn, 6), generate(&mut twin, &turn, 6));
    assert_eq!(actual.0, expected.0);
    for (a, b) in actual.1.iter().zip(&expected.1) {
        assert!(worst(a, b) < 1e-3, "logits off by {}", worst(a, b));
    }
    assert_eq!(session.positions(), twin.positions());
    assert_eq!(session.shares().unwrap().read, 1.0);
    // The choice on the device is that on the host.
    let nucleus = |temperature| Sampling {
        temperature,
        top_p: 0.9,
        ..Sampling::default()
    };
    // The last two are drawn on the host.
    let (few, penalised) = (
        Sampling {
            top_k: Some(3),
            ..nucleus(1.5)
        },
        Sampling {
            repetition_penalty: 1.5,
            ..nucleus(0.0)
        },
    );
    for sampling in [nucleus(0.0), nucleus(0.8), few, penalised] {
        let sampler = || {
            let mut sampler = Sampler::new(sampling, 5);
            sampler.observe(&golden.ids);
            sampler
        };
        let next = session.next(9, &mut sampler()).unwrap();
        assert_eq!(next, twin.next(9, &mut sampler()).unwrap());
    }
}
