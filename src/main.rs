//! The `kvsmith` program: parses the command line, runs one subcommand, reports its error.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use kvsmith::internal::cli::{self, Cli};
use kvsmith::internal::cmd::signals;
use kvsmith::internal::cmd::terminal::say_error;
use kvsmith::internal::{heap, mapped, unfinished};

/// The stack of the thread that runs a command, whatever the limit of the main thread's is.
const STACK: usize = 8 << 20;

fn main() -> ExitCode {
    without_openblas_threads();
    let thread = std::thread::Builder::new()
        .name("kvsmith".to_owned())
        .stack_size(STACK);
    // If no thread can be started, this one does the work.
    match thread.spawn(command) {
        Ok(running) => running.join().unwrap_or(ExitCode::from(PANICKED)),
        Err(_) => command(),
    }
}

/// The exit code of a program that panicked, as without a thread of its own.
const PANICKED: u8 = 101;

/// Runs the command that the command line asks for.
fn command() -> ExitCode {
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::read(arguments.iter().cloned()) {
        Ok(cli) => cli,
        Err(e) => return ExitCode::from(cli::refuse(&arguments, &e)),
    };
    heap::keep_freed();
    signals::install();
    mapped::install();
    unfinished::install();
    match signals::env().during(|| cli::run(&cli)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say_error(&e);
            ExitCode::from(e.exit_code())
        }
    }
}

/// Restarts the program with OpenBLAS limited to one thread, unless it already is.
///
/// OpenBLAS starts a thread per core when it is loaded, which is before `main`, so only the environment can prevent it.
/// Nothing uses these threads; under a memory limit, they never end and keep the program from ending.
fn without_openblas_threads() {
    const VARIABLE: &str = "OPENBLAS_NUM_THREADS";
    if std::env::var_os(VARIABLE).is_some_and(|threads| threads == "1") {
        return;
    }
    let Ok(program) = std::env::current_exe() else {
        return;
    };
    let mut arguments = std::env::args_os();
    let mut anew = Command::new(program);
    if let Some(name) = arguments.next() {
        anew.arg0(name);
    }
    // `exec` returns only if it fails; the program then runs with these threads.
    let _ = anew.args(arguments).env(VARIABLE, "1").exec();
}
