//! The candidates of [`candidates`](super::candidates) as bits, from few of the tables' entries.
//!
//! A threshold is a sum over a whole table, and the order of that sum decides its last bits. Here it is summed in
//! lanes and changed with the entries ([`super::Table`]), with bounds for what any order gives; as entries are f32, nearly always one f32 splits the entries the
//! same way for all that the bounds allow. Where it does not, nothing is said, and the sums are taken in order.

use std::cell::OnceCell;
use std::ops::Range;

use super::threshold::{Threshold, paper_share};
use crate::compute::attention::prefetch;
use crate::compute::masks::{BLOCK, WORD, at_least_in_blocks, places};

/// Largest relative error of one rounding in f64.
const UNIT: f64 = f64::EPSILON / 2.0;
/// Of so many candidates one is few: then each is looked at for itself.
const FEW: usize = 16;
/// Candidates that are asked for before they are looked at.
const AHEAD: usize = 8;
/// Relative room for the few roundings between sums and a threshold.
const ROOM: f64 = 1e-13;

/// Bounds of a number.
#[derive(Clone, Copy)]
struct Bounds {
    low: f64,
    high: f64,
}

impl Bounds {
    fn around(x: f64, error: f64) -> Self {
        Self {
            low: x - error,
            high: x + error,
        }
    }

    /// Bounds of `self / (self + other)`, both positive.
    fn share(self, other: Self) -> Self {
        Self {
            low: self.low / (self.low + other.high),
            high: self.high / (self.high + other.low),
        }
    }
}

/// The entries of a table over the candidates; those beyond `values` are zero.
pub(super) struct Entries<'a> {
    /// All of the table, before the common factor.
    pub values: &'a [f32],
    /// Of every [`BLOCK`] values none is larger.
    pub maxima: &'a [f32],
    pub factor: f64,
    /// Places of the candidates.
    pub range: Range<usize>,
    /// Sums of the first four powers of the candidates' values.
    pub powers: [f64; 4],
    /// Roundings in each of these, of half an ulp of the sum each.
    pub roundings: f64,
    /// Whether the last candidate comes first.
    pub is_reversed: bool,
}

impl Entries<'_> {
    /// Bits, by candidate, of the entries above a number within `bounds`; none where the bounds leave it open.
    fn above(&self, bounds: Bounds) -> Option<Vec<u64>> {
        let limit = Limit::new(bounds, self.factor)?;
        let bits = self.at_least(limit.sure);
        (limit.least == limit.sure || self.at_least(limit.least) == bits).then_some(bits)
    }

    /// Bits, by candidate, of the values from a number above zero on.
    fn at_least(&self, limit: f32) -> Vec<u64> {
        let (first, len) = (self.range.start / WORD * WORD, self.values.len());
        let from = first.min(len)..self.range.end.min(len);
        let maxima = from.start.div_ceil(BLOCK)..from.end.div_ceil(BLOCK);
        let mut bits = Vec::with_capacity(self.range.len() / WORD + 2);
        at_least_in_blocks(&self.values[from], &self.maxima[maxima], limit, &mut bits);
        shift_down(&mut bits, self.range.start - first, self.range.len());
        if self.is_reversed {
            reverse(&mut bits, self.range.len());
        }
        bits
    }

    /// The place of candidate `i`.
    fn place(&self, i: usize) -> usize {
        match self.is_reversed {
            true => self.range.end - 1 - i,
            false => self.range.start + i,
        }
    }

    /// Asks for the entry of candidate `i`, which is read soon.
    fn prefetch(&self, i: usize) {
        let place = self.place(i);
        prefetch(self.values.get(place..=place).unwrap_or_default());
    }

    /// Whether the entry of candidate `i` is above a limit; none where that is open.
    fn is_above(&self, i: usize, limit: Limit) -> Option<bool> {
        let x = self.values.get(self.place(i)).copied().unwrap_or(0.0);
        let is_sure = x >= limit.sure;
        (is_sure || x < limit.least).then_some(is_sure)
    }

    /// Mean, deviation and kurtosis.
    fn shape(&self) -> Option<Shape> {
        let n = self.range.len() as f64;
        let [first, second, third, fourth] = self.powers;
        let f = self.factor;
        let (mean, p2, p3, p4) = (
            first * f / n,
            second * f * f / n,
            third * f * f * f / n,
            fourth * f * f * f * f / n,
        );
        let m2 = p2 - mean * mean;
        let m4 = p4 - 4.0 * mean * p3 + 6.0 * mean * mean * p2 - 3.0 * mean.powi(4);
        // By the inequality of Cauchy and Schwarz the mean magnitude is at most sqrt(p2), that of the third power
        // at most sqrt(p2 p4), and p2 at most sqrt(p4): so the terms of m2 add up to at most 2 p2 and those of m4
        // to at most 14 p4. Sums of n terms in either order, of products rounded a few times, are within
        // (n + 64) u of them, those that were changed within their own roundings; a mean that is off by e moves the
        // central moments by no more than that again.
        let each = (self.roundings.max(n) + 64.0) * UNIT;
        let (e1, e2, e4) = (4.0 * each * p2.sqrt(), 16.0 * each * p2, 256.0 * each * p4);
        let (m2, m4) = (Bounds::around(m2, e2), Bounds::around(m4, e4));
        let is_plain = e4.is_finite() && m2.low > 0.0 && m4.low > 0.0;
        is_plain.then(|| Shape {
            mean: Bounds::around(mean, e1),
            deviation: Bounds {
                low: m2.low.sqrt(),
                high: m2.high.sqrt(),
            },
            kurtosis: Bounds {
                low: m4.low / (m2.high * m2.high),
                high: m4.high / (m2.low * m2.low),
            },
        })
    }
}

/// Values that may be, and those that are, above a number of which bounds are known.
#[derive(Clone, Copy)]
struct Limit {
    least: f32,
    sure: f32,
}

impl Limit {
    fn new(bounds: Bounds, factor: f64) -> Option<Self> {
        Some(Self {
            least: least_above(bounds.low, factor)?,
            sure: least_above(bounds.high, factor)?,
        })
    }
}

/// What [`super::threshold::Shape`] computes, in bounds.
struct Shape {
    mean: Bounds,
    deviation: Bounds,
    kurtosis: Bounds,
}

impl Shape {
    fn mean_itself(&self) -> Bounds {
        self.above(Bounds::around(0.0, 0.0))
    }

    /// So many deviations above the mean, at least none.
    fn above(&self, deviations: Bounds) -> Bounds {
        let low = self.mean.low + deviations.low * self.deviation.low;
        let high = self.mean.high + deviations.high * self.deviation.high;
        let room = ROOM * (self.mean.high.abs() + deviations.high * self.deviation.high);
        Bounds {
            low: low - room,
            high: high + room,
        }
    }
}

/// The least f32 whose product with `factor` is above `limit`; none for a limit below zero or one that no number
/// exceeds.
fn least_above(limit: f64, factor: f64) -> Option<f32> {
    let is_above = |x: f32| f64::from(x) * factor > limit;
    let guess = (limit / factor) as f32;
    if limit.is_nan() || limit < 0.0 || !guess.is_finite() || factor <= 0.0 {
        return None;
    }
    let mut x = guess;
    while x > 0.0 && is_above(x.next_down()) {
        x = x.next_down();
    }
    while !is_above(x) {
        x = x.next_up();
    }
    Some(x)
}

/// Drops the first `by` bits, less than a word, and keeps `n`.
fn shift_down(bits: &mut Vec<u64>, by: usize, n: usize) {
    bits.resize(bits.len().max(n.div_ceil(WORD)), 0);
    if by > 0 {
        for i in 0..bits.len() {
            let next = bits.get(i + 1).copied().unwrap_or(0);
            bits[i] = bits[i] >> by | next << (WORD - by);
        }
    }
    bits.truncate(n.div_ceil(WORD));
    if let Some(last) = bits.last_mut().filter(|_| !n.is_multiple_of(WORD)) {
        *last &= (1 << (n % WORD)) - 1;
    }
}

/// Turns the `n` bits around.
fn reverse(bits: &mut Vec<u64>, n: usize) {
    bits.reverse();
    bits.iter_mut().for_each(|word| *word = word.reverse_bits());
    // What was beyond the end is at the front now.
    shift_down(bits, bits.len() * WORD - n, n);
}

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
        let listed: Vec<usize> = places(bits).collect();
        for (at, &i) in listed.iter().enumerate() {
            if let Some(&next) = listed.get(at + AHEAD) {
                self.vertical.prefetch(next);
                self.slash.prefetch(next);
            }
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
    let mut out = Vec::with_capacity(marks.len());
    for (i, &here) in marks.iter().enumerate() {
        let before = if i > 0 { marks[i - 1] } else { 0 };
        let after = marks.get(i + 1).copied().unwrap_or(0);
        out.push(
            here | (here >> 1 | after << (WORD - 1))
                | (here << 1 | before >> (WORD - 1))
                | (here << 2 | before >> (WORD - 2)),
        );
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

    #[test]
    fn the_least_number_above_a_limit() {
        for (limit, factor) in [
            (0.0, 1.0),
            (0.3, 0.77),
            (1e-30, 1e-20),
            (1e9, 3.0),
            (0.1f32.into(), 1.0),
        ] {
            let x = least_above(limit, factor).unwrap();
            assert!(f64::from(x) * factor > limit && f64::from(x.next_down()) * factor <= limit);
        }
        for (limit, factor) in [
            (-1.0, 1.0),
            (f64::NAN, 1.0),
            (1e60, 1.0),
            (1.0, 0.0),
            (f64::INFINITY, 1.0),
        ] {
            assert!(least_above(limit, factor).is_none());
        }
    }
}
