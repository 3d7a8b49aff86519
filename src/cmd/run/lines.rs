//! The lines of a chat: from a person at a terminal, with editing and a history, or from a file or a pipe.

use std::io::{BufRead, IsTerminal, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use crate::cmd::terminal::Log;
use crate::env;
use crate::error::{Error, Result};

/// What `/help` prints.
const HELP: &str = "\
/help   show this list
/stats  show times and how much of the cache was read
/reset  forget the conversation and start a new one
/exit   end the program (or Ctrl-D)
Other lines go to the model unchanged, including those that begin with // or
with a slash and a space; an unknown /word does not. Ctrl-C ends the reply; at the prompt, it ends the program.";

/// A line of a chat.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// A message for the model.
    Message(String),
    /// `/stats`.
    Stats,
    /// `/reset`.
    Reset,
    /// `/exit`, or no more lines.
    End,
}

/// The source of the lines.
pub(super) enum Lines {
    /// A person types them; holds the lines so far. There is an editor only while a line is read, because it takes Ctrl-C
    /// for itself.
    Typed(Vec<String>),
    /// Read by a thread, so that Ctrl-C can end the wait for a line.
    Piped(Receiver<std::io::Result<String>>),
}

impl Lines {
    pub(super) fn open(log: Log) -> Result<Self> {
        if std::io::stdin().is_terminal() {
            log.note("chat: type a message, or /help for the commands");
            return Ok(Self::Typed(Vec::new()));
        }
        let (sender, lines) = sync_channel(0);
        let read = move || {
            let mut stdin = std::io::stdin().lock();
            while let Some(line) = line(&mut stdin).transpose() {
                let failed = line.is_err();
                if sender.send(line).is_err() || failed {
                    break;
                }
            }
        };
        std::thread::Builder::new()
            .spawn(read)
            .map_err(|e| unreadable(&e.to_string()))?;
        Ok(Self::Piped(lines))
    }

    /// Waits for the next line that the conversation must handle; answers `/help` and mistyped commands itself.
    ///
    /// # Errors
    /// Input that cannot be read; an interrupt.
    pub(super) fn next(&mut self, log: Log) -> Result<Line> {
        loop {
            let Some(text) = self.read()? else {
                return Ok(Line::End);
            };
            match text.trim_end() {
                "" => {}
                "/help" => log.note(HELP),
                "/stats" => return Ok(Line::Stats),
                "/reset" => return Ok(Line::Reset),
                "/exit" => return Ok(Line::End),
                line => match unknown(line) {
                    Some(word) => log.note(&format!("unknown command {word}\n{HELP}")),
                    None => return Ok(Line::Message(text)),
                },
            }
        }
    }

    /// Waits for the next line; `None` at the end.
    fn read(&mut self) -> Result<Option<String>> {
        let lines = match self {
            Self::Piped(lines) => lines,
            Self::Typed(history) => {
                env::check()?;
                return match typed(history) {
                    Ok(line) => {
                        history.push(line.clone());
                        Ok(Some(line))
                    }
                    Err(ReadlineError::Eof) => Ok(None),
                    Err(ReadlineError::Interrupted) => Err(Error::interrupted()),
                    Err(e) => Err(unreadable(&e.to_string())),
                };
            }
        };
        loop {
            env::check()?;
            match lines.recv_timeout(Duration::from_millis(50)) {
                Ok(Ok(line)) => return Ok(Some(line)),
                Ok(Err(e)) => return Err(unreadable(&e.to_string())),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }
}

/// Reads a line that a person types, with editing and the lines before it.
fn typed(history: &[String]) -> rustyline::Result<String> {
    // The editor writes to the terminal itself, since stdout carries replies only.
    let config = Config::builder().behavior(Behavior::PreferTerm).build();
    let mut editor = DefaultEditor::with_config(config)?;
    for line in history {
        editor.add_history_entry(line)?;
    }
    editor.readline("> ")
}

/// Most bytes of a line.
const MOST: u64 = 1 << 26;

/// Reads a line without its end; `None` after the last one.
fn line(stdin: &mut impl BufRead) -> std::io::Result<Option<String>> {
    let mut bytes = Vec::new();
    if stdin.take(MOST).read_until(b'\n', &mut bytes)? == 0 {
        return Ok(None);
    }
    if bytes.len() as u64 == MOST && !bytes.ends_with(b"\n") {
        let what = "a line has more than 64 MiB";
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, what));
    }
    for end in [b'\n', b'\r'] {
        if bytes.last() == Some(&end) {
            bytes.pop();
        }
    }
    String::from_utf8(bytes).map(Some).map_err(|_| {
        std::io::Error::new(
            std::io::ErrorKind::InvalidData,
            "stream did not contain valid UTF-8",
        )
    })
}

/// Returns the word of a line that looks like a command, a slash and letters, but is none. A path has more slashes.
fn unknown(line: &str) -> Option<&str> {
    let word = line.split_whitespace().next().filter(|_| line.starts_with('/'))?;
    let name = word.strip_prefix('/')?;
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || "-_".contains(c));
    is_name.then_some(word)
}

/// Makes the error for input that cannot be read.
fn unreadable(e: &str) -> Error {
    Error::invalid(format!("cannot read stdin: {e}")).hint("give one message per line, as UTF-8 text")
}
