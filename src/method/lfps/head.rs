//! The state of a query head: its two tables and its constants.

use std::sync::Arc;

use super::constants::{GAMMA, LEAST_BYPASS};
use super::entries::Touched;
use super::params::LfpsParams;
use super::priors::HeadPrior;
use super::table::Table;
use crate::kv::static_set::SINKS;
use crate::method::Place;

/// How many weights ahead of the current one to prefetch the entries of.
const AHEAD: usize = 8;

/// The constants of a query head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Constants {
    /// Decay per step.
    pub gamma: f64,
    /// The share of an update that goes to the vertical table; the rest goes to the slash table.
    pub lambda: f64,
    /// How many deviations above its mean a table's threshold is.
    pub alpha: f64,
    /// The variance of the scaled scores, divided by the squared length of the query.
    pub rho: f64,
    /// A correction that is added to the global estimate of the log mass.
    pub bias: f64,
    /// Whether the head is tested for the bypass at all.
    pub is_tested: bool,
}

/// The state of one query head.
#[derive(Clone)]
pub struct QueryHead {
    /// Sv: the attention by position.
    pub vertical: Table,
    /// R: the attention by distance. At step t, position i has the entry t - i.
    pub slash: Table,
    /// The constants; a prompt changes rho.
    pub constants: Constants,
    pub(super) prior: Option<Arc<HeadPrior>>,
    /// Whether the last step was bypassed.
    pub(super) bypassed: bool,
    /// What the last step read of the vertical table and of the slash table, unless it was bypassed.
    pub(super) touched: [Touched; 2],
}

impl QueryHead {
    pub(super) fn new(params: &LfpsParams, prior: Option<Arc<HeadPrior>>, sinks: usize) -> Self {
        let of =
            |own: fn(&HeadPrior) -> f32, default: f64| prior.as_ref().map_or(default, |p| f64::from(own(p)));
        // The calibrated rate is valid only for the number of sinks that calibration had.
        let seldom = |p: &Arc<HeadPrior>| sinks == SINKS && p.bypass_rate(params.lfps_theta) < LEAST_BYPASS;
        Self {
            vertical: Table::default(),
            slash: Table::default(),
            constants: Constants {
                gamma: of(|p| p.gamma, GAMMA),
                lambda: of(|p| p.lambda, 0.5),
                alpha: params.lfps_alpha.unwrap_or_else(|| of(|p| p.alpha, 0.2)),
                rho: of(|p| p.rho0, 0.0),
                bias: of(|p| p.glob_bias, 0.0),
                is_tested: params.lfps_theta < 1.0 && !prior.as_ref().is_some_and(seldom),
            },
            prior,
            bypassed: false,
            touched: Default::default(),
        }
    }

    /// Decays the tables, and adds the weights of the query at position `t`, which sum to one over the non-sinks.
    ///
    /// # Source
    /// Eq. 10, with `lambda` in place of 1/2.
    pub fn update(&mut self, t: usize, weights: impl Iterator<Item = (usize, f64)> + Clone) {
        let Constants { gamma, lambda, .. } = self.constants;
        self.vertical.decay(gamma);
        self.slash.decay(gamma);
        let mut coming = weights.clone().skip(AHEAD);
        for (i, w) in weights {
            if let Some((i, _)) = coming.next() {
                self.vertical.prefetch(i);
                self.slash.prefetch(t - i);
            }
            self.vertical.add(i, lambda * w);
            self.slash.add(t - i, (1.0 - lambda) * w);
        }
    }

    /// Adds the weights of a row of the first prompt, without any decay.
    pub(super) fn learn(&mut self, t: usize, weights: impl Iterator<Item = (usize, f64)>) {
        for (i, w) in weights {
            self.vertical.add(i, w);
            self.slash.add(t - i, w);
        }
    }

    /// Scales the tables, which hold the sums over `rows` rows of a prompt, to the fixed point of the decay, and adds
    /// the prior. The cache has `n` positions.
    ///
    /// # Source
    /// Eq. 4: both tables together sum to 1 / (1 - gamma), and all rows have the same weight. The prior has the weight
    /// of `weight` rows.
    pub(super) fn fill(&mut self, rows: usize, weight: f64, n: usize, place: &Place) {
        let Constants { gamma, lambda, .. } = self.constants;
        let total = 1.0 / (1.0 - gamma);
        let (vertical, slash) = (total * lambda, total * (1.0 - lambda));
        let weight = if self.prior.is_some() { weight } else { 0.0 };
        let beta = match weight + rows as f64 {
            0.0 => 0.0,
            sum => weight / sum,
        };
        let share = (1.0 - beta) / rows.max(1) as f64;
        self.vertical.decay(vertical * share);
        self.slash.decay(slash * share);
        let Some(prior) = self
            .prior
            .clone()
            .filter(|_| beta > 0.0 && n > place.limits.sinks)
        else {
            return;
        };
        let window = place.limits.model_window.unwrap_or(usize::MAX);
        let distances = 0..(n - place.limits.sinks).min(window);
        let sum: f64 = distances.clone().map(|d| f64::from(prior.slash_at(d))).sum();
        for distance in distances.filter(|_| sum > 0.0) {
            let share = f64::from(prior.slash_at(distance)) / sum;
            self.slash.add(distance, slash * beta * share);
        }
        let structural = |i: usize| prior.vert_at(i).map(f64::from);
        let positions = place.limits.sinks.max(n.saturating_sub(window))..n;
        let known: f64 = positions.clone().filter_map(structural).sum();
        let others = positions.clone().filter(|i| structural(*i).is_none()).count();
        for i in positions {
            let share = match structural(i) {
                Some(mass) if others == 0 && known > 0.0 => mass / known,
                Some(mass) => mass,
                None => (1.0 - known).max(0.0) / others as f64,
            };
            self.vertical.add(i, vertical * beta * share);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn update_golden_example() {
        let mut head = QueryHead::new(&LfpsParams::default(), None, 4);
        head.vertical.add(2, 2.0);
        head.slash.add(0, 1.0);
        head.update(4, [(2, 0.75), (4, 0.25)].into_iter());
        let close = |x: f64, y: f64| (x - y).abs() < 1e-6;
        assert!(close(head.vertical.get(2), 2.275) && close(head.vertical.get(4), 0.125));
        assert!(close(head.slash.get(2), 0.375) && close(head.slash.get(0), 1.075));
    }

    #[test]
    fn tables_keep_their_sum_and_survive_long_decays() {
        let mut head = QueryHead::new(&LfpsParams::default(), None, 4);
        head.vertical.add(3, 10.0);
        head.slash.add(1, 10.0);
        for t in 5..3000 {
            head.update(t, [(t - 3, 0.5), (t, 0.5)].into_iter());
            let sum = head.vertical.sum() + head.slash.sum();
            assert!((sum - 20.0).abs() < 1e-3, "{t}: {sum}");
        }
    }
}
