//! What the test files share.
#![allow(
    dead_code,
    missing_docs,
    unused_imports,
    unused_macros,
    reason = "each test file uses a part of it"
)]

pub mod golden;
pub mod model;
pub mod random;

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;

use kvsmith::internal::error::DEFECT;
use ndarray::{ArrayBase, Data, Dimension};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

pub use model::*;

/// Makes tests for libtest-mimic, named after their functions.
macro_rules! trials {
    ($($check:ident),+ $(,)?) => {
        [$(libtest_mimic::Trial::test(stringify!($check), || {
            $check();
            Ok(())
        })),+]
    };
}
pub(crate) use trials;

/// Returns the repository, or the folder that `KVSMITH_ROOT` names.
pub fn root() -> PathBuf {
    let root = std::env::var_os("KVSMITH_ROOT");
    root.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into()).into()
}

/// Returns a file that `make` writes to the path that it is given, once for each state of what it is made `of`; it is kept
/// for the next run of the tests.
///
/// # Errors
/// What `make` returns.
pub fn kept(
    name: &str,
    of: impl Hash,
    make: impl FnOnce(&Path) -> Result<(), String>,
) -> Result<PathBuf, String> {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{:016x}", hasher.finish()));
    if !path.exists() {
        // Under another name until it is whole: tests run side by side.
        let unfinished = path.with_extension(std::process::id().to_string());
        make(&unfinished)?;
        std::fs::rename(&unfinished, &path).map_err(|e| e.to_string())?;
    }
    Ok(path)
}

/// Of this many cases of an exhaustive test one is tried, or of as many as KVSMITH_EVERY says: with 1, all are.
pub fn one_in(usual: usize) -> usize {
    match std::env::var("KVSMITH_EVERY") {
        Ok(every) => every.parse().expect("KVSMITH_EVERY is a number"),
        Err(_) => usual,
    }
}

pub fn golden(name: &str) -> PathBuf {
    root().join("tests/fixtures/golden").join(name)
}

/// Returns the path of a golden checkpoint, for a command line.
pub fn checkpoint(name: &str) -> String {
    golden(name).display().to_string()
}

/// Lists every golden checkpoint, by name.
pub fn all_golden() -> impl Iterator<Item = PathBuf> {
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(root().join("tests/fixtures/golden"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| p.is_dir())
        .collect();
    dirs.sort();
    assert_eq!(dirs.len(), 13, "golden checkpoints");
    dirs.into_iter()
}

/// Returns the larger of the relative L2 error and the largest error over the largest value.
pub fn relative_error<S, T, D>(actual: &ArrayBase<S, D>, expected: &ArrayBase<T, D>) -> f64
where
    S: Data<Elem = f32>,
    T: Data<Elem = f32>,
    D: Dimension,
{
    assert_eq!(actual.shape(), expected.shape());
    let pairs = || {
        actual
            .iter()
            .zip(expected.iter())
            .map(|(a, b)| (f64::from(*a), f64::from(*b)))
    };
    assert!(pairs().all(|(a, _)| a.is_finite()));
    let l2 = pairs().map(|(a, b)| (a - b).powi(2)).sum::<f64>() / pairs().map(|(_, b)| b * b).sum::<f64>();
    let worst = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let largest = pairs().map(|(_, b)| b.abs()).fold(0.0, f64::max);
    l2.sqrt().max(worst / largest)
}

/// Copies a folder of plain files.
pub fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
        }
    }
}

/// What a run of the program left behind.
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    /// Returns what the program left behind; checks that its error, if it ended with code 1, has a hint about this
    /// error.
    #[track_caller]
    pub fn from_output(output: std::process::Output) -> Self {
        let outcome = Self {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        };
        let raw = outcome.stderr.lines().find(|line| line.contains('⟨'));
        assert_eq!(raw, None, "a setting that is not written as a flag");
        if outcome.code == Some(1) && outcome.stderr.lines().any(|line| line.starts_with("error: ")) {
            let hint = outcome.stderr.lines().find(|line| line.starts_with("hint: "));
            let said = hint.is_some_and(|hint| !hint.contains(DEFECT));
            assert!(said, "an error without a hint of its own: {}", outcome.stderr);
        }
        outcome
    }

    /// Returns this outcome after checking that the program succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    /// Returns the one JSON document on stdout of a run that succeeded.
    #[track_caller]
    pub fn json(self) -> Value {
        serde_json::from_str(&self.ok().stdout).unwrap()
    }

    /// Checks that the program failed with `code`, that its `error:` has `culprit` and its `hint:` has `hint` (the hint
    /// is not checked if `hint` is empty).
    #[track_caller]
    pub fn fails(&self, code: i32, culprit: &str, hint: &str) {
        let line = |prefix: &str| {
            let line = self.stderr.lines().find(|l| l.starts_with(prefix));
            line.unwrap_or_default().to_string()
        };
        assert_eq!(
            self.code,
            Some(code),
            "expected `{culprit}`, got: {}",
            self.stderr
        );
        assert!(
            line("error: ").contains(culprit),
            "expected `{culprit}`, got: {}",
            self.stderr
        );
        assert!(
            line("hint: ").contains(hint),
            "expected hint `{hint}`, got: {}",
            self.stderr
        );
        if !self.stdout.is_empty() {
            let document: Value = serde_json::from_str(&self.stdout).expect("a failure prints no result");
            assert_eq!(document["error"]["exit_code"], code, "a failure prints no result");
        }
    }
}

/// Returns the command of the program, or of the one that `KVSMITH_BIN` names, with `arguments` separated by spaces.
pub fn command(arguments: &str) -> Command {
    handle_ignored_signals();
    let program = std::env::var_os("KVSMITH_BIN");
    let mut command = Command::new(program.unwrap_or_else(|| env!("CARGO_BIN_EXE_kvsmith").into()));
    command.args(arguments.split_whitespace());
    // Without this variable the program restarts itself to set it, and starting would take half of the time of most
    // runs; see `restarting`.
    command.env(OPENBLAS_THREADS, "1");
    command.env("XDG_CACHE_HOME", no_cache());
    command
}

/// Returns a folder that does not exist, in place of the cache of the user who runs the tests.
pub fn no_cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-cache")
}

/// Names the variable that the program sets when it starts.
const OPENBLAS_THREADS: &str = "OPENBLAS_NUM_THREADS";

/// Returns the same command without the variable of OpenBLAS, as a user starts the program.
pub fn restarting(arguments: &str) -> Command {
    let mut command = command(arguments);
    command.env_remove(OPENBLAS_THREADS);
    command
}

/// Gives an empty handler to each signal that this process ignores, as a process in the background may. A child inherits
/// that a signal is ignored, but not a handler, so that it starts with the default action. Resetting the signals in the
/// child would need a fork, which copies the page tables of this large process; without it, the standard library uses the
/// faster posix_spawn.
fn handle_ignored_signals() {
    extern "C" fn ignore(_: libc::c_int) {}
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: the handler does nothing, and a handler that was there before is put back.
            unsafe {
                let before = libc::signal(signal, ignore as *const () as libc::sighandler_t);
                if before != libc::SIG_IGN {
                    libc::signal(signal, before);
                }
            }
        }
    });
}

/// Runs the program with `arguments`, which are separated by spaces.
pub fn kvsmith(arguments: &str) -> Outcome {
    Outcome::from_output(command(arguments).output().unwrap())
}

/// Starts the program with pipes to it and from it.
pub fn start(arguments: &str) -> Child {
    piped(command(arguments))
}

/// Starts a command with pipes to it and from it.
pub fn piped(mut command: Command) -> Child {
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Sends a signal to a child that has not been waited for.
pub fn send(child: &Child, signal: i32) {
    // SAFETY: its id is still its own.
    unsafe { libc::kill(child.id() as i32, signal) };
}

/// Parses the JSON documents of a text, one per line.
pub fn json_lines(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Returns the rows of a table in a text: one row per line, with its columns between bars.
#[track_caller]
pub fn table<const N: usize>(text: &str) -> Vec<[&str; N]> {
    let mut rows = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let columns: Vec<&str> = line.split('|').map(str::trim).collect();
        rows.push(columns.try_into().unwrap());
    }
    rows
}

/// Returns a number of a JSON object.
#[track_caller]
pub fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
}

/// Writes tasks made from a text with `scripts/tasks.py` and the Python that `KVSMITH_PYTHON` names; returns the file's
/// text.
#[track_caller]
pub fn make_tasks(out: &str, haystack: &Path, arguments: &str) -> String {
    let python = std::env::var_os("KVSMITH_PYTHON").expect("KVSMITH_PYTHON names a Python");
    let mut command = Command::new(python);
    command
        .arg(root().join("scripts/tasks.py"))
        .arg("--haystack")
        .arg(haystack);
    let output = command
        .args(arguments.split_whitespace())
        .args(["-o", out])
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::read_to_string(out).unwrap()
}

/// A temporary folder, removed when dropped.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    /// Returns the path of `name` in the folder.
    pub fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        std::fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    /// Runs a command that must succeed and writes the file or folder `name`; returns its path.
    #[track_caller]
    pub fn make(&self, name: &str, command: &str) -> String {
        let out = self.path(name);
        kvsmith(&format!("{command} --overwrite -o {out}")).ok();
        out
    }

    /// Writes a file for `--tokens`.
    pub fn tokens(&self, name: &str, documents: &[Vec<u32>]) -> String {
        self.write(name, json!(documents).to_string())
    }

    /// Copies a golden checkpoint.
    pub fn model(&self, name: &str, from: &str) -> String {
        let to = self.path(name);
        copy_dir(&golden(from), Path::new(&to));
        to
    }

    /// Lists the names in a folder, sorted.
    pub fn list(&self, name: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(name)).unwrap();
        let mut names: Vec<String> = entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

/// Returns random documents of these lengths, within the vocabulary of the golden checkpoints.
pub fn documents(lengths: &[usize], seed: u64) -> Vec<Vec<u32>> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut document = |n: &usize| (0..*n).map(|_| rng.gen_range(3..96)).collect();
    lengths.iter().map(&mut document).collect()
}

/// Returns a u32 tensor of a golden checkpoint: `ids` or `greedy`.
pub fn golden_ids(name: &str, tensor: &str) -> Vec<u32> {
    read_tensors(golden(name).join("golden.safetensors"))[tensor].u32s()
}

/// Changes the fields of a JSON file; null removes a field.
pub fn edit_json(path: &str, fields: &Value) {
    let mut value: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let map = value.as_object_mut().unwrap();
    for (name, field) in fields.as_object().unwrap() {
        if field.is_null() {
            map.remove(name);
        } else {
            map.insert(name.clone(), field.clone());
        }
    }
    std::fs::write(path, value.to_string()).unwrap();
}

/// A tensor of a safetensors file, read without the library under test.
#[derive(Clone, Debug, PartialEq)]
pub struct RawTensor {
    pub dtype: String,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl RawTensor {
    #[track_caller]
    fn values<const N: usize, T>(&self, dtype: &str, read: fn([u8; N]) -> T) -> Vec<T> {
        assert_eq!(self.dtype, dtype);
        let values = self.bytes.chunks_exact(N);
        values.map(|bytes| read(bytes.try_into().unwrap())).collect()
    }

    #[track_caller]
    pub fn u32s(&self) -> Vec<u32> {
        self.values("U32", u32::from_le_bytes)
    }

    #[track_caller]
    pub fn u64s(&self) -> Vec<u64> {
        self.values("U64", u64::from_le_bytes)
    }

    #[track_caller]
    pub fn f32s(&self) -> Vec<f32> {
        self.values("F32", f32::from_le_bytes)
    }

    #[track_caller]
    pub fn f64s(&self) -> Vec<f64> {
        self.values("F64", f64::from_le_bytes)
    }
}

pub type RawTensors = BTreeMap<String, RawTensor>;

pub fn read_tensors(path: impl AsRef<Path>) -> RawTensors {
    let bytes = std::fs::read(path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let map: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..header]).unwrap();
    map.into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, info)| {
            let at = |i: usize| header + info["data_offsets"][i].as_u64().unwrap() as usize;
            let tensor = RawTensor {
                dtype: info["dtype"].as_str().unwrap().to_string(),
                shape: serde_json::from_value(info["shape"].clone()).unwrap(),
                bytes: bytes[at(0)..at(1)].to_vec(),
            };
            (name, tensor)
        })
        .collect()
}

pub fn write_tensors(path: impl AsRef<Path>, tensors: &RawTensors) {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, t) in tensors {
        let offsets = [data.len(), data.len() + t.bytes.len()];
        let info = json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": offsets });
        header.insert(name.clone(), info);
        data.extend_from_slice(&t.bytes);
    }
    std::fs::write(path, safetensors(&json!(header).to_string(), &data)).unwrap();
}

/// Returns the bytes of a safetensors file with this header.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// Changes the tensors of a checkpoint's `model.safetensors`.
pub fn edit_tensors(model: &str, edit: impl FnOnce(&mut RawTensors)) {
    let path = format!("{model}/model.safetensors");
    let mut tensors = read_tensors(&path);
    edit(&mut tensors);
    write_tensors(&path, &tensors);
}

/// The header of a safetensors file, and where its data start.
pub fn header(bytes: &[u8]) -> (Value, usize) {
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..end]).unwrap(), end)
}

/// Copies an artifact with other bytes at the end of a tensor, whose digest fits.
pub fn with_values(art: &str, to: &str, tensor: &str, last: &[u8]) {
    let mut bytes = std::fs::read(art).unwrap();
    let (header, start) = header(&bytes);
    let at = |i: usize| start + header[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    let range = at(0)..at(1);
    bytes[range.end - last.len()..range.end].copy_from_slice(last);
    let digest: String = Sha256::digest(&bytes[range])
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    std::fs::write(to, bytes).unwrap();
    let section = tensor.split('.').next().unwrap();
    resealed(to, to, |manifest| {
        manifest["sections"][section]["sha256"][tensor] = json!(digest)
    });
}

/// Copies an artifact with an edited manifest and a matching digest.
pub fn resealed(path: &str, to: &str, edit: impl FnOnce(&mut Value)) {
    let bytes = std::fs::read(path).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut json: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let text = json["__metadata__"]["kvsmith"].as_str().unwrap();
    let mut manifest: Value = serde_json::from_str(text).unwrap();
    edit(&mut manifest);
    manifest.as_object_mut().unwrap().remove("manifest_sha256");
    let digest = Sha256::digest(manifest.to_string().as_bytes());
    let seal: String = digest.iter().map(|b| format!("{b:02x}")).collect();
    manifest["manifest_sha256"] = json!(seal);
    json["__metadata__"]["kvsmith"] = json!(manifest.to_string());
    let mut text = json.to_string();
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    std::fs::write(to, safetensors(&text, &bytes[header..])).unwrap();
}

/// Removes tensors from a file and leaves its metadata as they are.
pub fn remove_tensors(path: &str, names: &[&str]) {
    let bytes = std::fs::read(path).unwrap();
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..start]).unwrap();
    for name in names {
        header.remove(*name).unwrap();
    }
    let mut data = Vec::new();
    for (name, info) in &mut header {
        if name != "__metadata__" {
            let at = |i: usize| start + info["data_offsets"][i].as_u64().unwrap() as usize;
            let first = data.len();
            data.extend_from_slice(&bytes[at(0)..at(1)]);
            info["data_offsets"] = json!([first, data.len()]);
        }
    }
    std::fs::write(path, safetensors(&json!(header).to_string(), &data)).unwrap();
}

/// Edits the manifest of a dump, and corrects its digest and that of the tokens.
pub fn reseal_dump(dump: &str, edit: impl FnOnce(&mut Value)) {
    let hex = |bytes: &[u8]| -> String { Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect() };
    let path = format!("{dump}/manifest.json");
    let mut manifest: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let tokens = std::fs::read(format!("{dump}/tokens.safetensors")).unwrap();
    manifest["files"]["tokens.safetensors"] = json!({ "bytes": tokens.len(), "sha256": hex(&tokens) });
    edit(&mut manifest);
    manifest.as_object_mut().unwrap().remove("manifest_sha256");
    manifest["manifest_sha256"] = json!(hex(manifest.to_string().as_bytes()));
    std::fs::write(path, manifest.to_string()).unwrap();
}

/// Characters of [`tokenizer`], from id 3 on.
pub const ALPHABET: &str = "abcdefghijklmnopqrstuvwxyz0123456789 ,.-";

/// Returns a tokenizer.json with one token per character: 0 unknown, 1 `<s>`, 2 `</s>`, then [`ALPHABET`].
pub fn tokenizer(post_processor: Value) -> String {
    let specials = ["<unk>", "<s>", "</s>"];
    let characters = ALPHABET.chars().map(String::from);
    let tokens = specials.into_iter().map(String::from).chain(characters);
    let vocab: serde_json::Map<String, Value> = tokens.zip((0..).map(|id| json!(id))).collect();
    let added = specials.iter().zip(0..).map(|(token, id)| {
        json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        })
    });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": added.collect::<Vec<_>>(),
        "pre_tokenizer": {
            "type": "Split", "pattern": { "Regex": "(?s)." }, "behavior": "Isolated", "invert": false,
        },
        "post_processor": post_processor,
        "decoder": { "type": "Fuse" },
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<unk>" },
    })
    .to_string()
}

/// Returns the ids that [`tokenizer`] gives `text`, without special tokens.
pub fn character_ids(text: &str) -> Vec<u32> {
    let id = |c: char| ALPHABET.chars().position(|a| a == c).map_or(0, |i| i as u32 + 3);
    text.chars().map(id).collect()
}
