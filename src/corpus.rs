//! The calibration input: documents and random UUIDs, cut into blocks, some of which are held out.

mod documents;

use std::ops::Range;
use std::path::{Path, PathBuf};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::model::tokenizer::Tokenizer;
use crate::model::{ModelConfig, ModelManifest};
use crate::store::{hex, to_bytes};
pub use documents::TextFiles;

/// The files that hold the documents.
#[derive(Clone, Debug)]
pub enum CorpusSource {
    /// Files of text.
    Text(TextFiles),
    /// A JSON array of arrays of token ids, one per document, used as they are.
    Tokens(PathBuf),
}

/// How the documents are cut into blocks and which part is held out.
#[derive(Clone, Debug)]
pub struct CorpusOptions {
    /// Most tokens per block; `None` = min(16384, the model's longest context).
    pub seq_len: Option<usize>,
    /// Most tokens of text; does not apply to [`CorpusSource::Tokens`].
    pub max_tokens: usize,
    /// Tokens of random UUIDs to add; [`CorpusSource::Tokens`] gets none.
    pub uuid_tokens: usize,
    /// Share of the text blocks, and of the UUID blocks, that no statistic and no fit may use.
    pub holdout: f64,
    /// Seed of the UUIDs and of the draw of held-out blocks.
    pub seed: u64,
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
        let longest = config.max_position_embeddings.min(16_384);
        let seq_len = options.seq_len.unwrap_or(longest);
        check(seq_len, options)?;
        if options.uuid_tokens > MAX_UUID_TOKENS {
            let what = format!(
                "--uuid-tokens {} is out of range: expected at most {MAX_UUID_TOKENS}",
                options.uuid_tokens
            );
            return Err(Error::usage(what).hint("use a smaller number; a few tens of thousands are enough"));
        }
        let (text, uuids) = match source {
            CorpusSource::Tokens(path) => (read_tokens(path)?, Vec::new()),
            CorpusSource::Text(files) => {
                let tokenizer = Tokenizer::open(model_dir, config)?;
                let text = files.tokenise(model_dir, &tokenizer, options.max_tokens)?;
                (text, uuid_document(&tokenizer, options)?)
            }
        };
        Self::cut(&text, uuids, seq_len, options)
    }

    /// Cuts documents and UUIDs into blocks of at most `seq_len` tokens and draws the held-out ones.
    ///
    /// # Errors
    /// No tokens, or more than 2^32; a block length of 0; a hold-out share outside 0 <= F < 1.
    pub fn cut(text: &[Vec<u32>], uuids: Vec<u32>, seq_len: usize, options: &CorpusOptions) -> Result<Self> {
        check(seq_len, options)?;
        if text.iter().all(Vec::is_empty) {
            return Err(Error::failed("the input contains no tokens")
                .hint("give at least one non-empty document, and --max-tokens above 0"));
        }
        let mut corpus = Self {
            ids: Vec::new(),
            block_start: vec![0],
            held_out: Vec::new(),
            seq_len,
            seed: options.seed,
        };
        let text_blocks = corpus.add_documents(text, 0)?;
        let uuid_blocks = corpus.add_documents(std::slice::from_ref(&uuids), text_blocks.end)?;
        for (kind, blocks) in [text_blocks, uuid_blocks].into_iter().enumerate() {
            corpus.hold_out(blocks, kind as u64, options.holdout);
        }
        corpus.held_out.sort_unstable();
        Ok(corpus)
    }

    /// Cuts documents into blocks and appends them; returns their numbers, which start at `first`.
    fn add_documents(&mut self, documents: &[Vec<u32>], first: usize) -> Result<Range<usize>> {
        for block in documents.iter().flat_map(|d| d.chunks(self.seq_len)) {
            self.ids.extend_from_slice(block);
            let end = u32::try_from(self.ids.len())
                .map_err(|_| Error::failed("the input has more than 2^32 tokens").hint("give less text"))?;
            self.block_start.push(end);
        }
        Ok(first..self.block_start.len() - 1)
    }

    /// Holds out max(1, round(share x blocks)) of `blocks`, but never all of them. Of a single block, it holds out that
    /// share of the positions, the last ones.
    fn hold_out(&mut self, blocks: Range<usize>, kind: u64, share: f64) {
        if share == 0.0 || blocks.is_empty() {
            return;
        }
        let count = |of: usize| ((share * of as f64).round() as usize).clamp(1, of.max(2) - 1);
        if blocks.len() == 1 {
            let len = self.block(blocks.start).len();
            if len > 1 {
                self.held_out.push((blocks.start, len - count(len), len));
            }
            return;
        }
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(HOLD_OUT_STREAM + kind);
        let count = count(blocks.len());
        let mut order: Vec<usize> = blocks.collect();
        for i in 0..count {
            let other = rng.gen_range(i..order.len());
            order.swap(i, other);
            let len = self.block(order[i]).len();
            self.held_out.push((order[i], 0, len));
        }
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
                "use at most {blocks} shards, or a smaller --seq-len, which makes more blocks"
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
            let end = match shard == count {
                true => blocks,
                false => end.clamp(first + 1, blocks - (count - shard)),
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

    /// Returns the description of the input for a manifest.
    pub fn manifest(&self) -> CorpusManifest {
        let digest = |values: &[u32]| hex(&Sha256::digest(to_bytes(values)));
        CorpusManifest {
            tokens: self.n_tokens(),
            blocks: self.n_blocks(),
            held_out: self.held_out.clone(),
            held_out_tokens: self.n_held_out(),
            ids_sha256: digest(&self.ids),
            block_start_sha256: digest(&self.block_start),
            seq_len: self.seq_len,
            seed: self.seed,
        }
    }
}

/// The `calibration` object of a manifest: which tokens were used, and which were held out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CorpusManifest {
    /// Number of tokens.
    pub tokens: usize,
    /// Number of blocks.
    pub blocks: usize,
    /// Held-out ranges (block, first, last + 1) of positions within the block.
    pub held_out: Vec<(usize, usize, usize)>,
    /// Number of held-out tokens.
    pub held_out_tokens: usize,
    /// Digest of all token ids, as little-endian u32.
    pub ids_sha256: String,
    /// Digest of [`Corpus::block_start`], as little-endian u32.
    pub block_start_sha256: String,
    /// Most tokens per block.
    pub seq_len: usize,
    /// The seed of the UUIDs and of the draw of held-out blocks.
    pub seed: u64,
}

/// The model and the text from which a dump, moments or a section were made; files can be combined only if
/// these agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The model.
    pub model: ModelManifest,
    /// The calibration text.
    pub calibration: CorpusManifest,
}

/// Fails for a block length or a hold-out share out of range.
fn check(seq_len: usize, options: &CorpusOptions) -> Result<()> {
    if seq_len == 0 {
        return Err(Error::usage("--seq-len must be at least 1"));
    }
    let share = options.holdout;
    match (0.0..1.0).contains(&share) {
        true => Ok(()),
        false => Err(Error::usage(format!(
            "--holdout {share} is out of range: expected at least 0 and less than 1"
        ))),
    }
}

/// The most tokens of random UUIDs, limited because the UUIDs are made in memory.
const MAX_UUID_TOKENS: usize = 1 << 24;

/// Numbers of the random streams derived from one seed. The streams are independent: drawing more from one does not
/// change the other.
const UUID_STREAM: u64 = 1;
const HOLD_OUT_STREAM: u64 = 2;

/// Reads a JSON array of arrays of token ids, one per document.
pub fn read_tokens(path: &Path) -> Result<Vec<Vec<u32>>> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::failed(format!("{}: {e}", path.display()))
            .hint("give --tokens a JSON array of arrays of token ids, one per document")
    })
}

/// Draws random UUIDs, joins them with ", ", tokenises the text and cuts it to `uuid_tokens` tokens.
fn uuid_document(tokenizer: &Tokenizer, options: &CorpusOptions) -> Result<Vec<u32>> {
    if options.uuid_tokens == 0 {
        return Ok(Vec::new());
    }
    let mut count = options.uuid_tokens / 8 + 16;
    loop {
        let mut rng = ChaCha8Rng::seed_from_u64(options.seed);
        rng.set_stream(UUID_STREAM);
        let uuids = (0..count).map(|_| uuid::Builder::from_random_bytes(rng.r#gen()).into_uuid());
        let text = uuids.map(|uuid| uuid.to_string()).collect::<Vec<_>>().join(", ");
        let ids = tokenizer.encode_prefix(&text, options.uuid_tokens)?;
        if ids.len() == options.uuid_tokens {
            return Ok(ids);
        }
        if ids.len() < count {
            let made = ids.len();
            return Err(Error::failed(format!(
                "the tokenizer produces only {made} tokens from {count} UUIDs"
            ))
            .hint("the tokenizer does not know the characters of UUIDs; add --uuid-tokens 0"));
        }
        count *= 2;
    }
}
