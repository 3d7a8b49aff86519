//! lfps on the GPU: what the heads' tables propose, exact scores of that alone, and what was attended back into the
//! tables: `kernels/select_lfps.cu`.

pub mod tables;

use std::rc::Rc;

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{self, Arg, Driver};
use crate::error::{Error, Result};
use crate::kv::cuda::attend::{Attention, LayerRows, Rest};
use crate::kv::cuda::{Limits, Positions, SCAN, Selection, Shape};
use crate::method::lfps as method;
use crate::method::lfps::{QueryHead, Threshold};

/// Positions of a block that marks and scores candidates.
const SCORED: usize = 256;
/// Threads of a block that sorts.
const SORTERS: usize = 512;
/// Attended positions of a block that scores them.
const ATTENDED: usize = 64;
/// Numbers of a query head that stay as they are.
const CONSTANTS: usize = 6;
/// Numbers of what `lfps_limit` finds.
const CHOICE: usize = 2 + crate::kv::cuda::MOST_GROUP;

/// Where a step is worked on; one for all layers that see as far.
pub struct Space<'d> {
    /// `[b,h,blocks,2]`, `[b,h,blocks,4]` and `[b,h,4]`.
    parts: Buffer<'d, f64>,
    moments: Buffer<'d, f64>,
    thresholds: Buffer<'d, f64>,
    /// `[b,h]`: whether a head is bypassed, and the log mass of what is no sink.
    bypassed: Buffer<'d, u32>,
    rest: Buffer<'d, f32>,
    /// `[b,g,4]`: key rows read to rank, products, heads bypassed, rows of the local estimate.
    counters: Buffer<'d, u32>,
    /// `[b,h,capacity]` in the order of scores, and `[b,h,blocks]` how many there are.
    scores: Buffer<'d, u32>,
    counts: Buffer<'d, u32>,
    /// `[b,g,capacity]`: the best rank of a position in any head.
    joins: Buffer<'d, u32>,
    /// `[b,h,capacity]` twice, to sort to and fro, and `[b,h]`.
    entries: [Buffer<'d, u64>; 2],
    listed: Buffer<'d, u32>,
    /// `[b,g,CHOICE]`.
    choice: Buffer<'d, u32>,
    /// `[b,h,room]`.
    attended: Buffer<'d, f32>,
    room: usize,
    selection: Selection<'d>,
}

impl<'d> Space<'d> {
    /// Room for one step.
    ///
    /// # Errors
    /// Sizes that the kernels are not made for; no memory.
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
            selection: Selection::new(driver, &shape, most)?,
        })
    }
}

/// The tables of one layer's query heads, and what goes with them.
pub struct Lfps<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    limits: Limits,
    theta: f64,
    /// Whether the table with the larger kurtosis has the lower threshold.
    is_balanced: bool,
    /// `[b,h,2,capacity]` before the factors `[b,h,2]`: by position, and by distance.
    tables: Buffer<'d, f32>,
    factors: Buffer<'d, f64>,
    /// `[b,h,CONSTANTS]`.
    constants: Buffer<'d, f64>,
    /// `[b,g,2,d]`: sums of the keys and of the values of what is visible and no sink.
    sums: Buffer<'d, f64>,
    space: Rc<Space<'d>>,
}

impl<'d> Lfps<'d> {
    /// Whether the kernels set thresholds by a rule.
    pub fn can(rule: Threshold) -> bool {
        matches!(rule, Threshold::Kurtosis | Threshold::MeanStd)
    }

    /// Empty tables.
    ///
    /// # Errors
    /// Sizes or a rule that the kernels are not made for; no memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        params: &method::Params,
        space: Rc<Space<'d>>,
    ) -> Result<Self> {
        let shape = shape.checked()?;
        if !Self::can(params.lfps_threshold) {
            return Err(Error::failed("CUDA: no thresholds by a budget"));
        }
        let (h, d) = (shape.query_heads(), shape.head_dim);
        Ok(Self {
            driver,
            shape,
            limits: *limits,
            theta: params.lfps_theta,
            is_balanced: params.lfps_threshold == Threshold::Kurtosis,
            tables: Buffer::zeros(driver, "tables of attention", h * 2 * shape.capacity)?,
            factors: Buffer::of(driver, "factors of tables", &vec![1.0; h * 2])?,
            constants: Buffer::zeros(driver, "constants of heads", h * CONSTANTS)?,
            sums: Buffer::zeros(driver, "sums of rows", shape.heads() * 2 * d)?,
            space,
        })
    }

    /// Takes over the state after a prompt, one per KV head of every sequence.
    ///
    /// # Errors
    /// Other numbers of heads, or more positions than there is room for.
    pub fn write(&self, heads: &[method::Lfps]) -> Result<()> {
        let (capacity, r) = (self.shape.capacity, self.shape.group);
        let own: Vec<&QueryHead> = heads.iter().flat_map(method::Lfps::heads).collect();
        let tables = || own.iter().flat_map(|head| [&head.vertical, &head.slash]);
        let fits = tables().all(|table| table.parts().0.len() <= capacity);
        if heads.len() != self.shape.heads() || own.len() != heads.len() * r || !fits {
            return Err(Error::failed(format!(
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
            let c = head.constants();
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

    /// Chooses for rotated queries `[b,h,d]`: tests every head for the bypass, and of what the other heads' tables
    /// propose takes the best, the same rank for all heads of a group; `rows` hold the current token.
    ///
    /// # Numerics
    /// Tables, thresholds and the bypass in f64, scores in f32; the lower position on ties.
    pub fn select(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<&Selection<'d>> {
        self.begin(queries, rows, positions)?;
        self.set_thresholds(positions)?;
        self.mark(queries, rows, positions)?;
        self.rank()?;
        self.choose(positions)?;
        Ok(&self.space.selection)
    }

    /// Blocks of so many positions, for each of a sequence's query heads or KV heads.
    fn grid(&self, positions: usize, heads: usize) -> [usize; 3] {
        let blocks = self.shape.capacity.div_ceil(positions);
        [blocks, heads, self.shape.sequences]
    }

    /// Query heads of a sequence.
    fn query_heads(&self) -> usize {
        self.shape.kv_heads * self.shape.group
    }

    fn sinks(&self) -> Arg {
        Arg::u32(self.limits.sinks.min(self.shape.capacity))
    }

    /// The kind, the group and the sizes of rows, as most kernels want them.
    fn sizes(&self, rows: &LayerRows<'_>) -> [Arg; 5] {
        let shape = &self.shape;
        [
            rows.kind(),
            shape.group,
            shape.head_dim,
            shape.width(),
            shape.capacity,
        ]
        .map(Arg::u32)
    }

    fn begin(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let mut args = vec![
            queries.arg(),
            rows.keys.arg(),
            rows.values.arg(),
            positions.spans.arg(),
            positions.budgets.arg(),
            self.constants.arg(),
            self.sums.arg(),
            space.bypassed.arg(),
            space.rest.arg(),
            space.counters.arg(),
            Arg::f64(1.0 / (shape.head_dim as f64).sqrt()),
            Arg::f64(self.theta),
        ];
        args.extend(self.sizes(rows));
        args.push(self.sinks());
        let model_window = self.limits.model_window.unwrap_or(0);
        args.push(Arg::u32(model_window.min(shape.capacity)));
        let grid = [1, shape.kv_heads, shape.sequences];
        driver::launch(self.driver, "lfps_begin", grid, &args)
    }

    fn set_thresholds(&self, positions: &Positions<'_>) -> Result<()> {
        let (space, spans) = (&self.space, positions.spans.arg());
        let (tables, factors) = (self.tables.arg(), self.factors.arg());
        let (parts, moments) = (space.parts.arg(), space.moments.arg());
        let capacity = Arg::u32(self.shape.capacity);
        let grid = self.grid(SCAN, self.query_heads());
        let args = [tables, factors, spans, parts, capacity];
        driver::launch(self.driver, "lfps_sums", grid, &args)?;
        let args = [tables, factors, spans, parts, moments, capacity];
        driver::launch(self.driver, "lfps_moments", grid, &args)?;
        let args = [
            self.constants.arg(),
            spans,
            parts,
            moments,
            space.thresholds.arg(),
            Arg::u32(grid[0]),
            Arg::u32(usize::from(self.is_balanced)),
        ];
        driver::launch(self.driver, "lfps_thresholds", [1, grid[1], grid[2]], &args)
    }

    fn mark(&self, queries: &Buffer<'_, f32>, rows: &LayerRows<'_>, positions: &Positions<'_>) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let mut args = vec![
            queries.arg(),
            rows.keys.arg(),
            positions.spans.arg(),
            positions.budgets.arg(),
            self.tables.arg(),
            self.factors.arg(),
            space.thresholds.arg(),
            space.bypassed.arg(),
            space.scores.arg(),
            space.joins.arg(),
            space.counts.arg(),
            space.counters.arg(),
            Arg::f32(1.0 / (shape.head_dim as f32).sqrt()),
        ];
        args.extend(self.sizes(rows));
        let grid = self.grid(SCORED, shape.kv_heads);
        driver::launch_with(self.driver, "lfps_marks", grid, self.query_bytes(), &args)
    }

    /// Bytes of a group's queries in shared memory.
    fn query_bytes(&self) -> usize {
        4 * self.shape.group * self.shape.width()
    }

    fn rank(&self) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let ([entries, other], capacity) = (&space.entries, Arg::u32(shape.capacity));
        let args = [
            space.scores.arg(),
            space.counts.arg(),
            entries.arg(),
            space.listed.arg(),
            capacity,
        ];
        let grid = self.grid(SCORED, self.query_heads());
        driver::launch(self.driver, "lfps_entries", grid, &args)?;
        let args = [
            entries.arg(),
            other.arg(),
            space.listed.arg(),
            space.joins.arg(),
            Arg::u32(shape.group),
            capacity,
        ];
        driver::launch_blocks(self.driver, "lfps_sort", [1, grid[1], grid[2]], SORTERS, 0, &args)
    }

    fn choose(&self, positions: &Positions<'_>) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let (joins, choice, capacity) = (space.joins.arg(), space.choice.arg(), Arg::u32(shape.capacity));
        let (spans, budgets) = (positions.spans.arg(), positions.budgets.arg());
        let args = [
            space.entries[0].arg(),
            space.listed.arg(),
            joins,
            space.scores.arg(),
            budgets,
            choice,
            Arg::u32(shape.group),
            capacity,
        ];
        let grid = self.grid(SCAN, shape.kv_heads);
        driver::launch(self.driver, "lfps_limit", [1, grid[1], grid[2]], &args)?;
        let to = &space.selection;
        let totals = to.totals.arg();
        let args = [joins, choice, spans, budgets, totals, capacity];
        driver::launch(self.driver, "lfps_count", grid, &args)?;
        let (lists, listed, most) = (to.lists.arg(), to.listed.arg(), Arg::u32(to.most));
        let args = [
            joins, choice, spans, budgets, totals, lists, listed, capacity, most,
        ];
        driver::launch(self.driver, "lfps_list", grid, &args)
    }

    /// After [`Lfps::select`] and the attention over what it chose: bypassed heads get the attention over the sinks
    /// joined with the mean of the other values, and the tables of the others take in the weights of what was attended.
    ///
    /// # Numerics
    /// Weights are of scores in f32 over what is no sink, their sums in f64.
    pub fn observe(
        &self,
        queries: &Buffer<'_, f32>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        attention: &Attention<'_>,
    ) -> Result<()> {
        let (shape, space) = (&self.shape, &self.space);
        let rest = Rest {
            marked: space.bypassed.arg(),
            lse: space.rest.arg(),
            sums: self.sums.arg(),
            sinks: self.sinks(),
        };
        attention.join_rest(rest, rows, positions)?;
        let to = &space.selection;
        let (most, room) = (Arg::u32(to.most), Arg::u32(space.room));
        let (spans, lists, listed) = (positions.spans.arg(), to.lists.arg(), to.listed.arg());
        let scores = space.attended.arg();
        let mut args = vec![
            queries.arg(),
            rows.keys.arg(),
            spans,
            lists,
            listed,
            scores,
            shape.exponent(),
        ];
        args.extend(self.sizes(rows));
        args.extend([most, room, self.sinks()]);
        let blocks = space.room.div_ceil(ATTENDED);
        let grid = [blocks, shape.kv_heads, shape.sequences];
        driver::launch_with(self.driver, "lfps_attended", grid, self.query_bytes(), &args)?;
        let args = [
            scores,
            self.constants.arg(),
            space.bypassed.arg(),
            spans,
            lists,
            listed,
            self.tables.arg(),
            self.factors.arg(),
            Arg::u32(shape.group),
            Arg::u32(shape.capacity),
            most,
            room,
        ];
        let grid = [1, self.query_heads(), shape.sequences];
        driver::launch(self.driver, "lfps_update", grid, &args)
    }

    /// Adds the shares of a step to `sums` `[3]`, mean over heads: rows read, products taken to rank, query heads
    /// bypassed.
    pub fn tally(&self, positions: &Positions<'_>, sums: &Buffer<'_, f64>) -> Result<()> {
        let shape = &self.shape;
        let args = [
            positions.spans.arg(),
            self.space.selection.listed.arg(),
            self.space.counters.arg(),
            sums.arg(),
            Arg::u32(shape.sequences),
            Arg::u32(shape.kv_heads),
            Arg::u32(shape.group),
        ];
        driver::launch_blocks(self.driver, "lfps_tally", [1, 1, 1], 32, 0, &args)
    }

    /// The tables, `[b,h,2,capacity]`: by position and by distance; waits for the device.
    pub fn tables(&self) -> Result<Vec<f64>> {
        let (values, factors) = (self.tables.read()?, self.factors.read()?);
        let tables = values.chunks(self.shape.capacity).zip(factors);
        Ok(tables
            .flat_map(|(values, factor)| values.iter().map(move |v| f64::from(*v) * factor))
            .collect())
    }

    /// Which query heads were bypassed in the last step, `[b,h]`; waits for the device.
    pub fn bypassed(&self) -> Result<Vec<bool>> {
        let marks = self.space.bypassed.read()?;
        Ok(marks.into_iter().map(|mark| mark != 0).collect())
    }

    /// Bytes that grow with the context.
    pub fn bytes(&self) -> usize {
        self.tables.len() * size_of::<f32>()
    }
}
