//! Parameters of methods and fits. A declaration says once what a parameter means, which values it takes and which it has
//! by default; the library's typed struct, its JSON form, the check of its values and the flags of the command line all
//! follow from it.

use std::borrow::Cow;
use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::numbers::plain;

/// One of a few named values.
#[derive(Debug)]
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
}

impl Range {
    fn has(self, x: f64) -> bool {
        x.is_finite()
            && match self {
                Self::NotNegative => x >= 0.0,
                Self::AtLeastOne => x >= 1.0,
                Self::Share => x > 0.0 && x <= 1.0,
                Self::ShareOrZero => (0.0..1.0).contains(&x),
            }
    }

    fn described(self) -> &'static str {
        match self {
            Self::NotNegative => "a number of at least 0",
            Self::AtLeastOne => "a number of at least 1",
            Self::Share => "a number above 0 and at most 1",
            Self::ShareOrZero => "a number of at least 0 and less than 1",
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
                match names.is_empty() {
                    true => last,
                    false => format!("{} or {last}", names.join(", ")),
                }
            }
        }
    }
}

/// A parameter of a method or a fit.
#[derive(Debug)]
pub struct Parameter {
    /// Its name in JSON: that of its field, such as `lfps_rows`.
    pub name: &'static str,
    /// What stands for a value in help, such as `N`.
    pub placeholder: &'static str,
    /// The values that it takes.
    pub values: Values,
    /// What it means.
    pub help: &'static str,
}

impl Parameter {
    /// Returns the name of its flag, without the dashes.
    pub fn flag(&self) -> String {
        self.name.replace('_', "-")
    }
}

/// The parameters of one method or fit.
#[derive(Clone, Copy, Debug)]
pub struct ParameterSet {
    /// What they belong to, as a heading.
    pub heading: &'static str,
    /// The parameters.
    pub parameters: &'static [Parameter],
    /// Returns the default values by name; `null` where the default depends on the artifact or the model.
    pub defaults: fn() -> Map<String, Value>,
}

impl ParameterSet {
    /// Checks values by name; absent ones have their defaults.
    ///
    /// # Errors
    /// A name or a value that is not among those of the declaration.
    pub fn check(&self, values: &Map<String, Value>) -> Result<()> {
        check(self.parameters, values, &(self.defaults)())
    }

    /// No parameters.
    pub const NONE: Self = Self {
        heading: "",
        parameters: &[],
        defaults: Map::new,
    };
}

/// A struct of parameters; `parameters!` declares one.
pub trait Parameters: Clone + Debug + Default + PartialEq + Serialize + DeserializeOwned {
    /// What they belong to, as a heading.
    const HEADING: &'static str;
    /// The parameters, one per field.
    const PARAMETERS: &'static [Parameter];

    /// Describes them.
    fn set() -> ParameterSet {
        ParameterSet {
            heading: Self::HEADING,
            parameters: Self::PARAMETERS,
            defaults: || Self::default().values(),
        }
    }

    /// Returns the values by name.
    fn values(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(values)) => values,
            // A struct is an object, and a number that JSON lacks is a null.
            _ => Map::new(),
        }
    }

    /// Reads values by name; those that are absent have their defaults.
    ///
    /// # Errors
    /// A name or a value that is not among those of the declaration.
    fn from_values(values: Map<String, Value>) -> Result<Self> {
        check(Self::PARAMETERS, &values, &Self::default().values())?;
        serde_json::from_value(Value::Object(values)).map_err(|e| Error::usage(format!("parameters: {e}")))
    }

    /// Checks the values of a struct that was made field by field.
    ///
    /// # Errors
    /// A value that is not among those of the declaration.
    fn check(&self) -> Result<()> {
        let values = self.values();
        // JSON has neither infinity nor NaN: such numbers do not come back.
        match Self::from_values(values)? == *self {
            true => Ok(()),
            false => {
                Err(Error::usage(format!("{self:?} has numbers that are not finite"))
                    .hint("give finite numbers"))
            }
        }
    }
}

fn check(known: &[Parameter], values: &Map<String, Value>, defaults: &Map<String, Value>) -> Result<()> {
    for (name, value) in values {
        let parameter = known.iter().find(|parameter| parameter.name == name);
        let Some(parameter) = parameter else {
            let names: Vec<&str> = known.iter().map(|parameter| parameter.name).collect();
            let error = Error::usage(format!("there is no parameter `{name}`"));
            return Err(error.hint(match names.is_empty() {
                true => "remove it: nothing can be set here".to_owned(),
                false => format!("the parameters are {}", names.join(", ")),
            }));
        };
        // What is absent by default may be absent.
        let is_absent = value.is_null() && defaults.get(name).is_some_and(Value::is_null);
        if !is_absent && !parameter.values.has(value) {
            let error = Error::usage(format!("`{name}` is {value}"));
            return Err(error.hint(format!("expected {}", parameter.values.described())));
        }
    }
    Ok(())
}

/// Makes the text of a documentation comment a phrase: without the space in front and the full stop at the end.
pub fn phrase(text: &'static str) -> Cow<'static, str> {
    let text = text.trim();
    Cow::Borrowed(text.strip_suffix('.').unwrap_or(text))
}

/// Declares a struct of parameters:
///
/// ```ignore
/// parameters! {
///     /// The parameters of quest.
///     pub struct QuestParams, "Method quest" {
///         /// What it means
///         page: usize = 16, "N" in Values::Among(&[16, 32, 64]);
///     }
/// }
/// ```
macro_rules! parameters {
    (
        $(#[doc = $about:literal])+
        $vis:vis struct $name:ident, $heading:literal {
            $(
                $(#[doc = $help:literal])+
                $field:ident: $kind:ty = $default:expr, $placeholder:literal in $values:expr;
            )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
        #[serde(default, deny_unknown_fields)]
        $vis struct $name {
            $( $(#[doc = $help])+ pub $field: $kind, )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $( $field: $default, )+ }
            }
        }

        impl $crate::parameters::Parameters for $name {
            const HEADING: &'static str = $heading;
            const PARAMETERS: &'static [$crate::parameters::Parameter] = &[
                $( $crate::parameters::Parameter {
                    name: stringify!($field),
                    placeholder: $placeholder,
                    values: $values,
                    help: concat!($($help),+),
                }, )+
            ];
        }
    };
}

/// Declares a type whose values have names:
///
/// ```ignore
/// choices! {
///     /// The direction.
///     pub enum Direction {
///         /// To the left.
///         Left = "left",
///         /// To the right.
///         Right = "right",
///     }
/// }
/// ```
macro_rules! choices {
    (
        $(#[doc = $about:literal])+
        $vis:vis enum $name:ident {
            $( $(#[doc = $help:literal])+ $variant:ident = $word:literal, )+
        }
    ) => {
        $(#[doc = $about])+
        #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        $vis enum $name {
            $( $(#[doc = $help])+ #[serde(rename = $word)] $variant, )+
        }

        impl $crate::parameters::Choice for $name {
            const ALL: &'static [Self] = &[$( Self::$variant, )+];
            const WORDS: &'static [$crate::parameters::Word] = &[
                $( $crate::parameters::Word { name: $word, help: concat!($($help),+) }, )+
            ];
        }

        impl $name {
            /// Returns the value of this name; `None` for other text.
            pub fn named(name: &str) -> Option<Self> {
                <Self as $crate::parameters::Choice>::named(name)
            }

            /// Returns the name in JSON and on the command line.
            pub const fn as_str(self) -> &'static str {
                match self { $( Self::$variant => $word, )+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

pub(crate) use {choices, parameters};

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    choices! {
        /// A side.
        enum Side {
            /// Not the right one.
            Left = "left",
            /// Not the left one.
            Right = "right-hand",
        }
    }

    parameters! {
        /// Parameters of a test.
        struct Test, "Test" {
            /// How many
            test_rows: usize = 4, "N" in WHOLE;
            /// How much of it, on
            /// two lines
            test_share: Option<f64> = None, "F" in SHARE;
            /// Where
            side: Side = Side::Left, "SIDE" in Values::OneOf(Side::WORDS);
            /// Which
            bits: Option<usize> = Some(8), "BITS" in Values::AmongOrNone(&[4, 8]);
        }
    }

    fn read(values: Value) -> Result<Test> {
        let Value::Object(values) = values else {
            unreachable!("an object")
        };
        Test::from_values(values)
    }

    #[test]
    fn absent_values_have_their_defaults_and_others_are_checked() {
        let test = read(json!({"test_share": 0.5, "side": "right-hand", "bits": null})).unwrap();
        let expected = Test {
            test_share: Some(0.5),
            side: Side::Right,
            bits: None,
            ..Test::default()
        };
        assert_eq!(test, expected);
        assert_eq!(read(Value::Object(test.values())).unwrap(), expected);
        for (wrong, hint) in [
            (json!({"test_rows": -1}), "from 0 to 4294967295"),
            (json!({"test_rows": null}), "whole number"),
            (json!({"test_share": 1.5}), "at most 1"),
            (json!({"side": "up"}), "left or right-hand"),
            (json!({"bits": 5}), "4, 8 or none"),
            (json!({"rows": 5}), "test_rows, test_share, side, bits"),
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.advice().unwrap_or_default().contains(hint), "{error:?}");
        }
        let wrong = Test {
            test_share: Some(f64::INFINITY),
            ..Test::default()
        };
        assert!(wrong.check().unwrap_err().to_string().contains("not finite"));
        let wrong = Test {
            test_share: Some(0.0),
            ..Test::default()
        };
        assert_eq!(wrong.check().unwrap_err().to_string(), "`test_share` is 0.0");
    }

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
        assert_eq!(phrase(Test::PARAMETERS[1].help), "How much of it, on two lines");
        assert_eq!(phrase(Side::WORDS[0].help), "Not the right one");
        assert_eq!(Side::named("right-hand"), Some(Side::Right));
        assert_eq!(Side::Right.to_string(), "right-hand");
    }
}
