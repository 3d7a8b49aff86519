//! Writes sections with their manifest, and merges section files.

use std::collections::BTreeMap;
use std::ops::Range;

use serde_json::Value;

use super::{Artifact, Manifest, Section, SectionKind, SectionView, Verdict};
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

/// What an artifact says of the methods.
#[derive(Clone, Debug)]
pub struct Judged {
    /// What they lost.
    pub verdict: Verdict,
    /// The head plan that follows from it, or one that the artifact had before; `None` if nothing is recommended.
    pub head_plan: Option<Value>,
}

impl Judged {
    fn put_into(self, manifest: &mut Manifest) {
        manifest.quality.methods = Some(self.verdict);
        manifest.head_plan = self.head_plan;
    }
}

/// A function that measures what methods lose with an artifact; see [`write_judged`].
pub type Measure<'a> = dyn FnMut(&Artifact) -> Option<Judged> + 'a;

/// Does what [`write()`] does, and adds the verdict that `measure` returns, with its head plan. `measure` reads the artifact
/// from `draft`, an unfinished output of the same name, which is then dropped. Without a verdict, the artifact is written to
/// what `spare` returns, if anything, and not to `output`.
pub fn write_judged(
    output: Output,
    draft: Output,
    origin: Origin,
    sections: Vec<Section>,
    measure: &mut Measure,
    spare: impl FnOnce() -> Result<Option<Output>>,
) -> Result<()> {
    let (tensors, mut manifest, kinds) = complete(origin, sections);
    let draft = store::fill(draft, &tensors, Some(&manifest.clone().seal()))?;
    draft.check(|path| Artifact::open(path, &kinds)?.verify())?;
    let artifact = Artifact::open(draft.unfinished(), &kinds)?;
    let judged = measure(&artifact);
    drop((artifact, draft));
    let output = match judged {
        Some(judged) => {
            judged.put_into(&mut manifest);
            Some(output)
        }
        None => spare()?,
    };
    output.map_or(Ok(()), |output| finish(output, &tensors, manifest, &kinds))
}

/// Writes an artifact again with another verdict and head plan.
///
/// # Errors
/// A damaged file; the disk is full.
pub fn write_with_verdict(output: Output, artifact: &Artifact, judged: Judged) -> Result<()> {
    artifact.verify()?;
    let mut manifest = artifact.manifest.clone();
    judged.put_into(&mut manifest);
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
    let n_layers = manifest.origin.model.sizes.n_layers;
    let parts = sections.iter().map(|section| section.layers.clone());
    manifest.layers = parts.into_iter().find(|layers| layers.len() < n_layers);
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
    writer.finish_checked(|path| Artifact::open_part(path, kinds)?.verify())
}

/// Merges section files that were made from the same model and the same calibration; joins those that have only a part of
/// a section's layers. `head_plan` says how each KV head is to be served; verdicts and plans of the files are left out.
///
/// # Errors
/// Sections that differ in origin, layers that are missing or given twice, a damaged file.
pub fn pack(output: Output, parts: &[Artifact], head_plan: Option<Value>) -> Result<()> {
    let Some(first) = parts.first() else {
        return Err(Error::usage("no section file given"));
    };
    let mut manifest = Manifest::new(first.manifest.origin.clone());
    manifest.tool_version.clone_from(&first.manifest.tool_version);
    manifest.head_plan = head_plan;
    let mut sections: BTreeMap<&str, Vec<SectionView>> = BTreeMap::new();
    for part in parts {
        part.verify()?;
        check_same_origin(first, part)?;
        for section in part.sections() {
            sections.entry(section.kind.name()).or_default().push(section);
        }
    }
    let (mut tensors, mut kinds) = (Vec::new(), Vec::new());
    for (name, mut views) in sections {
        views.sort_by_key(|view| view.artifact.layers.start);
        check_layers(name, &views, first.sizes.n_layers)?;
        let own = join(&views)?;
        let mut section = views[0].manifest.clone();
        let digests = own
            .iter()
            .map(|tensor| (tensor.spec.name.clone(), tensor.digest()));
        section.sha256 = digests.collect();
        manifest.sections.insert(name.to_owned(), section);
        let quality = views.iter().flat_map(|view| view.quality).cloned();
        manifest
            .quality
            .sections
            .insert(name.to_owned(), quality.collect());
        tensors.extend(own);
        kinds.push(views[0].kind);
    }
    finish(output, &tensors, manifest, &kinds)
}

/// Fails unless the parts of a section, sorted by layer, have every layer once, and were made with the same options.
fn check_layers(name: &str, parts: &[SectionView], n_layers: usize) -> Result<()> {
    let (mut next, path) = (0, |of: &SectionView| {
        of.artifact.store.path().display().to_string()
    });
    for (i, part) in parts.iter().enumerate() {
        let layers = &part.artifact.layers;
        if layers.start < next {
            let [a, b] = [&parts[i - 1], part].map(path);
            let twice = if layers.len() == n_layers {
                format!("section `{name}` is given twice: {a}, {b}")
            } else {
                format!(
                    "layer {} of section `{name}` is given twice: {a}, {b}",
                    layers.start
                )
            };
            return Err(Error::invalid(twice).hint("give every layer of a section once"));
        }
        if layers.start > next {
            return Err(missing(name, next..layers.start));
        }
        next = layers.end;
        let (a, b) = (&parts[0].manifest, part.manifest);
        if (&a.params, &a.device, &a.adapter) != (&b.params, &b.device, &b.adapter) {
            let error = Error::mismatch(format!(
                "{} and {} have different options or devices of section `{name}`",
                path(&parts[0]),
                path(part)
            ));
            return Err(
                error.hint("make all parts of a section with the same options, on the same kind of device")
            );
        }
    }
    if next < n_layers {
        Err(missing(name, next..n_layers))
    } else {
        Ok(())
    }
}

/// Makes the error for layers that no file has.
fn missing(name: &str, layers: Range<usize>) -> Error {
    let Range { start, end } = layers;
    Error::not_found(format!("layers {start}..{end} of section `{name}` are missing")).hint(format!(
        "make them with ⟨layers={start}..{end}⟩, and the same dump and options as for the other layers"
    ))
}

/// Joins the tensors of the parts of a section, in the order of the layers.
fn join(parts: &[SectionView]) -> Result<Vec<Tensor>> {
    let specs = parts[0].specs.iter();
    let tensor = |spec: &store::Spec| {
        let mut joined = Tensor {
            spec: spec.clone(),
            bytes: Vec::new(),
        };
        joined.spec.shape[0] = 0;
        for part in parts {
            let own = part
                .specs
                .iter()
                .find(|own| own.name == spec.name)
                .unwrap_or(spec);
            joined.bytes.extend_from_slice(part.artifact.store.checked(own)?);
            joined.spec.shape[0] += own.shape[0];
        }
        Ok(joined)
    };
    specs.map(tensor).collect()
}

/// Fails if two section files were not made from the same model and calibration.
fn check_same_origin(first: &Artifact, part: &Artifact) -> Result<()> {
    let (a, b) = (&first.manifest, &part.manifest);
    for (key, same) in [
        ("format", a.format == b.format),
        ("tool_version", a.tool_version == b.tool_version),
        ("model", a.origin.model == b.origin.model),
        ("calibration", a.origin.calibration == b.origin.calibration),
        ("precision", a.origin.precision == b.origin.precision),
    ] {
        if !same {
            return Err(Error::mismatch(format!(
                "{} and {} have different values of `{key}`",
                first.store.path().display(),
                part.store.path().display()
            ))
            .hint("make all sections from the same dump with the same version of kvsmith"));
        }
    }
    Ok(())
}
