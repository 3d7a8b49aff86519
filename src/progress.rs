//! Messages to the user on stderr: notes, warnings and progress bars with the remaining time.

use std::borrow::Cow;
use std::io::{IsTerminal, Write};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Writes a line to stderr, fit for a terminal; a failed write is ignored, since there is nowhere to report it.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", harmless(text));
}

/// Escapes the control characters of a text except for line breaks and tabs: names and metadata come from files, and a
/// terminal would obey them.
pub fn harmless(text: &str) -> Cow<'_, str> {
    let obeyed = |c: char| c.is_control() && c != '\n' && c != '\t';
    if !text.contains(obeyed) {
        return Cow::Borrowed(text);
    }
    let escaped = |c: char| match obeyed(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    Cow::Owned(text.chars().map(escaped).collect())
}

/// Formats a number of bytes for people: `812 bytes`, `4.33 MB`, `2.47 GB`.
pub fn size(bytes: usize) -> String {
    if bytes >= 1_000_000_000 {
        format!("{:.2} GB", bytes as f64 / 1e9)
    } else if bytes < 10_000 {
        format!("{bytes} bytes")
    } else {
        format!("{:.2} MB", bytes as f64 / 1e6)
    }
}

/// How much the program prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Only warnings and errors (`-q`).
    Quiet,
    /// Notes and progress.
    Normal,
    /// Details of every step (`-v`).
    Verbose,
}

/// Writes messages to stderr, filtered by verbosity.
#[derive(Clone, Copy, Debug)]
pub struct Log {
    /// The verbosity asked for on the command line.
    pub verbosity: Verbosity,
}

impl Log {
    /// Prints a line unless `-q` is given.
    pub fn note(&self, text: &str) {
        if self.verbosity >= Verbosity::Normal {
            say(text);
        }
    }

    /// Prints a line if `-v` is given.
    pub fn detail(&self, text: &str) {
        if self.verbosity >= Verbosity::Verbose {
            say(text);
        }
    }

    /// Prints a warning, whatever the verbosity.
    pub fn warn(&self, text: &str) {
        say(&format!("warning: {text}"));
    }

    /// Starts a progress bar over `total` units; it shows only on a terminal.
    pub fn progress(&self, total: u64, unit: &str) -> Progress {
        let target = if self.verbosity == Verbosity::Quiet || !std::io::stderr().is_terminal() {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        let template = format!(
            "{{msg:24}} [{{bar:30}}] {{human_pos}}/{{human_len}} {unit}  {{elapsed}} elapsed, {{eta}} left"
        );
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style.progress_chars("=> "));
        }
        // A thread moves the bar; nobody sees a hidden one.
        if !bar.is_hidden() {
            bar.enable_steady_tick(std::time::Duration::from_millis(250));
        }
        Progress { bar }
    }
}

/// A progress bar; dropping it removes it from the screen.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// Shows what is being done, left of the bar.
    pub fn stage(&self, text: String) {
        self.bar.set_message(text);
    }

    /// Adds finished units of work.
    pub fn advance(&self, units: u64) {
        self.bar.inc(units);
    }

    /// Prints a line without disturbing the bar.
    pub fn line(&self, text: &str) {
        self.bar.suspend(|| say(text));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
