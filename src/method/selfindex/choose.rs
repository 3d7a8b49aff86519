//! The choice of a step: exact scores of sign patterns, and a scan of rounded ones that leaves few to take.
//!
//! Every score is a sum of one entry per group of channels. With the entries rounded to u8 at one common
//! step, a scan ([`rounded`]) gives each key a whole number, and two keys whose numbers
//! differ by more than the [`Rounded::gap`] are in the order of their exact scores. The budget's last
//! number therefore decides all keys but those close to it, and these alone are scored exactly.

mod rounded;

use std::cmp::Ordering;
use std::ops::RangeInclusive;

use ndarray::ArrayView2;

use super::{GROUP, PATTERNS};
use crate::compute::attention::prefetch;
use crate::method::Ranking;
use rounded::Rounded;

/// Patterns of a byte of signs.
const BYTES: usize = PATTERNS * PATTERNS;
/// Fewer candidates are scored one by one.
const LEAST: usize = 2048;
/// Rows whose exact scores are summed side by side.
const AT_ONCE: usize = 4;

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
        let mut coming = places.iter().skip(2 * AT_ONCE);
        for places in blocks {
            for p in coming.by_ref().take(AT_ONCE) {
                prefetch(self.row(rows, *p));
            }
            // The sums of some rows side by side, each in its order.
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
        if fixed.is_empty() {
            return others;
        }
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
        let (above, within) = part(&kept, &close);
        let scored = self.of_all(rows, &within);
        let worst = *scored.clone().select_nth_unstable_by(need - above - 1, order).1;
        let mut chosen: Vec<bool> = scored.iter().map(|s| order(s, &worst).is_le()).collect();
        // For what comes behind the last of those within.
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

/// The better first; the lower position on ties.
fn order(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

/// Leaves the `count` best of what is scored, in any order.
fn best(scored: &mut Vec<(f32, u32)>, count: usize) {
    if count < scored.len() {
        scored.select_nth_unstable_by(count, order);
        scored.truncate(count);
    }
}

/// How many sums are above `close`, and the positions of those within.
fn part(kept: &[(u32, u32)], close: &RangeInclusive<u32>) -> (usize, Vec<u32>) {
    let mut within = vec![0; kept.len()];
    let (mut above, mut len) = (0, 0);
    // No branch: which way a sum goes is anybody's guess.
    for (p, sum) in kept {
        within[len] = *p;
        above += usize::from(sum > close.end());
        len += usize::from(close.contains(sum));
    }
    within.truncate(len);
    (above, within)
}

/// The largest sum that at least `need` of the kept ones have.
fn last_sum(kept: &[(u32, u32)], need: usize) -> Option<u32> {
    let most = kept.iter().map(|(_, sum)| *sum).max()?;
    let mut counts = vec![0usize; most as usize + 1];
    kept.iter().for_each(|(_, sum)| counts[*sum as usize] += 1);
    rounded::from_the_top(&counts, need).map(|sum| sum as u32)
}

#[cfg(test)]
mod tests;
