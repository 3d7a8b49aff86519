//! The budgets with which methods read given shares of the bytes.

use crate::error::Result;
use crate::kv::Budget;

/// A share counts as met if what is read differs from it by at most this fraction of the share.
const TOLERANCE: f64 = 0.01;

/// Most rounds of a search after the first; each evaluates the sample once for all methods and shares.
const ROUNDS: usize = 2;

/// Most that the shares of the first round are taken to be off by, as a fraction.
const DRIFT: f64 = 0.06;

/// The smallest fraction tried: a budget of one position in every context.
const LEAST: f64 = 1e-9;

/// The budgets of the first round.
const STARTS: [f64; 10] = [LEAST, 0.01, 0.02, 0.04, 0.07, 0.11, 0.16, 0.25, 0.4, 0.65];

/// Where the logarithmic scale of a search begins; budgets below it seldom differ by a position.
const FLOOR: f64 = 1e-3;

/// How well a round of a search measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// The first round, which finds between which of many budgets the wanted one lies, and which shares no budget reads.
    Rough,
    /// The later rounds.
    Fine,
}

/// The budget of one method for one share of the bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// Index of the method.
    pub method: usize,
    /// The share that was asked for.
    pub target: f64,
    /// The budget; `None` if even the smallest one reads more.
    pub budget: Option<Budget>,
    /// The share that the budget reads on the sample; without a budget, the least share that the method reads.
    pub share: f64,
}

/// A budget, as a fraction of the context, and the share of the bytes that it reads.
#[derive(Clone, Copy)]
struct Point {
    budget: f64,
    share: f64,
    /// Whether it is of the first round, whose steps are too few for a result.
    is_rough: bool,
}

/// The search for one method and share.
struct Search {
    method: usize,
    target: f64,
    /// A budget that reads at most the target, or the smallest budget if even that reads more.
    low: Point,
    /// A budget that reads at least the target.
    high: Point,
    best: Point,
    /// The ratio of a share over all steps to the share of the same budget in the first round, as the first guess showed it.
    drift: f64,
    /// Whether the last guess came much closer to the target than the guess before.
    is_fast: bool,
    /// Number of guesses that read as much as a budget tried before.
    repeats: usize,
}

impl Search {
    /// Starts between two neighbours among the `known` points, which ascend by budget: those that enclose the target.
    fn new(method: usize, target: f64, known: &[Point]) -> Self {
        let above = known.iter().position(|point| point.share > target);
        let low = known[above.unwrap_or(known.len()).max(1) - 1];
        let all = Point {
            budget: 1.0,
            share: 1.0,
            is_rough: false,
        };
        let high = above.map_or(all, |above| known[above.max(1)]);
        let mut search = Self {
            method,
            target,
            low,
            high,
            best: low,
            drift: 1.0,
            is_fast: true,
            repeats: 0,
        };
        if search.miss(high) < search.miss(low) {
            search.best = high;
        }
        search
    }

    /// Returns how far a point is from the target, as a fraction of the target.
    fn miss(&self, point: Point) -> f64 {
        (point.share / self.target - 1.0).abs()
    }

    fn is_reachable(&self) -> bool {
        self.low.share <= self.target * (1.0 + TOLERANCE)
    }

    fn is_done(&self) -> bool {
        !self.is_reachable() || self.repeats > 1 || !self.best.is_rough && self.miss(self.best) <= TOLERANCE
    }

    /// Returns the next budget to try: where the line between both ends meets the target or, if lines converge too
    /// slowly, the middle of both ends on a logarithmic scale.
    fn guess(&self) -> f64 {
        let Self { low, high, .. } = self;
        let (least, most) = (self.share(low), self.share(high));
        let part = (self.target - least) / (most - least).max(f64::MIN_POSITIVE);
        if self.is_fast {
            // Shares of the first round are inexact, so the target may lie outside these ends.
            let beyond = if low.is_rough || high.is_rough { 0.5 } else { 0.0 };
            let budget = low.budget + part.clamp(-beyond, 1.0 + beyond) * (high.budget - low.budget);
            budget.clamp(LEAST, 1.0)
        } else {
            (low.budget.max(FLOOR) * high.budget.max(FLOOR)).sqrt()
        }
    }

    /// Returns the share of an end, corrected if it is of the first round.
    fn share(&self, end: &Point) -> f64 {
        if end.is_rough {
            end.share * self.drift
        } else {
            end.share
        }
    }

    fn take(&mut self, point: Point) {
        let before = if self.best.is_rough {
            // The line between the ends met the target here. Where it is off by more than steps can explain, shares bend.
            let ratio = point.share / self.target;
            self.drift = if (ratio - 1.0).abs() <= DRIFT { ratio } else { 1.0 };
            f64::INFINITY
        } else {
            self.miss(self.best)
        };
        let now = self.miss(point);
        let is_repeated = [self.low.share, self.high.share].contains(&point.share);
        self.repeats += usize::from(is_repeated);
        self.is_fast = (!self.is_fast || now < before / 2.0) && !is_repeated;
        if now < before {
            self.best = point;
        }
        if point.share <= self.target {
            self.low = point
        } else {
            self.high = point
        }
    }

    fn found(&self) -> Found {
        Found {
            method: self.method,
            target: self.target,
            budget: self.is_reachable().then_some(Budget::Fraction(self.best.budget)),
            share: self.best.share,
        }
    }
}

/// A function that returns the shares of the bytes that methods, given by index, read with budgets on a sample.
pub type ReadShares<'a> = dyn FnMut(&[(usize, Budget)], Sample) -> Result<Vec<f64>> + 'a;

/// Finds, for each of `methods` methods and each of `targets`, the budget that reads that share of the bytes.
///
/// # Errors
/// An error of `sample`.
pub fn find(methods: usize, targets: &[f64], sample: &mut ReadShares) -> Result<Vec<Found>> {
    let starts = |method| STARTS.map(|budget| (method, Budget::Fraction(budget)));
    let starts: Vec<_> = (0..methods).flat_map(starts).collect();
    let shares = sample(&starts, Sample::Rough)?;
    let known = shares.chunks(STARTS.len()).map(|shares| {
        let points = STARTS.iter().zip(shares);
        points
            .map(|(budget, share)| Point {
                budget: *budget,
                share: *share,
                is_rough: true,
            })
            .collect::<Vec<_>>()
    });
    let mut searches: Vec<Search> = known
        .enumerate()
        .flat_map(|(method, known)| {
            targets
                .iter()
                .map(move |target| Search::new(method, *target, &known))
        })
        .collect();
    for _ in 0..ROUNDS {
        let mut open: Vec<&mut Search> = searches.iter_mut().filter(|search| !search.is_done()).collect();
        if open.is_empty() {
            break;
        }
        let guesses: Vec<f64> = open.iter().map(|search| search.guess()).collect();
        let budgets = open.iter().zip(&guesses);
        let budgets: Vec<_> = budgets
            .map(|(search, guess)| (search.method, Budget::Fraction(*guess)))
            .collect();
        let shares = sample(&budgets, Sample::Fine)?;
        for ((search, budget), share) in open.iter_mut().zip(guesses).zip(shares) {
            search.take(Point {
                budget,
                share,
                is_rough: false,
            });
        }
    }
    Ok(searches.iter().map(Search::found).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches with methods that read `reads(budget)`; returns what was found and how often the sample was evaluated.
    fn search(reads: &[fn(f64) -> f64], targets: &[f64]) -> (Vec<Found>, usize) {
        let mut rounds = 0;
        let found = find(reads.len(), targets, &mut |budgets, _| {
            rounds += 1;
            Ok(budgets
                .iter()
                .map(|(m, budget)| reads[*m](budget.value()))
                .collect())
        });
        (found.expect("no error"), rounds)
    }

    #[test]
    fn shares_are_met_where_they_can_be() {
        // An index of 4%; hardly more than the budget; a share that grows faster than the budget; always everything.
        let reads: [fn(f64) -> f64; 4] = [
            |x| 0.04 + 0.96 * x,
            |x| 0.01 + x,
            |x| 0.01 + 0.99 * x * x.sqrt(),
            |_| 1.0,
        ];
        let (found, rounds) = search(&reads, &[0.03, 0.05, 0.2]);
        assert!(rounds <= 3, "{rounds} samples");
        for found in found {
            let (method, target) = (found.method, found.target);
            let can = method != 3 && (method, target) != (0, 0.03);
            assert_eq!(found.budget.is_some(), can, "method {method}, {target}");
            if let Some(budget) = found.budget {
                assert_eq!(reads[method](budget.value()), found.share);
                assert!((found.share / target - 1.0).abs() <= TOLERANCE, "{found:?}");
            }
        }
    }

    /// The first round measures with few steps, and is off; it must not decide.
    #[test]
    fn rough_shares_are_no_results() {
        let reads = |budget: f64| 0.02 + 0.98 * budget;
        for off in [0.95, 1.0, 1.05] {
            let mut fine = Vec::new();
            let found = find(1, &[0.1, 0.18], &mut |budgets, sample| {
                let shares: Vec<f64> = budgets.iter().map(|(_, budget)| reads(budget.value())).collect();
                if sample == Sample::Rough {
                    return Ok(shares.iter().map(|share| off * share).collect());
                }
                fine.extend(&shares);
                Ok(shares)
            });
            for found in found.expect("no error") {
                assert!(fine.contains(&found.share), "{found:?}");
                assert!(
                    (found.share / found.target - 1.0).abs() <= TOLERANCE,
                    "{off}: {found:?}"
                );
                assert_eq!(reads(found.budget.expect("a budget").value()), found.share);
            }
        }
    }

    /// A method that ranks whole lists reads the same share with all small budgets.
    #[test]
    fn shares_are_met_above_a_flat_start() {
        let lists: fn(f64) -> f64 = |x| 0.12 + 5.0 * (x - 0.02).clamp(0.0, 0.1) + 0.3 * x;
        let flat: fn(f64) -> f64 = |x| if x < 0.02 { 0.12 } else { lists_share(x) };
        let (found, _) = search(&[lists, flat], &[0.3]);
        for found in found {
            assert!((found.share / 0.3 - 1.0).abs() < 0.05, "{found:?}");
        }
    }

    /// Returns the share of a method whose reads grow in steps of half a percent of the context.
    fn lists_share(x: f64) -> f64 {
        0.12 + (3.0 * x * 200.0).floor().min(120.0) / 200.0
    }

    /// Where shares do not grow along a line between two starts, the first guess is far off, and its ends are still right.
    #[test]
    fn shares_are_met_where_they_bend() {
        let late: fn(f64) -> f64 = |x| 0.12 + 12.0 * (x - 0.14).clamp(0.0, 0.07) + 0.02 * x;
        let twice: fn(f64) -> f64 = |x| 0.05 + 6.0 * (x - 0.13).clamp(0.0, 0.07) + 0.6 * (x - 0.2).max(0.0);
        for (reads, targets) in [(late, &[0.3][..]), (twice, &[0.2, 0.3])] {
            for found in search(&[reads], targets).0 {
                assert!((found.share / found.target - 1.0).abs() <= TOLERANCE, "{found:?}");
            }
        }
    }

    /// Positions are whole numbers, so a share that no budget meets exactly is met as closely as one position allows.
    #[test]
    fn the_nearest_budget_serves_where_none_is_exact() {
        let steps: fn(f64) -> f64 = |x| 0.02 + (x * 50.0).floor().max(1.0) / 50.0;
        let (found, _) = search(&[steps], &[0.075]);
        let share = found[0].share;
        assert!(
            (share - 0.08).abs() < 1e-9 || (share - 0.06).abs() < 1e-9,
            "{share}"
        );
        assert!(found[0].budget.is_some());
    }
}
