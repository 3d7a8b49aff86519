//! What a calibration and a run would take, before any weight is read.

mod line;
mod serving;
mod times;

use std::path::Path;

use crate::artifact::{Fit, Section};
use crate::calibration::CalibrationSettings;
use crate::calibration::memory::{JudgedRows, MemoryPlan};
use crate::compute::device::Device;
use crate::corpus::{Corpus, Reserve};
use crate::dump::{self, DumpOptions};
use crate::env::Reporter;
use crate::error::Result;
use crate::float::Float;
use crate::machine::Machine;
use crate::model::ModelConfig;
use crate::store;

pub use serving::{CONTEXTS, CacheCost, PAYS, Serving, TimedMethod, position_bytes};
pub use times::Times;

/// What a calibration would take.
pub struct Estimate<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// The text.
    pub corpus: &'a Corpus,
    /// The settings, with the number of codewords that they come to.
    pub settings: CalibrationSettings,
    /// Codewords per KV head of the section `a2ats`.
    pub codewords: usize,
    /// The sizes of the model's weights.
    pub weights: Weights,
    /// Bytes of memory, without the weights of a layer.
    pub memory_bytes: usize,
    /// Bytes on the disk.
    pub disk: Disk,
    // For the plan of a calibration in shards.
    #[doc(hidden)]
    pub memory: MemoryPlan,
    #[doc(hidden)]
    pub fits: Vec<Box<dyn Fit>>,
    #[doc(hidden)]
    pub sections: Vec<Section>,
    #[doc(hidden)]
    pub judged: JudgedRows,
}

impl<'a> Estimate<'a> {
    /// Computes the sizes for a model in `dir`, fits on `device`, and a text with what the verdict takes beyond it.
    ///
    /// # Errors
    /// Settings or a text with which nothing can be calibrated.
    pub fn new(
        (config, dir): (&'a ModelConfig, &Path),
        settings: &CalibrationSettings,
        (corpus, reserve): (&'a Corpus, &Reserve),
        device: &dyn Device,
        reporter: &dyn Reporter,
    ) -> Result<Self> {
        let material = settings.material(corpus, reserve);
        let kept = corpus.kept();
        let fits = settings.fits(config, corpus, &kept, reporter)?;
        let section = |fit: &dyn Fit| Section::new(fit, config.sizes(), device);
        let sections = fits.iter().map(|fit| section(fit.as_ref()));
        let sections: Vec<Section> = sections.collect::<Result<_>>()?;
        let codewords = settings.codewords(config, &kept);
        let judged = settings.judged_rows(&fits, material.as_ref());
        let memory = MemoryPlan::new(config, corpus, device, &fits, &sections, &judged);
        let mut own = settings.clone();
        own.sections = own.sections.with_codewords(codewords);
        Ok(Self {
            config,
            corpus,
            settings: own,
            codewords,
            weights: Weights::estimate(config, dir),
            memory_bytes: memory.total(),
            disk: Disk::estimate(config, corpus, memory.results, &judged),
            memory,
            fits,
            sections,
            judged,
        })
    }

    /// Estimates the times on this machine from a few seconds of the same work: a small calibration on `machine`, and a layer of
    /// the model's shape on the CPU.
    ///
    /// # Errors
    /// A temporary file that cannot be written; a failure of the small calibration.
    pub fn measure(&self, machine: Machine) -> Result<Times> {
        times::times(
            &self.settings,
            self.config,
            self.corpus,
            &self.fits,
            &self.judged,
            machine,
        )
    }

    /// Returns the bytes of an artifact without a verdict, and of one with it if one is wanted.
    pub fn artifacts(&self) -> [Option<usize>; 2] {
        let plain = Disk::estimate(
            self.config,
            self.corpus,
            self.memory.results,
            &JudgedRows::default(),
        );
        [
            Some(plain.artifact),
            (self.judged.variants > 0).then_some(self.disk.artifact),
        ]
    }
}

/// The sizes of the weights.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// Bytes of all weights of the model.
    pub bytes: usize,
    /// Bytes of the weights of the largest layer's projections.
    pub layer: usize,
    /// Bytes that a pass over a text reads: all but the output projection, unless the embedding is the same matrix.
    pub pass: usize,
    /// Bytes that a decode step reads: of a mixture of experts, those that a token passes, and of two embeddings, the output
    /// projection.
    pub step: usize,
    /// Whether `bytes` is the size of existing files.
    pub read: bool,
}

impl Weights {
    /// Computes the sizes from the shape and from the files of a folder, or of a GGUF file.
    pub fn estimate(c: &ModelConfig, dir: &Path) -> Self {
        let each = c.layer_weights();
        let sum = |which: usize| each.iter().map(|of| of[which]).sum::<f64>() as usize;
        let (layers, read) = (sum(0), sum(1));
        let layer = each[c.largest_layer()][0] as usize;
        let embeddings = if c.tie_word_embeddings { 1 } else { 2 };
        let embedding = c.vocab_size * c.hidden_size;
        let (pass, step) = (layers + embedding, read + embedding);
        let all = layers + embeddings * embedding;
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let files = entries.map(|entry| entry.path());
        let weights = files.filter(|file| file.extension().is_some_and(|of| of == "safetensors"));
        // A GGUF file is no folder. Files in the hub's cache are links, which `metadata` follows.
        let all_files = weights.chain(dir.is_file().then(|| dir.to_owned()));
        let sizes = all_files.filter_map(|file| std::fs::metadata(file).ok());
        let stored: u64 = sizes.map(|of| of.len()).sum();
        match stored as usize {
            0 => Self {
                bytes: 2 * all,
                layer: 2 * layer,
                pass: 2 * pass,
                step: 2 * step,
                read: false,
            },
            bytes => Self {
                bytes,
                layer: (bytes as f64 * layer as f64 / all as f64) as usize,
                pass: (bytes as f64 * pass as f64 / all as f64) as usize,
                step: (bytes as f64 * step as f64 / all as f64) as usize,
                read: true,
            },
        }
    }
}

/// The bytes that calibration leaves on the disk.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// The artifact.
    pub artifact: usize,
    /// The most that the work folder holds at once.
    pub work: usize,
    /// A dump with queries and values.
    pub dump: usize,
}

/// Bytes of parts of the manifest: the fixed part, the report of a KV head, the report of a query head, and what a
/// method loses with one budget per head.
const MANIFEST: [usize; 4] = [6500, 1150, 450, 25];

impl Disk {
    /// Computes the sizes; `results` are the bytes of the artifact's tensors.
    pub fn estimate(config: &ModelConfig, corpus: &Corpus, results: usize, judged: &JudgedRows) -> Self {
        let sizes = config.sizes();
        let n = corpus.n_tokens();
        let hidden = n * config.hidden_size * size_of::<f32>();
        let options = DumpOptions {
            queries: true,
            values: true,
            dtype: Float::Bf16,
            wrope_position: 0,
        };
        let layer = store::total_bytes(&dump::layer_specs(sizes, n, &options));
        // Three sums of squares per head, in f64.
        let moments = 3 * 8 * sizes.n_layers * sizes.n_kv_heads * sizes.head_dim.pow(2);
        let [fixed, kv_head, query_head, head_budget] = MANIFEST;
        let kv_heads = sizes.n_layers * sizes.n_kv_heads;
        let query_heads = sizes.n_layers * sizes.n_heads;
        let reports = fixed + kv_heads * kv_head + query_heads * query_head;
        let artifact = results + reports + judged.variants * (judged.row_bytes + kv_heads * head_budget);
        Self {
            artifact,
            // The new hidden states are complete before the old ones are removed.
            work: artifact + 2 * hidden,
            dump: sizes.n_layers * layer + moments + n * size_of::<u32>(),
        }
    }
}
