//! The documents of `--text`: files, folders and stdin.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use serde_json::Value;

use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::chat::{ChatTemplate, Message};
use crate::model::tokenizer::Tokenizer;

/// The name that stands for stdin.
const STDIN: &str = "-";

/// The field of a JSON line that holds its text, unless the user names another field.
const FIELD: &str = "text";

/// Most bytes that a compressed file may have when decompressed.
const MOST_BYTES: u64 = 1 << 32;

/// Extensions of the files that are taken from a folder; a `.gz` after the extension is ignored.
const IN_FOLDERS: [&str; 4] = ["txt", "md", "jsonl", "ndjson"];

/// What `--text` takes.
const KINDS: &str = "--text accepts text files (one document each), .jsonl files (one document per line), either with .gz, folders of such files, and - for stdin";

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

impl TextFiles {
    /// Tokenises the documents in order, up to `max_tokens` tokens in total, and returns them with up to `beyond` tokens
    /// that follow; chats are written out by the template of the model in `model_dir`.
    ///
    /// # Errors
    /// A file that cannot be read or is not text; a line without text; a folder without text files.
    pub fn tokenise(
        &self,
        model_dir: &Path,
        tokenizer: &Tokenizer,
        max_tokens: usize,
        beyond: usize,
    ) -> Result<(Vec<Vec<u32>>, Vec<u32>)> {
        let (mut documents, mut left) = (Vec::new(), max_tokens);
        let mut rest = Vec::new();
        let mut template = None;
        for path in self.files()? {
            if left == 0 && rest.len() >= beyond {
                break;
            }
            interrupt::check()?;
            let read = self.documents(&path)?;
            let is_chat = read.iter().any(Document::is_chat);
            if is_chat && template.is_none() {
                template = Some(chat_template(model_dir).map_err(|e| e.context(path.display()))?);
            }
            let encode = |limit: usize| {
                let encoded = match template.as_ref().filter(|_| is_chat) {
                    Some(template) => chats(&read, template, tokenizer, limit),
                    None => {
                        let texts: Vec<String> = read.iter().map(|of| of.text().to_owned()).collect();
                        tokenizer.encode_documents(&texts, limit)
                    }
                };
                encoded.map_err(|e| e.context(path.display()))
            };
            let made = encode(left)?;
            let count: usize = made.iter().map(Vec::len).sum();
            left -= count;
            // The file in which the text ends is tokenised again, so that what follows does not change the text.
            if left == 0 && rest.len() < beyond {
                let more = encode(count.saturating_add(beyond - rest.len()))?;
                rest.extend(more.into_iter().flatten().skip(count));
            }
            documents.extend(made);
        }
        Ok((documents, rest))
    }

    /// Lists the files; those of a folder and its subfolders come in the order of their names.
    fn files(&self) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for path in &self.paths {
            if path.is_dir() {
                let before = files.len();
                add_folder(path, &mut files)?;
                if files.len() == before {
                    return Err(Error::failed(format!("folder {} contains no text file", path.display())).hint(
                        "folders are searched for .txt, .md, .jsonl and .ndjson files, also with .gz; name other files one by one",
                    ));
                }
            } else {
                files.push(path.clone());
            }
        }
        Ok(files)
    }

    /// Reads the documents of a file, without empty ones.
    fn documents(&self, path: &Path) -> Result<Vec<Document>> {
        let text = text_of(path)?;
        let is_lines = matches!(kind(path), Some("jsonl" | "ndjson"))
            || path == Path::new(STDIN) && self.field.is_some();
        if !is_lines {
            let documents = vec![Document::Text(text)];
            return Ok(documents
                .into_iter()
                .filter(|document| !document.is_empty())
                .collect());
        }
        let lines = text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty());
        let place = |i: usize| format!("{} line {}", path.display(), i + 1);
        let read = lines.map(|(i, line)| self.line(line).map_err(|e| e.context(place(i))));
        let read: Vec<Document> = read.collect::<Result<_>>()?;
        Ok(read.into_iter().filter(|document| !document.is_empty()).collect())
    }

    /// Parses a line of JSON.
    fn line(&self, line: &str) -> Result<Document> {
        const LINES: &str = "write each line as an object such as {\"text\": \"a document\"}, or name another field with --text-field";
        let value: Value = serde_json::from_str(line)
            .map_err(|e| Error::failed(format!("not valid JSON: {e}")).hint(LINES))?;
        let field = self.field.as_deref().unwrap_or(FIELD);
        if let Some(text) = value[field].as_str() {
            return Ok(Document::Text(text.to_owned()));
        }
        match value["messages"].as_array().filter(|_| self.field.is_none()) {
            Some(messages) => messages
                .iter()
                .map(message)
                .collect::<Result<_>>()
                .map(Document::Chat),
            None => Err(Error::failed(format!("field `{field}` is missing or not a string")).hint(LINES)),
        }
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
            Error::failed(format!("`{name}` of a message is missing or not a string"))
                .hint("write `messages` as a list of objects such as {\"role\": \"user\", \"content\": \"some text\"}")
        })
    };
    Ok([part("role")?, part("content")?])
}

/// Opens the template that turns chats into text.
fn chat_template(model_dir: &Path) -> Result<ChatTemplate> {
    ChatTemplate::open(model_dir)?.ok_or_else(|| {
        Error::failed("the document is a chat (`messages`), but the model has no chat template")
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
        interrupt::check()?;
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
    interrupt::check()?;
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

/// Reads a file, or stdin, as text.
fn text_of(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    let failed = |e| Error::io(path, "read", &e);
    if path == Path::new(STDIN) {
        std::io::stdin().lock().read_to_end(&mut bytes).map_err(failed)?;
    } else if path.extension().is_some_and(|e| e == "gz") {
        let file = File::open(path).map_err(failed)?;
        let read = MultiGzDecoder::new(file)
            .take(MOST_BYTES + 1)
            .read_to_end(&mut bytes);
        read.map_err(|e| {
            Error::failed(format!("{} cannot be decompressed: {e}", path.display()))
                .hint("the file is damaged or not a gzip file; recreate it, or give the uncompressed file")
        })?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(
                Error::failed(format!("{} has more than 4 GiB of text", path.display()))
                    .hint("give a part of it; a part is enough for calibration"),
            );
        }
    } else {
        bytes = std::fs::read(path).map_err(failed)?;
    }
    let shown = path.display();
    if bytes.starts_with(b"PAR1") {
        return Err(Error::failed(format!("{shown} is a Parquet file")).hint(
            "convert it to JSON lines: pandas.read_parquet(\"F.parquet\").to_json(\"F.jsonl\", orient=\"records\", lines=True)",
        ));
    }
    let text = String::from_utf8(bytes).map_err(|e| {
        let byte = e.utf8_error().valid_up_to();
        Error::failed(format!("{shown} is not UTF-8 text (byte {byte})"))
            .hint(format!("convert it to UTF-8, for example with iconv; {KINDS}"))
    })?;
    // Some editors start a file with a byte order mark.
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}
