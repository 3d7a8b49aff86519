//! `kvsmith bench`: speed on shapes of real models, or on given data.

mod cuda_step;
mod encode;
mod kmeans;
mod layer_step;
mod model_on_cpu;
mod model_step;
mod prefill;
mod product;
mod report;
mod timed;

use clap::Subcommand;

pub(super) use report::free_bytes;

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
    /// Time the fit of a codebook with k-means
    Kmeans(kmeans::KMeansArgs),
    /// Time the search for the nearest codeword of keys, on the CPU
    Encode(encode::EncodeArgs),
    /// Time the prompt products and attention of a layer, on the CPU
    Prefill(prefill::PrefillArgs),
    /// Time one layer's choice of positions in a decode step
    Retrieve(layer_step::LayerArgs),
    /// Time one layer's choice and attention in a decode step
    Attend(layer_step::LayerArgs),
    /// Time decode steps of a whole model whose cache is full of random rows
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
