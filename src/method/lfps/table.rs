//! Tables of decayed sums.

use std::cell::RefCell;
use std::ops::Range;

use super::entries::Entries;
use crate::compute::masks::{BLOCK, powers};
use crate::kv::lines::AlignedVec;
use crate::prefetch::prefetch;

/// Once the common factor falls below this, it is multiplied into the entries.
const LEAST_FACTOR: f64 = 1e-20;
/// After this many changes of entries, the sums of powers are recomputed.
const MOST_CHANGES: usize = 1 << 18;
/// The furthest that either end of the range may move without the sums of powers being recomputed.
const MOST_MOVED: usize = 64;

/// A table of decayed sums. All entries share a common factor, so that a decay changes a single number.
#[derive(Clone, Debug)]
pub struct Table {
    /// The entries before multiplication by the common factor. A block of them is one cache line.
    values: AlignedVec<f32>,
    factor: f64,
    /// An upper bound of each block of [`BLOCK`] values.
    maxima: Vec<f32>,
    sums: PowerSums,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            values: AlignedVec::default(),
            factor: 1.0,
            maxima: Vec::new(),
            sums: PowerSums::default(),
        }
    }
}

impl Table {
    /// Returns entry `i`; zero beyond the end.
    pub fn get(&self, i: usize) -> f64 {
        self.values.get(i).map_or(0.0, |v| f64::from(*v) * self.factor)
    }

    /// Multiplies every entry by `gamma`.
    pub fn decay(&mut self, gamma: f64) {
        self.factor *= gamma;
        if self.factor < LEAST_FACTOR {
            let factor = self.factor as f32;
            // Rounding is monotonic, so the bounds still hold.
            let all = self.values.iter_mut().chain(&mut self.maxima);
            all.for_each(|v| *v *= factor);
            self.factor = 1.0;
            self.sums = PowerSums::default();
        }
    }

    /// Adds `x` to entry `i`; the table grows to hold it if needed.
    pub fn add(&mut self, i: usize, x: f64) {
        let len = self.values.len();
        if i >= len {
            self.values.add(i + 1 - len);
            self.maxima.resize(self.values.len().div_ceil(BLOCK), 0.0);
        }
        let old = self.values[i];
        let new = old + (x / self.factor) as f32;
        self.values[i] = new;
        let max = &mut self.maxima[i / BLOCK];
        *max = if new.is_nan() { f32::INFINITY } else { max.max(new) };
        if self.sums.range.contains(&i) {
            self.sums.change(old, new);
        }
    }

    /// Prefetches entry `i`.
    pub(super) fn prefetch(&self, i: usize) {
        prefetch(self.values.get(i..=i).unwrap_or_default());
        prefetch(self.maxima.get(i / BLOCK..=i / BLOCK).unwrap_or_default());
    }

    /// Returns the entries before multiplication by the common factor, and the factor.
    pub fn parts(&self) -> (&[f32], f64) {
        (&self.values, self.factor)
    }

    /// Returns the entries in `range`, with the sums of the powers of the entries in the population.
    pub(super) fn entries(
        &mut self,
        range: Range<usize>,
        population: Range<usize>,
        is_reversed: bool,
    ) -> Entries<'_> {
        self.sums.follow(&population, &self.values);
        Entries {
            values: &self.values,
            maxima: &self.maxima,
            factor: self.factor,
            powers: self.sums.powers,
            range,
            population,
            is_reversed,
            touched: RefCell::default(),
        }
    }

    /// Returns the bytes that a table of `n` entries holds.
    pub(super) fn bytes_for(n: usize) -> usize {
        size_of::<f32>() * (n + n.div_ceil(BLOCK))
    }

    /// Returns the bytes that the table holds.
    pub(super) fn bytes(&self) -> usize {
        self.values.bytes() + self.maxima.capacity() * 4
    }

    /// Returns the sum of all entries.
    pub fn sum(&self) -> f64 {
        self.values.iter().map(|v| f64::from(*v)).sum::<f64>() * self.factor
    }
}

/// The sums of the first four powers of the values in a range, updated with every change.
#[derive(Clone, Debug, Default)]
struct PowerSums {
    range: Range<usize>,
    powers: [f64; 4],
    /// The largest value that each sum has had since the sums were last recomputed.
    most: [f64; 4],
    /// The number of changes since the sums were last recomputed.
    changes: usize,
}

impl PowerSums {
    fn change(&mut self, old: f32, new: f32) {
        let [old, new] = [old, new].map(|x| {
            let x = f64::from(x);
            [x, x * x, x * x * x, x * x * (x * x)]
        });
        for k in 0..4 {
            self.powers[k] += new[k] - old[k];
            self.most[k] = self.most[k].max(self.powers[k]);
        }
        self.changes += 1;
    }

    /// Moves the sums to `range`. Recomputes them if the range is far away, or if cancellation has cost too much
    /// accuracy.
    fn follow(&mut self, range: &Range<usize>, values: &[f32]) {
        let old = self.range.clone();
        let (starts, ends) = (ends_of(old.start, range.start), ends_of(old.end, range.end));
        // The old range is so long that its moved start cannot pass its end.
        let is_near = starts.len().max(ends.len()) <= MOST_MOVED && old.len() > 2 * MOST_MOVED;
        if is_near {
            for i in starts.chain(ends) {
                let value = values.get(i).copied().unwrap_or(0.0);
                if old.contains(&i) {
                    self.change(value, 0.0)
                } else {
                    self.change(0.0, value)
                }
            }
        }
        let is_sound = (0..4).all(|k| self.most[k] <= 1.25 * self.powers[k]);
        if !is_near || !is_sound || self.changes > MOST_CHANGES {
            let len = values.len();
            self.powers = powers(&values[range.start.min(len)..range.end.min(len)]);
            self.most = self.powers;
            self.changes = 0;
        }
        self.range = range.clone();
    }
}

/// Returns the range between an old and a new end of a range.
fn ends_of(a: usize, b: usize) -> Range<usize> {
    a.min(b)..a.max(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    /// Checks, whatever is added, removed and decayed, that maxima bound their blocks and sums stay close to exact
    /// sums.
    ///
    /// A sum of n values has n / 16 + 24 roundings. Each change has five roundings: one each for a third or fourth
    /// power of the value that comes and of the value that goes, one for their difference, which is at most the larger
    /// of the two powers, and one for the sum. Each is at most a rounding of the largest sum so far, which is at most
    /// 1.25 times the present sum.
    #[test]
    fn sums_and_maxima_follow_every_change() {
        let mut number = numbers(5);
        let mut next = |n: usize| (number() >> 8) as usize % n;
        let mut table = Table::default();
        let mut n = 900;
        let mut followed = 0;
        for step in 0..400 {
            table.decay(if step % 150 == 149 { 1e-21 } else { 0.95 });
            n += [1, 1, 1, 70][next(4)];
            for _ in 0..next(60) {
                table.add(next(n), next(1000) as f64 * 1e-3);
            }
            if step == 200 {
                table.add(5, 1e6);
            }
            // Ends that move back and forth, a little or a lot.
            let range = next(3)..n - next(if step % 20 == 0 { 500 } else { 50 });
            let powers = table.entries(0..1, range.clone(), false).powers;
            let bound = (range.len() + 32 + 8 * table.sums.changes) as f64 * f64::EPSILON / 2.0;
            followed += usize::from(table.sums.changes > 0);
            let (values, _) = table.parts();
            for (block, max) in values.chunks(BLOCK).zip(&table.maxima) {
                assert!(block.iter().all(|x| x <= max));
            }
            let values = &values[range.start.min(values.len())..range.end.min(values.len())];
            for (k, power) in powers.iter().enumerate() {
                // Sums of few values are exact up to a few multiples of 2^-50.
                let exact: f64 = values.iter().map(|x| f64::from(*x).powi(k as i32 + 1)).sum();
                assert!(
                    (power - exact).abs() <= bound * exact + exact * 1e-13,
                    "{step} {k}: {power} {exact}"
                );
            }
        }
        assert!(followed > 250, "{followed}");
    }

    #[test]
    fn a_nan_is_in_the_sums() {
        let mut table = Table::default();
        (0..300).for_each(|i| table.add(i, 1.0));
        assert!(table.entries(0..1, 0..300, false).powers[0] == 300.0);
        table.add(7, f64::NAN);
        assert!(
            table
                .entries(0..1, 0..300, false)
                .powers
                .iter()
                .all(|p| p.is_nan())
        );
        assert!(table.maxima[0] == f32::INFINITY);
    }
}
