//! How `config.json` describes a rotary embedding, in both spellings.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::model::fields::Fields;

/// Rope types that the decoder runs.
pub const SUPPORTED_ROPES: [&str; 4] = ["default", "linear", "llama3", "yarn"];

/// A model's rotary embedding; both spellings of the config give the same value. It is serialised in the
/// form of manifests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RopeConfig {
    /// Base of the geometric frequency series (`rope_theta`).
    pub theta: f64,
    /// How the frequencies are scaled.
    #[serde(flatten)]
    pub scaling: RopeScaling,
}

/// How a rope type changes the unscaled frequencies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies are divided by the factor.
    Linear {
        /// Context extension factor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided, high ones kept, the rest interpolated.
    Llama3 {
        /// Context extension factor.
        factor: f64,
        /// `low_freq_factor`.
        #[serde(rename = "low_freq_factor")]
        low: f64,
        /// `high_freq_factor`.
        #[serde(rename = "high_freq_factor")]
        high: f64,
        /// `original_max_position_embeddings`.
        #[serde(rename = "original_max_position_embeddings")]
        original: f64,
    },
    /// YaRN (arXiv 2309.00071): frequencies are interpolated along a ramp over the channels, and cos and sin
    /// are multiplied by an attention factor.
    Yarn {
        /// Context extension factor.
        factor: f64,
        /// `original_max_position_embeddings`.
        #[serde(rename = "original_max_position_embeddings")]
        original: f64,
        /// A channel that turns more often than this within the original context keeps its frequency.
        beta_fast: f64,
        /// A channel that turns less often than this has its frequency divided by the factor.
        beta_slow: f64,
        /// Factor on cos and sin.
        attention_factor: f64,
        /// Whether the ramp's ends are rounded to whole channels.
        truncate: bool,
    },
}

impl RopeScaling {
    /// Returns the name of the rope type.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear { .. } => "linear",
            Self::Llama3 { .. } => "llama3",
            Self::Yarn { .. } => "yarn",
        }
    }

    /// Scales angular frequencies, one per pair of channels, of a series with base `theta`.
    pub(super) fn scale(&self, plain: Vec<f64>, theta: f64) -> Vec<f64> {
        match *self {
            Self::Default => plain,
            Self::Linear { factor } => plain.iter().map(|w| w / factor).collect(),
            Self::Llama3 {
                factor,
                low,
                high,
                original,
            } => {
                let scaled = |w: f64| {
                    let wavelength = 2.0 * PI / w;
                    if wavelength < original / high {
                        w
                    } else if wavelength > original / low {
                        w / factor
                    } else {
                        let smooth = (original / wavelength - low) / (high - low);
                        (1.0 - smooth) * w / factor + smooth * w
                    }
                };
                plain.into_iter().map(scaled).collect()
            }
            Self::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let d = 2.0 * plain.len() as f64;
                // The channel that turns `rotations` times within the original context.
                let dimension =
                    |rotations: f64| d * (original / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln());
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                low = low.max(0.0);
                high = high.min(d - 1.0);
                if low == high {
                    high += 0.001;
                }
                let ramp = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                let scaled = |(i, w): (usize, &f64)| w / factor * ramp(i) + w * (1.0 - ramp(i));
                plain.iter().enumerate().map(scaled).collect()
            }
        }
    }
}

impl RopeConfig {
    /// Reads the rope settings of a `config.json` in either spelling; `default` is the family's base of the frequencies.
    ///
    /// # Errors
    /// An unsupported rope type (the message lists the supported ones); values out of range.
    pub fn parse(c: &Fields, max_position: usize, default: f64) -> Result<Self> {
        let (name, map) = settings(c)?;
        let empty = Map::new();
        let map = map.unwrap_or(&empty);
        let s = Fields { map };
        let kind = rope_type(&s, name)?;
        if s.number_or("partial_rotary_factor", 1.0)? != 1.0 {
            return Err(Error::unsupported(format!(
                "`{name}.partial_rotary_factor` other than 1 is not supported"
            )));
        }
        let theta = match s.number_opt("rope_theta")? {
            Some(t) => t,
            None => c.number_or("rope_theta", default)?,
        };
        if !(theta.is_finite() && theta > 1.0) {
            return Err(Error::invalid(format!("rope_theta {theta} is out of range")));
        }
        let positive = |field: &str| {
            let wrong = match s.number_opt(field)? {
                Some(v) if v.is_finite() && v > 0.0 => return Ok(v),
                Some(v) => format!("`{name}.{field}` = {v} is out of range"),
                None => format!("`{name}.{field}` is missing (rope type `{kind}`)"),
            };
            Err(Error::invalid(wrong))
        };
        let scaling = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear {
                factor: positive("factor")?,
            },
            "llama3" => {
                let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
                if high <= low {
                    return Err(Error::invalid(format!(
                        "`{name}`: high_freq_factor {high} must be above low_freq_factor {low}"
                    )));
                }
                RopeScaling::Llama3 {
                    factor: positive("factor")?,
                    low,
                    high,
                    original: positive("original_max_position_embeddings")?,
                }
            }
            "yarn" => yarn(&s, positive("factor")?, max_position)?,
            other => {
                let error = Error::unsupported(format!("rope type `{other}` is not supported"));
                return Err(error.hint(format!("supported: {}", SUPPORTED_ROPES.join(", "))));
            }
        };
        Ok(Self { theta, scaling })
    }
}

/// Finds the object with the rope settings, if there is one, and its name.
fn settings<'a>(c: &Fields<'a>) -> Result<(&'static str, Option<&'a Map<String, Value>>)> {
    // As in transformers, a non-empty `rope_scaling` replaces `rope_parameters`.
    let is_set = |v: &&Value| v.as_object().is_none_or(|map| !map.is_empty());
    let scaling = c.present("rope_scaling").filter(is_set);
    let (name, value) = match (scaling, c.present("rope_parameters")) {
        (None, Some(v)) => ("rope_parameters", v),
        (Some(v), _) => ("rope_scaling", v),
        (None, None) => return Ok(("rope_scaling", None)),
    };
    let map = value
        .as_object()
        .ok_or_else(|| Error::invalid(format!("`{name}` is not an object")))?;
    match map.iter().find(|(_, v)| v.is_object()) {
        None => Ok((name, Some(map))),
        Some((layer_type, _)) => Err(Error::unsupported(format!(
            "`{name}` sets a rope per layer type (`{layer_type}`), which is not supported"
        ))
        .hint("supported: one rope for all layers")),
    }
}

/// Reads the rope type from the settings `s`, which the config calls `name`.
fn rope_type<'a>(s: &Fields<'a>, name: &str) -> Result<&'a str> {
    let value = match (s.present("rope_type"), s.present("type")) {
        (Some(a), Some(b)) if a != b => {
            return Err(
                Error::invalid(format!("`{name}` says both `rope_type`: {a} and `type`: {b}"))
                    .hint("remove the type with which the model was not trained"),
            );
        }
        (Some(v), _) | (None, Some(v)) => v,
        (None, None) => return Ok("default"),
    };
    let wrong = || Error::invalid(format!("`{name}.rope_type` is not a string"));
    value.as_str().ok_or_else(wrong)
}

/// Reads YaRN's settings and resolves its attention factor (arXiv 2309.00071, section 3.4).
fn yarn(s: &Fields, factor: f64, max_position: usize) -> Result<RopeScaling> {
    let mscale = |weight: f64| {
        if factor <= 1.0 {
            1.0
        } else {
            0.1 * weight * factor.ln() + 1.0
        }
    };
    let attention_factor = match s.number_opt("attention_factor")? {
        Some(f) => f,
        None => match (s.number_opt("mscale")?, s.number_opt("mscale_all_dim")?) {
            (Some(a), Some(b)) if a != 0.0 && b != 0.0 => mscale(a) / mscale(b),
            _ => mscale(1.0),
        },
    };
    let or_default = |name: &str, default: f64| -> Result<f64> {
        Ok(s.number_opt(name)?.filter(|x| *x != 0.0).unwrap_or(default))
    };
    let original = s
        .number_opt("original_max_position_embeddings")?
        .unwrap_or(max_position as f64);
    let (beta_fast, beta_slow) = (or_default("beta_fast", 32.0)?, or_default("beta_slow", 1.0)?);
    for (name, value) in [
        ("original_max_position_embeddings", original),
        ("beta_fast", beta_fast),
        ("beta_slow", beta_slow),
        ("attention_factor", attention_factor),
    ] {
        if !(value.is_finite() && value > 0.0) {
            return Err(Error::invalid(format!(
                "yarn rope: `{name}` = {value} is out of range"
            )));
        }
    }
    if beta_fast < beta_slow {
        return Err(Error::invalid(format!(
            "yarn rope: beta_fast {beta_fast} is below beta_slow {beta_slow}"
        )));
    }
    Ok(RopeScaling::Yarn {
        factor,
        original,
        beta_fast,
        beta_slow,
        attention_factor,
        truncate: s.bool_or("truncate", true)?,
    })
}
