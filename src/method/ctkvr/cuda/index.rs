//! The index of a layer in a session.

use std::ops::Range;

use super::{Ctkvr, Lists, Space};
use crate::error::Result;
use crate::kv::cuda::attend::LayerRows;
use crate::kv::cuda::cache::LayerCache;
use crate::kv::cuda::{Limits, Positions, Rotated, Selection};
use crate::method::ctkvr::Params;
use crate::method::cuda::{
    ByWindow, CudaIndex, CudaMethod, CudaNeeds, Indexes, OnDevice, PromptRoom, WholePrompt, plain,
};

/// See [`CudaIndex`].
struct QueryIndex<'d> {
    at: OnDevice<'d>,
    ring: Ctkvr<'d>,
    lists: PromptRoom<Lists<'d>>,
}

impl CudaMethod for Params {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        !needs.packed && !needs.rows_on_host
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, limits: &[Limits]) -> Result<Indexes<'d>> {
        let (mut shared, lists) = (ByWindow::new(), PromptRoom::new());
        let index = |limits| -> Result<Box<dyn CudaIndex + 'd>> {
            let space = shared.of(limits, || Space::new(at.driver, at.shape, limits, self, at.kv))?;
            Ok(Box::new(QueryIndex {
                at,
                ring: Ctkvr::new(at.driver, at.shape, limits, space)?,
                lists: lists.clone(),
            }))
        };
        limits.iter().map(index).collect()
    }
}

impl CudaIndex for QueryIndex<'_> {
    fn begin_prompt(&self, prompt: Range<usize>, _: usize) -> Result<()> {
        self.lists
            .begin(Lists::new(self.at.driver, &self.ring, 0, prompt)?);
        Ok(())
    }

    fn end_prompt(&self) {
        self.lists.end();
    }

    fn extend(
        &self,
        queries: Rotated<'_>,
        _: Rotated<'_>,
        m: usize,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        self.lists
            .work(|lists| self.ring.extend(queries.rope, m, rows, positions, lists))
    }

    fn end_of_prompt(&self, _: &WholePrompt<'_>) -> Result<()> {
        self.lists.work(|lists| self.ring.end_of_prompt(lists))
    }

    fn select(
        &self,
        queries: Rotated<'_>,
        cache: Option<&LayerCache<'_>>,
        positions: &Positions<'_>,
        _: usize,
    ) -> Result<Option<&Selection<'_>>> {
        self.ring.select(queries.rope, plain(cache)?, positions).map(Some)
    }

    fn bytes(&self) -> usize {
        self.ring.bytes()
    }
}
