//! `kvsmith bench`: speed on shapes of real models, or on given data.

mod cpu_head;
mod cpu_step;
mod cuda_step;
mod encode;
mod kmeans;
mod layer_step;
mod model_step;
mod prefill;
mod product;
mod report;
mod timed;

use clap::Subcommand;

pub(super) use cpu_step::{CpuSteps, bandwidth};
pub(super) use layer_step::{Caches, LayerSetting};
pub(super) use product::seconds;
pub(super) use report::{free_bytes, random_matrix, random_points};

use crate::cmd::args::Global;
use crate::error::Result;

/// Arguments of `bench`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand, Debug)]
enum What {
    /// Fit one codebook
    Kmeans(kmeans::KMeansArgs),
    /// Give keys their codewords, on the CPU
    Encode(encode::EncodeArgs),
    /// Project and attend the positions of a prompt, one layer, on the CPU
    Prefill(prefill::PrefillArgs),
    /// Choose the positions of one decode step of one layer
    Retrieve(layer_step::LayerArgs),
    /// Choose and attend them
    Attend(layer_step::LayerArgs),
    /// Decode steps of a whole model with random weights, on an NVIDIA GPU
    Decode(model_step::ModelArgs),
}

/// Runs `bench`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    match &args.what {
        What::Kmeans(args) => kmeans::run(args, global),
        What::Encode(args) => encode::run(args, global),
        What::Prefill(args) => prefill::run(args, global),
        What::Retrieve(args) => layer_step::run(args, false, global),
        What::Attend(args) => layer_step::run(args, true, global),
        What::Decode(args) => model_step::run(args, global),
    }
}
