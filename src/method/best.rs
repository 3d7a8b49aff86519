//! The largest of many values, and sets of positions.

use std::cmp::Ordering;

use crate::compute::masks;

/// Leading bits of a key by which values are counted: the counts fit the innermost cache.
const COUNTED: u32 = 13;

/// A number with an unsigned key in the order of its `total_cmp`.
pub(super) trait Key: Copy {
    /// Returns the key.
    fn key(self) -> u64;
}

impl Key for f64 {
    fn key(self) -> u64 {
        let bits = self.to_bits() as i64;
        (bits ^ ((bits >> 63) as u64 >> 1) as i64) as u64 ^ 1 << 63
    }
}

impl Key for f32 {
    fn key(self) -> u64 {
        let bits = self.to_bits() as i32;
        u64::from((bits ^ ((bits >> 31) as u32 >> 1) as i32) as u32 ^ 1 << 31) << 32
    }
}

/// Returns the places of the `count` largest values, ascending; the lower place on ties.
pub(super) fn largest<T: Key>(values: &[T], count: usize) -> Vec<u32> {
    if count == 0 || values.is_empty() {
        return Vec::new();
    }
    let class = |x: &T| (x.key() >> (64 - COUNTED)) as usize;
    let mut counts = vec![0u32; 1 << COUNTED];
    values.iter().for_each(|x| counts[class(x)] += 1);
    // The class of the last value; all values of the classes above are taken.
    let mut above = 0;
    let last = (0..counts.len()).rev().find(|c| {
        let full = above + counts[*c] as usize >= count;
        above += if full { 0 } else { counts[*c] as usize };
        full
    });
    let last = last.unwrap_or(0);
    // Without branches, which would be mispredicted; both have room for one more, which is written before it is counted.
    let (mut out, mut close) = (vec![0; above + 1], vec![0; counts[last] as usize + 1]);
    let (mut len, mut len_close) = (0, 0);
    for (x, place) in values.iter().zip(0u32..) {
        let class = class(x);
        (out[len], close[len_close]) = (place, place);
        len += usize::from(class > last);
        len_close += usize::from(class == last);
    }
    out.truncate(len);
    close.truncate(len_close);
    let left = count - above;
    if left < close.len() {
        let of = |place: u32| (values[place as usize].key(), place);
        let mut keys: Vec<(u64, u32)> = close.into_iter().map(of).collect();
        keys.select_nth_unstable_by(left, |a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)));
        keys.truncate(left);
        close = keys.into_iter().map(|(_, place)| place).collect();
        close.sort_unstable();
    }
    // The sort is stable and finds the two ascending runs.
    out.extend(close);
    out.sort();
    out
}

/// Orders by falling score, then by position.
pub(super) fn by_score<S: Key>(a: &(S, u32), b: &(S, u32)) -> Ordering {
    b.0.key().cmp(&a.0.key()).then(a.1.cmp(&b.1))
}

/// Returns the positions of the `count` best, ascending; the lower position on ties.
pub(super) fn best_positions<S: Key>(mut scored: Vec<(S, u32)>, count: usize) -> Vec<u32> {
    if count < scored.len() {
        scored.select_nth_unstable_by(count, by_score);
        scored.truncate(count);
    }
    let mut positions: Vec<u32> = scored.into_iter().map(|(_, p)| p).collect();
    positions.sort_unstable();
    positions
}

/// A set of places below a bound.
pub(super) struct Places {
    words: Vec<u64>,
}

impl From<Vec<u64>> for Places {
    /// Makes the set of the places whose bits are set.
    fn from(words: Vec<u64>) -> Self {
        Self { words }
    }
}

impl Places {
    /// Makes an empty set of places below `n`.
    pub fn new(n: usize) -> Self {
        Self {
            words: vec![0; n.div_ceil(64)],
        }
    }

    /// Adds a place.
    pub fn insert(&mut self, place: usize) {
        self.words[place / 64] |= 1 << (place % 64);
    }

    /// Removes a place.
    pub fn remove(&mut self, place: usize) {
        self.words[place / 64] &= !(1 << (place % 64));
    }

    /// Returns whether a place is in the set.
    pub fn contains(&self, place: usize) -> bool {
        self.words[place / 64] >> (place % 64) & 1 == 1
    }

    /// Returns the number of places.
    pub fn len(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Adds the places of another set with the same bound.
    pub fn join(&mut self, other: &Self) {
        self.words.iter_mut().zip(&other.words).for_each(|(a, b)| *a |= b);
    }

    /// Lists the places plus `first`, ascending.
    pub fn ascending(&self, first: u32) -> Vec<u32> {
        masks::places(&self.words, first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranked(values: &[f64], count: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..values.len() as u32).collect();
        order.sort_by(|a, b| values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b)));
        order.truncate(count);
        order.sort_unstable();
        order
    }

    #[test]
    fn largest_is_a_full_ranking() {
        let odd = [
            f64::NAN,
            -f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            0.0,
            -0.0,
            1e-310,
        ];
        let value = |i: usize| ((i * 2_654_435_761) % 1009) as f64 / 1009.0 - 0.3;
        let plain: Vec<f64> = (0..3000).map(value).collect();
        let tied: Vec<f64> = (0..500).map(|i| (i % 3) as f64).collect();
        let close: Vec<f64> = plain.iter().map(|x| 1.0 + x * 1e-6).collect();
        let mixed: Vec<f64> = odd.iter().chain(&plain).chain(&odd).copied().collect();
        for values in [
            &plain,
            &tied,
            &close,
            &mixed,
            &vec![0.5; 70],
            &vec![1.0],
            &Vec::new(),
        ] {
            for count in [0, 1, 2, 3, 69, 70, 250, 499, values.len()] {
                let count = count.min(values.len());
                assert_eq!(largest(values, count), ranked(values, count), "{count}");
                let single: Vec<f32> = values.iter().map(|x| *x as f32).collect();
                let double: Vec<f64> = single.iter().map(|x| f64::from(*x)).collect();
                assert_eq!(largest(&single, count), ranked(&double, count), "{count}");
            }
        }
        assert_eq!(largest(&[1.0f32, 2.0], 5), [0, 1]);
    }

    #[test]
    fn places_come_back_in_order() {
        let mut places = Places::new(200);
        for p in [199, 0, 64, 63, 0, 128, 127] {
            places.insert(p);
        }
        assert_eq!(places.ascending(10), [10, 73, 74, 137, 138, 209]);
        places.remove(64);
        places.remove(65);
        assert_eq!(places.ascending(0), [0, 63, 127, 128, 199]);
        assert!(Places::new(0).ascending(3).is_empty());
    }
}
