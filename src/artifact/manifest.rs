//! The manifest of an artifact: JSON with sorted keys in the file's header, sealed with its own digest.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::verdict::Verdict;
use crate::corpus::Origin;
use crate::error::{Error, Result};
use crate::store;

/// Version of the file format.
pub const FORMAT: u64 = 1;
/// Version of the format of files with a head plan, which earlier readers would not follow.
pub const FORMAT_WITH_PLAN: u64 = 2;
/// The hint for a file that this version does not read.
pub(super) const AGAIN: &str =
    "recreate the file with `kvsmith calibrate ⟨model=DIR⟩ ⟨text=FILE⟩ ⟨output=ART.safetensors⟩`";

/// The quality report of one KV head.
pub type Report = Map<String, Value>;

/// The manifest of an artifact.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Version of the file format.
    pub format: u64,
    /// Version of the program that made the sections.
    pub tool_version: String,
    /// The devices of the sections; the CPU is named only if there is no other.
    pub device: String,
    /// The model and the text.
    #[serde(flatten)]
    pub origin: Origin,
    /// The layers that the file has, if they are not all of them: a part, which `pack` joins with others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<Range<usize>>,
    /// How each KV head is to be served, if the file says so; [`Plan`](crate::method::plan::Plan) reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_plan: Option<Value>,
    /// Sections by name.
    pub sections: BTreeMap<String, SectionManifest>,
    /// How good the sections are, and what methods lose with them.
    pub quality: Quality,
}

/// How good an artifact is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Quality {
    /// What methods lost on the held-out text, if that was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub methods: Option<Verdict>,
    /// Reports by section: per layer, per KV head.
    #[serde(flatten)]
    pub sections: BTreeMap<String, Vec<Vec<Report>>>,
}

/// What the manifest says about one section.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SectionManifest {
    /// The device that fitted the section.
    pub device: String,
    /// The hardware and the driver, if the device is a GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Digest of each tensor's data, once they are known.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub sha256: BTreeMap<String, String>,
    /// The hyper-parameters of the section; the section's declaration knows their meaning.
    #[serde(flatten)]
    pub params: Map<String, Value>,
}

impl Manifest {
    /// Makes a manifest of this version without sections.
    pub fn new(origin: Origin) -> Self {
        Self {
            format: FORMAT,
            tool_version: env!("CARGO_PKG_VERSION").to_string(),
            device: String::new(),
            origin,
            layers: None,
            head_plan: None,
            sections: BTreeMap::new(),
            quality: Quality::default(),
        }
    }

    /// Returns the digest of what the manifest says about its sections: with and without a verdict, it is the same.
    pub fn sections_sha256(&self) -> String {
        store::text_digest(&json!(self.sections).to_string())
    }

    /// Returns the text for the header, sealed with its digest; `device` is derived from the sections, and `format` from whether
    /// there is a head plan.
    pub fn seal(mut self) -> String {
        self.format = self.head_plan.as_ref().map_or(FORMAT, |_| FORMAT_WITH_PLAN);
        let devices = self.sections.values().map(|s| s.device.as_str());
        let others: BTreeSet<&str> = devices.filter(|name| *name != "cpu").collect();
        self.device = if others.is_empty() {
            "cpu".to_string()
        } else {
            others.into_iter().collect::<Vec<_>>().join("+")
        };
        let mut value = json!(self);
        store::seal(&mut value);
        value.to_string()
    }
}

/// Converts a value to a JSON object for the manifest.
pub fn object<T: Serialize>(value: &T) -> Result<Map<String, Value>> {
    match serde_json::to_value(value) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(Error::internal(format!("internal: {other} is no object"))),
        Err(e) => Err(Error::internal(format!("internal: {e}"))),
    }
}

/// Reads a JSON object of the manifest; `what` names the object in the error if it is not valid.
pub fn parse<T: DeserializeOwned>(what: &str, object: &Map<String, Value>) -> Result<T> {
    T::deserialize(object).map_err(|e| Error::damaged(format!("`{what}` is not valid: {e}")).hint(AGAIN))
}
