//! The program of `make launches`: writes the launches of the kernels. It needs nothing of the crate, which may not compile
//! before.

#[path = "mod.rs"]
mod build;

use std::path::Path;
use std::process::ExitCode;

use build::{kernels, launches};

fn main() -> ExitCode {
    let read = kernels::read_folder(Path::new(launches::KERNELS));
    match read.and_then(|(kernels, _)| launches::update(&kernels, Path::new(launches::LAUNCHES))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}
