//! The calibration input: documents and random UUIDs, cut into blocks, some of which are held out.

mod documents;
mod holdout;
mod manifest;
mod source;

use std::ops::Range;
use std::path::{Path, PathBuf};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::{Error, Result};
use crate::model::ModelConfig;
use crate::model::tokenizer::Tokenizer;
pub use documents::TextFiles;
pub use manifest::{CorpusManifest, DocumentUsage, Documents, KindUsage, Origin, Usage, digest_of};

/// The files that hold the documents.
#[derive(Clone, Debug)]
pub enum CorpusSource {
    /// Files of text.
    Text(TextFiles),
    /// A JSON array of arrays of token ids, one per document, used as they are.
    Tokens(PathBuf),
}

impl CorpusSource {
    /// Takes text files, and folders of them.
    pub fn text(paths: impl IntoIterator<Item = PathBuf>) -> Self {
        Self::Text(TextFiles {
            paths: paths.into_iter().collect(),
            field: None,
        })
    }
}

/// How the documents are cut into blocks and which part is held out.
#[derive(Clone, Debug)]
pub struct CorpusOptions {
    /// Most tokens per block; `None` = min(16384, the model's longest context).
    pub seq_len: Option<usize>,
    /// Most tokens of text; does not apply to [`CorpusSource::Tokens`].
    pub max_tokens: usize,
    /// Tokens of random UUIDs to add; [`CorpusSource::Tokens`] gets none.
    pub uuid_tokens: Option<usize>,
    /// Share of the text blocks, and of the UUID blocks, that no statistic and no fit may use.
    pub holdout: f64,
    /// Seed of the UUIDs and of the draw of held-out blocks.
    pub seed: u64,
}

impl Default for CorpusOptions {
    /// Returns the options of a calibration without any.
    fn default() -> Self {
        Self {
            seq_len: None,
            max_tokens: 65_536,
            uuid_tokens: None,
            holdout: 0.05,
            seed: 0,
        }
    }
}

impl CorpusOptions {
    /// Returns the number of UUID tokens to add to so many tokens of text.
    pub fn uuids(&self, text: usize) -> usize {
        let [most, share] = UUIDS;
        self.uuid_tokens.unwrap_or(most.min(text / share))
    }

    /// Returns the most tokens per block for a model.
    pub fn block_length(&self, config: &ModelConfig) -> usize {
        self.seq_len.unwrap_or(config.max_position_embeddings.min(16_384))
    }
}

/// The most UUID tokens that are added by default, and how many tokens of text there are for each.
const UUIDS: [usize; 2] = [16_384, 5];

/// How many tokens are wanted in addition to the calibration text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Beyond {
    /// Tokens of text.
    pub text: usize,
    /// Tokens of random UUIDs.
    pub uuids: usize,
}

/// Tokens in addition to the calibration text, which nothing is fitted to.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reserve {
    /// The text that follows the calibration text, where its files have more than it takes; its documents in a row.
    pub text: Vec<u32>,
    /// Other random UUIDs than those of the calibration text; none if it has none.
    pub uuids: Vec<u32>,
    /// Whether the files have more text than the calibration takes.
    pub is_cut: bool,
}

/// The token ids of the calibration input in blocks; every block starts at position 0.
#[derive(Clone, Debug, PartialEq)]
pub struct Corpus {
    /// All ids, block after block.
    pub ids: Vec<u32>,
    /// Index into `ids` of each block's first token, then the number of tokens.
    pub block_start: Vec<u32>,
    /// Held-out ranges (block, first, last + 1) of positions within the block, in block order.
    pub held_out: Vec<(usize, usize, usize)>,
    /// Most tokens per block.
    pub seq_len: usize,
    /// The seed of the UUIDs and of the draw of held-out blocks.
    pub seed: u64,
    /// Which blocks are of which documents; `None` for a part of a text, and for a dump that does not say.
    pub documents: Option<Documents>,
}

impl Corpus {
    /// Reads and tokenises the input, cuts it into blocks and draws the held-out ones.
    ///
    /// # Errors
    /// A missing or malformed file, an input without tokens, a hold-out share outside 0 <= F < 1.
    pub fn load(
        model_dir: &Path,
        config: &ModelConfig,
        source: &CorpusSource,
        options: &CorpusOptions,
    ) -> Result<Self> {
        let none = Beyond::default();
        Self::load_with_reserve(model_dir, config, source, options, none).map(|(corpus, _)| corpus)
    }

    /// Does what [`Corpus::load`] does, and also returns tokens beyond the text.
    ///
    /// # Errors
    /// Those of [`Corpus::load`].
    pub fn load_with_reserve(
        model_dir: &Path,
        config: &ModelConfig,
        source: &CorpusSource,
        options: &CorpusOptions,
        beyond: Beyond,
    ) -> Result<(Self, Reserve)> {
        let seq_len = options.block_length(config);
        check(seq_len, options)?;
        if let Some(given) = options.uuid_tokens.filter(|given| *given > MAX_UUID_TOKENS) {
            let what = format!("⟨uuid_tokens={given}⟩ is out of range: expected at most {MAX_UUID_TOKENS}");
            return Err(Error::usage(what).hint("use a smaller number; a few tens of thousands are enough"));
        }
        let (text, uuids, reserve) = match source {
            CorpusSource::Tokens(path) => (read_tokens(path)?, Vec::new(), Reserve::default()),
            CorpusSource::Text(files) => {
                let tokenizer = Tokenizer::open(model_dir, config)?;
                let read = files.tokenise(model_dir, &tokenizer, options.max_tokens, beyond.text)?;
                let uuids = |stream, count| uuid_document(&tokenizer, options.seed, stream, count);
                let uuid_tokens = options.uuids(read.documents.iter().map(Vec::len).sum());
                let others = if uuid_tokens > 0 { beyond.uuids } else { 0 };
                let reserve = Reserve {
                    text: read.beyond,
                    uuids: uuids(RESERVE_STREAM, others)?,
                    is_cut: read.is_cut,
                };
                (read.documents, uuids(UUID_STREAM, uuid_tokens)?, reserve)
            }
        };
        Ok((Self::cut(&text, uuids, seq_len, options)?, reserve))
    }

    /// Counts the tokens that are not those of UUIDs.
    pub fn n_text_tokens(&self) -> usize {
        let text_blocks = self.documents.as_ref().map(|of| of.text_blocks);
        match text_blocks.filter(|n| *n < self.n_blocks()) {
            Some(first) => self.block(first).start,
            None => self.n_tokens(),
        }
    }

    /// Cuts documents and UUIDs into blocks of at most `seq_len` tokens and draws the held-out ones.
    ///
    /// # Errors
    /// No tokens, or more than 2^32; a block length of 0; a hold-out share outside 0 <= F < 1.
    pub fn cut(text: &[Vec<u32>], uuids: Vec<u32>, seq_len: usize, options: &CorpusOptions) -> Result<Self> {
        check(seq_len, options)?;
        if text.iter().all(Vec::is_empty) {
            return Err(Error::invalid("the input contains no tokens")
                .hint("give at least one non-empty document, and ⟨max_tokens⟩ above 0"));
        }
        let mut corpus = Self {
            ids: Vec::new(),
            block_start: vec![0],
            held_out: Vec::new(),
            seq_len,
            seed: options.seed,
            documents: None,
        };
        let add = |document: &Vec<u32>| corpus.add_document(document);
        let text: Vec<Range<usize>> = text.iter().map(add).collect::<Result<_>>()?;
        let text_blocks = corpus.n_blocks();
        let uuids = [corpus.add_document(&uuids)?];
        corpus.hold_out(&text, 0, options.holdout);
        corpus.hold_out(&uuids, 1, options.holdout);
        corpus.held_out.sort_unstable();
        let large = text.into_iter().filter(|blocks| corpus.is_large(blocks));
        let large = large.collect();
        corpus.documents = Some(Documents { text_blocks, large });
        Ok(corpus)
    }

    /// Cuts a document into blocks and appends them; returns their numbers.
    fn add_document(&mut self, document: &[u32]) -> Result<Range<usize>> {
        let first = self.n_blocks();
        for block in document.chunks(self.seq_len) {
            self.ids.extend_from_slice(block);
            let end = u32::try_from(self.ids.len())
                .map_err(|_| Error::invalid("the input has more than 2^32 tokens").hint("give less text"))?;
            self.block_start.push(end);
        }
        Ok(first..self.n_blocks())
    }

    /// Counts the blocks.
    pub fn n_blocks(&self) -> usize {
        self.block_start.len() - 1
    }

    /// Counts the tokens.
    pub fn n_tokens(&self) -> usize {
        self.ids.len()
    }

    /// Counts the held-out tokens.
    pub fn n_held_out(&self) -> usize {
        self.held_out.iter().map(|(_, first, end)| end - first).sum()
    }

    /// Counts the tokens of the longest block.
    pub fn longest_block(&self) -> usize {
        let lengths = (0..self.n_blocks()).map(|b| self.block(b).len());
        lengths.max().unwrap_or(0)
    }

    /// Returns the tokens of block `i`, as indices into `ids`.
    pub fn block(&self, i: usize) -> Range<usize> {
        self.block_start[i] as usize..self.block_start[i + 1] as usize
    }

    /// Divides the blocks into `count` ranges of consecutive blocks, of about as many tokens each; none is empty. The
    /// ranges depend on the lengths of the blocks and `count` alone.
    ///
    /// # Errors
    /// There are fewer blocks than ranges, or no ranges.
    pub fn shards(&self, count: usize) -> Result<Vec<Range<usize>>> {
        let blocks = self.n_blocks();
        if count == 0 || count > blocks {
            let error = Error::usage(format!("cannot cut {blocks} blocks of text into {count} shards"));
            return Err(error.hint(format!(
                "use at most {blocks} shards, or a smaller ⟨seq_len⟩, which makes more blocks"
            )));
        }
        // Twice the middle of each block.
        let middle = |start: &[u32]| u128::from(start[0]) + u128::from(start[1]);
        let middles: Vec<u128> = self.block_start.windows(2).map(middle).collect();
        let mut first = 0;
        let shard = |shard: usize| {
            // Twice the tokens before the ideal cut; a block goes to the side on which its middle lies.
            let ideal = 2 * (shard as u128 * self.n_tokens() as u128) / count as u128;
            let end = middles.partition_point(|middle| *middle < ideal);
            // Every shard gets a block, and leaves one to each later shard.
            let end = if shard == count {
                blocks
            } else {
                end.clamp(first + 1, blocks - (count - shard))
            };
            let range = first..end;
            first = end;
            range
        };
        Ok((1..=count).map(shard).collect())
    }

    /// Returns a range of consecutive blocks as a text of its own.
    pub fn part(&self, blocks: Range<usize>) -> Self {
        let starts = &self.block_start[blocks.start..=blocks.end];
        let held_out = self.held_out.iter().filter(|(block, ..)| blocks.contains(block));
        Self {
            ids: self.ids[starts[0] as usize..starts[blocks.len()] as usize].to_vec(),
            block_start: starts.iter().map(|start| start - starts[0]).collect(),
            held_out: held_out
                .map(|(block, first, end)| (block - blocks.start, *first, *end))
                .collect(),
            seq_len: self.seq_len,
            seed: self.seed,
            documents: None,
        }
    }

    /// Tells whether the held-out ranges are disjoint, in order, and within their blocks.
    pub fn is_consistent(&self) -> bool {
        let within = |&(block, first, end): &(usize, usize, usize)| {
            block < self.n_blocks() && first < end && end <= self.block(block).len()
        };
        let apart = |pair: &[(usize, usize, usize)]| (pair[0].0, pair[0].2) <= (pair[1].0, pair[1].1);
        self.held_out.iter().all(within) && self.held_out.windows(2).all(apart)
    }

    /// Says for each token whether statistics and fits may use it.
    pub fn kept(&self) -> Vec<bool> {
        let mut kept = vec![true; self.n_tokens()];
        for &(block, first, end) in &self.held_out {
            let start = self.block(block).start;
            kept[start + first..start + end].fill(false);
        }
        kept
    }

    /// Returns each token's position within its block.
    pub fn positions(&self) -> Vec<u32> {
        let blocks = 0..self.n_blocks();
        blocks.flat_map(|b| 0..self.block(b).len() as u32).collect()
    }
}

/// Fails for a block length or a hold-out share out of range.
fn check(seq_len: usize, options: &CorpusOptions) -> Result<()> {
    if seq_len == 0 {
        return Err(Error::usage("⟨seq_len⟩ must be at least 1"));
    }
    let share = options.holdout;
    if (0.0..1.0).contains(&share) {
        Ok(())
    } else {
        Err(Error::usage(format!(
            "⟨holdout={share}⟩ is out of range: expected at least 0 and less than 1"
        )))
    }
}

/// The most tokens of random UUIDs, limited because the UUIDs are made in memory.
const MAX_UUID_TOKENS: usize = 1 << 24;

/// Numbers of the random streams derived from one seed. The streams are independent: drawing more from one does not
/// change the other. That of a kind's held-out blocks is `HOLD_OUT_STREAM` + the number of the kind.
const UUID_STREAM: u64 = 1;
const HOLD_OUT_STREAM: u64 = 2;
const RESERVE_STREAM: u64 = 4;

/// Reads a JSON array of arrays of token ids, one per document.
pub fn read_tokens(path: &Path) -> Result<Vec<Vec<u32>>> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::invalid(format!("{}: {e}", path.display()))
            .hint("give ⟨tokens⟩ a JSON array of arrays of token ids, one per document")
    })
}

/// Draws random UUIDs, joins them with ", ", tokenises the text and cuts it to `tokens` tokens.
fn uuid_document(tokenizer: &Tokenizer, seed: u64, stream: u64, tokens: usize) -> Result<Vec<u32>> {
    if tokens == 0 {
        return Ok(Vec::new());
    }
    let mut count = tokens / 8 + 16;
    loop {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        rng.set_stream(stream);
        let uuids = (0..count).map(|_| uuid::Builder::from_random_bytes(rng.r#gen()).into_uuid());
        let text = uuids.map(|uuid| uuid.to_string()).collect::<Vec<_>>().join(", ");
        let ids = tokenizer.encode_prefix(&text, tokens)?;
        if ids.len() == tokens {
            return Ok(ids);
        }
        if ids.len() < count {
            let made = ids.len();
            return Err(Error::invalid(format!(
                "the tokenizer produces only {made} tokens from {count} UUIDs"
            ))
            .hint("the tokenizer does not know the characters of UUIDs; add ⟨uuid_tokens=0⟩"));
        }
        count *= 2;
    }
}
