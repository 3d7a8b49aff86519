//! How much memory a calibration needs.

use crate::artifact::{Fit, FitText, Section};
use crate::model::ModelConfig;
use crate::model::decoder::block_bytes;
use crate::progress::size;
use crate::store;

/// The program itself and LAPACK's buffer.
const PROGRAM_BYTES: usize = 2 << 20;
/// The buffers of a thread.
const THREAD_BYTES: usize = 1 << 20;

/// The most memory that a calibration on the CPU holds at once, in bytes: its own, anonymous memory (`RssAnon` in
/// `/proc/PID/status`). The mapped pages of one layer's weights come on top; the system can take these back.
#[derive(Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// The program and the buffers of its threads.
    pub program: usize,
    /// The hidden states of all tokens.
    pub hidden: usize,
    /// The keys of one layer.
    pub keys: usize,
    /// The values of one layer, if a fit reads them.
    pub values: usize,
    /// The queries of one layer that the fits read.
    pub queries: usize,
    /// The sections of all layers.
    pub results: usize,
    /// The longest block on its way through a layer.
    pub capture: usize,
    /// The fit that takes the most.
    pub fit: usize,
}

impl MemoryPlan {
    /// Plans a calibration whose fits read the queries of `query_rows` rows.
    pub fn new(
        c: &ModelConfig,
        text: &FitText,
        query_rows: usize,
        fits: &[Box<dyn Fit>],
        sections: &[Section],
    ) -> Self {
        let float = size_of::<f32>();
        let keys = text.n * c.n_kv_heads * c.head_dim * float;
        let reads_values = fits.iter().any(|fit| fit.kind().facts().reads_values);
        let fits = fits.iter().map(|fit| fit.working_bytes(text));
        Self {
            program: PROGRAM_BYTES + text.threads * THREAD_BYTES,
            hidden: text.n * c.hidden_size * float,
            keys,
            values: if reads_values { keys } else { 0 },
            queries: query_rows * c.n_heads * c.head_dim * float,
            results: store::total_bytes(sections.iter().flat_map(|section| &section.specs)),
            capture: block_bytes(c, text.longest_block),
            fit: fits.max().unwrap_or(0),
        }
    }

    /// Returns the bytes that are needed at once: a layer is captured first and fitted then.
    pub fn total(&self) -> usize {
        let kept = self.program + self.hidden + self.keys + self.values + self.queries + self.results;
        kept + self.capture.max(self.fit)
    }

    /// Describes the plan in a line.
    pub fn note(&self, layer_pages: usize) -> String {
        format!(
            "plan: about {} of memory besides {} of mapped pages (one layer's weights, which the system can take back), {} artifact",
            size(self.total()),
            size(layer_pages),
            size(self.results)
        )
    }
}
