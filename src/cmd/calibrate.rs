//! `kvsmith calibrate`: checkpoint and text to artifact, each layer fitted while its states are in
//! memory.

use std::path::PathBuf;

use ndarray::{Array3, Axis, s};
use serde_json::{Value, json};

use super::{
    check_points, check_sample, check_wrope_position, layers_on, load_corpus, model_manifest, open_model,
    print_json, report_head,
};
use crate::artifact::{self, LayerPart, Origin, Section};
use crate::capture::Capture;
use crate::cmd::args::{Fit, Global, Input, RopeKind};
use crate::compute::cpu::Cpu;
use crate::compute::device::Device;
use crate::corpus::Corpus;
use crate::dump::Sizes;
use crate::error::{Kind, Result};
use crate::flags::parse_count;
use crate::method::LayerKeys;
use crate::method::a2ats::{self, FitParams};
use crate::method::lfps::priors::{self, Sample};
use crate::method::selfindex::{self, Center};
use crate::model::Decoder;
use crate::progress::{Log, Progress, size};
use crate::stats::moments::LayerMoments;
use crate::store::Output;
use crate::work::Work;

/// Arguments of `calibrate`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Folder of a Hugging Face checkpoint
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    #[command(flatten)]
    input: Input,
    /// Artifact to write
    #[arg(short, long, value_name = "ART.safetensors")]
    output: PathBuf,
    /// Folder for what a stopped run needs to go on: finished layers and the hidden states
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Go on after the last finished layer in --work
    #[arg(long, requires = "work")]
    resume: bool,
    /// Relative position at which the query moments are taken
    #[arg(long, value_name = "P", default_value_t = 2048, value_parser = parse_count)]
    wrope_position: usize,
    /// Rotation that the codebooks are for
    #[arg(long, value_enum, default_value_t = RopeKind::Windowed)]
    rope: RopeKind,
    #[command(flatten)]
    fit: Fit,
    /// What the sign patterns are taken around
    #[arg(long, value_enum, default_value_t = Center::Median)]
    center: Center,
}

/// Runs `calibrate`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    calibrate(args, global).map_err(|e| match (e.kind(), &args.work) {
        (Kind::Interrupted, Some(_)) => {
            e.hint("the same command with --resume goes on after the last finished layer")
        }
        (Kind::Interrupted, None) => e.hint("with --work DIR a stopped run can go on"),
        _ => e,
    })
}

fn calibrate(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_device()?;
    let on_gpu = device.cuda().is_some();
    if device.adapter().is_some() {
        let model = if on_gpu {
            "the priors run"
        } else {
            "the model and the priors run"
        };
        log.note(&format!("{model} on the CPU, everything else on the device"));
    }
    let start = std::time::Instant::now();
    let output = Output::create(&args.output)?;
    let decoder = open_model(&args.model, log)?;
    check_wrope_position(args.wrope_position, &decoder, log);
    let corpus = load_corpus(&args.model, &decoder, &args.input, global)?;
    let params = FitParams {
        size: args.fit.size,
        iterations: args.fit.iterations,
        min_gain: args.fit.min_gain,
        init: args.fit.init,
        seed: global.seed,
        position: args.rope.position(args.wrope_position),
        metric: args.fit.metric,
    };
    let kept = corpus.kept();
    let n_kept = kept.iter().filter(|k| **k).count();
    params.check(n_kept)?;
    check_points(n_kept, params.size, log);
    let sample = Sample::new(&corpus.block_start, &kept);
    check_sample(&sample, log);
    let model = model_manifest(&decoder, log)?;
    let sizes = Sizes::of(&model)?;
    let mut sections = [
        Section::new(
            a2ats::SECTION,
            params.manifest(),
            a2ats::specs(sizes, params.size),
            device.as_ref(),
        ),
        Section::new(
            selfindex::SECTION,
            selfindex::manifest(args.center),
            selfindex::specs(sizes),
            device.as_ref(),
        ),
        Section::new(
            priors::SECTION,
            priors::manifest(),
            priors::specs(sizes, &priors::manifest())?,
            &Cpu,
        ),
    ];
    let origin = Origin {
        model,
        calibration: corpus.manifest(),
    };
    let work = match &args.work {
        Some(dir) => {
            let identity = json!({
                "tool_version": env!("CARGO_PKG_VERSION"), "model": origin.model,
                "calibration": origin.calibration,
                "precision": format!("{:?}", global.precision), "sections": sections.iter().map(|s| &s.params).collect::<Vec<_>>(),
            });
            Some(Work::open(dir, &identity, args.resume, &sections)?)
        }
        None => None,
    };
    plan(&decoder, &corpus, &sample, &sections, log);

    let model_layers = layers_on(device.as_ref(), &decoder, global)?;
    let resumed = work
        .as_ref()
        .map(|w| w.load([corpus.n_tokens(), decoder.config.hidden_size]));
    let mut capture = match resumed.transpose()?.flatten() {
        Some((hidden, layers)) => {
            let done = layers.len();
            log.note(&format!("going on after layer {done} of {}", sizes.n_layers));
            layers
                .into_iter()
                .for_each(|parts| add_layer(&mut sections, parts));
            Capture::at(model_layers.as_ref(), &corpus, hidden, done)
        }
        None => Capture::start(model_layers.as_ref(), &corpus)?,
    };
    let remaining = sizes.n_layers - capture.next_layer;
    // One unit per token captured and, per section, one per key fitted.
    let per_layer = corpus.n_tokens() * (1 + sections.len() * sizes.n_kv_heads);
    let progress = log.progress((remaining * per_layer) as u64, "states");
    while capture.next_layer < sizes.n_layers {
        let layer = capture.next_layer;
        let parts = calibrate_layer(
            device.as_ref(),
            &mut capture,
            &decoder,
            &corpus,
            &kept,
            &sample,
            &params,
            args.center,
            &progress,
            log,
        )?;
        if let Some(work) = &work {
            work.save(
                layer,
                &parts,
                &capture.hidden,
                capture.next_layer == sizes.n_layers,
            )?;
        }
        add_layer(&mut sections, parts);
    }
    drop(progress);
    artifact::write(output, &origin, sections.into())?;
    if let Some(work) = &work {
        work.clear(sizes.n_layers);
    }
    let seconds = start.elapsed().as_secs_f64();
    log.note(&format!("wrote {} in {seconds:.1} s", args.output.display()));
    if global.json {
        print_json(&json!({
            "artifact": args.output, "tokens": corpus.n_tokens(), "layers": sizes.n_layers,
            "seconds": seconds, "device": device.name(),
        }))?;
    }
    Ok(())
}

/// Adds a layer's parts, one to each section.
fn add_layer(sections: &mut [Section], parts: Vec<LayerPart>) {
    for (section, part) in sections.iter_mut().zip(parts) {
        section.layers.push(part);
    }
}

/// Captures one layer and fits it: a part per section.
#[expect(
    clippy::too_many_arguments,
    reason = "one call; a struct would name the same things twice"
)]
fn calibrate_layer(
    device: &dyn Device,
    capture: &mut Capture,
    decoder: &Decoder,
    corpus: &Corpus,
    kept: &[bool],
    sample: &Sample,
    params: &FitParams,
    center: Center,
    progress: &Progress,
    log: Log,
) -> Result<Vec<LayerPart>> {
    let c = &decoder.config;
    let layer = capture.next_layer;
    progress.stage(format!("layer {} of {}: capture", layer + 1, c.n_layers));
    let mut keys = Array3::<f32>::zeros((c.n_kv_heads, corpus.n_tokens(), c.head_dim));
    let mut queries = Array3::<f32>::zeros((c.n_heads, sample.rows.len(), c.head_dim));
    let mut sums = LayerMoments::new(c.n_kv_heads, c.head_dim);
    capture.layer(progress, &mut |rows, states| {
        let (queries_pre, kept) = (states.q_pre.view(), &kept[rows.clone()]);
        sums.add(device, queries_pre, kept, &decoder.rope, params.position)?;
        for (i, row) in sample.within(&rows) {
            let query = states.q_pre.slice(s![.., row, ..]);
            queries.slice_mut(s![.., i, ..]).assign(&query);
        }
        keys.slice_mut(s![.., rows, ..]).assign(&states.k_pre);
        Ok(())
    })?;
    progress.stage(format!("layer {} of {}: codebooks", layer + 1, c.n_layers));
    let head_keys = |head| Ok(keys.index_axis(Axis(0), head).to_owned());
    let mut done = |head: usize, quality: &Value| {
        progress.advance(corpus.n_tokens() as u64);
        report_head(progress, log, layer, head, quality);
    };
    let layer_keys = LayerKeys {
        device,
        read: &head_keys,
        n_kv_heads: c.n_kv_heads,
        block_start: &corpus.block_start,
        kept,
        rope: &decoder.rope,
    };
    let codebooks = a2ats::fit_layer(&layer_keys, &sums, params, layer, &mut done)?;
    progress.stage(format!("layer {} of {}: signs", layer + 1, c.n_layers));
    let mut done = |_: usize, _: &Value| progress.advance(corpus.n_tokens() as u64);
    let signs = selfindex::fit_layer(&layer_keys, center, &mut done)?;
    progress.stage(format!("layer {} of {}: priors", layer + 1, c.n_layers));
    let head_queries = |head| Ok(queries.index_axis(Axis(0), head).to_owned());
    let (sizes, window) = (Sizes::of(&c.canonical())?, c.windows[layer]);
    let mut done = |_: usize, _: &Value| progress.advance(corpus.n_tokens() as u64);
    let rope = &decoder.rope;
    let priors = priors::fit_layer(&head_keys, &head_queries, sizes, sample, rope, window, &mut done)?;
    Ok(vec![codebooks, signs, priors])
}

/// Says what the run will need.
fn plan(decoder: &Decoder, corpus: &Corpus, sample: &Sample, sections: &[Section], log: Log) {
    let c = &decoder.config;
    let n = corpus.n_tokens();
    let longest = corpus.longest_block();
    let per_token = c.hidden_size + c.n_kv_heads * c.head_dim;
    let per_row = 2 * c.n_heads * c.head_dim + 3 * c.n_kv_heads * c.head_dim + c.hidden_size;
    let mlp = longest.min(2048) * (2 * c.intermediate_size + 2 * c.hidden_size);
    let fit = 3 * n * c.head_dim;
    let file: usize = sections
        .iter()
        .flat_map(|s| &s.specs)
        .map(|s| s.bytes().unwrap_or(usize::MAX))
        .fold(0, usize::saturating_add);
    // The sampled queries stay while a layer is captured and fitted.
    let kept = n * per_token + sample.rows.len() * c.n_heads * c.head_dim;
    let memory = 4 * (kept + (longest * per_row + mlp).max(fit)) + file;
    log.note(&format!(
        "plan: about {} of memory besides the pages of one layer, {} artifact",
        size(memory),
        size(file)
    ));
}
