//! The methods by name, each with a tail or without.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::Method;
use super::declaration::Ask;
use super::registry::{METHODS, MethodName};
use super::tail::with_tail;
use crate::artifact::{Artifact, MethodLoss};
use crate::error::{Error, Result};

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
    /// Lists the methods with a section in an artifact, and some others, without tails; in the order of the registry.
    pub fn calibrated(artifact: &Artifact, others: &[MethodName]) -> Vec<Self> {
        let is_usual = |method: &&MethodName| method.is_calibrated(artifact) || others.contains(method);
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

    /// As [`Named::parse`]; for other text, the error lists the methods.
    pub fn read(text: &str) -> std::result::Result<Self, String> {
        let names = || {
            METHODS
                .iter()
                .map(|method| method.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        };
        Self::parse(text).ok_or_else(|| format!("unknown method `{text}`; the methods are {}", names()))
    }
}

impl Named {
    /// Prepares the method, with its tail if it has one.
    ///
    /// # Errors
    /// As [`MethodName::prepare`]; the artifact has no tails.
    pub fn prepare(self, ask: &Ask) -> Result<Box<dyn Method>> {
        let method = self.method.prepare(ask)?;
        if self.tail {
            with_tail(method, ask)
        } else {
            Ok(method)
        }
    }

    /// Returns the method of a row of an artifact's verdict.
    ///
    /// # Errors
    /// This version does not know the method.
    pub fn of_row(row: &MethodLoss) -> Result<Self> {
        Self::parse(&row.method).ok_or_else(|| {
            Error::unsupported(format!(
                "the artifact recommends method `{}`, which this version does not know",
                row.method
            ))
            .hint("choose another method, or use the version of kvsmith that made the artifact")
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
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(from)?;
        Self::read(&text).map_err(serde::de::Error::custom)
    }
}
