//! What the flags of several commands and methods have in common: numbers in a range, devices, precision.

use clap::ValueEnum;

use crate::float::Float;

/// A number of tokens, positions or passes: what our files can number.
pub fn parse_count(text: &str) -> std::result::Result<usize, String> {
    match text.parse::<u32>() {
        Ok(n) => Ok(n as usize),
        Err(_) => Err(format!("expected a whole number from 0 to {}", u32::MAX)),
    }
}

/// As [`parse_count`], of at least one.
pub fn parse_positive_count(text: &str) -> std::result::Result<usize, String> {
    match parse_count(text) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number of at least 1".to_string()),
    }
}

/// A flag's whole number of at least one.
pub fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number of at least 1".to_string()),
    }
}

/// A flag's share: from 0 to below 1.
pub fn share_or_zero(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(x) if (0.0..1.0).contains(&x) => Ok(x),
        _ => Err("expected a number of at least 0 and below 1".to_string()),
    }
}

/// Where the work is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The best device that can do the command.
    Auto,
    /// This machine's processor.
    Cpu,
    /// Any GPU, through wgpu.
    Wgpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// A flag's share: above 0 and at most 1.
pub fn share(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x <= 1.0 => Ok(x),
        _ => Err("expected a number above 0 and at most 1".to_string()),
    }
}

/// A flag's number of at least 0.
pub fn not_negative(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("expected a number of at least 0".to_string()),
    }
}

/// How inputs of products with 16-bit weights are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Precision {
    /// To the weights' type, for the tensor cores.
    #[default]
    Auto,
    /// Not at all.
    F32,
}

impl Precision {
    /// The type in which the rows of weights of this type are attended, where the cache does not say.
    pub fn attended(self, kind: Float) -> Float {
        match self {
            Self::F32 => Float::F32,
            Self::Auto => kind,
        }
    }
}
