//! Benchmarks of selfindex on random signs.

use super::params::CentroidSource;
use super::{SelfIndex, cuda};
use crate::error::Result;
use crate::kv::KvType;
use crate::kv::packed::Center;
use crate::method::bench::{Bench, BenchParams, Contents, Fill, NewHead, TimedLayer, TimedOnCuda};
use crate::method::cuda::{Indexes, OnDevice};

/// Benchmarks on random signs.
pub(super) struct SelfIndexBench;

impl Bench for SelfIndexBench {
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::LayerAndModel
    }

    fn is_estimated(&self) -> bool {
        true
    }

    fn has_plain_ranking(&self) -> bool {
        true
    }

    /// In 2-bit rows, the signs are the index.
    fn reads_rows(&self, kv: KvType) -> bool {
        kv.keys.has_signs()
    }

    fn index_bytes(&self, layer: &TimedLayer, _: &BenchParams) -> usize {
        layer.shape.heads() * layer.context() * layer.shape.head_dim / 8
    }

    fn heads(&self, layer: &TimedLayer, _: &BenchParams) -> Result<Box<NewHead>> {
        let ranking = layer.ranking;
        Ok(Box::new(move |place, _| {
            let head = SelfIndex::new(place, Center::Median, CentroidSource::Signs, None);
            (Box::new(head.ranking(ranking)), Fill::Keys)
        }))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        cuda::random(at, contents)
    }
}
