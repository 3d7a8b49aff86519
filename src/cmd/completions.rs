//! `kvsmith completions` and `kvsmith man`: what shells and manuals show, made from the command line's own description.

use clap::Command;
use clap_complete::Shell;

use super::print;
use crate::error::{Error, Result};

/// Arguments of `completions`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Shell to generate the script for
    #[arg(value_name = "SHELL", value_enum)]
    shell: Shell,
}

/// Runs `completions`.
///
/// # Errors
/// Stdout is full or closed.
pub fn run(args: &Args, mut command: Command) -> Result<()> {
    let name = command.get_name().to_owned();
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, name, &mut script);
    print(&String::from_utf8_lossy(&script))
}

/// Arguments of `man`.
#[derive(clap::Args, Debug)]
pub struct ManArgs {
    /// The command, such as calibrate or bench decode; without one, the page of kvsmith
    #[arg(value_name = "COMMAND")]
    words: Vec<String>,
}

/// What every page ends with.
const END: &str = r#".SH "EXIT STATUS"
.TP
0
Success; also if the reader of stdout has closed it.
.TP
1
Bad input, or a check that failed.
.TP
2
Wrong use of the command line.
.TP
3
The requested device is not there, or cannot do this.
.TP
130
Interrupted (Ctrl-C, SIGTERM or SIGHUP).
.SH ENVIRONMENT
.TP
HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME
Where \-\-model finds a model by its id in the cache of the Hugging Face hub.
.TP
NO_COLOR
Messages have no colours.
.TP
COLUMNS
Width of the help.
"#;

/// Runs `man`: prints the page of the program, or of one of its commands.
///
/// # Errors
/// There is no such command; stdout is full or closed.
pub fn man(args: &ManArgs, program: &Command) -> Result<()> {
    let mut names = vec![program.get_name()];
    let mut shown = program;
    for word in &args.words {
        shown = shown.find_subcommand(word).ok_or_else(|| {
            Error::usage(format!("there is no command `{}`", args.words.join(" ")))
                .hint("see `kvsmith --help`")
        })?;
        names.push(shown.get_name());
    }
    let name = names.join("-");
    let page = shown
        .clone()
        .display_name(name.clone())
        .name(name)
        .disable_help_subcommand(true);
    let mut text = Vec::new();
    clap_mangen::Man::new(page)
        .render(&mut text)
        .map_err(|e| Error::invalid(e.to_string()))?;
    print(&(String::from_utf8_lossy(&text).into_owned() + END))
}
