//! The methods of `--also`: each with values of its own flags that differ from those of the command.

use std::fmt;

use clap::parser::ValueSource;
use clap::{Args, Command, FromArgMatches};

use super::super::named::Named;
use super::super::parameters::{MethodFlags, flags_of_methods};
use super::super::removed;
use crate::method::params::MethodParams;

/// Returns whether a flag also says how the caches are held, which all methods share.
fn is_of_caches(flag: &str) -> bool {
    MethodParams::of_caches(&flag.replace('-', "_")).is_some()
}

/// A method with flags of its own.
#[derive(Clone, Debug)]
pub struct Also {
    /// The method.
    pub named: Named,
    /// The parameters: what the flags say, and defaults.
    params: MethodParams,
    /// The flags as they were given.
    flags: String,
}

impl Also {
    /// Parses the name of a method and its flags, separated by spaces.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let text = text.trim();
        let (name, flags) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let named = Named::read(name)?;
        let method = named.method.as_str();
        let own = flags_of_methods().find(|(name, _)| *name == method);
        let own = own.map(|(_, flags)| flags).unwrap_or_default();
        let listed = |flags: &[String]| {
            let free = flags.iter().filter(|flag| !is_of_caches(flag));
            free.map(|flag| format!("--{flag}"))
                .collect::<Vec<_>>()
                .join(", ")
        };
        if own.is_empty() {
            return Err(format!(
                "`{method}` has no flags here; name it in --methods instead"
            ));
        }
        let command = Command::new(method.to_owned()).no_binary_name(true);
        let command = MethodFlags::augment_args(command.disable_help_flag(true));
        let parsed = command.clone().try_get_matches_from(flags.split_whitespace());
        let matches = parsed.map_err(|e| match removed::explain("eval", &e) {
            Some(error) => format!("{error}: {}", error.advice().unwrap_or_default()),
            None => reason(&e),
        })?;
        let is_given =
            |arg: &&clap::Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        let given: Vec<&str> = command
            .get_arguments()
            .filter(is_given)
            .filter_map(clap::Arg::get_long)
            .collect();
        if given.is_empty() {
            let own = listed(&own);
            return Err(format!(
                "give at least one flag of `{method}` ({own}), or name it in --methods"
            ));
        }
        if let Some(other) = given.iter().find(|flag| !own.iter().any(|own| own == *flag)) {
            return Err(format!(
                "`{method}` has no flag --{other}; it has {}",
                listed(&own)
            ));
        }
        if let Some(shared) = given.iter().find(|flag| is_of_caches(flag)) {
            return Err(format!(
                "--{shared} describes the caches, which all methods of a run share; give it outside the quotes"
            ));
        }
        Ok(Self {
            named,
            params: MethodFlags::from_arg_matches(&matches).map_err(|e| reason(&e))?.0,
            flags: flags.split_whitespace().collect::<Vec<_>>().join(" "),
        })
    }

    /// Returns the parameters of the method; those of the caches come from the command.
    pub fn params(&self, of_command: &MethodParams) -> MethodParams {
        let mut params = self.params.clone();
        params.selfindex = params.selfindex.with_caches_of(&of_command.selfindex);
        params
    }
}

impl fmt::Display for Also {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.flags)
    }
}

/// Returns the first line of an error of clap, without its heading.
fn reason(e: &clap::Error) -> String {
    let text = e.to_string();
    let line = text.lines().next().unwrap_or_default();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_flags_of_the_method_are_taken() {
        let also = Also::parse("  lfps+tail  --lfps-theta   1 --lfps-rows 0 ").unwrap();
        assert_eq!(also.named.to_string(), "lfps+tail");
        assert_eq!(also.to_string(), "--lfps-theta 1 --lfps-rows 0");
        for (text, said) in [
            ("lfbs --lfps-theta 1", "unknown method `lfbs`"),
            ("topk --lfps-theta 1", "`topk` has no flags here"),
            ("lfps ", "at least one flag of `lfps` (--lfps-"),
            ("lfps 1", "1"),
            ("lfps --lfps-theta", "--lfps-theta"),
            ("lfps --lfps-theta 2", "--lfps-theta"),
            ("lfps --lfps-thta 1", "--lfps-thta"),
            ("lfps --ct-probes 2", "`lfps` has no flag --ct-probes"),
            ("selfindex --center mean", "--center describes the caches"),
        ] {
            let error = Also::parse(text).unwrap_err();
            assert!(error.contains(said), "{text}: {error}");
        }
    }
}
