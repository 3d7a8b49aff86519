//! Decayed sums.

use std::ops::Range;

use super::marks::Entries;
use crate::runner::kv::grow;

/// Below this the common factor of a table is worked into its entries.
const LEAST_FACTOR: f64 = 1e-20;

/// A table of decayed sums with a common factor, so that a decay touches one number.
#[derive(Clone, Debug)]
pub struct Table {
    values: Vec<f32>,
    factor: f64,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            values: Vec::new(),
            factor: 1.0,
        }
    }
}

impl Table {
    /// The entry `i`; zero beyond the end.
    pub fn get(&self, i: usize) -> f64 {
        self.values.get(i).map_or(0.0, |v| f64::from(*v) * self.factor)
    }

    /// Multiplies every entry.
    pub fn decay(&mut self, gamma: f64) {
        self.factor *= gamma;
        if self.factor < LEAST_FACTOR {
            let factor = self.factor as f32;
            self.values.iter_mut().for_each(|v| *v *= factor);
            self.factor = 1.0;
        }
    }

    /// Adds to the entry `i`; the table grows to hold it.
    pub fn add(&mut self, i: usize, x: f64) {
        let len = self.values.len();
        if i >= len {
            grow(&mut self.values, i + 1 - len).resize(i + 1, 0.0);
        }
        self.values[i] += (x / self.factor) as f32;
    }

    /// The entries before the common factor, and the factor.
    pub fn parts(&self) -> (&[f32], f64) {
        (&self.values, self.factor)
    }

    /// The entries of a range of places.
    pub(super) fn entries(&self, range: Range<usize>, is_reversed: bool) -> Entries<'_> {
        let len = self.values.len();
        Entries {
            values: &self.values[range.start.min(len)..range.end.min(len)],
            factor: self.factor,
            n: range.len(),
            is_reversed,
        }
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.values.capacity() * 4
    }

    /// Sum of all entries.
    pub fn sum(&self) -> f64 {
        self.values.iter().map(|v| f64::from(*v)).sum::<f64>() * self.factor
    }
}
