//! The lines of `--batch`: each is a prompt, or is skipped.

use std::collections::{BTreeSet, VecDeque};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Number, Value};
use sha2::{Digest, Sha256};

use crate::cmd::args::Global;
use crate::cmd::run::args::Args;
use crate::env;
use crate::error::{Error, ErrorKind, Result};
use crate::model::chat::{ChatTemplate, Message};
use crate::model::tokenizer::Tokenizer;
use crate::model::{Decoder, Model};
use crate::store::hex;
use crate::wording::counted;

/// Lines that cannot be answered that are named one by one.
const NAMED: usize = 5;
/// Generated positions for which a sequence reserves room; its caches grow when it is used up.
const RESERVED: usize = 4096;

/// A line of the input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Turn>>,
    max_new: Option<usize>,
}

/// A message of a conversation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    role: String,
    content: String,
}

/// A prompt to answer.
pub struct Prompt {
    /// A string or a whole number.
    pub id: Value,
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Most tokens of the reply.
    pub max_new: usize,
}

impl Prompt {
    /// Returns the positions for which its sequence is opened, of at most `most`: all of them, or if caches grow, a part.
    pub fn reserved(&self, most: usize, grows: bool) -> usize {
        let new = if grows {
            self.max_new.min(RESERVED)
        } else {
            self.max_new
        };
        self.ids.len().saturating_add(new).min(most)
    }

    /// Returns the digest by which a later run knows the prompt again.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        self.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        hash.update((self.max_new as u64).to_le_bytes());
        hex(&hash.finalize())[..16].to_owned()
    }
}

/// The prompts of a file.
pub struct Prompts {
    /// Those to answer, in the order of the file.
    pub all: VecDeque<Prompt>,
    /// Lines that cannot be answered, with the reason.
    pub skipped: Vec<String>,
    /// The model's tokenizer.
    pub tokenizer: Tokenizer,
    /// Whether prompts are fed as they are although the model has a chat template.
    is_plain: bool,
    /// The most positions of a context; without an end if replies may go beyond the model's.
    pub most: usize,
}

impl Prompts {
    /// Reads a file. A line that cannot be answered is skipped.
    ///
    /// # Errors
    /// The file cannot be read, no line can be answered, an interrupt.
    pub fn read(path: &Path, args: &Args, model: &Model) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::InvalidData => {
                Error::invalid(format!("{} is not UTF-8 text", path.display()))
                    .hint("convert it to UTF-8, for example with iconv")
            }
            _ => Error::io(path, "read", &e),
        })?;
        let text = text.strip_prefix('\u{feff}').unwrap_or(&text);
        let (tokenizer, decoder) = (model.tokenizer()?, &model.decoder);
        let most = if args.beyond_context {
            usize::MAX
        } else {
            decoder.config.max_position_embeddings
        };
        let mut reader = Reader {
            args,
            decoder,
            tokenizer: &tokenizer,
            most,
            template: None,
            seen: BTreeSet::new(),
            plain: 0,
        };
        let (mut all, mut skipped) = (VecDeque::new(), Vec::new());
        let lines = text.lines().enumerate();
        for (i, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            env::check()?;
            match reader.prompt(i + 1, line) {
                Ok(prompt) => all.push_back(prompt),
                Err(e) if e.kind() == ErrorKind::Interrupted => return Err(e),
                Err(e) => skipped.push(format!("line {}: {e}", i + 1)),
            }
        }
        let is_plain = reader.plain > 0 && ChatTemplate::exists(&args.model);
        if all.is_empty() {
            let why = skipped.first().map_or(String::new(), |why| format!(": {why}"));
            let what = format!("{} has no line that can be answered{why}", path.display());
            return Err(Error::invalid(what)
                .hint(r#"give lines such as {"id": "a", "prompt": "...", "max_new": 64}"#));
        }
        Ok(Self {
            all,
            skipped,
            tokenizer,
            is_plain,
            most,
        })
    }

    /// Returns how many positions the longest context may have.
    pub fn longest(&self) -> usize {
        let positions = |prompt: &Prompt| prompt.reserved(self.most, false);
        self.all.iter().map(positions).max().unwrap_or(0)
    }

    /// Returns how many tokens the longest prompt has.
    pub fn longest_prompt(&self) -> usize {
        self.all.iter().map(|prompt| prompt.ids.len()).max().unwrap_or(0)
    }

    /// Names the first lines that are skipped, and counts the others.
    pub fn warn(&self, global: &Global) {
        let log = global.log();
        let (first, others) = self.skipped.split_at(self.skipped.len().min(NAMED));
        first.iter().for_each(|line| log.warn(&format!("skipped {line}")));
        if !others.is_empty() {
            let n = counted(others.len(), "more line");
            log.warn(&format!("skipped {n}, which cannot be answered either"));
        }
        if self.is_plain {
            log.warn(
                "the model has a chat template, but a `prompt` is not formatted with it; `messages` are",
            );
        }
    }
}

/// Reads lines of the input.
struct Reader<'a> {
    args: &'a Args,
    decoder: &'a Decoder,
    tokenizer: &'a Tokenizer,
    /// The most positions of a context.
    most: usize,
    /// The model's chat template, or why there is none, once a line needs it.
    template: Option<std::result::Result<ChatTemplate, String>>,
    /// The ids so far, as JSON.
    seen: BTreeSet<String>,
    /// Lines with a prompt that is fed as it is.
    plain: usize,
}

impl Reader<'_> {
    fn prompt(&mut self, number: usize, line: &str) -> Result<Prompt> {
        let line: Line = serde_json::from_str(line).map_err(|e| {
            // There is one line.
            let text = e.to_string();
            let what = text.strip_suffix(&format!(" at line {} column {}", e.line(), e.column()));
            Error::invalid(match what {
                Some(what) => format!("{what} (column {})", e.column()),
                None => text,
            })
        })?;
        let id = line.id.unwrap_or_else(|| number.into());
        let is_whole = |n: &Number| n.is_u64() || n.is_i64();
        if !id.is_string() && !id.as_number().is_some_and(is_whole) {
            return Err(Error::invalid(
                "`id` is neither a string nor a whole number of 64 bits",
            ));
        }
        let ids = match (line.prompt, line.messages) {
            (Some(text), None) if text.is_empty() => return Err(Error::invalid("the prompt is empty")),
            (None, Some(messages)) if messages.is_empty() => {
                return Err(Error::invalid("there are no messages"));
            }
            (Some(text), None) => {
                self.plain += 1;
                self.tokenizer.encode(&text)?
            }
            (None, Some(messages)) => {
                let message = |of: Turn| Message {
                    role: of.role.into(),
                    content: of.content,
                };
                let messages: Vec<Message> = messages.into_iter().map(message).collect();
                let text = self.template()?.render(&messages, true)?;
                self.tokenizer.encode_raw(&text)?
            }
            _ => return Err(Error::invalid("give either `prompt` or `messages`")),
        };
        if ids.is_empty() {
            return Err(Error::invalid("the prompt has no tokens"));
        }
        self.decoder.check_ids(&ids)?;
        if ids.len() > self.most {
            let (n, most) = (ids.len(), self.most);
            return Err(Error::invalid(format!(
                "the prompt has {n} tokens, more than the model's context of {most} tokens"
            )));
        }
        if !self.seen.insert(id.to_string()) {
            return Err(Error::invalid(format!("another line has the id {id}")));
        }
        Ok(Prompt {
            id,
            ids,
            max_new: line.max_new.unwrap_or(self.args.max_new),
        })
    }

    fn template(&mut self) -> Result<&ChatTemplate> {
        let open = || {
            let found = ChatTemplate::open(&self.args.model).map_err(|e| e.to_string())?;
            found.ok_or_else(|| "`messages` need a chat template, and the model has none".to_owned())
        };
        let template = self.template.get_or_insert_with(open);
        template.as_ref().map_err(|why| Error::invalid(why.as_str()))
    }
}
