//! `kvsmith tune`: finds by which method, with which budget and in which formats each KV head is served within a limit.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::args::{Global, Input, model_folder};
use super::named::{Named, NamedParser};
use super::parameters::{choice, kv_type};
use super::verdict::{check_text, texts_of};
use super::{document, merge, open_model, output, paths, print_json};
use crate::artifact::Artifact;
use crate::cmd::flags::{parse_count, parse_positive_count, parse_share};
use crate::corpus::{Corpus, digest_of};
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::method::sections::SECTIONS;
use crate::runner::eval::{FEWEST, Passage};
use crate::runner::verdict::{Material, Wanted};
use crate::tune::{
    Checked, Limit, Per, PlanFigures, PlanLoss, Quantity, Sensitivities, StepTimes, TuneSettings, Tuned,
    Tuning, usual_formats,
};
use crate::wording::counted;

/// Arguments of `tune`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens", "dump", "from"]).required(true)))]
#[command(
    override_usage = "kvsmith tune <ART> --model <MODEL> --limit <WHAT=X> --output <PLAN.json> <--text <FILE>...|--tokens <FILE.json>|--dump <DIR>...> [OPTIONS]\n       kvsmith tune --from <PLAN.json> --limit <WHAT=X> --output <PLAN2.json> [OPTIONS]"
)]
pub struct Args {
    /// Artifact of the methods; before --text and --dump, which take several values
    #[arg(value_name = "ART", required_unless_present = "from", conflicts_with = "from")]
    artifact: Option<PathBuf>,
    /// The model from which the artifact was made: checkpoint folder, GGUF file, or id in the Hugging Face cache
    #[arg(long, value_name = "DIR", value_parser = model_folder(), required_unless_present = "from", conflicts_with = "from")]
    model: Option<PathBuf>,
    /// Dump folder from which the artifact was made, or the folders of all its shards, instead of the text: what was held out
    /// from it
    #[arg(long, value_name = "DIR", num_args = 1.., conflicts_with_all = ["seq_len", "max_tokens", "uuid_tokens", "holdout"])]
    dump: Vec<PathBuf>,
    /// Measure on all of a text that is no part of the calibration text. Whether something was fitted to it cannot be checked
    #[arg(long, help_heading = "Input", conflicts_with_all = ["from", "dump"])]
    other_text: bool,
    /// An earlier result whose sensitivities are used again, so that nothing is measured; a new plan is not checked
    #[arg(long, value_name = "PLAN.json", help_heading = "Input", conflicts_with_all = ["per", "length", "blocks", "check", "steps", "methods", "budgets", "kv"])]
    from: Option<PathBuf>,
    /// JSON file to write: the head plan, and the sensitivities from which it follows
    #[arg(short, long, value_name = "PLAN.json")]
    output: PathBuf,
    /// Upper limit of one quantity: kl=X nats (as expected from the sensitivities), bytes=X or memory=X as shares of what full
    /// attention over bf16 moves or takes (0.05 or 5%), or ms=X milliseconds of a step. Within a limit of bytes, memory or ms,
    /// the plan has the smallest expected KL
    #[arg(long, value_name = "WHAT=X", help_heading = "Plan", value_parser = parse_limit)]
    limit: Limit,
    /// Quantity to minimise within --limit kl=X
    #[arg(long, value_name = "WHAT", help_heading = "Plan", value_parser = choice::<Quantity>(), default_value_t = Quantity::Bytes)]
    least: Quantity,
    /// Times of steps, for ms: documents of `kvsmith bench decode --json` on this machine at one --context, with the methods and
    /// --kv types to choose from, each with its smallest and its largest budget. May be given several times
    #[arg(long, value_name = "FILE.json", help_heading = "Plan")]
    times: Vec<PathBuf>,
    /// What gets a choice of its own; layers take less time to measure
    #[arg(long, help_heading = "Plan", value_parser = choice::<Per>(), default_value_t = Per::Head)]
    per: Per,
    /// Methods to choose from (default: full, streaming, and what the verdict recommends, or wpq if it recommends none)
    #[arg(long, value_name = "A,B", help_heading = "Plan", value_delimiter = ',', value_parser = NamedParser)]
    methods: Vec<Named>,
    /// Budgets to choose from, as fractions of the context; streaming gets the smallest, full needs none
    #[arg(long, value_name = "F,G", help_heading = "Plan", value_delimiter = ',', default_value = "0.01,0.025,0.05,0.1,0.2", value_parser = parse_share)]
    budgets: Vec<f64>,
    /// Types of the cache to choose from; may be given several times (default: bf16, int8, int4+4, k=int8,v=int4, int4,
    /// k=int4,v=int2 and int2)
    #[arg(long, value_name = "TYPE", help_heading = "Plan", value_parser = kv_type())]
    kv: Vec<KvType>,
    /// Most tokens of a text to measure on. Losses and costs depend on it: take the contexts that you run
    #[arg(long, value_name = "N", help_heading = "Measurement", default_value_t = 4096, value_parser = parse_positive_count)]
    length: usize,
    /// Number of texts on which sensitivities are measured: those after the first --max-tokens tokens, then held-out ones
    #[arg(long, value_name = "N", help_heading = "Measurement", default_value_t = 4, value_parser = parse_positive_count)]
    blocks: usize,
    /// Most further texts on which the plan is then measured, beside the best plans that serve all KV heads alike; 0 for no check,
    /// at least 20 for intervals
    #[arg(long, value_name = "N", help_heading = "Measurement", default_value_t = FEWEST, value_parser = parse_count)]
    check: usize,
    /// Number of tokens at the end of each text that are decoded one by one
    #[arg(long, value_name = "N", help_heading = "Measurement", default_value_t = 16, value_parser = parse_positive_count)]
    steps: usize,
    #[command(flatten)]
    input: Input,
}

/// A plan, and what it follows from.
struct Outcome {
    sensitivities: Sensitivities,
    tuned: Tuned,
    /// The device that measured.
    device: &'static str,
    /// What the plan was measured to lose, or why it was not measured.
    checked: std::result::Result<Checked, String>,
}

/// Runs `tune`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let inputs: Vec<&Path> = args
        .input
        .files()
        .chain(paths(&args.dump))
        .chain(
            [&args.artifact, &args.model, &args.from]
                .into_iter()
                .flatten()
                .map(PathBuf::as_path),
        )
        .chain(paths(&args.times))
        .collect();
    let mut output = Some(output::create(&args.output, &inputs, global)?);
    let times = read_times(&args.times)?;
    let outcome = match (&args.artifact, &args.model) {
        (Some(artifact), Some(model)) => {
            let device = global.open_model_device("tune")?;
            args.measured(
                [artifact, model],
                times.as_ref(),
                &mut output,
                device.as_ref(),
                global,
            )?
        }
        _ => args.again(times.as_ref())?,
    };
    args.write(&mut output, &outcome, global)
}

/// Parses `--limit`.
fn parse_limit(text: &str) -> std::result::Result<Limit, String> {
    text.parse().map_err(|e: Error| match e.advice() {
        Some(hint) => format!("{e}: expected {hint}"),
        None => e.to_string(),
    })
}

/// Returns every value once.
fn once<T: Copy + PartialEq>(all: &[T]) -> Vec<T> {
    let mut kept = Vec::new();
    for value in all {
        if !kept.contains(value) {
            kept.push(*value);
        }
    }
    kept
}

/// Reads a file of JSON.
fn read_json(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    serde_json::from_slice(&bytes).map_err(|e| {
        let error = Error::invalid(format!("not valid JSON: {e}"));
        error
            .hint("give a file that kvsmith wrote")
            .context(path.display())
    })
}

/// Reads documents of times; `None` without any.
fn read_times(paths: &[PathBuf]) -> Result<Option<StepTimes>> {
    let documents: Vec<Value> = paths.iter().map(|path| read_json(path)).collect::<Result<_>>()?;
    let read = (!documents.is_empty()).then(|| StepTimes::read(&documents));
    read.transpose().map_err(|e| e.context("⟨times⟩"))
}

/// Checks that another text is not the one that an artifact was calibrated on, as far as that is known.
fn check_other(artifact: &Artifact, corpus: &Corpus) -> Result<()> {
    let own = &artifact.manifest.origin.calibration;
    let is_same = corpus
        .ids
        .get(..own.tokens)
        .is_some_and(|ids| digest_of(ids) == own.ids_sha256);
    if is_same {
        return Err(
            Error::mismatch("the artifact was calibrated on this text, or on its beginning").hint(
                "leave out --other-text, and give the flags of the calibration: what was held out, and what follows, is then measured on",
            ),
        );
    }
    Ok(())
}

/// Cuts a text to which nothing was fitted into as many pieces as are wanted, evenly spaced.
fn whole_texts(corpus: &Corpus, wanted: Wanted) -> Vec<Passage> {
    let text_blocks = corpus.documents.as_ref().map(|of| of.text_blocks);
    let blocks = 0..text_blocks.unwrap_or(corpus.n_blocks());
    let pieces: Vec<&[u32]> = blocks
        .flat_map(|block| corpus.ids[corpus.block(block)].chunks(wanted.block))
        .collect();
    let longest = pieces.iter().map(|piece| piece.len()).max().unwrap_or(0);
    // The ends of blocks are left out: what a step reads depends on the length.
    let pieces: Vec<&[u32]> = pieces
        .into_iter()
        .filter(|piece| 2 * piece.len() > longest)
        .collect();
    let (n, count) = (pieces.len(), wanted.tokens / wanted.block);
    let taken = (0..count.min(n)).map(|i| pieces[i * n / count.min(n)]);
    taken.filter_map(|ids| Passage::new(ids, wanted.steps)).collect()
}

impl Args {
    /// Returns what is to be small.
    fn least(&self) -> Result<Quantity> {
        match (self.limit.of, self.least) {
            (Quantity::Kl, Quantity::Kl) => Err(Error::usage("--least kl cannot be within --limit kl")
                .hint("choose bytes, memory or ms, or limit one of these")),
            (Quantity::Kl, least) => Ok(least),
            _ => Ok(Quantity::Kl),
        }
    }

    /// Makes a plan from the sensitivities of an earlier result.
    fn again(&self, times: Option<&StepTimes>) -> Result<Outcome> {
        let path = self.from.as_deref().unwrap_or(Path::new(""));
        let mut document = read_json(path)?;
        let mut read = || {
            let missing = || {
                Error::invalid("there is no key `sensitivities`")
                    .hint("give a file that `kvsmith tune` wrote")
            };
            let value = document.get_mut("sensitivities").map(Value::take);
            Sensitivities::read(value.ok_or_else(missing)?)
        };
        let sensitivities = read().map_err(|e| e.context(path.display()))?;
        Ok(Outcome {
            tuned: sensitivities.tune(self.limit, self.least()?, times)?,
            sensitivities,
            device: "cpu",
            checked: Err("the sensitivities were measured before".to_owned()),
        })
    }

    /// Measures sensitivities, makes a plan, and measures the plan.
    fn measured(
        &self,
        [artifact, model]: [&PathBuf; 2],
        times: Option<&StepTimes>,
        output: &mut Option<crate::disk::Output>,
        device: &dyn crate::compute::device::Device,
        global: &Global,
    ) -> Result<Outcome> {
        let (log, least) = (global.log(), self.least()?);
        if [self.limit.of, least].contains(&Quantity::Ms) && times.is_none() {
            return Err(Error::usage("milliseconds need --times")
                .hint("give it documents of `kvsmith bench decode --json`"));
        }
        let opened = Artifact::open(artifact, SECTIONS)?;
        let model_path = model;
        let model = open_model(model_path, log)?;
        opened.check_model(&model.fingerprint()?, model.config().sizes())?;
        let wanted = Wanted {
            tokens: self.length.saturating_mul(self.blocks.saturating_add(self.check)),
            block: self.length,
            steps: self.steps,
            uuids: false,
        };
        // What would be fitted and held out in a calibration is said of the calibration text alone.
        let loading = Global {
            quiet: global.quiet || self.other_text,
            ..global.clone()
        };
        let (corpus, reserve) = texts_of(
            &self.dump,
            model_path,
            model.config(),
            &self.input,
            wanted,
            &loading,
        )?;
        let texts = if self.other_text {
            check_other(&opened, &corpus)?;
            whole_texts(&corpus, wanted)
        } else {
            check_text(&opened, artifact, &corpus).map_err(|e| e.hint(
                "give the same text and its flags as in the calibration, or its dump; with --other-text, all of a text is measured on to which nothing was fitted",
            ))?;
            Material::new(&corpus, &reserve, wanted).text.passages
        };
        let (texts, rest) = texts.split_at(self.blocks.min(texts.len()));
        let checked = &rest[..self.check.min(rest.len())];
        if texts.is_empty() {
            return Err(
                Error::invalid("no text was held out, so nothing can be measured").hint(
                    "give text that goes on beyond --max-tokens, or calibrate again with --holdout above 0",
                ),
            );
        }
        let settings = TuneSettings {
            methods: once(&self.methods),
            budgets: once(&self.budgets),
            formats: if self.kv.is_empty() {
                usual_formats()
            } else {
                once(&self.kv)
            },
            per: self.per,
        };
        let tuning = Tuning {
            settings: &settings,
            seed: global.seed,
            machine: global.machine(device, &log),
            model: &model,
            artifact: &opened,
            other_text: self.other_text,
        };
        let sensitivities = tuning.measure(texts)?;
        let tuned = sensitivities.tune(self.limit, least, times).and_then(|tuned| {
            let checked = self.check(&tuning, &tuned, checked)?;
            Ok((tuned, checked))
        });
        match tuned {
            Ok((tuned, checked)) => Ok(Outcome {
                sensitivities,
                tuned,
                device: device.name(),
                checked,
            }),
            Err(e) => {
                self.save(output, &json!({ "sensitivities": sensitivities }), global)?;
                log.note(&format!(
                    "wrote {} with the sensitivities alone; --from uses them",
                    self.output.display()
                ));
                Err(e)
            }
        }
    }

    /// Writes the file.
    fn save(&self, output: &mut Option<crate::disk::Output>, members: &Value, global: &Global) -> Result<()> {
        let Some(mut output) = output.take() else {
            return Ok(());
        };
        let text = document(&global.command, members);
        output
            .write_all(text.as_bytes())
            .map_err(|e| Error::io(&self.output, "write", &e))?;
        output.finish(&[])
    }

    fn check(
        &self,
        tuning: &Tuning,
        tuned: &Tuned,
        texts: &[Passage],
    ) -> Result<std::result::Result<Checked, String>> {
        Ok(match (self.check, texts.is_empty()) {
            (0, _) => Err("--check is 0".to_owned()),
            (_, true) => Err("there was no more text".to_owned()),
            _ => Ok(tuning.check(tuned, texts)?),
        })
    }

    /// Writes the plan with what it follows from, and says what it is.
    fn write(
        &self,
        output: &mut Option<crate::disk::Output>,
        outcome: &Outcome,
        global: &Global,
    ) -> Result<()> {
        let Outcome {
            sensitivities,
            tuned,
            device,
            checked,
        } = outcome;
        let uniform = tuned.uniform.first().map(|(serving, expected)| {
            let mut value = json!(serving);
            merge(&mut value, &json!(expected));
            value
        });
        let about = json!({
            "limit": self.limit, "least": tuned.least, "expected": tuned.expected, "bound": tuned.bound,
            "uniform": uniform, "checked": checked.as_ref().ok(), "head_plan": tuned.plan.json(),
        });
        let mut file = about.clone();
        merge(&mut file, &json!({ "sensitivities": sensitivities }));
        self.save(output, &file, global)?;
        let note = format!("wrote {}\n{}", self.output.display(), self.summary(outcome));
        global.log().note(&note);
        if !global.json {
            return Ok(());
        }
        let mut printed = json!({ "output": self.output.display().to_string(), "device": device });
        merge(&mut printed, &about);
        print_json(global, &printed)
    }

    /// Says in some lines what was found.
    fn summary(&self, outcome: &Outcome) -> String {
        let (tuned, least) = (&outcome.tuned, outcome.tuned.least);
        let mut lines = vec![format!(
            "plan within {}: expected {}",
            self.limit,
            described(&tuned.expected)
        )];
        let found = tuned.expected.get(least);
        lines.push(if tuned.bound >= found {
            format!("  no plan of these choices within the limit is expected to have less {least}")
        } else {
            format!(
                "  no plan of these choices within the limit is expected to have less {least} than {:.6}",
                tuned.bound
            )
        });
        lines.extend(tuned.uniform.first().map(|(serving, expected)| {
            format!(
                "  best plan that serves all KV heads alike: {}: expected {}",
                serving.head_plan(),
                described(expected)
            )
        }));
        lines.extend(match &outcome.checked {
            Err(why) => vec![format!("  not checked: {why}")],
            Ok(checked) => compared(checked),
        });
        lines.push(format!("  serves {}", tuned.plan.text()));
        lines.join("\n")
    }
}

/// Says what is expected of a plan.
fn described(expected: &PlanFigures) -> String {
    let known = [Quantity::Kl, Quantity::Bytes, Quantity::Memory, Quantity::Ms].into_iter();
    let known = known.filter(|of| expected.get(*of).is_finite());
    let texts: Vec<String> = known.map(|of| of.text(expected.get(of))).collect();
    texts.join(", ")
}

/// Says what a plan was measured to lose, and how that compares.
fn compared(checked: &Checked) -> Vec<String> {
    let interval = |of: &Option<[f64; 2]>| {
        of.map_or(String::new(), |[low, high]| {
            format!(" (95%: {low:.4} to {high:.4})")
        })
    };
    let measured = |of: &PlanLoss| {
        let bytes = of.bytes.map_or(String::new(), |bytes| {
            format!(", {}", Quantity::Bytes.text(bytes))
        });
        format!("KL {:.4} nats{}{bytes}", of.kl, interval(&of.interval))
    };
    let mut lines = vec![format!(
        "  measured on {}: {}",
        counted(checked.blocks, "other text"),
        measured(&checked.plan)
    )];
    // The best of them, as measured.
    let best = checked
        .uniform
        .iter()
        .min_by(|a, b| a.measured.kl.total_cmp(&b.measured.kl));
    lines.extend(best.map(|of| {
        format!(
            "  best there of the plans that serve all KV heads alike, {}: {}; the KL of the tuned plan is {:+.4} nats from it{}",
            of.serving.head_plan(),
            measured(&of.measured),
            of.difference,
            interval(&of.difference_interval)
        )
    }));
    lines
}
