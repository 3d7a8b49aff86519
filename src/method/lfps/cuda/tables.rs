//! What lfps has of a layer on the device.

use std::cell::RefCell;
use std::rc::Rc;

use ndarray::{ArrayView2, ArrayView3};
use rayon::prelude::*;

use super::{Lfps, Space};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::kv::cuda::attend::{Attention, LayerRows};
use crate::kv::cuda::{Limits, Positions, Selection, Shape};
use crate::kv::packed::Center;
use crate::kv::{KvHead, KvType};
use crate::method::lfps as method;
use crate::method::{Place, Prompt};

/// The tables of a layer. Those of a prompt are made by the CPU, from its last queries and all rows of its cache.
pub struct TableIndex<'d> {
    lfps: Lfps<'d>,
    space: Rc<Space<'d>>,
    /// As they are before a prompt, one per KV head.
    heads: Vec<method::Lfps>,
    /// The last queries so far of every query head, up to `rows` of them.
    queries: RefCell<Vec<Vec<f32>>>,
    rows: usize,
    shape: Shape,
}

impl<'d> TableIndex<'d> {
    /// Before a prompt; `like` is the index of an earlier layer that sees as far.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        setup: &method::Setup,
        layer: usize,
        like: Option<&Self>,
    ) -> Result<Self> {
        let space = match like {
            Some(index) => Rc::clone(&index.space),
            None => Rc::new(Space::new(driver, shape, limits)?),
        };
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
            lfps: Lfps::new(driver, shape, limits, params, Rc::clone(&space))?,
            space,
            heads: (0..shape.kv_heads).map(head).collect(),
            queries: RefCell::new(vec![Vec::new(); shape.kv_heads * shape.group]),
            // The last one also tells how much scores vary.
            rows: params.lfps_rows.max(1),
            shape,
        })
    }

    /// Notes the last queries of the next `m` rows of a prompt; waits for the device.
    pub fn extend(&self, queries: &Buffer<'_, f32>, m: usize) -> Result<()> {
        let (d, n) = (self.shape.head_dim, self.rows.min(m));
        for (head, last) in self.queries.borrow_mut().iter_mut().enumerate() {
            last.extend(queries.read_part((head * m + m - n) * d, n * d)?);
            let beyond = last.len().saturating_sub(self.rows * d);
            last.drain(..beyond);
        }
        Ok(())
    }

    /// Makes the tables of a prompt that is complete, of one sequence; waits for the device.
    pub fn end_of_prompt(&self, rows: &LayerRows<'_>, positions: &Positions<'_>) -> Result<()> {
        let (n, queries) = (positions.longest(), self.queries.borrow());
        let cached: Vec<_> = (0..self.heads.len())
            .map(|at| rows.read_head(at, n))
            .collect::<Result<_>>()?;
        let kv = KvType::from(rows.float);
        let groups = queries.par_chunks(self.shape.group).zip(&self.heads).zip(cached);
        let heads = groups.map(|((queries, empty), cached)| filled(empty, &queries.concat(), &cached, n, kv));
        self.lfps.write(&heads.collect::<Result<Vec<_>>>()?)
    }

    /// See [`Lfps::select`].
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<&Selection<'d>> {
        self.lfps.select(queries, rows, positions)
    }

    /// See [`Lfps::observe`].
    pub fn observe(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        attention: &Attention<'_>,
    ) -> Result<()> {
        self.lfps.observe(queries, rows, positions, attention)
    }

    /// See [`Lfps::tally`].
    pub fn tally(&self, positions: &Positions<'_>, sums: &Buffer<'_, f64>) -> Result<()> {
        self.lfps.tally(positions, sums)
    }

    /// Bytes that grow with the context.
    pub fn bytes(&self) -> usize {
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
