//! `kvsmith dump`: writes captured states and query moments into a folder.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::json;

use super::{
    check_wrope_position, device_for, finish, layers_on, load_corpus, model_manifest, open_model, output,
};
use crate::cmd::args::{Global, Input, model_folder};
use crate::corpus::Origin;
use crate::dump::{self, DumpOptions};
use crate::error::Result;
use crate::flags::{parse_count, parse_float};
use crate::float::Float;
use crate::heap;

/// Arguments of `dump`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens"]).required(true)))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, or the id of a model in the Hugging Face cache, such as Qwen/Qwen3-0.6B
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    model: PathBuf,
    /// Dump folder to write
    #[arg(short, long, value_name = "DIR")]
    output: PathBuf,
    /// Also write the queries
    #[arg(long)]
    queries: bool,
    /// Also write the values
    #[arg(long)]
    values: bool,
    /// Element type of the written keys, queries and values
    #[arg(long, default_value = "bf16", value_parser = PossibleValuesParser::new(["bf16", "f16", "f32"]).try_map(|name| parse_float(&name)))]
    dtype: Float,
    /// WRoPE position: relative position, in tokens, to which queries are rotated for their second moments
    #[arg(long, value_name = "P", default_value_t = 2048, value_parser = parse_count)]
    wrope_position: usize,
    #[command(flatten)]
    input: Input,
}

/// Runs `dump`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    heap::return_large_allocations();
    let log = global.log();
    let device = global.open_model_device("dump")?;
    let start = Instant::now();
    let inputs: Vec<&Path> = args.input.files().chain([args.model.as_path()]).collect();
    output::check_folder("-o", &args.output, &inputs)?;
    let decoder = open_model(&args.model, log)?;
    let new = dump::NewDump::create(&args.output, decoder.config.n_layers)?;
    let device = device_for(device, &decoder, global)?;
    check_wrope_position(args.wrope_position, &decoder.config, log);
    let corpus = load_corpus(&args.model, &decoder.config, &args.input, global)?;
    let origin = Origin {
        model: model_manifest(&decoder, log)?,
        calibration: corpus.manifest(),
    };
    let options = DumpOptions {
        queries: args.queries,
        values: args.values,
        dtype: args.dtype,
        wrope_position: args.wrope_position,
    };
    let layers = layers_on(device.as_ref(), &decoder, global)?;
    dump::write(
        layers.as_ref(),
        device.as_ref(),
        &corpus,
        origin,
        new,
        &options,
        log,
    )?;
    let seconds = start.elapsed().as_secs_f64();
    let note = format!(
        "wrote {} in {seconds:.1} s ({:.0} tokens/s)",
        args.output.display(),
        corpus.n_tokens() as f64 / seconds
    );
    let document = json!({
        "dump": args.output.display().to_string(), "tokens": corpus.n_tokens(), "layers": decoder.config.n_layers,
        "seconds": seconds, "device": device.name(),
    });
    finish(global, &note, &args.output, &document)
}
