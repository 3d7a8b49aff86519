//! `kvsmith codebook`: the A2ATS section of a dump.

use std::path::PathBuf;

use serde_json::Value;

use super::{check_points, layer_keys, report_head, write_section};
use crate::artifact::Section;
use crate::cmd::args::{Fit, Global};
use crate::dump::{Dump, State};
use crate::error::{Error, Result};
use crate::method::a2ats::{self, FitParams};
use crate::stats::moments::Moments;
use crate::store::Output;

/// Arguments of `codebook`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Dump folder
    #[arg(long, value_name = "DIR")]
    dump: PathBuf,
    /// Moments for another WRoPE position, or for standard RoPE (default: the dump's own)
    #[arg(long, value_name = "FILE")]
    moments: Option<PathBuf>,
    /// Section file to write
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    #[command(flatten)]
    fit: Fit,
}

/// Runs `codebook`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_device()?;
    let dump = Dump::open(&args.dump)?;
    let s = dump.sizes;
    let path = args.moments.clone().unwrap_or_else(|| dump.moments_path());
    let moments = Moments::read(&path, s.n_layers, s.n_kv_heads, s.head_dim)?;
    if moments.origin["model"] != dump.model || moments.origin["calibration"] != dump.calibration {
        return Err(Error::failed(format!(
            "{} was not taken from {}",
            path.display(),
            args.dump.display()
        ))
        .hint("give the moments of the same dump"));
    }
    let params = FitParams {
        size: args.fit.size,
        iterations: args.fit.iterations,
        min_gain: args.fit.min_gain,
        init: args.fit.init,
        seed: global.seed,
        position: moments.position,
        metric: args.fit.metric,
    };
    let rope = dump.rope()?;
    let kept = dump.kept.iter().filter(|k| **k).count();
    params.check(kept)?;
    check_points(kept, params.size, log);
    let output = Output::create(&args.output)?;
    let progress = log.progress((s.n_layers * s.n_kv_heads) as u64, "heads");
    let specs = a2ats::specs(s, params.size);
    let mut section = Section::new(a2ats::SECTION, params.manifest(), specs, device.as_ref());
    for (i, sums) in moments.layers.iter().enumerate() {
        progress.stage(format!("layer {} of {}", i + 1, s.n_layers));
        let states = dump.layer(i)?;
        let keys = |head| states.read(State::KPre, head, 0, dump.n);
        let mut done = |head: usize, quality: &Value| {
            progress.advance(1);
            report_head(&progress, log, i, head, quality);
        };
        let keys = layer_keys(device.as_ref(), &dump, &rope, &keys);
        let part = a2ats::fit_layer(&keys, sums, &params, i, &mut done)?;
        section.layers.push(part);
    }
    drop(progress);
    write_section(output, dump, section, &args.output, device.name(), global)
}
