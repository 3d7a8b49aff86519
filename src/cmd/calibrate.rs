//! `kvsmith calibrate`: makes an artifact from a checkpoint and text; each layer is fitted while its states are in
//! memory.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::parameters::choice;
use super::sections::{SectionFlags, section_flags};
use super::verdict::{self, VerdictFlags};
use super::{check_wrope_position, finish, load_texts, open_model, output};
use crate::artifact::Fit;
use crate::calibration::verdict::VerdictSettings;
use crate::calibration::{self, Calibration, RopeKind, Work};
use crate::cmd::args::{Global, Input, model_folder};
use crate::cmd::flags::{parse_count, parse_positive_count};
use crate::cmd::terminal::{Log, columns};
use crate::compute::Workload;
use crate::compute::device::Device;
use crate::error::{Error, ErrorKind, Result};
use crate::method::a2ats;
use crate::method::sections::SECTIONS;
use crate::model::ModelConfig;
use crate::wording::{grouped, wrapped};

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
    #[arg(help_heading = "Section a2ats", long, value_parser = choice::<RopeKind>(), value_name = "ROPE", default_value_t = RopeKind::Windowed)]
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
    /// Returns what decides the artifact, besides model and text.
    pub fn plain(&self, global: &Global) -> calibration::CalibrationSettings {
        calibration::CalibrationSettings {
            seed: global.seed,
            wrope_position: self.wrope_position,
            rope: self.rope,
            context: self.context,
            sections: self.sections.0.clone(),
            verdict: (!self.no_verdict).then(|| self.verdict.settings()),
        }
    }
}

/// Describes what a number of codewords takes of the bytes of a cache.
pub fn size_text(
    settings: &calibration::CalibrationSettings,
    config: &ModelConfig,
    codewords: usize,
) -> String {
    let context = settings.context(config);
    format!(
        "{codewords} codewords per KV head, {:.1}% of the bytes of {} positions",
        100.0 * a2ats::share_of_bytes(codewords, context),
        grouped(context)
    )
}

/// Runs `calibrate`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let made = calibrate(args, global).map_err(|e| match (e.kind(), &args.work) {
        _ if e.advice().is_some() => e,
        (ErrorKind::Interrupted, Some(_)) => {
            e.hint("run the same command with --resume to continue after the last finished layer")
        }
        (ErrorKind::Interrupted, None) => {
            e.hint("give --work DIR next time; an interrupted calibration can then be resumed")
        }
        _ => e,
    })?;
    finish(global, &made.note, args.output(), &made.document)
}

/// What a calibration reports.
struct Reported {
    note: String,
    document: Value,
}

fn calibrate(args: &Args, global: &Global) -> Result<Reported> {
    let (log, flags) = (global.log(), &args.settings);
    let settings = flags.plain(global);
    let device = global.open_device(Workload::Model)?;
    let start = std::time::Instant::now();
    let inputs: Vec<&Path> = flags.input.files().chain([flags.model.as_path()]).collect();
    if let Some(work) = &args.work {
        output::check_folder("--work", work, &inputs)?;
        output::check_outside(args.output(), work)?;
    }
    let output = output::create(args.output(), &inputs, global)?;
    let model = open_model(&flags.model, log)?;
    check_wrope_position(settings.wrope_position, model.config(), log);
    let wanted = settings.verdict.as_ref().map(VerdictSettings::wanted);
    let (corpus, reserve) = load_texts(&flags.model, model.config(), &flags.input, wanted, global)?;
    let machine = global.machine(device.as_ref(), &log);
    let calibration = Calibration::new(machine, &model, &settings, (&corpus, &reserve))?;
    note_cpu_parts(device.as_ref(), calibration.fits(), log);
    warn_of_unused(flags, calibration.fits(), global);
    let codewords = calibration.codewords();
    if calibration
        .fits()
        .iter()
        .any(|fit| fit.kind().name() == a2ats::SECTION)
    {
        let text = size_text(&settings, model.config(), codewords);
        log.note(&format!("codebooks: {text} (--size {codewords})"));
    }
    let work = args.work.as_deref();
    let work = work.map(|dir| Work {
        dir,
        resume: args.resume,
    });
    let made = calibration.run(output, work)?;
    let seconds = start.elapsed().as_secs_f64();
    let verdict_seconds = made.verdict.is_some().then_some(made.seconds[1]);
    // The fits took long, so they are kept even if the verdict failed.
    let verdict = made.verdict.transpose();
    let verdict = verdict.map_err(|e| without_verdict(e, args, made.spare.as_deref()))?;
    let stages = &made.stages;
    let mut note = format!("wrote {} in {seconds:.1} s", args.output().display());
    note += &format!("\n{}", wrapped(&format!("  {}", stages.text()), columns()));
    if let Some(usual) = verdict.as_ref().and_then(verdict::summary) {
        note += &format!("\n{usual}");
    }
    let document = json!({
        "artifact": args.output().display().to_string(), "tokens": corpus.n_tokens(),
        "layers": model.config().n_layers(), "codewords": codewords, "seconds": seconds,
        "verdict_seconds": verdict_seconds, "device": device.name(), "stages": stages.json(),
    });
    Ok(Reported { note, document })
}

/// Warns of flags for a verdict or a section that is not made.
fn warn_of_unused(settings: &Settings, fits: &[Box<dyn Fit>], global: &Global) {
    let given = |flag: &&String| global.given.contains(flag);
    let warn = |flag: &str, why: &str| global.log().warn(&format!("--{flag} has no effect {why}"));
    if settings.no_verdict {
        let of_verdict = global.given.iter().filter(|flag| flag.starts_with("verdict-"));
        of_verdict.for_each(|flag| warn(flag, "with --no-verdict"));
    }
    let leaves_out = SECTIONS.iter().filter_map(|kind| kind.left_out_by());
    let leaves_out: Vec<String> = leaves_out.map(|name| name.replace('_', "-")).collect();
    for (section, flags) in section_flags() {
        if fits.iter().all(|fit| fit.kind().name() != section) {
            // What leaves the section out has an effect.
            let unused = flags
                .iter()
                .filter(given)
                .filter(|flag| !leaves_out.contains(flag));
            unused.for_each(|flag| warn(flag, &format!("without section `{section}`")));
        }
    }
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
