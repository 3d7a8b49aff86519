//! The largest of many values, and sets of positions.

use std::cmp::{Ordering, Reverse};

use crate::compute::masks;

/// The approximate size of the sample of a long list. Two of its values enclose the last value of a choice.
const SAMPLED: usize = 2048;
/// The key of 0.
const ZERO: u64 = 1 << 63;
/// A sample takes at most one in this many values.
const LEAST_STRIDE: usize = 8;
/// With a smaller sample, the bounds would enclose most of the values.
const LEAST_SAMPLED: usize = 64;
/// Values between the bounds that are sampled again if they are at least as many.
const MANY: usize = 8192;

/// A number with an unsigned integer key that sorts as `total_cmp` does.
pub(super) trait Key: Copy + PartialOrd {
    /// A number with its place: it sorts as the key, and for equal keys, a lower place is larger.
    type Placed: Ord + Copy;

    /// Returns the key.
    fn key(self) -> u64;

    /// Joins the number with its place.
    fn placed(self, place: u32) -> Self::Placed;

    /// Returns the place.
    fn place(placed: Self::Placed) -> u32;

    /// Returns one bit per value for each bound, 64 bits to a word with the first value in the lowest bit: whether the
    /// value's key is at least the bound's.
    fn reaching(values: &[Self], bounds: [Self; 2]) -> [Vec<u64>; 2] {
        bounds.map(|bound| words(values, |x| x.key() >= bound.key()))
    }
}

impl Key for f64 {
    type Placed = (u64, Reverse<u32>);

    fn placed(self, place: u32) -> Self::Placed {
        (self.key(), Reverse(place))
    }

    fn place((_, Reverse(place)): Self::Placed) -> u32 {
        place
    }

    fn key(self) -> u64 {
        let bits = self.to_bits() as i64;
        (bits ^ ((bits >> 63) as u64 >> 1) as i64) as u64 ^ 1 << 63
    }
}

impl Key for f32 {
    /// The key has 32 bits, which leaves room for the place: one comparison is enough.
    type Placed = u64;

    fn placed(self, place: u32) -> u64 {
        self.key() | u64::from(!place)
    }

    fn place(placed: u64) -> u32 {
        !(placed as u32)
    }

    fn key(self) -> u64 {
        let bits = self.to_bits() as i32;
        u64::from((bits ^ ((bits >> 31) as u32 >> 1) as i32) as u32 ^ 1 << 31) << 32
    }

    fn reaching(values: &[f32], bounds: [f32; 2]) -> [Vec<u64>; 2] {
        let (masks, has_nan) = masks::at_least_each(values, bounds);
        // The two zeros, and NaN, compare differently as floats than as keys.
        if has_nan || bounds.iter().any(|bound| bound.key() == ZERO) {
            bounds.map(|bound| words(values, |x| x.key() >= bound.key()))
        } else {
            masks
        }
    }
}

/// Returns one bit per value, laid out as in [`Key::reaching`]: whether the value fulfils a condition.
fn words<T: Copy>(values: &[T], condition: impl Fn(T) -> bool) -> Vec<u64> {
    let word = |values: &[T]| {
        let mut bytes = [0u8; masks::WORD];
        bytes
            .iter_mut()
            .zip(values)
            .for_each(|(byte, x)| *byte = u8::from(condition(*x)));
        // The product moves the lowest bit of byte i to bit 56 + i.
        let eight = |bytes: &[u8; 8]| u64::from_le_bytes(*bytes).wrapping_mul(0x0102_0408_1020_4080) >> 56;
        let parts = bytes.as_chunks::<8>().0.iter().enumerate();
        parts.fold(0, |word, (i, bytes)| word | eight(bytes) << (8 * i))
    };
    values.chunks(masks::WORD).map(word).collect()
}

/// Returns the places of the `count` largest values, ascending. The lower place wins a tie.
///
/// Two values of a sample enclose the last value that is taken. Values above both are taken, and values between them
/// are ranked, in the same way if they are many.
pub(super) fn largest<T: Key>(values: &[T], count: usize) -> Vec<u32> {
    masks::places(&largest_mask(values, count), 0)
}

/// Returns the set that [`largest`] lists, one bit per value, laid out as in [`Key::reaching`].
pub(super) fn largest_mask<T: Key>(values: &[T], count: usize) -> Vec<u64> {
    if count == 0 {
        return none(values);
    }
    if count >= values.len() {
        return all(values);
    }
    let (mut taken, mut close) = match bounds(values, count) {
        [Some(low), Some(high)] => T::reaching(values, [high, low]).into(),
        [Some(low), None] => {
            let [close, _] = T::reaching(values, [low; 2]);
            (none(values), close)
        }
        [None, Some(high)] => {
            let [taken, _] = T::reaching(values, [high; 2]);
            (taken, all(values))
        }
        [None, None] => (none(values), all(values)),
    };
    if number_of(&taken) >= count || number_of(&close) < count {
        (taken, close) = (none(values), all(values));
    }
    close
        .iter_mut()
        .zip(&taken)
        .for_each(|(close, taken)| *close &= !taken);
    let need = count - number_of(&taken);
    let close = masks::places(&close, 0);
    let mut take = |place: u32| taken[place as usize / masks::WORD] |= 1 << (place as usize % masks::WORD);
    // If the sample does not halve the values, they hardly differ, and another one would not help.
    if close.len() >= MANY && close.len() <= values.len() / 2 {
        let between: Vec<T> = close.iter().map(|place| values[*place as usize]).collect();
        largest(&between, need)
            .iter()
            .for_each(|i| take(close[*i as usize]));
    } else {
        let placed = |place: u32| values[place as usize].placed(place);
        let mut close: Vec<T::Placed> = close.into_iter().map(placed).collect();
        close.select_nth_unstable_by(need - 1, |a, b| b.cmp(a));
        close[..need].iter().for_each(|placed| take(T::place(*placed)));
    }
    taken
}

/// Estimates two bounds from a sample: one that more than `count` values reach, and one that fewer than `count` reach.
/// `None` stands for a bound that all values reach in the first place, and that no value reaches in the second.
fn bounds<T: Key>(values: &[T], count: usize) -> [Option<T>; 2] {
    let stride = (values.len() / SAMPLED).max(LEAST_STRIDE);
    if values.len() < stride * LEAST_SAMPLED {
        return [None, None];
    }
    let places = (0..values.len()).step_by(stride);
    let mut sample: Vec<T::Placed> = places.map(|i| values[i].placed(i as u32)).collect();
    let expected = count / stride;
    // Four standard deviations of how many of the `count` values a random sample contains.
    let margin = 4 * expected.isqrt() + 1;
    let mut at = |rank: usize| {
        let nth = (rank < sample.len()).then(|| *sample.select_nth_unstable_by(rank, |a, b| b.cmp(a)).1);
        nth.map(|placed| values[T::place(placed) as usize])
    };
    [at(expected + margin), expected.checked_sub(margin).and_then(at)]
}

fn none<T>(values: &[T]) -> Vec<u64> {
    vec![0; values.len().div_ceil(masks::WORD)]
}

fn all<T>(values: &[T]) -> Vec<u64> {
    let mut bits = vec![u64::MAX; values.len().div_ceil(masks::WORD)];
    if let (Some(last), rest @ 1..) = (bits.last_mut(), values.len() % masks::WORD) {
        *last = (1 << rest) - 1;
    }
    bits
}

fn number_of(bits: &[u64]) -> usize {
    bits.iter().map(|word| word.count_ones() as usize).sum()
}

/// Orders by falling score, then by rising position.
pub(super) fn by_score<S: Key>(a: &(S, u32), b: &(S, u32)) -> Ordering {
    b.0.key().cmp(&a.0.key()).then(a.1.cmp(&b.1))
}

/// Returns the positions of the `count` best, ascending. The lower position wins a tie.
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
        number_of(&self.words)
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
    fn largest_of_long_lists() {
        let n = 40_000;
        let noise = |i: usize| ((i * 2_654_435_761) % 65_521) as f64 / 65_521.0;
        let list = |of: &dyn Fn(usize) -> f64| (0..n).map(of).collect::<Vec<f64>>();
        let stride = n / SAMPLED;
        for values in [
            list(&noise),
            list(&|i| (20.0 * noise(i)).exp()),
            list(&|i| i as f64),
            list(&|i| -(i as f64)),
            list(&|i| (i % 7) as f64),
            list(&|_| 0.25),
            // The sample consists of the largest values only, or contains none of them.
            list(&|i| noise(i) + f64::from(u8::from(i % stride == 0))),
            list(&|i| noise(i) - f64::from(u8::from(i % stride == 0))),
            list(&|i| if i % 3 == 0 { -0.0 } else { 0.0 }),
            list(&|i| if i % 1000 == 7 { f64::NAN } else { noise(i) }),
        ] {
            for count in [1, 2, 60, 2_400, 9_600, 19_000, 30_000, n - 1, n] {
                assert_eq!(largest(&values, count), ranked(&values, count), "{count}");
                let single: Vec<f32> = values.iter().map(|x| *x as f32).collect();
                let double: Vec<f64> = single.iter().map(|x| f64::from(*x)).collect();
                assert_eq!(largest(&single, count), ranked(&double, count), "{count}");
            }
        }
        // So many values lie between the bounds that they are sampled again.
        let longer: Vec<f64> = (0..300_000).map(|i| noise(i) + noise(7 * i)).collect();
        for count in [100_000, 200_000] {
            assert_eq!(largest(&longer, count), ranked(&longer, count), "{count}");
        }
        let values = list(&noise);
        for count in [60, 2_400, 30_000] {
            let [low, high] = bounds(&values, count)
                .map(|bound| bound.map(|x| number_of(&words(&values, |value| value >= x))));
            assert!(low.is_some_and(|n| n > count && n - count < 5_000), "{low:?}");
            assert!(high.is_none_or(|n| n < count && count - n < 5_000), "{high:?}");
        }
    }

    /// The sample of a list takes every eighth value, at least 64; it may say nothing of the others.
    #[test]
    fn largest_of_short_lists() {
        let noise = |i: usize| ((i * 2_654_435_761) % 65_521) as f64 / 65_521.0;
        for n in [511, 512, 513, 2_000, 4_096, 8_191] {
            let list = |of: &dyn Fn(usize) -> f64| (0..n).map(of).collect::<Vec<f64>>();
            let sampled = |i: usize| f64::from(u8::from(i.is_multiple_of(LEAST_STRIDE)));
            for values in [
                list(&noise),
                list(&|i| noise(i) + sampled(i)),
                list(&|i| noise(i) - sampled(i)),
                list(&|i| i as f64),
                list(&|i| (i % 7) as f64),
                list(&|_| 0.25),
            ] {
                for count in [1, 2, n / 20, n / 8, n / 5, n / 2, n - 1, n] {
                    assert_eq!(largest(&values, count), ranked(&values, count), "{n} {count}");
                }
            }
            let is_sampled = bounds(&list(&noise), n / 5)[0].is_some();
            assert_eq!(is_sampled, n >= LEAST_STRIDE * LEAST_SAMPLED, "{n}");
        }
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
