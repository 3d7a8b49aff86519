//! Valid files, made by kvsmith itself when a target starts, so that they are in the present format.

use std::path::{Path, PathBuf};

use clap::Parser;
use kvsmith::internal::cli::{Cli, Command};
use kvsmith::internal::cmd::{calibrate, dump};
use kvsmith::internal::model::{Decoder, ModelConfig};
use serde_json::json;
use tempfile::TempDir;

/// A folder for the files of one process; `TMPDIR` names the folder that it is made in.
pub struct Folder(TempDir);

impl Folder {
    /// Makes an empty folder.
    #[allow(clippy::new_without_default, reason = "it makes a folder on the disk")]
    pub fn new() -> Self {
        Self(TempDir::new().expect("TMPDIR can be written to"))
    }

    /// Makes a folder with a copy of some files of another one.
    pub fn with_copies(from: &Path, names: &[&str]) -> Self {
        let folder = Self::new();
        for name in names {
            std::fs::copy(from.join(name), folder.path(name)).expect("the file is there");
        }
        folder
    }

    /// Returns the path of a file in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Returns the folder's own path.
    pub fn dir(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file and returns its path.
    pub fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).expect("TMPDIR can be written to");
        path
    }

    /// Reads a file.
    pub fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.path(name)).expect("the file is there")
    }
}

/// Keeps all work on the calling thread, which a fuzzer measures.
pub fn one_thread() {
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .use_current_thread();
    pool.build_global().expect("there is no pool yet");
}

fn repository() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Returns the folder of the bundled model, which has a tokenizer.
pub fn model() -> PathBuf {
    repository().join("calib-data/model")
}

/// Returns the folder of a model of two layers without a tokenizer.
pub fn small_model() -> PathBuf {
    repository().join("tests/fixtures/golden/llama_default")
}

/// Opens the small model.
pub fn decoder() -> Decoder {
    Decoder::open(&small_model()).expect("a valid model")
}

/// Reads the bundled model's configuration.
pub fn config() -> ModelConfig {
    ModelConfig::load(&model()).expect("a valid model")
}

/// Runs a command of kvsmith that must succeed; arguments are divided by spaces.
pub fn kvsmith(line: &str) {
    let words = format!("kvsmith {line} --quiet --device cpu");
    let cli = Cli::try_parse_from(words.split(' ')).expect("a valid command");
    let done = match &cli.command {
        Command::Dump(args) => dump::run(args, &cli.global),
        Command::Section(section) => section.run(&cli.global),
        Command::Calibrate(args) => calibrate::run(args, &cli.global),
        _ => panic!("{line}: not a command that makes files"),
    };
    done.unwrap_or_else(|e| panic!("{line}: {e}"));
}

/// Makes a folder in which kvsmith has put files from the small model and a short text; `lines` are commands in which
/// `DIR` stands for the folder, and `INPUT` for the flags of model and text.
pub fn made(lines: &[&str]) -> Folder {
    let folder = Folder::new();
    let ids: Vec<Vec<u32>> = [30, 25]
        .map(|n| (0..n).map(|i| (i * i + 7) % 96).collect())
        .to_vec();
    let tokens = folder.write("tokens.json", json!(ids).to_string().as_bytes());
    let input = format!(
        "--model {} --tokens {}",
        small_model().display(),
        tokens.display()
    );
    for line in lines {
        let dir = folder.dir().display().to_string();
        kvsmith(&line.replace("INPUT", &input).replace("DIR", &dir));
    }
    folder
}
