//! The command line: its subcommands, and the function that runs each.

use std::ffi::OsString;
use std::io::{IsTerminal as _, Write as _};

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::cmd::args::Global;
use crate::cmd::sections::SectionCommand;
use crate::cmd::terminal::{say_error, say_hint};
use crate::cmd::{
    bench, calibrate, completions, dump, eval, examples, gpu_check, inspect, merge, moments, pack, plan,
    print_failure, print_refusal, removed, report, run, status, tune, verdict,
};
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::method::sections::SECTIONS;

/// Make a language model read less of its KV cache: calibrate an index, measure what it loses, and generate with it.
#[derive(Parser, Debug)]
#[command(name = "kvsmith", version, long_version = long_version(), arg_required_else_help = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
}

/// Tells which build this is, and what it can use of this machine.
fn long_version() -> String {
    let commit = option_env!("KVSMITH_COMMIT").unwrap_or("unknown");
    let features = cpu_features();
    let features = if features.is_empty() {
        "baseline".to_owned()
    } else {
        features.join(" ")
    };
    let kernels = if kernels::are_built_in() {
        "compiled in, for compute capabilities 8.0 and 9.0"
    } else {
        "compiled by NVRTC when the program runs"
    };
    format!(
        "{}\ncommit: {commit}\ncpu: {} {features}\ncuda kernels: {kernels}",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH
    )
}

/// Lists the vector instructions of the processor that some loop has a version for.
fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let features = [
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("fma", std::arch::is_x86_feature_detected!("fma")),
        ("f16c", std::arch::is_x86_feature_detected!("f16c")),
        ("avx512f", std::arch::is_x86_feature_detected!("avx512f")),
        ("avx512bw", std::arch::is_x86_feature_detected!("avx512bw")),
        ("avx512dq", std::arch::is_x86_feature_detected!("avx512dq")),
        ("avx512bf16", std::arch::is_x86_feature_detected!("avx512bf16")),
        ("avx512vnni", std::arch::is_x86_feature_detected!("avx512vnni")),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let features: [(&str, bool); 0] = [];
    features
        .into_iter()
        .filter(|(_, has)| *has)
        .map(|(name, _)| name)
        .collect()
}

impl Cli {
    /// Reads a command line and notes which flags were given.
    ///
    /// # Errors
    /// Wrong use; a request for help or the version.
    pub fn read(arguments: impl IntoIterator<Item = OsString>) -> std::result::Result<Self, clap::Error> {
        let command = Self::described();
        let matches = command.clone().try_get_matches_from(arguments)?;
        let mut cli = Self::from_arg_matches(&matches)?;
        cli.global.given = given(&command, &matches);
        cli.global.command = words(&matches).join(" ");
        Ok(cli)
    }
}

/// Commands whose work is done on the CPU: their help leaves out what chooses a device, though they accept it.
/// Sections that are fitted on the CPU are among them.
const ON_CPU: [&str; 7] = [
    "merge",
    "status",
    "pack",
    "inspect",
    "report",
    "completions",
    "man",
];

/// Options of every command that some commands have no use for: their help leaves them out, though they accept them.
const UNUSED: [(&str, &[&str]); 4] = [
    (
        "seed",
        &[
            "moments",
            "merge",
            "pack",
            "status",
            "inspect",
            "report",
            "gpu-check",
            "completions",
            "man",
        ],
    ),
    (
        "overwrite",
        &[
            "plan",
            "status",
            "inspect",
            "eval",
            "bench",
            "gpu-check",
            "completions",
            "man",
        ],
    ),
    ("threads", &["status", "completions", "man"]),
    ("json", &["completions", "man"]),
];

impl Cli {
    /// Describes the command line; help shows the options of every command only where they act.
    fn described() -> clap::Command {
        let mut command = Self::command();
        let sections = SECTIONS.iter().map(|kind| kind.facts());
        let sections = sections.filter(|facts| facts.cpu_only).map(|facts| facts.command);
        let on_cpu: Vec<&str> = ON_CPU.into_iter().chain(sections).collect();
        let of_devices = ["device", "precision"].map(|id| (id, on_cpu.as_slice()));
        for (id, unused) in of_devices.into_iter().chain(UNUSED) {
            let is_it = |option: &&clap::Arg| option.get_id() == id;
            let found = command.get_arguments().find(is_it).cloned();
            if let Some(option) = found {
                let hidden = option.hide(true);
                command = unused.iter().fold(command, |command, name| {
                    command.mut_subcommand(*name, |below| below.arg(hidden.clone()))
                });
            }
        }
        command.mut_subcommands(|command| {
            let examples = examples::for_command(command.get_name());
            let command = named_and_headed(command);
            match examples {
                Some(examples) => command.after_help(examples),
                None => command,
            }
        })
    }
}

/// Gives an option whose value is named after its field, as in SIGN_CENTROIDS, a plain name, and puts what every
/// command reads and writes under the same headings.
fn named_and_headed(command: clap::Command) -> clap::Command {
    let command = command.mut_subcommands(named_and_headed);
    command.mut_args(|arg| {
        let is_raw = |names: &[clap::builder::Str]| names.iter().any(|name| name.contains('_'));
        let arg = if arg.get_value_names().is_some_and(is_raw) {
            arg.value_name("NAME")
        } else {
            arg
        };
        let headed = arg.get_help_heading().is_some() || arg.is_positional();
        match arg.get_id().as_str() {
            "model" if !headed => arg.value_name("MODEL").help_heading("Input"),
            "dump" if !headed => arg.help_heading("Input"),
            "output" if !headed => arg.help_heading("Output"),
            _ => arg,
        }
    })
}

/// Exit code of a command line that cannot be read.
const WRONG_USE: u8 = 2;

/// Prints why a command line could not be read, also as a document on stdout if it asks for `--json`, or the help or
/// version that it asks for. Returns the exit code.
pub fn refuse(arguments: &[OsString], e: &clap::Error) -> u8 {
    let command = Cli::described();
    let mut words = arguments.iter().skip(1).filter_map(|argument| argument.to_str());
    let known = words.find(|word| command.find_subcommand(word).is_some());
    let known = known.unwrap_or_default();
    let removed = removed::explain(known, e);
    let hint = hint(e);
    match &removed {
        Some(error) => say_error(error),
        None if !e.use_stderr() => {
            return match print_help(e) {
                Ok(()) => 0,
                Err(source) => {
                    let error = Error::stdout(&source);
                    say_error(&error);
                    error.exit_code()
                }
            };
        }
        None => {
            // If the terminal is gone, there is nobody to tell.
            print_help(e).unwrap_or_default();
            if let Some(hint) = hint {
                say_hint(hint);
            }
        }
    }
    if !arguments.iter().any(|argument| argument == "--json") {
        return WRONG_USE;
    }
    let error = removed.unwrap_or_else(|| {
        let text = e.render().to_string();
        let first = text.split("\n\n").next().unwrap_or_default();
        let message = first.strip_prefix("error: ").unwrap_or(first).trim_end();
        Error::usage(message).hint(hint.unwrap_or("see `kvsmith --help` or `kvsmith COMMAND --help`"))
    });
    let _ = print_refusal(known, &error);
    WRONG_USE
}

/// Prints what clap says; help of the program itself sets the commands that most people need apart.
fn print_help(e: &clap::Error) -> std::io::Result<()> {
    let help = e.render();
    let plain = help.to_string();
    if !plain.contains("\nCommands:\n  plan ") {
        return e.print();
    }
    let to_stderr = e.use_stderr();
    let is_terminal = if to_stderr {
        std::io::stderr().is_terminal()
    } else {
        std::io::stdout().is_terminal()
    };
    let has = |name: &str| std::env::var_os(name).unwrap_or_default();
    let has_colours = is_terminal && has("NO_COLOR").is_empty() && has("TERM") != "dumb";
    let shown = if has_colours {
        help.ansi().to_string()
    } else {
        plain
    };
    let further = |line: &&str| line.starts_with("  ") && line.contains(FURTHER);
    let at = shown
        .lines()
        .take_while(|line| !further(line))
        .map(|line| line.len() + 1)
        .sum();
    let (first, rest) = shown.split_at(at);
    let said = format!("{first}\nMore commands:\n{rest}");
    if to_stderr {
        std::io::stderr().lock().write_all(said.as_bytes())
    } else {
        std::io::stdout()
            .lock()
            .write_all(said.as_bytes())
            .and_then(|()| std::io::stdout().flush())
    }
}

/// The first command that not everybody needs.
const FURTHER: &str = "bench";

/// Returns what to do about common mistakes.
fn hint(e: &clap::Error) -> Option<&'static str> {
    let named = |kind: ContextKind| match e.get(kind) {
        Some(ContextValue::String(text)) => vec![text.as_str()],
        Some(ContextValue::Strings(texts)) => texts.iter().map(String::as_str).collect(),
        _ => Vec::new(),
    };
    let arguments = named(ContextKind::InvalidArg);
    match e.kind() {
        ErrorKind::MissingRequiredArgument if arguments.contains(&"<ART>") => {
            Some("put ART before --text and --dump, which take all words that follow, or after --")
        }
        ErrorKind::UnknownArgument if arguments.iter().any(|text| !text.starts_with('-')) => {
            Some("put text with spaces in quotes, and write lists without spaces, as in --budgets 0.05,0.1")
        }
        ErrorKind::UnknownArgument if arguments.contains(&"--positions") => {
            Some("--context sets the number of positions")
        }
        _ => None,
    }
}

/// Lists the words of the subcommand.
fn words(matches: &ArgMatches) -> Vec<&str> {
    let Some((word, below)) = matches.subcommand() else {
        return Vec::new();
    };
    std::iter::once(word).chain(words(below)).collect()
}

/// Lists the flags of a command line, those of the subcommands included, without their dashes.
fn given(command: &clap::Command, matches: &ArgMatches) -> Vec<String> {
    let is_given = |arg: &&clap::Arg| {
        let id = arg.get_id().as_str();
        matches.try_contains_id(id).is_ok_and(|has| has)
            && matches.value_source(id) == Some(ValueSource::CommandLine)
    };
    let flags = command
        .get_arguments()
        .filter(is_given)
        .filter_map(|arg| arg.get_long());
    let mut given: Vec<String> = flags.map(str::to_owned).collect();
    if let Some((name, below)) = matches.subcommand()
        && let Some(command) = command.find_subcommand(name)
    {
        given.extend(self::given(command, below));
    }
    given
}

/// The subcommands: first what most people need, in the order of use; then the steps of a calibration by hand, in pipeline
/// order.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Estimate time, memory and disk of a calibration and of a run
    Plan(plan::Args),
    /// Make an artifact from a model and text, without a dump on disk
    Calibrate(calibrate::Args),
    /// Show and check the contents of an artifact
    Inspect(inspect::Args),
    /// Write an HTML page that shows what each method reads and loses
    Report(report::Args),
    /// Generate text with exact or sparse attention
    Run(run::Args),
    /// Measure the loss of methods against full attention
    Eval(eval::Args),
    /// Measure the speed of single operations and of decode steps
    Bench(bench::Args),
    /// Run the model over text; write its keys and query moments
    Dump(dump::Args),
    /// Recompute a dump's query moments for another WRoPE position
    Moments(moments::Args),
    /// Add up the query moments of the shards of a dump into one file
    Merge(merge::Args),
    /// Make one section of a dump
    #[command(flatten)]
    Section(SectionCommand),
    /// Combine section files into one artifact
    Pack(pack::Args),
    /// Measure the methods on held-out text; recommend one
    Verdict(verdict::Args),
    /// Find the method, budget and formats of each KV head within a limit
    Tune(tune::Args),
    /// Show which parts of a sharded calibration are done, running, failed or missing
    Status(status::Args),
    /// Check every kernel on an NVIDIA GPU, which --device auto then uses
    GpuCheck(gpu_check::Args),
    /// Print a shell completion script
    Completions(completions::Args),
    /// Print the manual page of kvsmith or of a command
    Man(completions::ManArgs),
}

/// The most threads; a larger number is taken for a mistake.
const MAX_THREADS: usize = 1024;

/// Runs the subcommand; with `--json`, an error is a document on stdout too.
pub fn run(cli: &Cli) -> Result<()> {
    let outcome = start(cli);
    if let Err(e) = &outcome {
        // The error itself is what counts.
        let _ = print_failure(&cli.global, e);
    }
    outcome
}

fn start(cli: &Cli) -> Result<()> {
    let threads = match cli.global.threads {
        Some(n) if !(1..=MAX_THREADS).contains(&n) => {
            return Err(Error::usage(format!(
                "--threads {n} is out of range: expected 1 to {MAX_THREADS}"
            )));
        }
        Some(n) => n,
        None => 0,
    };
    // This thread is one of the pool's, so that it hands over work without waiting for another one to wake up.
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .use_current_thread()
        .build_global()
        .map_err(|e| {
            Error::system(format!("cannot start the threads: {e}")).hint(
                "use fewer --threads, or raise the memory and process limits (`ulimit -v`, `ulimit -u`)",
            )
        })?;
    let global = &cli.global;
    match &cli.command {
        Command::Dump(args) => dump::run(args, global),
        Command::Moments(args) => moments::run(args, global),
        Command::Merge(args) => merge::run(args, global),
        Command::Section(section) => section.run(global),
        Command::Pack(args) => pack::run(args, global),
        Command::Status(args) => status::run(args, global),
        Command::Verdict(args) => verdict::run(args, global),
        Command::Tune(args) => tune::run(args, global),
        Command::Calibrate(args) => match args.planned() {
            Some(settings) => plan::show(settings, global),
            None => calibrate::run(args, global),
        },
        Command::Plan(args) => plan::run(args, global),
        Command::Inspect(args) => inspect::run(args, global),
        Command::Report(args) => report::run(args, global),
        Command::Run(args) => run::run(args, global),
        Command::Eval(args) => eval::run(args, global),
        Command::Bench(args) => bench::run(args, global),
        Command::GpuCheck(args) => gpu_check::run(args, global),
        Command::Completions(args) => completions::run(args, Cli::described()),
        Command::Man(args) => completions::man(args, &Cli::described()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the help shows can be typed.
    #[test]
    fn examples_are_command_lines() {
        for (command, lines) in examples::EXAMPLES {
            for line in lines {
                let typed = line.split(" | ").next().unwrap_or_default();
                let words = typed.split_whitespace().map(OsString::from);
                let read = Cli::read(words);
                assert!(
                    read.is_ok(),
                    "{line}: {}",
                    read.err().map_or(String::new(), |e| e.to_string())
                );
                assert_eq!(read.ok().map(|cli| cli.global.command).as_deref(), Some(command));
            }
        }
    }
}
