//! kvsmith calibrates, packages and runs sparse KV-cache retrieval for Hugging Face checkpoints.
//!
//! The modules in pipeline order:
//!
//! 1. [`model`]: a checkpoint folder, its tokenizer and the decoder forward pass;
//! 2. [`corpus`]: calibration text in blocks, with a held-out part;
//! 3. [`capture`] and [`dump`]: pre-RoPE states, layer by layer;
//! 4. [`stats`]: query second moments, whitening, k-means;
//! 5. [`method`]: the retrieval methods, one file per paper, with what each calibrates;
//! 6. [`artifact`]: the packaged file; [`work`]: what a stopped calibration needs to go on;
//! 7. [`runner`]: prefill and sparse decode.
//!
//! [`compute`] holds the arithmetic kernels that they share, and [`cmd`] the subcommands.

pub mod artifact;
pub mod capture;
pub mod cli;
pub mod cmd;
pub mod compute;
pub mod corpus;
pub mod dump;
pub mod error;
pub mod interrupt;
pub mod method;
pub mod model;
pub mod progress;
pub mod runner;
pub mod stats;
pub mod store;
#[cfg(test)]
mod testing;
pub mod work;
