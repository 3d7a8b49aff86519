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
    use crate::cmd::share::parse_layers;
    use crate::corpus::Corpus;

    #[test]
    fn blocks_are_divided_as_a_dump_divides_them() {
        for lengths in [vec![10; 8], vec![5, 200, 5], vec![30, 30, 30, 110, 1, 1, 1, 90]] {
            let ends = lengths.iter().scan(0, |sum, length| {
                *sum += length;
                Some(*sum)
            });
            let block_start: Vec<u32> = [0].into_iter().chain(ends).collect();
            let corpus = Corpus {
                ids: vec![0; block_start[lengths.len()] as usize],
                block_start,
                held_out: Vec::new(),
                seq_len: 200,
                seed: 0,
            };
            for count in 1..=lengths.len() {
                let shard = |index| corpus.shard(index, count).unwrap();
                let expected: Vec<Range<usize>> = (0..count).map(shard).collect();
                assert_eq!(blocks(&corpus.block_start, count), expected);
            }
        }
    }

    #[test]
    fn layers_are_divided_as_sections_divide_them_into_no_more_tasks_than_needed() {
        for (n_layers, count, fewest) in [
            (32, 20, 16),
            (32, 32, 32),
            (32, 99, 32),
            (126, 100, 63),
            (5, 1, 1),
        ] {
            assert_eq!(fewest_ranges(n_layers, count), fewest);
            let ranges = layers(n_layers, fewest);
            for (j, range) in ranges.iter().enumerate() {
                let share = parse_layers(&format!("{j}/{fewest}")).unwrap();
                assert_eq!(share.resolve(n_layers, &|_| None).ok(), Some(range.clone()));
            }
            let longest = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).max();
            assert_eq!(longest(&ranges), longest(&layers(n_layers, count.min(n_layers))));
        }
    }
}
