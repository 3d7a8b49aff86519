//! The packaged file: sections of tensors, one manifest that says what they were made from, and a
//! digest of everything. `docs/artifact.md` describes it for readers in other languages.
//!
//! A section file (`kvsmith codebook -o`) has the same form with one section; [`pack`] merges them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use half::f16;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::compute::device::Device;
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::method;
use crate::store::hex;
use crate::store::{self, Output, Spec, Store, Tensor};

/// Version of the file format.
pub const FORMAT: u64 = 1;

/// What one layer contributes to a section: each tensor's bytes, in the order of the section's
/// specs, and one quality report per head.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerPart {
    /// Little-endian data per tensor.
    pub tensors: Vec<Vec<u8>>,
    /// Per KV head.
    pub quality: Vec<Value>,
}

/// A section that is complete once it has a part per layer.
#[derive(Clone, Debug)]
pub struct Section {
    /// Its name in the manifest and the prefix of its tensors.
    pub name: &'static str,
    /// Every hyper-parameter.
    pub params: Value,
    /// Tensors with the layer axis in front.
    pub specs: Vec<Spec>,
    /// One part per layer.
    pub layers: Vec<LayerPart>,
}

impl Section {
    /// A section without layers yet, to be fitted on `device`.
    pub fn new(name: &'static str, mut params: Value, specs: Vec<Spec>, device: &dyn Device) -> Self {
        params["device"] = json!(device.name());
        if let Some(adapter) = device.adapter() {
            params["adapter"] = json!(adapter);
        }
        Self {
            name,
            params,
            specs,
            layers: Vec::new(),
        }
    }
}

/// What all sections of a file were made from.
#[derive(Clone, Debug, PartialEq)]
pub struct Origin {
    /// The manifest's `model` object.
    pub model: Value,
    /// The manifest's `calibration` object.
    pub calibration: Value,
}

/// The device of a whole artifact: those of its sections, less the CPU's where there is another.
fn device_of(sections: &Map<String, Value>) -> String {
    let devices = sections.values().filter_map(|s| s.get("device")?.as_str());
    let others: BTreeSet<&str> = devices.filter(|name| *name != "cpu").collect();
    match others.is_empty() {
        true => "cpu".to_string(),
        false => others.into_iter().collect::<Vec<_>>().join("+"),
    }
}

/// Writes one or more sections with their manifest.
pub fn write(output: Output, origin: &Origin, sections: Vec<Section>) -> Result<()> {
    let mut tensors = Vec::new();
    let mut params = Map::new();
    let mut quality = Map::new();
    for section in sections {
        let mut digests = Map::new();
        let mut reports = Vec::with_capacity(section.layers.len());
        let mut data: Vec<Vec<u8>> = vec![Vec::new(); section.specs.len()];
        for part in section.layers {
            for (all, bytes) in data.iter_mut().zip(part.tensors) {
                all.extend(bytes);
            }
            reports.push(Value::Array(part.quality));
        }
        for (spec, bytes) in section.specs.into_iter().zip(data) {
            let tensor = Tensor { spec, bytes };
            digests.insert(tensor.spec.name.clone(), json!(tensor.digest()));
            tensors.push(tensor);
        }
        let mut object = section.params;
        object["sha256"] = Value::Object(digests);
        params.insert(section.name.to_string(), object);
        quality.insert(section.name.to_string(), Value::Array(reports));
    }
    let manifest = json!({
        "format": FORMAT,
        "tool_version": env!("CARGO_PKG_VERSION"),
        "device": device_of(&params),
        "model": origin.model,
        "calibration": origin.calibration,
        "sections": params,
        "quality": quality,
    });
    store::write(output, &tensors, Some(&sealed(manifest).to_string()))
}

/// Merges section files that were made from the same model and the same calibration.
///
/// # Errors
/// Sections that differ in origin, a section given twice, a damaged file.
pub fn pack(output: Output, parts: &[Artifact]) -> Result<()> {
    let Some(first) = parts.first() else {
        return Err(Error::usage("no section file given"));
    };
    let mut manifest = first.manifest.clone();
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    let (mut params, mut quality) = (Map::new(), Map::new());
    for part in parts {
        part.verify()?;
        for key in ["format", "tool_version", "model", "calibration"] {
            if part.manifest[key] != manifest[key] {
                return Err(Error::failed(format!(
                    "{} and {} differ in `{key}`",
                    first.store.path().display(),
                    part.store.path().display()
                ))
                .hint("pack takes sections made by one version from one dump"));
            }
        }
        for (name, object) in part.sections() {
            if params.insert(name.clone(), object.clone()).is_some() {
                return Err(Error::failed(format!("section `{name}` is given twice")));
            }
            quality.insert(name.clone(), part.manifest["quality"][name].clone());
        }
        for spec in part.store.specs() {
            let bytes = part.store.checked(spec)?.to_vec();
            let tensor = Tensor {
                spec: spec.clone(),
                bytes,
            };
            tensors.insert(spec.name.clone(), tensor);
        }
    }
    manifest["device"] = json!(device_of(&params));
    manifest["sections"] = Value::Object(params);
    manifest["quality"] = Value::Object(quality);
    let tensors: Vec<Tensor> = tensors.into_values().collect();
    store::write(output, &tensors, Some(&sealed(manifest).to_string()))
}

/// The manifest with `manifest_sha256` over its canonical JSON without that key.
fn sealed(mut manifest: Value) -> Value {
    if let Some(map) = manifest.as_object_mut() {
        map.remove(SEAL);
    }
    let digest = hex(&Sha256::digest(manifest.to_string().as_bytes()));
    manifest[SEAL] = json!(digest);
    manifest
}

/// Whether a manifest's text has the digest that it states.
///
/// The text itself is hashed, less the digest's own member: no reader has to write JSON as we do.
fn seal_holds(text: &str, manifest: &Value) -> bool {
    let Some(digest) = manifest.get(SEAL).and_then(Value::as_str) else {
        return false;
    };
    let member = format!("\"{SEAL}\":\"{digest}\",");
    match text.split_once(&member) {
        Some((before, after)) => {
            let mut hash = Sha256::new();
            hash.update(before.as_bytes());
            hash.update(after.as_bytes());
            hex(&hash.finalize()) == digest
        }
        None => false,
    }
}

const SEAL: &str = "manifest_sha256";

/// An opened artifact or section file.
pub struct Artifact {
    /// The mapped file.
    pub store: Store,
    /// The manifest.
    pub manifest: Value,
    /// Sizes of the model.
    pub sizes: Sizes,
}

impl Artifact {
    /// Opens a file and checks its header: canonical form, manifest digest, and that every section
    /// has exactly its tensors in the right types and shapes. Tensor data are not read.
    pub fn open(path: &Path) -> Result<Self> {
        let store = Store::open(path)?;
        let manifest = store.manifest()?;
        store.check_canonical()?;
        let context = |e: Error| e.context(path.display());
        if manifest.get("format").and_then(Value::as_u64) != Some(FORMAT) {
            return Err(Error::failed(format!(
                "{} is not an artifact of format {FORMAT}",
                path.display()
            ))
            .hint("make it again with this version of kvsmith"));
        }
        if !store.metadata().is_some_and(|text| seal_holds(text, &manifest)) {
            return Err(
                Error::failed(format!("{}: the manifest was altered", path.display()))
                    .hint("the file is damaged; make it again"),
            );
        }
        let sizes = Sizes::of(&manifest["model"]).map_err(context)?;
        let artifact = Self {
            store,
            manifest,
            sizes,
        };
        let mut expected: Vec<Spec> = Vec::new();
        for (name, params) in artifact.sections() {
            expected.extend(method::section_specs(name, params, sizes).map_err(context)?);
            if artifact.quality(name).is_none() {
                return Err(context(Error::failed(format!(
                    "`quality.{name}` does not have one entry per layer and head"
                ))));
            }
        }
        for spec in &expected {
            artifact.store.checked(spec)?;
        }
        if let Some(extra) = artifact.store.specs().find(|s| !expected.contains(s)) {
            return Err(context(Error::failed(format!(
                "tensor `{}` belongs to no section",
                extra.name
            ))));
        }
        Ok(artifact)
    }

    /// Sections by name, with their parameters.
    pub fn sections(&self) -> impl Iterator<Item = (&String, &Value)> {
        self.manifest["sections"].as_object().into_iter().flatten()
    }

    /// Whether the section is there.
    pub fn has(&self, section: &str) -> bool {
        self.sections().any(|(name, _)| name == section)
    }

    /// Parameters of a section.
    ///
    /// # Errors
    /// The artifact does not have it.
    pub fn section(&self, name: &str) -> Result<&Value> {
        self.sections()
            .find(|(n, _)| *n == name)
            .map(|(_, p)| p)
            .ok_or_else(|| {
                Error::failed(format!("{} has no section `{name}`", self.store.path().display()))
                    .hint("calibrate again with this section, or choose another --method")
            })
    }

    /// Quality reports of a section: per layer, per head. `None` if their number is wrong.
    pub fn quality(&self, section: &str) -> Option<Vec<&Vec<Value>>> {
        let layers: Vec<&Vec<Value>> = self.manifest["quality"][section]
            .as_array()?
            .iter()
            .map(Value::as_array)
            .collect::<Option<_>>()?;
        let complete =
            layers.len() == self.sizes.n_layers && layers.iter().all(|l| l.len() == self.sizes.n_kv_heads);
        complete.then_some(layers)
    }

    /// Fails if a tensor's data are not those that were written.
    pub fn check_digest(&self, section: &str, tensor: &str) -> Result<()> {
        let expected = self.section(section)?["sha256"]
            .get(tensor)
            .and_then(Value::as_str);
        let actual = self.store.bytes(tensor).map(|b| hex(&Sha256::digest(b)));
        match (expected, actual) {
            (Some(e), Some(a)) if e == a => Ok(()),
            _ => Err(Error::failed(format!(
                "{}: tensor `{tensor}` does not have its digest",
                self.store.path().display()
            ))
            .hint("the file is damaged; make it again")),
        }
    }

    /// Checks every digest and every value.
    pub fn verify(&self) -> Result<()> {
        for (name, params) in self.sections() {
            for spec in method::section_specs(name, params, self.sizes)? {
                self.check_digest(name, &spec.name)?;
            }
            method::check_section(name, self)?;
        }
        Ok(())
    }

    /// Fails if the artifact was made for another model.
    pub fn check_model(&self, fingerprint: &str) -> Result<()> {
        let own = self.manifest["model"]["fingerprint"].as_str().unwrap_or("");
        if own == fingerprint {
            return Ok(());
        }
        Err(Error::failed(format!(
            "{} was made for another model (fingerprint {}, this model has {})",
            self.store.path().display(),
            short(own),
            short(fingerprint)
        ))
        .hint("calibrate this model, or give the model that the file was made for"))
    }

    /// Keys per KV head that took part in the fits.
    pub fn kept_keys(&self) -> u64 {
        let calibration = &self.manifest["calibration"];
        let number = |name: &str| calibration[name].as_u64().unwrap_or(0);
        number("tokens").saturating_sub(number("held_out_tokens"))
    }

    /// A whole f32 tensor.
    pub fn f32s(&self, spec: &Spec) -> Result<Vec<f32>> {
        self.store.read::<f32>(&spec.name, &spec.shape)
    }

    /// A whole f16 tensor, widened.
    pub fn f16s(&self, spec: &Spec) -> Result<Vec<f32>> {
        let values = self.store.read::<f16>(&spec.name, &spec.shape)?;
        Ok(values.into_iter().map(f16::to_f32).collect())
    }
}

/// The first characters of a digest, for messages.
pub fn short(digest: &str) -> &str {
    digest.get(..12).unwrap_or(digest)
}
