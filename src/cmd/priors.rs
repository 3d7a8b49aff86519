//! `kvsmith priors`: the LFPS section of a dump.

use std::path::PathBuf;

use ndarray::Axis;

use super::{check_sample, write_section};
use crate::artifact::Section;
use crate::cmd::args::Global;
use crate::compute::cpu::Cpu;
use crate::dump::{Dump, State};
use crate::error::{Error, Result};
use crate::method::lfps::priors::{self, Sample};
use crate::store::Output;

/// Arguments of `priors`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Dump folder made with --queries (values may be there too, but are not read)
    #[arg(long, value_name = "DIR")]
    dump: PathBuf,
    /// Section file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

/// Runs `priors`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.cpu_only("priors")?;
    let dump = Dump::open(&args.dump)?;
    if !dump.options.queries {
        return Err(Error::failed(format!("{} has no queries", args.dump.display()))
            .hint("make the dump with --queries"));
    }
    let s = dump.sizes;
    let (rope, windows) = (dump.rope()?, dump.windows()?);
    let sample = Sample::new(&dump.block_start, &dump.kept);
    check_sample(&sample, log);
    let output = Output::create(&args.output)?;
    let specs = priors::specs(s, &priors::manifest())?;
    let mut section = Section::new(priors::SECTION, priors::manifest(), specs, &Cpu);
    let progress = log.progress((s.n_layers * s.n_kv_heads) as u64, "heads");
    for (layer, window) in windows.into_iter().enumerate() {
        progress.stage(format!("layer {} of {}", layer + 1, s.n_layers));
        let states = dump.layer(layer)?;
        let keys = |head| states.read(State::KPre, head, 0, dump.n);
        let queries = |head| {
            let all = states.read(State::QPre, head, 0, dump.n)?;
            Ok(all.select(Axis(0), &sample.rows))
        };
        let mut done = |_, _: &_| progress.advance(1);
        let part = priors::fit_layer(&keys, &queries, s, &sample, &rope, window, &mut done)?;
        section.layers.push(part);
    }
    drop(progress);
    write_section(output, dump, section, &args.output, device, global)
}
