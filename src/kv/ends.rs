//! Rows in a format of few bits, except sinks and window, which stay in bf16.

use half::bf16;
use ndarray::{Array2, ArrayView2, Axis};

use super::layout::Layout;
use super::rows::{RowCache, RowStore};
use crate::compute::attention::{AHEAD, CachedRows, GroupQueries, OutputSums, Run};

/// Rows of which the first `sinks` and the last `window` are in bf16; the others, `packed`, are in another format.
///
/// # Numerics
/// A row is rounded to bf16 when it is appended, and packed from bf16 when it leaves the window, so that nothing depends
/// on how many rows are appended at a time.
pub(super) struct WithEnds {
    d: usize,
    most_sinks: usize,
    window: usize,
    sinks: RowStore<bf16>,
    packed: Box<dyn RowCache>,
    /// The last rows, after some that are packed already.
    recent: RowStore<bf16>,
    /// How many of the first rows of `recent` are packed already.
    stale: usize,
}

/// Some of the rows of [`WithEnds`], and the positions that they cover.
struct Segment<'a> {
    rows: &'a dyn CachedRows,
    /// The position of row 0 of `rows`; in `recent`, that row may be packed already.
    first: usize,
    end: usize,
}

impl WithEnds {
    /// Makes an empty cache of rows of d channels; `packed`, which is empty too, is for the rows between sinks and window.
    pub fn new(d: usize, layout: Layout, packed: Box<dyn RowCache>) -> Self {
        let Layout { sinks, window, .. } = layout;
        Self {
            d,
            most_sinks: sinks,
            window,
            // Sinks and window may be larger than any context.
            sinks: RowStore::new(d, 0),
            packed,
            recent: RowStore::new(d, 0),
            stale: 0,
        }
    }

    /// Returns the rows in the order of their positions.
    fn segments(&self) -> [Segment<'_>; 3] {
        let (sinks, packed) = (self.sinks.len(), self.sinks.len() + self.packed.len());
        [
            Segment {
                rows: &self.sinks,
                first: 0,
                end: sinks,
            },
            Segment {
                rows: &*self.packed,
                first: sinks,
                end: packed,
            },
            Segment {
                rows: &self.recent,
                first: packed - self.stale,
                end: usize::MAX,
            },
        ]
    }

    /// Packs the first `n` rows of `recent` that are not packed yet.
    fn leave(&mut self, n: usize) {
        if n == 0 {
            return;
        }
        let mut rows = Array2::zeros((n, self.d));
        let mut scratch = vec![0.0; self.d];
        for (i, mut to) in rows.rows_mut().into_iter().enumerate() {
            let row = self.recent.row(self.stale + i, &mut scratch);
            to.iter_mut().zip(row).for_each(|(to, x)| *to = *x);
        }
        self.packed.extend(rows.view());
        self.stale += n;
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

    /// Calls `each` for every segment that has rows of a run: with its rows, its part of the run (positions relative to row 0),
    /// and where that part begins in the run.
    fn split(&self, run: &Run, mut each: impl FnMut(&dyn CachedRows, &Run, usize)) {
        let mut at = 0;
        for Segment { rows, first, end } in self.segments() {
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
}

impl RowCache for WithEnds {
    fn extend(&mut self, rows: ArrayView2<f32>) {
        let (sinks, rest) = rows.split_at(Axis(0), rows.nrows().min(self.most_sinks - self.sinks.len()));
        self.sinks.extend(sinks);
        let through = rest.nrows().saturating_sub(self.window);
        if through > 0 {
            // Rows that leave the window at once do not pass through it.
            let (through, last) = rest.split_at(Axis(0), through);
            self.leave(self.fresh());
            self.keep(0);
            self.packed
                .extend(through.mapv(|x| bf16::from_f32(x).to_f32()).view());
            return self.recent.extend(last);
        }
        self.recent.extend(rest);
        self.leave(self.fresh().saturating_sub(self.window));
        if self.stale >= self.window {
            self.keep(self.fresh());
        }
    }

    fn fork(&mut self) -> Box<dyn RowCache> {
        Box::new(Self {
            sinks: self.sinks.clone(),
            packed: self.packed.fork(),
            recent: self.recent.clone(),
            ..*self
        })
    }

    fn copy(&self) -> Box<dyn RowCache> {
        Box::new(Self {
            sinks: self.sinks.clone(),
            packed: self.packed.copy(),
            recent: self.recent.clone(),
            ..*self
        })
    }

    fn len(&self) -> usize {
        self.sinks.len() + self.packed.len() + self.fresh()
    }

    fn bytes(&self) -> usize {
        self.sinks.bytes() + self.packed.bytes() + self.recent.bytes()
    }
}

impl CachedRows for WithEnds {
    fn dim(&self) -> usize {
        self.d
    }

    fn row<'a>(&'a self, position: usize, scratch: &'a mut [f32]) -> &'a [f32] {
        let [sinks, packed, recent] = self.segments();
        let Segment { rows, first, .. } = [sinks, packed]
            .into_iter()
            .find(|segment| position < segment.end)
            .unwrap_or(recent);
        rows.row(position - first, scratch)
    }

    fn prefetch(&self, positions: &[u32]) {
        let positions = &positions[..positions.len().min(AHEAD)];
        self.split(&Run::new(positions, positions.len()), |rows, run, _| {
            rows.prefetch(run.now)
        });
    }

    fn scores(&self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        self.split(run, |rows, run, at| {
            rows.scores(queries, run, &mut out[at..], stride)
        });
    }

    fn add(&self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        self.split(run, |rows, run, at| rows.add(&weights[at..], stride, run, sums));
    }

    fn add_piece(&self, weights: &[f32], stride: usize, positions: &[u32], total: &mut Array2<f64>) {
        self.split(&Run::new(positions, positions.len()), |rows, run, at| {
            rows.add_piece(&weights[at..], stride, run.now, total);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::Center;
    use super::super::map::RowMap;
    use super::super::rows::Part;
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
