//! Cached rows on the CPU: what a format declares ([`Format`]), the cached keys or values of one KV head ([`RowCache`]), and a
//! store for formats whose rows do not depend on one another ([`RowStore`]).

use std::ops::Range;
use std::sync::Arc;

use ndarray::{Array2, ArrayView1, ArrayView2, s};

use super::layout::Layout;
use super::lines::AlignedVec;
use super::map::RowMap;
use super::qkv::Part;
use crate::compute::attention::{self, CachedRows, GroupQueries, OutputSums, Run, Segment, StepRows};
use crate::float::Float;
use crate::parameters::Word;

#[cfg(test)]
pub(super) mod checks;

/// A format in which the keys or the values of a KV head are cached.
pub trait Format: Sync {
    /// Returns its name on the command line and in results, and one line of help.
    fn word(&self) -> Word;

    /// Returns the bytes per row of d channels of each array that holds the rows.
    fn arrays(&self, part: Part, d: usize) -> [Option<usize>; 2];

    /// Returns the float type of a format that stores floats.
    fn float(&self) -> Option<Float> {
        None
    }

    /// Returns whether cached keys have signs that an index can use ([`RowCache::signs`]).
    fn has_signs(&self) -> bool {
        false
    }

    /// Returns whether the two arrays are layers of codes, of which a step may read the first alone.
    fn is_layered(&self) -> bool {
        false
    }

    /// Returns how many rows must have left the window before they are packed; until then, all rows are in bf16.
    fn first_packed(&self) -> usize {
        0
    }

    /// Returns the bytes of what all rows of d channels share, which every step reads.
    fn shared_bytes(&self, _d: usize) -> usize {
        0
    }

    /// Returns whether a row is read back as it was first stored. If not, later rows may change how it is held.
    fn keeps_rows(&self) -> bool {
        true
    }

    /// Returns whether a fork of a cache shares its rows; if not, it copies them.
    fn shares_rows(&self) -> bool {
        true
    }

    /// Returns the bytes of a row of d channels among the sinks or in the window, if they are held in another way than the
    /// others.
    fn end_bytes(&self, _d: usize) -> Option<usize> {
        None
    }

    /// Returns whether rows pass a map before they are rounded.
    fn maps_rows(&self) -> bool {
        false
    }

    /// Makes an empty cache with space for `capacity` rows of d channels; formats of few bits use `layout`, and those that map rows
    /// before they round them use `map`.
    fn cache(&self, part: Part, d: usize, capacity: usize, layout: Layout, map: &RowMap)
    -> Box<dyn RowCache>;
}

/// The rows of every position after a prompt, and how the prompt's last position sees them.
pub struct Prompted<'a> {
    /// Rotated keys, `[n,d]`; those of earlier prompts as read from the cache.
    pub keys: ArrayView2<'a, f32>,
    /// Values, `[n,d]`, likewise.
    pub values: ArrayView2<'a, f32>,
    /// The prompt's last query, averaged over the query group, `[d]`.
    pub query: &'a [f32],
    /// The positions that this query sees.
    pub visible: Range<usize>,
}

impl<'a> Prompted<'a> {
    /// Returns the rows of one part, `[n,d]`.
    pub fn rows(&self, part: Part) -> ArrayView2<'a, f32> {
        match part {
            Part::Keys => self.keys,
            Part::Values => self.values,
        }
    }
}

/// The cached keys or values of one KV head; row p belongs to position p.
pub trait RowCache: CachedRows + Send {
    /// Appends rows, `[m,d]`.
    fn extend(&mut self, rows: ArrayView2<f32>);

    /// Appends the rows of a prompt, which are the keys or the values of `prompted` that are not cached yet.
    fn prompt(&mut self, part: Part, prompted: &Prompted) {
        let new = s![self.len().., ..];
        self.extend(prompted.rows(part).slice(new));
    }

    /// Returns a cache that starts with the rows of this cache, which share them if the format
    /// [shares rows](Format::shares_rows).
    fn fork(&mut self) -> Box<dyn RowCache>;

    /// Returns a copy.
    fn copy(&self) -> Box<dyn RowCache>;

    /// Counts the rows.
    fn len(&self) -> usize;

    /// Says whether there is no row.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes held, including reserved space and shared rows.
    fn bytes(&self) -> usize;

    /// Returns the signs of the rows, if the format stores signs.
    fn signs(&self) -> Option<Signs<'_>> {
        None
    }

    /// Returns the rows if they are in layers.
    fn layered(&self) -> Option<&dyn LayeredCache> {
        None
    }
}

/// Cached rows in layers, the lower of which a step may leave out.
pub trait LayeredCache {
    /// Returns the rows as a step reads them that reads both layers of the rows at `whole` (ascending), and only the upper one of
    /// others.
    fn reading<'a>(&'a self, whole: &'a [u32]) -> Box<dyn CachedRows + 'a>;

    /// Returns how many of the rows that a step chooses it reads whole; `None` if all of them.
    fn whole_rows(&self, chosen: usize) -> Option<usize>;
}

/// Cached keys as an index of signs sees them.
#[derive(Clone, Copy)]
pub struct Signs<'a> {
    /// The center of each channel.
    pub centers: &'a [f32],
    /// d / 8 bytes per row, rounded up; bit i of byte b is set if channel 8 b + i is above its center.
    pub rows: &'a [u8],
    /// The positions that are in half precision, ascending.
    pub full: &'a [u32],
}

impl Clone for Box<dyn RowCache> {
    fn clone(&self) -> Self {
        self.as_ref().copy()
    }
}

/// What rows of a store consist of.
pub trait RowUnits: 'static {
    /// A part of a row.
    type Unit: Copy + Default + Send + Sync;

    /// Counts the units of a row of d channels.
    fn width(d: usize) -> usize;
}

/// A format of rows that does not depend on other rows.
pub trait RowForm: RowUnits {
    /// Rows as the kernels of attention read them.
    type Rows<'a>: StepRows;
    /// Whether results depend on which rows are read in one run: then a store reads the rows that it shares with others in one
    /// run with its own.
    const WHOLE_RUNS: bool = false;

    /// Returns whether the kernels can read rows of d channels as they are stored.
    fn is_chunked(d: usize) -> bool;

    /// Writes a row to its units, which are zero before.
    fn store(row: ArrayView1<f32>, to: &mut [Self::Unit]);

    /// Reads a row as f32; `scratch` (d values) may hold a converted copy.
    fn read<'o>(row: &'o [Self::Unit], scratch: &'o mut [f32]) -> &'o [f32];

    /// Returns rows of d channels in the form that the kernels take; only if they [can](RowForm::is_chunked). There is one
    /// segment, or several if the form reads [whole runs](RowForm::WHOLE_RUNS).
    fn rows<'a>(segments: &'a [Segment<'a, Self::Unit>], d: usize) -> Self::Rows<'a>;
}

/// Rows of d values, contiguous; forks share their first rows.
pub struct RowStore<F: RowUnits> {
    d: usize,
    /// The first rows, shared with forks: the store that holds them, and how many of its rows belong to this store.
    shared: Option<(Arc<RowStore<F>>, usize)>,
    data: AlignedVec<F::Unit>,
}

impl<F: RowUnits> Clone for RowStore<F> {
    fn clone(&self) -> Self {
        Self {
            d: self.d,
            shared: self.shared.clone(),
            data: self.data.clone(),
        }
    }
}

impl<F: RowUnits> RowStore<F> {
    /// Makes an empty store with space for `capacity` rows.
    pub fn new(d: usize, capacity: usize) -> Self {
        Self {
            d,
            shared: None,
            data: AlignedVec::with_capacity(capacity * F::width(d)),
        }
    }

    /// Returns a new store that starts with the rows of this store; both stores share these rows from here on.
    pub fn forked(&mut self) -> Self {
        if self.own_len() > 0 {
            let rows = self.len();
            let base = std::mem::replace(self, Self::new(self.d, 0));
            self.shared = Some((Arc::new(base), rows));
        }
        self.clone()
    }

    /// Counts the rows.
    pub fn len(&self) -> usize {
        self.shared_len() + self.own_len()
    }

    /// Says whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes held, including reserved space and shared rows.
    pub fn bytes(&self) -> usize {
        self.data.bytes() + self.shared.as_ref().map_or(0, |(rows, _)| rows.bytes())
    }

    fn shared_len(&self) -> usize {
        self.shared.as_ref().map_or(0, |(_, rows)| *rows)
    }

    fn own_len(&self) -> usize {
        self.data.len() / F::width(self.d)
    }

    /// Splits ascending positions into those of shared rows and those of own rows.
    fn split<'a>(&self, positions: &'a [u32]) -> (&'a [u32], &'a [u32]) {
        let shared = self.shared_len();
        positions.split_at(positions.partition_point(|p| (*p as usize) < shared))
    }

    /// Calls `f` with positions of own rows, which are counted from the first own row.
    fn own(&self, run: &Run, f: impl FnOnce(&Run)) {
        let shared = self.shared_len() as u32;
        if shared == 0 {
            return f(run);
        }
        let own = |positions: &[u32]| -> Vec<u32> { positions.iter().map(|p| p - shared).collect() };
        let next = &run.next[..run.next.len().min(attention::AHEAD)];
        f(&Run {
            now: &own(run.now),
            next: &own(next),
        });
    }

    /// Appends `n` rows of zeros and returns their units.
    pub(super) fn add_rows(&mut self, n: usize) -> &mut [F::Unit] {
        self.data.add(n * F::width(self.d))
    }

    /// Returns a new store of the last `n` rows, none of which is shared, with space for `capacity` rows.
    pub(super) fn last(&self, n: usize, capacity: usize) -> Self {
        let mut last = Self::new(self.d, capacity.max(n));
        let from = self.data.len() - n * F::width(self.d);
        last.data.extend(self.data[from..].iter().copied());
        last
    }

    /// Returns the units of own rows.
    #[cfg(test)]
    pub(super) fn units(&self) -> &[F::Unit] {
        &self.data
    }

    /// Lists the first `n` rows as segments, ascending.
    pub(super) fn segments(&self, n: usize) -> Vec<Segment<'_, F::Unit>> {
        let first = self.shared_len();
        let shared = self.shared.as_ref();
        let mut segments = shared.map_or_else(Vec::new, |(rows, of)| rows.segments(n.min(*of)));
        let own = n.saturating_sub(first) * F::width(self.d);
        if own > 0 || segments.is_empty() {
            let rows = &self.data[..own];
            segments.push(Segment { first, rows });
        }
        segments
    }
}

impl<F: RowForm> RowStore<F> {
    /// Removes all rows, none of which is shared, and returns them, `[n,d]`.
    pub(super) fn drain(&mut self) -> Array2<f32> {
        let (n, d) = (self.len(), self.d);
        let rows = std::mem::replace(self, Self::new(d, 0));
        let mut out = Array2::zeros((n, d));
        let mut scratch = vec![0.0; d];
        for (i, mut to) in out.rows_mut().into_iter().enumerate() {
            to.assign(&ArrayView1::from(rows.row(i, &mut scratch)));
        }
        out
    }

    /// Calls `f` with own rows in the form that the kernels take.
    fn with_own(&self, f: impl FnOnce(F::Rows<'_>)) {
        let segments = [Segment {
            first: 0,
            rows: &self.data[..],
        }];
        f(F::rows(&segments, self.d));
    }

    /// Calls `f` with all rows in the form that the kernels take.
    fn with_all(&self, f: impl FnOnce(F::Rows<'_>)) {
        f(F::rows(&self.segments(self.len()), self.d));
    }
}

impl<F: RowForm> RowCache for RowStore<F> {
    fn extend(&mut self, rows: ArrayView2<f32>) {
        assert_eq!(rows.ncols(), self.d, "channels of the rows");
        let width = F::width(self.d);
        let units = self.data.add(rows.nrows() * width);
        for (row, to) in rows.rows().into_iter().zip(units.chunks_exact_mut(width)) {
            F::store(row, to);
        }
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        Box::new(self.forked())
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(self.clone())
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn bytes(&self) -> usize {
        self.bytes()
    }
}

impl<F: RowForm> CachedRows for RowStore<F> {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        if let Some((rows, n)) = &self.shared
            && position < *n
        {
            return rows.row(position, scratch);
        }
        let (own, width) = (position - self.shared_len(), F::width(self.d));
        F::read(&self.data[own * width..(own + 1) * width], scratch)
    }

    fn prefetch(&self, positions: &[u32]) {
        if !F::is_chunked(self.d) {
            return;
        }
        if F::WHOLE_RUNS {
            return self.with_all(|rows| attention::prefetch_first(rows, positions));
        }
        let (shared, own) = self.split(&positions[..positions.len().min(attention::AHEAD)]);
        if let Some((rows, _)) = &self.shared {
            rows.prefetch(shared);
        }
        self.own(&Run::new(own, own.len()), |run| {
            self.with_own(|rows| attention::prefetch_first(rows, run.now));
        });
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        if !F::is_chunked(self.d) {
            return attention::widened_scores(self, queries, run, out, stride);
        }
        if F::WHOLE_RUNS {
            return self.with_all(|rows| rows.scores(queries, run, out, stride));
        }
        let ((shared, own), (next_shared, next)) = (self.split(run.now), self.split(run.next));
        let at = shared.len();
        if let Some((rows, _)) = &self.shared {
            let run = Run {
                now: shared,
                next: next_shared,
            };
            rows.scores(queries, &run, out, stride);
        }
        if own.is_empty() {
            return;
        }
        self.own(&Run { now: own, next }, |run| {
            self.with_own(|rows| rows.scores(queries, run, &mut out[at..], stride));
        });
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        if !F::is_chunked(self.d) {
            return attention::widened_add(self, weights, stride, run, sums);
        }
        if F::WHOLE_RUNS {
            return self.with_all(|rows| rows.add(weights, stride, run, sums));
        }
        let ((shared, own), (next_shared, next)) = (self.split(run.now), self.split(run.next));
        let at = shared.len();
        if let Some((rows, _)) = &self.shared {
            let run = Run {
                now: shared,
                next: next_shared,
            };
            rows.add(weights, stride, &run, sums);
        }
        if own.is_empty() {
            return;
        }
        self.own(&Run { now: own, next }, |run| {
            self.with_own(|rows| rows.add(&weights[at..], stride, run, sums));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compute::products::{TILE, all_products, products};
    use half::bf16;

    /// Every position is visited once and in order; products match f64 within the rounding of d fused sums.
    #[test]
    fn products_are_those_of_the_rows() {
        let value = |i: usize| ((i * 2_654_435_761) % 1000) as f32 * 0.004 - 2.0;
        for (d, r) in [(1, 1), (63, 4), (64, 5), (80, 3), (128, 16)] {
            let n = 2 * TILE + 7;
            let keys = Array2::from_shape_fn((n, d), |(i, c)| bf16::from_f32(value(i * d + c)).to_f32());
            let queries = Array2::from_shape_fn((r, d), |(a, c)| value(a * 131 + c * 7));
            let mut rows = RowStore::<bf16>::new(d, n);
            rows.extend(keys.view());
            let positions: Vec<u32> = (0..n as u32).filter(|p| p % 3 != 1).collect();
            let all = all_products(queries.view(), 0.5, &rows, &positions);
            assert_eq!(all.dim(), (r, positions.len()));
            let mut next = 0;
            products(queries.view(), 0.5, &rows, &positions, |place, products| {
                assert_eq!(place, next);
                assert_eq!(all.column(place).to_vec(), products);
                next += 1;
                let key = keys.row(positions[place] as usize);
                for (query, product) in queries.rows().into_iter().zip(products) {
                    let terms = query
                        .iter()
                        .zip(key)
                        .map(|(q, k)| f64::from(*q) * 0.5 * f64::from(*k));
                    let size: f64 = terms.clone().map(f64::abs).sum();
                    let error = (f64::from(*product) - terms.sum::<f64>()).abs();
                    assert!(
                        error <= (d as f64 + 2.0) * 2f64.powi(-24) * size,
                        "{d} {r} {place}: {error}"
                    );
                }
            });
            assert_eq!(next, positions.len());
        }
    }
}
