//! Flag values that several commands share: numbers within a range, names of types.

use std::ffi::OsStr;
use std::str::FromStr;

use clap::ValueEnum;
use clap::builder::{PossibleValue, TypedValueParser};

use crate::float::Float;
use crate::numbers::plain;
use crate::quant::Quant;

/// Parses a number that `fits`; `expected` is the message otherwise.
fn checked<T: FromStr>(text: &str, fits: impl Fn(&T) -> bool, expected: &str) -> Result<T, String> {
    let number = plain(text).parse().ok().filter(fits);
    number.ok_or_else(|| expected.to_owned())
}

/// Parses a number of tokens, positions or passes; these are stored as u32.
pub fn parse_count(text: &str) -> Result<usize, String> {
    let number = plain(text).parse::<u32>();
    let expected = |_| format!("expected a whole number from 0 to {}", u32::MAX);
    number.map(|n| n as usize).map_err(expected)
}

/// Parses a number as [`parse_count`] does, or `all`.
pub fn parse_count_or_all(text: &str) -> Result<usize, String> {
    match text.trim() {
        "all" => Ok(u32::MAX as usize),
        text => parse_count(text).map_err(|e| format!("{e}, or `all`")),
    }
}

/// Parses with another parser what is left without spaces at the ends, such as those after a comma.
#[derive(Clone, Debug)]
pub struct Trimmed<P>(pub P);

impl<P: TypedValueParser> TypedValueParser for Trimmed<P> {
    type Value = P::Value;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<P::Value, clap::Error> {
        let trimmed = value.to_str().map(|text| OsStr::new(text.trim()));
        self.0.parse_ref(command, arg, trimmed.unwrap_or(value))
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        self.0.possible_values()
    }
}

/// Parses a number as [`parse_count`] does, of at least 1.
pub fn parse_positive_count(text: &str) -> Result<usize, String> {
    let number = checked(text, |n: &u32| *n > 0, "expected a whole number of at least 1");
    number.map(|n| n as usize)
}

/// Parses a whole number of at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    checked(text, |n| *n > 0, "expected a whole number of at least 1")
}

/// Parses a share x with 0 <= x < 1.
pub fn share_or_zero(text: &str) -> Result<f64, String> {
    checked(
        text,
        |x| (0.0..1.0).contains(x),
        "expected a number of at least 0 and less than 1",
    )
}

/// Parses the name of a float type.
pub fn parse_float(text: &str) -> Result<Float, String> {
    let types = [Float::F32, Float::F16, Float::Bf16];
    let named = types.into_iter().find(|t| t.name().eq_ignore_ascii_case(text));
    named.ok_or_else(|| "expected f32, f16 or bf16".to_owned())
}

/// A type to which the weights of a checkpoint are rounded when it is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WeightsFlag {
    /// 8 bits, and a scale for 32 of them (GGUF's Q8_0).
    Q8,
    /// 4 bits, and a scale for 32 of them (GGUF's Q4_0).
    Q4,
}

impl WeightsFlag {
    /// Returns the type.
    pub fn quant(self) -> Quant {
        match self {
            Self::Q8 => Quant::Q8_0,
            Self::Q4 => Quant::Q4_0,
        }
    }
}

/// Parses a share x with 0 < x <= 1.
pub fn share(text: &str) -> Result<f64, String> {
    checked(
        text,
        |x| *x > 0.0 && *x <= 1.0,
        "expected a number above 0 and at most 1",
    )
}

/// Parses a share x with 0 < x < 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    checked(
        text,
        |x| *x > 0.0 && *x < 1.0,
        "expected a fraction above 0 and below 1",
    )
}

/// Parses a finite number of at least 0.
pub fn not_negative(text: &str) -> Result<f64, String> {
    checked(
        text,
        |x: &f64| x.is_finite() && *x >= 0.0,
        "expected a number of at least 0",
    )
}

/// Parses a finite number of at least 1.
pub fn at_least_1(text: &str) -> Result<f64, String> {
    checked(
        text,
        |x: &f64| x.is_finite() && *x >= 1.0,
        "expected a number of at least 1",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_may_have_units() {
        assert_eq!(parse_count("8K"), Ok(8192));
        assert_eq!(parse_count(" 1.5k "), Ok(1536));
        assert_eq!(parse_count("1M"), Ok(1 << 20));
        assert_eq!(parse_count_or_all(" all"), Ok(u32::MAX as usize));
        assert_eq!(parse_count_or_all("7"), Ok(7));
        assert_eq!(share("6%"), Ok(0.06));
        assert_eq!(share("29 %"), Ok(0.29));
        assert_eq!(share(" 1"), Ok(1.0));
        for wrong in ["6%", "1.5", "1.0001K", "K", "8KB", "-1", "5M M", "8G", "1e99K"] {
            assert!(parse_count(wrong).is_err(), "{wrong}");
        }
        for wrong in ["0%", "101%", "%", "2K", "nan%", ""] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }
}
