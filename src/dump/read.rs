//! Reads a dump: its origin, and the states of a layer, head by head.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ndarray::Array2;
use serde_json::json;

use super::moments::Moments;
use super::{DumpManifest, DumpOptions, FORMAT, MANIFEST, MOMENTS, TOKENS, layer_file, layer_specs};
use crate::corpus::{Corpus, CorpusManifest, Origin};
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::Sizes;
use crate::model::fields::read_json;
use crate::store::{self, FileDigest, Store};

/// A complete dump folder, opened for reading.
pub struct Dump {
    dir: PathBuf,
    /// The model and the text.
    pub origin: Origin,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// Rows of every state tensor.
    pub n: usize,
    /// Which rows the fits use; the others are held out.
    pub kept: Vec<bool>,
    /// The tokens in their blocks.
    pub corpus: Corpus,
    /// Which states the dump keeps, and how.
    pub options: DumpOptions,
    /// Length and digest of every file.
    files: BTreeMap<String, FileDigest>,
}

impl Dump {
    /// Opens a dump and checks its manifest and tokens.
    ///
    /// # Errors
    /// There is no complete dump, or its files contradict each other.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        if !path.is_file() {
            return Err(
                Error::failed(format!("{} does not contain a complete dump", dir.display()))
                    .hint("make a dump with `kvsmith dump`; an interrupted dump cannot be continued, start it again"),
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
        let DumpManifest {
            origin,
            options,
            files,
            ..
        } = manifest;
        if u32::try_from(options.wrope_position).is_err() {
            return Err(invalid("`wrope_position` is invalid"));
        }
        let sizes = origin.model.sizes;
        sizes.check().map_err(|e| invalid(&e.to_string()))?;
        let tokens = open_intact(dir, TOKENS, &files)?;
        let n = tokens.bytes("held_out").map_or(0, <[u8]>::len);
        // Checked here, because later allocations depend on these sizes.
        for layer in 0..sizes.n_layers {
            let store = Store::open(&dir.join(layer_file(layer)))?;
            layer_specs(sizes, n, &options)
                .iter()
                .try_for_each(|spec| store.checked(spec).map(drop))?;
        }
        origin.model.check().map_err(|e| invalid(&e.to_string()))?;
        let (kept, corpus) = read_blocks(&tokens, &origin.calibration).map_err(invalid)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            sizes,
            origin,
            n,
            kept,
            corpus,
            options,
            files,
        })
    }

    /// Fails if the dump does not keep the queries.
    pub fn check_queries(&self) -> Result<()> {
        match self.options.queries {
            true => Ok(()),
            false => Err(
                Error::failed(format!("{} contains no queries", self.dir.display()))
                    .hint("recreate the dump with --queries"),
            ),
        }
    }

    /// Fails if the dump does not keep the values.
    pub fn check_values(&self) -> Result<()> {
        match self.options.values {
            true => Ok(()),
            false => Err(
                Error::failed(format!("{} contains no values", self.dir.display()))
                    .hint("recreate the dump with --queries --values"),
            ),
        }
    }

    /// Reads the query moments that were computed during the dump.
    ///
    /// # Errors
    /// The file is not the one that the dump was made with.
    pub fn moments(&self) -> Result<Moments> {
        open_intact(&self.dir, MOMENTS, &self.files)?;
        Moments::read(&self.dir.join(MOMENTS), self.sizes)
    }

    /// Opens the states of one layer.
    ///
    /// # Errors
    /// The file is not the one that the dump was made with.
    pub fn layer(&self, layer: usize) -> Result<LayerDump> {
        let name = layer_file(layer);
        let path = self.dir.join(&name);
        let store = open_intact(&self.dir, &name, &self.files)?;
        for spec in layer_specs(self.sizes, self.n, &self.options) {
            store.checked(&spec)?;
        }
        let file = File::open(&path).map_err(|e| Error::io(&path, "open", &e))?;
        Ok(LayerDump {
            store,
            file,
            n: self.n,
            d: self.sizes.head_dim,
            dtype: self.options.dtype,
        })
    }
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

/// Reads which rows are kept and where blocks start, and checks both against the manifest.
fn read_blocks(
    tokens: &Store,
    text: &CorpusManifest,
) -> std::result::Result<(Vec<bool>, Corpus), &'static str> {
    let values = |name: &str| tokens.bytes(name).map_or(0, |bytes| bytes.len() / 4);
    let read = |name: &str| tokens.read::<u32>(name, &[values(name)]);
    let wrong = "`calibration` does not match tokens.safetensors";
    let (Ok(ids), Ok(block_start)) = (read("ids"), read("block_start")) else {
        return Err(wrong);
    };
    let n = ids.len();
    let held_out: Vec<u8> = tokens.read("held_out", &[n]).map_err(|_| wrong)?;
    let ascending = block_start.windows(2).all(|w| w[0] < w[1]);
    let ends = (block_start.first(), block_start.last().map(|last| *last as usize));
    if ends != (Some(&0), Some(n)) || !ascending {
        return Err("`block_start` in tokens.safetensors does not match its rows");
    }
    let corpus = Corpus {
        ids,
        block_start,
        held_out: text.held_out.clone(),
        seq_len: text.seq_len,
        seed: text.seed,
    };
    let kept = held_out.iter().map(|held_out| *held_out == 0).collect();
    match corpus.is_consistent() && corpus.manifest() == *text && corpus.kept() == kept {
        true => Ok((kept, corpus)),
        false => Err(wrong),
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
    /// The header of the file, which tells where the tensors are.
    store: Store,
    file: File,
    n: usize,
    d: usize,
    dtype: Float,
}

impl LayerDump {
    /// Reads rows `first..first + count` of one head of a state, as f32: `[count, d]`.
    ///
    /// # Errors
    /// The dump does not keep this state, or a value is not finite.
    pub fn read(&self, state: State, head: usize, first: usize, count: usize) -> Result<Array2<f32>> {
        let name = match state {
            State::KPre => "k_pre",
            State::QPre => "q_pre",
            State::V => "v",
        };
        let start = self.store.data_start(name).ok_or_else(|| {
            Error::failed(format!("the dump contains no `{name}`"))
                .hint("recreate the dump with --queries and --values")
        })?;
        let row = self.d * self.dtype.bytes();
        let mut bytes = vec![0; count * row];
        self.file
            .read_exact_at(&mut bytes, (start + (head * self.n + first) * row) as u64)
            .map_err(|e| Error::io(self.store.path(), "read", &e))?;
        let mut values = vec![0.0; count * self.d];
        self.dtype.read(&bytes, &mut values);
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            return Err(Error::failed(format!(
                "{}: `{name}` of head {head} contains a NaN or infinite value in row {}",
                self.store.path().display(),
                first + i / self.d
            ))
            .hint("recreate the dump with --dtype f32; it is damaged, or its dtype has too small a range for this model"));
        }
        Ok(Array2::from_shape_vec((count, self.d), values)?)
    }
}
