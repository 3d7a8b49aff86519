//! Reads a dump: its origin, and the states of a layer, head by head.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ndarray::{Array2, Array3};
use serde_json::json;

use super::moments::Moments;
use super::{
    BLOCK_SUMS, DumpManifest, DumpOptions, FORMAT, MANIFEST, MAX_SHARDS, MOMENTS, Shard, TOKENS, layer_file,
    layer_specs, sum_specs,
};
use crate::corpus::{Corpus, CorpusManifest, Origin};
use crate::error::{Error, Result};
use crate::float::Float;
use crate::interrupt;
use crate::model::Sizes;
use crate::model::fields::read_json;
use crate::progress::Progress;
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
struct Part {
    dir: PathBuf,
    manifest: DumpManifest,
    /// Its own tokens: those of the shard.
    ids: Vec<u32>,
    block_start: Vec<u32>,
    held_out: Vec<u8>,
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
        let (kept, corpus) = join_blocks(&parts, &origin.calibration).map_err(|what| first.invalid(what))?;
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
        match self.options.queries {
            true => Ok(()),
            false => Err(Error::failed(format!("{} contains no queries", self.shown()))
                .hint("recreate the dump with --queries")),
        }
    }

    /// Fails if the dump does not keep the values.
    pub fn check_values(&self) -> Result<()> {
        match self.options.values {
            true => Ok(()),
            false => Err(Error::failed(format!("{} contains no values", self.shown()))
                .hint("recreate the dump with --queries --values")),
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
            let path = part.dir.join(&name);
            let file = File::open(&path).map_err(|e| Error::io(&path, "open", &e))?;
            let rows = first..first + part.ids.len();
            first = rows.end;
            Ok(LayerFile {
                store,
                file,
                rows,
                blocks: part.block_start.len() - 1,
            })
        };
        Ok(LayerDump {
            files: self.parts.iter().map(&mut open).collect::<Result<_>>()?,
            sizes: self.sizes,
            dtype: self.options.dtype,
        })
    }

    /// Returns the sums over the queries of every layer, from the sums of every block.
    ///
    /// # Errors
    /// The dump is not in shards; a file is not the one that the dump was made with.
    pub fn sums(&self, progress: &Progress) -> Result<Vec<QuerySums>> {
        let layer = |layer| {
            interrupt::check()?;
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
        let path = dir.join(MANIFEST);
        let invalid = |what: &str| {
            let error = Error::failed(format!("{}: {what}", path.display()));
            error.hint("recreate the dump with this version of kvsmith")
        };
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

    fn invalid(&self, what: &str) -> Error {
        let error = Error::failed(format!("{}: {what}", self.dir.join(MANIFEST).display()));
        error.hint("recreate the dump with this version of kvsmith")
    }
}

/// Reads the manifest of a complete dump, or of one of its shards.
///
/// # Errors
/// There is no complete dump, or its manifest is not valid.
pub(super) fn read_manifest(dir: &Path) -> Result<DumpManifest> {
    let path = dir.join(MANIFEST);
    if !path.is_file() {
        return Err(
            Error::failed(format!("{} does not contain a complete dump", dir.display())).hint(
                "make a dump with `kvsmith dump`; an interrupted dump cannot be continued, start it again",
            ),
        );
    }
    let invalid = |what: &str| {
        let error = Error::failed(format!("{}: {what}", path.display()));
        error.hint("recreate the dump with this version of kvsmith")
    };
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
    if Some(&store::file_digest(&path)?) != files.get(name) {
        let error = Error::failed(format!("{} does not match its digest", path.display()));
        return Err(error.hint("the file is damaged or belongs to another dump; recreate the dump"));
    }
    Store::open(&path)
}

/// Checks that folders, sorted by shard, are one dump, or all shards of one dump.
fn check_shards(parts: &[Part]) -> Result<()> {
    let [first, others @ ..] = parts else {
        return Ok(());
    };
    let Some(shard) = &first.manifest.shard else {
        let Some(other) = others.first() else {
            return Ok(());
        };
        let error = Error::failed(format!(
            "{} and {} are not shards of one dump",
            first.dir.display(),
            other.dir.display()
        ));
        return Err(error.hint("give one dump folder, or all folders of `kvsmith dump --shard I/N`"));
    };
    for other in others {
        let (a, b) = (&first.manifest, &other.manifest);
        let count = |manifest: &DumpManifest| manifest.shard.as_ref().map(|shard| shard.count);
        for (what, same) in [
            ("the model", a.origin.model == b.origin.model),
            ("the text", a.origin.calibration == b.origin.calibration),
            ("the version of kvsmith", a.tool_version == b.tool_version),
            ("the device", a.device == b.device),
            (
                "--queries, --values, --dtype or --wrope-position",
                a.options == b.options,
            ),
            ("the number of shards", count(a) == count(b)),
        ] {
            if !same {
                let error = Error::failed(format!(
                    "{} and {} are of different dumps: {what} differs",
                    first.dir.display(),
                    other.dir.display()
                ));
                return Err(error.hint(again(b, "SHARD")));
            }
        }
    }
    let indices = parts
        .iter()
        .flat_map(|part| &part.manifest.shard)
        .map(|of| of.index);
    let indices: Vec<usize> = indices.collect();
    if let Some(i) = indices.windows(2).position(|pair| pair[0] == pair[1]) {
        let [a, b] = [&parts[i].dir, &parts[i + 1].dir].map(|dir| dir.display());
        let error = Error::failed(format!(
            "{a} and {b} are both shard {}/{}",
            indices[i], shard.count
        ));
        return Err(error.hint("give each shard once"));
    }
    let missing = || (0..shard.count).filter(|index| indices.binary_search(index).is_err());
    let Some(index) = missing().next() else {
        return Ok(());
    };
    let named: Vec<String> = missing().take(8).map(|index| index.to_string()).collect();
    let more = if missing().count() > named.len() {
        ", .."
    } else {
        ""
    };
    let error = Error::failed(format!(
        "{} of {} shards of the dump are missing: {}{more}",
        missing().count(),
        shard.count,
        named.join(", ")
    ));
    Err(error.hint(again(&first.manifest, &format!("{index}/{}", shard.count))))
}

/// Says how to make a shard again.
fn again(manifest: &DumpManifest, shard: &str) -> String {
    let DumpOptions {
        queries,
        values,
        dtype,
        wrope_position,
    } = manifest.options;
    let text = &manifest.origin.calibration;
    let flag = |given: bool, flag: &'static str| if given { flag } else { "" };
    format!(
        "make it with `kvsmith dump --model DIR TEXT{}{} --dtype {} --wrope-position {wrope_position} --seq-len {} --seed {} --shard {shard} -o DIR`, and the same model and text as for the others",
        flag(queries, " --queries"),
        flag(values, " --values"),
        dtype.name().to_lowercase(),
        text.seq_len,
        text.seed,
    )
}

/// Joins the tokens of all parts, and checks them against the manifest.
fn join_blocks(
    parts: &[Part],
    text: &CorpusManifest,
) -> std::result::Result<(Vec<bool>, Corpus), &'static str> {
    let (mut ids, mut block_start, mut held_out) = (Vec::new(), vec![0], Vec::new());
    for part in parts {
        let blocks = block_start.len() - 1..block_start.len() + part.block_start.len() - 2;
        if part
            .manifest
            .shard
            .as_ref()
            .is_some_and(|shard| shard.blocks != blocks)
        {
            return Err("`shard` does not match tokens.safetensors");
        }
        let first = u32::try_from(ids.len()).map_err(|_| "the shards have more than 2^32 tokens")?;
        let starts = part.block_start[1..].iter().map(|start| start.checked_add(first));
        let starts: Option<Vec<u32>> = starts.collect();
        block_start.extend(starts.ok_or("the shards have more than 2^32 tokens")?);
        ids.extend_from_slice(&part.ids);
        held_out.extend_from_slice(&part.held_out);
    }
    let corpus = Corpus {
        ids,
        block_start,
        held_out: text.held_out.clone(),
        seq_len: text.seq_len,
        seed: text.seed,
    };
    let kept: Vec<bool> = held_out.iter().map(|held_out| *held_out == 0).collect();
    match corpus.is_consistent() && corpus.manifest() == *text && corpus.kept() == kept {
        true => Ok((kept, corpus)),
        false => Err("`calibration` does not match tokens.safetensors"),
    }
}

/// The kinds of states of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Pre-RoPE keys.
    KPre,
    /// Pre-RoPE queries.
    QPre,
    /// Values.
    V,
}

/// The states of one layer, which are read head by head.
pub struct LayerDump {
    files: Vec<LayerFile>,
    sizes: Sizes,
    dtype: Float,
}

/// The file of a layer in one folder.
struct LayerFile {
    /// The header of the file, which tells where the tensors are.
    store: Store,
    file: File,
    /// Its rows among those of all folders.
    rows: Range<usize>,
    /// Number of its blocks.
    blocks: usize,
}

impl LayerDump {
    /// Reads rows `first..first + count` of one head of a state, as f32: `[count, d]`.
    ///
    /// # Errors
    /// The dump does not keep this state, or a value is not finite.
    pub fn read(&self, state: State, head: usize, first: usize, count: usize) -> Result<Array2<f32>> {
        let d = self.sizes.head_dim;
        let mut values = vec![0.0; count * d];
        for file in &self.files {
            let rows = file.rows.start.max(first)..file.rows.end.min(first + count);
            if !rows.is_empty() {
                let own = rows.start - file.rows.start..rows.end - file.rows.start;
                let values = &mut values[(rows.start - first) * d..(rows.end - first) * d];
                file.read(state, head, own, self.dtype, values)?;
            }
        }
        Ok(Array2::from_shape_vec((count, d), values)?)
    }

    /// Adds up the sums over the queries of all blocks, in their order.
    ///
    /// # Errors
    /// The files are not those of shards; a sum is not finite.
    pub fn sums(&self) -> Result<QuerySums> {
        let Sizes {
            n_kv_heads: g,
            head_dim: d,
            ..
        } = self.sizes;
        let mut sums = QuerySums::new(g, d);
        for file in &self.files {
            file.add_sums(&mut sums)?;
        }
        Ok(sums)
    }
}

impl LayerFile {
    /// Reads rows of one head of a state.
    fn read(
        &self,
        state: State,
        head: usize,
        rows: Range<usize>,
        dtype: Float,
        values: &mut [f32],
    ) -> Result<()> {
        let name = match state {
            State::KPre => "k_pre",
            State::QPre => "q_pre",
            State::V => "v",
        };
        let start = self.store.data_start(name).ok_or_else(|| {
            Error::failed(format!("the dump contains no `{name}`"))
                .hint("recreate the dump with --queries and --values")
        })?;
        let d = values.len() / rows.len();
        let row = d * dtype.bytes();
        let mut bytes = vec![0; rows.len() * row];
        self.file
            .read_exact_at(
                &mut bytes,
                (start + (head * self.rows.len() + rows.start) * row) as u64,
            )
            .map_err(|e| Error::io(self.store.path(), "read", &e))?;
        dtype.read(&bytes, values);
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            return Err(Error::failed(format!(
                "{}: `{name}` of head {head} contains a NaN or infinite value in row {}",
                self.store.path().display(),
                rows.start + i / d
            ))
            .hint("recreate the dump with --dtype f32; it is damaged, or its dtype has too small a range for this model"));
        }
        Ok(())
    }

    /// Adds the sums of every block.
    fn add_sums(&self, sums: &mut QuerySums) -> Result<()> {
        let (g, d, _) = sums.pre.dim();
        let [pre, rope, count] = BLOCK_SUMS;
        let blocks = self.blocks;
        let read = |name: &str| self.store.read::<f64>(name, &[blocks, g, d, d]);
        let (pre, rope) = (read(pre)?, read(rope)?);
        let counts: Vec<u64> = self.store.read(count, &[blocks, g])?;
        if pre.iter().chain(&rope).any(|v| !v.is_finite()) {
            let what = format!(
                "{}: a sum over queries is NaN or infinite",
                self.store.path().display()
            );
            return Err(
                Error::failed(what).hint("recreate the shard; if the error persists, the model overflows")
            );
        }
        let of = |values: &[f64], i: usize| {
            let values = values[i * g * d * d..(i + 1) * g * d * d].to_vec();
            Array3::from_shape_vec((g, d, d), values)
        };
        for i in 0..blocks {
            sums.add(&QuerySums {
                pre: of(&pre, i)?,
                rope: of(&rope, i)?,
                count: counts[i * g..(i + 1) * g].to_vec(),
            });
        }
        Ok(())
    }
}
