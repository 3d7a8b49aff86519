//! Conversations with caches and selection on the device.

use kvsmith::compute::cuda::driver::Driver;
use kvsmith::compute::cuda::model::session::CudaSession;
use kvsmith::compute::cuda::model::{Body, Precision};
use kvsmith::method::MethodName;
use kvsmith::runner::kv::KvType;
use kvsmith::runner::{Generate, Session};

use super::Check;
use super::golden::{Golden, all, generate, options, worst};

pub fn cases() -> Vec<(String, Check)> {
    let mut cases: Vec<(String, Check)> = Vec::new();
    for (name, dir) in all() {
        let check = move |driver: &dyn Driver| full(driver, &Golden::open(&dir));
        cases.push((format!("session::{name}"), Box::new(check)));
    }
    cases
}

/// Tokens and logits of full attention in f32, over two turns.
fn full(driver: &dyn Driver, golden: &Golden) {
    let method = golden.method(MethodName::Full);
    let options = options("1.0", KvType::F32);
    let body = Body::load(driver, &golden.decoder, Precision::F32).unwrap();
    let mut session = CudaSession::new(body, &method, options, 1, 80).unwrap();
    let mut twin = Session::new(&golden.decoder, &method, options, 80).unwrap();
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
    assert_eq!(session.len(), twin.len());
    assert_eq!(session.kv_read_fraction().unwrap(), 1.0);
    // The greedy choice on the device is that on the host.
    let next = session.greedy_step(9).unwrap();
    let expected = twin.greedy_step(9).unwrap();
    assert_eq!(next, expected);
}
