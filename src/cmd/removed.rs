//! Options of earlier versions, and what replaces them.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::error::Error;

/// An option that earlier versions had, or one of its values.
#[derive(Clone, Copy, Debug)]
pub struct Removed {
    /// The commands that had it, each by its first word.
    pub commands: &'static [&'static str],
    /// The option.
    pub option: &'static str,
    /// The value, if the option still takes others.
    pub value: Option<&'static str>,
    /// What replaces it.
    pub instead: &'static str,
}

/// Everything that was removed.
pub static REMOVED: [Removed; 8] = [
    Removed {
        commands: &["calibrate", "plan", "codebook", "bench"],
        option: "--init",
        value: None,
        instead: "leave it out: codebooks always start from k-means++",
    },
    Removed {
        commands: &["run", "eval"],
        option: "--sign-centroids",
        value: Some("hybrid"),
        instead: "use --sign-centroids one-pass, which is the default, or offline for the artifact's centroids alone",
    },
    Removed {
        commands: &["run", "eval", "bench"],
        option: "--lfps-threshold",
        value: Some("mean-std"),
        instead: "use --lfps-threshold kurtosis, which is the default, or budget",
    },
    Removed {
        commands: &["calibrate", "plan", "priors", "run", "eval", "bench"],
        option: "--lfps-population",
        value: None,
        instead: "leave it out: the thresholds are over all positions but the sinks, as with `all`",
    },
    Removed {
        commands: &["run", "eval"],
        option: "--ct-expand",
        value: None,
        instead: "use --ct-list F for longer lists: they hold the heaviest positions alone",
    },
    Removed {
        commands: &["run", "eval"],
        option: "--ct-cap",
        value: None,
        instead: "use --ct-centroids C: a given number of query centroids may take as many bytes as the cache",
    },
    Removed {
        commands: &["calibrate", "plan", "wpq", "bench"],
        option: "--wpq-stages",
        value: None,
        instead: "leave it out: codes have two stages; --wpq-bits and --wpq-words set their size",
    },
    Removed {
        commands: &["calibrate", "plan", "wpq"],
        option: "--wpq-iterations",
        value: None,
        instead: "leave it out: k-means ends when no key changes its word, at the latest after 25 passes",
    },
];

/// Returns the text of a value of clap's errors.
fn text(e: &clap::Error, kind: ContextKind) -> Option<&str> {
    match e.get(kind)? {
        ContextValue::String(text) => Some(text),
        _ => None,
    }
}

/// Finds what an error of clap is about among the options that were removed from `command`.
fn find(command: &str, e: &clap::Error) -> Option<&'static Removed> {
    // An option that takes a value is followed by the name of the value.
    let option = text(e, ContextKind::InvalidArg)?.split(' ').next()?;
    let value = match e.kind() {
        ErrorKind::UnknownArgument => None,
        ErrorKind::InvalidValue => Some(text(e, ContextKind::InvalidValue)?),
        _ => return None,
    };
    let is_it = |removed: &&Removed| removed.option == option && removed.value == value;
    let found = REMOVED.iter().filter(is_it);
    found
        .into_iter()
        .find(|removed| removed.commands.contains(&command))
}

/// Returns an error that names the replacement if an error of clap is about an option that was removed from `command`.
pub fn explain(command: &str, e: &clap::Error) -> Option<Error> {
    let removed = find(command, e)?;
    let value = removed.value.map(|value| format!(" {value}")).unwrap_or_default();
    let error = Error::usage(format!("`{}{value}` was removed", removed.option));
    Some(error.hint(removed.instead))
}
