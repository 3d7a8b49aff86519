//! The choice of a step. A scan of rounded scores decides most keys, and exact scores decide the others.
//!
//! A key's score is a sum of one table entry per group of channels. With all entries rounded to u8 at one common step,
//! a scan ([`rounded`]) gives each key an integer. If the integers of two keys differ by more than [`Rounded::gap`],
//! they are in the order of the keys' exact scores. The integer of the last key within the budget therefore decides all
//! keys whose integers are not close to it; only the close ones are scored exactly.

mod rounded;

use std::ops::RangeInclusive;

use ndarray::ArrayView2;

use super::groups::{GROUP, PATTERNS};
use crate::method::Ranking;
use crate::method::best::{best_positions, by_score};
use crate::prefetch::prefetch;
use rounded::Rounded;

/// Number of values of a byte of signs, that is, of two patterns.
const BYTES: usize = PATTERNS * PATTERNS;
/// With fewer candidates than this, all are scored exactly.
const LEAST: usize = 2048;
/// One full-precision token is chosen first per this many positions of the budget: the paper's 64 of 7.5% of 32K
/// positions.
const PER_FULL: usize = 38;
/// Rows whose exact scores are summed together.
const AT_ONCE: usize = 4;

/// The scores of all sign patterns under the mean query of the group.
///
/// # Source
/// Eq. 8.
pub(super) struct PatternScores {
    /// The score of each pattern of a group of channels, `[d/4,16]`.
    groups: Vec<[f32; PATTERNS]>,
    /// The score of each value of a byte of signs, `[d/8,256]`: the sum of the scores of its two patterns.
    bytes: Vec<f32>,
}

impl PatternScores {
    /// Computes the scores of the centroids `[d/4,16,4]` for the group's queries, q_rope `[r,d]`.
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
        let centroids = centroids.chunks_exact(PATTERNS * GROUP);
        let groups = query.chunks_exact(GROUP).zip(centroids).map(of);
        let groups: Vec<[f32; PATTERNS]> = groups.collect();
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

    /// Returns the number of bytes of a row of signs.
    fn width(&self) -> usize {
        self.bytes.len() / BYTES
    }

    /// Returns the score of one row of signs.
    ///
    /// # Numerics
    /// f32, summed byte by byte in order.
    fn score(&self, row: &[u8]) -> f32 {
        let cells = row.iter().zip(self.bytes.chunks_exact(BYTES));
        cells.map(|(byte, table)| table[usize::from(*byte)]).sum()
    }

    /// Returns the scores of the rows at `places`, with their places.
    fn of_all(&self, rows: &[u8], places: &[u32]) -> Vec<(f32, u32)> {
        let mut out = Vec::with_capacity(places.len());
        let (blocks, rest) = places.as_chunks::<AT_ONCE>();
        let mut coming = places.iter().skip(2 * AT_ONCE);
        for places in blocks {
            for p in coming.by_ref().take(AT_ONCE) {
                prefetch(self.row(rows, *p));
            }
            // Several rows are summed together, each in its own order.
            let [a, b, c, d] = places.map(|p| self.row(rows, p));
            let cells = a.iter().zip(b).zip(c.iter().zip(d));
            let mut sums = [-0.0f32; AT_ONCE];
            for (table, ((a, b), (c, d))) in self.bytes.as_chunks::<BYTES>().0.iter().zip(cells) {
                for (sum, byte) in sums.iter_mut().zip([a, b, c, d]) {
                    *sum += table[usize::from(*byte)];
                }
            }
            out.extend(sums.into_iter().zip(places.iter().copied()));
        }
        out.extend(rest.iter().map(|p| (self.score(self.row(rows, *p)), *p)));
        out
    }

    /// Returns the row `p` of `rows`.
    fn row<'a>(&self, rows: &'a [u8], p: u32) -> &'a [u8] {
        &rows[p as usize * self.width()..(p as usize + 1) * self.width()]
    }

    /// Chooses `budget` of the rows of signs `rows` `[n,d/8]` (fewer than n) and returns them in ascending order. The
    /// best of `full` (ascending) come first, one for every [`PER_FULL`] positions of the budget, then the best of the
    /// other rows. The lower row wins a tie.
    pub fn choose(&self, rows: &[u8], full: Vec<u32>, budget: usize, how: Ranking) -> Vec<u32> {
        let most = budget / PER_FULL;
        let mut fixed = full;
        if fixed.len() > most {
            let scored = fixed.into_iter().map(|p| (self.score(self.row(rows, p)), p));
            fixed = best_positions(scored.collect(), most);
        }
        let need = budget - fixed.len();
        let scanned = match (need, how) {
            (0, _) => Some(Vec::new()),
            (_, Ranking::Fast) => self.scan(rows, &fixed, need),
            (_, Ranking::Plain) => None,
        };
        let others = scanned.unwrap_or_else(|| self.plain(rows, &fixed, need));
        if fixed.is_empty() {
            return others;
        }
        // The sort is stable, and detects the two ascending runs.
        fixed.extend(others);
        fixed.sort();
        fixed
    }

    /// Returns the best `count` of the rows at `places`, ascending. The lower row wins a tie.
    pub fn best(&self, rows: &[u8], places: &[u32], count: usize) -> Vec<u32> {
        best_positions(self.of_all(rows, places), count)
    }

    /// Chooses the best `need` rows that are not in `fixed` (ascending), by the exact scores of all rows.
    fn plain(&self, rows: &[u8], fixed: &[u32], need: usize) -> Vec<u32> {
        let places = rows.chunks_exact(self.width()).zip(0..);
        let mut scored: Vec<(f32, u32)> = places.map(|(row, p)| (self.score(row), p)).collect();
        let mut fixed = fixed.iter().copied().peekable();
        scored.retain(|(_, p)| fixed.next_if_eq(p).is_none());
        best_positions(scored, need)
    }

    /// Chooses the same rows as [`Self::plain`] by rounded scores; `None` if there are few rows or the scores cannot be
    /// rounded.
    fn scan(&self, rows: &[u8], fixed: &[u32], need: usize) -> Option<Vec<u32>> {
        let n = rows.len() / self.width().max(1);
        if n < LEAST {
            return None;
        }
        let rounded = Rounded::from_groups(&self.groups)?;
        let limit = rounded.likely_limit(rows, self.width(), need + fixed.len());
        let mut kept = rounded.at_least(rows, self.width(), limit, fixed);
        let mut last = last_sum(&kept, need);
        if limit > 0 && last.is_none_or(|last| last < u32::from(limit) + rounded.gap) {
            kept = rounded.at_least(rows, self.width(), 0, fixed);
            last = last_sum(&kept, need);
        }
        let last = last?;
        // For a row above this range, fewer than `need` rows are as good, so it is chosen. For a row below it, `need`
        // rows are better, so it is not.
        let close = last.saturating_sub(rounded.gap)..=last.saturating_add(rounded.gap);
        let (above, within) = part(&kept, &close);
        let scored = self.of_all(rows, &within);
        let worst = *scored
            .clone()
            .select_nth_unstable_by(need - above - 1, by_score)
            .1;
        let mut chosen: Vec<bool> = scored.iter().map(|s| by_score(s, &worst).is_le()).collect();
        // A sentinel, read for the rows after the last row within the range.
        chosen.push(false);
        let mut out = vec![0; kept.len()];
        let (mut len, mut at) = (0, 0);
        for (p, sum) in &kept {
            let within = close.contains(sum);
            out[len] = *p;
            len += usize::from((sum > close.end()) | (within & chosen[at]));
            at += usize::from(within);
        }
        out.truncate(len);
        Some(out)
    }
}

/// Returns the bytes of the scores of `n` candidates that a choice keeps: a scan keeps none but those of the best.
pub(super) fn scratch_bytes(n: usize, how: Ranking) -> usize {
    if how == Ranking::Plain || n < LEAST {
        n * size_of::<(f32, u32)>()
    } else {
        0
    }
}

/// Returns the number of sums above `close`, and the positions of the sums within `close`.
fn part(kept: &[(u32, u32)], close: &RangeInclusive<u32>) -> (usize, Vec<u32>) {
    let mut within = vec![0; kept.len()];
    let (mut above, mut len) = (0, 0);
    // Written without branches, which would be mispredicted.
    for (p, sum) in kept {
        within[len] = *p;
        above += usize::from(sum > close.end());
        len += usize::from(close.contains(sum));
    }
    within.truncate(len);
    (above, within)
}

/// Returns the largest sum that at least `need` of the kept rows reach or exceed.
fn last_sum(kept: &[(u32, u32)], need: usize) -> Option<u32> {
    let most = kept.iter().map(|(_, sum)| *sum).max()?;
    let mut counts = vec![0usize; most as usize + 1];
    kept.iter().for_each(|(_, sum)| counts[*sum as usize] += 1);
    rounded::from_the_top(&counts, need).map(|sum| sum as u32)
}

#[cfg(test)]
mod tests;
