//! The parser of methods on the command line.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, TypedValueParser};

use super::parameters;
pub use crate::method::named::Named;
use crate::method::named::SUFFIX;

/// Parses a [`Named`]; lists the names of the methods in the help.
#[derive(Clone, Copy, Debug)]
pub struct NamedParser;

impl TypedValueParser for NamedParser {
    type Value = Named;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<Named, clap::Error> {
        let parser = parameters::method();
        let text = value.to_str().map(str::trim);
        if let Some(name) = text.and_then(|text| text.strip_suffix(SUFFIX))
            && let Ok(method) = parser.parse_ref(command, arg, OsStr::new(name))
        {
            return Ok(Named { method, tail: true });
        }
        // The error for an unknown name shows the whole text, suffix included.
        let method = parser.parse_ref(command, arg, text.map_or(value, OsStr::new))?;
        Ok(Named { method, tail: false })
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(parameters::method_names()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::method::named::number;

    #[test]
    fn a_name_may_have_a_tail() {
        let command = clap::Command::new("test");
        let parse = |text: &str| NamedParser.parse_ref(&command, None, OsStr::new(text));
        let all: Vec<Named> = ["topk", "topk+tail", "lfps", "lfps+tail"]
            .iter()
            .map(|text| parse(text).unwrap())
            .collect();
        let shown: Vec<String> = all.iter().map(Named::to_string).collect();
        assert_eq!(shown, ["topk", "topk+tail", "lfps", "lfps+tail"]);
        let numbers: Vec<usize> = (0..4).map(|i| number(&all, i)).collect();
        assert_eq!(numbers, [0, 0, 2, 2]);
        for wrong in [
            "+tail",
            "topk+tails",
            "topk+",
            "tail",
            "topk+tail+tail",
            "topk +tail",
        ] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains(wrong), "{error}");
        }
    }
}
