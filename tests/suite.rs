//! Most tests are modules of this one program, because cargo links the whole crate into each test program and runs the
//! programs one after another.
//! `cargo test --test suite cmd_plan` runs the tests of one file.
//!
//! Tests without the standard harness, and tests that measure peak memory, are programs of their own.

mod artifact_model;
mod baselines;
#[path = "../build/mod.rs"]
mod build;
mod cmd_batch;
mod cmd_bench;
mod cmd_calibrate;
mod cmd_chat;
mod cmd_dump;
mod cmd_eval;
mod cmd_eval_shares;
mod cmd_inspect;
mod cmd_peers;
mod cmd_plan;
mod cmd_priors;
mod cmd_run;
mod cmd_shards;
mod cmd_signs;
mod cmd_tail;
mod cmd_tune;
mod cmd_verdict;
mod common;
mod crashes;
mod damage;
mod docs;
mod embed;
mod errors;
mod first_tries;
mod format;
mod gguf;
mod golden;
mod head_plan;
mod hostile;
mod json;
mod kmeans;
mod layers;
mod memory;
mod outputs;
mod pages;
mod properties;
mod reads;
mod real;
mod regressions;
mod sections;
mod sessions;
mod shaders;
mod signals;
mod small;
mod source;
mod tasks;
mod terminal;
mod tutorial;

use std::collections::BTreeSet;

/// Cargo finds no test by itself: what is neither here nor in Cargo.toml would never run.
#[test]
fn every_file_is_run() {
    let folder = common::root().join("tests");
    let names = std::fs::read_dir(&folder).unwrap().filter_map(|entry| {
        let path = entry.unwrap().path();
        let is_program = path.extension().is_some_and(|of| of == "rs") || path.join("main.rs").exists();
        is_program.then(|| path.file_stem().unwrap().to_str().unwrap().to_owned())
    });
    let suite = std::fs::read_to_string(folder.join("suite.rs")).unwrap();
    let manifest = std::fs::read_to_string(common::root().join("Cargo.toml")).unwrap();
    let is_run = |name: &String| {
        suite.contains(&format!("\nmod {name};\n"))
            || manifest.contains(&format!("[[test]]\nname = \"{name}\"\n"))
    };
    let forgotten: BTreeSet<String> = names.filter(|name| !is_run(name)).collect();
    assert!(forgotten.is_empty(), "{forgotten:?}");
}
