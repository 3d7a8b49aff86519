//! Writes sections with their manifest, and merges section files.

use std::collections::BTreeMap;

use super::{Artifact, Manifest, Section, SectionKind, Verdict};
use crate::corpus::Origin;
use crate::disk::Output;
use crate::error::{Error, Result};
use crate::store::{self, Tensor};

/// Writes one or more complete sections with their manifest.
///
/// # Errors
/// A section whose values readers would refuse; the disk is full.
pub fn write(output: Output, origin: Origin, sections: Vec<Section>) -> Result<()> {
    let (tensors, manifest, kinds) = complete(origin, sections);
    finish(output, &tensors, manifest, &kinds)
}

/// A function that measures what methods lose with an artifact; see [`write_judged`].
pub type Measure<'a> = dyn FnMut(&Artifact) -> Option<Verdict> + 'a;

/// Does what [`write()`] does, and adds the verdict if `measure` returns one. `measure` reads the artifact from
/// `draft`, an unfinished output of the same name, which is then dropped.
pub fn write_judged(
    output: Output,
    draft: Output,
    origin: Origin,
    sections: Vec<Section>,
    measure: &mut Measure,
) -> Result<()> {
    let (tensors, mut manifest, kinds) = complete(origin, sections);
    let draft = store::fill(draft, &tensors, Some(&manifest.clone().seal()))?;
    draft.check(|path| Artifact::open(path, &kinds)?.verify())?;
    let artifact = Artifact::open(draft.unfinished(), &kinds)?;
    manifest.quality.methods = measure(&artifact);
    drop((artifact, draft));
    finish(output, &tensors, manifest, &kinds)
}

/// Writes an artifact again with `verdict` in place of its own verdict.
///
/// # Errors
/// A damaged file; the disk is full.
pub fn write_with_verdict(output: Output, artifact: &Artifact, verdict: Verdict) -> Result<()> {
    artifact.verify()?;
    let mut manifest = artifact.manifest.clone();
    manifest.quality.methods = Some(verdict);
    let tensors = tensors_of(artifact)?;
    let kinds: Vec<_> = artifact.sections().map(|section| section.kind).collect();
    finish(output, &tensors, manifest, &kinds)
}

/// Reads all tensors of a file.
fn tensors_of(artifact: &Artifact) -> Result<Vec<Tensor>> {
    let specs = artifact.store.specs();
    let tensor = |spec: &store::Spec| {
        Ok(Tensor {
            bytes: artifact.store.checked(spec)?.to_vec(),
            spec: spec.clone(),
        })
    };
    specs.map(tensor).collect()
}

/// Collects the tensors of sections and builds their manifest.
fn complete(
    origin: Origin,
    sections: Vec<Section>,
) -> (Vec<Tensor>, Manifest, Vec<&'static dyn SectionKind>) {
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
        manifest.quality.sections.insert(name, section.quality);
    }
    (tensors, manifest, kinds)
}

/// Writes a file and renames it to its final name if it passes every check that a reader makes.
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
        let quality = part.manifest.quality.sections.clone();
        manifest.quality.sections.extend(quality);
        let own = tensors_of(part)?.into_iter();
        tensors.extend(own.map(|tensor| (tensor.spec.name.clone(), tensor)));
    }
    let tensors: Vec<Tensor> = tensors.into_values().collect();
    let sections = parts.iter().flat_map(Artifact::sections);
    let kinds: Vec<_> = sections.map(|section| section.kind).collect();
    finish(output, &tensors, manifest, &kinds)
}

/// Fails if two section files were not made from the same model and calibration.
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
                "{} and {} have different values of `{key}`",
                first.store.path().display(),
                part.store.path().display()
            ))
            .hint("make all sections from the same dump with the same version of kvsmith"));
        }
    }
    Ok(())
}
