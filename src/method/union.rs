//! The union of the query heads' best positions, within a budget.

use super::best::Key;

/// The positions of the largest k such that the union of each list's best k has at most `budget`; where
/// even k = 1 has more, the best of that union by highest score. Ascending; the lower position wins a tie.
pub(super) fn union_within(lists: &[Vec<(f32, u32)>], budget: usize) -> Vec<u32> {
    let positions = || lists.iter().flatten().map(|(_, p)| *p);
    let (Some(low), Some(high)) = (positions().min(), positions().max()) else {
        return Vec::new();
    };
    // A position joins the union at the least rank that it has in any list.
    let mut ranks = vec![u32::MAX; (high - low) as usize + 1];
    for list in lists {
        // The best first: by falling score, then by position.
        let key = |(score, p): &(f32, u32)| !(score.key() >> 32) << 32 | u64::from(*p);
        let mut keys: Vec<u64> = list.iter().map(key).collect();
        keys.sort_unstable();
        for (rank, key) in (0u32..).zip(keys) {
            let place = (key as u32 - low) as usize;
            ranks[place] = ranks[place].min(rank);
        }
    }
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    let mut counts = vec![0usize; longest];
    let joined = ranks.iter().filter(|rank| **rank != u32::MAX);
    joined.for_each(|rank| counts[*rank as usize] += 1);
    // The first rank that would not fit: all of its positions stay out.
    let mut within = 0;
    let limit = counts.iter().position(|count| {
        within += count;
        within > budget
    });
    let limit = limit.unwrap_or(longest) as u32;
    let below = |limit: u32| {
        (low..)
            .zip(&ranks)
            .filter(move |(_, rank)| **rank < limit)
            .map(|(p, _)| p)
    };
    if limit > 0 {
        return below(limit).collect();
    }
    let score = |p: u32| {
        let scores = lists.iter().flatten().filter(|(_, other)| *other == p);
        scores.fold(f32::NEG_INFINITY, |m, (s, _)| m.max(*s))
    };
    let mut best: Vec<(f32, u32)> = below(1).map(|p| (score(p), p)).collect();
    best.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let mut out: Vec<u32> = best.into_iter().take(budget).map(|(_, p)| p).collect();
    out.sort_unstable();
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// The same by sorting everything.
    fn naive(mut lists: Vec<Vec<(f32, u32)>>, budget: usize) -> Vec<u32> {
        // A position joins the union at the least rank that it has in any list.
        let mut joins: Vec<(u32, usize)> = Vec::new();
        for list in &mut lists {
            list.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            joins.extend(list.iter().enumerate().map(|(rank, (_, p))| (*p, rank)));
        }
        joins.sort_unstable();
        joins.dedup_by_key(|(p, _)| *p);
        let mut ranks: Vec<usize> = joins.iter().map(|(_, rank)| *rank).collect();
        ranks.sort_unstable();
        // The first rank that would not fit: all of its positions stay out.
        let limit = ranks.get(budget).copied().unwrap_or(usize::MAX);
        if limit > 0 {
            let fits = joins.into_iter().filter(|(_, rank)| *rank < limit);
            return fits.map(|(p, _)| p).collect();
        }
        let mut best: Vec<(f32, u32)> = joins
            .into_iter()
            .filter(|(_, rank)| *rank == 0)
            .map(|(p, _)| {
                let scores = lists.iter().flatten().filter(|(_, other)| *other == p);
                (scores.fold(f32::NEG_INFINITY, |m, (s, _)| m.max(*s)), p)
            })
            .collect();
        best.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let mut out: Vec<u32> = best.into_iter().take(budget).map(|(_, p)| p).collect();
        out.sort_unstable();
        out
    }

    #[test]
    fn unions_are_those_of_full_rankings() {
        let mut number = numbers(1);
        let mut next = |n: u32| (number() >> 8) % n;
        for _ in 0..3000 {
            let (heads, n, coarse) = (next(6), 1 + next(60), 1 + next(9));
            let list = |next: &mut dyn FnMut(u32) -> u32| -> Vec<(f32, u32)> {
                let start = next(n);
                let mut list = Vec::new();
                for p in start..n {
                    let score = match next(40) {
                        0 => f32::NAN,
                        1 => f32::NEG_INFINITY,
                        _ => next(coarse) as f32 - 3.0,
                    };
                    if next(3) > 0 {
                        list.push((score, p + 7));
                    }
                }
                list
            };
            let lists: Vec<Vec<(f32, u32)>> = (0..heads).map(|_| list(&mut next)).collect();
            for budget in [0, 1, 2, next(70) as usize, 100] {
                assert_eq!(
                    union_within(&lists, budget),
                    naive(lists.clone(), budget),
                    "{lists:?} {budget}"
                );
            }
        }
    }
}
