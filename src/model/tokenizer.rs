//! The model's tokenizer (`tokenizer.json`, or that of a GGUF file) and its rules for special tokens.
//!
//! The file comes with the model and is not trusted. The library panics on some files, and takes any amount of memory
//! and time on others: it believes the length that a table states, and normalizers and post-processors may multiply the
//! text. So everything but the vocabulary is first loaded in a process with limits ([`sandbox`]), and texts are
//! tokenised in such a process. Ids become text in the program's own process, step by step; decoders that multiply text
//! are refused.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Once;

use serde::Deserialize;
use serde_json::{Value, json};

use super::config::ModelConfig;
use super::fields::read_json;
use super::gguf::{Gguf, is_gguf};
use crate::error::{Error, ErrorKind, Result};
use crate::sandbox::{self, Allowance};
use crate::store::to_bytes;

/// The hint for a tokenizer.json that does not work.
const BROKEN: &str = "download the model's tokenizer.json again, or give token ids with ⟨tokens⟩";

/// Bytes of memory for the library, in addition to [`SPREAD`] times the text.
const MEMORY: usize = 1 << 28;

/// Bytes of memory per byte of text; ordinary tokenizers take up to 200.
const SPREAD: usize = 512;

/// Bytes of text per second of processor time, in addition to [`SECONDS`]; ordinary tokenizers manage a million.
const SPEED: usize = 50_000;

/// Seconds of processor time that any text gets.
const SECONDS: u32 = 2;

/// Bytes of short documents that are tokenised in one process.
pub const BATCH: usize = 1 << 20;

/// Tokens that the beginning of a text must have beyond those that are wanted: the last ones before a cut may differ from
/// those of the whole text.
pub const MARGIN: usize = 64;

/// Returns about how many bytes of text have so many tokens, or more.
pub fn likely_bytes(tokens: usize) -> usize {
    tokens.saturating_mul(8).saturating_add(4096)
}

/// By what factor a decoder may lengthen a text.
const GROWTH: usize = 16;

thread_local! {
    /// Whether a panic of this thread becomes an error.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Calls the tokenizer library, which panics on some files that it has parsed; returns the reason if it fails.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> std::result::Result<T, String> {
    static SILENT: Once = Once::new();
    SILENT.call_once(|| {
        let hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !GUARDED.get() {
                hook(info);
            }
        }));
    });
    GUARDED.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(call));
    GUARDED.set(false);
    match result {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("its parts contradict each other".to_owned()),
    }
}

/// What a tokenizer.json has besides its vocabulary.
#[derive(Deserialize)]
struct HandledParts {
    #[serde(default)]
    added_tokens: Vec<Value>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

/// Loads a tokenizer.json with an empty vocabulary in a process with limits. The vocabulary can be left out: it is a
/// plain list, whose memory is in proportion to its bytes, and loading it takes most of the time.
fn rehearse(file: &[u8]) -> Result<()> {
    let limits = Allowance {
        memory_bytes: MEMORY,
        seconds: SECONDS,
    };
    let load = || {
        let parts: HandledParts = serde_json::from_slice(file)?;
        if growth(&parts.decoder) > GROWTH {
            return Err(format!("its decoder can make a text more than {GROWTH} times longer").into());
        }
        let whole = json!({
            "version": "1.0",
            "added_tokens": parts.added_tokens,
            "normalizer": parts.normalizer,
            "pre_tokenizer": parts.pre_tokenizer,
            "post_processor": parts.post_processor,
            "decoder": parts.decoder,
            "model": { "type": "BPE", "vocab": {}, "merges": [] },
        });
        tokenizers::Tokenizer::from_bytes(whole.to_string())
    };
    sandbox::run(limits, || guarded(load).map(|_| Vec::new())).map(drop)
}

/// Tokenises `bytes` bytes of text in a process with limits.
fn limited(
    bytes: usize,
    work: impl FnOnce() -> std::result::Result<Vec<u32>, String> + Send,
) -> Result<Vec<u32>> {
    let seconds = u32::try_from(bytes / SPEED).unwrap_or(u32::MAX);
    let limits = Allowance {
        memory_bytes: bytes.saturating_mul(SPREAD).saturating_add(MEMORY),
        seconds: seconds.saturating_add(SECONDS),
    };
    let ids = sandbox::run(limits, || work().map(|ids| to_bytes(&ids)));
    let ids = ids.map_err(|e| match e.kind() {
        ErrorKind::Interrupted => e,
        _ => e.context("the text cannot be tokenised").hint(BROKEN),
    })?;
    Ok(bytemuck::pod_collect_to_vec(&ids))
}

/// Bounds the factor by which a decoder lengthens a text.
fn growth(decoder: &Value) -> usize {
    let own = match (&decoder["type"], &decoder["content"]) {
        (kind, Value::String(content)) if kind == "Replace" => {
            let pattern = decoder["pattern"]["String"].as_str().unwrap_or_default();
            content.len().div_ceil(pattern.len().max(1)).max(1)
        }
        _ => 1,
    };
    let parts = decoder["decoders"].as_array().into_iter().flatten();
    parts.map(growth).fold(own, usize::saturating_mul)
}

/// Loads a tokenizer.json, which errors call `place`.
fn parsed(place: &str, file: &[u8]) -> Result<tokenizers::Tokenizer> {
    let broken = |e: String| Error::damaged(format!("{place} cannot be used: {e}")).hint(BROKEN);
    rehearse(file).map_err(|e| match e.kind() {
        ErrorKind::Interrupted => e,
        _ => broken(e.to_string()),
    })?;
    let inner = guarded(|| {
        let mut inner = tokenizers::Tokenizer::from_bytes(file)?;
        // Training scripts leave truncation and padding lengths in the file; the tokenizer ignores them.
        inner.with_truncation(None)?.with_padding(None);
        Ok(inner)
    });
    inner.map_err(broken)
}

/// A model's tokenizer: text to token ids and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// The BOS token that [`Tokenizer::encode`] prepends if tokenizer.json has no post-processor.
    bos: Option<u32>,
}

impl Tokenizer {
    /// Says whether a model has a tokenizer, which may be unusable.
    pub fn exists(model: &Path) -> bool {
        if is_gguf(model) {
            Gguf::at(model).is_ok_and(|gguf| gguf.is_some_and(|gguf| gguf.has_tokenizer()))
        } else {
            model.join("tokenizer.json").is_file()
        }
    }

    /// Opens `model/tokenizer.json`, or the tokenizer of a GGUF file.
    ///
    /// Its post-processor adds the special tokens. Without one, BOS is prepended if
    /// `tokenizer_config.json` says `add_bos_token: true`: its `bos_token`, else the id in config.json.
    pub fn open(model: &Path, config: &ModelConfig) -> Result<Self> {
        if let Some(gguf) = Gguf::at(model)? {
            let place = format!("the tokenizer of {}", model.display());
            let inner = parsed(&place, &gguf.tokenizer_json()?)?;
            return Ok(Self { inner, bos: None });
        }
        let path = model.join("tokenizer.json");
        if !path.is_file() {
            return Err(
                Error::not_found(format!("{} does not exist", path.display())).hint(
                    "give token ids with ⟨tokens⟩ instead of text, or add the tokenizer.json of the model",
                ),
            );
        }
        let file = std::fs::read(&path).map_err(|e| Error::io(&path, "read", &e).hint(BROKEN))?;
        let inner = parsed(&path.display().to_string(), &file)?;
        let bos = match inner.get_post_processor() {
            Some(_) => None,
            None => Self::configured_bos(model, config, &inner)?,
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
        let Some(token) = token else {
            return Ok(config.bos_token_id);
        };
        let unknown = || {
            Error::mismatch(format!("bos_token `{token}` is not in tokenizer.json"))
                .hint("use both files from the same model, or give token ids with ⟨tokens⟩ instead of text")
        };
        let id = inner
            .token_to_id(token)
            .ok_or_else(|| unknown().context(path.display()));
        id.map(Some)
    }

    /// Tokenises a document and adds the special tokens.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        limited(text.len(), || self.whole(text))
    }

    /// Tokenises text without adding special tokens: text that contains them already, or that continues
    /// earlier text.
    pub fn encode_raw(&self, text: &str) -> Result<Vec<u32>> {
        limited(text.len(), || self.ids(text, false))
    }

    /// Tokenises only as much of a document as its first `limit` tokens need, and returns these tokens.
    pub fn encode_prefix(&self, text: &str, limit: usize) -> Result<Vec<u32>> {
        limited(text.len(), || self.prefix(text, limit))
    }

    /// Tokenises documents up to `limit` tokens in total; returns the ids of each document that contributes to them.
    pub fn encode_documents(&self, documents: &[String], limit: usize) -> Result<Vec<Vec<u32>>> {
        let (mut done, mut left) = (Vec::new(), limit);
        while left > 0 && done.len() < documents.len() {
            let mut bytes = 0;
            let rest = &documents[done.len()..];
            let batch = rest.iter().take_while(|document| {
                let fits = bytes == 0 || bytes + document.len() <= BATCH;
                bytes += document.len();
                fits
            });
            let batch = &rest[..batch.count()];
            let bytes = batch.iter().map(String::len).sum();
            let listed = limited(bytes, || self.list(batch, left))?;
            let made = unlisted(&listed);
            left -= made.iter().map(Vec::len).sum::<usize>();
            done.extend(made);
        }
        Ok(done)
    }

    /// Does what [`Tokenizer::encode_raw`] does with each of several short texts.
    pub fn encode_raw_each(&self, texts: &[String]) -> Result<Vec<Vec<u32>>> {
        let bytes = texts.iter().map(String::len).sum();
        let listed = limited(bytes, || {
            let mut listed = Vec::new();
            for text in texts {
                let ids = self.ids(text, false)?;
                listed.push(u32::try_from(ids.len()).map_err(|e| e.to_string())?);
                listed.extend(ids);
            }
            Ok(listed)
        })?;
        Ok(unlisted(&listed))
    }

    /// Tokenises documents up to `limit` tokens in total; lists, per document, the number of its ids and then the ids.
    fn list(&self, documents: &[String], limit: usize) -> std::result::Result<Vec<u32>, String> {
        let (mut listed, mut left) = (Vec::new(), limit);
        for document in documents {
            if left == 0 {
                break;
            }
            let ids = self.prefix(document, left)?;
            left -= ids.len();
            listed.push(u32::try_from(ids.len()).map_err(|e| e.to_string())?);
            listed.extend(ids);
        }
        Ok(listed)
    }

    fn ids(&self, text: &str, special_tokens: bool) -> std::result::Result<Vec<u32>, String> {
        let encoding = guarded(|| self.inner.encode_fast(text, special_tokens))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn whole(&self, text: &str) -> std::result::Result<Vec<u32>, String> {
        let ids = self.ids(text, true)?;
        Ok(self.bos.into_iter().chain(ids).collect())
    }

    fn prefix(&self, text: &str, limit: usize) -> std::result::Result<Vec<u32>, String> {
        let mut bytes = likely_bytes(limit);
        loop {
            let mut end = bytes.min(text.len());
            while !text.is_char_boundary(end) {
                end += 1;
            }
            let mut ids = self.whole(&text[..end])?;
            if end == text.len() || ids.len() >= limit.saturating_add(MARGIN) {
                ids.truncate(limit);
                return Ok(ids);
            }
            bytes = bytes.saturating_mul(2);
        }
    }

    /// Returns the text of generated `ids`, without special tokens.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(ids, true))
            .map_err(|e| Error::damaged(format!("the tokens cannot be decoded to text: {e}")).hint(BROKEN))
    }
}

/// Divides a list of the number of ids and the ids of each text.
fn unlisted(mut listed: &[u32]) -> Vec<Vec<u32>> {
    let mut texts = Vec::new();
    while let Some((n, rest)) = listed.split_first() {
        let (ids, rest) = rest.split_at(*n as usize);
        texts.push(ids.to_vec());
        listed = rest;
    }
    texts
}

/// Turns a growing list of token ids into text, piece by piece.
///
/// A token may end within a character, so a piece is returned only when its last character is whole.
#[derive(Default)]
pub struct TextStream<'a> {
    tokenizer: Option<&'a Tokenizer>,
    ids: Vec<u32>,
    /// Number of ids whose text has been returned.
    done: usize,
    /// First id that is decoded again with each piece, since decoders may join neighbouring tokens.
    context: usize,
    text: String,
}

impl<'a> TextStream<'a> {
    /// Makes an empty stream; without a tokenizer, ids are shown as numbers.
    pub fn new(tokenizer: Option<&'a Tokenizer>) -> Self {
        Self {
            tokenizer,
            ..Self::default()
        }
    }

    /// Adds an id; returns the text that has become complete.
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.ids.push(id);
        self.piece(false)
    }

    /// Returns the rest of the text, even if it ends within a character.
    pub fn finish(&mut self) -> Result<String> {
        self.piece(true)
    }

    /// Returns all text so far; empty without a tokenizer.
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
        // Nothing to show yet, as for a special token. It stays as context: a decoder may derive the
        // space before a word from the token before it.
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
