//! `kvsmith verdict`: measures what each method loses with an artifact, on text that nothing was fitted to.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::{Global, Input, model_folder};
use super::named::{Named, NamedParser};
use super::parameters::kv_type;
use super::{finish, load_texts, open_model, output, paths};
use crate::artifact::{self, Artifact, Measured, Verdict};
use crate::calibration::stages::Stages;
use crate::calibration::verdict::{Judging, VerdictSettings, usual_formats};
use crate::cmd::flags::{not_negative, parse_positive_count, parse_share};
use crate::corpus::{Corpus, CorpusManifest, Reserve};
use crate::dump::Dump;
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::method::plan::Plan;
use crate::method::sections::SECTIONS;
use crate::model::ModelConfig;
use crate::runner::eval::FEWEST;
use crate::runner::verdict::{BLOCK, Wanted};
use crate::wording::counted;

/// The flags of the measurement, of `verdict` and `calibrate`.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
#[command(next_help_heading = "Verdict")]
pub struct VerdictFlags {
    /// Shares of the bytes of all visible keys and values in bf16 (above 0, below 1) at which each method is measured
    #[arg(long, value_name = "F,G", value_delimiter = ',', default_value = "0.05,0.1,0.2", value_parser = parse_share)]
    verdict_reads: Vec<f64>,
    /// Tokens of text to measure on, in blocks of 2048, from beyond --max-tokens, else held-out ones. Added to these: 40%
    /// as many tokens of UUIDs, and one block of full length of each kind
    #[arg(long, value_name = "N", default_value_t = 20 * BLOCK, value_parser = parse_positive_count)]
    verdict_tokens: usize,
    /// Number of tokens at the end of each block that are decoded one by one
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = parse_positive_count)]
    verdict_steps: usize,
    /// Recommend a method only if the upper end of the 95% interval of its mean KL divergence is at most X nats
    #[arg(long, value_name = "X", default_value_t = artifact::USUAL_KL, value_parser = not_negative)]
    verdict_kl: f64,
    /// Recommend a method only if its score in the retrieval probe is at most X percentage points below that of full
    /// attention (upper end of the 95% interval)
    #[arg(long, value_name = "X", default_value_t = 5.0, value_parser = not_negative)]
    verdict_points: f64,
    /// Methods to measure; NAME+tail adds a tail to the method (default: every method with a section in the artifact,
    /// and topk, ctkvr and streaming)
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = NamedParser)]
    verdict_methods: Vec<Named>,
    /// Type of the cache over which methods are measured, and which is then recommended with one
    #[arg(long, value_name = "TYPE", default_value_t = KvType::BF16, value_parser = kv_type())]
    verdict_rows: KvType,
    /// Types of the cache over which full attention is measured too; with methods over bf16, one is recommended. May be given
    /// several times (default: int8, k=int8,v=int4, int4, k=int4,v=int2 and int2)
    #[arg(long, value_name = "TYPE", value_parser = kv_type())]
    verdict_kv: Vec<KvType>,
}

impl VerdictFlags {
    /// Returns the settings that the flags give.
    pub fn settings(&self) -> VerdictSettings {
        VerdictSettings {
            reads: self.verdict_reads.clone(),
            tokens: self.verdict_tokens,
            steps: self.verdict_steps,
            kl: self.verdict_kl,
            points: self.verdict_points,
            methods: self.verdict_methods.clone(),
            rows: self.verdict_rows,
            formats: if self.verdict_kv.is_empty() {
                usual_formats()
            } else {
                self.verdict_kv.clone()
            },
            ..VerdictSettings::default()
        }
    }
}

/// Arguments of `verdict`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens", "dump"]).required(true)))]
#[command(
    override_usage = "kvsmith verdict <ART> --model <MODEL> --output <ART2.safetensors> <--text <FILE>...|--tokens <FILE.json>|--dump <DIR>...> [OPTIONS]"
)]
pub struct Args {
    /// Artifact or section file to measure; before --text and --dump, which take several values
    #[arg(value_name = "ART")]
    artifact: PathBuf,
    /// The model from which the artifact was made: checkpoint folder, GGUF file, or id in the Hugging Face cache
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    model: PathBuf,
    /// Dump folder from which the artifact was made, or the folders of all its shards, instead of the text
    #[arg(long, value_name = "DIR", num_args = 1.., conflicts_with_all = ["seq_len", "max_tokens", "uuid_tokens", "holdout"])]
    dump: Vec<PathBuf>,
    /// Artifact file to write: the same artifact with the verdict
    #[arg(short, long, value_name = "ART2.safetensors")]
    output: PathBuf,
    #[command(flatten)]
    input: Input,
    #[command(flatten)]
    flags: VerdictFlags,
}

/// Runs `verdict`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let log = global.log();
    let device = global.open_model_device("verdict")?;
    let inputs: Vec<&Path> = args
        .input
        .files()
        .chain(paths(&args.dump))
        .chain([args.artifact.as_path(), &args.model])
        .collect();
    let output = output::create(&args.output, &inputs, global)?;
    let artifact = Artifact::open(&args.artifact, SECTIONS)?;
    let model = open_model(&args.model, log)?;
    let decoder = &model.decoder;
    let fingerprint = model.fingerprint()?;
    artifact.check_model(&fingerprint, decoder.config.sizes())?;
    let settings = args.flags.settings();
    let (corpus, reserve) = texts_of(
        &args.dump,
        &args.model,
        model.config(),
        &args.input,
        settings.wanted(),
        global,
    )?;
    check_text(&artifact, &args.artifact, &corpus)?;
    let material = settings.material(&corpus, &reserve).ok_or_else(|| {
        Error::invalid("no text was held out, so the methods cannot be measured")
            .hint("give text that goes on beyond --max-tokens, or calibrate again with --holdout above 0")
    })?;
    let start = std::time::Instant::now();
    let verdict = Judging {
        settings: &settings,
        seed: global.seed,
        machine: global.machine(device.as_ref(), &log),
        model: &model,
        material: &material,
    }
    .measure(&artifact, &mut Stages::default())?;
    let document = json!({
        "artifact": args.output.display().to_string(), "device": device.name(),
        "seconds": start.elapsed().as_secs_f64(), "methods": verdict,
    });
    let mut note = format!("wrote {}", args.output.display());
    if let Some(usual) = summary(&verdict) {
        note += &format!("\n{usual}");
    }
    if Plan::given(&artifact)?.is_some() {
        note += "\nthe artifact keeps its head plan, which `run` follows instead";
    }
    artifact::write_with_verdict(output, &artifact, Plan::judged(&artifact, verdict)?)?;
    finish(global, &note, &args.output, &document)
}

/// Opens the text of a dump, or loads the text that flags give, and what is wanted beyond it.
pub(super) fn texts_of(
    dump: &[PathBuf],
    model: &Path,
    config: &ModelConfig,
    input: &Input,
    wanted: Wanted,
    global: &Global,
) -> Result<(Corpus, Reserve)> {
    match dump {
        [_, ..] => Ok((Dump::open(dump)?.corpus, Reserve::default())),
        [] => load_texts(model, config, input, Some(wanted), global),
    }
}

/// Checks that an artifact was calibrated on this text.
///
/// # Errors
/// It was calibrated on another text, or on other parts of it.
pub(super) fn check_text(artifact: &Artifact, path: &Path, corpus: &Corpus) -> Result<()> {
    let (own, given) = (&artifact.manifest.origin.calibration, corpus.manifest());
    if given == *own {
        return Ok(());
    }
    let described = |of: &CorpusManifest| {
        let CorpusManifest {
            tokens,
            blocks,
            seq_len,
            held_out_tokens,
            seed,
            ..
        } = of;
        format!(
            "{tokens} tokens in {blocks} blocks of at most {seq_len}, {held_out_tokens} held out, seed {seed}"
        )
    };
    Err(Error::mismatch(format!(
        "{} was calibrated on another text: {}; this text has {}",
        path.display(),
        described(own),
        described(&given)
    ))
    .hint("give the same text, --max-tokens, --seq-len, --uuid-tokens, --holdout and --seed as in its calibration, or its dump; for other text, use `kvsmith eval`"))
}

/// Says in some lines what a run without `--method` and `--budget` will take.
pub fn summary(verdict: &Verdict) -> Option<String> {
    let (row, of) = verdict.usual()?;
    let loss = match &of.intervals {
        Some(interval) => format!(
            "{:.4} nats (95%: {:.4} to {:.4})",
            of.kl, interval.kl[0], interval.kl[1]
        ),
        None => format!("{:.4} nats", of.kl),
    };
    let setting = format!(
        "--method {} --budget {}, reads {:.1}% of the bytes, KL {loss}",
        row.method,
        of.budget,
        100.0 * row.bytes_read_fraction,
    );
    let mut text = if verdict.within(verdict.limit()).is_some() {
        format!(
            "recommended: {setting}; of all shares measured, the smallest within {}",
            limits(verdict)
        )
    } else {
        format!(
            "nothing measured stays within {}; `run` takes the setting with the smallest KL: {setting}",
            limits(verdict)
        )
    };
    for line in cache(verdict, of).into_iter().chain(cautions(verdict)) {
        text += &format!("\n  {line}");
    }
    Some(text)
}

/// Names the format of the cache that a setting can take; `None` if no format was measured.
pub(super) fn cache(verdict: &Verdict, of: &Measured) -> Option<String> {
    if verdict.formats.is_empty() || verdict.within(verdict.limit()).is_none() {
        return None;
    }
    if verdict.kv != KvType::BF16.to_string() {
        return Some(format!(
            "cache: --kv {}, over which the methods were measured",
            verdict.kv
        ));
    }
    let Some(format) = verdict.format_with(of) else {
        return Some(format!(
            "cache: keep {}; with every smaller type, the losses add up to more than the limits",
            verdict.kv
        ));
    };
    Some(format!(
        "cache: --kv {} should fit too: {:.0}% of the bytes, KL {:.4} more",
        format.kv,
        100.0 * format.size_fraction,
        format.measured.kl,
    ))
}

/// Names the limits of a verdict.
pub(super) fn limits(verdict: &Verdict) -> String {
    let points = verdict.limits.filter(|_| verdict.probe.is_some());
    let points = points.map_or(String::new(), |of| {
        format!(" and {} points of full attention in the probe", of.points)
    });
    format!("{} nats{points}", verdict.limit())
}

/// Says what a recommendation rests on: how much text, which questions, texts of which lengths.
pub(super) fn cautions(verdict: &Verdict) -> Vec<String> {
    let mut out = Vec::new();
    if verdict.is_guess() {
        out.push(format!(
            "a guess: measured on {} of text; intervals need {FEWEST}: give text beyond --max-tokens, or raise --verdict-tokens or --holdout",
            counted(verdict.blocks, "block")
        ));
    }
    let own = verdict.usual().and_then(|(_, of)| of.probe.as_ref());
    match (&verdict.probe, &verdict.not_probed) {
        (Some(probe), _) => out.push(format!(
            "probe: {} {}; full attention gets {:.0}% right{}",
            probe.questions,
            if probe.kind == "facts" {
                "questions about facts hidden in the text"
            } else {
                "passages to copy"
            },
            100.0 * probe.full_accuracy,
            own.map_or(String::new(), |own| format!(
                ", this setting {:.0}%",
                100.0 * own.accuracy
            ))
        )),
        (None, Some(why)) => out.push(format!("not probed: {why}")),
        (None, None) => out.push("not probed".to_owned()),
    }
    if let Some(limited) = verdict.texts.first() {
        let others: Vec<String> = verdict
            .lengths()
            .into_iter()
            .filter(|length| *length != limited.length)
            .map(|length| length.to_string())
            .collect();
        let means = if others.is_empty() {
            String::new()
        } else {
            format!("; at {} tokens, only means were measured", others.join(", "))
        };
        out.push(format!(
            "limits checked on texts of {} tokens{means}",
            limited.length
        ));
    }
    out
}
