//! The index of a layer in a session.

use std::ops::Range;

use super::{Ctkvr, Lists, Space};
use crate::error::Result;
use crate::kv::cuda::{Limits, Selection};
use crate::method::ctkvr::Params;
use crate::method::cuda::{
    ByWindow, Chunk, CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice, PromptRoom, WholePrompt,
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

    fn extend(&self, chunk: &Chunk<'_>) -> Result<()> {
        let (queries, rows, positions) = (chunk.queries.rope, chunk.rows, chunk.positions);
        self.lists
            .work(|lists| self.ring.extend(queries, chunk.m, rows, positions, lists))
    }

    fn end_of_prompt(&self, _: &WholePrompt<'_>) -> Result<()> {
        self.lists.work(|lists| self.ring.end_of_prompt(lists))
    }

    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&Selection<'_>>> {
        let chosen = self
            .ring
            .select(step.queries.rope, step.rows()?, step.positions)?;
        Ok(Some(chosen))
    }

    fn bytes(&self) -> usize {
        self.ring.bytes()
    }
}
