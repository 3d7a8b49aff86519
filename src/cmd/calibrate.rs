//! `kvsmith calibrate`: makes an artifact from a checkpoint and text; each layer is fitted while its states are in
//! memory.

mod layers;
pub mod plan;
pub mod stages;

use std::path::{Path, PathBuf};

use indicatif::HumanCount;
use serde_json::{Value, json};

use self::layers::CalibrationRun;
use self::plan::{JudgedRows, query_rows};
use self::stages::Stages;
use super::sections::{SectionFlags, section_flags};
use super::verdict::{self, Judging, VerdictFlags};
use super::{
    check_wrope_position, finish, layers_on, load_texts, model_manifest, open_model, output, wrope_position,
};
use crate::artifact::{self, Artifact, Fit, FitInput, Section};
use crate::cmd::args::{Global, Input, RopeKind, model_folder};
use crate::cmd::flags::{parse_count, parse_positive_count};
use crate::cmd::signals::Saving;
use crate::cmd::terminal::{Log, columns};
use crate::compute::Workload;
use crate::compute::device::Device;
use crate::corpus::{Corpus, Origin, Reserve};
use crate::disk::Output;
use crate::error::{Error, Kind, Result};
use crate::heap;
use crate::method::a2ats::{self, LONGEST_CONTEXT};
use crate::model::ModelConfig;
use crate::runner::verdict::{Material, Wanted};
use crate::stats::moments::Position;
use crate::wording::wrapped;
use crate::work::WorkFolder;

/// Arguments of `calibrate`.
#[derive(clap::Args, Clone, Debug)]
#[command(
    group(clap::ArgGroup::new("source").args(["text", "tokens"]).required(true)),
    override_usage = "kvsmith calibrate [OPTIONS] --model <MODEL> <--text <FILE>...|--tokens <FILE.json>> --output <ART.safetensors>"
)]
pub struct Args {
    /// Artifact file to write
    #[arg(short, long, value_name = "ART.safetensors", required_unless_present = "plan")]
    output: Option<PathBuf>,
    /// Save finished layers and hidden states in this folder, so that --resume can continue an interrupted
    /// calibration; kvsmith removes these files at the end
    #[arg(help_heading = "Work", long, value_name = "DIR")]
    work: Option<PathBuf>,
    /// Continue the interrupted calibration in --work after its last finished layer
    #[arg(help_heading = "Work", long, requires = "work")]
    resume: bool,
    /// Only estimate time, memory and disk space, as `kvsmith plan` does
    #[arg(help_heading = "Work", long, conflicts_with = "resume")]
    plan: bool,
    #[command(flatten)]
    settings: Settings,
}

/// What decides the artifact of a calibration.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
pub struct Settings {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the id of a model in the Hugging Face cache, such as
    /// Qwen/Qwen3-0.6B
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    pub model: PathBuf,
    /// For a2ats: fixed distance, in tokens, between query and key at which keys are scored (default: 2048, or half of the
    /// model's context if that is less)
    #[arg(help_heading = "Section a2ats", long, value_name = "P", value_parser = parse_count)]
    pub wrope_position: Option<usize>,
    /// For a2ats: rotation of keys and queries
    #[arg(help_heading = "Section a2ats", long, value_enum, default_value_t = RopeKind::Windowed)]
    pub rope: RopeKind,
    /// For a2ats: length of the contexts for which the number of codewords is chosen, in tokens; blocks of text do not
    /// become longer by it (default: the model's context, at most 32768)
    #[arg(help_heading = "Section a2ats", long, value_name = "N", value_parser = parse_positive_count)]
    pub context: Option<usize>,
    /// Do not measure what the methods lose; the artifact then contains no recommendation
    #[arg(help_heading = "Verdict", long)]
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
    /// Returns the artifact to write; only a plan has none.
    fn output(&self) -> &Path {
        self.output.as_deref().unwrap_or(Path::new(""))
    }

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
            position: self.position(config),
            block_start: &text.block_start,
            seq_len: text.seq_len,
            kept,
            windows: &config.windows(),
            head_dim: config.sizes().head_dim,
            codewords: self.codewords(config, kept),
            reporter: &log,
        })
    }

    /// Returns the position to which queries are rotated.
    fn position(&self, config: &ModelConfig) -> Position {
        self.rope.position(wrope_position(self.wrope_position, config))
    }

    /// Returns the length of the contexts for which the number of codewords is chosen.
    fn context(&self, config: &ModelConfig) -> usize {
        let own = config.max_position_embeddings.min(LONGEST_CONTEXT);
        self.context.unwrap_or(own)
    }

    /// Returns the number of codewords per KV head for a text of which the fits use the rows in `kept`.
    pub fn codewords(&self, config: &ModelConfig, kept: &[bool]) -> usize {
        let kept = kept.iter().filter(|kept| **kept).count();
        let chosen = || a2ats::codewords(self.context(config), kept);
        self.sections.codewords.unwrap_or_else(chosen)
    }

    /// Describes what this number of codewords takes of the bytes of a cache.
    pub fn size_text(&self, config: &ModelConfig, codewords: usize) -> String {
        let context = self.context(config);
        format!(
            "{codewords} codewords per KV head, {:.1}% of the bytes of {} positions",
            100.0 * a2ats::share_of_bytes(codewords, context),
            HumanCount(context as u64)
        )
    }

    /// Returns how many texts the verdict wants; `None` without a verdict.
    pub fn wanted(&self) -> Option<Wanted> {
        (!self.no_verdict).then(|| self.verdict.wanted())
    }

    /// Collects the texts of the verdict; `None` if there is none.
    pub fn material(&self, text: &Corpus, reserve: &Reserve) -> Option<Material> {
        let wanted = !self.no_verdict;
        wanted.then(|| self.verdict.material(text, reserve)).flatten()
    }

    /// Counts what the verdict will decode.
    pub fn judged_rows(&self, fits: &[Box<dyn Fit>], material: Option<&Material>) -> JudgedRows {
        let rows = |material| JudgedRows::of(material, self.verdict.budgets(fits.len()));
        material.map(rows).unwrap_or_default()
    }
}

/// Runs `calibrate`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let made = calibrate(args, global).map_err(|e| match (e.kind(), &args.work) {
        _ if e.advice().is_some() => e,
        (Kind::Interrupted, Some(_)) => {
            e.hint("run the same command with --resume to continue after the last finished layer")
        }
        (Kind::Interrupted, None) => {
            e.hint("give --work DIR next time; an interrupted calibration can then be resumed")
        }
        _ => e,
    })?;
    finish(global, &made.note, args.output(), &made.document)
}

/// What a calibration reports.
struct Made {
    note: String,
    document: Value,
    stages: Stages,
    /// Number of combinations of method and budget that the verdict measured.
    variants: usize,
}

/// Runs a calibration whose artifact nobody keeps; returns how long its stages took, and how many combinations of
/// method and budget its verdict measured.
///
/// # Errors
/// Those of a calibration.
pub fn time_stages(settings: Settings, output: &Path, global: &Global) -> Result<(Stages, usize)> {
    let args = Args {
        output: Some(output.to_owned()),
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
    let device = global.open_device(Workload::Model)?;
    let start = std::time::Instant::now();
    let inputs: Vec<&Path> = settings.input.files().chain([settings.model.as_path()]).collect();
    if let Some(work) = &args.work {
        output::check_folder("--work", work, &inputs)?;
        output::check_outside(args.output(), work)?;
    }
    let output = output::create(args.output(), &inputs, global)?;
    let decoder = open_model(&settings.model, log)?;
    check_wrope_position(settings.wrope_position, &decoder.config, log);
    let wanted = settings.wanted();
    let (corpus, reserve) = load_texts(&settings.model, &decoder.config, &settings.input, wanted, global)?;
    let material = settings.material(&corpus, &reserve);
    let kept = corpus.kept();
    let position = settings.position(&decoder.config);
    let fits = settings.fits(&decoder.config, &corpus, &kept, global.seed, log)?;
    note_cpu_parts(device.as_ref(), &fits, log);
    warn_of_unused(settings, &fits, global);
    let codewords = settings.codewords(&decoder.config, &kept);
    if fits.iter().any(|fit| fit.kind().name() == a2ats::SECTION) {
        log.note(&format!(
            "codebooks: {} (--size {codewords})",
            settings.size_text(&decoder.config, codewords)
        ));
    }
    let origin = Origin {
        model: model_manifest(&settings.model, &decoder, log)?,
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
    calibration.plan(
        &sections,
        &settings.judged_rows(&calibration.fits, material.as_ref()),
    )?;
    let layers = layers_on(device.as_ref(), &decoder, global)?;
    let mut stages = calibration.run(layers.as_ref(), work.as_ref(), &mut sections)?;
    drop(layers);
    let fitted = start.elapsed().as_secs_f64();
    let mut spare = None;
    let judged = match material.filter(|_| !sections.is_empty()) {
        None => artifact::write(output, origin, sections).map(|()| None)?,
        Some(material) => {
            let judging = Judging {
                flags: &settings.verdict,
                global,
                device: device.as_ref(),
                decoder: &decoder,
                folder: &settings.model,
                material: &material,
            };
            let mut judged = None;
            let (spare, saving) = (&mut spare, &mut None);
            let draft = Output::create(args.output())?;
            let mut measure = |artifact: &Artifact| {
                let outcome = judging.measure(artifact, &mut stages);
                judged.insert(outcome).as_ref().ok().cloned()
            };
            // The layers are in the work folder, or the artifact is kept under another name.
            let unjudged = || match work {
                Some(_) => Ok(None),
                None => {
                    *saving = Some(Saving::begin());
                    Output::create(spare.insert(spare_path(args.output()))).map(Some)
                }
            };
            artifact::write_judged(output, draft, origin, sections, &mut measure, unjudged)?;
            judged
        }
    };
    let seconds = start.elapsed().as_secs_f64();
    let verdict_seconds = judged.is_some().then_some(seconds - fitted);
    // The fits took long, so they are kept even if the verdict failed.
    let verdict = judged
        .transpose()
        .map_err(|e| without_verdict(e, args, spare.as_deref()))?;
    if let Some(work) = work {
        work.clear();
    }
    let mut note = format!("wrote {} in {seconds:.1} s", args.output().display());
    note += &format!("\n{}", wrapped(&format!("  {}", stages.text()), columns()));
    if let Some(usual) = verdict.as_ref().and_then(verdict::summary) {
        note += &format!("\n{usual}");
    }
    let document = json!({
        "artifact": args.output().display().to_string(), "tokens": corpus.n_tokens(), "layers": sizes.n_layers,
        "codewords": codewords, "seconds": seconds, "verdict_seconds": verdict_seconds, "device": device.name(),
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

/// Warns of flags for a verdict or a section that is not made.
fn warn_of_unused(settings: &Settings, fits: &[Box<dyn Fit>], global: &Global) {
    let given = |flag: &&String| global.given.contains(flag);
    let warn = |flag: &str, why: &str| global.log().warn(&format!("--{flag} has no effect {why}"));
    if settings.no_verdict {
        let of_verdict = global.given.iter().filter(|flag| flag.starts_with("verdict-"));
        of_verdict.for_each(|flag| warn(flag, "with --no-verdict"));
    }
    for (section, flags) in section_flags() {
        if fits.iter().all(|fit| fit.kind().name() != section) {
            // What leaves the section out has an effect.
            let unused = flags.iter().filter(given).filter(|flag| *flag != "wpq-bits");
            unused.for_each(|flag| warn(flag, &format!("without section `{section}`")));
        }
    }
}

/// Returns the name of an artifact that has no verdict yet: that of the output with `.unjudged`, and a number if there is
/// such a file.
fn spare_path(output: &Path) -> PathBuf {
    let stem = output.with_extension("");
    let stem = stem
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let name = |number: String| output.with_file_name(format!("{stem}.unjudged{number}.safetensors"));
    let numbers = std::iter::once(String::new()).chain((2..).map(|i: usize| format!("-{i}")));
    let mut names = numbers.map(name).filter(|path| !path.exists());
    names.next().unwrap_or_else(|| name(String::new()))
}

/// Adds to a verdict's error where the fitted sections are: in the work folder, or in `spare`.
fn without_verdict(e: Error, args: &Args, spare: Option<&Path>) -> Error {
    let advice = e.advice().map(|advice| format!("; {advice}")).unwrap_or_default();
    let output = args.output().display();
    e.hint(match spare {
        None => format!("all layers are saved: add --resume to repeat the verdict, or --resume --no-verdict to do without it{advice}"),
        Some(spare) => {
            let spare = spare.display();
            format!("{spare} has everything but the verdict; to add it: `kvsmith verdict {spare} -o {output}` with the --model, --text, --seed and text flags of this command{advice}")
        }
    })
}

/// Notes which parts run on the CPU although there is a GPU.
fn note_cpu_parts(device: &dyn Device, fits: &[Box<dyn Fit>], log: Log) {
    if device.adapter().is_none() {
        return;
    }
    let sections = fits.iter().map(|fit| fit.kind().facts());
    let stages = sections.filter(|facts| facts.cpu_only).map(|facts| facts.stage);
    let model = device.cuda().is_none().then_some("model");
    let parts = model.into_iter().chain(stages);
    let parts: Vec<String> = parts.map(|part| format!("the {part}")).collect();
    if let Some((last, others)) = parts.split_last() {
        let parts = match others {
            [] => last.clone(),
            _ => format!("{} and {last}", others.join(", ")),
        };
        log.note(&format!(
            "{parts} run on the CPU; everything else runs on the device"
        ));
    }
}

/// Opens the work folder, from which a stopped run can be resumed, if one is asked for.
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
        "tool_version": env!("CARGO_PKG_VERSION"), "model": origin.model.fingerprint,
        "calibration": origin.calibration,
        "precision": format!("{:?}", global.precision),
        "sections": sections.iter().map(|s| &s.manifest).collect::<Vec<_>>(),
    });
    let n_layers = origin.model.sizes.n_layers;
    WorkFolder::open(dir, &identity, args.resume, sections, n_layers).map(Some)
}
