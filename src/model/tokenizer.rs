//! `tokenizer.json`, and the rule for special tokens.

use std::path::Path;

use super::config::ModelConfig;
use super::fields::read_json;
use crate::error::{Error, Result};

/// Text to token ids and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Prepended by us, where tokenizer.json has no post-processor that could.
    bos: Option<u32>,
}

impl Tokenizer {
    /// Opens `dir/tokenizer.json`.
    ///
    /// Special tokens come from its post-processor. Where it has none, a BOS is prepended if
    /// `tokenizer_config.json` says `add_bos_token: true`: its `bos_token`, else the config's id.
    pub fn open(dir: &Path, config: &ModelConfig) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.is_file() {
            return Err(Error::failed(format!("{} does not exist", path.display())).hint(
                "give token ids with --tokens instead of text, or add the tokenizer.json of the model",
            ));
        }
        let mut inner = tokenizers::Tokenizer::from_file(&path)
            .map_err(|e| Error::failed(format!("{} cannot be used: {e}", path.display())))?;
        // Training scripts leave their lengths in the file; they are not part of the tokenizer.
        inner
            .with_truncation(None)
            .map_err(|e| Error::failed(format!("{} cannot be used: {e}", path.display())))?
            .with_padding(None);
        let bos = if inner.get_post_processor().is_some() {
            None
        } else {
            Self::configured_bos(dir, config, &inner)?
        };
        Ok(Self { inner, bos })
    }

    fn configured_bos(
        dir: &Path,
        config: &ModelConfig,
        inner: &tokenizers::Tokenizer,
    ) -> Result<Option<u32>> {
        let path = dir.join("tokenizer_config.json");
        if !path.is_file() {
            return Ok(None);
        }
        let value = read_json(&path)?;
        if value.get("add_bos_token").and_then(|v| v.as_bool()) != Some(true) {
            return Ok(None);
        }
        let token = value
            .get("bos_token")
            .and_then(|t| t.as_str().or_else(|| t.get("content").and_then(|c| c.as_str())));
        match token {
            None => Ok(config.bos_token_id),
            Some(token) => match inner.token_to_id(token) {
                Some(id) => Ok(Some(id)),
                None => Err(Error::failed(format!(
                    "{}: bos_token `{token}` is not in tokenizer.json",
                    path.display()
                ))),
            },
        }
    }

    /// Token ids of a document, special tokens included.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encoding(text, true)?;
        Ok(self
            .bos
            .into_iter()
            .chain(encoding.get_ids().iter().copied())
            .collect())
    }

    /// Token ids of text that has its special tokens already, or goes on after other text: none are
    /// added.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.encoding(text, false)?;
        Ok(encoding.get_ids().to_vec())
    }

    fn encoding(&self, text: &str, special_tokens: bool) -> Result<tokenizers::Encoding> {
        self.inner
            .encode_fast(text, special_tokens)
            .map_err(|e| Error::failed(format!("the text cannot be tokenised: {e}")))
    }

    /// The first `limit` tokens of a document, without tokenising much more of it than that.
    pub fn encode_prefix(&self, text: &str, limit: usize) -> Result<Vec<u32>> {
        let mut bytes = limit.saturating_mul(8).saturating_add(4096);
        loop {
            let mut end = bytes.min(text.len());
            while !text.is_char_boundary(end) {
                end += 1;
            }
            let mut ids = self.encode(&text[..end])?;
            // The last tokens before a cut could differ from those of the whole text.
            if end == text.len() || ids.len() >= limit + 64 {
                ids.truncate(limit);
                return Ok(ids);
            }
            bytes = bytes.saturating_mul(2);
        }
    }

    /// The text of generated `ids`, special tokens left out.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner
            .decode(ids, true)
            .map_err(|e| Error::failed(format!("the tokens cannot be turned into text: {e}")))
    }
}

/// Text of a growing list of ids, piece by piece.
///
/// A token may hold a part of a character, so a piece is given out only when it ends in whole ones.
pub struct TextStream<'a> {
    tokenizer: Option<&'a Tokenizer>,
    ids: Vec<u32>,
    /// Ids whose text was given out already, from `context` on.
    done: usize,
    /// Where decoding starts; a few ids back, for tokenizers that join neighbours.
    context: usize,
    text: String,
}

impl<'a> TextStream<'a> {
    /// An empty stream; without a tokenizer, ids are shown as numbers.
    pub fn new(tokenizer: Option<&'a Tokenizer>) -> Self {
        Self {
            tokenizer,
            ids: Vec::new(),
            done: 0,
            context: 0,
            text: String::new(),
        }
    }

    /// Adds one id; returns the text that became complete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.piece(false)
    }

    /// The rest of the text, whole characters or not.
    pub fn finish(&mut self) -> Result<String> {
        self.piece(true)
    }

    /// All text so far; empty without a tokenizer.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn piece(&mut self, last: bool) -> Result<String> {
        if self.done == self.ids.len() {
            return Ok(String::new());
        }
        let piece = match self.tokenizer {
            None => {
                let numbers: Vec<String> = self.ids[self.done..].iter().map(u32::to_string).collect();
                format!("{} ", numbers.join(" "))
            }
            Some(tokenizer) => {
                let known = tokenizer.decode(&self.ids[self.context..self.done])?;
                let all = tokenizer.decode(&self.ids[self.context..])?;
                if !last && all.ends_with('\u{fffd}') {
                    return Ok(String::new());
                }
                all.get(known.len()..).unwrap_or("").to_string()
            }
        };
        // Nothing to show yet, as for a special token: keep it as context, since a decoder may take
        // the space before a word from what stands before it.
        if piece.is_empty() && !last {
            return Ok(piece);
        }
        self.context = self.done;
        self.done = self.ids.len();
        if self.tokenizer.is_some() {
            self.text += &piece;
        }
        Ok(piece)
    }
}
