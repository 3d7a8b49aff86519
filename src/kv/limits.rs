//! Which positions decode steps attend: the static set, and how many others.

use super::Budget;
use super::static_set::{SINKS, StaticSet, WINDOW};

/// The static set and the budget of the steps of a KV head, a layer or a whole run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Number of first positions that are always attended.
    pub sinks: usize,
    /// Number of last positions that are always attended, the current one included.
    pub window: usize,
    /// The model's own sliding window in the layer, if it has one; `None` for a whole run.
    pub model_window: Option<usize>,
    /// How many positions beyond the static set may be chosen.
    pub budget: Budget,
}

impl Limits {
    /// Returns limits with the usual static set, for layers without a sliding window.
    pub fn new(budget: Budget) -> Self {
        Self {
            sinks: SINKS,
            window: WINDOW,
            model_window: None,
            budget,
        }
    }

    /// Returns limits with a window only, for attention that chooses nothing; their budget is not used.
    pub fn last(window: usize) -> Self {
        Self {
            sinks: 0,
            window,
            model_window: None,
            budget: Budget::Count(1),
        }
    }

    /// Returns these limits in a layer with this sliding window.
    #[must_use]
    pub fn in_layer(self, model_window: Option<usize>) -> Self {
        Self { model_window, ..self }
    }

    /// Returns these limits with another budget.
    #[must_use]
    pub fn with_budget(self, budget: Budget) -> Self {
        Self { budget, ..self }
    }

    /// Returns the static set of the token at position `t`.
    pub fn static_set(&self, t: usize) -> StaticSet {
        StaticSet::at(t, self.model_window, self.sinks, self.window)
    }

    /// Returns a bound of at least 1 on the positions that are chosen in a cache of this capacity, which is not 0.
    pub(crate) fn most(&self, capacity: usize) -> usize {
        let visible = self.model_window.map_or(capacity, |w| w.min(capacity));
        self.budget.positions(visible).clamp(1, capacity)
    }
}
