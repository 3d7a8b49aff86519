//! lfps on the GPU (`kernels/select_lfps.cu`): candidates from the tables, exact scores of the candidates alone, and
//! updates of the tables from what was attended.

mod tables;

use std::rc::Rc;

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::Limits;
use crate::kv::cuda::attend::{Attention, Rest};
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::{CudaSelection, Positions, SCAN, Shape};
use crate::method::lfps as method;
use crate::method::lfps::{QueryHead, Threshold};

/// Positions per block of the kernels that mark and score candidates.
const SCORED: usize = 256;
/// Positions per block of the kernels that score attended positions.
const ATTENDED: usize = 64;
/// Number of constants per query head.
const CONSTANTS: usize = 6;
/// Values that `lfps_limit` writes per KV head.
const CHOICE: usize = 2 + crate::kv::cuda::MOST_GROUP;

/// The buffers of a step; all layers with the same sliding window share them.
pub struct LfpsWorkspace<'d> {
    /// The sums of both tables over each block of positions, `[b,h,blocks,2]`.
    parts: Buffer<'d, f64>,
    /// The sums of the second and fourth powers of their deviations, `[b,h,blocks,4]`.
    moments: Buffer<'d, f64>,
    /// The thresholds of both tables, then their means, `[b,h,4]`.
    thresholds: Buffer<'d, f64>,
    /// Whether a head was bypassed in the last step, `[b,h]`.
    pub bypassed: Buffer<'d, u32>,
    /// The log mass of the non-sinks by the bypass test, `[b,h]`.
    rest: Buffer<'d, f32>,
    /// Per KV head: keys read to rank, products, bypassed heads, positions of the local estimate; `[b,g,4]`.
    counters: Buffer<'d, u32>,
    /// The scores of the candidates as integers that sort as the scores do, `[b,h,capacity]`.
    scores: Buffer<'d, u32>,
    /// The number of candidates per block, `[b,h,blocks]`.
    counts: Buffer<'d, u32>,
    /// The best rank that each position has in any query head, `[b,g,capacity]`.
    joins: Buffer<'d, u32>,
    /// The candidates to sort, `[b,h,capacity]`, in two copies between which the sort alternates.
    entries: [Buffer<'d, u64>; 2],
    /// The number of candidates of each query head, `[b,h]`.
    listed: Buffer<'d, u32>,
    /// The result of `lfps_limit`, `[b,g,CHOICE]`.
    choice: Buffer<'d, u32>,
    /// Scores and then weights of the attended positions, `[b,h,room]`.
    attended: Buffer<'d, f32>,
    room: usize,
    selection: CudaSelection<'d>,
}

impl<'d> LfpsWorkspace<'d> {
    /// Allocates the buffers of a step.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, limits: &Limits) -> Result<Self> {
        let shape = shape.checked()?;
        let (h, n) = (shape.query_heads(), shape.capacity);
        let (blocks, most) = (n.div_ceil(SCAN), limits.most(n));
        let room = (most + limits.window.min(n)).min(n);
        let entries = || Buffer::new(driver, "candidates", h * n);
        Ok(Self {
            parts: Buffer::new(driver, "sums of tables", h * blocks * 2)?,
            moments: Buffer::new(driver, "moments of tables", h * blocks * 4)?,
            thresholds: Buffer::new(driver, "thresholds", h * 4)?,
            bypassed: Buffer::zeros(driver, "bypassed heads", h)?,
            rest: Buffer::zeros(driver, "log masses", h)?,
            counters: Buffer::zeros(driver, "counters", shape.heads() * 4)?,
            scores: Buffer::new(driver, "scores of candidates", h * n)?,
            counts: Buffer::new(driver, "numbers of candidates", h * n.div_ceil(SCORED))?,
            joins: Buffer::new(driver, "ranks of positions", shape.heads() * n)?,
            entries: [entries()?, entries()?],
            listed: Buffer::zeros(driver, "numbers of candidates", h)?,
            choice: Buffer::zeros(driver, "limits of ranks", shape.heads() * CHOICE)?,
            attended: Buffer::new(driver, "scores of what is attended", h * room)?,
            room,
            selection: CudaSelection::new(driver, &shape, most)?,
        })
    }
}

/// The tables and the constants of one layer's query heads.
pub struct Lfps<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    limits: Limits,
    theta: f64,
    /// The tables by position and by distance, `[b,h,2,capacity]`, before multiplication by `factors`.
    pub tables: Buffer<'d, f32>,
    /// The common factors of the tables, `[b,h,2]`.
    pub factors: Buffer<'d, f64>,
    /// The constants of each query head, `[b,h,CONSTANTS]`.
    constants: Buffer<'d, f64>,
    /// The sums of the keys and of the values of the visible non-sinks, `[b,g,2,d]`.
    sums: Buffer<'d, f64>,
    space: Rc<LfpsWorkspace<'d>>,
}

impl<'d> Lfps<'d> {
    /// Makes empty tables.
    ///
    /// # Errors
    /// Sizes or a threshold rule that the kernels do not support; out of memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        params: &method::LfpsParams,
        space: Rc<LfpsWorkspace<'d>>,
    ) -> Result<Self> {
        let shape = shape.checked()?;
        if params.lfps_threshold == Threshold::Budget {
            return Err(Error::internal("CUDA: no thresholds by a budget"));
        }
        let (h, d) = (shape.query_heads(), shape.head_dim);
        Ok(Self {
            driver,
            shape,
            limits: *limits,
            theta: params.lfps_theta,
            tables: Buffer::zeros(driver, "tables of attention", h * 2 * shape.capacity)?,
            factors: Buffer::from_slice(driver, "factors of tables", &vec![1.0; h * 2])?,
            constants: Buffer::zeros(driver, "constants of heads", h * CONSTANTS)?,
            sums: Buffer::zeros(driver, "sums of rows", shape.heads() * 2 * d)?,
            space,
        })
    }

    /// Copies the state after a prompt from the CPU; `heads` has one entry per KV head of every sequence.
    ///
    /// # Errors
    /// The number of heads differs, or a table exceeds the capacity.
    pub fn write(&self, heads: &[method::Lfps]) -> Result<()> {
        let (capacity, r) = (self.shape.capacity, self.shape.group);
        let own: Vec<&QueryHead> = heads.iter().flat_map(method::Lfps::heads).collect();
        let tables = || own.iter().flat_map(|head| [&head.vertical, &head.slash]);
        let fits = tables().all(|table| table.parts().0.len() <= capacity);
        if heads.len() != self.shape.heads() || own.len() != heads.len() * r || !fits {
            return Err(Error::internal(format!(
                "CUDA: tables of {} heads do not fit {:?}",
                own.len(),
                self.shape
            )));
        }
        let mut values = vec![0.0; own.len() * 2 * capacity];
        for (to, table) in values.chunks_mut(capacity).zip(tables()) {
            to[..table.parts().0.len()].copy_from_slice(table.parts().0);
        }
        self.tables.write(&values)?;
        self.factors
            .write(&tables().map(|table| table.parts().1).collect::<Vec<_>>())?;
        let constants = own.iter().flat_map(|head| {
            let c = head.constants;
            let is_tested = f64::from(u8::from(c.is_tested));
            [c.gamma, c.lambda, c.alpha, c.rho, c.bias, is_tested]
        });
        self.constants.write(&constants.collect::<Vec<_>>())?;
        let d = self.shape.head_dim;
        let mut sums = vec![0.0; self.sums.len()];
        let parts = heads.iter().flat_map(method::Lfps::sums);
        for (to, part) in sums.chunks_mut(d).zip(parts) {
            to.iter_mut().zip(part).for_each(|(to, x)| *to = *x);
        }
        self.sums.write(&sums)
    }

    /// Chooses for rotated queries `[b,h,d]`. Tests every head for the bypass; for the other heads, takes the best
    /// candidates that their tables propose, up to a rank that is the same for all heads of a group. `rows` must
    /// already hold the current token.
    ///
    /// # Numerics
    /// Tables, thresholds and the bypass in f64, scores in f32; the lower position wins a tie.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<&CudaSelection<'d>> {
        self.begin(queries, rows, positions)?;
        self.set_thresholds(positions)?;
        self.mark(queries, rows, positions)?;
        self.rank()?;
        self.choose(positions)?;
        Ok(&self.space.selection)
    }

    /// Returns a grid with one block per `positions` positions, for each of the `heads` heads of each sequence.
    fn grid(&self, positions: usize, heads: usize) -> [usize; 3] {
        let blocks = self.shape.capacity.div_ceil(positions);
        [blocks, heads, self.shape.sequences]
    }

    /// Returns the number of query heads of a sequence.
    fn query_heads(&self) -> usize {
        self.shape.kv_heads * self.shape.group
    }

    fn sinks(&self) -> usize {
        self.limits.sinks.min(self.shape.capacity)
    }

    fn begin(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let model_window = self.limits.model_window.unwrap_or(0);
        kernels::LfpsBegin {
            queries: queries.ptr(),
            keys: rows.keys.ptr().cast(),
            values: rows.values.ptr().cast(),
            spans: positions.spans.ptr(),
            budgets: positions.budgets.ptr(),
            constants: self.constants.ptr(),
            sums: self.sums.ptr(),
            bypassed: space.bypassed.ptr(),
            rest: space.rest.ptr(),
            counters: space.counters.ptr(),
            scale: 1.0 / (shape.head_dim as f64).sqrt(),
            theta: self.theta,
            kind: rows.kind(),
            r: shape.group,
            d: shape.head_dim,
            w: shape.width(),
            capacity: shape.capacity,
            sinks: self.sinks(),
            model_window: model_window.min(shape.capacity),
        }
        .launch(self.driver, shape.grid(1))
    }

    fn set_thresholds(&self, positions: &Positions<'_>) -> Result<()> {
        let (space, spans) = (&self.space, positions.spans.ptr());
        let (tables, factors) = (self.tables.ptr(), self.factors.ptr());
        let (parts, moments) = (space.parts.ptr(), space.moments.ptr());
        let capacity = self.shape.capacity;
        let grid = self.grid(SCAN, self.query_heads());
        let sinks = self.sinks();
        kernels::LfpsSums {
            tables,
            factors,
            spans,
            parts,
            capacity,
            sinks,
        }
        .launch(self.driver, grid)?;
        kernels::LfpsMoments {
            tables,
            factors,
            spans,
            parts,
            moments,
            capacity,
            sinks,
        }
        .launch(self.driver, grid)?;
        kernels::LfpsThresholds {
            constants: self.constants.ptr(),
            spans,
            parts,
            moments,
            thresholds: space.thresholds.ptr(),
            blocks: grid[0],
            sinks,
        }
        .launch(self.driver, [1, grid[1], grid[2]])
    }

    fn mark(&self, queries: &Buffer<'_, f32>, rows: &LayerRows<'_>, positions: &Positions<'_>) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let grid = self.grid(SCORED, shape.kv_heads);
        kernels::LfpsMarks {
            queries: queries.ptr(),
            keys: rows.keys.ptr().cast(),
            spans: positions.spans.ptr(),
            budgets: positions.budgets.ptr(),
            tables: self.tables.ptr(),
            factors: self.factors.ptr(),
            thresholds: space.thresholds.ptr(),
            bypassed: space.bypassed.ptr(),
            scores: space.scores.ptr(),
            joins: space.joins.ptr(),
            counts: space.counts.ptr(),
            counters: space.counters.ptr(),
            scale: 1.0 / (shape.head_dim as f32).sqrt(),
            kind: rows.kind(),
            r: shape.group,
            d: shape.head_dim,
            w: shape.width(),
            capacity: shape.capacity,
        }
        .launch(self.driver, grid, self.query_bytes())
    }

    /// Returns the bytes of shared memory that a group's queries take.
    fn query_bytes(&self) -> usize {
        4 * self.shape.group * self.shape.width()
    }

    fn rank(&self) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let ([entries, other], capacity) = (&space.entries, shape.capacity);
        let grid = self.grid(SCORED, self.query_heads());
        kernels::LfpsEntries {
            scores: space.scores.ptr(),
            counts: space.counts.ptr(),
            entries: entries.ptr(),
            listed: space.listed.ptr(),
            capacity,
        }
        .launch(self.driver, grid)?;
        kernels::LfpsSort {
            entries: entries.ptr(),
            other: other.ptr(),
            listed: space.listed.ptr(),
            joins: space.joins.ptr(),
            r: shape.group,
            capacity,
        }
        .launch(self.driver, [1, grid[1], grid[2]])
    }

    fn choose(&self, positions: &Positions<'_>) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let (joins, choice, capacity) = (space.joins.ptr(), space.choice.ptr(), shape.capacity);
        let (spans, budgets) = (positions.spans.ptr(), positions.budgets.ptr());
        let grid = self.grid(SCAN, shape.kv_heads);
        kernels::LfpsLimit {
            entries: space.entries[0].ptr(),
            listed: space.listed.ptr(),
            joins,
            scores: space.scores.ptr(),
            budgets,
            choice,
            r: shape.group,
            capacity,
        }
        .launch(self.driver, [1, grid[1], grid[2]])?;
        let to = &space.selection;
        let totals = to.totals.ptr();
        kernels::LfpsCount {
            joins,
            choice,
            spans,
            budgets,
            totals,
            capacity,
        }
        .launch(self.driver, grid)?;
        let (lists, listed, most) = (to.lists.ptr(), to.listed.ptr(), to.most);
        kernels::LfpsList {
            joins,
            choice,
            spans,
            budgets,
            totals,
            lists,
            listed,
            capacity,
            most,
        }
        .launch(self.driver, grid)
    }

    /// Completes a step after the attention over the positions that [`Lfps::select`] chose. The result of a bypassed
    /// head becomes its attention over the sinks, joined with the mean of the other values. The tables of the other
    /// heads learn from the attention weights.
    ///
    /// # Numerics
    /// Weights over the non-sinks, from scores in f32, summed in f64.
    pub fn observe(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        attention: &Attention<'_>,
    ) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let rest = Rest {
            marked: space.bypassed.ptr(),
            lse: space.rest.ptr(),
            sums: self.sums.ptr(),
            sinks: self.sinks(),
        };
        rows.join_rest(attention, rest, positions)?;
        let to = &space.selection;
        let (most, room) = (to.most, space.room);
        let (spans, lists, listed) = (positions.spans.ptr(), to.lists.ptr(), to.listed.ptr());
        let scores = space.attended.ptr();
        let grid = shape.grid(space.room.div_ceil(ATTENDED));
        kernels::LfpsAttended {
            queries: queries.ptr(),
            keys: rows.keys.ptr().cast(),
            spans,
            lists,
            listed,
            scores,
            scale: shape.exponent(),
            kind: rows.kind(),
            r: shape.group,
            d: shape.head_dim,
            w: shape.width(),
            capacity: shape.capacity,
            most,
            room,
            sinks: self.sinks(),
        }
        .launch(self.driver, grid, self.query_bytes())?;
        let grid = [1, self.query_heads(), shape.sequences];
        kernels::LfpsUpdate {
            scores,
            constants: self.constants.ptr(),
            bypassed: space.bypassed.ptr(),
            spans,
            lists,
            listed,
            tables: self.tables.ptr(),
            factors: self.factors.ptr(),
            r: shape.group,
            capacity: shape.capacity,
            most,
            room,
        }
        .launch(self.driver, grid)
    }

    /// Adds this step's figures to `sums` `[TALLIES]`: see [`CudaIndex::tally`](crate::method::cuda::CudaIndex::tally).
    pub fn tally(&self, positions: &Positions<'_>, sums: &Buffer<'_, f64>) -> Result<()> {
        let shape = &self.shape;
        kernels::LfpsTally {
            spans: positions.spans.ptr(),
            listed: self.space.selection.listed.ptr(),
            counters: self.space.counters.ptr(),
            sums: sums.ptr(),
            b: shape.sequences,
            g: shape.kv_heads,
            r: shape.group,
        }
        .launch(self.driver, [1, 1, 1])
    }

    /// Returns the bytes of the index that grow with the context.
    pub fn bytes(&self) -> usize {
        self.tables.len() * size_of::<f32>()
    }
}
