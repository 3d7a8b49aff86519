//! `kvsmith dump`: writes captured states and query moments into a folder.

use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use serde_json::{Value, json};

use super::share::{Share, environment, parse_share_of};
use super::task::Task;
use super::{check_wrope_position, device_for, finish, load_corpus, open_model, output};
use crate::calibration::{model_manifest, wrope_position};
use crate::cmd::args::{Global, Input, model_folder};
use crate::cmd::flags::{parse_count, parse_float};
use crate::corpus::{Corpus, Origin};
use crate::dump::{self, DumpJob, DumpOptions, NewDump, Shard};
use crate::error::Result;
use crate::float::Float;
use crate::wording::counted;

/// Arguments of `dump`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens"]).required(true)))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the id of a model in the Hugging Face cache, such as
    /// Qwen/Qwen3-0.6B
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
    /// WRoPE position: relative position, in tokens, to which queries are rotated for their second moments (default: 2048,
    /// or half of the model's context if that is less)
    #[arg(long, value_name = "P", value_parser = parse_count)]
    wrope_position: Option<usize>,
    /// Dump only one of N parts of the text, as one task of many; I counts from 0, and the text and N alone decide which
    /// blocks are in a shard. auto takes I and N from a Slurm job array; auto/N takes I from Slurm or from a Kubernetes
    /// Indexed Job. If the output is already this shard, the command ends without work
    #[arg(long, value_name = "I/N", value_parser = parse_share_of)]
    shard: Option<Share>,
    #[command(flatten)]
    input: Input,
}

/// Runs `dump`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let Some(shard) = args.shard else {
        return dump(args, global, None);
    };
    let (index, count) = shard.resolve("--shard", &environment)?;
    let mut task = Task::new(&args.output, "dump", format!("{index}/{count}"));
    let outcome = dump(args, global, Some((index, count, &mut task)));
    task.end(outcome)
}

/// Dumps the whole text, or shard `index` of `count`.
fn dump(args: &Args, global: &Global, shard: Option<(usize, usize, &mut Task)>) -> Result<()> {
    let log = global.log();
    let device = global.open_model_device("dump")?;
    let start = Instant::now();
    let inputs: Vec<&Path> = args.input.files().chain([args.model.as_path()]).collect();
    output::check_folder("-o", &args.output, &inputs)?;
    let model = open_model(&args.model, log)?;
    let decoder = &model.decoder;
    let n_layers = decoder.config.n_layers();
    let mut new = match &shard {
        None => Some(NewDump::create(&args.output, n_layers, global.overwrite)?),
        Some(_) => None,
    };
    let device = device_for(device, decoder, global)?;
    check_wrope_position(args.wrope_position, &decoder.config, log);
    let mut corpus = load_corpus(&model, &args.input, global)?;
    let mut job = DumpJob {
        origin: Origin {
            model: model_manifest(&model, &log)?,
            calibration: corpus.manifest(),
            precision: global.precision.recorded(),
        },
        options: DumpOptions {
            queries: args.queries,
            values: args.values,
            dtype: args.dtype,
            wrope_position: wrope_position(args.wrope_position, &decoder.config),
        },
        shard: None,
    };
    if let Some((index, count, task)) = shard {
        let blocks = corpus.shards(count)?.swap_remove(index);
        corpus = corpus.part(blocks.clone());
        log.note(&format!(
            "shard {index}/{count}: blocks {} to {}, {}",
            blocks.start,
            blocks.end - 1,
            counted(corpus.n_tokens(), "token")
        ));
        job.shard = Some(Shard { index, count, blocks });
        if dump::is_done(&args.output, &job, device.name())? {
            return finish(
                global,
                &format!("{} is already complete", args.output.display()),
                &args.output,
                &document(args, &corpus, n_layers, 0.0, device.name(), true),
            );
        }
        new = Some(NewDump::attempt(&args.output, n_layers)?);
        task.begin();
    }
    if let Some(new) = new {
        let layers = global.machine(device.as_ref(), &log).layers(decoder)?;
        dump::write(layers.as_ref(), device.as_ref(), &corpus, job, new, &log)?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let note = format!(
        "wrote {} in {seconds:.1} s ({:.0} tokens/s)",
        args.output.display(),
        corpus.n_tokens() as f64 / seconds
    );
    finish(
        global,
        &note,
        &args.output,
        &document(args, &corpus, n_layers, seconds, device.name(), false),
    )
}

/// The members of the command's document of `--json`.
fn document(args: &Args, text: &Corpus, n_layers: usize, seconds: f64, device: &str, skipped: bool) -> Value {
    json!({
        "dump": args.output.display().to_string(), "tokens": text.n_tokens(), "layers": n_layers,
        "seconds": seconds, "device": device, "skipped": skipped,
    })
}
