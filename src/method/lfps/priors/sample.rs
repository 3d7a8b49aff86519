//! The rows from which the priors are computed. They depend only on the blocks, so they are known before any state is
//! captured, and only the queries of these rows need to be kept.

use std::ops::Range;

use super::HISTORY;
use crate::kv::static_set::SINKS;
use crate::stats::sampling::{TextBlocks, evenly};

/// The most rows, over all blocks, that single-row quantities are taken from.
pub const MAX_ROWS: usize = 4096;
/// The most anchors. An anchor is a row that is measured together with the rows before it.
pub const MAX_ANCHORS: usize = 64;
/// Rows are sampled from this position of their block on; in a block shorter than twice this, from the middle on.
const FIRST: usize = 1024;
/// Rows per tile.
pub(super) const TILE: usize = 64;

/// The rows of a calibration text from which the priors are computed; the same for every head.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Rows whose queries are needed, ascending.
    pub rows: Vec<usize>,
    /// The blocks of the text.
    pub(super) blocks: TextBlocks,
    /// The rows that single-row quantities are taken from, in tiles that each lie within one block.
    pub(super) tiles: Vec<Tile>,
    /// The anchors, each with the [`HISTORY`] rows before it; all of them are in `rows`.
    pub(super) anchors: Vec<Tile>,
}

/// Rows of one block.
#[derive(Clone, Debug)]
pub(super) struct Tile {
    /// Rows of the block.
    pub block: Range<usize>,
    /// The indices of the tile's rows in `Sample::rows`, ascending.
    pub at: Vec<usize>,
}

impl Sample {
    /// Chooses among the kept rows that see a non-sink and are at position min(1024, L/2) of their block or later,
    /// where L is the length of the block. Single-row quantities use at most 4,096 of these rows. Anchors are at most
    /// 64 of those whose 32 predecessors are also kept and see a non-sink. Both choices are evenly spaced: item j of m
    /// is number floor(j n / m) of n.
    ///
    /// `block_start` holds the first row of each block and then n; `kept` marks the rows that may be chosen.
    pub fn new(block_start: &[u32], kept: &[bool]) -> Self {
        let blocks = TextBlocks::new(block_start);
        let (mut eligible, mut looks_back) = (Vec::new(), Vec::new());
        for block in blocks.iter() {
            let first = FIRST.min(block.len() / 2);
            let mut kept_before = 0;
            for p in SINKS..block.len() {
                let row = block.start + p;
                if kept[row] && p >= first {
                    eligible.push(row);
                    if kept_before >= HISTORY {
                        looks_back.push(row);
                    }
                }
                kept_before = if kept[row] { kept_before + 1 } else { 0 };
            }
        }
        let chosen = evenly(&eligible, MAX_ROWS);
        let anchors = evenly(&looks_back, MAX_ANCHORS);
        let mut rows = chosen.clone();
        let with_history = |row: usize| (row - HISTORY..row + 1).collect::<Vec<usize>>();
        rows.extend(anchors.iter().flat_map(|row| with_history(*row)));
        rows.sort_unstable();
        rows.dedup();
        let at = |row: usize| rows.partition_point(|r| *r < row);
        let tile_of = |rows: &[usize]| Tile {
            block: blocks.containing(rows[0]),
            at: rows.iter().map(|row| at(*row)).collect(),
        };
        let tiles = chosen
            .chunk_by(|a, b| blocks.containing(*a) == blocks.containing(*b))
            .flat_map(|of_block| of_block.chunks(TILE))
            .map(tile_of)
            .collect();
        let anchors = anchors.iter().map(|row| with_history(*row));
        let anchors = anchors.map(|rows| tile_of(&rows)).collect();
        Self {
            rows,
            blocks,
            tiles,
            anchors,
        }
    }

    /// Returns the number of rows that single-row quantities are taken from.
    pub fn n_rows(&self) -> usize {
        self.tiles.iter().map(|t| t.at.len()).sum()
    }

    /// Returns the number of anchors.
    pub fn n_anchors(&self) -> usize {
        self.anchors.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_follow_the_rule() {
        // Blocks of 3 rows (sinks alone), 100, 40 (not kept), 6,000 with a gap, and 30 rows.
        let block_start = [0, 3, 103, 143, 6143, 6173];
        let mut kept = vec![true; 6173];
        kept[103..143].fill(false);
        kept[3000..3010].fill(false);
        let sample = Sample::new(&block_start, &kept);
        let rows = |tiles: &[Tile]| -> Vec<usize> {
            let at = tiles.iter().flat_map(|t| t.at.clone());
            at.map(|i| sample.rows[i]).collect()
        };
        let kept_range = |a: usize, b: usize| (a..b).filter(|i| kept[*i]).collect::<Vec<_>>();
        // From L/2, from 1,024 and again from L/2 on.
        let eligible = [
            kept_range(53, 103),
            kept_range(1167, 6143),
            kept_range(6158, 6173),
        ]
        .concat();
        let n = eligible.len();
        assert_eq!(sample.n_rows(), 4096);
        let expected: Vec<usize> = (0..4096).map(|j| eligible[j * n / 4096]).collect();
        assert_eq!(rows(&sample.tiles), expected);
        assert!(sample.tiles.iter().all(|t| t.at.len() <= 64));

        // 32 kept rows before the row, none of them a sink: neither the first 36 rows of a block nor the 32 rows after
        // the gap.
        let looks_back: Vec<usize> = eligible
            .iter()
            .copied()
            .filter(|r| match r {
                0..103 => *r >= 3 + 36,
                103..6143 => (r - 32..*r).all(|i| kept[i]),
                _ => false,
            })
            .collect();
        let n = looks_back.len();
        assert_eq!(sample.n_anchors(), 64);
        for (j, tile) in sample.anchors.iter().enumerate() {
            let row = looks_back[j * n / 64];
            assert_eq!(
                rows(std::slice::from_ref(tile)),
                (row - 32..=row).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn short_texts_have_no_rows() {
        for kept in [vec![true; 4], vec![false; 4], Vec::new()] {
            let sample = Sample::new(&[0, kept.len() as u32], &kept);
            assert_eq!((sample.n_rows(), sample.n_anchors()), (0, 0));
            assert!(sample.rows.is_empty());
        }
    }
}
