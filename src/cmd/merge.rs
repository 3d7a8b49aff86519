//! `kvsmith merge`: adds up the query moments of the shards of a dump.

use std::path::PathBuf;

use serde_json::json;

use super::args::Global;
use super::{finish, output, paths};
use crate::dump::Dump;
use crate::dump::moments::Moments;
use crate::error::Result;
use crate::stats::moments::Position;

/// Arguments of `merge`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folders of all shards of a dump, in any order
    #[arg(required = true, value_name = "DIR")]
    dumps: Vec<PathBuf>,
    /// Moments file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Runs `merge`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    global.cpu_only("merge")?;
    let output = output::create(&args.output, &paths(&args.dumps), global)?;
    let dump = Dump::open(&args.dumps)?;
    let position = Position::Windowed(dump.options.wrope_position);
    let moments = if !dump.is_sharded() {
        dump.moments()?
    } else {
        let progress = global.log().progress(dump.sizes.n_layers as u64, "layers");
        Moments::new(dump.sums(&progress)?, position, dump.origin)
    };
    moments.write(output)?;
    finish(
        global,
        &format!("wrote {} for {position}", args.output.display()),
        &args.output,
        &json!({ "moments": args.output.display().to_string(), "wrope_position": position.windowed(), "device": "cpu" }),
    )
}
