//! What a manifest says about the calibration text.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Corpus;
use crate::compute::Precision;
use crate::model::ModelManifest;
use crate::store::{hex, to_bytes};

/// The `calibration` object of a manifest: which tokens were used, and which were held out.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    /// The tokens of each kind of documents; `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kinds: Option<Vec<KindUsage>>,
    /// The tokens of each document of the text that has at least 5% of all tokens; `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub documents: Option<Vec<DocumentUsage>>,
}

/// Returns the digest of numbers, as little-endian u32.
pub fn digest_of(values: &[u32]) -> String {
    hex(&Sha256::digest(to_bytes(values)))
}

/// Compares the tokens, the blocks and the held-out ranges. `kinds` and `documents` only describe them, and files of
/// earlier versions have neither.
impl PartialEq for CorpusManifest {
    fn eq(&self, other: &Self) -> bool {
        let tokens = |of: &Self| (of.tokens, of.blocks, of.seq_len, of.seed);
        tokens(self) == tokens(other)
            && (&self.held_out, self.held_out_tokens) == (&other.held_out, other.held_out_tokens)
            && self.ids_sha256 == other.ids_sha256
            && self.block_start_sha256 == other.block_start_sha256
    }
}

/// What became of the tokens of some blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Number of blocks.
    pub blocks: usize,
    /// Tokens that statistics and fits use.
    pub fitted_tokens: usize,
    /// Held-out tokens.
    pub held_out_tokens: usize,
}

/// What became of the tokens of a kind of documents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KindUsage {
    /// `text` or `uuid`.
    pub kind: String,
    /// The tokens.
    #[serde(flatten)]
    pub usage: Usage,
}

/// What became of the tokens of a document.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DocumentUsage {
    /// Its first block.
    pub first_block: usize,
    /// The tokens.
    #[serde(flatten)]
    pub usage: Usage,
}

/// Which blocks are of which documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Documents {
    /// Number of blocks of text; those of UUIDs follow.
    pub text_blocks: usize,
    /// The blocks of each document of the text that has at least 5% of all tokens.
    pub large: Vec<Range<usize>>,
}

/// The names of the kinds of documents.
const KINDS: [&str; 2] = ["text", "uuid"];

impl Documents {
    /// Reads the documents of a text of `n_blocks` blocks from its manifest; `None` if the manifest does not name them, or
    /// names blocks that the text does not have.
    pub fn from_manifest(manifest: &CorpusManifest, n_blocks: usize) -> Option<Self> {
        let (kinds, documents) = (manifest.kinds.as_ref()?, manifest.documents.as_ref()?);
        let text = kinds.iter().find(|of| of.kind == KINDS[0]);
        let text_blocks = text.map_or(0, |of| of.usage.blocks);
        let blocks = |of: &DocumentUsage| {
            let end = of.first_block.checked_add(of.usage.blocks)?;
            (of.usage.blocks > 0 && end <= text_blocks).then_some(of.first_block..end)
        };
        let large = documents.iter().map(blocks).collect::<Option<_>>()?;
        (text_blocks <= n_blocks).then_some(Self { text_blocks, large })
    }
}

impl Corpus {
    /// Counts the fitted and the held-out tokens of some blocks.
    pub fn usage(&self, blocks: Range<usize>) -> Usage {
        let held_out = self.held_out.iter().filter(|(block, ..)| blocks.contains(block));
        let held_out_tokens = held_out.map(|(_, first, end)| end - first).sum();
        let [first, end] = [blocks.start, blocks.end].map(|block| self.block_start[block] as usize);
        Usage {
            blocks: blocks.len(),
            fitted_tokens: end - first - held_out_tokens,
            held_out_tokens,
        }
    }

    /// Counts the tokens of each kind of documents that the text has.
    fn kinds(&self, documents: &Documents) -> Vec<KindUsage> {
        let ranges = [0..documents.text_blocks, documents.text_blocks..self.n_blocks()];
        let kinds = KINDS.iter().zip(ranges).filter(|(_, blocks)| !blocks.is_empty());
        let kind = |(kind, blocks): (&&str, Range<usize>)| KindUsage {
            kind: (*kind).to_owned(),
            usage: self.usage(blocks),
        };
        kinds.map(kind).collect()
    }

    /// Returns the description of the input for a manifest.
    pub fn manifest(&self) -> CorpusManifest {
        let document = |blocks: &Range<usize>| DocumentUsage {
            first_block: blocks.start,
            usage: self.usage(blocks.clone()),
        };
        let documents = self.documents.as_ref();
        CorpusManifest {
            tokens: self.n_tokens(),
            blocks: self.n_blocks(),
            held_out: self.held_out.clone(),
            held_out_tokens: self.n_held_out(),
            ids_sha256: digest_of(&self.ids),
            block_start_sha256: digest_of(&self.block_start),
            seq_len: self.seq_len,
            seed: self.seed,
            kinds: documents.map(|of| self.kinds(of)),
            documents: documents.map(|of| of.large.iter().map(document).collect()),
        }
    }
}

impl CorpusManifest {
    /// Says of each kind of documents how many tokens were fitted and how many were held out; empty if that is not known.
    pub fn used(&self) -> String {
        let kind = |of: &KindUsage| {
            let kind = if of.kind == KINDS[1] { "UUIDs" } else { &of.kind };
            let Usage {
                fitted_tokens,
                held_out_tokens,
                ..
            } = of.usage;
            format!("{kind}: {fitted_tokens} tokens fitted, {held_out_tokens} held out")
        };
        let kinds: Vec<String> = self.kinds.iter().flatten().map(kind).collect();
        kinds.join("; ")
    }

    /// Says the same of each large document, one line each; nothing if there is only one.
    pub fn used_by_document(&self) -> Vec<String> {
        let documents = self.documents.iter().flatten();
        let document = |of: &DocumentUsage| {
            let Usage {
                blocks,
                fitted_tokens,
                held_out_tokens,
            } = of.usage;
            let last = of.first_block + blocks.max(1) - 1;
            let place = match blocks {
                1 => format!("block {last}"),
                _ => format!("blocks {} to {last}", of.first_block),
            };
            format!("document in {place}: {fitted_tokens} tokens fitted, {held_out_tokens} held out")
        };
        match documents.clone().count() {
            0 | 1 => Vec::new(),
            _ => documents.map(document).collect(),
        }
    }
}

/// The model and the text from which a dump, moments or a section were made; files can be combined only if
/// these agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Origin {
    /// The model.
    pub model: ModelManifest,
    /// The calibration text.
    pub calibration: CorpusManifest,
    /// The type in which prompts were multiplied, if that was asked for: [`Precision::recorded`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<Precision>,
}
