//! The choice of a step: exact scores of sign patterns, and a scan of rounded ones that leaves few to take.
//!
//! Every score is a sum of one entry per group of channels. With the entries rounded to u8 at one common
//! step, a scan ([`crate::compute::signs`]) gives each key a whole number, and two keys whose numbers
//! differ by more than the [`Rounded::gap`] are in the order of their exact scores. The budget's last
//! number therefore decides all keys but those close to it, and these alone are scored exactly.

use std::ops::RangeInclusive;

use ndarray::ArrayView2;

use super::{GROUP, PATTERNS};
use crate::compute::signs::{self, MOST_GROUPS};
use crate::method::Ranking;

/// Patterns of a byte of signs.
const BYTES: usize = PATTERNS * PATTERNS;
/// Fewer candidates are scored one by one.
const LEAST: usize = 2048;
/// Rows of a scan that are judged together; their sums stay in the cache.
const CHUNK: usize = 4096;
/// One chunk in so many, in parts of [`SAMPLED`] rows, tells what the budget's last number will be about.
const SAMPLE: usize = 16;
/// Rows of a part of the sample.
const SAMPLED: usize = 256;
/// Rows whose exact scores are summed side by side.
const AT_ONCE: usize = 8;
/// Largest relative error of one rounding in f32.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// What the group's mean query gives every pattern.
///
/// # Source
/// Eq. 8.
pub(super) struct Scores {
    /// Per group of channels, `[d/4,16]`.
    groups: Vec<[f32; PATTERNS]>,
    /// Per byte of signs, `[d/8,256]`: the sum of its two groups.
    bytes: Vec<f32>,
}

impl Scores {
    /// The scores for q_rope `[r,d]`, the group's queries, with centroids `[d/4,16,4]`.
    ///
    /// # Numerics
    /// f32.
    pub fn new(q_rope: ArrayView2<f32>, centroids: &[f32]) -> Self {
        let (r, d) = q_rope.dim();
        let query: Vec<f32> = (0..d).map(|j| q_rope.column(j).sum() / r as f32).collect();
        let of = |(query, centroids): (&[f32], &[f32])| {
            std::array::from_fn(|p| {
                let centroid = &centroids[p * GROUP..(p + 1) * GROUP];
                query.iter().zip(centroid).map(|(q, c)| q * c).sum()
            })
        };
        let queries = query.chunks_exact(GROUP);
        let groups: Vec<[f32; PATTERNS]> = queries
            .zip(centroids.chunks_exact(PATTERNS * GROUP))
            .map(of)
            .collect();
        let mut bytes = vec![0.0f32; d.div_ceil(2 * GROUP) * BYTES];
        for (pair, table) in groups.chunks(2).zip(bytes.chunks_exact_mut(BYTES)) {
            for (byte, score) in table.iter_mut().enumerate() {
                *score += pair[0][byte % PATTERNS];
                if let Some(high) = pair.get(1) {
                    *score += high[byte / PATTERNS];
                }
            }
        }
        Self { groups, bytes }
    }

    /// Bytes of a row of signs.
    fn width(&self) -> usize {
        self.bytes.len() / BYTES
    }

    /// The score of one row of signs.
    ///
    /// # Numerics
    /// f32, the bytes in order.
    fn of(&self, row: &[u8]) -> f32 {
        let cells = row.iter().zip(self.bytes.chunks_exact(BYTES));
        cells.map(|(byte, table)| table[usize::from(*byte)]).sum()
    }

    /// The scores of the rows at `places`.
    fn of_all(&self, rows: &[u8], places: &[u32]) -> Vec<(f32, u32)> {
        let mut out = Vec::with_capacity(places.len());
        let (blocks, rest) = places.as_chunks::<AT_ONCE>();
        for places in blocks {
            // The sums of some rows side by side, each in its order.
            let of: [&[u8]; AT_ONCE] = places.map(|p| self.row(rows, p));
            let mut sums = [-0.0f32; AT_ONCE];
            for (b, table) in self.bytes.as_chunks::<BYTES>().0.iter().enumerate() {
                for (sum, row) in sums.iter_mut().zip(&of) {
                    *sum += table[usize::from(row[b])];
                }
            }
            out.extend(sums.into_iter().zip(places.iter().copied()));
        }
        out.extend(rest.iter().map(|p| (self.of(self.row(rows, *p)), *p)));
        out
    }

    /// The row `p` of `rows`.
    fn row<'a>(&self, rows: &'a [u8], p: u32) -> &'a [u8] {
        &rows[p as usize * self.width()..(p as usize + 1) * self.width()]
    }

    /// Chooses `budget` of the rows of signs `rows` `[n,d/8]`, fewer than n: the best of `full` (ascending)
    /// first, on at most two fifths of the budget (64 of 160 in the paper's LongBench runs), then all others by
    /// their scores, the lower on ties. Ascending.
    pub fn choose(&self, rows: &[u8], full: Vec<u32>, budget: usize, how: Ranking) -> Vec<u32> {
        let most = budget.saturating_mul(2) / 5;
        let mut fixed = full;
        if fixed.len() > most {
            let mut scored = fixed
                .into_iter()
                .map(|p| (self.of(self.row(rows, p)), p))
                .collect();
            best(&mut scored, most);
            fixed = scored.into_iter().map(|(_, p)| p).collect();
            fixed.sort_unstable();
        }
        let need = budget - fixed.len();
        let scanned = match (need, how) {
            (0, _) => Some(Vec::new()),
            (_, Ranking::Fast) => self.scan(rows, &fixed, need),
            (_, Ranking::Plain) => None,
        };
        let others = scanned.unwrap_or_else(|| self.plain(rows, &fixed, need));
        // Two ascending runs.
        fixed.extend(others);
        fixed.sort();
        fixed
    }

    /// The best `need` rows that are not `fixed` (ascending), by the scores of all.
    fn plain(&self, rows: &[u8], fixed: &[u32], need: usize) -> Vec<u32> {
        let scores = rows
            .chunks_exact(self.width())
            .zip(0..)
            .map(|(row, p)| (self.of(row), p));
        let mut scored: Vec<(f32, u32)> = scores.collect();
        let mut fixed = fixed.iter().copied().peekable();
        scored.retain(|(_, p)| fixed.next_if_eq(p).is_none());
        best(&mut scored, need);
        let mut out: Vec<u32> = scored.into_iter().map(|(_, p)| p).collect();
        out.sort_unstable();
        out
    }

    /// The same by the rounded scores; none for few rows, and where rounding would leave nothing.
    fn scan(&self, rows: &[u8], fixed: &[u32], need: usize) -> Option<Vec<u32>> {
        let n = rows.len() / self.width().max(1);
        if n < LEAST {
            return None;
        }
        let rounded = Rounded::of(&self.groups)?;
        let limit = rounded.likely_limit(rows, self.width(), need + fixed.len());
        let mut kept = rounded.at_least(rows, self.width(), limit, fixed);
        let mut last = last_sum(&kept, need);
        if limit > 0 && last.is_none_or(|last| last < u32::from(limit) + rounded.gap) {
            kept = rounded.at_least(rows, self.width(), 0, fixed);
            last = last_sum(&kept, need);
        }
        let last = last?;
        // Above: fewer than `need` are as good. Below: `need` are better.
        let close = last.saturating_sub(rounded.gap)..=last.saturating_add(rounded.gap);
        let (above, between) = split(&kept, close);
        let mut scored = self.of_all(rows, &between);
        best(&mut scored, need - above.len());
        let mut out: Vec<u32> = scored.into_iter().map(|(_, p)| p).collect();
        out.sort_unstable();
        out.extend(above);
        // Two ascending runs.
        out.sort();
        Some(out)
    }
}

/// Leaves the `count` best of what is scored, in any order; the lower position on ties.
fn best(scored: &mut Vec<(f32, u32)>, count: usize) {
    if count < scored.len() {
        scored.select_nth_unstable_by(count, |a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        scored.truncate(count);
    }
}

/// The positions whose sums are above `close`, and those whose sums are within.
fn split(kept: &[(u32, u32)], close: RangeInclusive<u32>) -> (Vec<u32>, Vec<u32>) {
    let (mut above, mut within) = (vec![0; kept.len()], vec![0; kept.len()]);
    let (mut a, mut w) = (0, 0);
    // No branch: which way a sum goes is anybody's guess.
    for (p, sum) in kept {
        (above[a], within[w]) = (*p, *p);
        a += usize::from(sum > close.end());
        w += usize::from(close.contains(sum));
    }
    above.truncate(a);
    within.truncate(w);
    (above, within)
}

/// The largest sum that at least `need` of the kept ones have.
fn last_sum(kept: &[(u32, u32)], need: usize) -> Option<u32> {
    let most = kept.iter().map(|(_, sum)| *sum).max()?;
    let mut counts = vec![0usize; most as usize + 1];
    kept.iter().for_each(|(_, sum)| counts[*sum as usize] += 1);
    from_the_top(&counts, need).map(|sum| sum as u32)
}

/// The largest index from which on the counts add up to at least `need`.
fn from_the_top(counts: &[usize], need: usize) -> Option<usize> {
    let mut seen = 0;
    counts.iter().rposition(|count| {
        seen += count;
        seen >= need
    })
}

/// The scores of patterns, rounded.
struct Rounded {
    tables: signs::Tables,
    /// Two keys whose sums differ by more are in the order of their scores.
    gap: u32,
    /// Most that a sum can be.
    most: usize,
}

impl Rounded {
    /// Rounds scores `[groups,16]`; none where some are not finite or all of a group are equal in every group,
    /// or where sums could leave 16 bits.
    ///
    /// # Numerics
    /// An entry x of a group with least entry m is `m + step q + e`, with one step for all groups, so a sum of
    /// entries is `sum m + step sum q + sum e`, where the sum of the e is between those of the least and of the
    /// largest e of every group. In f32 a score takes at most one addition per byte to each of its entries: it
    /// is within `w u / (1 - w u)` of that sum, times the sum of the largest magnitudes (u = 2^-24). Two sums of
    /// q that differ by more than the two ranges, in steps, therefore tell the order of the scores.
    fn of(groups: &[[f32; PATTERNS]]) -> Option<Self> {
        let wide = |table: &[f32; PATTERNS]| table.map(f64::from);
        let least = |table: &[f64; PATTERNS]| table.iter().copied().fold(f64::INFINITY, f64::min);
        let largest = |table: &[f64; PATTERNS]| table.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let finite = groups.iter().flatten().all(|x| x.is_finite());
        let wide: Vec<[f64; PATTERNS]> = groups.iter().map(wide).collect();
        let ranges = wide.iter().map(|table| largest(table) - least(table));
        let step = ranges.fold(0.0, f64::max) / 255.0;
        let magnitude: f64 = wide.iter().map(|table| largest(table).max(-least(table))).sum();
        if !finite || step <= 0.0 || magnitude > f64::from(f32::MAX) / 4.0 || groups.len() > MOST_GROUPS {
            return None;
        }
        let mut errors = 0.0;
        let tables: Vec<[u8; PATTERNS]> = wide
            .iter()
            .map(|table| {
                let from = least(table);
                let rounded = table.map(|x| ((x - from) / step).round().clamp(0.0, 255.0));
                let error: [f64; PATTERNS] = std::array::from_fn(|p| table[p] - from - step * rounded[p]);
                errors += largest(&error) - least(&error);
                rounded.map(|q| q as u8)
            })
            .collect();
        let w = groups.len().div_ceil(2) as f64 + 1.0;
        // The last term is for what is computed here in f64: a few of its roundings per entry.
        let roundings = 2.0 * (w * UNIT / (1.0 - w * UNIT)) + 1e-12;
        let most = tables
            .iter()
            .map(|table| usize::from(table.iter().copied().max().unwrap_or(0)));
        Some(Self {
            gap: ((errors + roundings * magnitude) / step).ceil().min(65_535.0) as u32,
            most: most.sum(),
            tables: signs::Tables::new(&tables),
        })
    }

    /// A limit that most likely leaves a little more than what the `need` best of the rows could be: from a
    /// sample, four deviations below what it says.
    fn likely_limit(&self, rows: &[u8], width: usize, need: usize) -> u16 {
        let mut counts = vec![0usize; self.most + 1];
        let mut sums = [0; SAMPLED];
        let mut seen = 0;
        for rows in rows.chunks(SAMPLE * SAMPLED * width) {
            let rows = &rows[..rows.len().min(SAMPLED * width)];
            let sums = &mut sums[..rows.len() / width];
            self.tables.sums(rows, sums);
            sums.iter().for_each(|sum| counts[usize::from(*sum)] += 1);
            seen += sums.len();
        }
        let expected = need as f64 * seen as f64 / (rows.len() / width) as f64;
        let wanted = (expected + 4.0 * expected.sqrt()) as usize + 4;
        let last = from_the_top(&counts, wanted).unwrap_or(0);
        u16::try_from(last)
            .unwrap_or(0)
            .saturating_sub(self.gap.min(65_535) as u16)
    }

    /// The rows whose sums are at least `limit` and that are not `fixed` (ascending): place and sum, by
    /// ascending place.
    fn at_least(&self, rows: &[u8], width: usize, limit: u16, fixed: &[u32]) -> Vec<(u32, u32)> {
        let mut sums = [0; CHUNK];
        let (mut found, mut out) = (Vec::new(), Vec::new());
        let mut fixed = fixed.iter().copied().peekable();
        for (chunk, rows) in rows.chunks(CHUNK * width).enumerate() {
            let sums = &mut sums[..rows.len() / width];
            self.tables.sums(rows, sums);
            signs::at_least(sums, limit, &mut found);
            for key in &found {
                let place = (chunk * CHUNK) as u32 + (key & 0xffff);
                while fixed.next_if(|p| *p < place).is_some() {}
                if fixed.peek() != Some(&place) {
                    out.push((place, key >> 16));
                }
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::testing::values;

    fn bytes(n: usize, seed: u32) -> Vec<u8> {
        values(n, seed)
            .into_iter()
            .map(|x| (x * 128.0) as i8 as u8)
            .collect()
    }

    fn scores(d: usize, r: usize, seed: u32, edit: impl Fn(&mut Vec<f32>, &mut Vec<f32>)) -> Scores {
        let (mut queries, mut centroids) = (values(r * d, seed), values(d * PATTERNS, seed + 1));
        edit(&mut queries, &mut centroids);
        let queries = Array2::from_shape_vec((r, d), queries).unwrap();
        Scores::new(queries.view(), &centroids)
    }

    /// Every row ranked by its score, those of `full` first.
    fn ranked(scores: &Scores, rows: &[u8], full: &[u32], budget: usize) -> Vec<u32> {
        let n = (rows.len() / scores.width()) as u32;
        let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let scored = |p: u32| (scores.of(scores.row(rows, p)), p);
        let mut first: Vec<(f32, u32)> = full.iter().map(|p| scored(*p)).collect();
        first.sort_by(order);
        first.truncate(budget * 2 / 5);
        let mut out: Vec<u32> = first.iter().map(|(_, p)| *p).collect();
        let mut others: Vec<(f32, u32)> = (0..n).filter(|p| !out.contains(p)).map(scored).collect();
        others.sort_by(order);
        out.extend(others.iter().map(|(_, p)| *p));
        out.truncate(budget);
        out.sort();
        out
    }

    fn check(scores: &Scores, rows: &[u8], scans: bool) {
        let n = rows.len() / scores.width();
        let some: Vec<u32> = (0..n as u32).filter(|p| p % 97 == 3).collect();
        let few: Vec<u32> = some.iter().copied().take(5).collect();
        for budget in [0, 1, 2, 7, 63, n / 16, n / 3, n - 1] {
            for full in [&[], &few[..], &some[..]] {
                let expected = ranked(scores, rows, full, budget);
                for how in [Ranking::Fast, Ranking::Plain] {
                    let chosen = scores.choose(rows, full.to_vec(), budget, how);
                    assert_eq!(chosen, expected, "{n} {budget} {how:?}");
                }
            }
        }
        assert_eq!(scores.scan(rows, &[], n / 16).is_some(), scans, "{n}");
    }

    #[test]
    fn choices_are_those_of_a_full_ranking() {
        for (d, r) in [(128, 4), (64, 1), (20, 3), (80, 2), (256, 5), (1028, 1)] {
            for n in [LEAST - 1, LEAST, LEAST + 1, CHUNK, 2 * CHUNK + 77] {
                let scores = scores(d, r, n as u32, |_, _| ());
                check(&scores, &bytes(n * scores.width(), 5), n >= LEAST);
            }
        }
    }

    #[test]
    fn equal_and_nearly_equal_scores() {
        let n = CHUNK + 5;
        // Whole numbers, so that many scores are equal; then all of them.
        let whole = scores(32, 2, 1, |queries, centroids| {
            queries.iter_mut().for_each(|q| *q = (4.0 * *q).round());
            centroids.iter_mut().for_each(|c| *c = c.signum());
        });
        check(&whole, &bytes(n * whole.width(), 2), true);
        let zero = scores(32, 2, 1, |queries, _| queries.fill(0.0));
        check(&zero, &bytes(n * zero.width(), 2), false);
        // One group far larger than all others, which rounding then makes equal.
        let uneven = scores(128, 1, 3, |queries, _| {
            queries[..4].iter_mut().for_each(|q| *q *= 1e4)
        });
        check(&uneven, &bytes(n * uneven.width(), 2), true);
        // Sums of both signs that cancel to less than their rounding.
        let flat = scores(128, 1, 3, |_, centroids| {
            centroids.iter_mut().for_each(|c| *c = 1e3 + *c * 1e-3);
        });
        check(&flat, &bytes(n * flat.width(), 2), true);
    }

    #[test]
    fn what_is_not_finite_is_ranked_as_it_is() {
        let n = CHUNK;
        for (value, scans) in [
            (f32::NAN, false),
            (f32::INFINITY, false),
            (3e38, false),
            (1e-44, true),
        ] {
            let odd = scores(32, 1, 7, |_, centroids| centroids[3] = value);
            check(&odd, &bytes(n * odd.width(), 2), scans);
        }
        let tiny = scores(32, 1, 7, |queries, _| {
            queries.iter_mut().for_each(|q| *q *= 1e-41)
        });
        check(&tiny, &bytes(n * tiny.width(), 2), true);
    }

    #[test]
    fn a_sample_that_misleads_costs_time_only() {
        // The sampled rows are the worst of all, then the best.
        let n = 2 * SAMPLE * SAMPLED;
        let scores = scores(128, 4, 11, |_, _| ());
        let rows = bytes(n * scores.width(), 12);
        let mut order: Vec<&[u8]> = rows.chunks(scores.width()).collect();
        order.sort_by(|a, b| scores.of(a).total_cmp(&scores.of(b)));
        check(&scores, &order.concat(), true);
        order.reverse();
        let rounded = Rounded::of(&scores.groups).unwrap();
        let rows = order.concat();
        let limit = rounded.likely_limit(&rows, scores.width(), n / 16);
        let kept = rounded.at_least(&rows, scores.width(), limit, &[]);
        assert!(kept.len() < n / 16);
        check(&scores, &rows, true);
    }

    #[test]
    fn sums_that_differ_by_more_than_the_gap_tell_the_order() {
        for seed in 0..20 {
            let scores = scores(128, 2, 100 + seed, |queries, _| {
                queries
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, q)| *q *= 1.0 + (i % 7) as f32);
            });
            let rows = bytes(3000 * scores.width(), 200 + seed);
            let rounded = Rounded::of(&scores.groups).unwrap();
            let sums = rounded.at_least(&rows, scores.width(), 0, &[]);
            let mut by_sum: Vec<(u32, f32)> = sums
                .iter()
                .map(|(p, sum)| (*sum, scores.of(scores.row(&rows, *p))))
                .collect();
            by_sum.sort_by_key(|(sum, _)| *sum);
            // The largest score so far, of sums that are lower by more than the gap.
            let (mut behind, mut largest) = (0, f32::NEG_INFINITY);
            for (sum, score) in &by_sum {
                while by_sum[behind].0 + rounded.gap < *sum {
                    largest = largest.max(by_sum[behind].1);
                    behind += 1;
                }
                assert!(*score > largest, "{seed}");
            }
            assert!(behind > 1000 && rounded.gap < 40, "{behind} {}", rounded.gap);
        }
    }
    /// Every entry is rounded as badly as can be: the better row has the lower sum, by nearly the gap.
    #[test]
    fn the_worst_of_roundings_is_within_the_gap() {
        let d = 128;
        let query = Array2::from_shape_fn((1, d), |(_, j)| if j % GROUP == 0 { 1.0 } else { 0.0 });
        let entry = |pattern: usize| {
            [0.0, 255.0, 10.51, 10.49, 11.49]
                .get(pattern)
                .copied()
                .unwrap_or(0.0)
        };
        let centroids: Vec<f32> = (0..d * PATTERNS).map(|i| entry(i / GROUP % PATTERNS)).collect();
        let scores = Scores::new(query.view(), &centroids);
        let mut rows = vec![[0u8; 16]; 3000];
        rows[100] = [0x22; 16];
        rows[200] = [0x33; 16];
        rows[200][0] = 0x34;
        let rows = rows.as_flattened();
        let rounded = Rounded::of(&scores.groups).unwrap();
        let sums = rounded.at_least(rows, scores.width(), 1, &[]);
        assert_eq!(sums, [(100, 32 * 11), (200, 31 * 10 + 11)]);
        assert!(rounded.gap < 34, "{}", rounded.gap);
        assert_eq!(scores.choose(rows, Vec::new(), 1, Ranking::Fast), [200]);
    }
}
