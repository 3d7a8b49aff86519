//! Conversations with caches and selection on the device.

use kvsmith::compute::Precision;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::cuda::Body;
use kvsmith::cuda::backend::CudaBackend;
use kvsmith::kv::KvType;
use kvsmith::kv::sample::{Sampler, Sampling, greedy};
use kvsmith::runner::{Backend, Session};

use super::Check;
use super::common::golden::{Golden, for_cuda, generate, options};
use super::forward::same_replies;
use super::near_ties::{self, greedy_agreeing};

pub fn cases() -> Vec<(String, Check)> {
    let mut cases: Vec<(String, Check)> = Vec::new();
    for (name, dir) in for_cuda() {
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

/// Several sequences at once are what each is alone, from empty caches on, but for near ties: products of three rows may
/// be summed in another order than those of one.
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
            let found = together.choices().unwrap();
            for ((one, id), found) in alone.iter_mut().zip(&ids).zip(found) {
                one.feed(&[*id], step, None).unwrap();
                let (logits, own) = (one.logits().unwrap(), one.choices().unwrap()[0]);
                let bound = near_ties::bound(&golden.decoder, step + 1, &logits);
                near_ties::agrees(found, &logits, bound, |logits| greedy(logits).unwrap());
                assert_eq!(own, greedy(logits.view()).unwrap(), "step {step}");
            }
        }
        let read = together.shares(STEPS).unwrap().read;
        let expected: f64 = alone.iter().map(|one| one.shares(STEPS).unwrap().read).sum();
        assert!((read - expected / 3.0).abs() < 1e-9, "{read} {expected}");
    }
}

/// A budget of everything, and caches that are full.
fn everything(driver: &dyn Driver, golden: &Golden) {
    let exact = golden.method("full");
    let mut on_cpu =
        Session::on_cpu(&golden.decoder, exact.as_ref(), options("1.0", KvType::F32), 80).unwrap();
    let (tokens, expected) = generate(&mut on_cpu, &golden.ids, 24);
    assert_eq!(tokens, golden.greedy(), "the CPU's");
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
        greedy_agreeing(&golden.decoder, &tokens, &expected, golden.ids.len());
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
    if !same_replies(&mut session, &mut twin, golden) {
        return;
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
        let logits = twin.step(9).unwrap();
        let bound = near_ties::bound(&golden.decoder, twin.positions(), &logits);
        near_ties::agrees(next, &logits, bound, |logits| sampler().next(logits).unwrap());
    }
}
