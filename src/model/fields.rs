//! Typed access to the JSON of a checkpoint's configuration files.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Error::damaged(format!("{} is not valid JSON: {e}", path.display()))
            .hint("the file is damaged or of another kind; download it again")
    })
}

/// Reads a token id or a list of token ids; a missing field or null gives an empty list.
pub fn token_ids(value: Option<&Value>, name: &str) -> Result<Vec<u32>> {
    let one = |v: &Value| {
        v.as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| Error::invalid(format!("`{name}` is not a token id: {v}")))
    };
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(one).collect(),
        Some(v) => Ok(vec![one(v)?]),
    }
}

/// Typed access to the fields of a JSON object; `null` counts as missing.
pub struct Fields<'a> {
    /// The object.
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Largest plausible size in a config, as in manifests; a larger one means a damaged file.
    const MAX_SIZE: u64 = (1 << 31) - 1;

    /// Returns a field's value unless it is missing or null.
    pub fn present(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// Reads a field with `read`, which fails if the value is not `what`.
    fn opt<T>(&self, name: &str, what: &str, read: fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        let wrong = || Error::invalid(format!("`{name}` is not {what}"));
        self.present(name).map(|v| read(v).ok_or_else(wrong)).transpose()
    }

    /// Reads a string.
    pub fn string_opt(&self, name: &str) -> Result<Option<&'a str>> {
        self.opt(name, "a string", Value::as_str)
    }

    /// Reads a whole number of at least 0.
    pub fn index_opt(&self, name: &str) -> Result<Option<usize>> {
        match self.present(name) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if n <= Self::MAX_SIZE => Ok(Some(n as usize)),
                _ => Err(Error::invalid(format!("`{name}` = {v} is out of range"))),
            },
        }
    }

    /// Reads a whole number of at least 1.
    pub fn size_opt(&self, name: &str) -> Result<Option<usize>> {
        match self.index_opt(name)? {
            Some(0) => Err(Error::invalid(format!("`{name}` is 0, but must be at least 1"))),
            other => Ok(other),
        }
    }

    /// Reads a whole number of at least 1 that must be present.
    pub fn size(&self, name: &str) -> Result<usize> {
        self.size_opt(name)?.ok_or_else(|| Self::missing(name))
    }

    /// Makes the error for a field that must be present.
    pub fn missing(name: &str) -> Error {
        Error::invalid(format!("`{name}` is missing"))
    }

    /// Reads a number.
    pub fn number_opt(&self, name: &str) -> Result<Option<f64>> {
        self.opt(name, "a number", Value::as_f64)
    }

    /// Reads a number, or returns the default.
    pub fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.number_opt(name)?.unwrap_or(default))
    }

    /// Reads `sliding_window`: null means none, a missing field 4096, these model families' default.
    pub fn window(&self) -> Result<Option<usize>> {
        if self.map.contains_key("sliding_window") {
            self.size_opt("sliding_window")
        } else {
            Ok(Some(4096))
        }
    }

    /// Reads a boolean, or returns the default.
    pub fn bool_or(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self
            .opt(name, "true or false", Value::as_bool)?
            .unwrap_or(default))
    }
}
