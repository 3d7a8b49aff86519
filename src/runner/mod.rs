//! Inference: exact prefill, then decode steps that attend a static set and what a method selects.

mod caches;
mod cpu;
mod engine;
pub mod eval;
mod head;
mod options;
mod recommended;
pub(crate) mod room;
mod session;
mod shares;
mod trace;
pub mod verdict;

pub use caches::FilledHead;
pub use cpu::CpuBackend;
pub use engine::{Engine, Opener, SequenceId};
pub(crate) use head::attend;
pub use options::DecodeOptions;
pub use recommended::recommended;
pub use session::{Backend, Session, StepAt};
pub(crate) use shares::add_rows;
pub use shares::{Counts, Shares};
pub use trace::Trace;
