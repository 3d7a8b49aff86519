//! kvsmith as a library: the example of `examples/embed.rs`, and hosts with threads of their own.

use std::sync::atomic::{AtomicBool, Ordering};

use kvsmith::env::{Env, Isolation};
use kvsmith::model::{Decoder, tokenizer::Tokenizer};
use kvsmith::sandbox::{self, Allowance};

use crate::common::root;

#[path = "../examples/embed.rs"]
mod example;

#[test]
fn the_example_runs_beside_other_threads() {
    let text = std::fs::read_to_string(root().join("examples/embed.rs")).unwrap();
    assert!(text.lines().count() <= 60, "an example is short");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let busy = || {
            while !done.load(Ordering::Relaxed) {
                drop(std::hint::black_box(vec![0u8; 4096]));
                std::thread::yield_now();
            }
        };
        (0..8).for_each(|_| drop(scope.spawn(busy)));
        let outcome = std::panic::catch_unwind(example::main);
        done.store(true, Ordering::Relaxed);
        outcome.expect("no panic").expect("no error");
    });
}

/// A host that may not fork gets the same tokens, from its own process.
#[test]
fn a_host_can_decline_forks() {
    let limits = Allowance {
        memory_bytes: 64 << 20,
        seconds: 5,
    };
    let process = |isolation| {
        let env = Env {
            isolation,
            ..Env::default()
        };
        let work = || Ok(std::process::id().to_le_bytes().to_vec());
        env.during(|| sandbox::run(limits, work)).unwrap()
    };
    let own = std::process::id().to_le_bytes().to_vec();
    assert_eq!(process(Isolation::Thread), own);
    assert_ne!(process(Isolation::Fork), own);
    let folder = root().join("calib-data/model");
    let decoder = Decoder::open(&folder).unwrap();
    let tokens = |isolation| {
        let env = Env {
            isolation,
            ..Env::default()
        };
        env.during(|| {
            let tokenizer = Tokenizer::open(&folder, &decoder.config).unwrap();
            tokenizer
                .encode("In the morning the three of them walked")
                .unwrap()
        })
    };
    assert_eq!(tokens(Isolation::Thread), tokens(Isolation::Fork));
    assert!(tokens(Isolation::Thread).len() > 3);
}
