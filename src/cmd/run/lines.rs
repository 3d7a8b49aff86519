//! The lines of a chat: from a person at a terminal, with editing and a history, or from a file or a pipe.

use std::io::{BufRead, IsTerminal};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use rustyline::config::Behavior;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

use crate::error::{Error, Result};
use crate::interrupt;
use crate::progress::Log;

/// What `/help` prints.
const HELP: &str = "\
/help   show this list
/stats  show times and how much of the cache was read
/reset  forget the conversation and start a new one
/exit   end the program (or Ctrl-D)
Any other line is a message to the model, also one that begins with // or with
a slash and a space. Ctrl-C ends the reply and the program.";

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
    /// A person types them.
    Typed(Box<DefaultEditor>),
    /// Read by a thread, so that Ctrl-C can end the wait for a line.
    Piped(Receiver<std::io::Result<String>>),
}

impl Lines {
    pub(super) fn open() -> Result<Self> {
        if std::io::stdin().is_terminal() {
            // The editor writes to the terminal itself, since stdout carries replies only.
            let config = Config::builder()
                .behavior(Behavior::PreferTerm)
                .auto_add_history(true)
                .build();
            let editor = DefaultEditor::with_config(config).map_err(|e| unreadable(&e.to_string()))?;
            return Ok(Self::Typed(Box::new(editor)));
        }
        let (sender, lines) = sync_channel(0);
        let read = move || {
            for line in std::io::stdin().lock().lines() {
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
            Self::Typed(editor) => {
                interrupt::check()?;
                return match editor.readline("> ") {
                    Ok(line) => Ok(Some(line)),
                    Err(ReadlineError::Eof) => Ok(None),
                    Err(ReadlineError::Interrupted) => Err(Error::interrupted()),
                    Err(e) => Err(unreadable(&e.to_string())),
                };
            }
        };
        loop {
            interrupt::check()?;
            match lines.recv_timeout(Duration::from_millis(50)) {
                Ok(Ok(line)) => return Ok(Some(line)),
                Ok(Err(e)) => return Err(unreadable(&e.to_string())),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
            }
        }
    }
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
    Error::failed(format!("cannot read stdin: {e}")).hint("give one message per line, as UTF-8 text")
}
