//! `kvsmith moments`: computes the query moments of a dump again, for another WRoPE position.

use std::path::PathBuf;

use ndarray::Array3;
use serde_json::json;

use super::{finish, output, paths};
use crate::calibration::RopeKind;
use crate::cmd::args::Global;
use crate::cmd::flags::parse_count;
use crate::cmd::parameters::choice;
use crate::compute::Workload;
use crate::dump::moments::Moments;
use crate::dump::{Dump, State};
use crate::env::{self, Progress as _};
use crate::error::Result;
use crate::stats::moments::QuerySums;

/// Arguments of `moments`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Dump folder, or the folders of all shards of a dump; made with --queries
    #[arg(long, value_name = "DIR", num_args = 1.., required = true)]
    dump: Vec<PathBuf>,
    /// Moments file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// WRoPE position: relative position, in tokens, to which queries are rotated (default: the dump's)
    #[arg(long, value_name = "P", value_parser = parse_count)]
    wrope_position: Option<usize>,
    /// Rotation of the queries: to the WRoPE position (windowed), or to their own positions (standard)
    #[arg(long, value_parser = choice::<RopeKind>(), value_name = "ROPE", default_value_t = RopeKind::Windowed)]
    rope: RopeKind,
}

/// Runs `moments`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let device = global.open_device(Workload::Fits)?;
    let dump = Dump::open(&args.dump)?;
    dump.check_queries()?;
    let b = args.wrope_position.unwrap_or(dump.options.wrope_position);
    let position = args.rope.position(b);
    let output = output::create(&args.output, &paths(&args.dump), global)?;
    let s = dump.sizes;
    let ropes = dump.origin.model.ropes();
    let progress = global.log().progress(s.n_layers as u64, "layers");
    let mut layers = Vec::with_capacity(s.n_layers);
    for i in 0..s.n_layers {
        env::check()?;
        progress.layer(i, s.n_layers, "moments");
        let states = dump.layer(i)?;
        let mut sums = QuerySums::new(s.n_kv_heads, s.head_dim);
        for block in dump.corpus.block_start.windows(2) {
            let rows = block[0] as usize..block[1] as usize;
            let mut q_pre = Array3::zeros((s.n_heads, rows.len(), s.head_dim));
            for (head, mut q) in q_pre.outer_iter_mut().enumerate() {
                q.assign(&states.read(State::QPre, head, rows.start, rows.len())?);
            }
            let kept = &dump.kept[rows];
            let block =
                QuerySums::of_block(device.as_ref(), s.n_kv_heads, q_pre.view(), kept, ropes.layer(i))?;
            sums.add(&block);
        }
        layers.push(sums);
        progress.advance(1);
    }
    drop(progress);
    Moments::new(layers, position, dump.origin).write(output)?;
    finish(
        global,
        &format!("wrote {} for {position}", args.output.display()),
        &args.output,
        &json!({ "moments": args.output.display().to_string(), "wrope_position": position.windowed(), "device": device.name() }),
    )
}
