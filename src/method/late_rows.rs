//! Rows of a calibration text late in their blocks, whose queries stand for those of decode steps.

use std::ops::Range;

use ndarray::Array2;

use crate::artifact::LayerStates;
use crate::error::Result;
use crate::kv::static_set::{SINKS, WINDOW};
use crate::model::rope::RopeTable;
use crate::stats::sampling::{TextBlocks, evenly};

/// The rows of a calibration text whose queries are read; the same for every head.
#[derive(Clone, Debug)]
pub struct LateRows {
    /// Rows whose queries are needed, ascending.
    pub rows: Vec<usize>,
    /// Whether each row takes part in the fit; the other rows are held out.
    pub kept: Vec<bool>,
    /// The blocks of the text.
    pub blocks: TextBlocks,
}

impl LateRows {
    /// Chooses at most so many kept rows, and at most so many other rows, as `most` says, evenly spaced among the rows in the
    /// second half of every block that see a position outside the static set if the model has no sliding window.
    ///
    /// `block_start` holds the first row of each block and then n; `kept` marks the rows of the fit.
    pub fn new(block_start: &[u32], kept: &[bool], most: [usize; 2]) -> Self {
        let blocks = TextBlocks::new(block_start);
        let late = |block: Range<usize>| {
            let first = (block.len() / 2).max(SINKS + WINDOW);
            (block.start + first).min(block.end)..block.end
        };
        let rows = blocks.iter().flat_map(late);
        let (fitted, held_out): (Vec<usize>, Vec<usize>) = rows.partition(|row| kept[*row]);
        let mut rows = evenly(&fitted, most[0]);
        rows.extend(evenly(&held_out, most[1]));
        rows.sort_unstable();
        Self {
            kept: rows.iter().map(|row| kept[*row]).collect(),
            rows,
            blocks,
        }
    }

    /// Counts the rows of the fit.
    pub fn n_kept(&self) -> usize {
        self.kept.iter().filter(|kept| **kept).count()
    }

    /// Reads the queries of these rows for every query head of a KV head, rotated to their positions and divided by sqrt(d):
    /// `[rows,d]` each. `table` has the rotations of the positions of the longest block.
    ///
    /// # Errors
    /// The states cannot be read.
    pub fn queries(
        &self,
        states: &LayerStates,
        table: &RopeTable,
        kv_head: usize,
    ) -> Result<Vec<Array2<f32>>> {
        let r = states.sizes.group();
        let scale = 1.0 / (states.sizes.head_dim as f32).sqrt();
        let heads = kv_head * r..(kv_head + 1) * r;
        let queries = heads.map(|head| {
            let mut queries = (states.read.q)(head)?;
            self.blocks.rotate(&mut queries, &self.rows, table, scale)?;
            Ok(queries)
        });
        queries.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_late_in_their_block_and_see_a_candidate() {
        // Blocks of 60 (too short), 100, 2,000 (the second half held out) and 69 rows.
        let block_start = [0, 60, 160, 2160, 2229];
        let mut kept = vec![true; 2229];
        kept[1660..2160].fill(false);
        let sample = LateRows::new(&block_start, &kept, [512, 256]);
        let fitted: Vec<usize> = (128..160).chain(1160..1660).chain([2228]).collect();
        let n = fitted.len();
        let expected = (0..512).map(|j| fitted[j * n / 512]);
        let found = sample.rows.iter().zip(&sample.kept);
        let of = |wanted: bool| found.clone().filter(move |(_, kept)| **kept == wanted);
        assert!(of(true).map(|(row, _)| *row).eq(expected));
        assert_eq!(of(false).count(), 256);
        assert!(of(false).all(|(row, _)| (1660..2160).contains(row)));
        assert!(sample.rows.is_sorted());
        // Fewer rows are some of these.
        let fewer = LateRows::new(&block_start, &kept, [128, 64]);
        assert_eq!(fewer.rows.len(), 192);
        assert!(fewer.rows.iter().all(|row| sample.rows.contains(row)));
        assert!(LateRows::new(&[0, 68], &[true; 68], [512, 256]).rows.is_empty());
    }
}
