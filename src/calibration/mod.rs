//! Calibration: from a model and text to an artifact, layer by layer, with the verdict that is measured on it.

mod dumped;
mod layers;
pub mod memory;
mod sections;
pub mod stages;
pub mod verdict;

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::artifact::{self, Artifact, Fit, FitInput, Section, Verdict, short};
use crate::corpus::{Beyond, Corpus, Origin, Reserve};
use crate::disk::Output;
use crate::env::Reporter;
use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::method::a2ats::{self, LONGEST_CONTEXT};
use crate::method::plan::Plan;
use crate::method::registry::readers;
use crate::model::{Model, ModelConfig, ModelManifest};
use crate::parameters::choices;
use crate::runner::verdict::Material;
use crate::stats::moments::Position;
use crate::work::WorkFolder;
pub use dumped::{DumpFit, DumpSettings};
use layers::Pass;
use memory::{JudgedRows, MemoryPlan, query_rows};
pub use sections::SectionChoice;
use stages::Stages;
use verdict::{Judging, VerdictSettings};

choices! {
    /// How keys and queries are rotated for retrieval.
    pub enum RopeKind {
        /// Keys before rotation, and queries rotated to one relative position (WRoPE).
        Windowed = "windowed",
        /// Keys and queries rotated to their own positions.
        Standard = "standard",
    }
}

impl RopeKind {
    /// Returns the position that queries are rotated to; windowed RoPE takes `b`.
    pub fn position(self, b: usize) -> Position {
        match self {
            Self::Windowed => Position::Windowed(b),
            Self::Standard => Position::Own,
        }
    }
}

/// What decides the artifact, besides model and text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CalibrationSettings {
    /// The seed of all random choices.
    pub seed: u64,
    /// For a2ats: fixed distance, in tokens, between query and key at which keys are scored; by default one within the
    /// model's context.
    pub wrope_position: Option<usize>,
    /// For a2ats: rotation of keys and queries.
    pub rope: RopeKind,
    /// For a2ats: length of the contexts for which the number of codewords is chosen; by default the model's context, at
    /// most [`LONGEST_CONTEXT`].
    pub context: Option<usize>,
    /// The sections to make, with the parameters of their fits.
    pub sections: SectionChoice,
    /// How the verdict is measured; `None` = there is none.
    pub verdict: Option<VerdictSettings>,
}

impl Default for CalibrationSettings {
    fn default() -> Self {
        Self {
            seed: 0,
            wrope_position: None,
            rope: RopeKind::Windowed,
            context: None,
            sections: SectionChoice::default(),
            verdict: Some(VerdictSettings::default()),
        }
    }
}

/// The WRoPE position of models with a long context.
const WROPE_POSITION: usize = 2048;

/// Returns the WRoPE position: the one that was given, else one within the model's context.
pub fn wrope_position(given: Option<usize>, config: &ModelConfig) -> usize {
    given.unwrap_or(WROPE_POSITION.min(config.max_position_embeddings / 2))
}

impl CalibrationSettings {
    /// Checks the values, those of the fits aside.
    ///
    /// # Errors
    /// A value out of range.
    pub fn check(&self) -> Result<()> {
        if self.context == Some(0) {
            return Err(Error::usage("`context` is 0").hint("expected a whole number of at least 1"));
        }
        self.verdict.as_ref().map_or(Ok(()), VerdictSettings::check)
    }

    /// Prepares the fits for a text.
    ///
    /// # Errors
    /// Parameters out of range, too little text.
    pub fn fits(
        &self,
        config: &ModelConfig,
        text: &Corpus,
        kept: &[bool],
        reporter: &dyn Reporter,
    ) -> Result<Vec<Box<dyn Fit>>> {
        self.sections.fits(&FitInput {
            seed: self.seed,
            position: self.position(config),
            block_start: &text.block_start,
            seq_len: text.seq_len,
            kept,
            windows: &config.windows(),
            head_dim: config.sizes().head_dim,
            codewords: self.codewords(config, kept),
            reporter,
        })
    }

    /// Returns the position to which queries are rotated.
    pub fn position(&self, config: &ModelConfig) -> Position {
        self.rope.position(wrope_position(self.wrope_position, config))
    }

    /// Returns the length of the contexts for which the number of codewords is chosen.
    pub fn context(&self, config: &ModelConfig) -> usize {
        let own = config.max_position_embeddings.min(LONGEST_CONTEXT);
        self.context.unwrap_or(own)
    }

    /// Returns the number of codewords per KV head for a text of which the fits use the rows in `kept`.
    pub fn codewords(&self, config: &ModelConfig, kept: &[bool]) -> usize {
        let kept = kept.iter().filter(|kept| **kept).count();
        let chosen = || a2ats::codewords(self.context(config), kept);
        self.sections.codewords().unwrap_or_else(chosen)
    }

    /// Returns how many tokens beyond the text the verdict wants, if blocks of text have at most `seq_len` tokens.
    pub fn beyond(&self, seq_len: usize) -> Beyond {
        let wanted = self.verdict.as_ref().map(VerdictSettings::wanted);
        wanted.map(|wanted| wanted.beyond(seq_len)).unwrap_or_default()
    }

    /// Collects the texts of the verdict; `None` if there is none.
    pub fn material(&self, text: &Corpus, reserve: &Reserve) -> Option<Material> {
        self.verdict.as_ref()?.material(text, reserve)
    }

    /// Counts what the verdict will decode.
    pub fn judged_rows(&self, fits: &[Box<dyn Fit>], material: Option<&Material>) -> JudgedRows {
        let rows = material.zip(self.verdict.as_ref());
        let calibrated = readers(fits.iter().map(|fit| fit.kind().name()));
        rows.map(|(material, verdict)| JudgedRows::count(material, verdict.variants(calibrated)))
            .unwrap_or_default()
    }
}

/// Describes a model for a manifest.
///
/// # Errors
/// The weights cannot be read.
pub fn model_manifest(model: &Model, reporter: &dyn Reporter) -> Result<ModelManifest> {
    let manifest = model.manifest()?;
    reporter.detail(&format!("fingerprint: {}", short(&manifest.fingerprint)));
    Ok(manifest)
}

/// A calibration that is ready to run.
pub struct Calibration<'a> {
    machine: Machine<'a>,
    model: &'a Model,
    settings: &'a CalibrationSettings,
    corpus: &'a Corpus,
    material: Option<Material>,
    kept: Vec<bool>,
    fits: Vec<Box<dyn Fit>>,
}

/// The folder in which a calibration saves finished layers.
#[derive(Clone, Copy, Debug)]
pub struct Work<'a> {
    /// The folder.
    pub dir: &'a Path,
    /// Whether to go on after the last finished layer that it has.
    pub resume: bool,
}

/// What a calibration made.
pub struct Calibrated {
    /// The verdict, or why it could not be measured; `None` without one. The artifact exists unless this is an error.
    pub verdict: Option<Result<Verdict>>,
    /// The file with everything but the verdict, if the verdict failed and nothing else has it.
    pub spare: Option<PathBuf>,
    /// How long each stage took.
    pub stages: Stages,
    /// Seconds of all stages but the verdict's, and of the verdict's.
    pub seconds: [f64; 2],
}

impl<'a> Calibration<'a> {
    /// Prepares a calibration of a model with a text, and what lies beyond it for the verdict.
    ///
    /// # Errors
    /// Parameters out of range, too little text.
    pub fn new(
        machine: Machine<'a>,
        model: &'a Model,
        settings: &'a CalibrationSettings,
        (corpus, reserve): (&'a Corpus, &Reserve),
    ) -> Result<Self> {
        settings.check()?;
        let kept = corpus.kept();
        Ok(Self {
            fits: settings.fits(model.config(), corpus, &kept, machine.reporter)?,
            material: settings.material(corpus, reserve),
            machine,
            model,
            settings,
            corpus,
            kept,
        })
    }

    /// Returns the fits of the sections.
    pub fn fits(&self) -> &[Box<dyn Fit>] {
        &self.fits
    }

    /// Returns the number of codewords per KV head.
    pub fn codewords(&self) -> usize {
        self.settings.codewords(self.model.config(), &self.kept)
    }
}

impl Calibration<'_> {
    /// Fits every section, measures the verdict, and writes the artifact.
    ///
    /// The memory that is told holds if [`crate::heap::keep_freed`] was called before.
    ///
    /// # Errors
    /// The model or the device fails, the disk is full, cancelled work: with a work folder, all finished layers are in it.
    /// An error of the verdict is in [`Calibrated`], since the sections are then saved.
    pub fn run(self, output: Output, work: Option<Work>) -> Result<Calibrated> {
        let (start, machine, decoder) = (Instant::now(), self.machine, &self.model.decoder);
        let origin = Origin {
            model: model_manifest(self.model, machine.reporter)?,
            calibration: self.corpus.manifest(),
            precision: machine.precision.recorded(),
        };
        let sizes = origin.model.sizes;
        let sections = self.fits.iter();
        let sections = sections.map(|fit| Section::new(fit.as_ref(), sizes, machine.device));
        let mut sections = sections.collect::<Result<Vec<_>>>()?;
        let work = work
            .map(|work| self.open_work(work, &origin, &sections))
            .transpose()?;
        self.tell_plan(&sections)?;
        let Self {
            settings,
            corpus,
            material,
            kept,
            fits,
            ..
        } = self;
        let pass = Pass {
            device: machine.device,
            decoder,
            corpus,
            kept: &kept,
            position: settings.position(&decoder.config),
            query_rows: query_rows(&fits),
            fits,
            reporter: machine.reporter,
        };
        let layers = machine.layers(decoder)?;
        let mut stages = pass.run(layers.as_ref(), work.as_ref(), &mut sections)?;
        drop(layers);
        let fitted = start.elapsed().as_secs_f64();
        let mut made = Calibrated {
            verdict: None,
            spare: None,
            stages: Stages::default(),
            seconds: [fitted, 0.0],
        };
        match material
            .zip(settings.verdict.as_ref())
            .filter(|_| !sections.is_empty())
        {
            None => artifact::write(output, origin, sections)?,
            Some((material, verdict)) => {
                let judging = Judging {
                    settings: verdict,
                    seed: settings.seed,
                    machine,
                    model: self.model,
                    material: &material,
                };
                let (path, mut saving) = (output.given().to_owned(), None);
                let draft = Output::create(&path)?;
                let mut measure = |artifact: &Artifact| {
                    let outcome = judging.measure(artifact, &mut stages);
                    let outcome = outcome.and_then(|verdict| Plan::judged(artifact, verdict));
                    let judged = outcome.as_ref().ok().cloned();
                    made.verdict = Some(outcome.map(|judged| judged.verdict));
                    judged
                };
                // The layers are in the work folder, or the artifact is kept under another name.
                let unjudged = || match work {
                    Some(_) => Ok(None),
                    None => {
                        saving = Some(machine.reporter.saving());
                        Output::create(made.spare.insert(spare_path(&path))).map(Some)
                    }
                };
                artifact::write_judged(output, draft, origin, sections, &mut measure, unjudged)?;
                made.seconds[1] = start.elapsed().as_secs_f64() - fitted;
                drop(saving);
            }
        }
        if let Some(work) = work.filter(|_| !matches!(made.verdict, Some(Err(_)))) {
            work.clear();
        }
        made.stages = stages;
        Ok(made)
    }

    /// Tells how much memory the run needs, and the size of the artifact.
    fn tell_plan(&self, sections: &[Section]) -> Result<()> {
        let config = self.model.config();
        let judged = self.settings.judged_rows(&self.fits, self.material.as_ref());
        let (corpus, device) = (self.corpus, self.machine.device);
        let plan = MemoryPlan::new(config, corpus, device, &self.fits, sections, &judged);
        let pages = self.model.decoder.layer(config.largest_layer())?.bytes();
        self.machine.reporter.note(&plan.note(pages));
        Ok(())
    }

    /// Opens the work folder, from which a stopped run can be resumed.
    fn open_work(&self, work: Work, origin: &Origin, sections: &[Section]) -> Result<WorkFolder> {
        let identity = json!({
            "tool_version": env!("CARGO_PKG_VERSION"), "model": origin.model.fingerprint,
            "calibration": origin.calibration,
            "precision": format!("{:?}", self.machine.precision),
            "sections": sections.iter().map(|s| &s.manifest).collect::<Vec<_>>(),
        });
        let n_layers = origin.model.sizes.n_layers;
        WorkFolder::open(work.dir, &identity, work.resume, sections, n_layers)
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
