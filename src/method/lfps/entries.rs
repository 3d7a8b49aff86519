//! The entries of a table over the candidates, and what is known of their moments.
//!
//! Limits come with bounds. As entries are f32, nearly always one f32 splits them the same way for all that the bounds
//! allow; where it does not, that is said.

use std::ops::Range;

use crate::compute::attention::prefetch;
use crate::compute::masks::{BLOCK, WORD, at_least_in_blocks};

/// Largest relative error of one rounding in f64.
const UNIT: f64 = f64::EPSILON / 2.0;
/// Relative room for the few roundings between sums and a threshold.
pub(super) const ROOM: f64 = 1e-13;

/// Bounds of a number.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    pub low: f64,
    pub high: f64,
}

impl Bounds {
    pub fn around(x: f64, error: f64) -> Self {
        Self {
            low: x - error,
            high: x + error,
        }
    }

    /// Bounds of `self / (self + other)`, both positive.
    pub fn share(self, other: Self) -> Self {
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
    pub fn above(&self, bounds: Bounds) -> Option<Vec<u64>> {
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
    pub fn prefetch(&self, i: usize) {
        let place = self.place(i);
        prefetch(self.values.get(place..=place).unwrap_or_default());
    }

    /// Whether the entry of candidate `i` is above a limit; none where that is open.
    pub fn is_above(&self, i: usize, limit: Limit) -> Option<bool> {
        let x = self.values.get(self.place(i)).copied().unwrap_or(0.0);
        let is_sure = x >= limit.sure;
        (is_sure || x < limit.least).then_some(is_sure)
    }

    /// Mean, deviation and kurtosis.
    pub fn shape(&self) -> Option<Shape> {
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
pub(super) struct Limit {
    pub least: f32,
    pub sure: f32,
}

impl Limit {
    pub fn new(bounds: Bounds, factor: f64) -> Option<Self> {
        Some(Self {
            least: least_above(bounds.low, factor)?,
            sure: least_above(bounds.high, factor)?,
        })
    }
}

/// What [`super::threshold::Shape`] computes, in bounds.
pub(super) struct Shape {
    mean: Bounds,
    deviation: Bounds,
    pub kurtosis: Bounds,
}

impl Shape {
    pub fn mean_itself(&self) -> Bounds {
        self.above(Bounds::around(0.0, 0.0))
    }

    /// So many deviations above the mean, at least none.
    pub fn above(&self, deviations: Bounds) -> Bounds {
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

/// Turns the `n` bits around.
fn reverse(bits: &mut Vec<u64>, n: usize) {
    bits.reverse();
    bits.iter_mut().for_each(|word| *word = word.reverse_bits());
    // What was beyond the end is at the front now.
    shift_down(bits, bits.len() * WORD - n, n);
}

#[cfg(test)]
mod tests {
    use super::*;

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
