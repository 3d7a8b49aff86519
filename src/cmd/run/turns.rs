//! The input of a run, turn by turn: token ids as they are given, or text, put into the model's chat template if it
//! has one.

use std::path::Path;

use super::args::Args;
use super::conversation::Reply;
use super::lines::{Line, Lines};
use crate::cmd::terminal::Log;
use crate::corpus::read_tokens;
use crate::error::{Error, Result};
use crate::model::chat::{ChatTemplate, Message};
use crate::model::tokenizer::Tokenizer;
use crate::model::{Decoder, Model, ModelConfig};

/// The turns of a run.
pub struct Turns<'a> {
    decoder: &'a Decoder,
    log: Log,
    /// The model's tokenizer; `None` if it has none.
    pub tokenizer: Option<Tokenizer>,
    source: TurnSource,
}

/// What stands for stdin in `--prompt` and `--prompt-file`.
const STDIN: &str = "-";

/// Reads the prompt of `--prompt` or `--prompt-file`; one newline at the end of a file or of stdin is not part of it.
fn prompt(args: &Args) -> Result<Option<String>> {
    let path = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) if text == STDIN => Path::new(STDIN),
        (Some(text), _) => return not_empty(text.clone()).map(Some),
        (None, Some(path)) => path,
        (None, None) => return Ok(None),
    };
    let read = match path == Path::new(STDIN) {
        true if args.chat => {
            return Err(Error::usage(
                "with --chat, stdin contains the later messages, so it cannot contain the prompt",
            )
            .hint(
                "give the first message as text with --prompt or as a file with --prompt-file, or omit it",
            ));
        }
        true => std::io::read_to_string(std::io::stdin().lock()),
        false => std::fs::read_to_string(path),
    };
    let mut text = read.map_err(|e| match e.kind() {
        std::io::ErrorKind::InvalidData => Error::invalid(format!("{} is not UTF-8 text", path.display()))
            .hint("convert it to UTF-8, for example with iconv"),
        _ => Error::io(path, "read", &e),
    })?;
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    not_empty(text).map(Some)
}

/// Refuses a prompt without text, to which a model would reply as if it had been asked something.
fn not_empty(text: String) -> Result<String> {
    if text.is_empty() {
        Err(Error::invalid("the prompt is empty").hint("give a prompt with text in it"))
    } else {
        Ok(text)
    }
}

/// What comes next in a run.
pub(super) enum Turn {
    /// These ids are fed and answered.
    Feed(Vec<u32>),
    /// The user asks how the conversation goes.
    Stats,
    /// The user begins a new conversation.
    Reset,
    /// The end of the input.
    End,
}

/// The source of the turns.
enum TurnSource {
    /// Token ids, all of them known at the start.
    Ids(std::vec::IntoIter<Vec<u32>>),
    /// A first message if one was given, then the lines of stdin.
    Text {
        first: Option<String>,
        lines: Lines,
        style: Style,
    },
}

/// How a message becomes part of the text.
enum Style {
    /// Rendered by a chat template.
    Script(Box<Script>),
    /// Taken unchanged; `first` holds until a message has begun the document.
    Plain { first: bool },
}

impl<'a> Turns<'a> {
    /// Opens the input that `args` ask for.
    pub fn open(args: &Args, model: &'a Model, log: Log) -> Result<Self> {
        if let Some(path) = &args.tokens {
            return Self::of_tokens(path, args, model, log);
        }
        let text = prompt(args)?;
        let (tokenizer, decoder) = (model.tokenizer()?, &model.decoder);
        let source = if args.chat {
            TurnSource::Text {
                first: text,
                style: Style::open(args, log)?,
                lines: Lines::open(log)?,
            }
        } else {
            if ChatTemplate::exists(&args.model) {
                log.warn(
                    "the model has a chat template, but without --chat the prompt is not formatted with it",
                );
            }
            let ids = tokenizer.encode(&text.unwrap_or_default())?;
            if ids.is_empty() {
                return Err(no_tokens().hint("give a prompt with text in it"));
            }
            decoder.check_ids(&ids)?;
            TurnSource::Ids(vec![ids].into_iter())
        };
        Ok(Self {
            decoder,
            log,
            tokenizer: Some(tokenizer),
            source,
        })
    }

    fn of_tokens(path: &Path, args: &Args, model: &'a Model, log: Log) -> Result<Self> {
        let documents = read_tokens(path)?;
        if !args.chat && documents.len() != 1 {
            return Err(
                Error::invalid(format!("{} must contain exactly one document", path.display()))
                    .hint("give one array of token ids inside the outer array, or add --chat, with which each array is a turn"),
            );
        }
        let decoder = &model.decoder;
        let opened = model.has_tokenizer().then(|| model.tokenizer());
        let warn = |e| log.warn(&format!("{e}; only token ids are generated, no text is shown"));
        let tokenizer = opened.and_then(|opened| opened.map_err(warn).ok());
        for ids in &documents {
            if ids.is_empty() && !args.chat {
                return Err(no_tokens());
            }
            decoder.check_ids(ids)?;
        }
        Ok(Self {
            decoder,
            log,
            tokenizer,
            source: TurnSource::Ids(documents.into_iter()),
        })
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &'a ModelConfig {
        &self.decoder.config
    }

    /// Tells whether a person at a terminal types the turns.
    pub fn are_typed(&self) -> bool {
        matches!(
            &self.source,
            TurnSource::Text {
                lines: Lines::Typed(_),
                ..
            }
        )
    }

    /// Takes this prompt as the only turn that is left.
    pub fn again(&mut self, ids: Vec<u32>) {
        self.source = TurnSource::Ids(vec![ids].into_iter());
    }

    /// Forgets the conversation.
    pub fn reset(&mut self) {
        if let TurnSource::Text { style, .. } = &mut self.source {
            style.reset();
        }
    }

    /// Counts the prompt tokens that are known at the start.
    pub fn known(&self) -> usize {
        match &self.source {
            TurnSource::Ids(documents) => documents.as_slice().iter().map(Vec::len).sum(),
            TurnSource::Text { .. } => 0,
        }
    }

    /// Returns what comes next. `reply` is the reply to the turn before, if there was one.
    pub(super) fn next(&mut self, reply: Option<&Reply>) -> Result<Turn> {
        loop {
            match self.following(reply)? {
                Turn::Feed(ids) if ids.is_empty() => self.log.note("skipped a turn without tokens"),
                Turn::Feed(ids) => {
                    self.decoder.check_ids(&ids)?;
                    return Ok(Turn::Feed(ids));
                }
                other => return Ok(other),
            }
        }
    }

    fn following(&mut self, reply: Option<&Reply>) -> Result<Turn> {
        let (first, lines, style) = match &mut self.source {
            TurnSource::Ids(documents) => return Ok(documents.next().map_or(Turn::End, Turn::Feed)),
            TurnSource::Text { first, lines, style } => (first, lines, style),
        };
        let line = match first.take().filter(|text| !text.is_empty()) {
            Some(text) => Line::Message(text),
            None => lines.next(self.log)?,
        };
        let text = match line {
            Line::Message(text) => text,
            Line::Stats => return Ok(Turn::Stats),
            Line::Reset => {
                style.reset();
                return Ok(Turn::Reset);
            }
            Line::End => return Ok(Turn::End),
        };
        let Some(tokenizer) = &self.tokenizer else {
            return Ok(Turn::End);
        };
        match style {
            Style::Script(script) => script.ids(text, reply, tokenizer, self.log),
            Style::Plain { first: true } => {
                let ids = tokenizer.encode(&text)?;
                *style = Style::Plain {
                    first: ids.is_empty(),
                };
                Ok(ids)
            }
            Style::Plain { first: false } => tokenizer.encode_raw(&text),
        }
        .map(Turn::Feed)
    }
}

fn no_tokens() -> Error {
    Error::invalid("the prompt has no tokens").hint("give at least one token")
}

/// Adds to an error of a chat template a hint on how to do without a template.
fn by_ids(e: Error) -> Error {
    e.or_hint("omit --chat to use the prompt as it is, or give the turns as token ids with --tokens")
}

impl Style {
    /// Forgets the conversation; a system message stays.
    fn reset(&mut self) {
        match self {
            Self::Script(script) => {
                script.messages.retain(|message| message.role == "system");
                script.rendered.clear();
            }
            Self::Plain { first } => *first = true,
        }
    }

    fn open(args: &Args, log: Log) -> Result<Self> {
        match (ChatTemplate::open(&args.model).map_err(by_ids)?, &args.system) {
            (Some(template), system) => {
                let system = system.clone().map(|content| Message {
                    role: "system".into(),
                    content,
                });
                Ok(Self::Script(Box::new(Script {
                    template,
                    messages: system.into_iter().collect(),
                    rendered: String::new(),
                    warned: false,
                })))
            }
            (None, Some(_)) => Err(Error::usage(format!(
                "--system needs a chat template, but {} has none",
                args.model.display()
            ))
            .hint("put the text into the first message instead")),
            (None, None) => {
                log.warn("the model has no chat template; turns are concatenated as plain text");
                Ok(Self::Plain { first: true })
            }
        }
    }
}

/// A conversation that is rendered by a chat template.
///
/// The cache holds the rendered text up to a reply, and then the tokens of the reply. The next turn feeds what the
/// template writes after the reply: the end of its turn, the new message and the beginning of the next reply. Templates
/// may change the reply itself (many trim it), so this text is found with a second rendering, which has a mark in place
/// of the reply; the text after the mark is fed. Some templates also change earlier turns, such as those that strip the
/// reasoning from replies. The cache keeps these turns as they were, and a warning says so.
struct Script {
    template: ChatTemplate,
    messages: Vec<Message>,
    /// The last rendering, which ends where the last reply begins.
    rendered: String,
    warned: bool,
}

impl Script {
    /// Returns the ids of the text between `reply` and the next reply.
    fn ids(
        &mut self,
        user: String,
        reply: Option<&Reply>,
        tokenizer: &Tokenizer,
        log: Log,
    ) -> Result<Vec<u32>> {
        let mut messages = self.messages.clone();
        if let Some(reply) = reply {
            messages.push(Message {
                role: "assistant".into(),
                content: tokenizer.decode(reply.without_stop_token())?,
            });
        }
        messages.push(Message {
            role: "user".into(),
            content: user,
        });
        let whole = self.template.render(&messages, true).map_err(by_ids)?;
        let text = match reply {
            Some(_) => self.after_reply(&messages, &whole, log)?,
            None => whole.clone(),
        };
        let mut ids = tokenizer.encode_raw(&text)?;
        // The model wrote no space before its stop token, so a space that the template writes there is dropped.
        let stop = reply.filter(|r| r.ended()).and_then(|r| r.ids.last());
        if stop.is_some() && ids.first() != stop {
            let closer = tokenizer.encode_raw(text.trim_start())?;
            if closer.first() == stop {
                ids = closer;
            }
        }
        if !ids.is_empty() {
            (self.messages, self.rendered) = (messages, whole);
        }
        Ok(ids)
    }

    /// Returns the text after the last reply in `whole`, the rendering of `messages`; these end with that reply and a
    /// new message.
    fn after_reply(&mut self, messages: &[Message], whole: &str, log: Log) -> Result<String> {
        let mut marked = messages.to_vec();
        let at = messages.len() - 2;
        let reply = messages[at].content.trim();
        let mut mark = String::from("reply0");
        while whole.contains(&mark) {
            mark += "0";
        }
        marked[at].content.clone_from(&mark);
        let text = self.template.render(&marked, true).map_err(by_ids)?;
        let parts: Vec<&str> = text.split(&mark).collect();
        let [_, rest] = parts[..] else {
            return Err(Error::invalid(format!(
                "{}: the chat template does not show the assistant's last reply exactly once",
                self.template.path().display()
            ))
            .hint("use --tokens to give the turns as token ids; this conversation cannot continue"));
        };
        let shown = whole
            .strip_prefix(&self.rendered)
            .and_then(|tail| tail.strip_suffix(rest));
        if shown.map(str::trim) != Some(reply) && !self.warned {
            self.warned = true;
            log.warn("the chat template rewrites earlier turns; the cache keeps them as they were generated");
        }
        Ok(rest.to_string())
    }
}
