//! `run --prefer time`: of the settings that lose little enough, the one whose steps are fastest on this CPU.

use clap::{ValueEnum, builder::PossibleValue};

use crate::artifact::{Artifact, Measured, MethodLoss, Verdict};
use crate::cmd::args::Global;
use crate::cmd::bench::{Caches, CpuSteps, LayerSetting};
use crate::cmd::named::Named;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::kv::{Budget, KvType};
use crate::method::bench::{CodeForm, TimedLayer};
use crate::method::registry::{FULL, MethodName};
use crate::method::{Ranking, a2ats};
use crate::model::Decoder;

/// Number of timed steps, of which the fastest counts: other work on the machine only makes a step slower.
const RUNS: usize = 10;
/// Only heads whose channels are a multiple of this can be timed.
const CHANNELS: usize = 32;
/// The longest context that is timed; beyond it, all methods are compared at this length.
const LONGEST: usize = 32_768;

/// What a run without `--method` and `--budget` prefers among the settings that lose little enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefer {
    /// The one that reads the fewest bytes.
    #[default]
    Bytes,
    /// The one whose steps are fastest on this machine.
    Time,
}

impl ValueEnum for Prefer {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Bytes, Self::Time]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(match self {
            Self::Bytes => PossibleValue::new("bytes").help("The setting that reads the fewest bytes"),
            Self::Time => PossibleValue::new("time")
                .help("The setting whose steps are fastest on this CPU, which a few steps of each tell; full attention if none is faster"),
        })
    }
}

/// The fastest setting, with the seconds of its steps and of those of full attention.
pub struct Fastest<'v> {
    /// The verdict's row; `None` if full attention is as fast.
    pub row: Option<(&'v MethodLoss, &'v Measured)>,
    /// The length of the contexts that were timed.
    pub context: usize,
    /// Seconds that attention takes in a step, the choice included: with the setting, and with full attention.
    pub attention_s: [f64; 2],
}

impl Fastest<'_> {
    /// Says how long attention takes.
    pub fn text(&self) -> String {
        let [own, full] = self.attention_s.map(|seconds| 1e3 * seconds);
        let context = self.context;
        match self.row {
            Some(_) => format!(
                "at {context} positions, its attention takes {own:.1} ms a step on this CPU, full attention {full:.1} ms"
            ),
            None => format!(
                "at {context} positions, none of the settings that lose little enough is faster on this CPU than full attention, which takes {full:.1} ms a step"
            ),
        }
    }
}

/// Times a step with every setting of a verdict that is within its limits, and with full attention, in a context of
/// `length` positions.
///
/// # Errors
/// Heads that cannot be timed; a setting whose step fails; an interrupt.
pub fn fastest<'v>(
    verdict: &'v Verdict,
    artifact: &Artifact,
    decoder: &Decoder,
    length: usize,
    global: &Global,
) -> Result<Fastest<'v>> {
    let config = &decoder.config;
    if !config.head_dim.is_multiple_of(CHANNELS) {
        return Err(Error::usage(format!(
            "--prefer time cannot time heads of {} channels",
            config.head_dim
        ))
        .hint("their number must be a multiple of 32; omit --prefer"));
    }
    let context = length.clamp(1, LONGEST);
    let timer = Timer {
        heads: [config.n_kv_heads, config.group()],
        head_dim: config.head_dim,
        layers: config.windows.iter().filter(|window| window.is_none()).count(),
        context,
        codewords: codewords(artifact),
        kv: KvType::parse(&verdict.kv).unwrap_or(KvType::Bf16),
        seed: global.seed,
    };
    let full_s = timer.seconds(FULL, Budget::Fraction(1.0))?;
    let full_s = full_s.ok_or_else(|| Error::failed("internal: full attention is not timed"))?;
    let mut best: Option<((&MethodLoss, &Measured), f64)> = None;
    for (row, of) in verdict.smallest_within(verdict.limit()) {
        interrupt::check()?;
        let Some(named) = Named::parse(&row.method).filter(|named| !named.tail) else {
            continue;
        };
        let Some(seconds) = timer.seconds(named.method, Budget::Fraction(of.budget))? else {
            continue;
        };
        if best.is_none_or(|(_, least)| seconds < least) {
            best = Some(((row, of), seconds));
        }
    }
    let best = best.filter(|(_, seconds)| *seconds < full_s);
    let own_s = best.map_or(full_s, |(_, seconds)| seconds);
    Ok(Fastest {
        row: best.map(|(row, _)| row),
        context,
        attention_s: [own_s, full_s],
    })
}

/// Returns the number of codewords per KV head of an artifact's section `a2ats`; without one, none are timed.
fn codewords(artifact: &Artifact) -> usize {
    let section = artifact.manifest.sections.get(a2ats::SECTION);
    let size = section.and_then(|section| section.params.get("size")?.as_u64());
    size.map_or(1, |size| size as usize)
}

/// What all timed steps have in common.
struct Timer {
    /// KV heads, and query heads per KV head.
    heads: [usize; 2],
    head_dim: usize,
    /// Layers that attend to all positions.
    layers: usize,
    context: usize,
    codewords: usize,
    kv: KvType,
    seed: u64,
}

impl Timer {
    /// Returns the seconds of attention in a decode step, over all layers that attend to all positions; `None` if the
    /// method cannot be timed.
    fn seconds(&self, method: MethodName, budget: Budget) -> Result<Option<f64>> {
        let Some(bench) = method.bench() else {
            return Ok(None);
        };
        let [kv_heads, group] = self.heads;
        let caches = Caches {
            batch: vec![1],
            budget,
            kv: self.kv,
            size: self.codewords,
        };
        let layer = TimedLayer {
            sequences: 1,
            kv_heads,
            head_dim: self.head_dim,
            context: self.context,
            codewords: caches.size,
            code: CodeForm::default(),
            ranking: Ranking::default(),
            seed: self.seed,
        };
        let setting = LayerSetting::attending(&caches, layer, group, method, bench);
        let mut steps = CpuSteps::new(&setting)?;
        steps.run()?;
        let mut fastest = f64::INFINITY;
        for _ in 0..RUNS {
            fastest = steps.run()?.min(fastest);
        }
        Ok(Some(self.layers as f64 * fastest))
    }
}
