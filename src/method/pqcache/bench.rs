//! Benchmarks of pqcache, whose words are fitted to random keys.

use super::{PqCache, PqCacheParams};
use crate::error::Result;
use crate::method::bench::{Bench, BenchParams, Fill, NewHead, TimedLayer};

/// Benchmarks whose index is filled by a random prompt.
pub(super) struct PqCacheBench;

impl Bench for PqCacheBench {
    fn prompt_queries(&self, _: &TimedLayer, _: &BenchParams) -> usize {
        1
    }

    fn heads(&self, layer: &TimedLayer, _: &BenchParams) -> Result<Box<NewHead>> {
        let (params, seed) = (PqCacheParams::default(), layer.seed);
        params.check(layer.shape.head_dim)?;
        Ok(Box::new(move |place, _| {
            (Box::new(PqCache::new(place, &params, seed)), Fill::Prompt(1))
        }))
    }
}
