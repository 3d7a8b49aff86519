//! The model on the GPU, emulated and real, against the goldens of transformers and the CPU.

#[path = "../common/mod.rs"]
mod common;
#[path = "../backends/emulated.rs"]
mod emulated;
mod forward;
#[path = "../backends/gpus.rs"]
mod gpus;
mod rounded;
mod session;

use std::process::ExitCode;

use gpus::Check;

fn main() -> ExitCode {
    gpus::run(|| forward::cases().into_iter().chain(session::cases()).collect())
}
