//! The index of a layer.

use super::{Quantisers, Wpq, WpqWorkspace};
use crate::compute::cuda::buffer::Buffer;
use crate::error::{Error, Result};
use crate::kv::cuda::{CudaSelection, Positions};
use crate::kv::{Limits, Rotated, StaticSet};
use crate::method::Reads;
use crate::method::bench::Contents;
use crate::method::cuda::{
    ByWindow, Chunk, CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice, ServedLayer, each_layer,
    each_served,
};
use crate::method::wpq::choose::refined;
use crate::method::wpq::codebook::{HeadCodebook, HeadCodebooks};

impl CudaMethod for HeadCodebooks {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        !needs.rows_on_host
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        let mut shared = ByWindow::new();
        each_served(layers, |of| {
            let heads = of.heads.iter().map(|head| &**self.head(of.layer, *head));
            empty(at, &of.limits, &mut shared, &heads.collect::<Vec<_>>())
        })
    }
}

/// Makes the empty index of a layer that uses these quantisers.
fn empty<'d>(
    at: OnDevice<'d>,
    limits: &Limits,
    shared: &mut ByWindow<WpqWorkspace<'d>>,
    heads: &[&HeadCodebook],
) -> Result<Wpq<'d>> {
    let quantisers = Quantisers::new(at.driver, heads)?;
    let sizes = quantisers.sizes;
    let path = heads.first().and_then(|head| head.path());
    let space = shared.get_or_make(limits, || {
        let space = WpqWorkspace::new(at.driver, at.shape, limits, sizes)?;
        match path {
            Some(path) => space.with_paths(path),
            None => Ok(space),
        }
    })?;
    Wpq::new(at.driver, at.shape, limits, quantisers, space)
}

impl CudaIndex for Wpq<'_> {
    fn extend(&self, chunk: &Chunk<'_>) -> Result<()> {
        Wpq::extend(self, chunk.own.k.rope, chunk.m, chunk.positions)
    }

    fn append(&self, keys: Rotated<&Buffer<'_, f32>>, positions: &Positions<'_>) -> Result<()> {
        let encode = &mut || Wpq::extend(self, keys.rope, 1, positions);
        self.driver.beside(encode)
    }

    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        let without = || Error::internal("CUDA: wpq needs the cache's rows on the device");
        let cache = step.cache.ok_or_else(without)?;
        Wpq::select(self, step.queries.rope, cache, step.positions).map(Some)
    }

    fn bytes(&self) -> usize {
        Wpq::bytes(self)
    }

    fn reads(&self, set: &StaticSet, reads: &mut Reads) {
        let (c, sizes) = (&set.candidates, self.quantisers.sizes);
        let budget = self.limits.budget.positions(set.visible().len());
        reads.range(c.start * sizes.width()..c.end * sizes.width());
        reads.unlisted(sizes.bytes + sizes.width() * refined(budget, c.len()));
    }
}

/// Makes indexes of random codes that share one random quantiser:
/// [`Bench::indexes`](crate::method::bench::Bench::indexes).
pub(in crate::internal::method::wpq) fn random<'d>(
    at: OnDevice<'d>,
    contents: &Contents<'_>,
    quantiser: &HeadCodebook,
) -> Result<Indexes<'d>> {
    let heads = vec![quantiser; at.shape.kv_heads];
    let mut shared = ByWindow::new();
    each_layer(contents.limits, |layer, limits| {
        let index = empty(at, limits, &mut shared, &heads)?;
        index.fill(contents.seeds[layer])?;
        Ok(index)
    })
}
