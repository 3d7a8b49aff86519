//! What lfps has of a layer on the device.

use std::cell::RefCell;
use std::rc::Rc;

use ndarray::{ArrayView2, ArrayView3};
use rayon::prelude::*;

use super::{Lfps, Space};
use crate::compute::cuda::buffer::Buffer;
use crate::error::{Error, Result};
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::{Limits, Positions, Selection, Shape};
use crate::kv::packed::Center;
use crate::kv::{KvHead, KvType};
use crate::method::cuda::{
    ByWindow, Chunk, CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice, WholePrompt,
};
use crate::method::lfps::{self as method, Setup};
use crate::method::{Place, Prompt};

/// The tables of a layer. Those of a prompt are made by the CPU, from its last queries and all rows of its cache.
struct TableIndex<'d> {
    lfps: Lfps<'d>,
    /// As they are before a prompt, one per KV head.
    heads: Vec<method::Lfps>,
    /// The last queries so far of every query head, up to `rows` of them.
    queries: RefCell<Vec<Vec<f32>>>,
    rows: usize,
    shape: Shape,
}

impl CudaMethod for Setup {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        let rows = !needs.packed && !needs.rows_on_host;
        rows && !needs.later_prompts && Lfps::can(self.params().lfps_threshold)
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, limits: &[Limits]) -> Result<Indexes<'d>> {
        let mut shared = ByWindow::new();
        let index = |(layer, limits)| -> Result<Box<dyn CudaIndex + 'd>> {
            let space = shared.of(limits, || Space::new(at.driver, at.shape, limits))?;
            Ok(Box::new(TableIndex::new(at, limits, self, layer, space)?))
        };
        limits.iter().enumerate().map(index).collect()
    }
}

impl<'d> TableIndex<'d> {
    fn new(
        at: OnDevice<'d>,
        limits: &Limits,
        setup: &Setup,
        layer: usize,
        space: Rc<Space<'d>>,
    ) -> Result<Self> {
        let shape = at.shape;
        let head = |kv_head| {
            setup.head(&Place {
                layer,
                kv_head,
                group: shape.group,
                head_dim: shape.head_dim,
                model_window: limits.model_window,
                sinks: limits.sinks,
                window: limits.window,
                budget: limits.budget,
                kv: KvType::F32,
            })
        };
        let params = setup.params();
        Ok(Self {
            lfps: Lfps::new(at.driver, shape, limits, params, space)?,
            heads: (0..shape.kv_heads).map(head).collect(),
            queries: RefCell::new(vec![Vec::new(); shape.kv_heads * shape.group]),
            // The last one also tells how much scores vary.
            rows: params.lfps_rows.max(1),
            shape,
        })
    }
}

impl CudaIndex for TableIndex<'_> {
    /// Notes the last queries so far; waits for the device.
    fn extend(&self, chunk: &Chunk<'_>) -> Result<()> {
        let (d, m, n) = (self.shape.head_dim, chunk.m, self.rows.min(chunk.m));
        for (head, last) in self.queries.borrow_mut().iter_mut().enumerate() {
            last.extend(chunk.queries.rope.read_part((head * m + m - n) * d, n * d)?);
            let beyond = last.len().saturating_sub(self.rows * d);
            last.drain(..beyond);
        }
        Ok(())
    }

    /// Makes the tables of a prompt of one sequence; waits for the device.
    fn end_of_prompt(&self, prompt: &WholePrompt<'_>) -> Result<()> {
        let (n, queries) = (prompt.positions.longest(), self.queries.borrow());
        let cached: Vec<_> = (0..self.heads.len())
            .map(|at| prompt.rows.read_head(at, n))
            .collect::<Result<_>>()?;
        let kv = KvType::from(prompt.rows.float);
        let groups = queries.par_chunks(self.shape.group).zip(&self.heads).zip(cached);
        let heads = groups.map(|((queries, empty), cached)| filled(empty, &queries.concat(), &cached, n, kv));
        self.lfps.write(&heads.collect::<Result<Vec<_>>>()?)
    }

    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&Selection<'_>>> {
        let chosen = self
            .lfps
            .select(step.queries.rope, step.rows()?, step.positions)?;
        Ok(Some(chosen))
    }

    fn observe(&self, step: &CudaStep<'_>, attention: &Attention<'_>) -> Result<()> {
        let (queries, rows) = (step.queries.rope, step.rows()?);
        self.lfps.observe(queries, rows, step.positions, attention)
    }

    fn tally(
        &self,
        _: OnDevice<'_>,
        positions: &Positions<'_>,
        _: Option<&Selection<'_>>,
        sums: &Buffer<'_, f64>,
    ) -> Result<()> {
        self.lfps.tally(positions, sums)
    }

    fn bytes(&self) -> usize {
        self.lfps.bytes()
    }
}

/// The state of a KV head after a prompt: its last queries `[r,w,d]`, the keys and values `[n,d]` in its cache.
fn filled(
    empty: &method::Lfps,
    queries: &[f32],
    [keys, values]: &[Vec<f32>; 2],
    n: usize,
    kv: KvType,
) -> Result<method::Lfps> {
    let (d, r) = (keys.len() / n.max(1), empty.heads().len());
    let w = queries.len() / (r * d).max(1);
    let keys = ArrayView2::from_shape((n, d), keys).map_err(|_| order())?;
    let values = ArrayView2::from_shape((n, d), values).map_err(|_| order())?;
    let mut cache = KvHead::new(kv, d, n, Center::Median);
    cache.extend(keys, values);
    let mut head = empty.clone();
    head.fill(&Prompt {
        first: n - w,
        // The method looks at rotated rows alone.
        k_pre: ArrayView2::from_shape((0, d), &[]).map_err(|_| order())?,
        q_rope: ArrayView3::from_shape((r, w, d), queries).map_err(|_| order())?,
        keys,
        values,
        kv: &cache,
    });
    Ok(head)
}

/// What does not happen: rows that are not those of whole heads.
fn order() -> Error {
    Error::failed("rows are not contiguous")
}
