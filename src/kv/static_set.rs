//! The static set: the positions that every step attends, whatever its method chooses.

use std::ops::Range;

use crate::compute::attention;

/// First positions of the set unless `--sinks` says otherwise.
pub const SINKS: usize = 4;
/// Last positions of the set unless `--window` says otherwise.
pub const WINDOW: usize = 64;

/// The positions that every step attends, and the candidates to choose from.
///
/// The set has the first `sinks` and the last `window` positions, as far as they are within the model's own sliding
/// window.
#[derive(Clone, Debug, PartialEq)]
pub struct StaticSet {
    /// The first positions in the set.
    pub sinks: Range<usize>,
    /// The positions between the sinks and the window.
    pub candidates: Range<usize>,
    /// The last positions, the current one included.
    pub window: Range<usize>,
}

impl StaticSet {
    /// Returns the static set of the token at position `t`.
    pub fn at(t: usize, model_window: Option<usize>, sinks: usize, window: usize) -> Self {
        let Range { start, end } = attention::visible(t, model_window);
        let window_start = end.saturating_sub(window).max(start);
        let sinks_end = sinks.clamp(start, window_start);
        Self {
            sinks: start..sinks_end,
            candidates: sinks_end..window_start,
            window: window_start..end,
        }
    }

    /// Returns all positions that the model lets the token see.
    pub fn visible(&self) -> Range<usize> {
        self.sinks.start..self.window.end
    }

    /// Counts the positions in the set.
    pub fn len(&self) -> usize {
        self.sinks.len() + self.window.len()
    }

    /// Says whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the positions of the set and the `chosen` ones (ascending candidates), in ascending order.
    pub fn merge(&self, chosen: &[u32]) -> Vec<u32> {
        debug_assert!(chosen.windows(2).all(|w| w[0] < w[1]));
        debug_assert!(chosen.iter().all(|p| self.candidates.contains(&(*p as usize))));
        let range = |r: &Range<usize>| r.start as u32..r.end as u32;
        range(&self.sinks)
            .chain(chosen.iter().copied())
            .chain(range(&self.window))
            .collect()
    }
}
