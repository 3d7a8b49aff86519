//! The index of a layer in a session.

use std::ops::Range;

use super::{Ctkvr, CtkvrWorkspace, Lists};
use crate::error::Result;
use crate::kv::cuda::CudaSelection;
use crate::kv::cuda::rows::{CudaRows, WholePrompt};
use crate::method::ctkvr::CtkvrParams;
use crate::method::cuda::{
    ByWindow, Chunk, CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice, ServedLayer,
    SharedPrompt, each_served, in_prompt,
};

/// The index of a layer.
struct QueryIndex<'d> {
    ring: Ctkvr<'d>,
    lists: SharedPrompt<Lists<'d>>,
}

impl CudaMethod for CtkvrParams {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        needs.has_rows_on_device()
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        let (mut shared, lists) = (ByWindow::new(), SharedPrompt::default());
        each_served(layers, |ServedLayer { limits, .. }| {
            let space = shared.get_or_make(limits, || CtkvrWorkspace::new(at, limits, self))?;
            Ok(QueryIndex {
                ring: Ctkvr::new(at.driver, at.shape, limits, space)?,
                lists: lists.clone(),
            })
        })
    }
}

impl CudaIndex for QueryIndex<'_> {
    fn begin_prompt(&self, prompt: Range<usize>, _: usize) -> Result<()> {
        let lists = Lists::new(&self.ring, 0, prompt)?;
        self.lists.replace(Some(lists));
        Ok(())
    }

    fn end_prompt(&self) {
        self.lists.take();
    }

    fn extend(&self, chunk: &Chunk<'_>) -> Result<()> {
        let (queries, rows, positions) = (chunk.own.q.rope, chunk.rows, chunk.positions);
        in_prompt(&self.lists, |lists| {
            self.ring.extend(queries, chunk.m, rows, positions, lists)
        })
    }

    fn end_of_prompt(&self, _: &WholePrompt<'_>, _: Option<&dyn CudaRows>) -> Result<()> {
        in_prompt(&self.lists, |lists| self.ring.end_of_prompt(lists))
    }

    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        let (queries, rows) = (step.queries.rope, step.rows()?);
        self.ring.select(queries, rows, step.positions).map(Some)
    }

    fn bytes(&self) -> usize {
        self.ring.bytes()
    }
}
