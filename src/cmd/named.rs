//! The methods of `--methods`, each with a tail or without.

use std::ffi::OsStr;
use std::fmt;

use clap::builder::{PossibleValue, TypedValueParser};

use super::parameters;
use crate::artifact::Artifact;
use crate::method::registry::{METHODS, MethodName};

/// What follows the name of a method with a tail.
const SUFFIX: &str = "+tail";

/// A method as `--methods` names it: `NAME` or `NAME+tail`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// The method.
    pub method: MethodName,
    /// Whether its steps estimate what they leave out.
    pub tail: bool,
}

impl Named {
    /// Lists the methods with a section in an artifact, and some others by name, without tails.
    pub fn calibrated(artifact: &Artifact, others: &[&str]) -> Vec<Self> {
        let is_usual =
            |method: &&MethodName| method.is_calibrated(artifact) || others.contains(&method.as_str());
        let named = |method: &MethodName| Self {
            method: *method,
            tail: false,
        };
        METHODS.iter().filter(is_usual).map(named).collect()
    }

    /// Parses the text form of a [`Named`]; `None` for other text.
    pub fn parse(text: &str) -> Option<Self> {
        let stripped = text.strip_suffix(SUFFIX);
        let method = MethodName::named(stripped.unwrap_or(text))?;
        Some(Self {
            method,
            tail: stripped.is_some(),
        })
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.method.as_str())?;
        f.write_str(if self.tail { SUFFIX } else { "" })
    }
}

/// Returns the index of the first entry with the method of entry `index`: entries with the same number share a
/// retrieval index.
pub fn number(methods: &[Named], index: usize) -> usize {
    let same = |named: &Named| named.method == methods[index].method;
    methods.iter().position(same).unwrap_or(index)
}

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
