//! Benchmarks of pqcache, whose words are fitted to random keys.

use super::PqCache;
use crate::error::Result;
use crate::method::bench::{Bench, Fill, NewHead, TimedLayer};
use crate::method::params::MethodParams;

/// Benchmarks whose index is filled by a random prompt.
pub(super) struct PqCacheBench;

impl Bench for PqCacheBench {
    fn heads(&self, layer: &TimedLayer, params: &MethodParams) -> Result<Box<NewHead>> {
        let (params, seed) = (params.pqcache.clone(), layer.seed);
        params.check(layer.head_dim)?;
        Ok(Box::new(move |place, _| {
            (Box::new(PqCache::new(place, &params, seed)), Fill::Prompt(1))
        }))
    }
}
