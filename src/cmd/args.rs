//! Arguments that several commands share.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Args;
use clap::builder::{PathBufValueParser, TypedValueParser};

use super::gpu_check::stamp::Stamp;
use super::parameters::choice;
use crate::cmd::flags::{parse_count, parse_count_or_all};
use crate::cmd::terminal::{Log, Verbosity};
use crate::compute::cpu::Cpu;
use crate::compute::cuda::Cuda;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::nvidia::Found;
use crate::compute::{self, Workload};
use crate::compute::{DeviceKind, Precision};
use crate::corpus::{self, TextFiles};
use crate::error::{Error, Result};
use crate::machine::{Machine, RowsIn};
use crate::model::folder;

/// Options of every command.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Options of every command")]
pub struct Global {
    /// Device for the computation. If the requested device is unavailable, kvsmith exits with code 3; it never falls
    /// back
    #[arg(long, global = true, value_parser = choice::<DeviceKind>(), default_value_t = DeviceKind::Auto)]
    pub device: DeviceKind,
    /// Type in which prompts are multiplied, in projections and attention
    #[arg(long, global = true, value_parser = choice::<Precision>(), default_value_t = Precision::Auto)]
    pub precision: Precision,
    /// Number of CPU threads, 1 to 1024 (default: all cores)
    #[arg(long, global = true, value_name = "N")]
    pub threads: Option<usize>,
    /// Seed for all random choices
    #[arg(long, global = true, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Replace an existing output file that kvsmith wrote; without this flag, an existing output is an error; with
    /// --shard and --layers, a finished output is kept
    #[arg(long, global = true)]
    pub overwrite: bool,
    /// Print the result as one JSON document on stdout; messages go to stderr
    #[arg(long, global = true)]
    pub json: bool,
    /// Print only warnings and errors on stderr
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Print more details on stderr
    #[arg(short, long, global = true)]
    pub verbose: bool,
    /// Whether not even warnings are printed, as while a command measures itself.
    #[arg(skip)]
    pub silent: bool,
    /// The flags that the command line has, without their dashes.
    #[arg(skip)]
    pub given: Vec<String>,
    /// The subcommand, `bench kmeans` for one of two words.
    #[arg(skip)]
    pub command: String,
    /// Whether the document of `--json` has been printed.
    #[arg(skip)]
    pub printed: Arc<AtomicBool>,
}

impl Global {
    /// Returns the log at the level asked for.
    pub fn log(&self) -> Log {
        let verbosity = match (self.silent, self.quiet, self.verbose) {
            (true, ..) => Verbosity::Silent,
            (_, true, _) => Verbosity::Quiet,
            (.., true) => Verbosity::Verbose,
            _ => Verbosity::Normal,
        };
        Log { verbosity }
    }

    /// Returns the machine of a device that [`Global::open_device`] opened.
    pub fn machine<'a>(&self, device: &'a dyn compute::device::Device, log: &'a Log) -> Machine<'a> {
        Machine {
            device,
            falls_back: self.device == DeviceKind::Auto,
            precision: self.precision,
            rows: RowsIn::Device,
            reporter: log,
        }
    }

    /// Opens the device for the heavy operations of calibration; `auto` takes an NVIDIA GPU if there is one that has
    /// passed `gpu-check`.
    ///
    /// # Errors
    /// The device asked for is not there: exit code 3.
    pub fn open_device(&self, workload: Workload) -> Result<Box<dyn compute::device::Device>> {
        let log = self.log();
        let may_use = |found: &Found| match Stamp::read(found) {
            Some(_) => true,
            None => {
                log.note(&unchecked(&found.gpu));
                false
            }
        };
        let mut device = compute::open(self.device, workload, &may_use, &|text| log.detail(text))?;
        let untried = device.cuda().filter(|gpu| !Stamp::has_passed(*gpu));
        match (self.device, untried.map(Driver::described)) {
            (DeviceKind::Auto, Some(gpu)) => {
                log.note(&unchecked(&gpu));
                device = Box::new(Cpu);
            }
            (_, Some(_)) => log.note(UNTRIED),
            (_, None) => {}
        }
        let name = device.name();
        let described = device.cuda().map(Driver::described);
        match (described.or_else(|| device.adapter()), self.device) {
            (Some(adapter), _) => log.note(&format!("device: {name} ({adapter})")),
            (None, DeviceKind::Auto) => log.note(&format!("device: {name}")),
            (None, _) => {}
        }
        Ok(device)
    }

    /// Opens the first NVIDIA GPU, for a benchmark.
    ///
    /// # Errors
    /// There is no such GPU: exit code 3.
    pub fn open_cuda(&self) -> Result<Cuda> {
        let cuda = Cuda::open()?;
        if !Stamp::has_passed(cuda.driver()) {
            self.log().note(UNTRIED);
        }
        Ok(cuda)
    }

    /// Opens the device for a command that runs the model.
    ///
    /// # Errors
    /// The device asked for is not there, or cannot run a model: exit code 3.
    pub fn open_model_device(&self, command: &str) -> Result<Box<dyn compute::device::Device>> {
        match self.device {
            DeviceKind::Wgpu => Err(unable(command, "wgpu")),
            _ => self.open_device(Workload::Model),
        }
    }

    /// Checks the device of a command that runs on the CPU alone, and names it.
    ///
    /// # Errors
    /// Another device was asked for: exit code 3.
    pub fn cpu_only(&self, command: &str) -> Result<()> {
        self.without_device(command)?;
        if self.device == DeviceKind::Auto {
            self.log().note("device: cpu");
        }
        Ok(())
    }

    /// Checks the device of a command that computes nothing.
    ///
    /// # Errors
    /// Another device than the CPU was asked for: exit code 3.
    pub fn without_device(&self, command: &str) -> Result<()> {
        match self.device {
            DeviceKind::Cpu | DeviceKind::Auto => Ok(()),
            DeviceKind::Wgpu => Err(unable(command, "wgpu")),
            DeviceKind::Cuda => Err(unable(command, "cuda")),
        }
    }
}

/// What is said of a GPU that was asked for, but has not been checked.
const UNTRIED: &str =
    "the GPU is untried: it has not passed `kvsmith gpu-check` with this driver and this version of kvsmith";

/// Says why `auto` does not use a GPU.
fn unchecked(gpu: &str) -> String {
    format!(
        "the CPU is used, although there is an NVIDIA GPU ({gpu}): it has not passed `kvsmith gpu-check` with this driver \
         and this version of kvsmith; run it once, for less than a minute, and --device auto uses the GPU"
    )
}

fn unable(command: &str, device: &str) -> Error {
    Error::device(format!("`{command}` cannot run on device `{device}`"))
        .hint("use --device cpu or --device auto")
}

/// Parses the folder of a model, or the id of one in the hub's cache.
pub fn model_folder() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().map(folder::find)
}

/// The flags for text.
#[derive(Args, Clone, Debug)]
#[group(skip)]
#[command(next_help_heading = "Text")]
pub struct Text {
    /// Read text: plain-text files (one document each), .jsonl files (one document per line), either kind with .gz,
    /// folders of such files, or - for stdin
    #[arg(long, value_name = "FILE", num_args = 1..)]
    text: Vec<PathBuf>,
    /// JSON field that contains the text of each line (default: `text`; if it is absent, the chat in `messages`,
    /// rendered with the model's chat template)
    #[arg(long, value_name = "NAME", requires = "text")]
    text_field: Option<String>,
}

impl Text {
    /// Tells whether there is text.
    pub fn is_given(&self) -> bool {
        !self.text.is_empty()
    }

    /// Returns where documents are read from.
    pub fn files(&self) -> TextFiles {
        TextFiles {
            paths: self.text.clone(),
            field: self.text_field.clone(),
        }
    }

    /// Warns if --text-field is given, but no text has lines of JSON. A folder may contain anything.
    pub fn warn_of_field(&self, log: Log) {
        let is_plain = |path: &PathBuf| {
            let name = path.display().to_string();
            let name = name.strip_suffix(".gz").unwrap_or(&name);
            let is_lines = name == "-" || name.ends_with(".jsonl") || name.ends_with(".ndjson");
            !is_lines && !path.is_dir()
        };
        if self.text_field.is_some() && self.text.iter().all(is_plain) {
            log.warn("--text-field has no effect: it applies to .jsonl and .ndjson files and to stdin only");
        }
    }

    /// Lists the files and folders, without stdin.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        let paths = self.text.iter().map(PathBuf::as_path);
        paths.filter(|path| *path != Path::new("-"))
    }
}

/// The flags for calibration text, of `dump` and `calibrate`.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Text")]
pub struct Input {
    /// Where text comes from.
    #[command(flatten)]
    pub text: Text,
    /// Read token ids instead of text: a JSON array of arrays, one per document
    #[arg(long, value_name = "FILE.json", conflicts_with = "text")]
    pub tokens: Option<PathBuf>,
    /// Maximum block length in tokens; longer documents are cut into blocks (default: 16384, or the model's context
    /// if it is shorter)
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub seq_len: Option<usize>,
    /// Maximum number of text tokens to read; `all` for no limit
    #[arg(long, value_name = "N", default_value_t = 65_536, value_parser = parse_count_or_all)]
    pub max_tokens: usize,
    /// Number of tokens of random UUIDs to add to the text (default: a fifth of the text's tokens, at most 16384); with
    /// --tokens, none are added
    #[arg(long, value_name = "N", value_parser = parse_count)]
    pub uuid_tokens: Option<usize>,
    /// Share of the blocks that no fit sees and on which quality is measured (at least 0, below 1; 0 = none). Above 0,
    /// at least one block of text and one of UUIDs are held out, or the end of the only block of a kind, but never all of a
    /// document with 5% of the tokens or more
    #[arg(long, value_name = "F", default_value_t = 0.05)]
    pub holdout: f64,
}

impl Input {
    /// Tells whether there is text.
    pub fn is_given(&self) -> bool {
        self.tokens.is_some() || !self.text.text.is_empty()
    }

    /// Returns where the documents come from.
    pub fn source(&self) -> corpus::CorpusSource {
        match &self.tokens {
            Some(path) => corpus::CorpusSource::Tokens(path.clone()),
            None => corpus::CorpusSource::Text(self.text.files()),
        }
    }

    /// Lists the files that the documents come from.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.text.paths().chain(self.tokens.as_deref())
    }

    /// Returns how the documents are cut into blocks and which part is held out.
    pub fn options(&self, seed: u64) -> corpus::CorpusOptions {
        corpus::CorpusOptions {
            seq_len: self.seq_len,
            max_tokens: self.max_tokens,
            uuid_tokens: self.uuid_tokens,
            holdout: self.holdout,
            seed,
        }
    }
}
