//! Writes sections with their manifest, and merges section files.

use std::collections::BTreeMap;

use super::{Artifact, Manifest, Section, SectionKind};
use crate::corpus::Origin;
use crate::disk::Output;
use crate::error::{Error, Result};
use crate::store::{self, Tensor};

/// Writes one or more complete sections with their manifest.
///
/// # Errors
/// A section does not have the values that readers ask for; the disk is full.
pub fn write(output: Output, origin: Origin, sections: Vec<Section>) -> Result<()> {
    let kinds: Vec<_> = sections.iter().map(|section| section.kind).collect();
    let mut manifest = Manifest::new(origin);
    let mut tensors = Vec::new();
    for mut section in sections {
        let name = section.kind.name().to_string();
        for (spec, bytes) in section.specs.into_iter().zip(section.data) {
            let tensor = Tensor { spec, bytes };
            let digests = &mut section.manifest.sha256;
            digests.insert(tensor.spec.name.clone(), tensor.digest());
            tensors.push(tensor);
        }
        manifest.sections.insert(name.clone(), section.manifest);
        manifest.quality.insert(name, section.quality);
    }
    finish(output, &tensors, manifest, &kinds)
}

/// Writes a file and gives it its name if it stands every check of a reader.
fn finish(
    output: Output,
    tensors: &[Tensor],
    manifest: Manifest,
    kinds: &[&'static dyn SectionKind],
) -> Result<()> {
    let writer = store::fill(output, tensors, Some(&manifest.seal()))?;
    writer.finish_checked(|path| Artifact::open(path, kinds)?.verify())
}

/// Merges section files that were made from the same model and the same calibration.
///
/// # Errors
/// Sections that differ in origin, a section given twice, a damaged file.
pub fn pack(output: Output, parts: &[Artifact]) -> Result<()> {
    let Some(first) = parts.first() else {
        return Err(Error::usage("no section file given"));
    };
    let mut manifest = Manifest::new(first.manifest.origin.clone());
    manifest.tool_version.clone_from(&first.manifest.tool_version);
    let mut tensors: BTreeMap<String, Tensor> = BTreeMap::new();
    for part in parts {
        part.verify()?;
        check_same_origin(first, part)?;
        for (name, section) in &part.manifest.sections {
            if manifest.sections.insert(name.clone(), section.clone()).is_some() {
                let twice = Error::failed(format!("section `{name}` is given twice"));
                return Err(twice.hint("give one file per section"));
            }
        }
        manifest.quality.extend(part.manifest.quality.clone());
        for spec in part.store.specs() {
            let bytes = part.store.checked(spec)?.to_vec();
            let spec = spec.clone();
            tensors.insert(spec.name.clone(), Tensor { spec, bytes });
        }
    }
    let tensors: Vec<Tensor> = tensors.into_values().collect();
    let sections = parts.iter().flat_map(Artifact::sections);
    let kinds: Vec<_> = sections.map(|section| section.kind).collect();
    finish(output, &tensors, manifest, &kinds)
}

/// Fails if two section files do not go together.
fn check_same_origin(first: &Artifact, part: &Artifact) -> Result<()> {
    let (a, b) = (&first.manifest, &part.manifest);
    for (key, same) in [
        ("format", a.format == b.format),
        ("tool_version", a.tool_version == b.tool_version),
        ("model", a.origin.model == b.origin.model),
        ("calibration", a.origin.calibration == b.origin.calibration),
    ] {
        if !same {
            return Err(Error::failed(format!(
                "{} and {} differ in `{key}`",
                first.store.path().display(),
                part.store.path().display()
            ))
            .hint("pack takes sections made by one version from one dump"));
        }
    }
    Ok(())
}
