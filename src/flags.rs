//! Flag values that several commands and methods share: numbers within a range, devices, precision.

use std::str::FromStr;

use clap::ValueEnum;

use crate::float::Float;

/// Parses a number that `fits`; `expected` is the message otherwise.
fn checked<T: FromStr>(text: &str, fits: impl Fn(&T) -> bool, expected: &str) -> Result<T, String> {
    let number = text.parse().ok().filter(fits);
    number.ok_or_else(|| expected.to_owned())
}

/// Parses a number of tokens, positions or passes; these are stored as u32.
pub fn parse_count(text: &str) -> Result<usize, String> {
    let number = text.parse::<u32>();
    let expected = |_| format!("expected a whole number from 0 to {}", u32::MAX);
    number.map(|n| n as usize).map_err(expected)
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
        "expected a number of at least 0 and below 1",
    )
}

/// Parses the name of a float type.
pub fn parse_float(text: &str) -> Result<Float, String> {
    let types = [Float::F32, Float::F16, Float::Bf16];
    let named = types.into_iter().find(|t| t.name().eq_ignore_ascii_case(text));
    named.ok_or_else(|| "expected f32, f16 or bf16".to_owned())
}

/// The device that does a command's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceFlag {
    /// The best device that can do the command.
    Auto,
    /// This machine's processor.
    Cpu,
    /// Any GPU, through wgpu.
    Wgpu,
    /// An NVIDIA GPU.
    Cuda,
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
        "expected a fraction between 0 and 1",
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

/// How the inputs of products with 16-bit weights are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Precision {
    /// To the weights' type, for the tensor cores.
    #[default]
    Auto,
    /// Not at all.
    F32,
}

impl Precision {
    /// Returns the type in which attention reads keys and values that no cache keeps; `kind` is the
    /// weights' type.
    pub fn attended(self, kind: Float) -> Float {
        match self {
            Self::F32 => Float::F32,
            Self::Auto => kind,
        }
    }
}
