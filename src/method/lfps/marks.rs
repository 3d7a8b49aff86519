//! The candidates of [`candidates`](super::candidates) as bits, from few passes over the tables.
//!
//! A threshold is a sum over a whole table, and the order of that sum decides its last bits. Here it is summed in
//! lanes, with bounds for what any order gives; as entries are f32, nearly always one f32 splits the entries the
//! same way for all that the bounds allow. Where it does not, nothing is said, and the sums are taken in order.

use super::threshold::{Threshold, paper_share};
use crate::compute::masks::{WORD, at_least, powers};

/// Largest relative error of one rounding in f64.
const UNIT: f64 = f64::EPSILON / 2.0;
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
    /// Before the common factor.
    pub values: &'a [f32],
    pub factor: f64,
    /// Number of candidates.
    pub n: usize,
    /// Whether the last candidate comes first.
    pub is_reversed: bool,
}

impl Entries<'_> {
    /// Bits, by candidate, of the entries above a number within `bounds`; none where the bounds leave it open.
    fn above(&self, bounds: Bounds) -> Option<Vec<u64>> {
        let low = least_above(bounds.low, self.factor)?;
        let high = least_above(bounds.high, self.factor)?;
        let mut bits = Vec::with_capacity(self.n.div_ceil(WORD));
        at_least(self.values, high, &mut bits);
        if low != high {
            let mut more = Vec::new();
            at_least(self.values, low, &mut more);
            if more != bits {
                return None;
            }
        }
        bits.resize(self.n.div_ceil(WORD), 0);
        if self.is_reversed {
            reverse(&mut bits, self.n);
        }
        Some(bits)
    }

    /// Mean, deviation and kurtosis.
    fn shape(&self) -> Option<Shape> {
        let n = self.n as f64;
        let [first, second, third, fourth] = powers(self.values);
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
        // (n + 64) u of them; a mean that is off by e moves the central moments by no more than that again.
        let each = (n + 64.0) * UNIT;
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

/// What [`super::threshold::Shape`] computes, in bounds.
struct Shape {
    mean: Bounds,
    deviation: Bounds,
    kurtosis: Bounds,
}

impl Shape {
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

/// Turns the first `n` bits around.
fn reverse(bits: &mut [u64], n: usize) {
    bits.reverse();
    bits.iter_mut().for_each(|word| *word = word.reverse_bits());
    // What was beyond the end is at the front now.
    let shift = bits.len() * WORD - n;
    if shift > 0 {
        for i in 0..bits.len() {
            let next = bits.get(i + 1).copied().unwrap_or(0);
            bits[i] = bits[i] >> shift | next << (WORD - shift);
        }
    }
}

/// The bits above a limit in either table, with their neighbours above a mean: [`super::OFFSETS`].
fn expanded(vertical: Vec<u64>, slash: &[u64], above_mean: &[u64]) -> Vec<u64> {
    let mut marks = vertical;
    marks.iter_mut().zip(slash).for_each(|(a, b)| *a |= b);
    let mut out = Vec::with_capacity(marks.len());
    for (i, &here) in marks.iter().enumerate() {
        let before = if i > 0 { marks[i - 1] } else { 0 };
        let after = marks.get(i + 1).copied().unwrap_or(0);
        let reached = here
            | (here >> 1 | after << (WORD - 1))
            | (here << 1 | before >> (WORD - 1))
            | (here << 2 | before >> (WORD - 2));
        out.push(reached & above_mean[i]);
    }
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
    let (of_vertical, of_slash) = (vertical.shape()?, slash.shape()?);
    let zero = Bounds::around(0.0, 0.0);
    let mut above_mean = vertical.above(of_vertical.above(zero))?;
    let of_both = slash.above(of_slash.above(zero))?;
    above_mean.iter_mut().zip(of_both).for_each(|(a, b)| *a |= b);
    let with = |v: Bounds, s: Bounds| {
        let (v, s) = (
            vertical.above(of_vertical.above(v))?,
            slash.above(of_slash.above(s))?,
        );
        Some(expanded(v, &s, &above_mean))
    };
    let even = |c: f64| with(Bounds::around(c, 0.0), Bounds::around(c, 0.0));
    match rule {
        Threshold::Kurtosis => {
            let weighted = |own: Bounds, other: Bounds| {
                let share = other.share(own);
                Bounds {
                    low: alpha * 2.0 * share.low * (1.0 - ROOM),
                    high: alpha * 2.0 * share.high * (1.0 + ROOM),
                }
            };
            with(
                weighted(of_vertical.kurtosis, of_slash.kurtosis),
                weighted(of_slash.kurtosis, of_vertical.kurtosis),
            )
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
    use super::super::candidates;
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

    #[test]
    fn marks_are_those_of_sums_in_order() {
        let mut told = 0;
        for (case, n) in [1, 2, 3, 5, 63, 64, 65, 127, 128, 200, 1000, 4097]
            .into_iter()
            .enumerate()
        {
            for coarse in [false, true] {
                for (factor, missing) in [(1.0, 0), (0.95f64.powi(300), n / 3), (0.77, n)] {
                    let v = table(n - missing, 1 + case as u32, coarse);
                    let s = table(n - missing / 2, 100 + case as u32, coarse);
                    let entries = |values, is_reversed| Entries {
                        values,
                        factor,
                        n,
                        is_reversed,
                    };
                    let all = |values: &[f32]| -> Vec<f64> {
                        let get = |i: usize| values.get(i).map_or(0.0, |x| f64::from(*x) * factor);
                        (0..n).map(get).collect()
                    };
                    let (vertical, mut slash) = (all(&v), all(&s));
                    slash.reverse();
                    for rule in [Threshold::Kurtosis, Threshold::MeanStd, Threshold::Budget] {
                        for alpha in [0.0, 0.2, 1.3] {
                            let found = marks(&entries(&v, false), &entries(&s, true), rule, alpha, n + 70);
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
        assert!(told > 300, "{told}");
    }

    #[test]
    fn what_cannot_be_told_is_left() {
        fn entries(values: &[f32]) -> Entries<'_> {
            Entries {
                values,
                factor: 1.0,
                n: 4,
                is_reversed: false,
            }
        }
        let plain = [1.0, 2.0, 4.0, 8.0];
        for odd in [
            [f32::NAN, 1.0, 2.0, 3.0],
            [f32::INFINITY, 1.0, 2.0, 3.0],
            [0.0; 4],
            [2.5; 4],
        ] {
            for rule in [Threshold::Kurtosis, Threshold::MeanStd, Threshold::Budget] {
                assert!(marks(&entries(&odd), &entries(&plain), rule, 0.2, 4).is_none());
                assert!(marks(&entries(&plain), &entries(&odd), rule, 0.2, 4).is_none());
            }
        }
        // An entry that is the mean, which is above it or not by the last bit of a sum.
        let mean = [0.5, 1.0, 1.5, 1.0];
        assert!(marks(&entries(&mean), &entries(&plain), Threshold::MeanStd, 0.0, 4).is_none());
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
