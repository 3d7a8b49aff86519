//! `kvsmith plan`: what a calibration and a run would take, before any weight is read.

mod serving;
mod shards;

use serde_json::json;

use super::args::Global;
use super::calibrate::{Settings, size_text};
use super::{check_wrope_position, load_texts, merge, print, print_json};
use crate::calibration;
use crate::calibration::stages::Stages;
use crate::calibration::verdict::VerdictSettings;
use crate::cmd::bench::free_bytes;
use crate::compute::Workload;
use crate::corpus::{Corpus, Reserve};
use crate::env::Silent;
use crate::error::Result;
use crate::estimate::{Estimate, Serving, Times};
use crate::machine::Machine;
use crate::method::a2ats;
use crate::method::registry::bench_params;
use crate::model::ModelConfig;
use crate::model::folder;
use crate::wording::{counted, duration, harmless, size};
use shards::{Job, ShardFlags, ShardPlan};

/// Arguments of `plan`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Skip the measurements on this machine, and report no times
    #[arg(long)]
    no_probe: bool,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    shards: ShardFlags,
}

/// Runs `plan`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    plan(&args.settings, !args.no_probe, Some(&args.shards), global)
}

/// Does what `plan` does with the settings of a calibration.
///
/// # Errors
/// Those of a calibration before its first layer.
pub fn show(settings: &Settings, global: &Global) -> Result<()> {
    plan(settings, true, None, global)
}

fn plan(settings: &Settings, probe: bool, shards: Option<&ShardFlags>, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_device(Workload::Fits)?;
    let config = ModelConfig::load(&settings.model)?;
    check_wrope_position(settings.wrope_position, &config, log);
    let own = settings.plain(global);
    let (corpus, reserve) = texts(settings, &own, &config, global)?;
    let texts = (&corpus, &reserve);
    let estimate = Estimate::new((&config, &settings.model), &own, texts, device.as_ref(), &log)?;
    let (codewords, weights, disk) = (estimate.codewords, &estimate.weights, &estimate.disk);
    if probe && device.cuda().is_some() {
        log.note(
            "the forward pass of the model is timed on the CPU, although calibration runs it on the device",
        );
    }
    let times = if probe {
        log.note("measuring this machine twice: one layer of the model's shape, and a small calibration");
        let mut silent = global.clone();
        silent.silent = true;
        let device = silent.open_device(Workload::Model)?;
        let machine = Machine {
            precision: global.precision,
            ..Machine::new(device.as_ref(), &Silent)
        };
        Some([estimate.measure(machine)?, estimate.measure(machine)?])
    } else {
        None
    };
    let range = times.as_ref().map(|both| {
        let [a, b] = both.each_ref().map(|times| times.stages.total());
        [a.min(b), a.max(b)]
    });
    // What else runs on the machine only adds to a time.
    let times = times.and_then(|both| {
        let total = |times: &Times| times.stages.total();
        both.into_iter().min_by(|a, b| total(a).total_cmp(&total(b)))
    });
    let stages = times.as_ref().map(|times| &times.stages);
    let job = Job {
        config: &config,
        corpus: &corpus,
        device: device.as_ref(),
        fits: &estimate.fits,
        sections: &estimate.sections,
        memory: &estimate.memory,
        weights,
        artifacts: estimate.artifacts(),
        judged: &estimate.judged,
        times: times.as_ref(),
    };
    let shards = shards.map(|flags| ShardPlan::from_flags(flags, &job));
    let shards = shards.transpose()?.flatten();
    let sizes = [(a2ats::SIZE.to_owned(), codewords.into())];
    let indexes = bench_params(sizes.into_iter().collect())?;
    let serving = Serving::estimate(
        &config,
        [weights.bytes, weights.step],
        probe.then_some(&indexes),
        global.seed,
    )?;
    let held_out = corpus.n_held_out();
    if global.json {
        let mut document = json!({
            "device": device.name(),
            "weights_bytes": weights.bytes,
            "weights_found": weights.read,
            "tokens": corpus.n_tokens(),
            "blocks": corpus.n_blocks(),
            "held_out_tokens": held_out,
            "codewords": codewords,
            "memory_bytes": estimate.memory_bytes,
            "layer_weights_bytes": weights.layer,
            "memory_free_bytes": free_bytes(),
            "artifact_bytes": disk.artifact,
            "work_bytes": disk.work,
            "dump_bytes": disk.dump,
            "stages": stages.map(Stages::json),
            "seconds": stages.map(Stages::total),
            "seconds_range": range,
            "shards": shards.as_ref().map(ShardPlan::json),
        });
        merge(&mut document, &serving::json(&serving));
        return print_json(global, &document);
    }
    let mut out = format!(
        "model      {}: {}, {} layers, {} query and {} KV heads of {} channels\n           {} of weights{}\n",
        harmless(&folder::name(&settings.model)),
        config.model_type,
        config.n_layers(),
        config.n_heads,
        config.n_kv_heads,
        config.head_dim,
        size(weights.bytes),
        if weights.read {
            ""
        } else {
            " in bf16 (assumed: the folder has no weights)"
        }
    );
    out += &format!(
        "text       {} tokens in {} of at most {} each, {held_out} held out{}\n",
        corpus.n_tokens(),
        counted(corpus.n_blocks(), "block"),
        corpus.seq_len,
        if settings.input.is_given() {
            ""
        } else {
            "\n           (no text given: assumes --max-tokens and --uuid-tokens in full)"
        }
    );
    out += "\ncalibrate\n";
    if estimate
        .fits
        .iter()
        .any(|fit| fit.kind().name() == a2ats::SECTION)
    {
        out += &format!(
            "  size     {}\n           (codebook --size {codewords})\n",
            size_text(&own, &config, codewords)
        );
    }
    out += &format!(
        "  memory   {}, plus {} for one layer's weights; {} are free\n",
        size(estimate.memory_bytes),
        size(weights.layer),
        size(free_bytes())
    );
    out += &format!(
        "  disk     artifact {}; --work needs at most {} more\n           (a dump with --queries --values needs {})\n",
        size(disk.artifact),
        size(disk.work),
        size(disk.dump)
    );
    match stages {
        Some(stages) => {
            out += &format!("  time     {}\n", range.map_or(String::new(), range_text));
            for (name, seconds) in stages.iter() {
                out += &format!("           {name:<20} {}\n", duration(seconds));
            }
        }
        None => out += "  time     not measured (--no-probe)\n",
    }
    out += &shards.as_ref().map(ShardPlan::text).unwrap_or_default();
    out += &serving::text(&serving);
    print(&out)
}

/// Two measurements that differ by this factor give a range and not a time.
const UNSTEADY: f64 = 2.0;

/// Writes the times of two measurements.
fn range_text([low, high]: [f64; 2]) -> String {
    let times = [low, high].map(duration);
    if high / low.max(f64::MIN_POSITIVE) < UNSTEADY {
        format!(
            "{} (a second measurement was {:.0}% slower)",
            times[0],
            100.0 * (high / low.max(f64::MIN_POSITIVE) - 1.0)
        )
    } else {
        format!(
            "{} to {}: two measurements of this machine differ by a factor of\n           {:.1}, so the times are uncertain; the faster one is listed below",
            times[0],
            times[1],
            high / low.max(f64::MIN_POSITIVE)
        )
    }
}

/// Reads the text, and what the verdict wants beyond it; without text, makes a stand-in of the lengths that the flags
/// give.
fn texts(
    settings: &Settings,
    own: &calibration::CalibrationSettings,
    config: &ModelConfig,
    global: &Global,
) -> Result<(Corpus, Reserve)> {
    if settings.input.is_given() {
        let wanted = own.verdict.as_ref().map(VerdictSettings::wanted);
        return load_texts(&settings.model, config, &settings.input, wanted, global);
    }
    let options = settings.input.options(global.seed);
    let seq_len = options.block_length(config);
    let text = vec![vec![0; options.max_tokens.min(1 << 28)]];
    let uuids = vec![0; options.uuids(text[0].len()).min(1 << 28)];
    let beyond = own.beyond(seq_len);
    let has_uuids = !uuids.is_empty();
    let reserve = Reserve {
        text: vec![0; beyond.text.min(1 << 28)],
        uuids: vec![0; if has_uuids { beyond.uuids.min(1 << 28) } else { 0 }],
        is_cut: false,
    };
    Ok((Corpus::cut(&text, uuids, seq_len, &options)?, reserve))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measurements_that_differ_much_give_a_range() {
        let steady = range_text([100.0, 110.0]);
        assert_eq!(steady, "100 s (a second measurement was 10% slower)");
        for high in [200.0, 1000.0] {
            let text = range_text([100.0, high]);
            let factor = format!("by a factor of\n           {:.1}", high / 100.0);
            assert!(text.starts_with("100 s to ") && text.contains(&factor), "{text}");
        }
    }
}
