//! The calibration rows to which shifts are fitted, and the held-out rows on which their quality is reported.

use std::ops::Range;

use crate::kv::static_set::{SINKS, WINDOW};
use crate::stats::sampling::{TextBlocks, evenly};

/// The most rows that a fit takes.
pub const MAX_ROWS: usize = 512;
/// The most held-out rows on which quality is reported.
pub const MAX_HELD_OUT_ROWS: usize = 256;

/// The rows of a calibration text whose queries are read; the same for every head.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Rows whose queries are needed, ascending.
    pub rows: Vec<usize>,
    /// Whether each row takes part in the fit; the other rows are held out.
    pub kept: Vec<bool>,
    /// The blocks of the text.
    pub blocks: TextBlocks,
}

impl Sample {
    /// Chooses at most [`MAX_ROWS`] kept rows and at most [`MAX_HELD_OUT_ROWS`] other rows, evenly spaced among the
    /// rows in the second half of every block that see a position outside the static set if the model has no sliding
    /// window.
    ///
    /// `block_start` holds the first row of each block and then n; `kept` marks the rows of the fit.
    pub fn new(block_start: &[u32], kept: &[bool]) -> Self {
        let blocks = TextBlocks::new(block_start);
        let late = |block: Range<usize>| {
            let first = (block.len() / 2).max(SINKS + WINDOW);
            (block.start + first).min(block.end)..block.end
        };
        let rows = blocks.iter().flat_map(late);
        let (fitted, held_out): (Vec<usize>, Vec<usize>) = rows.partition(|row| kept[*row]);
        let mut rows = evenly(&fitted, MAX_ROWS);
        rows.extend(evenly(&held_out, MAX_HELD_OUT_ROWS));
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
        let sample = Sample::new(&block_start, &kept);
        let fitted: Vec<usize> = (128..160).chain(1160..1660).chain([2228]).collect();
        let n = fitted.len();
        let expected = (0..MAX_ROWS).map(|j| fitted[j * n / MAX_ROWS]);
        let found = sample.rows.iter().zip(&sample.kept);
        let of = |wanted: bool| found.clone().filter(move |(_, kept)| **kept == wanted);
        assert!(of(true).map(|(row, _)| *row).eq(expected));
        assert_eq!(of(false).count(), MAX_HELD_OUT_ROWS);
        assert!(of(false).all(|(row, _)| (1660..2160).contains(row)));
        assert!(sample.rows.is_sorted());
        assert!(Sample::new(&[0, 68], &[true; 68]).rows.is_empty());
    }
}
