//! Allocation: which choice each unit gets, so that the losses of all add up to the least within a limit on what they cost.
//!
//! This is the multiple-choice knapsack problem. A Lagrange multiplier gives a bound that no allocation beats, and a
//! first allocation within the limit; then the allocations of the first units, the first two, and so on, are listed, without
//! those that another one beats in both numbers or that the bound rules out. If the list stays short, what remains is the best
//! allocation of all; otherwise its most promising part is kept, and the bound says how far the result may be from the best.

/// Most partial allocations that are kept.
const KEPT: usize = 4096;

/// A way to serve a unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Alternative {
    /// What counts against the limit; finite.
    pub cost: f64,
    /// What is to be small; finite.
    pub loss: f64,
}

/// A choice for every unit.
#[derive(Clone, Debug, PartialEq)]
pub struct Allocation {
    /// The index of each unit's choice.
    pub picks: Vec<usize>,
    /// The sum of the choices' costs, within the limit.
    pub cost: f64,
    /// The sum of their losses.
    pub loss: f64,
    /// No allocation within the limit loses less than this.
    pub bound: f64,
}

/// A part of an allocation: the choices of the first units.
#[derive(Clone, Copy)]
struct Part {
    cost: f64,
    loss: f64,
    /// The index of the part that it continues, and of the choice that it adds.
    from: (usize, usize),
}

/// Finds the allocation with the least loss whose cost is at most `limit`; `None` if even the smallest costs are above it.
pub fn allocate(units: &[Vec<Alternative>], limit: f64) -> Option<Allocation> {
    let least: f64 = units.iter().map(|unit| extreme(unit, |choice| choice.cost)).sum();
    if least > limit {
        return None;
    }
    let hulls: Vec<Vec<usize>> = units.iter().map(|unit| hull(unit)).collect();
    let (multiplier, greedy) = along_hulls(units, &hulls, limit);
    let weigh = |choice: &Alternative| choice.loss + multiplier * choice.cost;
    // Of the units from each on: the least cost, and the least loss with the weighted cost.
    let mut rest = vec![(0.0, 0.0)];
    for unit in units.iter().rev() {
        let (cost, weighed) = rest[rest.len() - 1];
        rest.push((
            cost + extreme(unit, |choice| choice.cost),
            weighed + extreme(unit, weigh),
        ));
    }
    rest.reverse();
    let bound = rest[0].1 - multiplier * limit;
    let of_picks = |picks: &[usize]| {
        let chosen = units.iter().zip(picks).map(|(unit, pick)| unit[*pick]);
        chosen.fold((0.0, 0.0), |(cost, loss), of| (cost + of.cost, loss + of.loss))
    };
    let best = of_picks(&greedy).1;
    let mut levels: Vec<Vec<Part>> = vec![vec![Part {
        cost: 0.0,
        loss: 0.0,
        from: (0, 0),
    }]];
    let mut is_whole = true;
    for (unit, (cost, weighed)) in units.iter().zip(&rest[1..]) {
        let before = &levels[levels.len() - 1];
        let promise = |part: &Part| part.loss + multiplier * part.cost + weighed - multiplier * limit;
        let all = before.iter().enumerate().flat_map(|(at, part)| {
            unit.iter().enumerate().map(move |(pick, choice)| Part {
                cost: part.cost + choice.cost,
                loss: part.loss + choice.loss,
                from: (at, pick),
            })
        });
        // What equals the allocation that is known already is kept, or nothing would be left if that one is the best.
        let mut parts: Vec<Part> = all
            .filter(|part| part.cost + cost <= limit && promise(part) <= best + 1e-12 * best.abs())
            .collect();
        parts.sort_by(|a, b| a.cost.total_cmp(&b.cost).then(a.loss.total_cmp(&b.loss)));
        let mut lowest = f64::INFINITY;
        parts.retain(|part| {
            let is_lower = part.loss < lowest;
            lowest = lowest.min(part.loss);
            is_lower
        });
        if parts.len() > KEPT {
            is_whole = false;
            parts.sort_by(|a, b| promise(a).total_cmp(&promise(b)));
            parts.truncate(KEPT);
        }
        levels.push(parts);
    }
    let found = picks(&levels).map(|picks| (of_picks(&picks), picks));
    let ((cost, loss), picks) = match found {
        Some(((cost, loss), picks)) if loss <= best && cost <= limit => ((cost, loss), picks),
        _ => (of_picks(&greedy), greedy),
    };
    Some(Allocation {
        bound: if is_whole { loss } else { bound.min(loss) },
        picks,
        cost,
        loss,
    })
}

/// Returns the smallest value of a unit's choices.
fn extreme(unit: &[Alternative], of: impl Fn(&Alternative) -> f64) -> f64 {
    unit.iter().map(of).fold(f64::INFINITY, f64::min)
}

/// Lists the choices on the lower convex hull of loss over cost, from the smallest cost on, as long as the loss falls.
fn hull(unit: &[Alternative]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..unit.len()).collect();
    order.sort_by(|a, b| {
        let (a, b) = (&unit[*a], &unit[*b]);
        a.cost.total_cmp(&b.cost).then(a.loss.total_cmp(&b.loss))
    });
    let mut hull: Vec<usize> = Vec::new();
    for at in order {
        let new = unit[at];
        if hull.last().is_some_and(|last| unit[*last].loss <= new.loss) {
            continue;
        }
        while let [.., a, b] = hull[..] {
            let (a, b) = (unit[a], unit[b]);
            // Whether b lies above the line from a to the new point.
            let is_above = (b.loss - a.loss) * (new.cost - a.cost) >= (new.loss - a.loss) * (b.cost - a.cost);
            if !is_above {
                break;
            }
            hull.pop();
        }
        hull.push(at);
    }
    hull
}

/// Walks along the hulls of all units, where the loss falls most for its cost first. Returns the multiplier at which the limit
/// is reached (0 if it never is), and the allocation so far, with every later step that still fits.
fn along_hulls(units: &[Vec<Alternative>], hulls: &[Vec<usize>], limit: f64) -> (f64, Vec<usize>) {
    let mut places = vec![0; units.len()];
    let mut steps = Vec::new();
    for (unit, hull) in hulls.iter().enumerate() {
        for (place, pair) in hull.windows(2).enumerate() {
            let [a, b] = [pair[0], pair[1]].map(|at| units[unit][at]);
            let fall = (a.loss - b.loss) / (b.cost - a.cost).max(f64::MIN_POSITIVE);
            steps.push((fall, unit, place, b.cost - a.cost));
        }
    }
    steps.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut cost: f64 = hulls
        .iter()
        .zip(units)
        .map(|(hull, unit)| unit[hull[0]].cost)
        .sum();
    let mut multiplier = None;
    for (fall, unit, place, more) in steps {
        if cost + more > limit {
            multiplier.get_or_insert(fall);
        } else if places[unit] == place {
            cost += more;
            places[unit] += 1;
        }
    }
    let picks = hulls.iter().zip(&places).map(|(hull, place)| hull[*place]);
    (multiplier.unwrap_or(0.0), picks.collect())
}

/// Follows the part with the least loss back to the first unit; `None` if no part was left.
fn picks(levels: &[Vec<Part>]) -> Option<Vec<usize>> {
    let last = levels.last()?;
    let mut at = (0..last.len()).min_by(|a, b| last[*a].loss.total_cmp(&last[*b].loss))?;
    let mut picks = Vec::new();
    for parts in levels[1..].iter().rev() {
        let (from, pick) = parts[at].from;
        picks.push(pick);
        at = from;
    }
    picks.reverse();
    Some(picks)
}

#[cfg(test)]
mod tests {
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    /// Random choices of which larger ones mostly lose less, as budgets do.
    fn random(units: usize, choices: usize, rng: &mut ChaCha8Rng) -> Vec<Vec<Alternative>> {
        let choice = |rng: &mut ChaCha8Rng| {
            let cost: f64 = rng.gen_range(0.001..1.0);
            Alternative {
                cost,
                loss: rng.gen_range(0.1..1.0) * (-5.0 * cost).exp(),
            }
        };
        (0..units)
            .map(|_| (0..choices).map(|_| choice(rng)).collect())
            .collect()
    }

    /// The best of all combinations.
    fn brute_force(units: &[Vec<Alternative>], limit: f64) -> Option<f64> {
        let mut sums = vec![(0.0, 0.0)];
        for unit in units {
            let with = |&(cost, loss): &(f64, f64)| {
                unit.iter()
                    .map(move |choice| (cost + choice.cost, loss + choice.loss))
            };
            sums = sums.iter().flat_map(with).collect();
        }
        let within = sums.into_iter().filter(|(cost, _)| *cost <= limit);
        within.map(|(_, loss)| loss).min_by(f64::total_cmp)
    }

    #[test]
    fn few_units_get_the_best_of_all_allocations() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for round in 0..200 {
            let units = random(1 + round % 6, 1 + round % 5, &mut rng);
            let limit = rng.gen_range(0.0..0.6) * units.len() as f64;
            let found = allocate(&units, limit);
            match (brute_force(&units, limit), &found) {
                (None, None) => {}
                (Some(best), Some(found)) => {
                    assert!((found.loss - best).abs() <= 1e-12, "{} {best}", found.loss);
                    assert!(found.cost <= limit && found.bound == found.loss);
                    let chosen = units.iter().zip(&found.picks).map(|(unit, pick)| unit[*pick]);
                    let cost: f64 = chosen.map(|of| of.cost).sum();
                    assert!((cost - found.cost).abs() < 1e-12);
                }
                (best, found) => panic!("{best:?} {found:?}"),
            }
        }
    }

    /// As many units as a large model has: the result is as near to the best as its bound says, and the bound holds.
    #[test]
    fn many_units_get_nearly_the_best() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let units = random(640, 40, &mut rng);
        for share in [0.1, 0.3] {
            let limit = share * units.len() as f64;
            let found = allocate(&units, limit).unwrap();
            assert!(found.cost <= limit);
            assert!(found.bound <= found.loss && found.loss - found.bound < 1e-3 * found.loss);
            // Cheaper limits cannot lose less.
            let tighter = allocate(&units, 0.9 * limit).unwrap();
            assert!(tighter.loss >= found.bound);
        }
    }

    #[test]
    fn a_loose_limit_takes_what_loses_least() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let units = random(20, 8, &mut rng);
        let found = allocate(&units, 1e3).unwrap();
        let least: f64 = units.iter().map(|unit| extreme(unit, |of| of.loss)).sum();
        assert!((found.loss - least).abs() < 1e-12);
        assert_eq!(allocate(&units, 0.0), None);
        assert_eq!(allocate(&[], 0.0).unwrap().picks, Vec::<usize>::new());
    }
}
