//! The candidates of [`candidates`](super::candidates) as bits, from few of the tables' entries.
//!
//! A threshold is a sum over a whole table, and the order of that sum decides its last bits. Here it is summed in
//! lanes and changed with the entries ([`super::Table`]), with bounds for what any order gives ([`super::entries`]). Where
//! these leave a candidate open, nothing is said, and the sums are taken in order.

use std::cell::OnceCell;

use super::entries::{Bounds, Entries, Limit, ROOM, Shape, shift_down};
use super::threshold::{Threshold, paper_share};
use crate::compute::masks::{LINES_AHEAD, WORD, places};

/// Of so many candidates one is few: then each is looked at for itself.
const FEW: usize = 16;

/// Both tables and their shapes.
struct Both<'a> {
    vertical: &'a Entries<'a>,
    slash: &'a Entries<'a>,
    of_vertical: Shape,
    of_slash: Shape,
    /// What is above its mean in either table, once it was asked for as a whole.
    above_mean: OnceCell<Vec<u64>>,
}

impl Both<'_> {
    /// The bits above so many deviations in either table, with their neighbours above a mean: [`super::OFFSETS`].
    fn marks(&self, vertical: Bounds, slash: Bounds) -> Option<Vec<u64>> {
        let mut marks = self.vertical.above(self.of_vertical.above(vertical))?;
        let others = self.slash.above(self.of_slash.above(slash))?;
        marks.iter_mut().zip(others).for_each(|(a, b)| *a |= b);
        // What is marked is above a mean: the limits are no lower.
        let mut neighbours = reached(&marks, self.vertical.range.len());
        neighbours.iter_mut().zip(&marks).for_each(|(n, m)| *n &= !m);
        let count: u32 = neighbours.iter().map(|word| word.count_ones()).sum();
        if (count as usize) < self.vertical.range.len() / FEW && self.above_mean.get().is_none() {
            self.keep_above_mean(&mut neighbours)?;
        } else {
            let above_mean = self.above_mean()?;
            neighbours.iter_mut().zip(above_mean).for_each(|(n, a)| *n &= a);
        }
        marks.iter_mut().zip(neighbours).for_each(|(m, n)| *m |= n);
        Some(marks)
    }

    /// Takes the bits away that are above the mean of neither table.
    fn keep_above_mean(&self, bits: &mut [u64]) -> Option<()> {
        let vertical = Limit::new(self.of_vertical.mean_itself(), self.vertical.factor)?;
        let slash = Limit::new(self.of_slash.mean_itself(), self.slash.factor)?;
        let listed = places(bits, 0);
        for (at, &i) in listed.iter().enumerate() {
            if let Some(&next) = listed.get(at + LINES_AHEAD / 2) {
                self.vertical.prefetch(next as usize);
                self.slash.prefetch(next as usize);
            }
            let i = i as usize;
            if !self.vertical.is_above(i, vertical)? && !self.slash.is_above(i, slash)? {
                bits[i / WORD] ^= 1 << (i % WORD);
            }
        }
        Some(())
    }

    /// What is above its mean in either table.
    fn above_mean(&self) -> Option<&[u64]> {
        if self.above_mean.get().is_none() {
            let mut bits = self.vertical.above(self.of_vertical.mean_itself())?;
            let others = self.slash.above(self.of_slash.mean_itself())?;
            bits.iter_mut().zip(others).for_each(|(a, b)| *a |= b);
            // Nothing else sets it.
            let _ = self.above_mean.set(bits);
        }
        self.above_mean.get().map(Vec::as_slice)
    }
}

/// The first `n` bits and their neighbours: [`super::OFFSETS`].
fn reached(marks: &[u64], n: usize) -> Vec<u64> {
    let mut out: Vec<u64> = marks
        .iter()
        .map(|here| here | here >> 1 | here << 1 | here << 2)
        .collect();
    // What reaches beyond a word.
    for (out, after) in out.iter_mut().zip(marks.iter().skip(1)) {
        *out |= after << (WORD - 1);
    }
    for (out, before) in out.iter_mut().skip(1).zip(marks) {
        *out |= before >> (WORD - 1) | before >> (WORD - 2);
    }
    shift_down(&mut out, 0, n);
    out
}

/// What [`candidates`](super::candidates) marks, as bits; none where only sums in order can tell.
pub(super) fn marks(
    vertical: &Entries,
    slash: &Entries,
    rule: Threshold,
    alpha: f64,
    n_visible: usize,
) -> Option<Vec<u64>> {
    let both = Both {
        vertical,
        slash,
        of_vertical: vertical.shape()?,
        of_slash: slash.shape()?,
        above_mean: OnceCell::new(),
    };
    let even = |c: f64| both.marks(Bounds::around(c, 0.0), Bounds::around(c, 0.0));
    match rule {
        Threshold::Kurtosis => {
            let weighted = |own: Bounds, other: Bounds| {
                let share = other.share(own);
                Bounds {
                    low: alpha * 2.0 * share.low * (1.0 - ROOM),
                    high: alpha * 2.0 * share.high * (1.0 + ROOM),
                }
            };
            let (v, s) = (both.of_vertical.kurtosis, both.of_slash.kurtosis);
            both.marks(weighted(v, s), weighted(s, v))
        }
        Threshold::MeanStd => even(alpha),
        Threshold::Budget => {
            let wanted = ((paper_share(n_visible, alpha) * n_visible as f64) as usize).max(1);
            let count = |bits: &[u64]| bits.iter().map(|w| w.count_ones() as usize).sum::<usize>();
            let (mut low, mut high) = (0.0, (n_visible as f64).sqrt() + 1.0);
            let least = even(low)?;
            if count(&least) <= wanted {
                return Some(least);
            }
            for _ in 0..40 {
                let c = (low + high) / 2.0;
                if count(&even(c)?) > wanted {
                    low = c;
                } else {
                    high = c;
                }
            }
            even(high)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Table, candidates};
    use super::*;
    use crate::testing::numbers;

    fn listed(bits: &[u64], n: usize) -> Vec<bool> {
        (0..n).map(|i| bits[i / WORD] >> (i % WORD) & 1 == 1).collect()
    }

    /// Tables like those of a head: most entries small, few large, some equal.
    fn table(n: usize, seed: u32, coarse: bool) -> Vec<f32> {
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

    /// A table of these entries times `factor`, after `start` others.
    fn table_of(values: &[f32], start: usize, factor: f64) -> Table {
        let mut table = Table::default();
        (0..start).for_each(|i| table.add(i, 1.0 + i as f64));
        values
            .iter()
            .enumerate()
            .for_each(|(i, x)| table.add(start + i, f64::from(*x)));
        table.decay(factor);
        table
    }

    #[test]
    fn marks_are_those_of_sums_in_order() {
        let mut told = 0;
        for (case, n) in [1, 2, 3, 5, 63, 64, 65, 127, 128, 200, 1000, 4097]
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
                    let v = table(n - missing, 1 + case as u32, coarse);
                    let s = table(n - missing / 2, 100 + case as u32, coarse);
                    let all = |values: &[f32]| -> Vec<f64> {
                        let get = |i: usize| values.get(i).map_or(0.0, |x| f64::from(*x) * factor);
                        (0..n).map(get).collect()
                    };
                    let (vertical, mut slash) = (all(&v), all(&s));
                    slash.reverse();
                    let (mut v, mut s) = (table_of(&v, start, factor), table_of(&s, start / 2, factor));
                    for rule in [Threshold::Kurtosis, Threshold::MeanStd, Threshold::Budget] {
                        for alpha in [0.0, 0.2, 1.3] {
                            let entries = [
                                v.entries(start..start + n, false),
                                s.entries(start / 2..start / 2 + n, true),
                            ];
                            let found = marks(&entries[0], &entries[1], rule, alpha, n + 70);
                            let expected = candidates(&vertical, &slash, rule, alpha, n + 70);
                            if let Some(bits) = found {
                                assert_eq!(listed(&bits, n), expected, "{n} {rule:?} {alpha} {factor}");
                                told += 1;
                            }
                        }
                    }
                }
            }
        }
        // All but tables that are empty or of one entry.
        assert!(told > 500, "{told}");
    }

    #[test]
    fn what_cannot_be_told_is_left() {
        let is_told = |vertical: &[f32], slash: &[f32], rule, alpha| {
            let (mut v, mut s) = (table_of(vertical, 0, 1.0), table_of(slash, 0, 1.0));
            marks(&v.entries(0..4, false), &s.entries(0..4, false), rule, alpha, 4).is_some()
        };
        let plain = [1.0, 2.0, 4.0, 8.0];
        for odd in [
            [f32::NAN, 1.0, 2.0, 3.0],
            [f32::INFINITY, 1.0, 2.0, 3.0],
            [0.0; 4],
            [2.5; 4],
        ] {
            for rule in [Threshold::Kurtosis, Threshold::MeanStd, Threshold::Budget] {
                assert!(!is_told(&odd, &plain, rule, 0.2) && !is_told(&plain, &odd, rule, 0.2));
            }
        }
        assert!(is_told(&plain, &plain, Threshold::MeanStd, 0.2));
        // An entry that is the mean, which is above it or not by the last bit of a sum.
        assert!(!is_told(&[0.5, 1.0, 1.5, 1.0], &plain, Threshold::MeanStd, 0.0));
    }
}
