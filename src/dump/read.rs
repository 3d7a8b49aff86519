//! Opens a dump: one folder, or the folders of all its shards.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::layer::{LayerDump, LayerFile};
use super::moments::Moments;
use super::shards::{check_shards, join_blocks};
use super::{
    DumpManifest, DumpOptions, FORMAT, MANIFEST, MAX_SHARDS, MOMENTS, Shard, TOKENS, layer_file, layer_specs,
    sum_specs,
};
use crate::corpus::{Corpus, Origin};
use crate::env::{self, Progress};
use crate::error::{Error, Result};
use crate::model::Sizes;
use crate::model::fields::read_json;
use crate::stats::moments::QuerySums;
use crate::store::{self, FileDigest, Store};

/// A complete dump, opened for reading: one folder, or the folders of all its shards.
pub struct Dump {
    /// The folders in the order of their blocks.
    parts: Vec<Part>,
    /// The model and the text.
    pub origin: Origin,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// Rows of every state tensor, over all shards.
    pub n: usize,
    /// Which rows the fits use; the others are held out.
    pub kept: Vec<bool>,
    /// The tokens in their blocks.
    pub corpus: Corpus,
    /// Which states the dump keeps, and how.
    pub options: DumpOptions,
}

/// One folder of a dump.
pub(super) struct Part {
    pub dir: PathBuf,
    pub manifest: DumpManifest,
    /// Its own tokens: those of the shard.
    pub ids: Vec<u32>,
    pub block_start: Vec<u32>,
    pub held_out: Vec<u8>,
}

impl Dump {
    /// Opens a dump and checks its manifests and tokens. `dirs` is its folder, or the folders of all its shards in any
    /// order.
    ///
    /// # Errors
    /// There is no complete dump, its files contradict each other, or the shards are not those of one dump.
    pub fn open<P: AsRef<Path>>(dirs: &[P]) -> Result<Self> {
        let parts = dirs.iter().map(|dir| Part::open(dir.as_ref()));
        let mut parts: Vec<Part> = parts.collect::<Result<_>>()?;
        parts.sort_by_key(|part| part.manifest.shard.as_ref().map(|shard| shard.index));
        check_shards(&parts)?;
        let first = parts
            .first()
            .ok_or_else(|| Error::usage("no dump folder given"))?;
        let (origin, options) = (first.manifest.origin.clone(), first.manifest.options);
        let (kept, corpus) =
            join_blocks(&parts, &origin.calibration).map_err(|what| invalid(&first.dir, what))?;
        Ok(Self {
            sizes: origin.model.sizes,
            n: kept.len(),
            parts,
            origin,
            kept,
            corpus,
            options,
        })
    }

    /// Names the dump in messages.
    fn shown(&self) -> String {
        match &self.parts[..] {
            [one] => one.dir.display().to_string(),
            parts => format!("the dump of {} shards", parts.len()),
        }
    }

    /// Returns whether the dump is in shards, whose layer files have the sums of every block.
    pub fn is_sharded(&self) -> bool {
        self.parts.iter().any(|part| part.manifest.shard.is_some())
    }

    /// Fails if the dump does not keep the queries.
    pub fn check_queries(&self) -> Result<()> {
        if self.options.queries {
            Ok(())
        } else {
            Err(Error::not_found(format!("{} contains no queries", self.shown()))
        .hint("recreate the dump with ⟨queries⟩, or with ⟨queries⟩ ⟨values⟩, which every section can be made of"))
        }
    }

    /// Fails if the dump does not keep the values.
    pub fn check_values(&self) -> Result<()> {
        if self.options.values {
            Ok(())
        } else {
            Err(Error::not_found(format!("{} contains no values", self.shown()))
                .hint("recreate the dump with ⟨queries⟩ ⟨values⟩"))
        }
    }

    /// Reads the query moments of a dump in one folder, which were computed with it.
    ///
    /// # Errors
    /// The file is not the one that the dump was made with.
    pub fn moments(&self) -> Result<Moments> {
        let part = &self.parts[0];
        part.open_intact(MOMENTS)?;
        Moments::read(&part.dir.join(MOMENTS), self.sizes)
    }

    /// Opens the states of one layer.
    ///
    /// # Errors
    /// A file is not the one that the dump was made with.
    pub fn layer(&self, layer: usize) -> Result<LayerDump> {
        let name = layer_file(layer);
        let mut first = 0;
        let mut open = |part: &Part| {
            let store = part.open_intact(&name)?;
            part.check_layer(&store)?;
            let rows = first..first + part.ids.len();
            first = rows.end;
            LayerFile::new(store, rows, part.block_start.len() - 1)
        };
        let files = self.parts.iter().map(&mut open).collect::<Result<_>>()?;
        Ok(LayerDump::new(files, self.sizes, self.options.dtype))
    }

    /// Returns the sums over the queries of every layer, from the sums of every block.
    ///
    /// # Errors
    /// The dump is not in shards; a file is not the one that the dump was made with.
    pub fn sums(&self, progress: &dyn Progress) -> Result<Vec<QuerySums>> {
        let layer = |layer| {
            env::check()?;
            progress.layer(layer, self.sizes.n_layers, "moments");
            let sums = self.layer(layer)?.sums()?;
            progress.advance(1);
            Ok(sums)
        };
        (0..self.sizes.n_layers).map(layer).collect()
    }
}

impl Part {
    /// Opens a folder and checks its manifest and tokens, each for itself.
    fn open(dir: &Path) -> Result<Self> {
        let manifest = read_manifest(dir)?;
        let invalid = |what: &str| invalid(dir, what);
        let sizes = manifest.origin.model.sizes;
        sizes.check().map_err(|e| invalid(&e.to_string()))?;
        let tokens = open_intact(dir, TOKENS, &manifest.files)?;
        let n = tokens.bytes("held_out").map_or(0, <[u8]>::len);
        let numbers = |name: &str| {
            let count = tokens.bytes(name).map_or(0, |bytes| bytes.len() / 4);
            tokens.read::<u32>(name, &[count])
        };
        let wrong = |_| invalid("tokens.safetensors is invalid");
        let part = Self {
            dir: dir.to_path_buf(),
            ids: numbers("ids").map_err(wrong)?,
            block_start: numbers("block_start").map_err(wrong)?,
            held_out: tokens.read("held_out", &[n]).map_err(wrong)?,
            manifest,
        };
        let ends = (
            part.block_start.first(),
            part.block_start.last().map(|last| *last as usize),
        );
        let ascending = part.block_start.windows(2).all(|w| w[0] < w[1]);
        if ends != (Some(&0), Some(part.ids.len())) || part.ids.len() != n || !ascending {
            return Err(invalid(
                "`block_start` in tokens.safetensors does not match its rows",
            ));
        }
        // Checked here, because later allocations depend on these sizes. Of a shard, one file tells them: a thousand shards
        // of a hundred layers would take long to look through, and every layer is checked when it is read.
        let checked = if part.manifest.shard.is_some() {
            1
        } else {
            sizes.n_layers
        };
        for layer in 0..checked.min(sizes.n_layers) {
            part.check_layer(&Store::open(&dir.join(layer_file(layer)))?)?;
        }
        part.manifest
            .origin
            .model
            .check()
            .map_err(|e| invalid(&e.to_string()))?;
        Ok(part)
    }

    /// Checks which tensors the file of a layer has.
    fn check_layer(&self, store: &Store) -> Result<()> {
        let sizes = self.manifest.origin.model.sizes;
        let mut specs = layer_specs(sizes, self.ids.len(), &self.manifest.options);
        if self.manifest.shard.is_some() {
            specs.extend(sum_specs(sizes, self.block_start.len() - 1));
        }
        specs.iter().try_for_each(|spec| store.checked(spec).map(drop))
    }

    fn open_intact(&self, name: &str) -> Result<Store> {
        open_intact(&self.dir, name, &self.manifest.files)
    }
}

/// Makes the error for a folder whose files are not those of a dump.
fn invalid(dir: &Path, what: &str) -> Error {
    let error = Error::damaged(format!("{}: {what}", dir.join(MANIFEST).display()));
    error.hint("recreate the dump with this version of kvsmith")
}

/// Reads the manifest of a complete dump, or of one of its shards.
///
/// # Errors
/// There is no complete dump, or its manifest is not valid.
pub(super) fn read_manifest(dir: &Path) -> Result<DumpManifest> {
    let path = dir.join(MANIFEST);
    if !path.is_file() {
        return Err(
            Error::not_found(format!("{} does not contain a complete dump", dir.display())).hint(
                "make a dump with `kvsmith dump`; an interrupted dump cannot be continued, start it again",
            ),
        );
    }
    let invalid = |what: &str| invalid(dir, what);
    let manifest = read_json(&path)?;
    if manifest.get("format") != Some(&json!(FORMAT)) {
        return Err(invalid(&format!("not a dump of format {FORMAT}")));
    }
    let sealed = store::seal_holds(&manifest.to_string(), &manifest);
    let manifest: DumpManifest = serde_json::from_value(manifest).map_err(|e| invalid(&e.to_string()))?;
    if !sealed {
        return Err(invalid("the manifest was modified after the dump was written"));
    }
    if u32::try_from(manifest.options.wrope_position).is_err() {
        return Err(invalid("`wrope_position` is invalid"));
    }
    if let Some(Shard { index, count, blocks }) = &manifest.shard {
        let is_valid = index < count && *count <= MAX_SHARDS && blocks.start < blocks.end;
        if !is_valid {
            return Err(invalid("`shard` is invalid"));
        }
    }
    Ok(manifest)
}

/// What a dump folder says about itself.
pub struct DumpSummary {
    /// The model and the whole text.
    pub origin: Origin,
    /// Which states the dump keeps, and how.
    pub options: DumpOptions,
    /// The part of the text that it has; `None` for all of it.
    pub shard: Option<Shard>,
    /// Bytes of all its files.
    pub bytes: u64,
}

/// Reads what a complete dump folder says about itself; its other files are not read.
///
/// # Errors
/// There is no complete dump, or its manifest is not valid.
pub fn summary(dir: &Path) -> Result<DumpSummary> {
    let manifest = read_manifest(dir)?;
    Ok(DumpSummary {
        bytes: manifest.files.values().map(|file| file.bytes).sum(),
        origin: manifest.origin,
        options: manifest.options,
        shard: manifest.shard,
    })
}

/// Opens a file of a dump and checks its digest.
fn open_intact(dir: &Path, name: &str, files: &BTreeMap<String, FileDigest>) -> Result<Store> {
    let path = dir.join(name);
    // The lengths come first, so that a file without an end is not read.
    let length = std::fs::metadata(&path)
        .map_err(|e| Error::io(&path, "read", &e))?
        .len();
    let expected = files.get(name).filter(|digest| digest.bytes == length);
    if expected.is_none() || Some(&store::file_digest(&path)?) != expected {
        let error = Error::damaged(format!("{} does not match its digest", path.display()));
        return Err(error.hint("the file is damaged or belongs to another dump; recreate the dump"));
    }
    Store::open(&path)
}
