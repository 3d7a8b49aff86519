//! Numbers of at most 8 bits, stored without gaps.

use std::ops::Range;

use crate::kv::lines::growth;

/// Numbers of the same few bits each, the first in the lowest bits of the first byte.
#[derive(Clone)]
pub(super) struct PackedCodes {
    /// Bits per number, 1 to 8.
    bits: usize,
    /// How many numbers there are.
    len: usize,
    /// The numbers, and at least one byte more, so that two bytes can be read from any place.
    bytes: Vec<u8>,
}

impl PackedCodes {
    /// Makes an empty list of numbers of `bits` bits, 1 to 8.
    pub fn new(bits: u8) -> Self {
        Self {
            bits: usize::from(bits),
            len: 0,
            bytes: Vec::new(),
        }
    }

    /// Removes all numbers.
    pub fn clear(&mut self) {
        self.len = 0;
        self.bytes.clear();
    }

    /// Appends numbers below 2^bits.
    pub fn extend(&mut self, numbers: impl ExactSizeIterator<Item = u8>) {
        let more = numbers.len();
        let needed = self.span(0..self.len + more).end + 1;
        let missing = needed.saturating_sub(self.bytes.len());
        self.bytes
            .reserve_exact(growth(self.bytes.len(), self.bytes.capacity(), missing));
        self.bytes.resize(needed.max(self.bytes.len()), 0);
        for number in numbers {
            let at = self.len * self.bits;
            let [low, high] = (u16::from(number) << (at % 8)).to_le_bytes();
            self.bytes[at / 8] |= low;
            self.bytes[at / 8 + 1] |= high;
            self.len += 1;
        }
    }

    /// Returns the numbers in a range, a byte each.
    pub fn get(&self, range: Range<usize>) -> Vec<u8> {
        let mask = (1u16 << self.bits) - 1;
        let of = |i: usize| {
            let at = i * self.bits;
            let two = u16::from_le_bytes([self.bytes[at / 8], self.bytes[at / 8 + 1]]);
            (two >> (at % 8) & mask) as u8
        };
        range.map(of).collect()
    }

    /// Returns which bytes hold the numbers in a range.
    pub fn span(&self, range: Range<usize>) -> Range<usize> {
        range.start * self.bits / 8..(range.end * self.bits).div_ceil(8)
    }

    /// Returns the allocated bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.capacity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::numbers;

    #[test]
    fn numbers_come_back_in_their_bits() {
        let mut next = numbers(3);
        for bits in 1..=8u8 {
            let mut packed = PackedCodes::new(bits);
            for round in 0..2 {
                let mut all = Vec::new();
                for count in [0, 1, 2, 5, 300, 1, 7] {
                    let some: Vec<u8> = (0..count).map(|_| (next() >> 24) as u8 >> (8 - bits)).collect();
                    packed.extend(some.iter().copied());
                    all.extend(some);
                    assert_eq!(packed.get(0..all.len()), all, "{bits} {round}");
                }
                assert_eq!(packed.get(17..99), all[17..99]);
                // Nothing but one byte is stored beside the bits themselves.
                assert_eq!(
                    packed.bytes.len(),
                    (all.len() * usize::from(bits)).div_ceil(8) + 1
                );
                packed.clear();
                assert!(packed.get(0..0).is_empty());
            }
        }
    }
}
