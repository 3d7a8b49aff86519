//! The measurement: every method at every share of the bytes, on the same texts and behind the same prompts.

use super::VerdictSettings;
use super::budgets::{GRID, Planned, SAMPLED_STEPS};
use super::results::Results;
use crate::artifact::{Artifact, MeasuredProbe, MeasuredTexts, Verdict};
use crate::calibration::stages::{BUDGETS, PROBE, Stages, VERDICT};
use crate::error::Result;
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType};
use crate::machine::Machine;
use crate::method::Method;
use crate::method::declaration::{Ask, InVerdict};
use crate::method::named::{self, Named};
use crate::method::params::MethodParams;
use crate::method::registry::FULL;
use crate::method::rotation;
use crate::model::Model;
use crate::numbers::five_digits;
use crate::runner::DecodeOptions;
use crate::runner::eval::{Bootstrap, Layerwise, Passage, Variant, VariantReport};
use crate::runner::verdict::{
    LEAST_ACCURACY, LEAST_QUESTIONS, Material, Probe, ProbeKind, QUESTIONS, Score, TOGETHER, Texts,
};
use crate::wording::counted;

/// A row is dropped if its mean KL divergence after the first blocks is above this many times the limit.
const HOPELESS: f64 = 3.0;

/// What a verdict is measured with.
pub struct Judging<'a> {
    /// How.
    pub settings: &'a VerdictSettings,
    /// The seed of the methods' choices, of the questions and of the intervals.
    pub seed: u64,
    /// The device that runs the model.
    pub machine: Machine<'a>,
    /// The model.
    pub model: &'a Model,
    /// The texts.
    pub material: &'a Material,
}

/// A method at a share of the bytes, or full attention over a cache of another format.
pub(super) struct Row {
    pub planned: Planned,
    /// The format of the cache in a row of full attention; `None` in those of methods, which read that of the settings.
    pub kv: Option<KvType>,
    /// Its losses on the blocks of text.
    pub text: VariantReport,
    /// Its losses on each of the other texts.
    pub others: Vec<VariantReport>,
    /// Whether it ranks by exact scores, which cannot be recommended and is not asked.
    pub is_oracle: bool,
    /// Whether it lost so much on the first blocks that it was not measured on the others.
    pub is_dropped: bool,
    /// Its answers to the probe.
    pub score: Score,
}

impl Row {
    /// Tells whether the row is still measured.
    pub fn is_live(&self) -> bool {
        self.planned.budget.is_some() && !self.is_dropped
    }

    /// Tells whether the row answers questions.
    pub fn is_asked(&self) -> bool {
        self.is_live() && !self.is_oracle
    }
}

/// A measurement that is under way.
struct Measurement<'a> {
    judging: &'a Judging<'a>,
    layerwise: Layerwise<'a>,
    named: &'a [Named],
    methods: &'a [Box<dyn Method>],
    rows: Vec<Row>,
}

/// The outcome of the probe: what was asked, with the score of full attention, or why nothing counts.
type Outcome = std::result::Result<(Probe, Score), String>;

impl Judging<'_> {
    /// Says what will be measured on which texts.
    fn announce(&self, names: &[String]) {
        let texts = |of: &Texts| {
            let beyond = match of.beyond {
                0 => "held out".to_owned(),
                n if n == of.passages.len() => "beyond the calibration text".to_owned(),
                n => format!("{n} beyond the calibration text"),
            };
            let kind = if of.kind == "uuid" { "UUIDs" } else { "text" };
            format!(
                "{} x {} tokens of {kind} ({beyond})",
                of.passages.len(),
                of.length
            )
        };
        let texts: Vec<String> = self.material.all().map(texts).collect();
        let formats: Vec<String> = self.settings.formats.iter().map(KvType::to_string).collect();
        let formats = if formats.is_empty() {
            String::new()
        } else {
            format!(", full attention over {}", formats.join(", "))
        };
        let note = format!("verdict: {}{formats} on {}", names.join(", "), texts.join(", "));
        self.machine.reporter.note(&note);
    }

    /// Measures every method with an artifact; adds the time it takes to `stages`.
    ///
    /// # Errors
    /// Activations that are not finite; an interrupt.
    pub fn measure(&self, artifact: &Artifact, stages: &mut Stages) -> Result<Verdict> {
        let measured = self.settings.methods(artifact);
        // After the methods: full attention, which reads caches of other formats.
        let full = Named {
            method: FULL,
            tail: false,
        };
        let named = [measured.as_slice(), &[full]].concat();
        let params = MethodParams::default();
        let ask = Ask {
            artifact: Some(artifact),
            ropes: &self.model.decoder.ropes,
            sizes: self.model.config().sizes(),
            params: &params,
            seed: self.seed,
        };
        let methods: Vec<Box<dyn Method>> = named
            .iter()
            .map(|named| named.prepare(&ask))
            .collect::<Result<_>>()?;
        let layers = self.machine.layers(&self.model.decoder)?;
        let names: Vec<String> = measured.iter().map(Named::to_string).collect();
        self.announce(&names);
        let mut measurement = Measurement {
            judging: self,
            layerwise: Layerwise {
                layers: layers.as_ref(),
                options: DecodeOptions {
                    packed: params.selfindex.layout(Some(artifact))?,
                    maps: rotation::maps(
                        Some(artifact),
                        self.settings.formats.iter().copied().chain([self.settings.rows]),
                    )?,
                    ..DecodeOptions::new(Budget::Fraction(1.0), self.settings.rows)
                },
            },
            named: &named,
            methods: &methods,
            rows: Vec::new(),
        };
        stages.time(BUDGETS, || measurement.plan())?;
        stages.time(VERDICT, || measurement.read_texts())?;
        let outcome = if Probe::is_possible(self.material.text.passages.len()) {
            stages.time(PROBE, || measurement.ask())?
        } else {
            Err(format!(
                "{LEAST_QUESTIONS} questions need {} of text",
                counted(LEAST_QUESTIONS.div_ceil(QUESTIONS), "block")
            ))
        };
        Ok(measurement.verdict(&names, outcome))
    }
}

impl Measurement<'_> {
    fn variant(&self, method: usize, budget: f64, kv: Option<KvType>) -> Variant<'_> {
        Variant {
            method: self.methods[method].as_ref(),
            number: named::number(self.named, method),
            budget: Budget::Fraction(budget),
            kv,
        }
    }

    /// Names a row in messages.
    fn name(&self, row: &Row) -> String {
        let Planned { method, target, .. } = row.planned;
        match row.kv {
            Some(kv) => format!("{} over {kv}", self.named[method]),
            None => format!("{} at {:.0}%", self.named[method], 100.0 * target),
        }
    }

    /// Runs `work` with a function that it calls after each layer.
    fn with_progress<T>(
        &self,
        what: &str,
        work: impl FnOnce(&mut dyn FnMut(usize)) -> Result<T>,
    ) -> Result<T> {
        let n_layers = self.judging.model.config().n_layers();
        let progress = self.judging.machine.reporter.progress(n_layers as u64, "layers");
        work(&mut |layer| {
            progress.layer(layer, n_layers, what);
            progress.advance(1);
        })
    }

    /// Finds the budget of every method for every share, on the first block of text.
    fn plan(&mut self) -> Result<()> {
        let first = &self.judging.material.text.passages[0];
        let sample = Passage {
            steps: first.steps.min(SAMPLED_STEPS),
            ..first.clone()
        };
        let full = self.methods.len() - 1;
        let grid = (0..full).flat_map(|m| GRID.map(|budget| (m, budget)));
        let variants: Vec<Variant> = grid
            .map(|(method, budget)| self.variant(method, budget, None))
            .collect();
        let reads = self.with_progress(BUDGETS, |done| self.layerwise.reads(&sample, &variants, done))?;
        let reads: Vec<f64> = reads.into_iter().map(|share| share.unwrap_or(1.0)).collect();
        let empty = VariantReport::new(self.judging.model.config());
        let row = |planned: Planned, kv| Row {
            planned,
            kv,
            text: empty.clone(),
            others: vec![empty.clone(); self.judging.material.others.len()],
            is_oracle: self.named[planned.method].method.verdict() == InVerdict::Oracle,
            is_dropped: false,
            score: Score::default(),
        };
        for (method, reads) in reads.chunks(GRID.len()).enumerate() {
            let targets = self.judging.settings.reads.iter();
            let rows = targets.map(|target| row(Planned::new(method, *target, reads), None));
            self.rows.extend(rows);
        }
        let formats = self.judging.settings.formats.iter();
        self.rows
            .extend(formats.map(|kv| row(Planned::everything(full), Some(*kv))));
        Ok(())
    }

    /// Lists the variants of some rows that are still measured.
    fn variants(&self, is_wanted: fn(&Row) -> bool) -> Vec<Variant<'_>> {
        let wanted = self.rows.iter().filter(|row| is_wanted(row));
        let budgets = wanted.filter_map(|row| Some((row.planned.method, row.planned.budget?, row.kv)));
        budgets
            .map(|(method, budget, kv)| self.variant(method, budget, kv))
            .collect()
    }

    /// Evaluates the rows that are still measured: per passage, a report for each of these rows, in order.
    fn evaluate(&self, passages: &[Passage]) -> Result<Vec<Vec<VariantReport>>> {
        let variants = self.variants(Row::is_live);
        self.with_progress(VERDICT, |done| self.layerwise.evaluate(passages, &variants, done))
    }

    /// Adds the reports of passages to the rows.
    fn add(&mut self, reports: Vec<Vec<VariantReport>>, to: impl Fn(&mut Row, usize) -> &mut VariantReport) {
        for (passage, reports) in reports.into_iter().enumerate() {
            let live = self.rows.iter_mut().filter(|row| row.is_live());
            for (row, report) in live.zip(reports) {
                to(row, passage).append(report);
            }
        }
    }

    /// Measures the losses on all texts; rows that lose much on the first blocks of text are dropped.
    fn read_texts(&mut self) -> Result<()> {
        let material = self.judging.material;
        let (first, rest) = material
            .text
            .passages
            .split_at(TOGETHER.min(material.text.passages.len()));
        let reports = self.evaluate(first)?;
        self.add(reports, |row, _| &mut row.text);
        if !rest.is_empty() {
            self.drop_rows(first.len());
        }
        // The number of each passage's texts among the other texts; none for a block of text.
        let mut owner = vec![None; rest.len()];
        let mut passages = rest.to_vec();
        for (i, texts) in material.others.iter().enumerate() {
            owner.resize(owner.len() + texts.passages.len(), Some(i));
            passages.extend_from_slice(&texts.passages);
        }
        if passages.is_empty() {
            return Ok(());
        }
        let reports = self.evaluate(&passages)?;
        self.add(reports, |row, passage| match owner[passage] {
            Some(i) => &mut row.others[i],
            None => &mut row.text,
        });
        Ok(())
    }

    /// Drops the rows that have lost too much on the first blocks, and says so.
    fn drop_rows(&mut self, blocks: usize) {
        let most = HOPELESS * self.judging.settings.limits().kl;
        for row in &mut self.rows {
            row.is_dropped = row.is_live() && five_digits(row.text.whole().losses.kl) > most;
        }
        let dropped = self.rows.iter().filter(|row| row.is_dropped);
        let dropped: Vec<String> = dropped.map(|row| self.name(row)).collect();
        if !dropped.is_empty() {
            self.judging.machine.reporter.note(&format!(
                "dropped after {blocks} blocks, with a mean KL above {most}: {}",
                dropped.join(", ")
            ));
        }
    }

    /// Asks the rows that are left about facts hidden in the blocks of text, or has them copy passages.
    fn ask(&mut self) -> Result<Outcome> {
        let texts = &self.judging.material.text.passages;
        if !self.rows.iter().any(Row::is_asked) {
            return Ok(Err("no method was left to ask".to_owned()));
        }
        let mut failed = Vec::new();
        for kind in [ProbeKind::Facts, ProbeKind::Copies] {
            let seed = self.judging.seed;
            let probe = match kind {
                ProbeKind::Facts => self.facts(texts)?,
                ProbeKind::Copies => Probe::copies(texts, seed),
            };
            let Some(probe) = probe else {
                continue;
            };
            let full = self.answers(&probe)?;
            if full.accuracy() >= LEAST_ACCURACY && full.questions() >= LEAST_QUESTIONS {
                return Ok(Ok((probe, full)));
            }
            failed.push(format!("{} only {:.0}%", kind.name(), 100.0 * full.accuracy()));
        }
        Ok(Err(if failed.is_empty() {
            "the blocks of text are too short for questions".to_owned()
        } else {
            format!("full attention {}", failed.join(" and "))
        }))
    }

    /// Hides facts, if the model has a tokenizer.
    fn facts(&self, texts: &[Passage]) -> Result<Option<Probe>> {
        if !self.judging.model.has_tokenizer() {
            return Ok(None);
        }
        let tokenizer = self.judging.model.tokenizer()?;
        Probe::facts(texts, &tokenizer, self.judging.seed)
    }

    /// Asks a probe; returns the answers of full attention, and keeps those of the rows. It ends early if full attention
    /// answers too few questions about the first texts.
    fn answers(&mut self, probe: &Probe) -> Result<Score> {
        let (passages, steps) = (probe.passages(), probe.steps());
        let mut full = Score::default();
        self.rows.iter_mut().for_each(|row| row.score = Score::default());
        for (i, texts) in passages.chunks(TOGETHER).enumerate() {
            let range = i * TOGETHER..i * TOGETHER + texts.len();
            let (variants, asked) = (self.variants(Row::is_asked), &steps[range.clone()]);
            let answer = |done: &mut dyn FnMut(usize)| self.layerwise.answers(texts, asked, &variants, done);
            let hits = self.with_progress(PROBE, answer)?;
            let asked = self.rows.iter_mut().filter(|row| row.is_asked());
            for (v, row) in asked.enumerate() {
                let of_row: Vec<&[[bool; 2]]> = hits.iter().map(|hits| &hits[v][..]).collect();
                let [own, exact] = probe.score(range.clone(), &of_row);
                row.score.append(own);
                if v == 0 {
                    full.append(exact);
                }
            }
            if full.accuracy() < LEAST_ACCURACY {
                break;
            }
        }
        Ok(full)
    }

    /// Collects the results.
    fn verdict(&self, names: &[String], outcome: Outcome) -> Verdict {
        let material = self.judging.material;
        let texts = |of: &Texts| MeasuredTexts {
            kind: of.kind.to_owned(),
            length: of.length,
            blocks: of.passages.len(),
            beyond: of.beyond,
            steps: of.passages.iter().map(|passage| passage.steps).sum(),
        };
        let texts: Vec<MeasuredTexts> = material.all().map(texts).collect();
        let bootstrap = Bootstrap::new(material.text.passages.len(), self.judging.seed);
        let results = Results {
            material,
            bootstrap: bootstrap.as_ref(),
            full: outcome.as_ref().ok().map(|(_, full)| full),
        };
        let rows = self.rows.iter().filter(|row| row.kv.is_none());
        let rows = rows.map(|row| results.row(row, &names[row.planned.method]));
        let formats = self.rows.iter().filter_map(|row| results.format(row));
        let probe = outcome.as_ref().ok().map(|(probe, full)| MeasuredProbe {
            kind: probe.kind.key().to_owned(),
            length: probe.length,
            texts: probe.texts(),
            questions: full.questions(),
            full_accuracy: five_digits(full.accuracy()),
        });
        Verdict {
            blocks: texts[0].blocks,
            steps: texts[0].steps,
            sinks: SINKS,
            window: WINDOW,
            kv: self.judging.settings.rows.to_string(),
            rows: rows.collect(),
            formats: formats.collect(),
            limits: Some(self.judging.settings.limits()),
            not_probed: outcome.err(),
            probe,
            texts,
        }
    }
}
