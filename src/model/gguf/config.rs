//! The metadata of a GGUF file as a `config.json`.

use std::f64::consts::PI;

use serde_json::{Map, Value, json};

use super::Gguf;
use crate::error::Result;
use crate::model::config::ModelConfig;
use crate::model::families::in_gguf;

/// `low_freq_factor` and `high_freq_factor` of every published model with Llama 3.1's rope.
const LLAMA3: (f64, f64) = (1.0, 4.0);

impl Gguf {
    /// Reads the model's configuration.
    ///
    /// # Errors
    /// An architecture or rope that is not supported; what [`ModelConfig::parse`] refuses.
    pub fn config(&self) -> Result<ModelConfig> {
        let hint = "the file is damaged or the model is not supported; give the Hugging Face folder from which it was made";
        let config = self.config_json().map_err(|e| e.or_hint(hint))?;
        ModelConfig::parse(&config).map_err(|e| e.context(self.path.display()).or_hint(hint))
    }

    fn config_json(&self) -> Result<Value> {
        let arch = self
            .text("general.architecture")
            .ok_or_else(|| self.unsupported("`general.architecture` is missing"))?;
        if !in_gguf().any(|family| family.name == arch) {
            let names: Vec<&str> = in_gguf().map(|family| family.name).collect();
            let supported = format!("supported: {}", names.join(", "));
            return Err(self
                .unsupported(format!("architecture `{arch}` is not supported"))
                .hint(supported));
        }
        let own = |name: &str| self.field(&format!("{arch}.{name}"));
        let embedding = self
            .tensors
            .get("token_embd.weight")
            .filter(|of| of.shape.len() == 2)
            .ok_or_else(|| self.unsupported("there is no matrix `token_embd.weight`"))?;
        let mut config = Map::new();
        let mut set = |name: &str, value: Value| config.insert(name.to_owned(), value);
        set("model_type", arch.into());
        set("vocab_size", embedding.shape[0].into());
        for (name, field) in [
            ("hidden_size", "embedding_length"),
            ("num_hidden_layers", "block_count"),
            ("intermediate_size", "feed_forward_length"),
            ("num_attention_heads", "attention.head_count"),
            ("num_key_value_heads", "attention.head_count_kv"),
            ("head_dim", "attention.key_length"),
            ("rms_norm_eps", "attention.layer_norm_rms_epsilon"),
            ("max_position_embeddings", "context_length"),
            ("rope_theta", "rope.freq_base"),
        ] {
            if let Some(value) = own(field) {
                set(name, self.one_for_all_layers(&format!("{arch}.{field}"), value)?);
            }
        }
        let heads = own("attention.head_count").and_then(Value::as_u64);
        if let (None, Some(hidden), Some(heads)) = (
            own("attention.key_length"),
            own("embedding_length").and_then(Value::as_u64),
            heads.filter(|n| *n > 0),
        ) {
            set("head_dim", (hidden / heads).into());
        }
        if let (Some(keys), Some(values)) = (own("attention.key_length"), own("attention.value_length"))
            && keys != values
        {
            return Err(self.unsupported(format!(
                "keys of {keys} channels and values of {values} are not supported"
            )));
        }
        let context = own("context_length").and_then(Value::as_u64).unwrap_or(u64::MAX);
        if let Some(window) = own("attention.sliding_window").and_then(Value::as_u64)
            && (1..context).contains(&window)
        {
            return Err(self.unsupported("sliding windows are not supported in GGUF files"));
        }
        if own("expert_count").and_then(Value::as_u64).is_some_and(|n| n > 0) {
            return Err(self.unsupported("mixtures of experts are not supported"));
        }
        let has = |name: &str| self.tensors.contains_key(name);
        set("tie_word_embeddings", (!has("output.weight")).into());
        set("attention_bias", has("blk.0.attn_q.bias").into());
        set("mlp_bias", has("blk.0.ffn_gate.bias").into());
        if let Some(scaling) = self.rope_scaling(arch)? {
            set("rope_scaling", scaling);
        }
        for (name, field) in [("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")] {
            if let Some(id) = self.field(&format!("tokenizer.ggml.{field}")) {
                set(name, id.clone());
            }
        }
        // The end of a turn ends generation too.
        let ends = ["eos", "eot", "eom"].map(|of| self.field(&format!("tokenizer.ggml.{of}_token_id")));
        let mut ids: Vec<&Value> = ends.into_iter().flatten().collect();
        ids.dedup();
        if !ids.is_empty() {
            set("eos_token_id", json!(ids));
        }
        Ok(Value::Object(config))
    }

    /// Returns the one number of a field that may have a number for each layer.
    fn one_for_all_layers(&self, name: &str, value: &Value) -> Result<Value> {
        match value {
            Value::Array(each) => match each.split_first() {
                Some((first, rest)) if rest.iter().all(|other| other == first) => Ok(first.clone()),
                _ => {
                    Err(self.unsupported(format!("`{name}` differs between layers, which is not supported")))
                }
            },
            one => Ok(one.clone()),
        }
    }

    /// Returns the `rope_scaling` of a `config.json`.
    fn rope_scaling(&self, arch: &str) -> Result<Option<Value>> {
        let own = |name: &str| self.field(&format!("{arch}.rope.{name}"));
        let head_dim = self.channels(arch);
        if let (Some(rotated), Some(d)) = (own("dimension_count").and_then(Value::as_u64), head_dim)
            && rotated != d
        {
            return Err(self.unsupported(format!("a rope over {rotated} of {d} channels is not supported")));
        }
        if self.tensors.contains_key("rope_freqs.weight") {
            return self.llama3(arch).map(Some);
        }
        let kind = own("scaling.type").and_then(Value::as_str).unwrap_or("none");
        let mut scaling = Map::new();
        let mut set = |name: &str, value: &Value| scaling.insert(name.to_owned(), value.clone());
        set("rope_type", &kind.into());
        for (name, field) in [
            ("factor", "scaling.factor"),
            (
                "original_max_position_embeddings",
                "scaling.original_context_length",
            ),
            ("beta_fast", "scaling.yarn_beta_fast"),
            ("beta_slow", "scaling.yarn_beta_slow"),
        ] {
            if let Some(value) = own(field) {
                set(name, value);
            }
        }
        // llama.cpp multiplies the factor of YaRN's authors by this one.
        let numbers = [own("scaling.attn_factor"), own("scaling.factor")].map(|x| x.and_then(Value::as_f64));
        if let ("yarn", [Some(more), Some(factor)]) = (kind, numbers) {
            let usual = 0.1 * factor.max(1.0).ln() + 1.0;
            scaling.insert("attention_factor".to_owned(), json!(more * usual));
        }
        Ok((kind != "none").then_some(Value::Object(scaling)))
    }

    fn channels(&self, arch: &str) -> Option<u64> {
        let of = |name: &str| self.field(&format!("{arch}.{name}")).and_then(Value::as_u64);
        of("attention.key_length")
            .or_else(|| of("embedding_length")?.checked_div(of("attention.head_count")?))
    }

    /// Returns Llama 3.1's rope: the file has no parameters of it, but the number by which each frequency is divided. The
    /// largest one is the factor, and one between it and 1 tells the original context, if the other two parameters are those
    /// of the published models. If they do not give all of the numbers, the rope is not supported.
    fn llama3(&self, arch: &str) -> Result<Value> {
        let (low, high) = LLAMA3;
        let weight = self.weight_of("rope_freqs.weight")?;
        let divisors: Vec<f64> = weight.to_vec().into_iter().map(f64::from).collect();
        let factor = divisors.iter().copied().fold(1.0, f64::max);
        let theta = self
            .field(&format!("{arch}.rope.freq_base"))
            .and_then(Value::as_f64)
            .unwrap_or(10_000.0);
        let d = 2.0 * divisors.len() as f64;
        // The turns within one position.
        let speed = |i: usize| theta.powf(-2.0 * i as f64 / d) / (2.0 * PI);
        let between = (0..divisors.len()).find(|i| (1.0001..0.9999 * factor).contains(&divisors[*i]));
        let original = between.map_or(8192.0, |i| {
            // The share of the unscaled frequency that is kept.
            let kept = (1.0 / divisors[i] - 1.0 / factor) / (1.0 - 1.0 / factor);
            ((low + kept * (high - low)) / speed(i)).round()
        });
        let is_known = divisors.iter().enumerate().all(|(i, found)| {
            let kept = ((original * speed(i) - low) / (high - low)).clamp(0.0, 1.0);
            (found * ((1.0 - kept) / factor + kept) - 1.0).abs() < 1e-4
        });
        if is_known && factor.is_finite() && self.channels(arch) == Some(d as u64) {
            Ok(json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }))
        } else {
            Err(self
                .unsupported("the frequencies in `rope_freqs.weight` are not those of Llama 3.1's rope")
                .hint("give the Hugging Face folder from which the file was made"))
        }
    }
}
