//! The budget: how many positions a method may choose per KV head and step.

use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::Error;
use crate::numbers::plain;

/// The value X of `--budget`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// 0 < X <= 1: a fraction of the visible context, the current token included.
    Fraction(f64),
    /// X > 1: a number of positions.
    Count(usize),
}

impl Budget {
    /// The budget of a run that says none: 6% of the context.
    pub const USUAL: Self = Self::Fraction(0.06);

    /// Returns the number of positions for a visible context of n: max(1, floor(X n)), or X itself.
    pub fn positions(self, n: usize) -> usize {
        match self {
            Self::Fraction(x) => ((x * n as f64).floor() as usize).max(1),
            Self::Count(b) => b,
        }
    }

    /// Returns X as it was given.
    pub fn value(self) -> f64 {
        match self {
            Self::Fraction(x) => x,
            Self::Count(b) => b as f64,
        }
    }
}

impl FromStr for Budget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let wrong = || {
            Error::usage(format!("budget `{text}` is invalid")).hint(
                "a fraction of the context (above 0, at most 1; or a percentage such as 6%, or `all`), or a whole number of positions above 1",
            )
        };
        let x: f64 = match text.trim() {
            "all" => 1.0,
            text => plain(text).parse().map_err(|_| wrong())?,
        };
        if x > 0.0 && x <= 1.0 {
            Ok(Self::Fraction(x))
        } else if x > 1.0 && x.fract() == 0.0 && x < 1e15 {
            Ok(Self::Count(x as usize))
        } else {
            Err(wrong())
        }
    }
}

impl Serialize for Budget {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Fraction(x) => to.serialize_f64(*x),
            Self::Count(b) => to.serialize_u64(*b as u64),
        }
    }
}

/// From a number, or a text as on the command line.
impl<'de> Deserialize<'de> for Budget {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = match serde_json::Value::deserialize(from)? {
            serde_json::Value::String(text) => text,
            value => value.to_string(),
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_and_counts() {
        let positions = |text: &str, n| text.parse::<Budget>().ok().map(|b| b.positions(n));
        assert_eq!(positions("0.03", 1000), Some(30));
        assert_eq!(positions("0.03", 10), Some(1));
        assert_eq!(positions("1", 10), Some(10));
        assert_eq!(positions("1.0", 10), Some(10));
        assert_eq!(positions("2", 10), Some(2));
        assert_eq!(positions("3%", 1000), Some(30));
        assert_eq!(positions("1K", 5000), Some(1024));
        assert_eq!(positions(" all ", 10), Some(10));
        assert_eq!(positions("4096", 10), Some(4096));
        for bad in ["0", "-1", "1.5", "nan", "inf", "x", "", "1e20"] {
            assert!(bad.parse::<Budget>().is_err(), "{bad}");
        }
    }
}
