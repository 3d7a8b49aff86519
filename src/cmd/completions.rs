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

/// Runs `man`: prints the page of the program, followed by the pages of all commands.
///
/// # Errors
/// Stdout is full or closed.
pub fn man(command: &Command) -> Result<()> {
    let mut page = Vec::new();
    add_page(&mut page, command.clone(), &mut Vec::new()).map_err(|e| Error::failed(e.to_string()))?;
    print(&String::from_utf8_lossy(&page))
}

/// Adds the page of a command and those of its subcommands; `words` are the commands above it.
fn add_page(page: &mut Vec<u8>, command: Command, words: &mut Vec<String>) -> std::io::Result<()> {
    words.push(command.get_name().to_owned());
    let name = words.join("-");
    let below: Vec<Command> = command.get_subcommands().cloned().collect();
    let shown = command
        .display_name(name.clone())
        .name(name)
        .disable_help_subcommand(true);
    clap_mangen::Man::new(shown).render(page)?;
    for command in below {
        add_page(page, command, words)?;
    }
    words.pop();
    Ok(())
}
