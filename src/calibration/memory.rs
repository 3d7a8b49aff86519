//! How much memory a calibration needs.

use crate::artifact::{Fit, FitText, Section};
use crate::compute::device::Device;
use crate::corpus::Corpus;
use crate::heap::GAP_BYTES;
use crate::model::ModelConfig;
use crate::model::layer::{block_bytes, kept_bytes};
use crate::runner::eval::FEWEST;
use crate::runner::verdict::{Material, Probe};
use crate::store;
use crate::wording::size;

/// Bytes of the program itself and of LAPACK's buffer.
const PROGRAM_BYTES: usize = 2 << 20;
/// Bytes of the buffers of one thread.
const THREAD_BYTES: usize = 1 << 20;

/// Lists the rows whose queries any fit reads, ascending.
pub fn query_rows(fits: &[Box<dyn Fit>]) -> Vec<usize> {
    let mut rows: Vec<usize> = fits.iter().flat_map(|fit| fit.query_rows()).copied().collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// The most memory that a calibration on the CPU holds at once, in bytes: its own, anonymous memory (`RssAnon` in
/// `/proc/PID/status`). The mapped pages of one layer's weights come on top; the system can take these back.
#[derive(Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The program, the buffers of its threads, and freed memory between allocations.
    pub program: usize,
    /// What is kept once the model has run.
    pub kept: usize,
    /// The hidden states of all tokens.
    pub hidden: usize,
    /// The keys of one layer, its values if a fit reads them, and the queries that the fits read.
    pub states: usize,
    /// The sections of all layers.
    pub results: usize,
    /// The most that a block takes on its way through a layer, together with the states of all blocks up to it.
    pub capture: usize,
    /// The memory of the fit that takes the most.
    pub fit: usize,
    /// The memory of the verdict, which runs the model again after everything else is written.
    pub verdict: usize,
}

/// The rows that a verdict decodes one by one.
#[derive(Clone, Debug, Default)]
pub struct JudgedRows {
    /// Combinations of method and budget, and formats of the cache; 0 without a verdict.
    pub variants: usize,
    /// The texts that pass the model together: of each, its tokens and its steps.
    pub passes: Vec<Vec<[usize; 2]>>,
    /// Bytes of a combination in the manifest, besides what it loses per head.
    pub row_bytes: usize,
}

/// Bytes of a combination in the manifest: its means, its intervals, its means on one of the other texts, its answers.
const ROW: [usize; 4] = [60, 110, 140, 90];

impl JudgedRows {
    /// Counts the rows of a verdict with `variants` combinations of method and budget.
    pub fn count(material: &Material, variants: usize) -> Self {
        let [means, intervals, others, answers] = ROW;
        let blocks = material.text.passages.len();
        let row_bytes = means
            + if blocks >= FEWEST { intervals } else { 0 }
            + others * material.others.len()
            + if Probe::is_possible(blocks) { answers } else { 0 };
        Self {
            variants,
            passes: material.passes(),
            row_bytes,
        }
    }
}

impl MemoryPlan {
    /// Plans the calibration of a model with these fits and sections.
    pub fn new(
        c: &ModelConfig,
        corpus: &Corpus,
        device: &dyn Device,
        fits: &[Box<dyn Fit>],
        sections: &[Section],
        judged: &JudgedRows,
    ) -> Self {
        let text = FitText {
            n: corpus.n_tokens(),
            n_kept: corpus.n_tokens() - corpus.n_held_out(),
            longest_block: corpus.longest_block(),
            sizes: c.sizes(),
            device,
            threads: rayon::current_num_threads(),
            read_bytes: 0,
            query_read_bytes: 0,
        };
        let query_rows = query_rows(fits);
        let float = size_of::<f32>();
        let (query, key) = (c.n_heads * c.head_dim * float, c.n_kv_heads * c.head_dim * float);
        let value = if fits.iter().any(|fit| fit.kind().facts().reads_values) {
            key
        } else {
            0
        };
        let states = |rows: usize| {
            let queries = query_rows.partition_point(|row| *row < rows);
            rows * (key + value) + queries * query
        };
        // Memory for the states of later blocks is reserved but not in use yet.
        let block =
            |i: usize| states(corpus.block(i).end) + block_bytes(c, corpus.block(i).len(), c.n_layers() > 1);
        // On every thread, a head: its queries three times, its keys four times, its values, and what its caches in bf16 and its
        // indices take, as three. In the usual formats together, a key and a value take 50 bits, 1.6 rows; with the forks and
        // the rows that they hold in bf16, as four.
        let heads = text.threads.min(c.n_kv_heads) * (3 * c.group() + 12);
        let pass = |texts: &Vec<[usize; 2]>| {
            let own = |steps: usize| judged.variants * steps;
            let rows: usize = texts.iter().map(|[n, steps]| n + own(*steps)).sum();
            // One text passes a layer at a time.
            let text = |&[n, steps]: &[usize; 2]| {
                own(steps) * 2 * (query + key) + block_bytes(c, n, true) + heads * n * c.head_dim * float
            };
            rows * c.hidden_size * float + texts.iter().map(text).max().unwrap_or(0)
        };
        let verdict = judged.passes.iter().map(pass).max().unwrap_or(0);
        let gaps = GAP_BYTES.min(block_bytes(c, text.longest_block, true));
        Self {
            program: PROGRAM_BYTES + text.threads * THREAD_BYTES + gaps,
            kept: kept_bytes(c, text.longest_block, c.n_layers() > 1 || judged.variants > 0),
            hidden: text.n * c.hidden_size * float,
            states: states(text.n),
            results: store::total_bytes(sections.iter().flat_map(|section| &section.specs)),
            capture: (0..corpus.n_blocks()).map(block).max().unwrap_or(0),
            fit: fits.iter().map(|fit| fit.working_bytes(&text)).max().unwrap_or(0),
            verdict,
        }
    }

    /// Returns the bytes that are needed at once: each layer is captured and then fitted, and the verdict comes last.
    pub fn total(&self) -> usize {
        let fitted = self.hidden + self.results + self.capture.max(self.states + self.fit);
        self.program + self.kept + fitted.max(self.verdict)
    }

    /// Describes the plan, one fact per line.
    pub fn note(&self, layer_pages: usize) -> String {
        format!(
            "plan: about {} of memory\n      {} of mapped weights, which the system can reclaim\n      {} for the artifact",
            size(self.total()),
            size(layer_pages),
            size(self.results)
        )
    }
}
