//! The values that parameters take: how people write them, and which there are.

use serde_json::Value;

use crate::numbers::plain;

/// One of a few named values.
#[derive(Clone, Copy, Debug)]
pub struct Word {
    /// Its name in JSON and on the command line.
    pub name: &'static str,
    /// What it means; a sentence.
    pub help: &'static str,
}

/// A type whose values have names; `choices!` declares one.
pub trait Choice: Copy + 'static {
    /// The values, in the order of [`Choice::WORDS`].
    const ALL: &'static [Self];
    /// The names of the values.
    const WORDS: &'static [Word];

    /// Returns the value of this name; `None` for other text.
    fn named(name: &str) -> Option<Self> {
        let at = Self::WORDS.iter().position(|word| word.name == name)?;
        Some(Self::ALL[at])
    }
}

/// The values that a parameter takes.
#[derive(Clone, Copy, Debug)]
pub enum Values {
    /// Whole numbers from the first to the second.
    Whole(u64, u64),
    /// Whole numbers, as [`WHOLE`], or `all`, which is the largest of them.
    CountOrAll,
    /// One of these whole numbers.
    Among(&'static [u64]),
    /// One of these whole numbers, or `none`, which is `null` in JSON.
    AmongOrNone(&'static [u64]),
    /// Finite numbers in a range.
    Number(Range),
    /// One of these words.
    OneOf(&'static [Word]),
    /// Yes or no; a flag without a value.
    Switch,
}

/// The number of tokens, positions or passes; these are stored as u32.
pub const WHOLE: Values = Values::Whole(0, u32::MAX as u64);
/// A number of things of which there must be some.
pub const AT_LEAST_ONE: Values = Values::Whole(1, u64::MAX);
/// A weight or a number of deviations.
pub const NOT_NEGATIVE: Values = Values::Number(Range::NotNegative);
/// A multiple of something.
pub const MULTIPLE: Values = Values::Number(Range::AtLeastOne);
/// A share of something, at least a part of it.
pub const SHARE: Values = Values::Number(Range::Share);
/// A share of something, less than all of it.
pub const SHARE_OR_ZERO: Values = Values::Number(Range::ShareOrZero);
/// A share of something, from nothing to all of it.
pub const ANY_SHARE: Values = Values::Number(Range::AnyShare);
/// A share of something, at least a part of it and less than all.
pub const PART: Values = Values::Number(Range::Part);
/// Yes or no.
pub const SWITCH: Values = Values::Switch;

/// A range of numbers.
#[derive(Clone, Copy, Debug)]
pub enum Range {
    /// At least 0.
    NotNegative,
    /// At least 1.
    AtLeastOne,
    /// Above 0, at most 1.
    Share,
    /// At least 0, below 1.
    ShareOrZero,
    /// At least 0, at most 1.
    AnyShare,
    /// Above 0, below 1.
    Part,
}

impl Range {
    fn has(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Self::NotNegative => x >= 0.0,
                Self::AtLeastOne => x >= 1.0,
                Self::Share => x > 0.0 && x <= 1.0,
                Self::ShareOrZero => (0.0..1.0).contains(&x),
                Self::AnyShare => (0.0..=1.0).contains(&x),
                Self::Part => x > 0.0 && x < 1.0,
            }
    }

    fn described(self) -> &'static str {
        match self {
            Self::NotNegative => "a number of at least 0",
            Self::AtLeastOne => "a number of at least 1",
            Self::Share => "a number above 0 and at most 1",
            Self::ShareOrZero => "a number of at least 0 and less than 1",
            Self::AnyShare => "a number of at least 0 and at most 1",
            Self::Part => "a fraction above 0 and below 1",
        }
    }
}

/// The text of [`Values::CountOrAll`] for the largest number.
const ALL: &str = "all";
/// The text of [`Values::AmongOrNone`] for no number.
const NONE: &str = "none";

impl Values {
    /// Reads a value that a person wrote; numbers may have the units of [`plain`].
    ///
    /// # Errors
    /// What was expected instead.
    pub fn parse(self, text: &str) -> std::result::Result<Value, String> {
        let text = text.trim();
        let value = match self {
            Self::CountOrAll if text == ALL => Some(u32::MAX.into()),
            Self::AmongOrNone(_) if text == NONE => Some(Value::Null),
            Self::Whole(..) | Self::CountOrAll | Self::Among(_) | Self::AmongOrNone(_) => {
                plain(text).parse::<u64>().ok().map(Value::from)
            }
            Self::Number(_) => plain(text).parse::<f64>().ok().map(Value::from),
            Self::OneOf(_) => Some(text.into()),
            Self::Switch => text.parse::<bool>().ok().map(Value::from),
        };
        value
            .filter(|value| self.has(value))
            .ok_or_else(|| format!("expected {}", self.described()))
    }

    /// Tells whether a value is one of these.
    pub fn has(self, value: &Value) -> bool {
        match self {
            Self::Whole(least, most) => value.as_u64().is_some_and(|n| (least..=most).contains(&n)),
            Self::CountOrAll => WHOLE.has(value),
            Self::Among(numbers) => value.as_u64().is_some_and(|n| numbers.contains(&n)),
            Self::AmongOrNone(numbers) => value.is_null() || Self::Among(numbers).has(value),
            Self::Number(range) => value.as_f64().is_some_and(|x| range.has(x)),
            Self::OneOf(words) => words.iter().any(|word| value == word.name),
            Self::Switch => value.is_boolean(),
        }
    }

    /// Lists the values if there are a few, as [`Values::parse`] reads them.
    pub fn names(self) -> Vec<String> {
        match self {
            Self::Among(numbers) => numbers.iter().map(u64::to_string).collect(),
            Self::AmongOrNone(numbers) => {
                let mut names = Self::Among(numbers).names();
                names.push(NONE.to_owned());
                names
            }
            Self::OneOf(words) => words.iter().map(|word| word.name.to_owned()).collect(),
            Self::Switch => vec!["true".to_owned(), "false".to_owned()],
            Self::Whole(..) | Self::CountOrAll | Self::Number(_) => Vec::new(),
        }
    }

    /// Describes the values, as in "expected ...".
    pub fn described(self) -> String {
        match self {
            Self::Whole(least, u64::MAX) => format!("a whole number of at least {least}"),
            Self::Whole(least, most) => format!("a whole number from {least} to {most}"),
            Self::CountOrAll => format!("{}, or `{ALL}`", WHOLE.described()),
            Self::Number(range) => range.described().to_owned(),
            Self::Among(_) | Self::AmongOrNone(_) | Self::OneOf(_) | Self::Switch => {
                let mut names = self.names();
                let last = names.pop().unwrap_or_default();
                if names.is_empty() {
                    last
                } else {
                    format!("{} or {last}", names.join(", "))
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn texts_may_have_units() {
        assert_eq!(WHOLE.parse(" 8K"), Ok(json!(8192)));
        assert_eq!(SHARE.parse("6%"), Ok(json!(0.06)));
        assert_eq!(Values::CountOrAll.parse("all"), Ok(json!(u32::MAX)));
        assert_eq!(Values::AmongOrNone(&[16]).parse("none"), Ok(Value::Null));
        assert!(WHOLE.parse("1.5").is_err());
        assert!(SHARE.parse("nan").is_err());
        assert_eq!(
            Values::Among(&[16, 32, 64]).parse("17"),
            Err("expected 16, 32 or 64".to_owned())
        );
    }
}
