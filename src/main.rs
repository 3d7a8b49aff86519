//! The `kvsmith` program: parses the command line, runs one subcommand, reports its error.

use std::ffi::OsString;
use std::process::ExitCode;

use kvsmith::cli::{self, Cli};
use kvsmith::progress::say_error;
use kvsmith::stats::linalg;
use kvsmith::{interrupt, mapped, unfinished};

/// The stack of the thread that runs a command, whatever the limit of the main thread's is.
const STACK: usize = 8 << 20;

fn main() -> ExitCode {
    linalg::without_openblas_threads();
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
    interrupt::install();
    mapped::install();
    unfinished::install();
    match cli::run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            say_error(&e);
            ExitCode::from(e.exit_code())
        }
    }
}
