//! How text and layers are divided among tasks.

use std::ops::Range;

/// Divides blocks into `count` ranges of consecutive blocks with about as many tokens each, as `dump --shard` does; none
/// is empty. `block_start` holds the first token of each block, then the number of tokens; there are at least `count`
/// blocks.
pub fn blocks(block_start: &[u32], count: usize) -> Vec<Range<usize>> {
    let blocks = block_start.len() - 1;
    let tokens = u128::from(block_start[blocks]);
    let middle = |start: &[u32]| u128::from(start[0]) + u128::from(start[1]);
    let pairs: Vec<u128> = block_start.windows(2).map(middle).collect();
    let mut first = 0;
    let mut ranges = Vec::with_capacity(count);
    for shard in 1..=count {
        // Twice the tokens before the ideal cut; a block goes to the side on which its middle lies.
        let ideal = 2 * (shard as u128 * tokens) / count as u128;
        let end = pairs.partition_point(|middle| *middle < ideal);
        let end = match shard == count {
            true => blocks,
            // Every shard gets a block, and leaves one to each later shard.
            false => end.clamp(first + 1, blocks - (count - shard)),
        };
        ranges.push(first..end);
        first = end;
    }
    ranges
}

/// Divides layers into `count` ranges of about equal length, as `--layers J/M` does.
pub fn layers(n_layers: usize, count: usize) -> Vec<Range<usize>> {
    let first = |part: usize| part * n_layers / count;
    (0..count).map(|part| first(part)..first(part + 1)).collect()
}

/// Returns the smallest number of ranges, of at most `count`, whose longest has no more layers than with `count` ranges.
pub fn fewest_ranges(n_layers: usize, count: usize) -> usize {
    n_layers.div_ceil(n_layers.div_ceil(count.clamp(1, n_layers)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_whole_and_about_equal() {
        let starts = |lengths: &[u32]| {
            let ends = lengths.iter().scan(0, |sum, length| {
                *sum += length;
                Some(*sum)
            });
            [0].into_iter().chain(ends).collect::<Vec<u32>>()
        };
        assert_eq!(blocks(&starts(&[10; 8]), 4), [0..2, 2..4, 4..6, 6..8]);
        // The middle of the long block, 105, lies behind the first cut, 70, and before the second, 140.
        assert_eq!(blocks(&starts(&[5, 200, 5]), 3), [0..1, 1..2, 2..3]);
        assert_eq!(blocks(&starts(&[30, 30, 30, 110]), 2), [0..3, 3..4]);
        for count in 1..=9 {
            let ranges = blocks(&starts(&[1, 1, 1, 1, 500, 1, 1, 1, 1]), count);
            assert_eq!(ranges.len(), count);
            assert!(ranges.iter().all(|range| !range.is_empty()), "{ranges:?}");
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert_eq!((ranges[0].start, ranges[count - 1].end), (0, 9));
        }
    }

    #[test]
    fn layers_take_no_more_tasks_than_they_need() {
        assert_eq!(layers(32, 5), [0..6, 6..12, 12..19, 19..25, 25..32]);
        for (n_layers, count, fewest) in [
            (32, 20, 16),
            (32, 32, 32),
            (32, 99, 32),
            (126, 100, 63),
            (5, 1, 1),
        ] {
            assert_eq!(fewest_ranges(n_layers, count), fewest);
            let longest = |count| layers(n_layers, count).iter().map(Range::len).max();
            assert_eq!(longest(fewest), longest(count.min(n_layers)));
        }
    }
}
