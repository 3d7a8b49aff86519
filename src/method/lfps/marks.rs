//! The candidates of a step as bits, found by reading only few entries of the tables.
//!
//! The thresholds come from sums over whole tables, which are updated with every change of an entry ([`super::Table`]).
//! The sums add in the order of the changes, so they are the same on every machine.

use std::cell::OnceCell;

use super::entries::{Entries, shift_down};
use super::threshold::{Threshold, thresholds};
use crate::compute::masks::{LINES_AHEAD, WORD, places};

/// If fewer than one in this many candidates is a neighbour, neighbours are compared with the means one by one.
const FEW: usize = 16;

/// The entries of both tables at the candidates.
struct Both<'a> {
    vertical: &'a Entries<'a>,
    slash: &'a Entries<'a>,
    means: (f64, f64),
    /// The bits of the entries above the mean in either table; computed once they are needed for all candidates.
    above_means: OnceCell<Vec<u64>>,
}

impl Both<'_> {
    /// Returns the bits of the candidates whose entry in either table is above that table's threshold.
    fn above(&self, (vertical, slash): (f64, f64)) -> Vec<u64> {
        let mut bits = self.vertical.above(vertical);
        let others = self.slash.above(slash);
        bits.iter_mut().zip(others).for_each(|(a, b)| *a |= b);
        bits
    }

    /// Returns the bits above a threshold in either table, and the bits of their neighbours ([`super::OFFSETS`]) that
    /// are above a mean.
    fn marks(&self, thresholds: (f64, f64)) -> Vec<u64> {
        let mut marks = self.above(thresholds);
        // Marked entries need no comparison with the means, since no threshold is below its table's mean.
        let mut neighbours = reached(&marks, self.vertical.range.len());
        neighbours.iter_mut().zip(&marks).for_each(|(n, m)| *n &= !m);
        if count(&neighbours) < self.vertical.range.len() / FEW && self.above_means.get().is_none() {
            self.keep_above_means(&mut neighbours);
        } else {
            let above_means = self.above_means.get_or_init(|| self.above(self.means));
            neighbours.iter_mut().zip(above_means).for_each(|(n, a)| *n &= a);
        }
        marks.iter_mut().zip(neighbours).for_each(|(m, n)| *m |= n);
        marks
    }

    /// Clears the bits of the candidates whose entries are not above the mean of either table.
    fn keep_above_means(&self, bits: &mut [u64]) {
        let listed = places(bits, 0);
        for (at, &i) in listed.iter().enumerate() {
            if let Some(&next) = listed.get(at + LINES_AHEAD / 2) {
                self.vertical.prefetch(next as usize);
                self.slash.prefetch(next as usize);
            }
            let i = i as usize;
            let is_above = self.vertical.get(i) > self.means.0 || self.slash.get(i) > self.means.1;
            if !is_above {
                bits[i / WORD] ^= 1 << (i % WORD);
            }
        }
    }
}

/// Counts the set bits.
fn count(bits: &[u64]) -> usize {
    bits.iter().map(|word| word.count_ones() as usize).sum()
}

/// Returns the first `n` bits together with the bits of their neighbours: [`super::OFFSETS`].
fn reached(marks: &[u64], n: usize) -> Vec<u64> {
    let in_word = |here: &u64| here | here >> 1 | here << 1 | here << 2;
    let mut out: Vec<u64> = marks.iter().map(in_word).collect();
    // Neighbours may lie in the next or in the previous word.
    for (out, after) in out.iter_mut().zip(marks.iter().skip(1)) {
        *out |= after << (WORD - 1);
    }
    for (out, before) in out.iter_mut().skip(1).zip(marks) {
        *out |= before >> (WORD - 1) | before >> (WORD - 2);
    }
    shift_down(&mut out, 0, n);
    out
}

/// Returns the candidates that two tables propose, as bits.
///
/// # Source
/// Eq. 7 and 8 (thresholds) and 9 (neighbours above a table's mean).
pub(super) fn marks(
    vertical: &Entries,
    slash: &Entries,
    rule: Threshold,
    alpha: f64,
    n_visible: usize,
) -> Vec<u64> {
    let shapes = (vertical.shape(), slash.shape());
    let both = Both {
        vertical,
        slash,
        means: (shapes.0.mean, shapes.1.mean),
        above_means: OnceCell::new(),
    };
    let count = |thresholds| count(&both.marks(thresholds));
    both.marks(thresholds(shapes.0, shapes.1, rule, alpha, n_visible, count))
}

#[cfg(test)]
mod tests {
    use super::super::Table;
    use super::super::threshold::expanded;
    use super::*;
    use crate::testing::numbers;

    const RULES: [Threshold; 2] = [Threshold::Kurtosis, Threshold::Budget];

    /// Makes entries like those of a head: most are small, few are large, some are equal.
    fn values(n: usize, seed: u32, coarse: bool) -> Vec<f32> {
        let mut number = numbers(seed);
        let mut next = || (number() >> 8) as f32 / (1 << 24) as f32;
        let value = |x: f32| {
            if coarse {
                (x * 8.0).floor() / 8.0
            } else {
                x.powi(7)
            }
        };
        (0..n).map(|_| value(next())).collect()
    }

    /// Makes a table of these entries times `factor`, after `start` other entries.
    fn table_of(values: &[f32], start: usize, factor: f64) -> Table {
        let mut table = Table::default();
        (0..start).for_each(|i| table.add(i, 1.0 + i as f64));
        let values = values.iter().map(|x| f64::from(*x));
        values.enumerate().for_each(|(i, x)| table.add(start + i, x));
        table.decay(factor);
        table
    }

    /// Marks candidate by candidate, with the means and deviations that the tables give.
    fn plain(
        vertical: &Entries,
        slash: &Entries,
        rule: Threshold,
        alpha: f64,
        n_visible: usize,
    ) -> Vec<bool> {
        let all = |entries: &Entries| (0..entries.range.len()).map(|i| entries.get(i)).collect();
        let (v, s): (Vec<f64>, Vec<f64>) = (all(vertical), all(slash));
        let (of_v, of_s) = (vertical.shape(), slash.shape());
        let with = |thresholds| expanded(&v, &s, thresholds, (of_v.mean, of_s.mean));
        let count = |thresholds| with(thresholds).iter().filter(|m| **m).count();
        with(thresholds(of_v, of_s, rule, alpha, n_visible, count))
    }

    fn check(vertical: &Entries, slash: &Entries, alpha: f64) {
        let n = vertical.range.len();
        for rule in RULES {
            let bits = marks(vertical, slash, rule, alpha, n + 70);
            let found: Vec<bool> = (0..n).map(|i| bits[i / WORD] >> (i % WORD) & 1 == 1).collect();
            let expected = plain(vertical, slash, rule, alpha, n + 70);
            assert_eq!(found, expected, "{n} {rule:?} {alpha}");
            assert_eq!(
                count(&bits),
                expected.iter().filter(|m| **m).count(),
                "{n} {rule:?}"
            );
        }
    }

    #[test]
    fn marks_are_those_of_a_plain_search() {
        for (case, n) in [0, 1, 2, 3, 5, 63, 64, 65, 127, 128, 200, 1000, 4097]
            .into_iter()
            .enumerate()
        {
            for coarse in [false, true] {
                for (factor, missing, start) in [
                    (1.0, 0, 0),
                    (0.95f64.powi(300), n / 3, 4),
                    (0.77, n, 64),
                    (0.9, 0, 130),
                ] {
                    let v = values(n - missing, 1 + case as u32, coarse);
                    let s = values(n - missing / 2, 100 + case as u32, coarse);
                    let (mut v, mut s) = (table_of(&v, start, factor), table_of(&s, start / 2, factor));
                    let vertical = v.entries(start..start + n, start..start + n, false);
                    let slash = s.entries(start / 2..start / 2 + n, 0..start + n, true);
                    [0.0, 0.2, 1.3]
                        .iter()
                        .for_each(|alpha| check(&vertical, &slash, *alpha));
                }
            }
        }
    }

    #[test]
    fn tables_without_a_spread_or_with_values_that_are_not_finite() {
        let some = [1.0, 2.0, 4.0, 8.0];
        for odd in [
            [f32::NAN, 1.0, 2.0, 3.0],
            [f32::INFINITY, 1.0, 2.0, 3.0],
            [0.0; 4],
            [2.5; 4],
            [0.5, 1.0, 1.5, 1.0],
        ] {
            let (mut a, mut b) = (table_of(&some, 0, 0.7), table_of(&odd, 0, 0.7));
            let (a, b) = (a.entries(0..4, 0..4, false), b.entries(0..4, 0..4, true));
            for alpha in [0.0, 0.2] {
                check(&a, &b, alpha);
                check(&b, &a, alpha);
                check(&b, &b, alpha);
            }
        }
    }
}
