//! Rows sampled from the blocks of a calibration text.

use std::ops::Range;

use ndarray::Array2;
use rayon::prelude::*;

use crate::compute::simd;
use crate::error::{Error, Result};
use crate::model::rope::RopeTable;

/// The rows of each block of a text.
#[derive(Clone, Debug)]
pub struct TextBlocks(Vec<Range<usize>>);

impl TextBlocks {
    /// Makes the blocks from the first row of each block, followed by n.
    pub fn new(block_start: &[u32]) -> Self {
        let ends = block_start.windows(2);
        Self(ends.map(|w| w[0] as usize..w[1] as usize).collect())
    }

    /// Returns the block of a row.
    pub fn containing(&self, row: usize) -> Range<usize> {
        self.0[self.0.partition_point(|block| block.end <= row)].clone()
    }

    /// Lists the blocks.
    pub fn iter(&self) -> impl Iterator<Item = Range<usize>> {
        self.0.iter().cloned()
    }

    /// Rotates `x` `[n,d]`, the rows `rows` of the text, to their positions within their blocks, and scales them.
    ///
    /// # Errors
    /// Rows that are not contiguous.
    pub fn rotate(&self, x: &mut Array2<f32>, rows: &[usize], table: &RopeTable, scale: f32) -> Result<()> {
        let d = x.ncols();
        let x = x
            .as_slice_mut()
            .ok_or_else(|| Error::internal("internal: rows to rotate are not contiguous"))?;
        x.par_chunks_exact_mut(d).zip(rows).for_each(|(x, row)| {
            table.rotate(x, row - self.containing(*row).start);
            simd::scale(x, scale);
        });
        Ok(())
    }

    /// Returns the length of the longest block.
    pub fn longest(&self) -> usize {
        self.0.iter().map(Range::len).max().unwrap_or(0)
    }
}

/// Returns at most `most` of the items, evenly spaced: item j of m is number floor(j n / m) of n.
pub fn evenly(items: &[usize], most: usize) -> Vec<usize> {
    let m = items.len().min(most);
    (0..m).map(|j| items[j * items.len() / m]).collect()
}

/// Returns the rows that take part in a fit, at most `most` of them, evenly spaced.
pub fn kept_rows(kept: &[bool], most: usize) -> Vec<usize> {
    let rows: Vec<usize> = (0..kept.len()).filter(|row| kept[*row]).collect();
    evenly(&rows, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_blocks_and_samples_are_even() {
        let blocks = TextBlocks::new(&[0, 3, 3, 10]);
        assert_eq!(
            [
                blocks.containing(0),
                blocks.containing(2),
                blocks.containing(3),
                blocks.containing(9)
            ],
            [0..3, 0..3, 3..10, 3..10]
        );
        assert_eq!((blocks.longest(), blocks.iter().count()), (7, 3));
        assert_eq!(TextBlocks::new(&[0]).longest(), 0);
        let items: Vec<usize> = (10..20).collect();
        assert_eq!(evenly(&items, 4), [10, 12, 15, 17]);
        assert_eq!(evenly(&items, 99), items);
        assert!(evenly(&[], 4).is_empty());
        assert_eq!(kept_rows(&[true, false, true, true, true], 2), [0, 3]);
    }
}
