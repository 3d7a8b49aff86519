//! The measurement of sensitivities, and that of a finished plan.

use serde::Serialize;

use super::sensitivities::{Candidate, Per, Sensitivities, Tuned, Way, units};
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType, RowFormat};
use crate::machine::Machine;
use crate::method::Method;
use crate::method::declaration::Ask;
use crate::method::named::{self, Named};
use crate::method::params::MethodParams;
use crate::method::plan::Plan;
use crate::method::registry::{FULL, MethodName, STREAMING, default_method};
use crate::method::rotation;
use crate::model::Model;
use crate::numbers::five_digits;
use crate::runner::DecodeOptions;
use crate::runner::eval::{Bootstrap, Layerwise, Passage, Variant, VariantReport};
use crate::wording::counted;

/// Steps in which reads are measured; they change little from step to step.
const SAMPLED_STEPS: usize = 8;

/// Plans that serve all KV heads alike with which a plan is compared: those that should be best.
const COMPARED: usize = 3;

/// What a plan may choose from, and how it is measured.
#[derive(Clone, Debug, PartialEq)]
pub struct TuneSettings {
    /// The methods; if empty, what the artifact's verdict recommends (without one, what a run takes), `streaming` and
    /// `full`.
    pub methods: Vec<Named>,
    /// The budgets of methods other than `full`, as fractions of the context; `streaming` gets the smallest: more of its rows are no choice.
    pub budgets: Vec<f64>,
    /// The types of the cache.
    pub formats: Vec<KvType>,
    /// What has a choice of its own.
    pub per: Per,
}

/// The types of the cache that are measured unless others are asked for.
pub fn usual_formats() -> Vec<KvType> {
    let pair = |keys, values| KvType { keys, values };
    vec![
        KvType::BF16,
        KvType::INT8,
        KvType::both(RowFormat::INT4_4),
        pair(RowFormat::INT8, RowFormat::INT4),
        KvType::both(RowFormat::INT4),
        pair(RowFormat::INT4, RowFormat::INT2),
        KvType::both(RowFormat::INT2),
    ]
}

/// What is tuned, and with what it is measured.
pub struct Tuning<'a> {
    /// What a plan may choose from.
    pub settings: &'a TuneSettings,
    /// The seed of the methods' choices and of the intervals.
    pub seed: u64,
    /// The device that runs the model.
    pub machine: Machine<'a>,
    /// The model.
    pub model: &'a Model,
    /// The artifact of the methods.
    pub artifact: &'a Artifact,
    /// Whether the texts are no part of the artifact's calibration text.
    pub other_text: bool,
}

/// A plan measured beside those that serve all KV heads alike.
#[derive(Clone, Debug, Serialize)]
pub struct Checked {
    /// Number of texts; nothing was decided on them.
    pub blocks: usize,
    /// The plan.
    pub plan: PlanLoss,
    /// The plans that serve all KV heads alike, and how they compare.
    pub uniform: Vec<Uniform>,
}

/// What a plan was measured to lose and to read.
#[derive(Clone, Debug, Serialize)]
pub struct PlanLoss {
    /// Mean KL divergence, in nats.
    pub kl: f64,
    /// Its 95% interval; `None` for few texts.
    pub interval: Option<[f64; 2]>,
    /// What memory moves, as a share of all visible rows in bf16.
    pub bytes: Option<f64>,
}

/// A plan that serves all KV heads alike.
#[derive(Clone, Debug, Serialize)]
pub struct Uniform {
    /// How.
    #[serde(flatten)]
    pub serving: Way,
    /// What it loses and reads.
    #[serde(flatten)]
    pub measured: PlanLoss,
    /// The KL divergence of the tuned plan minus its own, on the same texts.
    pub difference: f64,
    /// The 95% interval of the difference; `None` for few texts.
    pub difference_interval: Option<[f64; 2]>,
}

/// The methods, each prepared once.
struct Prepared {
    named: Vec<Named>,
    methods: Vec<Box<dyn Method>>,
}

impl Prepared {
    fn variant(&self, of: &Way) -> Option<Variant<'_>> {
        let at = self.named.iter().position(|named| *named == of.method)?;
        Some(Variant {
            method: self.methods[at].as_ref(),
            number: named::number(&self.named, at),
            budget: of.budget,
            kv: Some(of.kv),
        })
    }

    fn variants<'s>(&'s self, all: impl Iterator<Item = &'s Way>) -> Vec<Variant<'s>> {
        all.filter_map(|of| self.variant(of)).collect()
    }
}

impl Tuning<'_> {
    /// Lists the methods.
    ///
    /// # Errors
    /// This version does not know the method that the verdict recommends.
    fn methods(&self) -> Result<Vec<Named>> {
        if !self.settings.methods.is_empty() {
            return Ok(self.settings.methods.clone());
        }
        let plain = |method: MethodName| Named { method, tail: false };
        let verdict = self.artifact.manifest.quality.methods.as_ref();
        let recommended = verdict.and_then(|verdict| verdict.usual());
        let recommended = recommended.map(|(row, _)| Named::of_row(row)).transpose()?;
        let first = recommended.unwrap_or(plain(default_method(Some(self.artifact))));
        let mut methods: Vec<Named> = Vec::new();
        for named in [first, plain(STREAMING), plain(FULL)] {
            if !methods.contains(&named) {
                methods.push(named);
            }
        }
        Ok(methods)
    }

    fn ask<'s>(&'s self, params: &'s MethodParams) -> Ask<'s> {
        Ask {
            artifact: Some(self.artifact),
            ropes: &self.model.decoder.ropes,
            sizes: self.model.config().sizes(),
            params,
            seed: self.seed,
        }
    }

    fn prepared(&self, named: &[Named]) -> Result<Prepared> {
        let params = MethodParams::default();
        let methods = named.iter().map(|named| named.prepare(&self.ask(&params)));
        Ok(Prepared {
            methods: methods.collect::<Result<_>>()?,
            named: named.to_vec(),
        })
    }

    fn options(&self, formats: impl Iterator<Item = KvType>) -> Result<DecodeOptions> {
        Ok(DecodeOptions {
            packed: MethodParams::default().selfindex.layout(Some(self.artifact))?,
            maps: rotation::maps(Some(self.artifact), formats)?,
            ..DecodeOptions::new(Budget::Fraction(1.0), KvType::BF16)
        })
    }

    /// Runs `work` with a function that it calls after each layer of each of so many passes.
    fn with_progress<T>(
        &self,
        what: &str,
        passes: usize,
        work: impl FnOnce(&mut dyn FnMut(usize)) -> Result<T>,
    ) -> Result<T> {
        let n_layers = self.model.config().n_layers();
        let progress = self
            .machine
            .reporter
            .progress((passes * n_layers) as u64, "layers");
        work(&mut |layer| {
            progress.layer(layer, n_layers, what);
            progress.advance(1);
        })
    }

    /// Measures what each way of serving each unit does to the predictions, and what memory moves and holds for it.
    ///
    /// # Errors
    /// A method without its section in the artifact; activations that are not finite; an interrupt.
    pub fn measure(&self, passages: &[Passage]) -> Result<Sensitivities> {
        let methods = self.methods()?;
        let prepared = self.prepared(&methods)?;
        let sizes = self.model.config().sizes();
        let (ways, mut candidates) = self.candidates(&methods, sizes.head_dim);
        let layers = self.machine.layers(&self.model.decoder)?;
        let layerwise = Layerwise {
            layers: layers.as_ref(),
            options: self.options(self.settings.formats.iter().copied())?,
        };
        let units = units(self.settings.per, sizes);
        let longest = passages.iter().max_by_key(|passage| passage.ids.len());
        let longest = longest.ok_or_else(|| Error::internal("internal: nothing to measure on"))?;
        self.machine.reporter.note(&format!(
            "measuring {} to serve each of {} on {} of {} tokens",
            counted(ways.len(), "way"),
            counted(
                units.len(),
                match self.settings.per {
                    Per::Head => "KV head",
                    Per::Layer => "layer",
                }
            ),
            counted(passages.len(), "text"),
            longest.ids.len(),
        ));
        let sample = Passage {
            steps: longest.steps.min(SAMPLED_STEPS),
            ..longest.clone()
        };
        let all = prepared.variants(candidates.iter().map(|of| &of.serving));
        let costs = self.with_progress("reads", 1, |done| layerwise.costs(&sample, &all, done))?;
        for (of, costs) in candidates.iter_mut().zip(costs) {
            let column = |at: usize| costs.iter().map(|cost| five_digits(cost[at])).collect();
            (of.bytes, of.memory) = (column(0), column(1));
        }
        let variants = prepared.variants(ways.iter());
        let passes = layerwise.passes(units.len(), variants.len(), passages);
        let kl = self.with_progress("sensitivities", passes, |done| {
            layerwise.sensitivities(passages, &units, &variants, done)
        })?;
        let rounded = |row: Vec<f64>| row.into_iter().map(|kl| five_digits(kl.max(0.0))).collect();
        Ok(Sensitivities {
            model: self.artifact.manifest.origin.model.fingerprint.clone(),
            other_text: self.other_text,
            sizes,
            length: longest.ids.len(),
            blocks: passages.len(),
            steps: passages.iter().map(|passage| passage.steps).sum(),
            sinks: SINKS,
            window: WINDOW,
            per: self.settings.per,
            ways,
            kl: kl.into_iter().map(rounded).collect(),
            candidates,
        })
    }

    /// Lists the ways that are measured, and the candidates that follow from them, without what they read and hold.
    ///
    /// Errors of choosing and of rounding add up, so a method over a format is the method over bf16 and the format with full
    /// attention. Over rows in layers, a method also decides which rows are read whole, so it is measured there itself.
    fn candidates(&self, methods: &[Named], head_dim: usize) -> (Vec<Way>, Vec<Candidate>) {
        let mut choosers: Vec<(Named, Budget)> = Vec::new();
        let smallest = self.settings.budgets.iter().copied().fold(1.0, f64::min);
        for named in methods {
            let budgets: &[f64] = if named.method == FULL {
                &[1.0]
            } else if named.method == STREAMING {
                &[smallest]
            } else {
                &self.settings.budgets
            };
            choosers.extend(budgets.iter().map(|budget| (*named, Budget::Fraction(*budget))));
        }
        let full = Named {
            method: FULL,
            tail: false,
        };
        let mut ways: Vec<Way> = Vec::new();
        let mut way = |method, budget, kv| {
            let serving = Way { method, budget, kv };
            ways.iter().position(|of| *of == serving).unwrap_or_else(|| {
                ways.push(serving);
                ways.len() - 1
            })
        };
        let mut candidates = Vec::new();
        for &kv in &self.settings.formats {
            let has_layers = kv.lower_bytes(head_dim) > 0;
            for &(method, budget) in &choosers {
                let is_full = method == full;
                let mut parts = Vec::new();
                if has_layers || is_full && kv != KvType::BF16 {
                    parts.push(way(method, budget, kv));
                } else {
                    if !is_full {
                        parts.push(way(method, budget, KvType::BF16));
                    }
                    if kv != KvType::BF16 {
                        parts.push(way(full, Budget::Fraction(1.0), kv));
                    }
                }
                candidates.push(Candidate {
                    serving: Way { method, budget, kv },
                    parts,
                    bytes: Vec::new(),
                    memory: Vec::new(),
                });
            }
        }
        (ways, candidates)
    }

    /// Measures a plan, and the best of those that serve all KV heads alike, on other texts.
    ///
    /// # Errors
    /// As [`Tuning::measure`].
    pub fn check(&self, tuned: &Tuned, passages: &[Passage]) -> Result<Checked> {
        let compared: Vec<Way> = tuned
            .uniform
            .iter()
            .take(COMPARED)
            .map(|(serving, _)| *serving)
            .collect();
        let named: Vec<Named> = compared.iter().map(|of| of.method).collect();
        let prepared = self.prepared(&named)?;
        let params = MethodParams::default();
        let plan = Plan::prepare(tuned.plan.clone(), &self.ask(&params))?;
        let mut variants = vec![Variant {
            method: plan.as_ref(),
            number: usize::MAX,
            budget: Budget::Fraction(1.0),
            kv: None,
        }];
        variants.extend(prepared.variants(compared.iter()));
        let layers = self.machine.layers(&self.model.decoder)?;
        let formats = tuned.plan.formats().chain(compared.iter().map(|of| of.kv));
        let layerwise = Layerwise {
            layers: layers.as_ref(),
            options: self.options(formats)?,
        };
        let reports = self.with_progress("check", 1, |done| layerwise.evaluate(passages, &variants, done))?;
        let mut sums = vec![VariantReport::new(self.model.config()); variants.len()];
        for reports in reports {
            sums.iter_mut()
                .zip(reports)
                .for_each(|(sum, report)| sum.append(report));
        }
        let bootstrap = Bootstrap::new(passages.len(), self.seed);
        let interval = |of: &(dyn Fn(&[usize]) -> f64 + Sync)| {
            let interval = bootstrap.as_ref().map(|bootstrap| bootstrap.interval(of));
            interval.map(|interval| interval.map(five_digits))
        };
        let all: Vec<usize> = (0..passages.len()).collect();
        let measured = |report: &VariantReport| PlanLoss {
            kl: five_digits(report.kl_of_blocks(&all)),
            interval: interval(&|blocks| report.kl_of_blocks(blocks)),
            bytes: report.counts.moved_bytes.map(|moved| {
                five_digits(moved as f64 / report.counts.bytes_in_bf16(self.model.config().head_dim))
            }),
        };
        let (own, others) = (&sums[0], &sums[1..]);
        let uniform = compared.iter().zip(others).map(|(serving, report)| {
            let difference = |blocks: &[usize]| own.kl_of_blocks(blocks) - report.kl_of_blocks(blocks);
            Uniform {
                serving: *serving,
                measured: measured(report),
                difference: five_digits(difference(&all)),
                difference_interval: interval(&difference),
            }
        });
        Ok(Checked {
            blocks: passages.len(),
            plan: measured(own),
            uniform: uniform.collect(),
        })
    }
}
