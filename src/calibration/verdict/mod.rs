//! The verdict: what each method loses with an artifact, on text that nothing was fitted to.

mod budgets;
mod measure;
mod results;

use serde::{Deserialize, Serialize};

use crate::artifact::{self, Artifact, LossLimits};
use crate::corpus::{Corpus, Reserve};
use crate::error::{Error, Result};
use crate::kv::{KvType, RowFormat};
use crate::method::named::Named;
use crate::method::registry::always_measured;
use crate::runner::verdict::{BLOCK, Material, Wanted};
pub use measure::Judging;

/// How a verdict is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerdictSettings {
    /// Shares of the bytes of all visible keys and values in bf16, above 0 and below 1, at which each method is measured.
    pub reads: Vec<f64>,
    /// Tokens of text to measure on.
    pub tokens: usize,
    /// Most tokens of a block.
    pub block: usize,
    /// Number of tokens at the end of each block that are decoded one by one.
    pub steps: usize,
    /// A method is recommended only if the upper end of the 95% interval of its mean KL divergence is at most this, in nats.
    pub kl: f64,
    /// A method is recommended only if its score in the probe is at most so many percentage points below that of full
    /// attention.
    pub points: f64,
    /// The methods to measure; if empty, every method with a section in the artifact, and some that need none.
    pub methods: Vec<Named>,
    /// The type of the cache over which methods are measured.
    pub rows: KvType,
    /// Types of the cache over which full attention is measured, besides bf16.
    pub formats: Vec<KvType>,
}

/// The formats that a verdict measures unless it is told otherwise.
pub fn usual_formats() -> Vec<KvType> {
    let pair = |keys, values| KvType { keys, values };
    vec![
        KvType::INT8,
        pair(RowFormat::INT8, RowFormat::INT4),
        KvType::both(RowFormat::INT4),
        pair(RowFormat::INT4, RowFormat::INT2),
        KvType::both(RowFormat::INT2),
    ]
}

impl Default for VerdictSettings {
    fn default() -> Self {
        Self {
            reads: vec![0.05, 0.1, 0.2],
            tokens: 20 * BLOCK,
            block: BLOCK,
            steps: 16,
            kl: artifact::USUAL_KL,
            points: 5.0,
            methods: Vec::new(),
            rows: KvType::BF16,
            formats: usual_formats(),
        }
    }
}

impl VerdictSettings {
    /// Returns the settings of a measurement on so many tokens of text, in blocks of at most `block` tokens.
    pub fn on(tokens: usize, block: usize) -> Self {
        Self {
            tokens,
            block,
            ..Self::default()
        }
    }

    /// Checks the values.
    ///
    /// # Errors
    /// A share that is not between 0 and 1, a limit that is not a number of at least 0, no tokens.
    pub fn check(&self) -> Result<()> {
        let wrong = |what: &str, expected: &str| {
            Err(Error::usage(format!("`{what}` of the verdict is out of range"))
                .hint(format!("expected {expected}")))
        };
        if self.reads.is_empty() || self.reads.iter().any(|share| !(*share > 0.0 && *share < 1.0)) {
            return wrong("reads", "shares above 0 and below 1");
        }
        for (name, n) in [
            ("tokens", self.tokens),
            ("block", self.block),
            ("steps", self.steps),
        ] {
            if n == 0 {
                return wrong(name, "a whole number of at least 1");
            }
        }
        for (name, limit) in [("kl", self.kl), ("points", self.points)] {
            if !(limit.is_finite() && limit >= 0.0) {
                return wrong(name, "a number of at least 0");
            }
        }
        Ok(())
    }

    /// Counts the combinations of method and budget, and the formats, for an artifact with the sections of `calibrated` methods.
    pub fn variants(&self, calibrated: usize) -> usize {
        let methods = match self.methods.len() {
            0 => calibrated + always_measured().count(),
            named => named,
        };
        methods * self.reads.len() + self.formats.len()
    }

    /// Returns how many texts the measurement wants.
    pub fn wanted(&self) -> Wanted {
        Wanted {
            tokens: self.tokens,
            block: self.block,
            steps: self.steps,
            uuids: true,
        }
    }

    /// Returns the settings of a measurement on a single block of this length.
    #[must_use]
    pub fn of_block(&self, length: usize) -> Self {
        Self {
            tokens: length,
            block: length,
            ..self.clone()
        }
    }

    /// Collects the texts; `None` if there are none.
    pub fn material(&self, corpus: &Corpus, reserve: &Reserve) -> Option<Material> {
        let material = Material::new(corpus, reserve, self.wanted());
        (!material.text.passages.is_empty()).then_some(material)
    }

    fn limits(&self) -> LossLimits {
        LossLimits {
            kl: self.kl,
            points: self.points,
        }
    }

    /// Lists the methods to measure.
    fn methods(&self, artifact: &Artifact) -> Vec<Named> {
        if self.methods.is_empty() {
            Named::calibrated(artifact, &always_measured().collect::<Vec<_>>())
        } else {
            self.methods.clone()
        }
    }
}
