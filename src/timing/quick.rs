//! A few decode steps of one layer of a model, for estimates that must not take long.

use super::setting::LayerSetting;
use super::step::CpuSteps;
use crate::env;
use crate::error::Result;
use crate::kv::{Budget, KvType, Limits};
use crate::method::Ranking;
use crate::method::bench::{BenchParams, TimedLayer};
use crate::method::registry::MethodName;
use crate::model::ModelConfig;

/// Only heads whose channels are a multiple of this can be timed.
const CHANNELS: usize = 32;
/// Number of timed steps, of which the fastest counts: other work on the machine only makes a step slower.
pub const RUNS: usize = 10;

/// A layer whose cache has random rows.
pub struct QuickLayer<'a> {
    /// The model that has such layers.
    pub config: &'a ModelConfig,
    /// Positions that the layer sees.
    pub context: usize,
    /// Parameters of the index.
    pub params: BenchParams,
    /// How much a step chooses.
    pub budget: Budget,
    /// Type of the cache.
    pub kv: KvType,
    /// Seed of the rows.
    pub seed: u64,
}

/// The fastest of a few steps.
pub struct QuickStep {
    /// Its seconds, choice and attention.
    pub seconds: f64,
    /// Bytes of the index.
    pub index_bytes: usize,
}

impl QuickLayer<'_> {
    /// Tells whether layers of a model can be timed.
    pub fn can_be_timed(config: &ModelConfig) -> bool {
        config.head_dim.is_multiple_of(CHANNELS)
    }

    /// Times a method on the CPU; `None` if it has no benchmark.
    ///
    /// # Errors
    /// A step that fails; an interrupt.
    pub fn fastest(&self, method: MethodName) -> Result<Option<QuickStep>> {
        let Some(bench) = method.bench() else {
            return Ok(None);
        };
        let layer = TimedLayer {
            shape: self.config.sizes().shape(1, self.context),
            ranking: Ranking::Fast,
            seed: self.seed,
        };
        let (caches, params) = ((Limits::new(self.budget), self.kv), self.params.clone());
        let setting = LayerSetting::attending(caches, params, layer, method, bench);
        env::check()?;
        let mut steps = CpuSteps::new(&setting)?;
        steps.run()?;
        let mut seconds = f64::INFINITY;
        for _ in 0..RUNS {
            seconds = steps.run()?.min(seconds);
        }
        Ok(Some(QuickStep {
            seconds,
            index_bytes: steps.index_bytes(),
        }))
    }
}
