//! Typed access to the JSON of a checkpoint's configuration files.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value> {
    let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    serde_json::from_slice(&bytes)
        .map_err(|e| Error::failed(format!("{} is not valid JSON: {e}", path.display())))
}

/// A token id or a list of token ids; absent or null gives an empty list.
pub fn token_ids(value: Option<&Value>, name: &str) -> Result<Vec<u32>> {
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
pub struct Fields<'a> {
    /// The object.
    pub map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// Above this, a size in a config is taken for damage.
    const MAX_SIZE: u64 = 1 << 31;

    /// The fields of `map`.
    pub fn new(map: &'a Map<String, Value>) -> Self {
        Self { map }
    }

    /// The value of a field that is there.
    pub fn present(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// A string that must be there.
    pub fn string(&self, name: &str) -> Result<&'a str> {
        match self.present(name) {
            Some(v) => v
                .as_str()
                .ok_or_else(|| Error::failed(format!("`{name}` is not a string"))),
            None => Err(Error::failed(format!("`{name}` is missing"))),
        }
    }

    /// A string, or the default.
    pub fn string_or(&self, name: &str, default: &'static str) -> Result<&'a str> {
        if self.present(name).is_none() {
            return Ok(default);
        }
        self.string(name)
    }

    /// A whole number from 0 on.
    pub fn index_opt(&self, name: &str) -> Result<Option<usize>> {
        match self.present(name) {
            None => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) if n <= Self::MAX_SIZE => Ok(Some(n as usize)),
                _ => Err(Error::failed(format!("`{name}` = {v} is out of range"))),
            },
        }
    }

    /// A whole number from 0 on, or the default.
    pub fn index_or(&self, name: &str, default: usize) -> Result<usize> {
        Ok(self.index_opt(name)?.unwrap_or(default))
    }

    /// A whole number from 1 on.
    pub fn size_opt(&self, name: &str) -> Result<Option<usize>> {
        match self.index_opt(name)? {
            Some(0) => Err(Error::failed(format!("`{name}` is 0"))),
            other => Ok(other),
        }
    }

    /// A whole number from 1 on that must be there.
    pub fn size(&self, name: &str) -> Result<usize> {
        self.size_opt(name)?
            .ok_or_else(|| Error::failed(format!("`{name}` is missing")))
    }

    /// A number.
    pub fn number_opt(&self, name: &str) -> Result<Option<f64>> {
        match self.present(name) {
            None => Ok(None),
            Some(v) => v
                .as_f64()
                .map(Some)
                .ok_or_else(|| Error::failed(format!("`{name}` is not a number"))),
        }
    }

    /// A number, or the default.
    pub fn number_or(&self, name: &str, default: f64) -> Result<f64> {
        Ok(self.number_opt(name)?.unwrap_or(default))
    }

    /// `sliding_window`: null is none, but an absent key means these families' default.
    pub fn window(&self) -> Result<Option<usize>> {
        if self.map.contains_key("sliding_window") {
            self.size_opt("sliding_window")
        } else {
            Ok(Some(4096))
        }
    }

    /// True or false, or the default.
    pub fn bool_or(&self, name: &str, default: bool) -> Result<bool> {
        match self.present(name) {
            None => Ok(default),
            Some(v) => v
                .as_bool()
                .ok_or_else(|| Error::failed(format!("`{name}` is not true or false"))),
        }
    }
}
