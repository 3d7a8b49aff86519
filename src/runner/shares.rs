//! How much of the visible context decode steps read and compute.

use crate::kv::StaticSet;
use crate::method::Choice;

/// Shares of the visible context: those of one decode step, their sum over steps, or its mean.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shares {
    /// K and V rows read, static set included.
    pub read: f64,
    /// Exact products of a query with a key that the method computes in order to choose.
    pub products: f64,
    /// Query heads that bypass their selection.
    pub bypassed: f64,
}

impl Shares {
    /// Adds the choices of the KV heads of one layer, each for `group` query heads.
    pub(super) fn add_layer<'c>(
        &mut self,
        choices: impl ExactSizeIterator<Item = &'c Choice>,
        set: &StaticSet,
        group: usize,
    ) {
        let (visible, heads) = (set.visible().len() as f64, choices.len());
        let query_heads = (group * heads) as f64;
        let mut rows = 0.0;
        for choice in choices {
            let bypassed = choice.bypassed.iter().flatten().count();
            let attended = if bypassed == group {
                set.sinks.len()
            } else {
                set.len() + choice.positions.len()
            };
            rows += attended as f64 + choice.ranked_rows as f64 / 2.0;
            self.bypassed += bypassed as f64 / query_heads;
            self.products += choice.products as f64 / (visible * query_heads);
        }
        self.read += rows / (visible * heads as f64);
    }

    /// Adds a step; `sum` is its sum over layers.
    pub(super) fn add_step(&mut self, sum: &Self, layers: usize) {
        let step = sum.mean(layers);
        self.read += step.read;
        self.products += step.products;
        self.bypassed += step.bypassed;
    }

    /// Divides a sum by its number of terms, `count`; zero without a term.
    pub(crate) fn mean(&self, count: usize) -> Self {
        let n = count.max(1) as f64;
        Self {
            read: self.read / n,
            products: self.products / n,
            bypassed: self.bypassed / n,
        }
    }
}
