//! kvsmith calibrates, packages and runs sparse KV-cache retrieval for Hugging Face checkpoints.
//!
//! A program that embeds it opens a [`Model`], cuts text into a [`Corpus`], runs a [`Calibration`] on a [`Machine`], opens the
//! [`Artifact`], asks what its verdict [recommends](recommended()), and decodes sequences with an [`Engine`].
//! `examples/embed.rs` does all of it.
//!
//! What is listed here is meant for such programs. Everything else is in the hidden module `internal`, which the command line and
//! the project's tests reach; it changes without notice.
//!
//! The modules of `internal`, from the ground up; each uses those above it in this list and none below. The last is the command
//! line, behind the feature `cli`: nothing below it prints or reads flags ([`Env`] and [`Reporter`] are what it asks of its
//! host), and a signal is handled only if the host asks for it.
//!
//! 1. `error`, `env`, `mapped`, `unfinished`, `sandbox`, `numbers`, `parameters`, `wording`, `float`,
//!    `heap`, `quant`, `weight`: the ground;
//! 2. `disk`: every change that the program makes on a disk; `store`: safetensors files;
//! 3. `compute`: arithmetic kernels and the devices that run them;
//! 4. `kv`: the key-value cache, the budget and the static set;
//! 5. `model`: a checkpoint folder, its tokenizer and the decoder forward pass;
//! 6. `stats`: query second moments, whitening, k-means;
//! 7. `corpus`, `capture` and `dump`: calibration text in blocks, and the pre-RoPE states of its tokens;
//! 8. `artifact`: the packaged file; `work`: what a stopped calibration needs to go on;
//! 9. `method`: the retrieval methods, one file or folder per paper, each with its calibration;
//! 10. `runner`: prefill and sparse decode, and what methods lose;
//! 11. `cuda`: the model, prompts and decode steps on an NVIDIA GPU;
//! 12. `machine`: a device, and how models run on it; `calibration`: from a model and text to an artifact with a verdict;
//!     `timing` and `estimate`: what this machine takes for it; `tune`: the plan that loses least within a limit;
//! 13. `cmd` and `cli`: the subcommands.

#[doc(hidden)]
#[path = ""]
pub mod internal {
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
    pub mod estimate;
    pub mod float;
    pub mod heap;
    pub mod kv;
    pub mod large;
    pub mod machine;
    pub mod mapped;
    pub mod method;
    pub mod model;
    pub mod numbers;
    pub mod parameters;
    pub(crate) mod prefetch;
    pub mod quant;
    pub mod runner;
    pub mod sandbox;
    pub(crate) mod slots;
    pub mod stats;
    pub mod store;
    #[cfg(test)]
    pub(crate) mod testing;
    pub mod timing;
    pub mod tune;
    pub mod unfinished;
    pub mod weight;
    pub mod wording;
    pub mod work;
}

// The crate's own paths do without `internal`.
#[cfg(test)]
use internal::testing;
use internal::{
    artifact, calibration, capture, compute, corpus, cuda, disk, dump, env, error, estimate, float, heap, kv,
    large, machine, mapped, method, model, numbers, parameters, prefetch, quant, runner, sandbox, slots,
    stats, store, timing, unfinished, weight, wording, work,
};
#[cfg(feature = "cli")]
use internal::{cmd, tune};

// What an artifact says.
pub use artifact::{
    Answered, Artifact, HeadLosses, HeadReport, Intervals, LossLimits, Manifest, Measured, MeasuredProbe,
    MeasuredTexts, MethodLoss, OtherLosses, Quality, SectionKind, SectionManifest, SectionView, Verdict,
};
// Calibration: text or a dump in, an artifact out.
pub use calibration::stages::Stages;
pub use calibration::verdict::{Judging, VerdictSettings};
pub use calibration::{
    Calibrated, Calibration, CalibrationSettings, DumpFit, DumpSettings, RopeKind, SectionChoice, Work,
};
pub use corpus::{
    Beyond, Corpus, CorpusManifest, CorpusOptions, CorpusSource, DocumentUsage, Documents, KindUsage, Origin,
    Reserve, TextFiles, Usage,
};
pub use dump::{Dump, DumpOptions};
pub use work::WorkFolder;
// Devices.
pub use compute::cpu::Cpu;
pub use compute::cuda::Cuda;
pub use compute::device::Device;
pub use compute::{DeviceKind, Precision, Workload};
pub use machine::{Extent, Machine, RowsIn};
// What work would take.
pub use estimate::{CacheCost, Disk, Estimate, Serving, TimedMethod, Times, Weights};
// What the host provides, and errors.
pub use disk::Output;
pub use env::{Cancel, Env, Isolation, Progress, Reporter, Silent};
pub use error::{Error, ErrorKind, Result};
// Models.
pub use model::chat::{ChatTemplate, Message};
pub use model::tokenizer::Tokenizer;
pub use model::{Checkpoint, Decoder, Forward, Model, ModelConfig, ModelManifest, Sizes};
pub use quant::Quant;
// Methods and their parameters.
pub use method::a2ats::A2atsParams;
pub use method::ctkvr::CtkvrParams;
pub use method::declaration::Ask;
pub use method::doublesparsity::DoubleSparsityParams;
pub use method::lfps::LfpsParams;
pub use method::named::Named;
pub use method::params::MethodParams;
pub use method::pqcache::PqCacheParams;
pub use method::quest::QuestParams;
pub use method::registry::{METHODS, MethodName};
pub use method::sections::SECTIONS;
pub use method::selfindex::SelfIndexParams;
pub use method::{Method, Place, Prompt, Reads, Retriever, Selection, Step};
// Decoding and measuring.
pub use kv::sample::{Sampler, Sampling, greedy};
pub use kv::{Budget, KvType};
pub use runner::eval::{
    Answers, Asking, Done, Evaluation, Judgement, Needle, Question, Variant, VariantReport,
};
pub use runner::verdict::{Material, Wanted};
pub use runner::{
    Backend, Counts, DecodeOptions, Engine, Opener, SequenceId, Session, Shares, Trace, recommended,
};
