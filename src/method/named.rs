//! The methods by name, each with a tail or without.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::registry::{METHODS, MethodName};
use crate::artifact::Artifact;

/// What follows the name of a method with a tail.
pub const SUFFIX: &str = "+tail";

/// A method as results name it: `NAME` or `NAME+tail`.
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

impl Serialize for Named {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        let unknown = || serde::de::Error::custom(format!("unknown method `{text}`"));
        Self::parse(&text).ok_or_else(unknown)
    }
}
