//! Flag values that several commands share: numbers within a range, names of types.

use std::ffi::OsStr;

use clap::ValueEnum;
use clap::builder::{PossibleValue, TypedValueParser};

use crate::float::Float;
use crate::parameters::{
    ANY_SHARE, AT_LEAST_ONE, MULTIPLE, NOT_NEGATIVE, PART, SHARE, SHARE_OR_ZERO, Values, WHOLE,
};
use crate::quant::Quant;

/// Parses a whole number, or `all` where the values have it.
fn whole(text: &str, values: Values) -> Result<usize, String> {
    let number = values.parse(text)?;
    // What the values have is a number, and as large as this machine's at most.
    Ok(number.as_u64().unwrap_or_default() as usize)
}

fn number(text: &str, values: Values) -> Result<f64, String> {
    Ok(values.parse(text)?.as_f64().unwrap_or_default())
}

/// Parses a number of tokens, positions or passes; these are stored as u32.
pub fn parse_count(text: &str) -> Result<usize, String> {
    whole(text, WHOLE)
}

/// Parses a number as [`parse_count`] does, or `all`.
pub fn parse_count_or_all(text: &str) -> Result<usize, String> {
    whole(text, Values::CountOrAll)
}

/// Parses a number as [`parse_count`] does, of at least 1.
pub fn parse_positive_count(text: &str) -> Result<usize, String> {
    whole(text, Values::Whole(1, u32::MAX.into()))
}

/// Parses a whole number of at least 1.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    whole(text, AT_LEAST_ONE)
}

/// Parses a share x with 0 <= x < 1.
pub fn share_or_zero(text: &str) -> Result<f64, String> {
    number(text, SHARE_OR_ZERO)
}

/// Parses a share x with 0 < x <= 1.
pub fn share(text: &str) -> Result<f64, String> {
    number(text, SHARE)
}

/// Parses a share x with 0 < x < 1.
pub fn parse_share(text: &str) -> Result<f64, String> {
    number(text, PART)
}

/// Parses a share x with 0 <= x <= 1.
pub fn parse_any_share(text: &str) -> Result<f64, String> {
    number(text, ANY_SHARE)
}

/// Parses a finite number of at least 0.
pub fn not_negative(text: &str) -> Result<f64, String> {
    number(text, NOT_NEGATIVE)
}

/// Parses a finite number of at least 1.
pub fn at_least_1(text: &str) -> Result<f64, String> {
    number(text, MULTIPLE)
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

/// How rows in `int4+4`, `int4` and `int2` are turned before they are rounded.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotationFlag {
    /// By the section `rotation` of --artifact.
    Artifact,
    /// By a Hadamard matrix, which knows no data.
    Hadamard,
    /// Not at all.
    None,
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
