//! Rows in a format of few bits, except sinks and window, which stay in bf16.

use half::bf16;
use ndarray::{Array2, ArrayView2, Axis};

use super::layout::Layout;
use super::rows::{RowCache, RowStore};
use crate::compute::attention::{AHEAD, CachedRows, GroupQueries, OutputSums, Run};

/// The rows of a cache of few bits that stay in bf16: the first `sinks`, and the last `window`. The rows between them are held by
/// another cache, `packed`.
///
/// # Numerics
/// A row is rounded to bf16 when it is appended, and packed from bf16 when it leaves the window, so that nothing depends
/// on how many rows are appended at a time.
#[derive(Clone)]
pub(super) struct Ends {
    d: usize,
    most_sinks: usize,
    window: usize,
    sinks: RowStore<bf16>,
    /// Number of rows that have left the window.
    packed: usize,
    /// The last rows, after some that are packed already.
    recent: RowStore<bf16>,
    /// How many of the first rows of `recent` are packed already.
    stale: usize,
}

/// Some of the rows of a cache with [`Ends`], and the positions that they cover.
struct Segment<'a> {
    rows: &'a dyn CachedRows,
    /// The position of row 0 of `rows`; in `recent`, that row may be packed already.
    first: usize,
    end: usize,
}

impl Ends {
    /// Makes the ends of an empty cache of rows of d channels.
    pub fn new(d: usize, layout: Layout) -> Self {
        let Layout { sinks, window, .. } = layout;
        Self {
            d,
            most_sinks: sinks,
            window,
            // Sinks and window may be larger than any context.
            sinks: RowStore::new(d, 0),
            packed: 0,
            recent: RowStore::new(d, 0),
            stale: 0,
        }
    }

    /// Appends rows, `[m,d]`, and calls `pack` with those that leave the window, in order.
    pub fn extend(&mut self, rows: ArrayView2<f32>, mut pack: impl FnMut(ArrayView2<f32>)) {
        let (sinks, rest) = rows.split_at(Axis(0), rows.nrows().min(self.most_sinks - self.sinks.len()));
        self.sinks.extend(sinks);
        let through = rest.nrows().saturating_sub(self.window);
        if through > 0 {
            // Rows that leave the window at once do not pass through it.
            let (through, last) = rest.split_at(Axis(0), through);
            self.leave(self.fresh(), &mut pack);
            self.keep(0);
            self.packed += through.nrows();
            pack(through.mapv(|x| bf16::from_f32(x).to_f32()).view());
            return self.recent.extend(last);
        }
        self.recent.extend(rest);
        self.leave(self.fresh().saturating_sub(self.window), &mut pack);
        if self.stale >= self.window {
            self.keep(self.fresh());
        }
    }

    /// Returns the number of sinks, which is the position of the first row that is packed.
    pub fn sinks(&self) -> usize {
        self.sinks.len()
    }

    /// Counts all rows, packed ones included.
    pub fn len(&self) -> usize {
        self.sinks.len() + self.packed + self.fresh()
    }

    /// Returns the bytes held.
    pub fn bytes(&self) -> usize {
        self.sinks.bytes() + self.recent.bytes()
    }

    /// Returns the row of a position, `packed` being the cache of the other rows.
    pub fn row<'a>(
        &'a self,
        packed: &'a dyn CachedRows,
        position: usize,
        scratch: &'a mut [f32],
    ) -> &'a [f32] {
        let [sinks, packed, recent] = self.segments(packed);
        let Segment { rows, first, .. } = [sinks, packed]
            .into_iter()
            .find(|segment| position < segment.end)
            .unwrap_or(recent);
        rows.row(position - first, scratch)
    }

    /// Computes [`CachedRows::prefetch`] of all rows.
    pub fn prefetch(&self, packed: &dyn CachedRows, positions: &[u32]) {
        let positions = &positions[..positions.len().min(AHEAD)];
        let run = Run::new(positions, positions.len());
        self.split(packed, &run, |rows, run, _| rows.prefetch(run.now));
    }

    /// Computes [`CachedRows::scores`] of all rows.
    pub fn scores(
        &self,
        packed: &dyn CachedRows,
        queries: &GroupQueries,
        run: &Run,
        out: &mut [f32],
        stride: usize,
    ) {
        self.split(packed, run, |rows, run, at| {
            rows.scores(queries, run, &mut out[at..], stride)
        });
    }

    /// Computes [`CachedRows::add`] of all rows.
    pub fn add(
        &self,
        packed: &dyn CachedRows,
        weights: &[f32],
        stride: usize,
        run: &Run,
        sums: &mut OutputSums,
    ) {
        self.split(packed, run, |rows, run, at| {
            rows.add(&weights[at..], stride, run, sums)
        });
    }

    /// Computes [`CachedRows::add_piece`] of all rows.
    pub fn add_piece(
        &self,
        packed: &dyn CachedRows,
        weights: &[f32],
        stride: usize,
        positions: &[u32],
        total: &mut Array2<f64>,
    ) {
        let run = Run::new(positions, positions.len());
        self.split(packed, &run, |rows, run, at| {
            rows.add_piece(&weights[at..], stride, run.now, total);
        });
    }

    /// Calls `each` for every segment that has rows of a run: with its rows, its part of the run (positions relative to row 0),
    /// and where that part begins in the run. `packed` is the cache of the other rows.
    fn split(&self, packed: &dyn CachedRows, run: &Run, mut each: impl FnMut(&dyn CachedRows, &Run, usize)) {
        let mut at = 0;
        for Segment { rows, first, end } in self.segments(packed) {
            let within = |positions: &[u32]| positions.partition_point(|p| (*p as usize) < end);
            let now = &run.now[at..at + within(&run.now[at..])];
            if now.is_empty() {
                continue;
            }
            let own =
                |positions: &[u32]| -> Vec<u32> { positions.iter().map(|p| p - first as u32).collect() };
            let next = &run.next[..within(run.next).min(AHEAD)];
            let next = &next[next.partition_point(|p| (*p as usize) < first)..];
            each(
                rows,
                &Run {
                    now: &own(now),
                    next: &own(next),
                },
                at,
            );
            at += now.len();
        }
    }

    /// Returns the rows in the order of their positions.
    fn segments<'a>(&'a self, packed: &'a dyn CachedRows) -> [Segment<'a>; 3] {
        let (sinks, end) = (self.sinks.len(), self.sinks.len() + self.packed);
        [
            Segment {
                rows: &self.sinks,
                first: 0,
                end: sinks,
            },
            Segment {
                rows: packed,
                first: sinks,
                end,
            },
            Segment {
                rows: &self.recent,
                first: end - self.stale,
                end: usize::MAX,
            },
        ]
    }

    /// Packs the first `n` rows of `recent` that are not packed yet.
    fn leave(&mut self, n: usize, pack: &mut impl FnMut(ArrayView2<f32>)) {
        if n == 0 {
            return;
        }
        let mut rows = Array2::zeros((n, self.d));
        let mut scratch = vec![0.0; self.d];
        for (i, mut to) in rows.rows_mut().into_iter().enumerate() {
            let row = self.recent.row(self.stale + i, &mut scratch);
            to.iter_mut().zip(row).for_each(|(to, x)| *to = *x);
        }
        self.stale += n;
        self.packed += n;
        pack(rows.view());
    }

    /// Counts the rows that are not packed, without the sinks.
    fn fresh(&self) -> usize {
        self.recent.len() - self.stale
    }

    /// Drops all but the last `n` rows of `recent`.
    fn keep(&mut self, n: usize) {
        self.recent = self.recent.last(n, 2 * self.window);
        self.stale = 0;
    }
}

/// Rows of which sinks and window are in bf16, and the others, `packed`, in another format.
pub(super) struct WithEnds {
    ends: Ends,
    packed: Box<dyn RowCache>,
}

impl WithEnds {
    /// Makes an empty cache of rows of d channels; `packed`, which is empty too, is for the rows between sinks and window.
    pub fn new(d: usize, layout: Layout, packed: Box<dyn RowCache>) -> Self {
        Self {
            ends: Ends::new(d, layout),
            packed,
        }
    }
}

impl RowCache for WithEnds {
    fn extend(&mut self, rows: ArrayView2<f32>) {
        self.ends.extend(rows, |rows| self.packed.extend(rows));
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        Box::new(Self {
            ends: self.ends.clone(),
            packed: self.packed.fork(),
        })
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(Self {
            ends: self.ends.clone(),
            packed: self.packed.copy(),
        })
    }

    fn len(&self) -> usize {
        self.ends.len()
    }

    fn bytes(&self) -> usize {
        self.ends.bytes() + self.packed.bytes()
    }
}

impl CachedRows for WithEnds {
    fn dim(&self) -> usize {
        self.ends.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        self.ends.row(&*self.packed, position, scratch)
    }

    fn prefetch(&self, positions: &[u32]) {
        self.ends.prefetch(&*self.packed, positions);
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        self.ends.scores(&*self.packed, queries, run, out, stride);
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        self.ends.add(&*self.packed, weights, stride, run, sums);
    }

    fn add_piece(&self, weights: &[f32], stride: usize, positions: &[u32], total: &mut Array2<f64>) {
        self.ends
            .add_piece(&*self.packed, weights, stride, positions, total);
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Center;
    use super::super::map::RowMap;
    use super::super::qkv::Part;
    use super::*;
    use crate::kv::RowFormat;
    use crate::testing::{numbers, values};

    /// However many rows are appended at a time, sinks and window are in bf16, and the others are packed from bf16.
    #[test]
    fn rows_are_packed_when_they_leave_the_window() {
        let (d, n) = (64, 400);
        let rows = Array2::from_shape_vec((n, d), values(n * d, 3)).unwrap();
        let rounded = rows.mapv(|x| bf16::from_f32(x).to_f32());
        let format = RowFormat::INT4;
        // A cache without ends: what is packed, row by row.
        let layout = |sinks, window| Layout {
            sinks,
            window,
            ..Center::Median.into()
        };
        let mut packed = format.cache(Part::Keys, d, n, layout(0, 0), &RowMap::Hadamard);
        packed.extend(rounded.view());
        let mut number = numbers(5);
        for (sinks, window) in [(4, 64), (0, 0), (3, 0), (0, 1), (1, 7), (500, 4), (4, 500)] {
            for most in [1, 9, 90, n] {
                let mut cache = format.cache(Part::Keys, d, 0, layout(sinks, window), &RowMap::Hadamard);
                while cache.len() < n {
                    let first = cache.len();
                    let more = (1 + number() as usize % most).min(n - first);
                    cache.extend(rows.slice(ndarray::s![first..first + more, ..]));
                    assert_eq!(cache.len(), first + more);
                    if number().is_multiple_of(8) {
                        cache = cache.fork();
                    }
                    let (len, mut own, mut other) = (cache.len(), vec![0.0; d], vec![0.0; d]);
                    for p in [0, sinks, len / 2, len.saturating_sub(window + 1), len - 1] {
                        let p = p.min(len - 1);
                        let row = cache.row(p, &mut own);
                        if p < sinks || p + window >= len {
                            assert_eq!(
                                row,
                                rounded.row(p).as_slice().unwrap(),
                                "{sinks} {window} {most}: {p}"
                            );
                        } else {
                            assert_eq!(row, packed.row(p, &mut other), "{sinks} {window} {most}: {p}");
                        }
                    }
                }
            }
        }
    }
}
