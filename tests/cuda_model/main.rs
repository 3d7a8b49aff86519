//! The model on the GPU, emulated and real, against the goldens of transformers and the CPU.

#[path = "../common/mod.rs"]
mod common;
#[path = "../backends/emulated.rs"]
mod emulated;
mod forward;
#[path = "../backends/gpus.rs"]
mod gpus;
mod near_ties;
mod rounded;
mod session;

use std::process::ExitCode;

use gpus::Check;

fn main() -> ExitCode {
    gpus::run(|| {
        let near_ties: (String, Check) = ("near_ties".to_owned(), Box::new(|_| near_ties::check()));
        let cases = forward::cases().into_iter().chain(session::cases());
        cases.chain([near_ties]).collect()
    })
}
