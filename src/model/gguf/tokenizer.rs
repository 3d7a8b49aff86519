//! The tokenizer of a GGUF file as a `tokenizer.json`.
//!
//! Two models of tokens are read: `gpt2`, byte-level BPE with merges and a named rule that splits text into words, and `llama`,
//! SentencePiece's BPE, whose merges follow from the scores of the tokens.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::Gguf;
use crate::error::Result;

/// Kinds of tokens, in `tokenizer.ggml.token_type`.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const UNUSED: u64 = 5;
const BYTE: u64 = 6;

/// Most characters of a token of `llama` whose parts are merged; SentencePiece makes tokens of up to 16.
const LONGEST: usize = 256;

/// The words of Llama 3; in Qwen's, each digit is a word.
const LLAMA3_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN_WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The words of Mistral Nemo.
const TEKKEN_WORDS: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Names in `tokenizer.ggml.pre`.
const WORDS: [&str; 8] = [
    "gpt-2",
    "smollm",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "qwen2",
    "deepseek-r1-qwen",
    "tekken",
];

impl Gguf {
    /// Says whether the file has a tokenizer.
    pub fn has_tokenizer(&self) -> bool {
        self.field("tokenizer.ggml.tokens").is_some()
    }

    /// Returns the text of a special token, given its name: `bos`, `eos`, `unknown`, `padding`.
    pub fn special_token(&self, name: &str) -> Option<&str> {
        let id = self.special_id(name)?;
        self.field("tokenizer.ggml.tokens")?.as_array()?.get(id)?.as_str()
    }

    fn special_id(&self, name: &str) -> Option<usize> {
        let id = self.field(&format!("tokenizer.ggml.{name}_token_id"))?.as_u64()?;
        usize::try_from(id).ok()
    }

    /// Returns the chat template, if there is one.
    pub fn chat_template(&self) -> Option<&str> {
        self.text("tokenizer.chat_template")
    }

    /// Makes the `tokenizer.json`.
    ///
    /// # Errors
    /// A model of tokens, or a rule for words, that is not supported; a vocabulary that contradicts itself.
    pub fn tokenizer_json(&self) -> Result<Vec<u8>> {
        let wrong = |what: &str| {
            self.unsupported(what)
                .hint("give token ids with ⟨tokens⟩ instead of text")
        };
        let tokens = self.list("tokenizer.ggml.tokens").and_then(|each| {
            let texts = each.iter().map(Value::as_str);
            texts.collect::<Option<Vec<&str>>>()
        });
        let tokens = tokens.ok_or_else(|| wrong("there is no vocabulary"))?;
        let kinds: Vec<u64> = match self.list("tokenizer.ggml.token_type") {
            Some(kinds) => kinds.iter().map(|kind| kind.as_u64().unwrap_or(0)).collect(),
            None => vec![1; tokens.len()],
        };
        if kinds.len() != tokens.len() {
            return Err(wrong(
                "the vocabulary has another length than the list of its tokens' types",
            ));
        }
        let vocabulary = Vocabulary { tokens, kinds };
        let model = self.text("tokenizer.ggml.model").unwrap_or("none");
        let mut file = match model {
            "gpt2" => self.byte_level(&vocabulary)?,
            "llama" => self.sentence_piece(&vocabulary)?,
            other => {
                return Err(wrong(&format!(
                    "the tokenizer `{other}` is not supported (supported: gpt2, llama)"
                )));
            }
        };
        let special = |(id, (content, kind)): (usize, (&&str, &u64))| {
            let is_special = matches!(*kind, CONTROL | UNKNOWN);
            (is_special || *kind == USER_DEFINED).then(|| {
                json!({ "id": id, "content": content, "special": is_special, "single_word": false, "lstrip": false,
                    "rstrip": false, "normalized": false })
            })
        };
        let each = vocabulary.tokens.iter().zip(&vocabulary.kinds).enumerate();
        file.insert("added_tokens".to_owned(), each.filter_map(special).collect());
        file.insert("version".to_owned(), "1.0".into());
        if let Some(template) = self.frame(model, &vocabulary)? {
            file.insert("post_processor".to_owned(), template);
        }
        serde_json::to_vec(&file).map_err(|e| wrong(&e.to_string()))
    }

    fn list(&self, name: &str) -> Option<&Vec<Value>> {
        self.field(name)?.as_array()
    }

    /// Makes the rule for the special tokens around a text: `add_bos_token` and `add_eos_token`.
    fn frame(&self, model: &str, vocabulary: &Vocabulary) -> Result<Option<Value>> {
        let words = self.text("tokenizer.ggml.pre").unwrap_or_default();
        // llama.cpp's defaults.
        let begins = model == "llama" || ["llama-bpe", "llama3", "llama-v3", "tekken"].contains(&words);
        let says = |name: &str, default| {
            let flag = self.field(&format!("tokenizer.ggml.add_{name}_token"));
            flag.and_then(Value::as_bool).unwrap_or(default)
        };
        let mut parts = vec![json!({ "Sequence": { "id": "A", "type_id": 0 } })];
        let mut special = Map::new();
        for (name, is_added, first) in [
            ("bos", says("bos", begins), true),
            ("eos", says("eos", false), false),
        ] {
            let Some(id) = self.special_id(name).filter(|_| is_added) else {
                continue;
            };
            let token = vocabulary
                .tokens
                .get(id)
                .ok_or_else(|| self.unsupported(format!("{name}_token_id {id} is outside the vocabulary")))?;
            special.insert(
                (*token).to_owned(),
                json!({ "id": token, "ids": [id], "tokens": [token] }),
            );
            let part = json!({ "SpecialToken": { "id": token, "type_id": 0 } });
            parts.insert(if first { 0 } else { parts.len() }, part);
        }
        Ok((parts.len() > 1).then(|| {
            json!({ "type": "TemplateProcessing", "single": parts, "pair": [{ "Sequence": { "id": "A", "type_id": 0 } },
                { "Sequence": { "id": "B", "type_id": 1 } }], "special_tokens": special })
        }))
    }

    /// Byte-level BPE.
    fn byte_level(&self, vocabulary: &Vocabulary) -> Result<Map<String, Value>> {
        let name = self.text("tokenizer.ggml.pre").unwrap_or("none");
        let byte_level = |has_words: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": has_words });
        let split = |words: &str| {
            let split = json!({ "type": "Split", "pattern": { "Regex": words }, "behavior": "Isolated", "invert": false });
            json!({ "type": "Sequence", "pretokenizers": [split, byte_level(false)] })
        };
        let words = match name {
            "gpt-2" => byte_level(true),
            "smollm" => json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Digits", "individual_digits": true }, byte_level(true)] }),
            "llama-bpe" | "llama3" | "llama-v3" => split(LLAMA3_WORDS),
            "qwen2" | "deepseek-r1-qwen" => split(QWEN_WORDS),
            "tekken" => split(TEKKEN_WORDS),
            other => {
                return Err(self
                    .unsupported(format!(
                        "the tokenizer's rule for words, `{other}`, is not supported"
                    ))
                    .hint(format!(
                        "supported: {}; or give token ids with ⟨tokens⟩ instead of text",
                        WORDS.join(", ")
                    )));
            }
        };
        let merges = self.list("tokenizer.ggml.merges");
        let merges = merges.ok_or_else(|| self.unsupported("the tokenizer has no merges"))?;
        let normalizer = match name {
            "qwen2" | "deepseek-r1-qwen" => json!({ "type": "NFC" }),
            _ => Value::Null,
        };
        // Words that are tokens are not merged from their letters.
        let is_whole = ["llama-bpe", "llama3", "llama-v3", "tekken"].contains(&name);
        let model =
            json!({ "type": "BPE", "vocab": vocabulary.ids(), "merges": merges, "ignore_merges": is_whole });
        Ok(Map::from_iter([
            ("normalizer".to_owned(), normalizer),
            ("pre_tokenizer".to_owned(), words),
            ("decoder".to_owned(), byte_level(true)),
            ("model".to_owned(), model),
        ]))
    }

    /// SentencePiece's BPE, whose bytes are the fallback for characters without a token.
    fn sentence_piece(&self, vocabulary: &Vocabulary) -> Result<Map<String, Value>> {
        let wrong = |what: &str| self.unsupported(what);
        let scores = self.list("tokenizer.ggml.scores");
        let scores: Option<Vec<f64>> =
            scores.map(|each| each.iter().map(|x| x.as_f64().unwrap_or(0.0)).collect());
        let scores = scores.filter(|each| each.len() == vocabulary.tokens.len());
        let scores = scores.ok_or_else(|| wrong("the vocabulary has no scores of its tokens"))?;
        let has_space = self
            .field("tokenizer.ggml.add_space_prefix")
            .and_then(Value::as_bool);
        let mut normalizers =
            vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": "▁" })];
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": "▁" }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if has_space.unwrap_or(true) {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": "▁" }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        let unknown = vocabulary
            .tokens
            .iter()
            .zip(&vocabulary.kinds)
            .find(|(_, kind)| **kind == UNKNOWN);
        let model = json!({
            "type": "BPE", "vocab": vocabulary.ids(), "merges": vocabulary.merges(&scores), "fuse_unk": true,
            "byte_fallback": true, "unk_token": unknown.map(|(token, _)| token),
        });
        Ok(Map::from_iter([
            (
                "normalizer".to_owned(),
                json!({ "type": "Sequence", "normalizers": normalizers }),
            ),
            ("pre_tokenizer".to_owned(), Value::Null),
            (
                "decoder".to_owned(),
                json!({ "type": "Sequence", "decoders": decoders }),
            ),
            ("model".to_owned(), model),
        ]))
    }
}

struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Vec<u64>,
}

impl Vocabulary<'_> {
    /// Returns the id of each token that text can have.
    fn ids(&self) -> Map<String, Value> {
        let each = self.tokens.iter().zip(&self.kinds).enumerate();
        each.filter(|(_, (_, kind))| **kind != UNUSED)
            .map(|(id, (token, _))| ((*token).to_owned(), id.into()))
            .collect()
    }

    /// Returns the pairs of tokens that make a token, the best score first: SentencePiece joins the pair whose token has it.
    fn merges(&self, scores: &[f64]) -> Vec<[&str; 2]> {
        let is_part = |kind: u64| !matches!(kind, UNKNOWN | CONTROL | UNUSED | BYTE);
        let each = || self.tokens.iter().zip(&self.kinds).zip(scores);
        let parts: HashSet<&str> = each()
            .filter(|((_, kind), _)| is_part(**kind))
            .map(|((token, _), _)| *token)
            .collect();
        let mut found = Vec::new();
        for ((token, kind), score) in each() {
            if !is_part(*kind) || token.len() > LONGEST {
                continue;
            }
            for (at, _) in token.char_indices().skip(1) {
                let pair = token.split_at(at);
                if parts.contains(pair.0) && parts.contains(pair.1) {
                    found.push((*score, [pair.0, pair.1]));
                }
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        found.into_iter().map(|(_, pair)| pair).collect()
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    /// Splits a text by one of the rules; the bytes of a word are shown as characters.
    fn words(rule: &str, text: &str) -> Vec<String> {
        let split =
            json!({ "type": "Split", "pattern": { "Regex": rule }, "behavior": "Isolated", "invert": false });
        let file = json!({ "pre_tokenizer": split, "model": { "type": "BPE", "vocab": {}, "merges": [] }, "version": "1.0" });
        let tokenizer = tokenizers::Tokenizer::from_bytes(file.to_string()).expect("a tokenizer");
        let mut text = PreTokenizedString::from(text);
        let rule = tokenizer.get_pre_tokenizer().expect("a rule");
        rule.pre_tokenize(&mut text).expect("words");
        let found = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
        found.into_iter().map(|(word, ..)| word.to_owned()).collect()
    }

    #[test]
    fn words_are_split_as_the_rules_say() {
        let text = "I'LL take 12345 naïve\n\n  cafés/日本";
        let llama3 = [
            "I", "'LL", " take", " ", "123", "45", " naïve", "\n\n", " ", " cafés", "/日本",
        ];
        assert_eq!(words(LLAMA3_WORDS, text), llama3);
        let qwen = [
            "I", "'LL", " take", " ", "1", "2", "3", "4", "5", " naïve", "\n\n", " ", " cafés", "/日本",
        ];
        assert_eq!(words(QWEN_WORDS, text), qwen);
        let tekken = [
            "I", "'LL", " take", " ", "1", "2", "3", "4", "5", " naïve", "\n\n", " ", " cafés", "/日本",
        ];
        assert_eq!(words(TEKKEN_WORDS, text), tekken);
        // Mistral Nemo begins a word at a capital after small letters.
        assert_eq!(words(TEKKEN_WORDS, "camelCase"), ["camel", "Case"]);
        assert_eq!(words(QWEN_WORDS, "camelCase"), ["camelCase"]);
    }
}
