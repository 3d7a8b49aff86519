//! kvsmith calibrates, packages and runs sparse KV-cache retrieval for Hugging Face checkpoints.
//!
//! A program that embeds it opens a [`Model`](model::Model), cuts text into a [`Corpus`](corpus::Corpus), runs a
//! [`Calibration`](calibration::Calibration) on a [`Machine`](machine::Machine), opens the
//! [`Artifact`](artifact::Artifact), asks what its verdict [recommends](runner::recommended()), and decodes sequences with
//! an [`Engine`](runner::Engine). `examples/embed.rs` does all of it.
//!
//! The modules, from the ground up; each uses those above it in this list and none below. The last is the command line,
//! behind the feature `cli`: nothing below it prints or reads flags ([`mod@env`] is what it asks of its host), and a signal is
//! handled only if the host asks for it ([`mapped::install`], [`unfinished::install`]).
//!
//! 1. [`error`], [`mod@env`], [`mapped`], [`unfinished`], [`sandbox`], [`numbers`], [`parameters`], [`wording`], [`float`],
//!    [`heap`], [`quant`], [`weight`]: the ground;
//! 2. [`disk`]: every change that the program makes on a disk; [`store`]: safetensors files;
//! 3. [`compute`]: arithmetic kernels and the devices that run them;
//! 4. [`kv`]: the key-value cache, the budget and the static set;
//! 5. [`model`]: a checkpoint folder, its tokenizer and the decoder forward pass;
//! 6. [`stats`]: query second moments, whitening, k-means;
//! 7. [`corpus`], [`capture`] and [`dump`]: calibration text in blocks, and the pre-RoPE states of its tokens;
//! 8. [`artifact`]: the packaged file; [`work`]: what a stopped calibration needs to go on;
//! 9. [`method`]: the retrieval methods, one file or folder per paper, each with its calibration;
//! 10. [`runner`]: prefill and sparse decode, and what methods lose;
//! 11. [`cuda`]: the model, prompts and decode steps on an NVIDIA GPU;
//! 12. [`machine`]: a device, and how models run on it; [`calibration`]: from a model and text to an artifact with a verdict;
//! 13. `cmd` and `cli`: the subcommands.

pub mod artifact;
pub mod calibration;
pub mod capture;
#[cfg(feature = "cli")]
pub mod cli;
#[cfg(feature = "cli")]
pub mod cmd;
pub mod compute;
pub mod corpus;
pub mod cuda;
pub mod disk;
pub mod dump;
pub mod env;
pub mod error;
pub mod float;
pub mod heap;
pub mod kv;
pub mod machine;
pub mod mapped;
pub mod method;
pub mod model;
pub mod numbers;
pub mod parameters;
mod prefetch;
pub mod quant;
pub mod runner;
pub mod sandbox;
mod slots;
pub mod stats;
pub mod store;
#[cfg(test)]
mod testing;
pub mod unfinished;
pub mod weight;
pub mod wording;
pub mod work;
