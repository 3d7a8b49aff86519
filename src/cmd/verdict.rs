//! `kvsmith verdict`: measures what each method loses with an artifact on the text that was held out when it was made.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::args::{Global, Input, model_folder};
use super::calibrate::stages::{BUDGETS, Stages, VERDICT};
use super::named::{self, Named, NamedParser};
use super::{finish, layers_on, load_corpus, open_model, output, paths};
use crate::artifact::{self, Artifact, HeadLosses, Measured, MethodLoss, USUAL_KL, Verdict};
use crate::compute::device::Device;
use crate::corpus::Corpus;
use crate::dump::Dump;
use crate::error::{Error, Result};
use crate::flags::{parse_positive_count, parse_share};
use crate::heap;
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType};
use crate::method::declaration::Ask;
use crate::method::params::MethodParams;
use crate::method::registry::{METHODS, MethodName};
use crate::method::sections::SECTIONS;
use crate::method::tail::with_tail;
use crate::method::{CPU_GRANULE, Method};
use crate::model::Decoder;
use crate::progress::Log;
use crate::runner::Options;
use crate::runner::eval::{Layerwise, Metrics, Passage, Variant, VariantReport};

/// Methods that are measured although they have no section of the artifact: the exact choice, one that calibrates on the
/// prompt, and a plain window.
const OTHERS: [&str; 3] = ["topk", "ctkvr", "streaming"];

/// The method that ranks by exact scores.
pub(super) const ORACLE: &str = "topk";

/// Budgets, as fractions of the context, whose reads are measured to find the budgets that read given shares.
const GRID: [f64; 9] = [0.0001, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.22, 0.35];

/// Steps in which these reads are measured; they change little from step to step.
const SAMPLED_STEPS: usize = 8;

/// A share counts as reached if a budget reads at most this much more than the share, as a fraction of the share.
const TOLERANCE: f64 = 0.02;

/// The flags of the measurement, of `verdict` and `calibrate`.
#[derive(clap::Args, Clone, Debug)]
#[group(skip)]
#[command(next_help_heading = "Verdict")]
pub struct VerdictFlags {
    /// Shares of the bytes of all visible keys and values in bf16 (above 0, below 1) at which each method is measured
    #[arg(long, value_name = "F,G", value_delimiter = ',', default_value = "0.05,0.1,0.2", value_parser = parse_share)]
    verdict_reads: Vec<f64>,
    /// Number of tokens at the end of each held-out block that are decoded one by one
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = parse_positive_count)]
    verdict_steps: usize,
    /// Methods to measure; NAME+tail adds a tail to the method (default: every method with a section in the artifact,
    /// and topk, ctkvr and streaming)
    #[arg(long, value_name = "A,B", value_delimiter = ',', value_parser = NamedParser)]
    verdict_methods: Vec<Named>,
}

impl VerdictFlags {
    /// Counts the combinations of method and budget for an artifact of `n_sections` sections.
    pub fn budgets(&self, n_sections: usize) -> usize {
        let methods = match self.verdict_methods.len() {
            0 => n_sections + OTHERS.len(),
            named => named,
        };
        methods * self.verdict_reads.len()
    }

    /// Counts the steps per held-out block.
    pub fn steps(&self) -> usize {
        self.verdict_steps
    }
}

/// Arguments of `verdict`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens", "dump"]).required(true)))]
pub struct Args {
    /// Artifact or section file to measure
    #[arg(value_name = "ART")]
    artifact: PathBuf,
    /// The model from which the artifact was made: checkpoint folder, or id in the Hugging Face cache
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
    heap::return_large_allocations();
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
    let decoder = open_model(&args.model, log)?;
    let fingerprint = decoder.checkpoint.fingerprint(&decoder.config)?;
    artifact.check_model(&fingerprint, decoder.config.sizes())?;
    let corpus = match &args.dump[..] {
        [_, ..] => Dump::open(&args.dump)?.corpus,
        [] => load_corpus(&args.model, &decoder.config, &args.input, global)?,
    };
    if corpus.manifest() != artifact.manifest.origin.calibration {
        return Err(Error::failed(format!(
            "{} was calibrated on another text",
            args.artifact.display()
        ))
        .hint("give the same text, --max-tokens, --seq-len, --uuid-tokens, --holdout and --seed as in its calibration, or its dump"));
    }
    let start = std::time::Instant::now();
    let verdict = Judging {
        flags: &args.flags,
        global,
        device: device.as_ref(),
        decoder: &decoder,
        corpus: &corpus,
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
    artifact::write_with_verdict(output, &artifact, verdict)?;
    finish(global, &note, &args.output, &document)
}

/// What a verdict is measured with.
pub struct Judging<'a> {
    /// The flags.
    pub flags: &'a VerdictFlags,
    /// The options of every command.
    pub global: &'a Global,
    /// The device that runs the model.
    pub device: &'a dyn Device,
    /// The model.
    pub decoder: &'a Decoder,
    /// The calibration text.
    pub corpus: &'a Corpus,
}

impl Judging<'_> {
    fn log(&self) -> Log {
        self.global.log()
    }

    /// Returns the texts to measure on: each held-out block up to its last held-out token.
    ///
    /// # Errors
    /// Nothing is held out, or no held-out part leaves a prompt and a step.
    fn passages(&self) -> Result<Vec<Passage>> {
        let passage = |&(block, first, end): &(usize, usize, usize)| {
            let start = self.corpus.block(block).start;
            let steps = self.flags.verdict_steps.min(end - first).min(end - 1);
            let ids = self.corpus.ids[start..start + end].to_vec();
            (steps > 0).then_some(Passage { ids, steps })
        };
        let passages: Vec<Passage> = self.corpus.held_out.iter().filter_map(passage).collect();
        match passages.is_empty() {
            false => Ok(passages),
            true => Err(
                Error::failed("no text was held out, so the methods cannot be measured")
                    .hint("calibrate with --holdout above 0, or add --no-verdict"),
            ),
        }
    }

    /// Lists the methods to measure.
    fn methods(&self, artifact: &Artifact) -> Vec<Named> {
        if !self.flags.verdict_methods.is_empty() {
            return self.flags.verdict_methods.clone();
        }
        let is_usual =
            |method: &&MethodName| method.is_calibrated(artifact) || OTHERS.contains(&method.as_str());
        let named = |method: &MethodName| Named {
            method: *method,
            tail: false,
        };
        METHODS.iter().filter(is_usual).map(named).collect()
    }

    /// Measures every method with an artifact; adds the time it takes to `stages`.
    ///
    /// # Errors
    /// No held-out text; activations that are not finite; an interrupt.
    pub fn measure(&self, artifact: &Artifact, stages: &mut Stages) -> Result<Verdict> {
        let (passages, named) = (self.passages()?, self.methods(artifact));
        let params = MethodParams::default();
        let ask = Ask {
            artifact: Some(artifact),
            rope: &self.decoder.rope,
            sizes: self.decoder.config.sizes(),
            params: &params,
            seed: self.global.seed,
        };
        let prepare = |named: &Named| {
            let method = named.method.prepare(&ask)?;
            if named.tail {
                with_tail(method, &ask)
            } else {
                Ok(method)
            }
        };
        let methods: Vec<Box<dyn Method>> = named.iter().map(prepare).collect::<Result<_>>()?;
        let variant = |(method, budget): (usize, f64)| Variant {
            method: methods[method].as_ref(),
            number: named::number(&named, method),
            budget: Budget::Fraction(budget),
        };
        let layers = layers_on(self.device, self.decoder, self.global)?;
        let layerwise = Layerwise {
            layers: layers.as_ref(),
            options: Options {
                sinks: SINKS,
                window: WINDOW,
                budget: Budget::Fraction(1.0),
                kv: KvType::Bf16,
                packed: params.selfindex.layout(Some(artifact))?,
                granule: CPU_GRANULE,
            },
        };
        let steps: usize = passages.iter().map(|passage| passage.steps).sum();
        let names: Vec<String> = named.iter().map(Named::to_string).collect();
        self.log().note(&format!(
            "verdict: {} on {} held-out blocks, {steps} decode steps",
            names.join(", "),
            passages.len()
        ));
        let n_layers = self.decoder.config.n_layers;
        let progress = self.log().progress(2 * n_layers as u64, "layers");
        let mut done = |layer: usize| {
            progress.layer(layer, n_layers, "verdict");
            progress.advance(1);
        };
        let sample = Passage {
            steps: passages[0].steps.min(SAMPLED_STEPS),
            ..passages[0].clone()
        };
        let grid: Vec<_> = (0..methods.len())
            .flat_map(|m| GRID.map(|budget| (m, budget)))
            .collect();
        let variants: Vec<Variant> = grid.into_iter().map(variant).collect();
        let reads = stages.time(BUDGETS, || layerwise.reads(&sample, &variants, &mut done))?;
        let reads: Vec<f64> = reads.into_iter().map(|share| share.unwrap_or(1.0)).collect();
        let planned: Vec<Planned> = reads
            .chunks(GRID.len())
            .enumerate()
            .flat_map(|(method, reads)| {
                let targets = self.flags.verdict_reads.iter();
                targets.map(move |target| Planned::new(method, *target, reads))
            })
            .collect();
        let budgets = planned.iter().filter_map(|p| Some((p.method, p.budget?)));
        let variants: Vec<Variant> = budgets.map(variant).collect();
        let reports = stages.time(VERDICT, || layerwise.evaluate(&passages, &variants, &mut done))?;
        let mut reports = reports.into_iter();
        let rows = planned.iter().map(|planned| {
            let report = planned.budget.and_then(|budget| Some((budget, reports.next()?)));
            let head_dim = self.decoder.config.head_dim;
            let read = report
                .as_ref()
                .and_then(|(_, report)| report.counts.bytes_fraction(KvType::Bf16, head_dim));
            MethodLoss {
                method: names[planned.method].clone(),
                oracle: named[planned.method].method.as_str() == ORACLE,
                reads_target: planned.target,
                bytes_read_fraction: rounded(read.unwrap_or(planned.least)),
                measured: report.map(|(budget, report)| measured(budget, &report)),
            }
        });
        Ok(Verdict {
            blocks: passages.len(),
            steps,
            sinks: SINKS,
            window: WINDOW,
            kv: KvType::Bf16.as_str().to_owned(),
            rows: rows.collect(),
        })
    }
}

/// The budget of one method for one share of the bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Planned {
    /// Index of the method.
    method: usize,
    target: f64,
    /// The budget; `None` if even the smallest budget reads more.
    budget: Option<f64>,
    /// The share that the smallest budget reads.
    least: f64,
}

impl Planned {
    /// Finds the budget that reads `target`, given what the budgets of [`GRID`] read: by linear interpolation between
    /// two of them, or the largest budget if none reads that much.
    fn new(method: usize, target: f64, reads: &[f64]) -> Self {
        let least = reads[0];
        let budget = match reads.iter().position(|read| *read >= target) {
            None => GRID.last().copied(),
            Some(0) => (least <= target * (1.0 + TOLERANCE)).then_some(GRID[0]),
            Some(i) => {
                let part = (target - reads[i - 1]) / (reads[i] - reads[i - 1]);
                Some(GRID[i - 1] + part * (GRID[i] - GRID[i - 1]))
            }
        };
        // Four decimals are few enough for a user to type.
        let budget = budget.map(|budget| (budget * 1e4).round().max(1.0) / 1e4);
        Self {
            method,
            target,
            budget,
            least,
        }
    }
}

/// Collects the measurements of a report.
fn measured(budget: f64, report: &VariantReport) -> Measured {
    let whole = report.whole();
    let heads = |of: fn(&Metrics) -> f64| {
        let layer = |heads: &Vec<_>| heads.iter().map(|head| rounded(of(head))).collect();
        report.heads.iter().map(layer).collect()
    };
    let losses = whole.losses;
    Measured {
        budget,
        kl: rounded(losses.kl),
        kl_median: rounded(losses.kl_median),
        kl_p99: rounded(losses.kl_p99),
        top1_equal: rounded(losses.top1_equal),
        perplexity_ratio: rounded(losses.perplexity_ratio),
        recall: rounded(whole.choices.recall.into()),
        mass: rounded(whole.choices.mass.into()),
        output_error: rounded(whole.choices.output_error.into()),
        index_bits_per_token: rounded(report.index_bits_per_token()),
        heads: HeadLosses {
            recall: heads(|head| head.recall.into()),
            mass: heads(|head| head.mass.into()),
            output_error: heads(|head| head.output_error.into()),
        },
    }
}

/// Rounds to five significant digits, so that the last bits of sums, which depend on order and threads, are not stored.
fn rounded(x: f64) -> f64 {
    format!("{x:.4e}").parse().unwrap_or(x)
}

/// Says in a line what a run without `--method` and `--budget` will take.
pub fn summary(verdict: &Verdict) -> Option<String> {
    let (row, of) = verdict.usual()?;
    let within = match of.kl <= USUAL_KL {
        true => format!("smallest KL at the smallest share of the bytes with a KL of at most {USUAL_KL}"),
        false => format!("smallest KL; none is at most {USUAL_KL}"),
    };
    Some(format!(
        "recommended: --method {} --budget {} reads {:.1} % of the bytes with a KL of {:.4} nats ({within})",
        row.method,
        of.budget,
        100.0 * row.bytes_read_fraction,
        of.kl
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_lie_between_those_that_were_measured() {
        let reads = GRID.map(|budget| 0.03 + budget);
        let of = |target| Planned::new(2, target, &reads).budget;
        assert_eq!(of(0.02), None);
        assert_eq!(of(0.03), Some(0.0001));
        assert_eq!(of(0.1), Some(0.07));
        assert_eq!(of(0.085), Some(0.055));
        // A method whose reads stop growing below the share gets the largest budget.
        assert_eq!(Planned::new(0, 0.2, &[0.05; GRID.len()]).budget, Some(0.35));
    }

    #[test]
    fn five_digits_stay() {
        assert_eq!(rounded(0.123_456_78), 0.12346);
        assert_eq!(rounded(0.0), 0.0);
        assert_eq!(rounded(12_345_678.0), 12_346_000.0);
    }
}
