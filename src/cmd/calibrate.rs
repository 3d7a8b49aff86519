//! `kvsmith calibrate`: checkpoint and text to artifact, each layer fitted while its states are in
//! memory.

use std::path::PathBuf;

use ndarray::{Array3, Axis, s};
use serde_json::{Value, json};

use super::{
    check_points, check_wrope_position, load_corpus, model_manifest, open_model, print_json, report_head,
};
use crate::artifact::{self, LayerPart, Origin, Section};
use crate::capture::Capture;
use crate::cli::{Fit, Global, Input, parse_count};
use crate::corpus::Corpus;
use crate::dump::Sizes;
use crate::error::{Kind, Result};
use crate::method::a2ats::{self, FitParams};
use crate::model::Decoder;
use crate::progress::{Log, Progress, size};
use crate::stats::moments::LayerMoments;
use crate::store::{Output, Spec};
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
    #[command(flatten)]
    fit: Fit,
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
    let device = global.cpu_only("calibrate")?;
    let start = std::time::Instant::now();
    let output = Output::create(&args.output)?;
    let decoder = open_model(&args.model, log)?;
    check_wrope_position(args.wrope_position, &decoder, log);
    let corpus = load_corpus(&args.model, &decoder, &args.input, global)?;
    let params = FitParams {
        size: args.fit.size,
        iterations: args.fit.iterations,
        init: args.fit.init,
        seed: global.seed,
        wrope_position: args.wrope_position,
    };
    let kept = corpus.kept();
    let n_kept = kept.iter().filter(|k| **k).count();
    params.check(n_kept)?;
    check_points(n_kept, params.size, log);
    let model = model_manifest(&decoder, log)?;
    let sizes = Sizes::of(&model)?;
    let specs = a2ats::specs(sizes, params.size);
    let origin = Origin {
        model,
        calibration: corpus.manifest(),
        device: device.to_string(),
    };
    let work = match &args.work {
        Some(dir) => {
            let identity = json!({
                "tool_version": env!("CARGO_PKG_VERSION"), "device": device, "model": origin.model,
                "calibration": origin.calibration, "a2ats": params.manifest(),
            });
            Some(Work::open(dir, &identity, args.resume, &specs)?)
        }
        None => None,
    };
    plan(&decoder, &corpus, &specs, log);

    let mut layers = Vec::new();
    let mut capture = match work
        .as_ref()
        .map(|w| w.load([corpus.n_tokens(), decoder.config.hidden_size]))
        .transpose()?
        .flatten()
    {
        Some((hidden, parts)) => {
            log.note(&format!(
                "going on after layer {} of {}",
                parts.len(),
                sizes.n_layers
            ));
            layers = parts;
            Capture::at(&decoder, &corpus, hidden, layers.len())
        }
        None => Capture::start(&decoder, &corpus)?,
    };
    let remaining = sizes.n_layers - layers.len();
    // One unit per token captured and one per key fitted.
    let per_layer = corpus.n_tokens() * (1 + sizes.n_kv_heads);
    let progress = log.progress((remaining * per_layer) as u64, "states");
    while layers.len() < sizes.n_layers {
        let part = calibrate_layer(&mut capture, &decoder, &corpus, &kept, &params, &progress, log)?;
        if let Some(work) = &work {
            work.save(
                layers.len(),
                &part,
                &capture.hidden,
                layers.len() + 1 == sizes.n_layers,
            )?;
        }
        layers.push(part);
    }
    drop(progress);
    let section = Section {
        name: a2ats::SECTION,
        params: params.manifest(),
        specs,
        layers,
    };
    artifact::write(output, &origin, vec![section])?;
    if let Some(work) = &work {
        work.clear(sizes.n_layers);
    }
    let seconds = start.elapsed().as_secs_f64();
    log.note(&format!("wrote {} in {seconds:.1} s", args.output.display()));
    if global.json {
        print_json(&json!({
            "artifact": args.output, "tokens": corpus.n_tokens(), "layers": sizes.n_layers,
            "seconds": seconds, "device": device,
        }))?;
    }
    Ok(())
}

/// Captures one layer and fits it.
fn calibrate_layer(
    capture: &mut Capture,
    decoder: &Decoder,
    corpus: &Corpus,
    kept: &[bool],
    params: &FitParams,
    progress: &Progress,
    log: Log,
) -> Result<LayerPart> {
    let c = &decoder.config;
    let layer = capture.next_layer;
    progress.stage(format!("layer {} of {}: capture", layer + 1, c.n_layers));
    let mut keys = Array3::<f32>::zeros((c.n_kv_heads, corpus.n_tokens(), c.head_dim));
    let mut sums = LayerMoments::new(c.n_kv_heads, c.head_dim);
    capture.layer(progress, &mut |rows, states| {
        sums.add(
            states.q_pre.view(),
            &kept[rows.clone()],
            &decoder.rope,
            params.wrope_position,
        );
        keys.slice_mut(s![.., rows, ..]).assign(&states.k_pre);
        Ok(())
    })?;
    progress.stage(format!("layer {} of {}: codebooks", layer + 1, c.n_layers));
    let head_keys = |head| Ok(keys.index_axis(Axis(0), head).to_owned());
    let mut done = |head: usize, quality: &Value| {
        progress.advance(corpus.n_tokens() as u64);
        report_head(progress, log, layer, head, quality);
    };
    a2ats::fit_layer(&head_keys, kept, &sums, params, layer, &mut done)
}

/// Says what the run will need.
fn plan(decoder: &Decoder, corpus: &Corpus, specs: &[Spec], log: Log) {
    let c = &decoder.config;
    let n = corpus.n_tokens();
    let longest = corpus.longest_block();
    let per_token = c.hidden_size + c.n_kv_heads * c.head_dim;
    let per_row = 2 * c.n_heads * c.head_dim + 3 * c.n_kv_heads * c.head_dim + c.hidden_size;
    let mlp = longest.min(2048) * (2 * c.intermediate_size + 2 * c.hidden_size);
    let fit = 3 * n * c.head_dim;
    let file: usize = specs
        .iter()
        .map(|s| s.bytes().unwrap_or(usize::MAX))
        .fold(0, usize::saturating_add);
    let memory = 4 * (n * per_token + (longest * per_row + mlp).max(fit)) + file;
    log.note(&format!(
        "plan: about {} of memory besides the pages of one layer, {} artifact",
        size(memory),
        size(file)
    ));
}
