//! An opened artifact or section file.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use half::f16;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::manifest::AGAIN;
use super::manifest::FORMAT_WITH_PLAN;
use super::section::{CONSTANT, check_finite, check_observed, part_specs};
use super::{FORMAT, HeadReport, Manifest, Report, SectionKind, SectionManifest, parse, short};
use crate::error::{Error, Result};
use crate::model::Sizes;
use crate::store::{self, Element, Spec, Store, seal_holds};

/// An opened artifact or section file.
pub struct Artifact {
    /// The mapped file.
    pub store: Store,
    /// The manifest.
    pub manifest: Manifest,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// The layers that the file has: all of them, unless it was opened as a part.
    pub layers: Range<usize>,
    /// Declaration and tensors of each section, by name.
    kinds: BTreeMap<String, (&'static dyn SectionKind, Vec<Spec>)>,
}

impl Artifact {
    /// Opens a file whose sections are among `known` and checks its header: that it has the canonical form, that the
    /// manifest has its digest, and that every section has exactly its tensors, with the right types and shapes. Tensor
    /// data are not read.
    ///
    /// # Errors
    /// A check fails, or the file has only a part of the layers.
    pub fn open(path: &Path, known: &[&'static dyn SectionKind]) -> Result<Self> {
        let artifact = Self::open_part(path, known)?;
        if artifact.manifest.layers.is_none() {
            return Ok(artifact);
        }
        let Range { start, end } = artifact.layers;
        let (shown, all) = (path.display(), artifact.sizes.n_layers);
        let error = Error::invalid(format!("{shown} has only layers {start}..{end} of {all}"));
        Err(error.hint("join it with the files of the other layers by `kvsmith pack`"))
    }

    /// Does what [`Artifact::open`] does, also for a file that has only a part of the layers.
    pub fn open_part(path: &Path, known: &[&'static dyn SectionKind]) -> Result<Self> {
        Self::read(path, known).map_err(|e| e.or_hint("the file is damaged; recreate it"))
    }

    /// Does what [`Artifact::open_part`] describes; errors may lack a hint.
    fn read(path: &Path, known: &[&'static dyn SectionKind]) -> Result<Self> {
        let store = Store::open(path)?;
        let manifest = read_manifest(&store)?;
        let context = |e: Error| e.context(path.display());
        manifest.origin.model.check().map_err(context)?;
        let sizes = manifest.origin.model.sizes;
        if let Some(verdict) = &manifest.quality.methods {
            verdict.check(sizes).map_err(context)?;
        }
        let layers = manifest.layers.clone().unwrap_or(0..sizes.n_layers);
        let is_part =
            layers.start < layers.end && layers.end <= sizes.n_layers && layers.len() < sizes.n_layers;
        if manifest.layers.is_some() && !(is_part && manifest.quality.methods.is_none()) {
            return Err(context(Error::damaged("`layers` is not valid")));
        }
        let mut kinds = BTreeMap::new();
        for (name, section) in &manifest.sections {
            let kind = known.iter().copied().find(|kind| kind.name() == name);
            let kind = kind.ok_or_else(|| {
                let error = Error::unsupported(format!("unknown section `{name}`"));
                context(error.hint("a newer version of kvsmith made the file; update kvsmith"))
            })?;
            let specs = part_specs(kind.specs(&section.params, sizes).map_err(context)?, layers.len());
            for spec in &specs {
                store.checked(spec)?;
            }
            let complete = manifest.quality.sections.get(name).is_some_and(|reports| {
                reports.len() == layers.len() && reports.iter().all(|heads| heads.len() == sizes.n_kv_heads)
            });
            if !complete {
                return Err(context(Error::damaged(format!(
                    "`quality.{name}` does not have exactly one entry per layer and head"
                ))));
            }
            let reports = layers.clone().zip(&manifest.quality.sections[name]);
            for (layer, reports) in reports {
                check_observed(name, layer, reports).map_err(context)?;
            }
            kinds.insert(name.clone(), (kind, specs));
        }
        let expected = kinds.values().flat_map(|(_, specs)| specs);
        if let Some(extra) = store
            .specs()
            .find(|s| !expected.clone().any(|e| e.name == s.name))
        {
            return Err(context(Error::damaged(format!(
                "tensor `{}` does not belong to any section",
                extra.name
            ))));
        }
        Ok(Self {
            store,
            manifest,
            sizes,
            layers,
            kinds,
        })
    }

    /// Lists the sections by name.
    pub fn sections(&self) -> impl Iterator<Item = SectionView<'_>> {
        self.kinds.iter().map(|(name, (kind, specs))| SectionView {
            artifact: self,
            kind: *kind,
            specs,
            manifest: &self.manifest.sections[name],
            quality: &self.manifest.quality.sections[name],
        })
    }

    /// Tells whether the file has the named section.
    pub fn has(&self, section: &str) -> bool {
        self.kinds.contains_key(section)
    }

    /// Finds a section.
    ///
    /// # Errors
    /// The artifact does not have it.
    pub fn section(&self, name: &str) -> Result<SectionView<'_>> {
        self.sections().find(|s| s.kind.name() == name).ok_or_else(|| {
            Error::not_found(format!("{} has no section `{name}`", self.store.path().display()))
                .hint("calibrate again with this section, or choose another ⟨method⟩")
        })
    }

    /// Finds a section and checks the digests and values of its tensors.
    ///
    /// # Errors
    /// The artifact does not have the section, or the section is damaged.
    pub fn checked_section(&self, name: &str) -> Result<SectionView<'_>> {
        let section = self.section(name)?;
        section.verify()?;
        Ok(section)
    }

    /// Checks every digest and every value.
    pub fn verify(&self) -> Result<()> {
        self.sections().try_for_each(|section| section.verify())
    }

    /// Fails if the tensors are for a model of other sizes.
    pub fn check_sizes(&self, sizes: Sizes) -> Result<()> {
        if self.sizes == sizes {
            return Ok(());
        }
        let [own, model] = [self.sizes, sizes].map(|s| {
            let Sizes {
                n_layers,
                n_heads,
                n_kv_heads,
                head_dim,
            } = s;
            format!("{n_layers} layers, {n_heads} query and {n_kv_heads} KV heads of {head_dim} channels")
        });
        Err(Error::mismatch(format!(
            "{} was made for a model of other sizes: the file has {own}, this model has {model}",
            self.store.path().display()
        ))
        .hint("calibrate this model; if the fingerprints match, the artifact is damaged"))
    }

    /// Fails if the artifact was made for another model, by its fingerprint and by the sizes of its tensors.
    pub fn check_model(&self, fingerprint: &str, sizes: Sizes) -> Result<()> {
        let own = &self.manifest.origin.model.fingerprint;
        if own == fingerprint {
            return self.check_sizes(sizes);
        }
        Err(Error::mismatch(format!(
            "{} was made for another model: the file has fingerprint {}, this model has {}",
            self.store.path().display(),
            short(own),
            short(fingerprint)
        ))
        .hint("calibrate this model, or pass the model for which the file was made"))
    }
}

/// Reads the manifest of a file, checking its format and its digest.
fn read_manifest(store: &Store) -> Result<Manifest> {
    let path = store.path().display();
    let manifest = store.manifest()?;
    store.check_canonical()?;
    let expected = manifest.get("head_plan").map_or(FORMAT, |_| FORMAT_WITH_PLAN);
    if manifest.get("format") != Some(&json!(expected)) {
        return Err(Error::damaged(format!("{path} is not an artifact of format {expected}")).hint(AGAIN));
    }
    if !store.metadata().is_some_and(|text| seal_holds(text, &manifest)) {
        return Err(Error::damaged(format!(
            "{path}: the manifest was modified after the file was written"
        ))
        .hint("the file is damaged; recreate it"));
    }
    Manifest::deserialize(manifest)
        .map_err(|e| Error::damaged(format!("{path}: the manifest is not valid: {e}")).hint(AGAIN))
}

/// A section of an opened file.
#[derive(Clone, Copy)]
pub struct SectionView<'a> {
    /// The file.
    pub artifact: &'a Artifact,
    /// The section's declaration.
    pub kind: &'static dyn SectionKind,
    /// Its tensors, layer axis in front.
    pub specs: &'a [Spec],
    /// What the manifest says about it.
    pub manifest: &'a SectionManifest,
    /// Quality reports: per layer, per KV head.
    pub quality: &'a [Vec<Report>],
}

impl<'a> SectionView<'a> {
    /// Reads the hyper-parameters.
    ///
    /// # Errors
    /// A hyper-parameter is missing or has another type.
    pub fn params<T: DeserializeOwned>(&self) -> Result<T> {
        let what = format!("sections.{}", self.kind.name());
        parse(&what, &self.manifest.params)
    }

    /// Counts the bytes of all tensors.
    pub fn bytes(&self) -> usize {
        store::total_bytes(self.specs)
    }

    /// Counts the keys per KV head that took part in the fit.
    pub fn kept_keys(&self) -> u64 {
        let text = &self.artifact.manifest.origin.calibration;
        text.tokens.saturating_sub(text.held_out_tokens) as u64
    }

    /// Reads a whole tensor.
    pub fn read<T: Element>(&self, tensor: &str) -> Result<Vec<T>> {
        let spec = self.specs.iter().find(|spec| spec.name == tensor);
        let spec = spec.ok_or_else(|| {
            let section = self.kind.name();
            Error::internal(format!("internal: section `{section}` has no tensor `{tensor}`"))
        })?;
        self.artifact.store.read(tensor, &spec.shape)
    }

    /// Reads a whole f16 tensor, widened to f32.
    pub fn widened(&self, tensor: &str) -> Result<Vec<f32>> {
        Ok(self.read(tensor)?.into_iter().map(f16::to_f32).collect())
    }

    /// Lists layer and KV head of the heads whose calibration keys were all equal.
    pub fn constant_heads(&self) -> Vec<(usize, usize)> {
        let heads = self.reports().into_iter();
        let constant = heads.filter(|head| head.report.contains_key(CONSTANT));
        constant.map(|head| (head.layer, head.head)).collect()
    }

    /// Names the KV head that has this number when the heads of all layers are counted in order.
    pub fn kv_head(&self, number: usize) -> String {
        let heads = self.artifact.sizes.n_kv_heads;
        let layer = self.artifact.layers.start + number / heads;
        format!("layer {layer}, KV head {}", number % heads)
    }

    /// Makes the error for values that no fit can produce.
    pub fn damaged(&self, what: impl std::fmt::Display) -> Error {
        Error::damaged(format!("{}: {what}", self.artifact.store.path().display()))
            .hint("the file is damaged; recreate it")
    }

    /// Lists the quality reports of all heads.
    pub fn reports(&self) -> Vec<HeadReport<'a>> {
        let layers = self.artifact.layers.clone().zip(self.quality);
        let heads = layers.flat_map(|(layer, heads)| {
            let heads = heads.iter().enumerate();
            heads.map(move |(head, report)| HeadReport { layer, head, report })
        });
        heads.collect()
    }

    /// Checks the digests and values of all tensors, and that the quality reports are what they should be.
    fn verify(&self) -> Result<()> {
        for spec in self.specs {
            if self.artifact.store.digest(&spec.name).as_ref() != self.manifest.sha256.get(&spec.name) {
                return Err(self.damaged(format!("tensor `{}` does not match its digest", spec.name)));
            }
            let bytes = self.artifact.store.checked(spec)?;
            check_finite(spec, bytes, self.artifact.layers.start).map_err(|e| self.damaged(e))?;
        }
        // A section that can be used must also be one that `inspect` can show.
        self.kind.table(&self.reports()).map_err(|e| self.damaged(e))?;
        self.kind.describe(self)?;
        self.kind.check(self)
    }
}
