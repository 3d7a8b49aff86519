//! The union of the query heads' best positions within a budget.

use super::best::{Key, Places, best_positions};

/// The smallest number of ranks that are sorted at a time.
const RANKS: usize = 64;

/// Returns the union of each list's best k positions, ascending, for the largest k whose union has at most `budget`
/// positions. If the union has more even for k = 1, returns the positions with the highest scores in it. The lower
/// position wins a tie.
pub(super) fn union_within(lists: &[Vec<(f32, u32)>], budget: usize) -> Vec<u32> {
    let Some(high) = lists.iter().flatten().map(|(_, p)| *p).max() else {
        return Vec::new();
    };
    // Keys are ascending by falling score, then by rising position.
    let key = |(score, p): &(f32, u32)| !(score.key() >> 32) << 32 | u64::from(*p);
    let mut keys: Vec<Vec<u64>> = lists.iter().map(|list| list.iter().map(key).collect()).collect();
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    // This many ranks fit in any case.
    let at_once = (budget / lists.len()).max(RANKS);
    let mut chosen = Places::new(high as usize + 1);
    let mut count = 0;
    for rank in 0..longest {
        if rank % at_once == 0 {
            keys.iter_mut().for_each(|keys| sort_next(keys, rank, at_once));
        }
        let mut new = Vec::new();
        for key in keys.iter().filter_map(|keys| keys.get(rank)) {
            let p = *key as u32;
            if !chosen.contains(p as usize) {
                chosen.insert(p as usize);
                new.push(p);
            }
        }
        count += new.len();
        // A rank that does not fit entirely is left out entirely.
        if count > budget {
            if rank == 0 {
                return best_of(lists, new, budget);
            }
            new.iter().for_each(|p| chosen.remove(*p as usize));
            break;
        }
    }
    chosen.ascending(0)
}

/// Sorts the next `n` keys into the places from `at` on; the keys before `at` are in place already.
fn sort_next(keys: &mut [u64], at: usize, n: usize) {
    let Some(mut rest) = keys.get_mut(at..) else {
        return;
    };
    if n < rest.len() {
        rest.select_nth_unstable(n);
        rest = &mut rest[..n];
    }
    rest.sort_unstable();
}

/// Returns the `count` positions with the highest scores in any of the lists, ascending.
fn best_of(lists: &[Vec<(f32, u32)>], positions: Vec<u32>, count: usize) -> Vec<u32> {
    let score = |p: u32| {
        let scores = lists.iter().flatten().filter(|(_, other)| *other == p);
        scores.fold(f32::NEG_INFINITY, |m, (s, _)| m.max(*s))
    };
    best_positions(positions.into_iter().map(|p| (score(p), p)).collect(), count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// Finds the same union by sorting all lists.
    fn naive(mut lists: Vec<Vec<(f32, u32)>>, budget: usize) -> Vec<u32> {
        // A position joins the union at the smallest rank that it has in any list.
        let mut joins: Vec<(u32, usize)> = Vec::new();
        for list in &mut lists {
            list.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            joins.extend(list.iter().enumerate().map(|(rank, (_, p))| (*p, rank)));
        }
        joins.sort_unstable();
        joins.dedup_by_key(|(p, _)| *p);
        let mut ranks: Vec<usize> = joins.iter().map(|(_, rank)| *rank).collect();
        ranks.sort_unstable();
        // The first rank that would not fit; all of its positions stay out.
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
        for case in 0..3000 {
            // Some lists are long enough for several batches of ranks.
            let longest = if case % 100 == 0 { 1000 } else { 60 };
            let (heads, n, coarse) = (next(6), 1 + next(longest), 1 + next(9));
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
            for budget in [0, 1, 2, next(70) as usize, 100, next(n) as usize] {
                let found = union_within(&lists, budget);
                assert!(found == naive(lists.clone(), budget), "{lists:?} {budget}");
            }
        }
    }
}
