//! Parameters of methods and fits. A declaration says once what a parameter means, which values it takes and which it has
//! by default; the library's typed struct, its JSON form, the check of its values and the flags of the command line all
//! follow from it.

mod values;

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::{Error, Result};
pub use values::{
    ANY_SHARE, AT_LEAST_ONE, Choice, MULTIPLE, NOT_NEGATIVE, PART, Range, SHARE, SHARE_OR_ZERO, SWITCH,
    Values, WHOLE, Word,
};

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
        if Self::from_values(values)? == *self {
            Ok(())
        } else {
            Err(Error::usage(format!("{self:?} has numbers that are not finite")).hint("give finite numbers"))
        }
    }
}

fn check(known: &[Parameter], values: &Map<String, Value>, defaults: &Map<String, Value>) -> Result<()> {
    for (name, value) in values {
        let parameter = known.iter().find(|parameter| parameter.name == name);
        let Some(parameter) = parameter else {
            let names: Vec<&str> = known.iter().map(|parameter| parameter.name).collect();
            let error = Error::usage(format!("there is no parameter `{name}`"));
            return Err(error.hint(if names.is_empty() {
                "remove it: nothing can be set here".to_owned()
            } else {
                format!("the parameters are {}", names.join(", "))
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
pub fn phrase(text: &'static str) -> &'static str {
    let text = text.trim();
    text.strip_suffix('.').unwrap_or(text)
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
    fn words_have_names_and_help() {
        assert_eq!(phrase(Test::PARAMETERS[1].help), "How much of it, on two lines");
        assert_eq!(phrase(Side::WORDS[0].help), "Not the right one");
        assert_eq!(Side::named("right-hand"), Some(Side::Right));
        assert_eq!(Side::Right.to_string(), "right-hand");
    }
}
