//! The `kvsmith` program: parses the command line, runs one subcommand, reports its error.

use std::ffi::OsString;
use std::process::ExitCode;

use kvsmith::cli::{self, Cli};
use kvsmith::progress::say_error;
use kvsmith::stats::linalg;
use kvsmith::{interrupt, mapped, unfinished};

fn main() -> ExitCode {
    linalg::without_openblas_threads();
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let cli = match Cli::read(arguments.iter().cloned()) {
        Ok(cli) => cli,
        Err(e) => {
            cli::refuse(&arguments, &e);
            // Help and version are not errors; anything else is wrong use.
            return ExitCode::from(if e.use_stderr() { 2 } else { 0 });
        }
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
