//! Files with flipped bits, cut ends and garbage: always an error or a clean success, never a panic
//! and never a huge allocation.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::*;
use kvsmith::artifact::Artifact;
use kvsmith::error::Result;
use kvsmith::method::sections::SECTIONS;
use kvsmith::model::Decoder;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Notes the largest allocation of this process.
struct Watch;

static LARGEST: AtomicUsize = AtomicUsize::new(0);
/// Far above anything that files of 50 kB can ask for.
const LIMIT: usize = 64 << 20;

// SAFETY: every call is handed on to the system's allocator.
unsafe impl GlobalAlloc for Watch {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that System asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; the pointer came from System.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watch = Watch;

/// A small artifact: its folder and its bytes.
fn artifact() -> (Scratch, Vec<u8>) {
    let scratch = Scratch::new();
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[30, 25], 1));
    let path = scratch.make(
        "art",
        &format!("calibrate --size 4 --model {model} --tokens {tokens}"),
    );
    let bytes = std::fs::read(&path).unwrap();
    check(&path).unwrap();
    (scratch, bytes)
}

fn check(path: &str) -> Result<()> {
    Artifact::open(Path::new(path), SECTIONS)?.verify()
}

#[test]
fn every_damaged_artifact_is_refused() {
    let (scratch, bytes) = artifact();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let refused = |what: String, damaged: &[u8]| {
        let path = scratch.write("damaged", damaged);
        assert!(check(&path).is_err(), "{what} was not noticed");
    };
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let stride = ((bytes.len() - header) / 400).max(1);
    let data = (header..bytes.len()).step_by(stride);
    assert!(data.len() >= 300);
    let last = bytes.len() - 1;
    for at in (0..header).chain(data).chain([last]) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << rng.gen_range(0..8);
        refused(format!("a flipped bit at byte {at} of {header} + data"), &damaged);
    }
    let cuts = (0..bytes.len())
        .step_by(97)
        .chain([7, 8, 9, header - 1, header, header + 1, last]);
    for len in cuts {
        refused(format!("an end at byte {len}"), &bytes[..len]);
    }
    for more in [1, 2, 8, 4096] {
        refused(
            format!("{more} bytes more"),
            &[bytes.clone(), vec![0; more]].concat(),
        );
    }
    // A header that says the same in other bytes.
    let text = std::str::from_utf8(&bytes[8..header]).unwrap();
    for same in [format!("{text}        "), text.replacen(':', ": ", 1)] {
        refused(
            "a rewritten header".to_string(),
            &safetensors(&same, &bytes[header..]),
        );
    }
    for len in [0, 1, 8, 100, bytes.len()] {
        let mut garbage = vec![0; len];
        rng.fill_bytes(&mut garbage);
        refused(format!("{len} bytes of garbage"), &garbage);
        // Garbage behind a header that is right.
        if len > header {
            garbage[..header].copy_from_slice(&bytes[..header]);
            refused("garbage as data".to_string(), &garbage);
        }
    }
    assert!(LARGEST.load(Ordering::Relaxed) < LIMIT);
}

#[test]
fn damaged_checkpoints_never_panic() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let (mut refused, mut total) = (0, 0);
    for (from, files) in [
        ("llama_default", &["model.safetensors", "config.json"][..]),
        (
            "llama_llama3",
            &[
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
                "config.json",
            ],
        ),
        ("qwen3_yarn", &["config.json"]),
    ] {
        let scratch = Scratch::new();
        let model = scratch.model("model", from);
        for file in files {
            let path = format!("{model}/{file}");
            let bytes = std::fs::read(&path).unwrap();
            // Mostly the header: what lies behind is data, which any value may be.
            let header = if file.ends_with("json") { bytes.len() } else { 2048 };
            for round in 0..60 {
                let mut damaged = bytes.clone();
                let at = rng.gen_range(0..header);
                match round % 5 {
                    0 => damaged.truncate(at),
                    1 => damaged[at..].iter_mut().take(8).for_each(|b| *b = rng.r#gen()),
                    // A digit in place of another one keeps JSON valid and makes sizes wrong.
                    2 | 3 => {
                        let digits: Vec<usize> = (8..header).filter(|i| bytes[*i].is_ascii_digit()).collect();
                        damaged[digits[at % digits.len()]] = rng.gen_range(b'0'..=b'9');
                    }
                    _ => damaged[at] ^= 1 << rng.gen_range(0..8),
                }
                std::fs::write(&path, damaged).unwrap();
                total += 1;
                refused += usize::from(Decoder::open(Path::new(&model)).is_err());
            }
            std::fs::write(&path, bytes).unwrap();
        }
        Decoder::open(Path::new(&model)).unwrap();
    }
    assert!(
        total >= 200 && refused > total / 3,
        "{refused} of {total} refused"
    );
    assert!(LARGEST.load(Ordering::Relaxed) < LIMIT);
}
