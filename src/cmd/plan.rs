//! `kvsmith plan`: what a calibration and a run would take, before any weight is read.

mod line;
mod probe;
pub(super) mod serving;
mod shards;

use std::path::Path;

use serde_json::json;

use super::args::Global;
use super::calibrate::{Settings, size_text};
use super::{check_wrope_position, load_texts, merge, print, print_json};
use crate::artifact::{Fit, Section};
use crate::calibration;
use crate::calibration::memory::{JudgedRows, MemoryPlan};
use crate::calibration::stages::Stages;
use crate::calibration::verdict::VerdictSettings;
use crate::cmd::bench::free_bytes;
use crate::compute::Workload;
use crate::corpus::{Corpus, Reserve};
use crate::dump::{self, DumpOptions};
use crate::error::Result;
use crate::float::Float;
use crate::method::a2ats;
use crate::model::ModelConfig;
use crate::model::folder;
use crate::store;
use crate::wording::{counted, duration, harmless, size};
use serving::Serving;
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
    let material = own.material(&corpus, &reserve);
    let kept = corpus.kept();
    let fits = own.fits(&config, &corpus, &kept, &log)?;
    let section = |fit: &dyn Fit| Section::new(fit, config.sizes(), device.as_ref());
    let sections = fits.iter().map(|fit| section(fit.as_ref()));
    let sections: Vec<Section> = sections.collect::<Result<_>>()?;
    let codewords = own.codewords(&config, &kept);
    let weights = Weights::of(&config, &settings.model);
    let judged = own.judged_rows(&fits, material.as_ref());
    let memory = MemoryPlan::new(&config, &corpus, device.as_ref(), &fits, &sections, &judged);
    let disk = Disk::of(&config, &corpus, memory.results, &judged);
    if probe && device.cuda().is_some() {
        log.note(
            "the forward pass of the model is timed on the CPU, although calibration runs it on the device",
        );
    }
    let times = match probe {
        true => {
            let mut settings = own.clone();
            settings.sections = settings.sections.with_codewords(codewords);
            log.note("measuring this machine twice: one layer of the model's shape, and a small calibration");
            let measure = || probe::times(&settings, &config, &corpus, &fits, &judged, global);
            let both = [measure()?, measure()?];
            Some(both)
        }
        false => None,
    };
    let range = times.as_ref().map(|both| {
        let [a, b] = both.each_ref().map(|times| times.stages.total());
        [a.min(b), a.max(b)]
    });
    // What else runs on the machine only adds to a time.
    let times = times.and_then(|both| {
        let total = |times: &probe::Times| times.stages.total();
        both.into_iter().min_by(|a, b| total(a).total_cmp(&total(b)))
    });
    let stages = times.as_ref().map(|times| &times.stages);
    let job = Job {
        config: &config,
        corpus: &corpus,
        device: device.as_ref(),
        fits: &fits,
        sections: &sections,
        memory: &memory,
        weights: &weights,
        artifacts: [
            Some(Disk::of(&config, &corpus, memory.results, &JudgedRows::default()).artifact),
            (judged.variants > 0).then_some(disk.artifact),
        ],
        judged: &judged,
        times: times.as_ref(),
    };
    let shards = shards.map(|flags| ShardPlan::of(flags, &job));
    let shards = shards.transpose()?.flatten();
    let serving = Serving::of(
        &config,
        [weights.bytes, weights.step],
        probe.then_some(codewords),
        global,
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
            "memory_bytes": memory.total(),
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
        merge(&mut document, &serving.json());
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
    if fits.iter().any(|fit| fit.kind().name() == a2ats::SECTION) {
        out += &format!(
            "  size     {}\n           (codebook --size {codewords})\n",
            size_text(&own, &config, codewords)
        );
    }
    out += &format!(
        "  memory   {}, plus {} for one layer's weights; {} are free\n",
        size(memory.total()),
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
    out += &serving.text();
    print(&out)
}

/// Two measurements that differ by this factor give a range and not a time.
const UNSTEADY: f64 = 2.0;

/// Writes the times of two measurements.
fn range_text([low, high]: [f64; 2]) -> String {
    let times = [low, high].map(duration);
    match high / low.max(f64::MIN_POSITIVE) < UNSTEADY {
        true => format!(
            "{} (a second measurement was {:.0}% slower)",
            times[0],
            100.0 * (high / low.max(f64::MIN_POSITIVE) - 1.0)
        ),
        false => format!(
            "{} to {}: two measurements of this machine differ by a factor of\n           {:.1}, so the times are uncertain; the faster one is listed below",
            times[0],
            times[1],
            high / low.max(f64::MIN_POSITIVE)
        ),
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

/// The sizes of the weights.
struct Weights {
    /// Bytes of all weights of the model.
    bytes: usize,
    /// Bytes of the weights of the largest layer's projections.
    layer: usize,
    /// Bytes that a pass over a text reads: all but the output projection, unless the embedding is the same matrix.
    pass: usize,
    /// Bytes that a decode step reads: of a mixture of experts, those that a token passes, and of two embeddings, the output
    /// projection.
    step: usize,
    /// Whether `bytes` is the size of existing files.
    read: bool,
}

impl Weights {
    fn of(c: &ModelConfig, dir: &Path) -> Self {
        let each = c.layer_weights();
        let sum = |which: usize| each.iter().map(|of| of[which]).sum::<f64>() as usize;
        let (layers, read) = (sum(0), sum(1));
        let layer = each[c.largest_layer()][0] as usize;
        let embeddings = if c.tie_word_embeddings { 1 } else { 2 };
        let embedding = c.vocab_size * c.hidden_size;
        let (pass, step) = (layers + embedding, read + embedding);
        let all = layers + embeddings * embedding;
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path());
        let weights = files.filter(|file| file.extension().is_some_and(|of| of == "safetensors"));
        // A GGUF file is no folder. Files in the hub's cache are links, which `metadata` follows.
        let all_files = weights.chain(dir.is_file().then(|| dir.to_owned()));
        let sizes = all_files.filter_map(|file| std::fs::metadata(file).ok());
        let stored: u64 = sizes.map(|of| of.len()).sum();
        match stored as usize {
            0 => Self {
                bytes: 2 * all,
                layer: 2 * layer,
                pass: 2 * pass,
                step: 2 * step,
                read: false,
            },
            bytes => Self {
                bytes,
                layer: (bytes as f64 * layer as f64 / all as f64) as usize,
                pass: (bytes as f64 * pass as f64 / all as f64) as usize,
                step: (bytes as f64 * step as f64 / all as f64) as usize,
                read: true,
            },
        }
    }
}

/// The bytes that calibration leaves on the disk.
struct Disk {
    artifact: usize,
    /// The most that the work folder holds at once.
    work: usize,
    dump: usize,
}

/// Bytes of parts of the manifest: the fixed part, the report of a KV head, the report of a query head, and what a
/// method loses with one budget per head.
const MANIFEST: [usize; 4] = [6500, 800, 450, 25];

impl Disk {
    fn of(config: &ModelConfig, corpus: &Corpus, results: usize, judged: &JudgedRows) -> Self {
        let sizes = config.sizes();
        let n = corpus.n_tokens();
        let hidden = n * config.hidden_size * size_of::<f32>();
        let options = DumpOptions {
            queries: true,
            values: true,
            dtype: Float::Bf16,
            wrope_position: 0,
        };
        let layer = store::total_bytes(&dump::layer_specs(sizes, n, &options));
        // Three sums of squares per head, in f64.
        let moments = 3 * 8 * sizes.n_layers * sizes.n_kv_heads * sizes.head_dim.pow(2);
        let [fixed, kv_head, query_head, head_budget] = MANIFEST;
        let kv_heads = sizes.n_layers * sizes.n_kv_heads;
        let query_heads = sizes.n_layers * sizes.n_heads;
        let reports = fixed + kv_heads * kv_head + query_heads * query_head;
        let artifact = results + reports + judged.variants * (judged.row_bytes + kv_heads * head_budget);
        Self {
            artifact,
            // The new hidden states are complete before the old ones are removed.
            work: artifact + 2 * hidden,
            dump: sizes.n_layers * layer + moments + n * size_of::<u32>(),
        }
    }
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
