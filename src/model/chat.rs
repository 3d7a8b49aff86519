//! The chat template of a checkpoint: turns a conversation into one text.
//!
//! Templates are Jinja and expect the environment that transformers offers, which [`jinja`] rebuilds. They come with
//! the model and are not trusted. The engine limits the number of instructions, but this does not bound memory and
//! time: a single instruction may take any amount (`x ~ x`, `|indent(10**9)`), operators cannot be wrapped with checks
//! as filters can, and only the stack bounds the nesting of values and syntax. Templates are therefore compiled and
//! rendered in a process with limits ([`sandbox`]), which also bound what nobody has thought of.

pub mod jinja;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use minijinja::value::Value;
use serde::Serialize;

use super::fields::read_json;
use super::gguf::Gguf;
use crate::error::{Error, ErrorKind, Result};
use crate::sandbox::{self, Allowance};

/// A message of a conversation, as templates see it.
#[derive(Clone, Debug, Serialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or another role that the template knows.
    pub role: Cow<'static, str>,
    /// Text of the message.
    pub content: String,
}

/// A chat template with the model's special tokens.
pub struct ChatTemplate {
    /// The file that holds the template.
    path: PathBuf,
    source: String,
    tokens: Vec<(String, Value)>,
}

/// Most bytes of a template; real ones have about ten thousand.
const LONGEST: usize = 1 << 17;

/// Bytes of memory for a template, in addition to [`COPIES`] times the messages.
const MEMORY: usize = 1 << 28;

/// Seconds of processor time for a template.
const SECONDS: u32 = 2;

/// How many copies of the messages' text a template may hold in memory.
const COPIES: usize = 6;

/// The hint for a template that does not work.
const UNUSABLE: &str = "omit ⟨chat⟩ to use the prompt as it is, or give the turns as token ids with ⟨tokens⟩";

impl ChatTemplate {
    /// Compiles the chat template of the model in `dir`, if there is one: `chat_template.jinja`, else
    /// that of `tokenizer_config.json`, as in transformers, else that of `chat_template.json`; of a GGUF file, its own.
    ///
    /// # Errors
    /// A file that cannot be read; a list of templates without a `default`; a syntax error.
    pub fn open(dir: &Path) -> Result<Option<Self>> {
        let Some((path, source)) = find_template(dir)? else {
            return Ok(None);
        };
        if source.len() > LONGEST {
            let what = format!(
                "the chat template has {} bytes, more than the limit of {LONGEST}",
                source.len()
            );
            return Err(Error::invalid(what).context(path.display()).hint(UNUSABLE));
        }
        let template = Self {
            tokens: special_tokens(dir)?,
            path,
            source,
        };
        template.limited(0, || {
            jinja::compile(&template.source, &template.tokens).map(|_| String::new())
        })?;
        Ok(Some(template))
    }

    /// Tells whether the model in `dir` has a template, which may be unusable.
    pub fn exists(dir: &Path) -> bool {
        find_template(dir).is_ok_and(|found| found.is_some())
    }

    /// Returns the file that holds the template.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Renders a conversation, special tokens included; with `add_generation_prompt`, the text ends where the
    /// assistant's reply starts.
    ///
    /// # Errors
    /// A template that fails, refuses the messages or does not end.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let content_bytes = messages.iter().map(|m| m.content.len()).sum();
        self.limited(content_bytes, || {
            let environment = jinja::compile(&self.source, &self.tokens)?;
            jinja::render(&environment, messages, add_generation_prompt)
        })
    }

    /// Does `work` with the template in a process with limits.
    fn limited(
        &self,
        content_bytes: usize,
        work: impl FnOnce() -> std::result::Result<String, String> + Send,
    ) -> Result<String> {
        let limits = Allowance {
            memory_bytes: content_bytes.saturating_mul(COPIES).saturating_add(MEMORY),
            seconds: SECONDS,
        };
        let text = sandbox::run(limits, || work().map(String::into_bytes));
        let text = text.map_err(|e| match e.kind() {
            ErrorKind::Interrupted => e,
            _ => e
                .context("the chat template cannot be used")
                .context(self.path.display())
                .hint(UNUSABLE),
        })?;
        String::from_utf8(text).map_err(|e| Error::invalid(e.to_string()).hint(UNUSABLE))
    }
}

/// Finds the file that holds the template, and the template's source.
fn find_template(dir: &Path) -> Result<Option<(PathBuf, String)>> {
    if let Some(gguf) = Gguf::at(dir)? {
        return Ok(gguf
            .chat_template()
            .map(|source| (dir.to_owned(), source.to_owned())));
    }
    let path = dir.join("chat_template.jinja");
    if path.is_file() {
        let source = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, "read", &e))?;
        return Ok(Some((path, source)));
    }
    for name in ["tokenizer_config.json", "chat_template.json"] {
        let path = dir.join(name);
        if path.is_file()
            && let Some(source) = in_json(&path)?
        {
            return Ok(Some((path, source)));
        }
    }
    Ok(None)
}

/// Reads `chat_template` of a JSON file: a string, or a list, of which the entry named `default` is taken.
fn in_json(path: &Path) -> Result<Option<String>> {
    let value = read_json(path)?;
    let named = |template: &serde_json::Value| {
        (template["name"] == "default").then(|| template["template"].as_str().map(String::from))?
    };
    let (source, wrong) = match &value["chat_template"] {
        serde_json::Value::Null => return Ok(None),
        serde_json::Value::Array(list) => (
            list.iter().find_map(named),
            "`chat_template` has no entry named `default`",
        ),
        other => (
            other.as_str().map(String::from),
            "`chat_template` is neither a string nor a list",
        ),
    };
    let wrong = || Error::invalid(wrong).context(path.display()).hint(UNUSABLE);
    source.map(Some).ok_or_else(wrong)
}

/// Reads the special tokens that templates know by name: `bos_token`, `eos_token` and so on.
fn special_tokens(dir: &Path) -> Result<Vec<(String, Value)>> {
    if let Some(gguf) = Gguf::at(dir)? {
        let names = [
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ];
        let found = names
            .into_iter()
            .filter_map(|(name, own)| Some((name.to_owned(), Value::from(gguf.special_token(own)?))));
        return Ok(found.collect());
    }
    let path = dir.join("tokenizer_config.json");
    if !path.is_file() {
        return Ok(Vec::new());
    }
    let config = read_json(&path)?;
    let text = |token: &serde_json::Value| {
        let text = token.as_str().or_else(|| token.get("content")?.as_str());
        text.map(Value::from)
    };
    let fields = config.as_object().into_iter().flatten();
    Ok(fields
        .filter_map(|(name, value)| match name.as_str() {
            "additional_special_tokens" => {
                let tokens = value.as_array()?.iter().filter_map(text);
                Some((name.clone(), tokens.collect()))
            }
            _ if name.ends_with("_token") => Some((name.clone(), text(value)?)),
            _ => None,
        })
        .collect())
}
