//! The texts on which a verdict is measured: nothing was fitted to them.

mod probe;

use std::ops::Range;

use super::eval::Passage;
use crate::corpus::{Beyond, Corpus, Reserve};
pub use probe::QUESTIONS;
pub use probe::facts::{QuestionTokens, questions};
pub use probe::{LEAST_ACCURACY, LEAST_QUESTIONS, PLANNED_STEPS, Probe, ProbeKind, Score};

/// Most tokens of a block, unless it is one of full length.
pub const BLOCK: usize = 2048;

/// Blocks of text that pass the model before rows with a large loss are dropped, and texts that are asked about together.
pub const TOGETHER: usize = 8;

/// Blocks of UUIDs for every so many blocks of text.
const UUIDS: [usize; 2] = [2, 5];

/// Texts of one kind and length.
#[derive(Clone, Debug)]
pub struct Texts {
    /// `text` or `uuid`.
    pub kind: &'static str,
    /// Most tokens of a text.
    pub length: usize,
    /// How many of them come from beyond the calibration text; the others were held out from it.
    pub beyond: usize,
    /// The texts.
    pub passages: Vec<Passage>,
}

/// How many texts are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Tokens of text.
    pub tokens: usize,
    /// Most tokens of a block: [`BLOCK`], except where a calibration is only timed.
    pub block: usize,
    /// Number of tokens at the end of each text that are decoded one by one.
    pub steps: usize,
    /// Whether random UUIDs are wanted too.
    pub uuids: bool,
}

/// All texts of a verdict.
#[derive(Clone, Debug)]
pub struct Material {
    /// Blocks of text, which the limits apply to.
    pub text: Texts,
    /// Blocks of UUIDs, and a block of full length of each kind.
    pub others: Vec<Texts>,
}

impl Wanted {
    /// Returns the most tokens of a block, where the blocks of the calibration have at most `seq_len`.
    fn length(self, seq_len: usize) -> usize {
        self.block.min(seq_len).max(1)
    }

    /// Counts the blocks of text and of UUIDs.
    fn blocks(self, seq_len: usize) -> [usize; 2] {
        let text = (self.tokens / self.length(seq_len)).max(1);
        let uuids = if self.uuids {
            (UUIDS[0].saturating_mul(text)).div_ceil(UUIDS[1])
        } else {
            0
        };
        [text, uuids]
    }

    /// Returns how many tokens beyond the calibration text are needed: those of all blocks, and a block of full length
    /// of each kind.
    pub fn beyond(self, seq_len: usize) -> Beyond {
        let full = if seq_len > self.block { seq_len } else { 0 };
        let [text, uuids] = self
            .blocks(seq_len)
            .map(|blocks| blocks.saturating_mul(self.length(seq_len)))
            .map(|tokens| {
                if tokens > 0 {
                    tokens.saturating_add(full)
                } else {
                    0
                }
            });
        Beyond { text, uuids }
    }
}

impl Material {
    /// Collects the texts: of each kind the blocks beyond the calibration text, then, as far as these are too few, those
    /// that were held out from it. A block of full length is the next one beyond the text, or the longest held-out one.
    pub fn new(corpus: &Corpus, reserve: &Reserve, wanted: Wanted) -> Self {
        let text_blocks = corpus.documents.as_ref().map(|of| of.text_blocks);
        let text_blocks = text_blocks.unwrap_or(corpus.n_blocks());
        let kinds = [
            ("text", &reserve.text, 0..text_blocks),
            ("uuid", &reserve.uuids, text_blocks..corpus.n_blocks()),
        ];
        let counts = wanted.blocks(corpus.seq_len);
        let mut short = Vec::new();
        let mut full = Vec::new();
        for ((kind, beyond, blocks), count) in kinds.into_iter().zip(counts) {
            let held_out = HeldOut { corpus, blocks };
            let (own, long) = own_texts(kind, beyond, &held_out, count, wanted);
            short.push(own);
            full.extend(long);
        }
        let uuids = short.split_off(1);
        let uuids = uuids.into_iter().filter(|texts| !texts.passages.is_empty());
        Self {
            others: uuids.chain(full).collect(),
            text: short.swap_remove(0),
        }
    }

    /// Lists the texts that pass the model together, with the tokens and the steps of each: the first blocks of text, then
    /// all other texts, and the blocks with their questions if there are enough.
    pub fn passes(&self) -> Vec<Vec<[usize; 2]>> {
        let size = |passage: &Passage| [passage.ids.len(), passage.steps];
        let text = &self.text.passages;
        let (first, rest) = text.split_at(TOGETHER.min(text.len()));
        let others = self.others.iter().flat_map(|texts| &texts.passages);
        let rest: Vec<[usize; 2]> = rest.iter().chain(others).map(size).collect();
        let mut passes = vec![first.iter().map(size).collect(), rest];
        if Probe::is_possible(text.len()) {
            let asked = |passage: &Passage| [passage.ids.len(), PLANNED_STEPS];
            passes.extend(
                text.chunks(TOGETHER)
                    .map(|texts| texts.iter().map(asked).collect()),
            );
        }
        passes
    }

    /// Lists the texts, the blocks of text first.
    pub fn all(&self) -> impl Iterator<Item = &Texts> {
        std::iter::once(&self.text).chain(&self.others)
    }
}

/// Collects the blocks of a kind, and its block of full length.
fn own_texts(
    kind: &'static str,
    beyond: &[u32],
    held_out: &HeldOut,
    count: usize,
    wanted: Wanted,
) -> (Texts, Option<Texts>) {
    let (seq_len, steps) = (held_out.corpus.seq_len, wanted.steps);
    let length = wanted.length(seq_len);
    let passage = |ids: &[u32]| Passage::new(ids, steps);
    let mut passages: Vec<Passage> = beyond
        .chunks_exact(length)
        .take(count)
        .filter_map(passage)
        .collect();
    let own = passages.len();
    passages.extend(held_out.passages(length, count - own, steps));
    let rest = beyond.get(own * length..).unwrap_or_default();
    let length = passages
        .iter()
        .map(|passage| passage.ids.len())
        .max()
        .unwrap_or(0);
    let full = match rest.get(..seq_len).filter(|_| seq_len > wanted.block) {
        Some(ids) => passage(ids).map(|passage| (passage, 1)),
        None => held_out
            .longest(steps)
            .filter(|passage| passage.ids.len() > length)
            .map(|passage| (passage, 0)),
    };
    let full = full.map(|(passage, beyond)| Texts {
        kind,
        length: passage.ids.len(),
        beyond,
        passages: vec![passage],
    });
    let short = Texts {
        kind,
        length,
        beyond: own,
        passages,
    };
    (short, full)
}

/// The held-out ranges of a kind.
struct HeldOut<'a> {
    corpus: &'a Corpus,
    /// The blocks of the kind.
    blocks: Range<usize>,
}

impl HeldOut<'_> {
    /// Lists the block, the first held-out position and the end of each held-out range.
    fn ranges(&self) -> impl Iterator<Item = (usize, usize, usize)> + '_ {
        let ranges = self.corpus.held_out.iter().copied();
        ranges.filter(|(block, ..)| self.blocks.contains(block))
    }

    /// Returns positions of a block.
    fn ids(&self, block: usize, positions: Range<usize>) -> &[u32] {
        let start = self.corpus.block(block).start;
        &self.corpus.ids[start + positions.start..start + positions.end]
    }

    /// Returns at most `count` texts of at most `length` tokens, evenly spaced. A held-out range of at least `length`
    /// tokens is cut; of a shorter one at the end of its block, the tokens before it are the prompt.
    fn passages(&self, length: usize, count: usize, steps: usize) -> Vec<Passage> {
        let mut found = Vec::new();
        for (block, first, end) in self.ranges() {
            let whole = (end - first) / length;
            let pieces = (0..whole).map(|i| (block, first + i * length, first + (i + 1) * length, length));
            found.extend(pieces);
            if whole == 0 {
                found.push((block, end.saturating_sub(length), end, end - first));
            }
        }
        let n = found.len();
        let taken = (0..count.min(n)).map(|i| found[i * n / count.min(n)]);
        let passage = |(block, first, end, held_out): (usize, usize, usize, usize)| {
            Passage::new(self.ids(block, first..end), steps.min(held_out))
        };
        taken.filter_map(passage).collect()
    }

    /// Returns the longest text that ends with a held-out range.
    fn longest(&self, steps: usize) -> Option<Passage> {
        let (block, first, end) = self.ranges().reduce(|a, b| if b.2 > a.2 { b } else { a })?;
        Passage::new(self.ids(block, 0..end), steps.min(end - first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::corpus::CorpusOptions;

    const WANTED: Wanted = Wanted {
        tokens: 40_960,
        block: BLOCK,
        steps: 32,
        uuids: true,
    };

    fn corpus(text: &[usize], uuids: usize, seq_len: usize, holdout: f64) -> Corpus {
        let options = CorpusOptions {
            seq_len: None,
            max_tokens: 0,
            uuid_tokens: Some(0),
            holdout,
            seed: 0,
        };
        let text: Vec<Vec<u32>> = text.iter().map(|n| (0..*n as u32).collect()).collect();
        Corpus::cut(&text, vec![7; uuids], seq_len, &options).expect("tokens")
    }

    fn counts(texts: &Texts) -> (&str, usize, usize, usize) {
        (texts.kind, texts.length, texts.passages.len(), texts.beyond)
    }

    /// Everything that is wanted lies beyond the text.
    #[test]
    fn text_beyond_the_calibration_comes_first() {
        let corpus = corpus(&[40_000], 8192, 8192, 0.1);
        let beyond = WANTED.beyond(8192);
        assert_eq!((beyond.text, beyond.uuids), (40_960 + 8192, 16_384 + 8192));
        let reserve = Reserve {
            text: (100_000..100_000 + beyond.text as u32).collect(),
            uuids: vec![8; beyond.uuids],
            is_cut: true,
        };
        let made = Material::new(&corpus, &reserve, WANTED);
        let all: Vec<_> = made.all().map(counts).collect();
        let expected = [
            ("text", 2048, 20, 20),
            ("uuid", 2048, 8, 8),
            ("text", 8192, 1, 1),
            ("uuid", 8192, 1, 1),
        ];
        assert_eq!(all, expected);
        let first = |texts: &Texts| texts.passages[0].ids[0];
        assert_eq!(
            (first(&made.text), first(&made.others[1])),
            (100_000, 100_000 + 40_960)
        );
        assert!(
            made.all()
                .flat_map(|texts| &texts.passages)
                .all(|passage| passage.steps == 32)
        );
    }

    /// What is missing is cut from the held-out blocks.
    #[test]
    fn held_out_blocks_make_up_for_missing_text() {
        let corpus = corpus(&[40_000], 8192, 8192, 0.1);
        let reserve = Reserve {
            text: vec![9; 3 * 2048 + 100],
            uuids: Vec::new(),
            is_cut: false,
        };
        let made = Material::new(&corpus, &reserve, WANTED);
        let all: Vec<_> = made.all().map(counts).collect();
        let [(block, 0, end)] = corpus.held_out[..1] else {
            panic!("{:?}", corpus.held_out);
        };
        // The end of the only block of UUIDs is too short to be cut: its prompt is the text before it.
        let expected = [
            ("text", 2048, 3 + end / 2048, 3),
            ("uuid", 2048, 1, 0),
            ("text", end, 1, 0),
            ("uuid", 8192, 1, 0),
        ];
        assert_eq!(all, expected);
        let ids = &corpus.ids[corpus.block(block)];
        assert_eq!(made.text.passages[3].ids, ids[..2048]);
        assert_eq!(made.text.passages[4].ids, ids[2048..4096]);
    }

    /// Every text ends within what was held out, and no more is decoded than was held out.
    #[test]
    fn nothing_that_was_fitted_is_decoded() {
        for (text, uuids, seq_len, holdout) in [
            (vec![150], 0, 150, 0.2),
            (vec![140, 90, 140], 60, 140, 0.5),
            (vec![9000; 5], 5000, 3000, 0.3),
            (vec![30; 200], 0, 64, 0.4),
        ] {
            let mut next = 0;
            let options = CorpusOptions {
                seq_len: None,
                max_tokens: 0,
                uuid_tokens: Some(0),
                holdout,
                seed: 3,
            };
            // Every token has its own id.
            let mut ids = |n: usize| {
                let first = next;
                next += n as u32;
                (first..next).collect::<Vec<u32>>()
            };
            let text: Vec<Vec<u32>> = text.into_iter().map(&mut ids).collect();
            let corpus = Corpus::cut(&text, ids(uuids), seq_len, &options).expect("tokens");
            let kept = corpus.kept();
            let made = Material::new(&corpus, &Reserve::default(), WANTED);
            assert!(!made.text.passages.is_empty());
            assert!(made.text.passages.len() <= 40_960 / seq_len.min(BLOCK));
            for passage in made.all().flat_map(|texts| &texts.passages) {
                let (prompt, decoded) = passage.ids.split_at(passage.ids.len() - passage.steps);
                assert!(!prompt.is_empty());
                assert!(decoded.iter().all(|id| !kept[*id as usize]), "{seq_len}");
            }
        }
    }
}
