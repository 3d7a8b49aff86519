//! The lfps index of a layer in a session on a GPU.

use std::cell::RefCell;

use ndarray::{ArrayView2, ArrayView3};
use rayon::prelude::*;

use super::{Lfps, LfpsWorkspace};
use crate::compute::cuda::buffer::Buffer;
use crate::error::Result;
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::rows::{CudaRows, WholePrompt};
use crate::kv::cuda::{CudaSelection, Positions};
use crate::kv::packed::Center;
use crate::kv::{KvHead, KvType};
use crate::method::Prompt;
use crate::method::cuda::{
    ByWindow, Chunk, CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice, ServedLayer, each_served,
};
use crate::method::lfps::{self as method, LfpsMethod, Threshold};

/// The tables of a layer. After a prompt, the CPU makes them from the prompt's last queries and all cached rows.
struct TableIndex<'d> {
    lfps: Lfps<'d>,
    /// The empty state of each KV head.
    heads: Vec<method::Lfps>,
    /// For every query head, its last queries so far, at most `rows` of them.
    queries: RefCell<Vec<Vec<f32>>>,
    rows: usize,
}

impl CudaMethod for LfpsMethod {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        let has_rule = self.params.lfps_threshold != Threshold::Budget;
        needs.has_rows_on_device() && !needs.later_prompts && has_rule
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        let mut shared = ByWindow::new();
        each_served(layers, |of| {
            let limits = &of.limits;
            let space = shared.get_or_make(limits, || LfpsWorkspace::new(at.driver, at.shape, limits))?;
            let head = |kv_head: &usize| self.head(&at.place(of.layer, *kv_head, limits));
            Ok(TableIndex {
                lfps: Lfps::new(at.driver, at.shape, limits, &self.params, space)?,
                heads: of.heads.iter().map(head).collect(),
                queries: RefCell::new(vec![Vec::new(); at.shape.kv_heads * at.shape.group]),
                // At least one, because the last query also gives the variance of the scores.
                rows: self.params.lfps_rows.max(1),
            })
        })
    }
}

impl CudaIndex for TableIndex<'_> {
    /// Copies the last queries so far to the host; waits for the device.
    fn extend(&self, chunk: &Chunk<'_>) -> Result<()> {
        let (d, m, n) = (self.lfps.shape.head_dim, chunk.m, self.rows.min(chunk.m));
        for (head, last) in self.queries.borrow_mut().iter_mut().enumerate() {
            last.extend(chunk.own.q.rope.read_part((head * m + m - n) * d, n * d)?);
            let beyond = last.len().saturating_sub(self.rows * d);
            last.drain(..beyond);
        }
        Ok(())
    }

    /// Makes the tables of a prompt of one sequence; waits for the device.
    fn end_of_prompt(&self, prompt: &WholePrompt<'_>, _: Option<&dyn CudaRows>) -> Result<()> {
        let (n, queries) = (prompt.positions.longest(), self.queries.borrow());
        let cached = (0..self.heads.len()).map(|at| prompt.rows.read_head(at, n));
        let cached: Vec<_> = cached.collect::<Result<_>>()?;
        let kv = KvType::from(prompt.rows.float);
        let groups = queries
            .par_chunks(self.lfps.shape.group)
            .zip(&self.heads)
            .zip(cached);
        let heads = groups.map(|((queries, empty), cached)| filled(empty, &queries.concat(), &cached, n, kv));
        self.lfps.write(&heads.collect::<Result<Vec<_>>>()?)
    }

    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        let (queries, rows) = (step.queries.rope, step.rows()?);
        self.lfps.select(queries, rows, step.positions).map(Some)
    }

    fn observe(&self, step: &CudaStep<'_>, attention: &Attention<'_>) -> Result<()> {
        let (queries, rows) = (step.queries.rope, step.rows()?);
        self.lfps.observe(queries, rows, step.positions, attention)
    }

    fn tally(
        &self,
        _: OnDevice<'_>,
        positions: &Positions<'_>,
        _: Option<&CudaSelection<'_>>,
        sums: &Buffer<'_, f64>,
    ) -> Result<()> {
        self.lfps.tally(positions, sums)
    }

    fn bytes(&self) -> usize {
        self.lfps.bytes()
    }
}

/// Returns the state of a KV head after a prompt, given the prompt's last queries `[r,w,d]` and the cached keys and
/// values `[n,d]`.
fn filled(
    empty: &method::Lfps,
    queries: &[f32],
    [keys, values]: &[Vec<f32>; 2],
    n: usize,
    kv: KvType,
) -> Result<method::Lfps> {
    let (d, r) = (keys.len() / n.max(1), empty.heads().len());
    let w = queries.len() / (r * d).max(1);
    let keys = ArrayView2::from_shape((n, d), keys)?;
    let values = ArrayView2::from_shape((n, d), values)?;
    let mut cache = KvHead::new(kv, d, n, Center::Median);
    cache.extend(keys, values);
    let mut head = empty.clone();
    head.fill(&Prompt {
        first: n - w,
        // lfps reads rotated keys only.
        k_pre: ArrayView2::from_shape((0, d), &[])?,
        q_rope: ArrayView3::from_shape((r, w, d), queries)?,
        keys,
        values,
        kv: &cache,
    });
    Ok(head)
}
