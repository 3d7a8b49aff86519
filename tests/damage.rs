//! Files with flipped bits, truncated files and garbage: always an error or a clean success, never a panic and never a
//! huge allocation. Of the bytes of an artifact's header one in four is damaged; KVSMITH_EVERY=1 damages all.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::*;
use half::bf16;
use kvsmith::internal::artifact::Artifact;
use kvsmith::internal::dump::Dump;
use kvsmith::internal::error::Result;
use kvsmith::internal::method::sections::SECTIONS;
use kvsmith::internal::model::Decoder;
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};

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
    for at in (0..header).step_by(one_in(4)).chain(data).chain([last]) {
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

/// Quality reports that cannot be shown are found when the file is checked.
#[test]
fn reports_of_other_types_are_refused() {
    let (scratch, _) = artifact();
    let [art, edited] = ["art", "edited"].map(|name| scratch.path(name));
    for (section, key) in [("a2ats", "inertia"), ("sign", "keys"), ("lfps", "rows")] {
        for value in [json!("x"), json!(null), json!([]), json!({})] {
            resealed(&art, &edited, |manifest| {
                manifest["quality"][section][1][0][key] = value.clone();
            });
            let error = check(&edited).unwrap_err().to_string();
            assert!(error.contains("quality"), "{section}.{key}: {error}");
        }
    }
}

/// A small dump with everything in it.
fn dump(scratch: &Scratch) -> String {
    let model = checkpoint("llama_default");
    let tokens = scratch.tokens("tokens.json", &documents(&[30, 25], 1));
    let command = format!("dump --queries --values --model {model} --tokens {tokens}");
    scratch.make("dump", &command)
}

/// Reads everything in a dump.
fn read_dump(dump: &str) -> Result<()> {
    let dump = Dump::open(&[dump])?;
    dump.moments()?;
    (0..dump.sizes.n_layers).try_for_each(|layer| dump.layer(layer).map(drop))
}

#[test]
fn every_damaged_dump_is_refused() {
    let scratch = Scratch::new();
    let dump = dump(&scratch);
    read_dump(&dump).unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for file in scratch.list("dump") {
        let path = format!("{dump}/{file}");
        let bytes = std::fs::read(&path).unwrap();
        let refused = |what: String, damaged: &[u8]| {
            std::fs::write(&path, damaged).unwrap();
            assert!(read_dump(&dump).is_err(), "{file}: {what}");
        };
        for _ in 0..60 {
            let at = rng.gen_range(0..bytes.len());
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << rng.gen_range(0..8);
            // Spaces between the values of the manifest mean nothing.
            let same = |a: &[u8], b: &[u8]| -> bool {
                let parse = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).ok();
                parse(a).is_some() && parse(a) == parse(b)
            };
            if file != "manifest.json" || !same(&bytes, &damaged) {
                refused(format!("a flipped bit at byte {at}"), &damaged);
            }
            refused(format!("an end at byte {at}"), &bytes[..at]);
        }
        std::fs::write(&path, bytes).unwrap();
        read_dump(&dump).unwrap();
    }
    // A whole file in another's place.
    let [first, second] = ["layer-00000", "layer-00001"].map(|name| format!("{dump}/{name}.safetensors"));
    std::fs::copy(&first, &second).unwrap();
    assert!(read_dump(&dump).is_err());
    assert!(LARGEST.load(Ordering::Relaxed) < LIMIT);
}

/// The commands that read a dump check what they read.
#[test]
fn commands_refuse_a_damaged_dump() {
    let scratch = Scratch::new();
    let dump = dump(&scratch);
    let out = scratch.path("out");
    for (file, tensor, commands) in [
        (
            "layer-00001",
            "k_pre",
            &[
                "codebook --size 4",
                "signs",
                "priors",
                "wpq",
                "rotation",
                "moments",
            ][..],
        ),
        (
            "layer-00000",
            "q_pre",
            &["priors", "tail", "moments", "doublesparsity", "triattention"],
        ),
        ("layer-00000", "v", &["tail"]),
        (
            "tokens",
            "held_out",
            &["codebook --size 4", "signs", "priors", "wpq", "moments"],
        ),
        ("moments", "sum_qq", &["codebook --size 4"]),
        ("moments", "sum_qq_rope", &["wpq", "rotation"]),
    ] {
        let path = format!("{dump}/{file}.safetensors");
        let bytes = std::fs::read(&path).unwrap();
        let mut tensors = read_tensors(&path);
        tensors.get_mut(tensor).unwrap().bytes[0] ^= 1;
        // The header as it was: one flipped bit in the data.
        write_tensors(&path, &tensors);
        for command in commands {
            let outcome = kvsmith(&format!("{command} --dump {dump} -o {out}"));
            outcome.fails(
                1,
                &format!("{file}.safetensors does not match its digest"),
                "recreate",
            );
        }
        std::fs::write(path, bytes).unwrap();
    }
    assert!(!Path::new(&out).exists());
}

/// Sizes that the files do not have are found before anything is allocated for them.
#[test]
fn dumps_with_hostile_sizes() {
    let scratch = Scratch::new();
    let dump = dump(&scratch);
    let manifest = std::fs::read(format!("{dump}/manifest.json")).unwrap();
    let refused = |edit: &dyn Fn(&mut Value)| {
        reseal_dump(&dump, edit);
        let error = read_dump(&dump).unwrap_err();
        std::fs::write(format!("{dump}/manifest.json"), &manifest).unwrap();
        error.to_string()
    };
    for size in ["n_layers", "n_heads", "n_kv_heads", "head_dim"] {
        for value in [0, 1, 3, 64, (1 << 31) - 1, 1 << 31, u64::MAX >> 1, u64::MAX] {
            refused(&|manifest| manifest["model"][size] = json!(value));
        }
    }
    for (key, value) in [
        ("held_out", json!([[0, 0, 5]])),
        ("held_out", json!([[7, 0, 5]])),
        ("held_out", json!([[0, 9, 5]])),
        ("held_out", json!([[0, 0, 10_000_000_000_000u64]])),
        ("tokens", json!(54)),
        ("blocks", json!(u64::MAX)),
        ("held_out_tokens", json!(1)),
        ("ids_sha256", json!("")),
    ] {
        let error = refused(&|manifest| manifest["calibration"][key] = value.clone());
        assert!(error.contains("calibration"), "{key}: {error}");
    }
    refused(&|manifest| manifest["dtype"] = json!("f16"));
    refused(&|manifest| manifest["wrope_position"] = json!(1u64 << 40));
    refused(&|manifest| manifest["model"]["windows"] = json!([0, 0]));
    refused(&|manifest| manifest["files"] = json!({}));
    read_dump(&dump).unwrap();
    assert!(LARGEST.load(Ordering::Relaxed) < LIMIT);
}

/// Whatever is written stands its own check, however large or small the model's states are.
#[test]
fn what_is_written_can_be_read() {
    let (mut written, mut refused) = (0, 0);
    for exponent in [-38, -30, -20, -10, 0, 10, 15, 17, 18, 19, 25, 38] {
        let scratch = Scratch::new();
        let model = scratch.model("model", "llama_default");
        edit_tensors(&model, |tensors| {
            for (name, tensor) in tensors.iter_mut() {
                if name.contains("q_proj.weight") || name.contains("k_proj.weight") {
                    let scaled = tensor.bytes.chunks(2).map(|x| {
                        let x = bf16::from_le_bytes([x[0], x[1]]).to_f32();
                        bf16::from_f32(x * 10f32.powi(exponent))
                    });
                    tensor.bytes = scaled.flat_map(bf16::to_le_bytes).collect();
                }
            }
        });
        let tokens = scratch.tokens("tokens.json", &documents(&[60, 60], 1));
        let art = scratch.path("art");
        let outcome = kvsmith(&format!(
            "calibrate --size 4 --model {model} --tokens {tokens} -o {art}"
        ));
        match outcome.code {
            Some(0) => {
                kvsmith(&format!("inspect --verify {art}")).ok();
                written += 1;
            }
            _ => {
                outcome.fails(1, "", "");
                assert!(!Path::new(&art).exists());
                refused += 1;
            }
        }
    }
    assert!(written > 0 && refused > 0, "{written} {refused}");
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
