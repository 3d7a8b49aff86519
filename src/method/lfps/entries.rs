//! The entries of a table at the candidates of a step.

use std::cell::RefCell;
use std::ops::Range;

use super::threshold::TableStats;
use crate::compute::masks::{BLOCK, WORD, at_least_in_blocks};
use crate::method::reads::Reads;
use crate::prefetch::prefetch;

/// What a step read of a table.
#[derive(Clone, Debug, Default)]
pub(super) struct Touched {
    /// The blocks of which the maximum was read.
    maxima: Range<usize>,
    /// The blocks of which all entries were read, ascending.
    blocks: Vec<u32>,
    /// Entries that were read one by one; not in order.
    singles: Vec<usize>,
}

impl Touched {
    /// Adds this to the reads of a step: maxima, and the entries that were read.
    pub fn add_to(&self, reads: &mut Reads) {
        reads.range(4 * self.maxima.start..4 * self.maxima.end);
        let block = |block: &u32| *block as usize * BLOCK..(*block as usize + 1) * BLOCK;
        let is_in_block = |i: usize| self.blocks.binary_search(&((i / BLOCK) as u32)).is_ok();
        let singles = self.singles.iter().filter(|i| !is_in_block(**i));
        let mut entries: Vec<Range<usize>> = self.blocks.iter().map(block).collect();
        entries.extend(singles.map(|i| *i..*i + 1));
        entries.sort_unstable_by_key(|entries| entries.start);
        entries.dedup();
        reads.spans(entries.into_iter().map(|of| 4 * of.start..4 * of.end));
    }
}

/// The entries of a table at the candidates; entries beyond the end of the table are zero.
pub(super) struct Entries<'a> {
    /// All entries of the table, before multiplication by the common factor.
    pub values: &'a [f32],
    /// An upper bound of each block of [`BLOCK`] values.
    pub maxima: &'a [f32],
    pub factor: f64,
    /// The range of entries that belong to the candidates.
    pub range: Range<usize>,
    /// The range of entries over which mean, deviation and kurtosis are taken.
    pub population: Range<usize>,
    /// The sums of the first four powers of the population's values.
    pub powers: [f64; 4],
    /// Whether the entries are in reverse order of the candidates.
    pub is_reversed: bool,
    /// What has been read so far.
    pub touched: RefCell<Touched>,
}

impl Entries<'_> {
    /// Returns one bit per candidate, set if its entry is above the threshold, which must be at least 0.
    pub fn above(&self, threshold: f64) -> Vec<u64> {
        let limit = least_above(threshold, self.factor);
        let (first, len) = (self.range.start / WORD * WORD, self.values.len());
        let from = first.min(len)..self.range.end.min(len);
        let maxima = from.start.div_ceil(BLOCK)..from.end.div_ceil(BLOCK);
        let mut bits = Vec::with_capacity(self.range.len() / WORD + 2);
        let mut blocks =
            at_least_in_blocks(&self.values[from], &self.maxima[maxima.clone()], limit, &mut bits);
        let mut touched = self.touched.borrow_mut();
        // The blocks of a lower threshold include those of a higher one.
        if blocks.len() > touched.blocks.len() {
            blocks.iter_mut().for_each(|block| *block += maxima.start as u32);
            touched.blocks = blocks;
        }
        touched.maxima = maxima;
        drop(touched);
        shift_down(&mut bits, self.range.start - first, self.range.len());
        if self.is_reversed {
            reverse(&mut bits, self.range.len());
        }
        bits
    }

    /// Returns the index of the entry of candidate `i`.
    fn place(&self, i: usize) -> usize {
        if self.is_reversed {
            self.range.end - 1 - i
        } else {
            self.range.start + i
        }
    }

    /// Prefetches the entry of candidate `i`.
    pub fn prefetch(&self, i: usize) {
        let place = self.place(i);
        prefetch(self.values.get(place..=place).unwrap_or_default());
    }

    /// Reads the entry of candidate `i`.
    pub fn get(&self, i: usize) -> f64 {
        let place = self.place(i);
        if place < self.values.len() {
            self.touched.borrow_mut().singles.push(place);
        }
        self.at(place)
    }

    /// Returns the entry at an index of the table.
    fn at(&self, index: usize) -> f64 {
        let value = self.values.get(index).copied().unwrap_or(0.0);
        f64::from(value) * self.factor
    }

    /// Returns the mean, deviation and kurtosis of the population: from the sums of powers or, where these cancel out,
    /// in two passes over the entries.
    pub fn shape(&self) -> TableStats {
        let (n, mut factor) = (self.population.len() as f64, 1.0);
        let means = self.powers.map(|sum| {
            factor *= self.factor;
            sum * factor / n
        });
        let all = || self.population.clone().map(|i| self.at(i)).collect::<Vec<f64>>();
        TableStats::of_powers(means).unwrap_or_else(|| TableStats::from_values(&all()))
    }
}

/// Returns the smallest f32 whose product with `factor` is above `limit`; NaN, which no value reaches, if the limit is
/// not finite.
fn least_above(limit: f64, factor: f64) -> f32 {
    let is_above = |x: f32| f64::from(x) * factor > limit;
    if !limit.is_finite() {
        return f32::NAN;
    }
    let mut x = (limit / factor) as f32;
    while x > 0.0 && is_above(x.next_down()) {
        x = x.next_down();
    }
    while !is_above(x) {
        x = x.next_up();
    }
    x
}

/// Drops the first `by` bits (less than a word) and keeps the `n` bits after them.
pub(super) fn shift_down(bits: &mut Vec<u64>, by: usize, n: usize) {
    bits.resize(bits.len().max(n.div_ceil(WORD)), 0);
    if by > 0 {
        for i in 1..bits.len() {
            bits[i - 1] = bits[i - 1] >> by | bits[i] << (WORD - by);
        }
        bits.last_mut().into_iter().for_each(|last| *last >>= by);
    }
    bits.truncate(n.div_ceil(WORD));
    if let Some(last) = bits.last_mut().filter(|_| !n.is_multiple_of(WORD)) {
        *last &= (1 << (n % WORD)) - 1;
    }
}

/// Reverses the order of `n` bits.
fn reverse(bits: &mut Vec<u64>, n: usize) {
    bits.reverse();
    bits.iter_mut().for_each(|word| *word = word.reverse_bits());
    // The unused bits of the last word have moved to the front.
    shift_down(bits, bits.len() * WORD - n, n);
}

#[cfg(test)]
mod tests {
    use super::super::Table;
    use super::*;

    #[test]
    fn shapes_are_those_of_two_passes() {
        let parts = |shape: &TableStats| [shape.mean, shape.deviation, shape.kurtosis];
        let wave = |i: usize| 1.0 + (i as f64 * 0.7).sin();
        let rows: [&dyn Fn(usize) -> f64; 4] = [
            &wave,
            // Few large entries, as in a table of attention.
            &|i| {
                if i % 97 == 0 {
                    50.0 * wave(i)
                } else {
                    1e-3 * wave(i)
                }
            },
            // Entries nearly alike, so that the sums of powers cancel out.
            &|i| 1e3 + wave(i),
            &|_| 0.1,
        ];
        for (case, value) in rows.iter().enumerate() {
            let mut table = Table::default();
            (0..5000).for_each(|i| table.add(i, value(i)));
            table.decay(0.3);
            let all: Vec<f64> = (7..4000).map(|i| table.get(i)).collect();
            let (expected, shape) = (
                TableStats::from_values(&all),
                table.entries(50..60, 7..4000, false).shape(),
            );
            for (x, y) in parts(&shape).into_iter().zip(parts(&expected)) {
                assert!((x - y).abs() <= 1e-9 * y.abs(), "{case}: {x} {y}");
            }
        }
    }

    #[test]
    fn the_least_number_above_a_limit() {
        for (limit, factor) in [
            (0.0, 1.0),
            (0.3, 0.77),
            (1e-30, 1e-20),
            (1e9, 3.0),
            (0.1f32.into(), 1.0),
        ] {
            let x = least_above(limit, factor);
            assert!(f64::from(x) * factor > limit && f64::from(x.next_down()) * factor <= limit);
        }
        assert_eq!(least_above(1e60, 1.0), f32::INFINITY);
        assert!(least_above(f64::NAN, 1.0).is_nan() && least_above(f64::INFINITY, 1.0).is_nan());
    }
}
