//! `kvsmith signs`: the Self-Indexing section of a dump.

use std::path::PathBuf;

use super::{layer_keys, write_section};
use crate::artifact::Section;
use crate::cmd::args::Global;
use crate::dump::{Dump, State};
use crate::error::Result;
use crate::method::selfindex::{self, Center};
use crate::store::Output;

/// Arguments of `signs`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Dump folder
    #[arg(long, value_name = "DIR")]
    dump: PathBuf,
    /// Section file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// What the sign patterns are taken around
    #[arg(long, value_enum, default_value_t = Center::Median)]
    center: Center,
}

/// Runs `signs`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_device()?;
    let dump = Dump::open(&args.dump)?;
    let s = dump.sizes;
    let rope = dump.rope()?;
    let output = Output::create(&args.output)?;
    let mut section = Section::new(
        selfindex::SECTION,
        selfindex::manifest(args.center),
        selfindex::specs(s),
        device.as_ref(),
    );
    let progress = log.progress((s.n_layers * s.n_kv_heads) as u64, "heads");
    for layer in 0..s.n_layers {
        progress.stage(format!("layer {} of {}", layer + 1, s.n_layers));
        let states = dump.layer(layer)?;
        let keys = |head| states.read(State::KPre, head, 0, dump.n);
        let mut done = |_, _: &_| progress.advance(1);
        let keys = layer_keys(device.as_ref(), &dump, &rope, &keys);
        let part = selfindex::fit_layer(&keys, args.center, &mut done)?;
        section.layers.push(part);
    }
    drop(progress);
    write_section(output, dump, section, &args.output, device.name(), global)
}
