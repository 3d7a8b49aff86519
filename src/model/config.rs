//! `config.json`: which decoder this is, its sizes, its rotary embedding and its attention windows.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::error::{Error, Result};

/// `model_type` values that the decoder runs.
pub const SUPPORTED_MODELS: [&str; 4] = ["llama", "mistral", "qwen2", "qwen3"];
/// Rope types that the decoder runs.
pub const SUPPORTED_ROPES: [&str; 4] = ["default", "linear", "llama3", "yarn"];
const MAX_LAYERS: usize = 4096;
const MAX_HEAD_DIM: usize = 4096;
const SUPPORTED_LAYERS: [&str; 2] = ["full_attention", "sliding_attention"];

/// The rotary embedding of a model, both config spellings normalised.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric frequency series (`rope_theta`).
    pub theta: f64,
    /// How the frequencies are scaled.
    pub scaling: RopeScaling,
}

/// How a rope type changes the plain frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    Default,
    /// All frequencies divided by the factor.
    Linear {
        /// Context extension factor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Context extension factor.
        factor: f64,
        /// `low_freq_factor`.
        low: f64,
        /// `high_freq_factor`.
        high: f64,
        /// `original_max_position_embeddings`.
        original: f64,
    },
    /// YaRN (arXiv 2309.00071): a ramp over the dimensions and an attention factor.
    Yarn {
        /// Context extension factor.
        factor: f64,
        /// `original_max_position_embeddings`.
        original: f64,
        /// Rotations above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f64,
        /// Multiplies cos and sin.
        attention_factor: f64,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
    },
}

/// Everything about a decoder that its `config.json` fixes.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// `model_type`, one of [`SUPPORTED_MODELS`].
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the gated MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub n_layers: usize,
    /// Query heads h.
    pub n_heads: usize,
    /// KV heads g.
    pub n_kv_heads: usize,
    /// Channels per head d.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Bias on the q, k and v projections.
    pub qkv_bias: bool,
    /// Bias on the attention output projection.
    pub o_bias: bool,
    /// Bias on the MLP projections.
    pub mlp_bias: bool,
    /// RMS norm over each head of q and k.
    pub qk_norm: bool,
    /// Longest context the model claims.
    pub max_position_embeddings: usize,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// Per layer: how many positions are visible, the current one included; `None` = all.
    pub windows: Vec<Option<usize>>,
    /// Token that begins a document.
    pub bos_token_id: Option<u32>,
    /// Tokens that end generation.
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Reads `dir/config.json`, and the stop tokens of `dir/generation_config.json` if it exists.
    ///
    /// # Errors
    /// A missing or malformed file, an unsupported architecture, rope or layer type (named, with
    /// what is supported), or sizes that contradict each other.
    pub fn load(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            let what = if dir.exists() {
                "is not a folder"
            } else {
                "does not exist"
            };
            return Err(Error::failed(format!("model folder {} {what}", dir.display()))
                .hint("--model takes the folder of a Hugging Face checkpoint (with config.json in it)"));
        }
        let path = dir.join("config.json");
        let mut config = Self::parse(&read_json(&path)?).map_err(|e| e.context(path.display()))?;
        let generation = dir.join("generation_config.json");
        if generation.is_file() {
            let value = read_json(&generation)?;
            // As in transformers, these replace those of config.json.
            let ids = token_ids(value.get("eos_token_id"), "eos_token_id")
                .map_err(|e| e.context(generation.display()))?;
            if !ids.is_empty() {
                config.eos_token_ids = ids;
            }
        }
        Ok(config)
    }

    /// Interprets the JSON of a `config.json`.
    pub fn parse(value: &Value) -> Result<Self> {
        let map = value
            .as_object()
            .ok_or_else(|| Error::failed("expected a JSON object"))?;
        let c = Fields { map };
        let model_type = c.string("model_type")?.to_string();
        if !SUPPORTED_MODELS.contains(&model_type.as_str()) {
            return Err(
                Error::failed(format!("model_type `{model_type}` is not supported"))
                    .hint(format!("supported: {}", SUPPORTED_MODELS.join(", "))),
            );
        }
        let act = c.string_or("hidden_act", "silu")?;
        if act != "silu" {
            return Err(Error::failed(format!("hidden_act `{act}` is not supported")).hint("supported: silu"));
        }
        let partial = c.number_or("partial_rotary_factor", 1.0)?;
        if partial != 1.0 {
            return Err(
                Error::failed(format!("partial_rotary_factor {partial} is not supported"))
                    .hint("only models that rotate every channel of a head are supported"),
            );
        }

        let hidden_size = c.size("hidden_size")?;
        let n_layers = c.size("num_hidden_layers")?;
        if n_layers > MAX_LAYERS {
            return Err(Error::failed(format!(
                "num_hidden_layers {n_layers} is out of range (at most {MAX_LAYERS})"
            )));
        }
        let n_heads = c.size("num_attention_heads")?;
        let n_kv_heads = c.size_opt("num_key_value_heads")?.unwrap_or(n_heads);
        let head_dim = match c.size_opt("head_dim")? {
            Some(d) => d,
            // Qwen3's own default does not follow from its other sizes.
            None if model_type == "qwen3" => 128,
            None if hidden_size.is_multiple_of(n_heads) => hidden_size / n_heads,
            None => {
                return Err(Error::failed(format!(
                    "hidden_size {hidden_size} is not a multiple of num_attention_heads {n_heads}, and there is no head_dim"
                )));
            }
        };
        if !n_heads.is_multiple_of(n_kv_heads) {
            return Err(Error::failed(format!(
                "num_attention_heads {n_heads} is not a multiple of num_key_value_heads {n_kv_heads}"
            )));
        }
        if !head_dim.is_multiple_of(4) || head_dim > MAX_HEAD_DIM {
            return Err(
                Error::failed(format!("head_dim {head_dim} is not supported")).hint(format!(
                    "head_dim must be a multiple of 4 and at most {MAX_HEAD_DIM}"
                )),
            );
        }
        let max_position_embeddings = c.size_opt("max_position_embeddings")?.unwrap_or(2048);
        let attention_bias = c.bool_or("attention_bias", false)?;
        let rms_norm_eps = c.number_or("rms_norm_eps", 1e-6)? as f32;
        if !(rms_norm_eps.is_finite() && rms_norm_eps >= 0.0) {
            return Err(Error::failed(format!(
                "rms_norm_eps {rms_norm_eps} is out of range"
            )));
        }
        let windows = windows(&c, &model_type, n_layers)?;
        Ok(Self {
            hidden_size,
            intermediate_size: c.size("intermediate_size")?,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            vocab_size: c.size("vocab_size")?,
            rms_norm_eps,
            tie_word_embeddings: c.bool_or("tie_word_embeddings", false)?,
            qkv_bias: match model_type.as_str() {
                "qwen2" => true,
                "mistral" => false,
                _ => attention_bias,
            },
            o_bias: matches!(model_type.as_str(), "llama" | "qwen3") && attention_bias,
            mlp_bias: model_type == "llama" && c.bool_or("mlp_bias", false)?,
            qk_norm: model_type == "qwen3",
            max_position_embeddings,
            rope: rope(&c, max_position_embeddings)?,
            windows,
            bos_token_id: token_ids(c.map.get("bos_token_id"), "bos_token_id")?
                .first()
                .copied(),
            eos_token_ids: token_ids(c.map.get("eos_token_id"), "eos_token_id")?,
            model_type,
        })
    }

    /// Query heads per KV head, r = h / g.
    pub fn group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// The fields that shape the forward pass, normalised, as canonical JSON (sorted keys).
    ///
    /// The same for both config spellings; part of the checkpoint fingerprint and of the manifest.
    pub fn canonical(&self) -> Value {
        json!({
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": f64::from(self.rms_norm_eps),
            "tie_word_embeddings": self.tie_word_embeddings,
            "qkv_bias": self.qkv_bias,
            "o_bias": self.o_bias,
            "mlp_bias": self.mlp_bias,
            "qk_norm": self.qk_norm,
            "windows": self.windows,
            "rope": self.rope.canonical(),
        })
    }
}

impl RopeConfig {
    /// The rope settings as canonical JSON.
    pub fn canonical(&self) -> Value {
        let mut out = match &self.scaling {
            RopeScaling::Default => json!({"rope_type": "default"}),
            RopeScaling::Linear { factor } => json!({"rope_type": "linear", "factor": factor}),
            RopeScaling::Llama3 {
                factor,
                low,
                high,
                original,
            } => json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": original,
            }),
            RopeScaling::Yarn {
                factor,
                original,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate,
            } => json!({
                "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
                "beta_fast": beta_fast, "beta_slow": beta_slow,
                "attention_factor": attention_factor, "truncate": truncate,
            }),
        };
        out["theta"] = json!(self.theta);
        out
    }

    /// The inverse of [`RopeConfig::canonical`], for manifests.
    pub fn from_canonical(value: &Value) -> Result<Self> {
        let number = |name: &str| {
            value
                .get(name)
                .and_then(Value::as_f64)
                .ok_or_else(|| Error::failed(format!("the manifest has no valid `rope.{name}`")))
        };
        let scaling = match value.get("rope_type").and_then(Value::as_str) {
            Some("default") => RopeScaling::Default,
            Some("linear") => RopeScaling::Linear {
                factor: number("factor")?,
            },
            Some("llama3") => RopeScaling::Llama3 {
                factor: number("factor")?,
                low: number("low_freq_factor")?,
                high: number("high_freq_factor")?,
                original: number("original_max_position_embeddings")?,
            },
            Some("yarn") => RopeScaling::Yarn {
                factor: number("factor")?,
                original: number("original_max_position_embeddings")?,
                beta_fast: number("beta_fast")?,
                beta_slow: number("beta_slow")?,
                attention_factor: number("attention_factor")?,
                truncate: value.get("truncate").and_then(Value::as_bool).unwrap_or(true),
            },
            _ => return Err(Error::failed("the manifest has no valid `rope.rope_type`")),
        };
        Ok(Self {
            theta: number("theta")?,
            scaling,
        })
    }
}

/// Which layers see a sliding window (`sliding_window`, `use_sliding_window`, `layer_types`).
fn windows(c: &Fields, model_type: &str, n_layers: usize) -> Result<Vec<Option<usize>>> {
    let window = match model_type {
        "mistral" => c.window()?,
        "qwen2" | "qwen3" if c.bool_or("use_sliding_window", false)? => c.window()?,
        _ => None,
    };
    if let Some(types) = c.present("layer_types") {
        let types = types
            .as_array()
            .ok_or_else(|| Error::failed("`layer_types` is not an array"))?;
        if types.len() != n_layers {
            return Err(Error::failed(format!(
                "`layer_types` has {} entries for {n_layers} layers",
                types.len()
            )));
        }
        return types
            .iter()
            .enumerate()
            .map(|(i, kind)| match kind.as_str() {
                // Mistral has one window for all layers and does not read `layer_types`.
                Some("full_attention") if model_type == "mistral" => Ok(window),
                Some("full_attention") => Ok(None),
                Some("sliding_attention") => match window {
                    Some(w) => Ok(Some(w)),
                    None => Err(Error::failed(format!(
                        "layer {i} is `sliding_attention`, but the config switches no sliding window on"
                    ))
                    .hint("`sliding_window` must be set (for Qwen also `use_sliding_window`: true)")),
                },
                Some(other) => Err(Error::failed(format!(
                    "layer type `{other}` (layer {i}) is not supported"
                ))
                .hint(format!("supported: {}", SUPPORTED_LAYERS.join(", ")))),
                None => Err(Error::failed(
                    "`layer_types` holds something that is not a string",
                )),
            })
            .collect();
    }
    let first = match model_type {
        "qwen2" | "qwen3" => c.index_or("max_window_layers", 28)?,
        _ => 0,
    };
    Ok((0..n_layers)
        .map(|i| if i >= first { window } else { None })
        .collect())
}

/// The rope settings from either spelling.
fn rope(c: &Fields, max_position: usize) -> Result<RopeConfig> {
    // As in transformers, `rope_scaling` replaces `rope_parameters` where both say something.
    let said = |v: &&Value| v.as_object().is_none_or(|map| !map.is_empty());
    let nested = match c.present("rope_scaling").filter(said) {
        Some(v) => Some(("rope_scaling", v)),
        None => c.present("rope_parameters").map(|v| ("rope_parameters", v)),
    };
    let empty = Map::new();
    let (name, map) = match nested {
        Some((name, v)) => (
            name,
            v.as_object()
                .ok_or_else(|| Error::failed(format!("`{name}` is not an object")))?,
        ),
        None => ("rope_scaling", &empty),
    };
    if let Some((layer_type, _)) = map.iter().find(|(_, v)| v.is_object()) {
        return Err(Error::failed(format!(
            "`{name}` sets a rope per layer type (`{layer_type}`), which is not supported"
        ))
        .hint("supported: one rope for all layers"));
    }
    let s = Fields { map };
    if let (Some(a), Some(b)) = (s.present("rope_type"), s.present("type"))
        && a != b
    {
        return Err(
            Error::failed(format!("`{name}` says both `rope_type`: {a} and `type`: {b}"))
                .hint("remove the one that the model was not trained with"),
        );
    }
    let kind = match s.present("rope_type").or_else(|| s.present("type")) {
        Some(v) => v
            .as_str()
            .ok_or_else(|| Error::failed(format!("`{name}.rope_type` is not a string")))?,
        None => "default",
    };
    if s.number_or("partial_rotary_factor", 1.0)? != 1.0 {
        return Err(Error::failed(format!(
            "`{name}.partial_rotary_factor` other than 1 is not supported"
        )));
    }
    let theta = match s.number_opt("rope_theta")? {
        Some(t) => t,
        None => c.number_or("rope_theta", 10_000.0)?,
    };
    if !(theta.is_finite() && theta > 1.0) {
        return Err(Error::failed(format!("rope_theta {theta} is out of range")));
    }
    let positive = |field: &str| -> Result<f64> {
        let v = s
            .number_opt(field)?
            .ok_or_else(|| Error::failed(format!("`{name}.{field}` is missing (rope type `{kind}`)")))?;
        if v.is_finite() && v > 0.0 {
            Ok(v)
        } else {
            Err(Error::failed(format!("`{name}.{field}` = {v} is out of range")))
        }
    };
    let scaling = match kind {
        "default" => RopeScaling::Default,
        "linear" => RopeScaling::Linear {
            factor: positive("factor")?,
        },
        "llama3" => {
            let (low, high) = (positive("low_freq_factor")?, positive("high_freq_factor")?);
            if high <= low {
                return Err(Error::failed(format!(
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
            let error = Error::failed(format!("rope type `{other}` is not supported"));
            return Err(error.hint(format!("supported: {}", SUPPORTED_ROPES.join(", "))));
        }
    };
    Ok(RopeConfig { theta, scaling })
}

/// YaRN's settings with its attention factor resolved (arXiv 2309.00071, section 3.4).
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
            return Err(Error::failed(format!(
                "yarn rope: `{name}` = {value} is out of range"
            )));
        }
    }
    if beta_fast < beta_slow {
        return Err(Error::failed(format!(
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

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    serde_json::from_slice(&bytes)
        .map_err(|e| Error::failed(format!("{} is not valid JSON: {e}", path.display())))
}

/// A token id or a list of token ids; absent or null gives an empty list.
fn token_ids(value: Option<&Value>, name: &str) -> Result<Vec<u32>> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| Error::failed(format!("`{name}` is not a token id: {v}")))
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(one).collect(),
        Some(v) => Ok(vec![one(v)?]),
    }
}

/// Typed access to the fields of a config object; `null` counts as absent.
struct Fields<'a> {
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Above this, a size in a config is taken for damage.
    const MAX_SIZE: u64 = 1 << 31;

    fn present(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    fn string(&self, name: &str) -> Result<&'a str> {
        match self.present(name) {
            Some(v) => v
                .as_str()
                .ok_or_else(|| Error::failed(format!("`{name}` is not a string"))),
            None => Err(Error::failed(format!("`{name}` is missing"))),
        }
    }

    fn string_or(&self, name: &str, default: &'static str) -> Result<&'a str> {
        if self.present(name).is_none() {
            return Ok(default);
        }
        self.string(name)
    }

    fn index_opt(&self, name: &str) -> Result<Option<usize>> {
        match self.present(name) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if n <= Self::MAX_SIZE => Ok(Some(n as usize)),
                _ => Err(Error::failed(format!("`{name}` = {v} is out of range"))),
            },
        }
    }

    fn index_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.index_opt(name)?.unwrap_or(default))
    }

    fn size_opt(&self, name: &str) -> Result<Option<usize>> {
        match self.index_opt(name)? {
            Some(0) => Err(Error::failed(format!("`{name}` is 0"))),
            other => Ok(other),
        }
    }

    fn size(&self, name: &str) -> Result<usize> {
        self.size_opt(name)?
            .ok_or_else(|| Error::failed(format!("`{name}` is missing")))
    }

    fn number_opt(&self, name: &str) -> Result<Option<f64>> {
        match self.present(name) {
            None => Ok(None),
            Some(v) => v
                .as_f64()
                .map(Some)
                .ok_or_else(|| Error::failed(format!("`{name}` is not a number"))),
        }
    }

    fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.number_opt(name)?.unwrap_or(default))
    }

    /// `sliding_window`: null is none, but an absent key means these families' default.
    fn window(&self) -> Result<Option<usize>> {
        if self.map.contains_key("sliding_window") {
            self.size_opt("sliding_window")
        } else {
            Ok(Some(4096))
        }
    }

    fn bool_or(&self, name: &str, default: bool) -> Result<bool> {
        match self.present(name) {
            None => Ok(default),
            Some(v) => v
                .as_bool()
                .ok_or_else(|| Error::failed(format!("`{name}` is not true or false"))),
        }
    }
}
