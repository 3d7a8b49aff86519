//! The terminal: messages to the user on stderr, and progress bars with the remaining time.

use std::any::Any;
use std::borrow::Cow;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use console::Color;
use indicatif::{HumanCount, HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::signals::Saving;
use crate::env::{self, Reporter};
use crate::error::{Error, ErrorKind};
use crate::wording::{harmless, settings, wrapped};

/// Writes a line to stderr with its control characters escaped; a failed write is ignored, since there is nowhere to
/// report it. On a terminal, lines are broken between words.
pub fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{}", shown(text));
}

/// Writes the settings that a text names as flags: `⟨seq_len⟩` as `--seq-len`, `⟨device=cpu⟩` as `--device cpu`.
pub fn with_flags(text: &str) -> Cow<'_, str> {
    settings(text, |name, value| {
        let flag = match name {
            "output" => "-o".to_owned(),
            _ => format!("--{}", name.replace('_', "-")),
        };
        value.map_or(flag.clone(), |value| format!("{flag} {value}"))
    })
}

/// Makes a text ready for stderr.
fn shown(text: &str) -> String {
    let text = with_flags(text);
    let text = harmless(&text);
    if std::io::stderr().is_terminal() {
        wrapped(&text, columns())
    } else {
        text.into_owned()
    }
}

/// Writes a message that begins with what it is, which has a colour on terminals that show colours.
fn say_as(what: &str, colour: Color, text: &str) {
    let label = format!("{what}:");
    let line = shown(&format!("{label} {text}"));
    let rest = line.strip_prefix(&label).unwrap_or(&line);
    let label = console::style(label.as_str()).fg(colour).bold().for_stderr();
    let _ = writeln!(std::io::stderr(), "{label}{rest}");
}

/// Writes an error and its hint; nothing if stdout was closed, which ends the program silently.
pub fn say_error(error: &Error) {
    if error.kind() != ErrorKind::Closed {
        say_as("error", Color::Red, &error.to_string());
    }
    if let Some(hint) = error.advice() {
        say_hint(hint);
    }
}

/// Writes what to do about an error.
pub fn say_hint(hint: &str) {
    say_as("hint", Color::Cyan, hint);
}

/// Longest line of messages and tables that are not for a terminal, as far as words and names allow it.
const COLUMNS: usize = 80;

/// Longest line on a wide terminal.
const MOST_COLUMNS: usize = 120;

/// Returns the length of the longest line: the width of the terminal, if there is one.
pub fn columns() -> usize {
    static COUNTED: OnceLock<usize> = OnceLock::new();
    *COUNTED.get_or_init(|| {
        let terminals = [console::Term::stdout(), console::Term::stderr()];
        let mut sizes = terminals.iter().filter_map(console::Term::size_checked);
        let width = sizes.next().map(|(_, columns)| usize::from(columns));
        width
            .filter(|columns| *columns > 0)
            .map_or(COLUMNS, |columns| columns.min(MOST_COLUMNS))
    })
}

/// How much the program prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbosity {
    /// Nothing.
    Silent,
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

    /// Prints a warning, also under `-q`.
    pub fn warn(&self, text: &str) {
        if self.verbosity > Verbosity::Silent {
            say_as("warning", Color::Yellow, text);
        }
    }

    /// Starts a progress bar over `total` units; it shows only on a terminal.
    pub fn progress(&self, total: u64, unit: &str) -> Progress {
        self.start(total, unit, None)
    }

    /// Starts a progress bar for `tokens` tokens that pass through `layers` layers, a unit being a token in a layer. It
    /// shows how many tokens pass through all layers per second.
    pub fn prefill_progress(&self, tokens: usize, layers: usize) -> Progress {
        let total = tokens as u64 * layers as u64;
        self.start(total, "tokens x layers", Some(layers.max(1)))
    }

    fn start(&self, total: u64, unit: &str, layers: Option<usize>) -> Progress {
        let target = if self.verbosity <= Verbosity::Quiet || !std::io::stderr().is_terminal() {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        // Small numbers are shown; the share of large ones says as much in less room.
        let done = match (layers, total) {
            (Some(_), _) => "{percent:>3}%, {rate}".to_owned(),
            (None, ..10_000) => format!("{{human_pos}}/{{human_len}} {unit}"),
            (None, _) => "{percent:>3}%".to_owned(),
        };
        let template = format!("{{msg:24}} [{{wide_bar}}] {done}, {{elapsed}} elapsed, {{eta}} left");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            let rate = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                let _ = write!(out, "{}", rate(state.per_sec(), layers.unwrap_or(1)));
            };
            bar.set_style(style.progress_chars("=> ").with_key("rate", rate));
        }
        // The steady tick needs a thread, which a hidden bar does without.
        if !bar.is_hidden() {
            bar.enable_steady_tick(Duration::from_millis(250));
        }
        if let Ok(mut current) = CURRENT.lock() {
            *current = Some(bar.clone());
        }
        let lines = (bar.is_hidden() && self.verbosity > Verbosity::Quiet).then(Mutex::default);
        Progress {
            bar,
            lines,
            unit: unit.to_owned(),
            layers,
            is_verbose: self.verbosity >= Verbosity::Verbose,
        }
    }
}

impl Reporter for Log {
    fn warn(&self, text: &str) {
        Self::warn(self, text);
    }

    fn note(&self, text: &str) {
        Self::note(self, text);
    }

    fn detail(&self, text: &str) {
        Self::detail(self, text);
    }

    fn progress(&self, total: u64, unit: &str) -> Box<dyn env::Progress> {
        Box::new(Self::progress(self, total, unit))
    }

    fn saving(&self) -> Box<dyn Any> {
        Box::new(Saving::begin())
    }
}

/// The bar that was started last.
static CURRENT: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Returns how many units of the work that was started last are done, and how many there are.
pub fn current() -> Option<(u64, u64)> {
    let bar = CURRENT.lock().ok()?.clone()?;
    Some((bar.position(), bar.length()?))
}

/// Describes the rate at which tokens pass through all layers.
fn rate(units_per_s: f64, layers: usize) -> String {
    format!("{:.0} tokens/s", units_per_s / layers as f64)
}

/// How often a line reports the progress if no bar is shown.
const EVERY: Duration = Duration::from_secs(10);

/// A progress bar, which disappears from the screen when it is dropped; without a terminal, a line every ten seconds.
pub struct Progress {
    bar: ProgressBar,
    /// If no bar is shown: when the last line was printed, as the time since the start.
    lines: Option<Mutex<Duration>>,
    unit: String,
    /// For a prefill: the number of layers.
    layers: Option<usize>,
    /// Whether details are printed.
    is_verbose: bool,
}

impl Progress {
    /// Shows what is being done, left of the bar.
    pub fn stage(&self, text: String) {
        self.bar.set_message(text);
    }

    /// Adds finished units of work.
    pub fn advance(&self, units: u64) {
        self.bar.inc(units);
        // If another thread holds the lock, that thread prints the line.
        if let Some(Ok(mut last)) = self.lines.as_ref().map(Mutex::try_lock) {
            let elapsed = self.bar.elapsed();
            if elapsed >= *last + EVERY {
                *last = elapsed;
                say(&self.status(elapsed));
            }
        }
    }

    /// Describes how much of the work is done, and how long the rest will take at the same rate.
    fn status(&self, elapsed: Duration) -> String {
        let (done, all) = (self.bar.position(), self.bar.length().unwrap_or(0));
        let left = elapsed.as_secs_f64() * all.saturating_sub(done) as f64 / done.max(1) as f64;
        let stage = self.bar.message();
        let what = if stage.is_empty() { "done" } else { &stage };
        let done = match self.layers {
            Some(layers) => {
                let percent = 100 * done / all.max(1);
                let rate = rate(done as f64 / elapsed.as_secs_f64(), layers);
                format!("{percent}%, {rate}")
            }
            None => format!("{} of {} {}", HumanCount(done), HumanCount(all), self.unit),
        };
        format!(
            "{what}: {done}, {} elapsed, {} left",
            HumanDuration(elapsed),
            HumanDuration(Duration::from_secs_f64(left))
        )
    }

    /// Prints a line without disturbing the bar.
    pub fn line(&self, text: &str) {
        self.bar.suspend(|| say(text));
    }
}

impl env::Progress for Progress {
    fn stage(&self, text: String) {
        Self::stage(self, text);
    }

    fn advance(&self, units: u64) {
        Self::advance(self, units);
    }

    fn line(&self, text: &str) {
        Self::line(self, text);
    }

    fn detail(&self, text: &str) {
        if self.is_verbose {
            Self::line(self, text);
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::Progress as _;

    /// In a prefill of 1,000 tokens and 4 layers, 1,500 units are 375 tokens through all layers.
    #[test]
    fn a_prefill_tells_its_rate() {
        let log = Log {
            verbosity: Verbosity::Normal,
        };
        let progress = log.prefill_progress(1000, 4);
        progress.stage("prefill".to_owned());
        progress.advance(1500);
        let said = progress.status(Duration::from_secs(15));
        assert_eq!(
            said,
            "prefill: 37%, 25 tokens/s, 15 seconds elapsed, 25 seconds left"
        );
    }

    #[test]
    fn a_line_tells_how_far_the_work_is() {
        let log = Log {
            verbosity: Verbosity::Normal,
        };
        let progress = log.progress(4000, "states");
        progress.layer(1, 4, "capture");
        progress.advance(1000);
        let said = progress.status(Duration::from_secs(20));
        assert_eq!(
            said,
            "layer 1 (0-3): capture: 1,000 of 4,000 states, 20 seconds elapsed, 60 seconds left"
        );
    }
}
