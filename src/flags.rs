//! Flag values that several commands and methods share: numbers within a range, devices, precision.

use clap::ValueEnum;

use crate::float::Float;

/// Parses a number of tokens, positions or passes; these are stored as u32.
pub fn parse_count(text: &str) -> std::result::Result<usize, String> {
    match text.parse::<u32>() {
        Ok(n) => Ok(n as usize),
        Err(_) => Err(format!("expected a whole number from 0 to {}", u32::MAX)),
    }
}

/// Parses a number as [`parse_count`] does, of at least 1.
pub fn parse_positive_count(text: &str) -> std::result::Result<usize, String> {
    match parse_count(text) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number of at least 1".to_string()),
    }
}

/// Parses a whole number of at least 1.
pub fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a whole number of at least 1".to_string()),
    }
}

/// Parses a share x with 0 <= x < 1.
pub fn share_or_zero(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(x) if (0.0..1.0).contains(&x) => Ok(x),
        _ => Err("expected a number of at least 0 and below 1".to_string()),
    }
}

/// Parses the name of a float type.
pub fn parse_float(text: &str) -> std::result::Result<Float, String> {
    let types = [Float::F32, Float::F16, Float::Bf16];
    let named = types.into_iter().find(|t| t.name().eq_ignore_ascii_case(text));
    named.ok_or_else(|| "expected f32, f16 or bf16".to_owned())
}

/// The device that does a command's work.
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

/// Parses a share x with 0 < x <= 1.
pub fn share(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x > 0.0 && x <= 1.0 => Ok(x),
        _ => Err("expected a number above 0 and at most 1".to_string()),
    }
}

/// Parses a finite number of at least 0.
pub fn not_negative(text: &str) -> std::result::Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x >= 0.0 => Ok(x),
        _ => Err("expected a number of at least 0".to_string()),
    }
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
