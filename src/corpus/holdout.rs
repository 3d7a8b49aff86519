//! The draw of the held-out blocks.

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{Corpus, HOLD_OUT_STREAM};

/// A document of at least one token in this many is large: it is never held out as a whole.
const LARGE: usize = 20;

impl Corpus {
    /// Tells whether a document, given its blocks, is large: never held out as a whole.
    pub(super) fn is_large(&self, blocks: &Range<usize>) -> bool {
        let [first, end] = [blocks.start, blocks.end].map(|block| self.block_start[block] as usize);
        first < end && LARGE * (end - first) >= self.n_tokens()
    }

    /// Holds out max(1, round(share x blocks)) blocks of the documents of a kind, but never all of them: blocks in a
    /// random order, without those that would leave nothing of a large document. If too few blocks remain, the second
    /// halves of the first blocks that were left out make up for them. Of a single block, that share of the positions is
    /// held out, the last ones. `documents` has the blocks of each document, in order.
    pub(super) fn hold_out(&mut self, documents: &[Range<usize>], kind: u64, share: f64) {
        let (Some(first), Some(last)) = (documents.first(), documents.last()) else {
            return;
        };
        let blocks = first.start..last.end;
        if share == 0.0 || blocks.is_empty() {
            return;
        }
        let count = |of: usize| ((share * of as f64).round() as usize).clamp(1, of.max(2) - 1);
        if blocks.len() == 1 {
            self.hold_out_end(blocks.start, count(self.block(blocks.start).len()));
            return;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(HOLD_OUT_STREAM + kind);
        let mut missing = count(blocks.len());
        let mut order: Vec<usize> = blocks.collect();
        let mut left: Vec<usize> = documents.iter().map(Range::len).collect();
        let mut refused = Vec::new();
        for i in 0..order.len() {
            if missing == 0 {
                break;
            }
            let other = rng.gen_range(i..order.len());
            order.swap(i, other);
            let block = order[i];
            let document = documents.partition_point(|blocks| blocks.end <= block);
            if left[document] == 1 && self.is_large(&documents[document]) {
                refused.push(block);
                continue;
            }
            left[document] -= 1;
            missing -= 1;
            self.held_out.push((block, 0, self.block(block).len()));
        }
        for block in refused.into_iter().take(missing) {
            self.hold_out_end(block, self.block(block).len() / 2);
        }
    }

    /// Holds out the last `count` positions of a block: at least one, and not all.
    fn hold_out_end(&mut self, block: usize, count: usize) {
        let len = self.block(block).len();
        if len > 1 {
            self.held_out.push((block, len - count.clamp(1, len - 1), len));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CorpusOptions;
    use super::*;

    /// Cuts documents of these lengths into blocks.
    fn corpus(lengths: &[usize], uuids: usize, seq_len: usize, holdout: f64, seed: u64) -> Corpus {
        let options = CorpusOptions {
            seq_len: None,
            max_tokens: 0,
            uuid_tokens: Some(0),
            holdout,
            seed,
        };
        let text: Vec<Vec<u32>> = lengths.iter().map(|n| vec![1; *n]).collect();
        Corpus::cut(&text, vec![2; uuids], seq_len, &options).expect("tokens")
    }

    /// The blocks of the draw without the rule for large documents.
    fn drawn(blocks: usize, holdout: f64, seed: u64) -> Vec<usize> {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(HOLD_OUT_STREAM);
        let count = ((holdout * blocks as f64).round() as usize).clamp(1, blocks - 1);
        let mut order: Vec<usize> = (0..blocks).collect();
        for i in 0..count {
            let other = rng.gen_range(i..blocks);
            order.swap(i, other);
        }
        order.truncate(count);
        order
    }

    /// The blocks of each document.
    fn blocks_of(lengths: &[usize], seq_len: usize) -> Vec<Range<usize>> {
        let mut first = 0;
        let document = |n: &usize| {
            let blocks = first..first + n.div_ceil(seq_len);
            first = blocks.end;
            blocks
        };
        lengths.iter().map(document).collect()
    }

    /// Two documents of two blocks and one of a single block, which seed 0 draws.
    #[test]
    fn the_only_block_of_a_large_document_is_replaced_by_the_next_one_drawn() {
        let lengths = [128, 128, 64];
        assert_eq!(drawn(5, 0.1, 0), [4]);
        let two = drawn(5, 0.4, 0);
        assert_eq!(two[0], 4);
        let one = corpus(&lengths, 0, 64, 0.1, 0);
        assert_eq!(one.held_out, [(two[1], 0, 64)]);
        let documents = one.manifest().documents.expect("documents");
        assert!(
            documents.iter().all(|of| of.usage.fitted_tokens > 0),
            "{documents:?}"
        );
        // UUIDs are a kind of their own, with a draw of their own.
        let with = corpus(&lengths, 32, 64, 0.1, 0);
        assert_eq!(with.held_out, [(two[1], 0, 64), (5, 29, 32)]);
    }

    #[test]
    fn no_large_document_is_held_out_as_a_whole() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let (mut same, mut other, mut parts) = (0, 0, 0);
        for seed in 0..3000 {
            let count = rng.gen_range(1..30);
            let lengths: Vec<usize> = (0..count)
                .map(|_| rng.gen_range(0..4) * rng.gen_range(2..9))
                .collect();
            let (seq_len, holdout) = (rng.gen_range(2..12), rng.gen_range(0.01..0.99));
            let total: usize = lengths.iter().sum();
            let blocks = blocks_of(&lengths, seq_len);
            let n_blocks = blocks.iter().map(Range::len).sum();
            if n_blocks < 2 {
                continue;
            }
            let found = corpus(&lengths, 0, seq_len, holdout, seed);
            assert!(found.is_consistent());
            let large = blocks.iter().filter(|of| {
                20 * found.block_start[of.end] as usize >= total + 20 * found.block_start[of.start] as usize
            });
            let large: Vec<&Range<usize>> = large.filter(|of| !of.is_empty()).collect();
            for of in &large {
                // A document of one token cannot be divided, and is fitted.
                assert!(
                    found.usage((*of).clone()).fitted_tokens > 0,
                    "{lengths:?} {seq_len} {holdout} {seed}"
                );
            }
            let mut drawn = drawn(n_blocks, holdout, seed);
            drawn.sort_unstable();
            let whole: Vec<(usize, usize, usize)> = drawn
                .iter()
                .map(|block| (*block, 0, found.block(*block).len()))
                .collect();
            let bites = large
                .iter()
                .any(|of| (**of).clone().all(|block| drawn.contains(&block)));
            if !bites {
                assert_eq!(found.held_out, whole, "{lengths:?} {seq_len} {holdout} {seed}")
            } else {
                assert_ne!(found.held_out, whole);
                let is_part =
                    |&(block, first, end): &(usize, usize, usize)| end - first < found.block(block).len();
                if found.held_out.iter().any(is_part) {
                    parts += 1;
                } else {
                    // A block of one token has no end that could be held out for it.
                    let held: Vec<usize> = found.held_out.iter().map(|(block, ..)| *block).collect();
                    let single = |block: &usize| found.block(*block).len() == 1 && !held.contains(block);
                    let single = large.iter().flat_map(|of| (**of).clone()).filter(single).count();
                    assert!(held.len() <= whole.len() && held.len() + single >= whole.len());
                }
                other += 1;
            }
            same += usize::from(!bites);
        }
        // Every case occurs.
        assert!(
            same > 300 && other - parts > 100 && parts > 100,
            "{same} {other} {parts}"
        );
    }

    /// Documents of one block each, all of them large: the second half of the drawn block is held out.
    #[test]
    fn halves_are_held_out_where_every_block_is_a_document() {
        let lengths = [40, 40, 40, 20];
        for seed in 0..8 {
            let found = corpus(&lengths, 0, 40, 0.25, seed);
            let block = drawn(4, 0.25, seed)[0];
            assert_eq!(found.held_out, [(block, lengths[block] / 2, lengths[block])]);
        }
        // A small document can be held out as a whole.
        let mut lengths = vec![40; 10];
        lengths.push(4);
        assert_eq!(corpus(&lengths, 0, 40, 0.05, 0).held_out, [(10, 0, 4)]);
    }

    #[test]
    fn a_manifest_counts_what_was_fitted() {
        let found = corpus(&[128, 3, 64], 40, 64, 0.3, 5);
        let manifest = found.manifest();
        let kinds = manifest.kinds.clone().expect("kinds");
        let names: Vec<&str> = kinds.iter().map(|of| of.kind.as_str()).collect();
        assert_eq!(names, ["text", "uuid"]);
        for (kind, blocks) in kinds.iter().zip([0..4, 4..5]) {
            assert_eq!(kind.usage, found.usage(blocks));
        }
        let documents = manifest.documents.clone().expect("documents");
        let places: Vec<[usize; 2]> = documents
            .iter()
            .map(|of| [of.first_block, of.usage.blocks])
            .collect();
        assert_eq!(places, [[0, 2], [3, 1]]);
        assert_eq!(
            super::super::Documents::from_manifest(&manifest, 5),
            found.documents
        );
        assert_eq!(super::super::Documents::from_manifest(&manifest, 3), None);
        // A file that does not say is of the same text.
        let old = super::super::CorpusManifest {
            kinds: None,
            documents: None,
            ..manifest.clone()
        };
        assert!(old == manifest && old.used().is_empty() && old.used_by_document().is_empty());
    }
}
