//! The documents of `--text`: files, folders and stdin.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::source::Source;
use crate::env;
use crate::error::{Error, Result};
use crate::model::chat::{ChatTemplate, Message};
use crate::model::tokenizer::{BATCH, MARGIN, Tokenizer, likely_bytes};

/// The name that stands for stdin.
pub(super) const STDIN: &str = "-";

/// The field of a JSON line that holds its text, unless the user names another field.
const FIELD: &str = "text";

/// Extensions of the files that are taken from a folder; a `.gz` after the extension is ignored.
const IN_FOLDERS: [&str; 4] = ["txt", "md", "jsonl", "ndjson"];

/// What `--text` takes.
pub(super) const KINDS: &str = "⟨text⟩ accepts text files (one document each), .jsonl files (one document per line), either with .gz, folders of such files, and - for stdin";

/// Where documents are read from.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// Files, folders, and `-` for stdin.
    pub paths: Vec<PathBuf>,
    /// The field of a JSON line that holds its text; `None`: `text`, or else the chat in `messages`.
    pub field: Option<String>,
}

/// A document as it was read.
#[derive(Debug, PartialEq)]
enum Document {
    Text(String),
    /// Messages, each with a role and content; the model's template turns them into one text.
    Chat(Vec<[String; 2]>),
}

/// The tokens of texts.
#[derive(Debug, Default)]
pub struct Tokens {
    /// Those of each document that were asked for.
    pub documents: Vec<Vec<u32>>,
    /// Those that follow, of all documents in a row.
    pub beyond: Vec<u32>,
    /// Whether the files have more text than the documents.
    pub is_cut: bool,
}

impl TextFiles {
    /// Tokenises the documents in order, up to `max_tokens` tokens in total, and up to `beyond` tokens that follow; chats
    /// are written out by the template of the model in `model_dir`. No file is read much farther than that.
    ///
    /// # Errors
    /// A file that cannot be read or is not text; a line without text; a folder without text files.
    pub fn tokenise(
        &self,
        model_dir: &Path,
        tokenizer: &Tokenizer,
        max_tokens: usize,
        beyond: usize,
    ) -> Result<Tokens> {
        let mut all = Tokens::default();
        let mut left = max_tokens;
        let mut encoder = Encoder {
            field: self.field.as_deref(),
            model_dir,
            tokenizer,
            template: None,
        };
        for path in self.files()? {
            if left == 0 && all.beyond.len() >= beyond {
                all.is_cut = true;
                break;
            }
            env::check()?;
            let mut source = Source::open(&path)?;
            let (made, is_all) = encoder.encode(&path, &mut source, left)?;
            let count: usize = made.iter().map(Vec::len).sum();
            left -= count;
            all.is_cut |= !is_all;
            // The file in which the text ends is tokenised again, so that what follows does not change the text.
            if left == 0 && all.beyond.len() < beyond {
                let most = count.saturating_add(beyond - all.beyond.len());
                let (more, _) = encoder.encode(&path, &mut source, most)?;
                all.beyond.extend(more.into_iter().flatten().skip(count));
            }
            all.documents.extend(made);
        }
        all.is_cut |= !all.beyond.is_empty();
        Ok(all)
    }

    /// Lists the files; those of a folder and its subfolders come in the order of their names.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for path in &self.paths {
            if path.is_dir() {
                let before = files.len();
                add_folder(path, &mut files)?;
                if files.len() == before {
                    return Err(Error::not_found(format!("folder {} contains no text file", path.display())).hint(
                        "folders are searched for .txt, .md, .jsonl and .ndjson files, also with .gz; name other files one by one",
                    ));
                }
            } else {
                files.push(path.clone());
            }
        }
        Ok(files)
    }
}

/// Turns files into tokens.
struct Encoder<'a> {
    field: Option<&'a str>,
    model_dir: &'a Path,
    tokenizer: &'a Tokenizer,
    /// The model's chat template, once there was a chat.
    template: Option<ChatTemplate>,
}

impl Encoder<'_> {
    /// Tokenises the documents of a file, up to `limit` tokens in total; also tells whether these are all of its tokens.
    fn encode(&mut self, path: &Path, source: &mut Source, limit: usize) -> Result<(Vec<Vec<u32>>, bool)> {
        let is_lines = matches!(kind(path), Some("jsonl" | "ndjson"))
            || path == Path::new(STDIN) && self.field.is_some();
        if is_lines {
            self.lines(path, source, limit)
        } else {
            self.text(path, source, limit)
        }
    }

    /// Tokenises a file that is one document.
    fn text(&self, path: &Path, source: &mut Source, limit: usize) -> Result<(Vec<Vec<u32>>, bool)> {
        let wanted = limit.saturating_add(MARGIN);
        let mut bytes = likely_bytes(limit);
        let (mut ids, is_all) = loop {
            let (text, is_all) = source.text(bytes)?;
            if text.is_empty() && is_all {
                return Ok((Vec::new(), true));
            }
            let ids = self.tokenizer.encode_prefix(text, wanted);
            let ids = ids.map_err(|e| e.context(path.display()))?;
            if is_all || ids.len() == wanted {
                break (ids, is_all);
            }
            bytes = bytes.saturating_mul(2);
        };
        let is_all = is_all && ids.len() <= limit;
        ids.truncate(limit);
        Ok((if ids.is_empty() { Vec::new() } else { vec![ids] }, is_all))
    }

    /// Tokenises a file with one document per line, many lines at a time.
    fn lines(&mut self, path: &Path, source: &mut Source, limit: usize) -> Result<(Vec<Vec<u32>>, bool)> {
        let (mut made, mut left) = (Vec::new(), limit);
        let (mut at, mut number) = (0, 0);
        loop {
            let (mut batch, mut bytes, mut is_end) = (Vec::new(), 0, false);
            while bytes < BATCH && !is_end {
                let Some((line, next)) = source.line(at)? else {
                    is_end = true;
                    continue;
                };
                number += 1;
                bytes += line.len();
                if !line.trim().is_empty() {
                    let place = |e: Error| e.context(format!("{} line {number}", path.display()));
                    batch.push(document(line, self.field).map_err(place)?);
                }
                at = next;
            }
            batch.retain(|document| !document.is_empty());
            // One token more tells whether there are more.
            let documents = self.batch(&batch, left.saturating_add(1));
            let documents = documents.map_err(|e| e.context(path.display()))?;
            for mut ids in documents {
                if ids.len() > left || left == 0 && !ids.is_empty() {
                    ids.truncate(left);
                    if !ids.is_empty() {
                        made.push(ids);
                    }
                    return Ok((made, false));
                }
                left -= ids.len();
                made.push(ids);
            }
            if is_end {
                return Ok((made, true));
            }
        }
    }

    /// Tokenises documents up to `limit` tokens in total.
    fn batch(&mut self, batch: &[Document], limit: usize) -> Result<Vec<Vec<u32>>> {
        if !batch.iter().any(Document::is_chat) {
            let texts: Vec<String> = batch.iter().map(|of| of.text().to_owned()).collect();
            return self.tokenizer.encode_documents(&texts, limit);
        }
        let template = match self.template.take() {
            Some(template) => template,
            None => chat_template(self.model_dir)?,
        };
        let made = chats(batch, &template, self.tokenizer, limit);
        self.template = Some(template);
        made
    }
}

/// Parses a line of JSON, which has its text in a field.
fn document(line: &str, field: Option<&str>) -> Result<Document> {
    const LINES: &str = "write each line as an object such as {\"text\": \"a document\"}, or name another field with ⟨text_field⟩";
    let value: Value =
        serde_json::from_str(line).map_err(|e| Error::invalid(format!("not valid JSON: {e}")).hint(LINES))?;
    let name = field.unwrap_or(FIELD);
    if let Some(text) = value[name].as_str() {
        return Ok(Document::Text(text.to_owned()));
    }
    match value["messages"].as_array().filter(|_| field.is_none()) {
        Some(messages) => messages
            .iter()
            .map(message)
            .collect::<Result<_>>()
            .map(Document::Chat),
        None => Err(Error::invalid(format!("field `{name}` is missing or not a string")).hint(LINES)),
    }
}

impl Document {
    fn is_chat(&self) -> bool {
        matches!(self, Self::Chat(_))
    }

    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::Chat(messages) => messages.is_empty(),
        }
    }

    /// Returns the text of a document that is not a chat.
    fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Chat(_) => "",
        }
    }
}

/// Parses a message of a chat.
fn message(value: &Value) -> Result<[String; 2]> {
    let part = |name: &str| {
        value[name].as_str().map(str::to_owned).ok_or_else(|| {
            Error::invalid(format!("`{name}` of a message is missing or not a string"))
                .hint("write `messages` as a list of objects such as {\"role\": \"user\", \"content\": \"some text\"}")
        })
    };
    Ok([part("role")?, part("content")?])
}

/// Opens the template that turns chats into text.
fn chat_template(model_dir: &Path) -> Result<ChatTemplate> {
    ChatTemplate::open(model_dir)?.ok_or_else(|| {
        Error::invalid("the document is a chat (`messages`), but the model has no chat template")
            .hint("give lines with a text instead, or the folder of a chat model")
    })
}

/// Tokenises documents of which some are chats, up to `limit` tokens.
fn chats(
    read: &[Document],
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    limit: usize,
) -> Result<Vec<Vec<u32>>> {
    let (mut documents, mut left) = (Vec::new(), limit);
    for document in read {
        if left == 0 {
            break;
        }
        env::check()?;
        let mut ids = match document {
            Document::Text(text) => tokenizer.encode_prefix(text, left)?,
            Document::Chat(messages) => {
                let message = |[role, content]: &[String; 2]| Message {
                    role: role.clone().into(),
                    content: content.clone(),
                };
                let messages: Vec<Message> = messages.iter().map(message).collect();
                // The template writes the special tokens itself.
                tokenizer.encode_raw(&template.render(&messages, false)?)?
            }
        };
        ids.truncate(left);
        left -= ids.len();
        documents.push(ids);
    }
    Ok(documents)
}

/// Returns the kind of a file, which its name tells: the extension, without a final `.gz`.
fn kind(path: &Path) -> Option<&str> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_suffix(".gz").unwrap_or(name);
    Path::new(name).extension()?.to_str()
}

/// Adds the text files of a folder and its subfolders in the order of their names.
fn add_folder(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    env::check()?;
    let failed = |e| Error::io(folder, "read", &e);
    let entries = std::fs::read_dir(folder).map_err(failed)?;
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<std::io::Result<_>>()
        .map_err(failed)?;
    paths.sort();
    let is_hidden = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
    };
    for path in paths.into_iter().filter(|path| !is_hidden(path)) {
        // A symbolic link to a folder is not followed, since it may lead back to a folder above it.
        if path.is_dir() && !path.is_symlink() {
            add_folder(&path, files)?;
        } else if path.is_file() && kind(&path).is_some_and(|kind| IN_FOLDERS.contains(&kind)) {
            files.push(path);
        }
    }
    Ok(())
}
