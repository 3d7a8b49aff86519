//! The ranges of channels, and the codes of the rows that are packed.

use half::f16;
use ndarray::{Array2, ArrayView1};

use crate::compute::attention::LANES;
use crate::float::{f16_at_least, saturating_f16};
use crate::kv::map::RowMap;

/// The range of a channel, over that of its numbers in the rows seen so far: the rows to come exceed what was seen. Chosen on
/// development text of SmolLM2 (docs/dev/caches.md).
const SPAN: f32 = 1.2;
/// The largest code of both layers.
const MOST: f32 = 255.0;
/// How far beyond the range of its channel, in codes, a number may be that is moved to the end of the range: an eighth of the
/// range. A number beyond that gives all channels new ranges, from its row on.
const BEYOND: f32 = 32.0;

/// The ranges of all channels, from a row on.
///
/// # Numerics
/// A channel x has the code `round((x - least) / step)`, within 0 and 255. Its upper 4 bits are in the upper layer. It is read as
/// the code times the step, plus the least; without its lower layer, as if its lower 4 bits were 7.5.
#[derive(Clone)]
pub(super) struct Ranges {
    /// The row, counted from the first packed one.
    pub first: usize,
    least: Vec<f16>,
    step: Vec<f16>,
}

impl Ranges {
    /// Makes ranges for rows from `first` on, from the least and the largest number seen in each channel.
    fn new(first: usize, seen: &[[f32; 2]]) -> Self {
        let of = |[low, high]: &[f32; 2]| {
            // Halves, because the range of two floats may be no float.
            let (middle, reach) = (0.5 * low + 0.5 * high, (0.5 * high - 0.5 * low) * SPAN);
            let least = saturating_f16(middle - reach);
            let step = f16_at_least(((middle + reach - least.to_f32()) / MOST).max(0.0));
            (least, step)
        };
        let (least, step) = seen.iter().map(of).unzip();
        Self { first, least, step }
    }

    /// Returns the least and the step of each channel.
    pub fn channels(&self) -> impl Iterator<Item = [f32; 2]> {
        let pairs = self.least.iter().zip(&self.step);
        pairs.map(|(least, step)| [least.to_f32(), step.to_f32()])
    }

    /// Returns whether a number of a row is far beyond its range.
    fn is_left(&self, row: &[f32]) -> bool {
        let is_far = |(x, [least, step]): (&f32, [f32; 2])| {
            *x < least - BEYOND * step || *x > least + (MOST + BEYOND) * step
        };
        row.iter().zip(self.channels()).any(is_far)
    }

    /// Returns the codes of a row.
    fn codes(&self, row: &[f32]) -> impl Iterator<Item = u8> {
        row.iter().zip(self.channels()).map(|(x, [least, step])| {
            let code = if step > 0.0 { (x - least) / step } else { 0.0 };
            code.round().clamp(0.0, MOST) as u8
        })
    }

    /// Returns the steps in chunks, with zeros beyond the last channel.
    pub fn steps(&self) -> Vec<[f32; LANES]> {
        let mut chunks = vec![[0.0; LANES]; self.step.len().div_ceil(LANES)];
        let channels = chunks.as_flattened_mut().iter_mut();
        channels
            .zip(&self.step)
            .for_each(|(to, step)| *to = step.to_f32());
        chunks
    }
}

/// Packs rows that left the window.
pub(super) struct Packer<'a> {
    pub map: &'a RowMap,
    pub seen: &'a mut [[f32; 2]],
    pub ranges: &'a mut Vec<Ranges>,
    pub packed: &'a mut usize,
    pub codes: &'a mut Vec<u8>,
}

impl Packer<'_> {
    /// Fixes the first ranges by rows, `[FIRST,d]`, and packs them.
    pub fn first(&mut self, rows: &Array2<f32>) {
        let rows: Vec<Vec<f32>> = rows.rows().into_iter().map(|row| self.see(row)).collect();
        self.ranges.push(Ranges::new(0, self.seen));
        rows.iter().for_each(|row| self.pack(row));
    }

    /// Packs a later row.
    pub fn next(&mut self, row: ArrayView1<f32>) {
        let row = self.see(row);
        if let Some(ranges) = self.ranges.last().filter(|ranges| ranges.is_left(&row)) {
            let new = Ranges::new(*self.packed, self.seen);
            // Rounding may leave a number outside whatever the ranges are.
            if (&new.least, &new.step) != (&ranges.least, &ranges.step) {
                self.ranges.push(new);
            }
        }
        self.pack(&row);
    }

    /// Maps a row, and notes its numbers.
    fn see(&mut self, row: ArrayView1<f32>) -> Vec<f32> {
        let mut row = row.to_vec();
        self.map.apply(&mut row);
        // A number that is not finite would spoil the ranges of all later rows.
        let finite = self.seen.iter_mut().zip(&row).filter(|(_, x)| x.is_finite());
        for ([low, high], x) in finite {
            (*low, *high) = (low.min(*x), high.max(*x));
        }
        row
    }

    fn pack(&mut self, row: &[f32]) {
        if let Some(ranges) = self.ranges.last() {
            self.codes.extend(ranges.codes(row));
            *self.packed += 1;
        }
    }
}
