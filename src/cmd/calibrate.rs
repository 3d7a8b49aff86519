//! `kvsmith calibrate`: makes an artifact from a checkpoint and text; each layer is fitted while its states are in
//! memory.

pub mod plan;
pub mod stages;

use std::path::{Path, PathBuf};

use ndarray::{Array3, Axis, s};
use serde_json::{Value, json};

use self::plan::MemoryPlan;
use self::stages::{CAPTURE, Stages};
use super::sections::{SectionFlags, fit_layer};
use super::verdict::{self, Judging, VerdictFlags};
use super::{check_wrope_position, finish, layers_on, load_corpus, model_manifest, open_model, output};
use crate::artifact::{self, Fit, FitInput, FitText, LayerParts, LayerStates, MomentsRead, Section};
use crate::capture::Capture;
use crate::cmd::args::{Global, Input, RopeKind, model_folder};
use crate::compute::device::Device;
use crate::corpus::{Corpus, Origin};
use crate::disk::Output;
use crate::error::{Error, Kind, Result};
use crate::flags::parse_count;
use crate::heap;
use crate::method::sections::SECTIONS;
use crate::model::forward::Layers;
use crate::model::{Decoder, ModelConfig};
use crate::progress::{Log, Progress};
use crate::stats::moments::{LayerMoments, Position, QuerySums};
use crate::work::WorkFolder;

/// Arguments of `calibrate`.
#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens"]).required(true)))]
pub struct Args {
    /// Artifact to write
    #[arg(short, long, value_name = "ART.safetensors")]
    output: PathBuf,
    /// Folder for what a stopped run needs to go on: finished layers and the hidden states
    #[arg(long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Go on after the last finished layer in --work
    #[arg(long, requires = "work")]
    resume: bool,
    /// Do nothing but say what it would take, as `kvsmith plan` does
    #[arg(long, conflicts_with = "resume")]
    plan: bool,
    #[command(flatten)]
    settings: Settings,
}

/// What decides the artifact of a calibration.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Settings {
    /// Folder of a Hugging Face checkpoint, or the id of one in the hub's cache, such as Qwen/Qwen3-0.6B
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    pub model: PathBuf,
    /// Relative position at which the query moments are taken
    #[arg(long, value_name = "P", default_value_t = 2048, value_parser = parse_count)]
    pub wrope_position: usize,
    /// Rotation that the codebooks are for
    #[arg(long, value_enum, default_value_t = RopeKind::Windowed)]
    pub rope: RopeKind,
    /// Do not measure what methods lose on the held-out text
    #[arg(long)]
    pub no_verdict: bool,
    /// The text.
    #[command(flatten)]
    pub input: Input,
    /// The flags of the fits.
    #[command(flatten)]
    pub sections: SectionFlags,
    /// The flags of the verdict.
    #[command(flatten)]
    pub verdict: VerdictFlags,
}

impl Args {
    /// Returns the settings of a calibration that is only to be planned.
    pub fn planned(&self) -> Option<&Settings> {
        self.plan.then_some(&self.settings)
    }
}

impl Settings {
    /// Prepares the fits for a text.
    ///
    /// # Errors
    /// Flags out of range, too little text.
    pub fn fits(
        &self,
        config: &ModelConfig,
        text: &Corpus,
        kept: &[bool],
        seed: u64,
        log: Log,
    ) -> Result<Vec<Box<dyn Fit>>> {
        self.sections.fits(&FitInput {
            seed,
            position: self.rope.position(self.wrope_position),
            block_start: &text.block_start,
            seq_len: text.seq_len,
            kept,
            windows: &config.windows,
            log,
        })
    }
}

/// Runs `calibrate`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let made = calibrate(args, global).map_err(|e| match (e.kind(), &args.work) {
        _ if e.advice().is_some() => e,
        (Kind::Interrupted, Some(_)) => {
            e.hint("the same command with --resume goes on after the last finished layer")
        }
        (Kind::Interrupted, None) => e.hint("with --work DIR a stopped run can go on"),
        _ => e,
    })?;
    finish(global, &made.note, &args.output, &made.document)
}

/// What a calibration reports.
struct Made {
    note: String,
    document: Value,
    stages: Stages,
    /// Methods and budgets that the verdict measured.
    variants: usize,
}

/// Returns how long the stages of a calibration took whose artifact nobody keeps, and how many methods and budgets its
/// verdict measured.
///
/// # Errors
/// Those of a calibration.
pub fn time_stages(settings: Settings, output: &Path, global: &Global) -> Result<(Stages, usize)> {
    let args = Args {
        output: output.to_owned(),
        work: None,
        resume: false,
        plan: false,
        settings,
    };
    calibrate(&args, global).map(|made| (made.stages, made.variants))
}

fn calibrate(args: &Args, global: &Global) -> Result<Made> {
    heap::return_large_allocations();
    let (log, settings) = (global.log(), &args.settings);
    let device = global.open_device()?;
    note_cpu_parts(device.as_ref(), log);
    let start = std::time::Instant::now();
    let inputs: Vec<&Path> = settings.input.files().chain([settings.model.as_path()]).collect();
    if let Some(work) = &args.work {
        output::check_folder("--work", work, &inputs)?;
        output::check_outside(&args.output, work)?;
    }
    let output = output::create(&args.output, &inputs, global)?;
    let decoder = open_model(&settings.model, log)?;
    check_wrope_position(settings.wrope_position, &decoder.config, log);
    let corpus = load_corpus(&settings.model, &decoder.config, &settings.input, global)?;
    let kept = corpus.kept();
    let position = settings.rope.position(settings.wrope_position);
    let fits = settings.fits(&decoder.config, &corpus, &kept, global.seed, log)?;
    let origin = Origin {
        model: model_manifest(&decoder, log)?,
        calibration: corpus.manifest(),
    };
    let sizes = origin.model.sizes;
    let sections = fits
        .iter()
        .map(|fit| Section::new(fit.as_ref(), sizes, device.as_ref()));
    let mut sections = sections.collect::<Result<Vec<_>>>()?;
    let work = open_work(args, global, &origin, &sections)?;
    let calibration = CalibrationRun {
        device: device.as_ref(),
        decoder: &decoder,
        corpus: &corpus,
        kept: &kept,
        position,
        query_rows: query_rows(&fits),
        fits,
        log,
    };
    calibration.plan(&sections)?;
    let layers = layers_on(device.as_ref(), &decoder, global)?;
    let mut stages = calibration.run(layers.as_ref(), work.as_ref(), &mut sections)?;
    drop(layers);
    let fitted = start.elapsed().as_secs_f64();
    let judging = Judging {
        flags: &settings.verdict,
        global,
        device: device.as_ref(),
        decoder: &decoder,
        corpus: &corpus,
    };
    let judged = match settings.no_verdict || corpus.held_out.is_empty() || sections.is_empty() {
        true => artifact::write(output, origin, sections).map(|()| None)?,
        false => {
            let mut judged = None;
            let draft = Output::create(&args.output)?;
            artifact::write_judged(output, draft, origin, sections, &mut |artifact| {
                let outcome = judging.measure(artifact, &mut stages);
                judged.insert(outcome).as_ref().ok().cloned()
            })?;
            judged
        }
    };
    if let Some(work) = work {
        work.clear();
    }
    let seconds = start.elapsed().as_secs_f64();
    let verdict_seconds = judged.is_some().then_some(seconds - fitted);
    // The fits took long: what they gave is written, whatever became of the verdict.
    let verdict = judged.transpose().map_err(|e| without_verdict(e, args))?;
    let mut note = format!("wrote {} in {seconds:.1} s", args.output.display());
    note += &format!(": {}", stages.text());
    if let Some(usual) = verdict.as_ref().and_then(verdict::summary) {
        note += &format!("\n{usual}");
    }
    let document = json!({
        "artifact": args.output.display().to_string(), "tokens": corpus.n_tokens(), "layers": sizes.n_layers,
        "seconds": seconds, "verdict_seconds": verdict_seconds, "device": device.name(),
        "stages": stages.json(),
    });
    Ok(Made {
        note,
        document,
        stages,
        variants: verdict.map_or(0, |verdict| {
            verdict.rows.iter().filter(|row| row.measured.is_some()).count()
        }),
    })
}

/// Adds to the error of a verdict that the artifact is there without one.
fn without_verdict(e: Error, args: &Args) -> Error {
    let advice = e.advice().map(|advice| format!("; {advice}")).unwrap_or_default();
    e.hint(format!(
        "{} is complete but for the verdict, which `kvsmith verdict` adds{advice}",
        args.output.display()
    ))
}

/// Notes which parts run on the CPU although there is a GPU.
fn note_cpu_parts(device: &dyn Device, log: Log) {
    if device.adapter().is_none() {
        return;
    }
    let sections = SECTIONS.iter().map(|kind| kind.facts());
    let stages = sections.filter(|facts| facts.cpu_only).map(|facts| facts.stage);
    let model = device.cuda().is_none().then_some("model");
    let parts = model.into_iter().chain(stages);
    let parts: Vec<String> = parts.map(|part| format!("the {part}")).collect();
    if let Some((last, others)) = parts.split_last() {
        let parts = match others {
            [] => last.clone(),
            _ => format!("{} and {last}", others.join(", ")),
        };
        log.note(&format!("{parts} run on the CPU, everything else on the device"));
    }
}

/// Opens the work folder, from which a stopped run can go on, if one is asked for.
fn open_work(
    args: &Args,
    global: &Global,
    origin: &Origin,
    sections: &[Section],
) -> Result<Option<WorkFolder>> {
    let Some(dir) = &args.work else {
        return Ok(None);
    };
    let identity = json!({
        "tool_version": env!("CARGO_PKG_VERSION"), "model": origin.model,
        "calibration": origin.calibration,
        "precision": format!("{:?}", global.precision),
        "sections": sections.iter().map(|s| &s.manifest).collect::<Vec<_>>(),
    });
    let n_layers = origin.model.sizes.n_layers;
    WorkFolder::open(dir, &identity, args.resume, sections, n_layers).map(Some)
}

/// Returns the sizes of a calibration.
pub fn fit_text<'a>(config: &ModelConfig, corpus: &Corpus, device: &'a dyn Device) -> FitText<'a> {
    FitText {
        n: corpus.n_tokens(),
        n_kept: corpus.kept().iter().filter(|kept| **kept).count(),
        longest_block: corpus.longest_block(),
        sizes: config.sizes(),
        device,
        threads: rayon::current_num_threads(),
    }
}

/// Lists the rows whose queries any fit reads, ascending.
pub fn query_rows(fits: &[Box<dyn Fit>]) -> Vec<usize> {
    let mut rows: Vec<usize> = fits.iter().flat_map(|fit| fit.query_rows()).copied().collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// A run of calibration: the model, the text and the fits.
struct CalibrationRun<'a> {
    device: &'a dyn Device,
    decoder: &'a Decoder,
    corpus: &'a Corpus,
    /// Which rows of the text the fits use.
    kept: &'a [bool],
    /// The position that the query moments rotate queries to.
    position: Position,
    fits: Vec<Box<dyn Fit>>,
    /// The rows whose queries any fit reads, ascending.
    query_rows: Vec<usize>,
    log: Log,
}

/// The states of one layer, as far as the fits read them.
struct Captured {
    /// Keys before rotation, `[g,n,d]`.
    keys: Array3<f32>,
    /// Queries of `query_rows` before rotation, `[h,rows,d]`.
    queries: Array3<f32>,
    /// Values, `[g,n,d]`; no head unless a fit reads them.
    values: Array3<f32>,
    /// At the position asked for.
    moments: LayerMoments,
    /// With each query at its own position.
    own_moments: LayerMoments,
    sums: QuerySums,
}

impl CalibrationRun<'_> {
    /// Captures and fits layer by layer, starting after the layers that `work` has; returns how long each stage took.
    fn run(
        &self,
        layers: &dyn Layers,
        work: Option<&WorkFolder>,
        sections: &mut [Section],
    ) -> Result<Stages> {
        let mut stages = Stages::default();
        let sizes = self.decoder.config.sizes();
        let mut capture = self.start(layers, work, sections)?;
        let remaining = sizes.n_layers - capture.next_layer;
        // A unit is a token captured, or a key fitted for a section.
        let per_layer = self.corpus.n_tokens() * (1 + sections.len() * sizes.n_kv_heads);
        let progress = self.log.progress((remaining * per_layer) as u64, "states");
        while capture.next_layer < sizes.n_layers {
            let layer = capture.next_layer;
            let states = stages.time(CAPTURE, || self.capture(&mut capture, &progress))?;
            heap::trim();
            let parts = self.fit(layer, &states, &progress, &mut stages)?;
            if let Some(work) = work {
                let last = capture.next_layer == sizes.n_layers;
                work.save(layer, &parts, &capture.hidden, last)?;
            }
            add_layer(sections, parts)?;
            drop(states);
            heap::trim();
        }
        Ok(stages)
    }

    /// Starts the capture at the first layer, or after the last one that `work` has.
    fn start<'a>(
        &'a self,
        layers: &'a dyn Layers,
        work: Option<&WorkFolder>,
        sections: &mut [Section],
    ) -> Result<Capture<'a>> {
        let c = &self.decoder.config;
        let resumed = work.map(|w| w.load([self.corpus.n_tokens(), c.hidden_size]));
        let Some((hidden, finished)) = resumed.transpose()?.flatten() else {
            return Capture::start(layers, self.corpus);
        };
        let done = finished.len();
        self.log
            .note(&format!("going on at layer {done} (0-{})", c.n_layers - 1));
        for parts in finished {
            add_layer(sections, parts)?;
        }
        Ok(Capture::at(layers, self.corpus, hidden, done))
    }

    /// Runs the next layer of the model and keeps the states that the fits read.
    fn capture(&self, capture: &mut Capture, progress: &Progress) -> Result<Captured> {
        self.stage(progress, capture.next_layer, "capture");
        let c = &self.decoder.config;
        let rows = &self.query_rows;
        let rows_of = |heads: usize| Array3::zeros((heads, self.corpus.n_tokens(), c.head_dim));
        let (mut keys, mut values) = (rows_of(c.n_kv_heads), rows_of(self.value_heads()));
        let mut queries = Array3::zeros((c.n_heads, rows.len(), c.head_dim));
        let mut sums = QuerySums::new(c.n_kv_heads, c.head_dim);
        capture.layer(progress, &mut |block, states| {
            let (q_pre, kept) = (states.q_pre.view(), &self.kept[block.clone()]);
            sums.add(self.device, q_pre, kept, &self.decoder.rope)?;
            let first = rows.partition_point(|row| *row < block.start);
            let within = rows[first..].iter().take_while(|row| **row < block.end);
            for (i, row) in (first..).zip(within) {
                let query = q_pre.slice(s![.., row - block.start, ..]);
                queries.slice_mut(s![.., i, ..]).assign(&query);
            }
            if !values.is_empty() {
                values.slice_mut(s![.., block.clone(), ..]).assign(&states.v);
            }
            keys.slice_mut(s![.., block, ..]).assign(&states.k_pre);
            Ok(())
        })?;
        Ok(Captured {
            keys,
            queries,
            values,
            moments: sums.at(self.position, &self.decoder.rope),
            own_moments: sums.at(Position::Own, &self.decoder.rope),
            sums,
        })
    }

    /// Returns the number of KV heads whose values are kept: all of them if a fit reads values, else none.
    fn value_heads(&self) -> usize {
        let reads = self.fits.iter().any(|fit| fit.kind().facts().reads_values);
        if reads { self.decoder.config.n_kv_heads } else { 0 }
    }

    /// Fits every section to one layer.
    fn fit(
        &self,
        layer: usize,
        captured: &Captured,
        progress: &Progress,
        stages: &mut Stages,
    ) -> Result<LayerParts> {
        let mut fit = |fit: &dyn Fit| {
            let kind = fit.kind();
            self.stage(progress, layer, kind.facts().stage);
            let at = |row: &usize| self.query_rows.partition_point(|r| r < row);
            let query_rows: Vec<usize> = fit.query_rows().iter().map(at).collect();
            let states = LayerStates {
                layer,
                sizes: self.decoder.config.sizes(),
                window: self.decoder.config.windows[layer],
                device: kind.device(self.device),
                keys: &|head| Ok(captured.keys.index_axis(Axis(0), head).to_owned()),
                queries: &|head| {
                    let queries = captured.queries.index_axis(Axis(0), head);
                    Ok(queries.select(Axis(0), &query_rows))
                },
                values: &|head| Ok(captured.values.index_axis(Axis(0), head).to_owned()),
                moments: match kind.facts().moments {
                    MomentsRead::Nothing => None,
                    MomentsRead::Chosen => Some(&captured.moments),
                    MomentsRead::Own => Some(&captured.own_moments),
                },
                sums: Some(&captured.sums),
                block_start: &self.corpus.block_start,
                kept: self.kept,
                rope: &self.decoder.rope,
            };
            let units = self.corpus.n_tokens() as u64;
            let part = stages.time(kind.facts().stage, || {
                fit_layer(fit, &states, progress, units, self.log)
            })?;
            Ok((kind.name(), part))
        };
        self.fits.iter().map(|of| fit(of.as_ref())).collect()
    }

    /// Shows what is being done in the progress bar.
    fn stage(&self, progress: &Progress, layer: usize, what: &str) {
        let n_layers = self.decoder.config.n_layers;
        progress.layer(layer, n_layers, what);
    }

    /// Notes how much memory the run needs, and the size of the artifact.
    fn plan(&self, sections: &[Section]) -> Result<()> {
        let text = fit_text(&self.decoder.config, self.corpus, self.device);
        let plan = MemoryPlan::new(
            &self.decoder.config,
            &text,
            self.query_rows.len(),
            &self.fits,
            sections,
        );
        let pages = self.decoder.layer(0)?.bytes();
        self.log.note(&plan.note(pages));
        Ok(())
    }
}

/// Adds a layer to every section.
fn add_layer(sections: &mut [Section], mut parts: LayerParts) -> Result<()> {
    for section in sections {
        let name = section.kind.name();
        let part = parts
            .remove(name)
            .ok_or_else(|| Error::failed(format!("internal: a layer has no part for section `{name}`")))?;
        section.add(part)?;
    }
    Ok(())
}
