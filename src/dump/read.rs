//! Reads a dump: its origin, and the states of a layer, head by head.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ndarray::Array2;
use serde_json::json;

use super::{DumpManifest, DumpOptions, FORMAT, MANIFEST, MOMENTS, layer_file, layer_specs};
use crate::corpus::Origin;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::Sizes;
use crate::model::fields::read_json;
use crate::store::Store;

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
    /// First row of each block, then the number of rows.
    pub block_start: Vec<u32>,
    /// Which states the dump keeps, and how.
    pub options: DumpOptions,
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
                Error::failed(format!("{} does not hold a complete dump", dir.display()))
                    .hint("make one with `kvsmith dump`; an interrupted one has to be made again"),
            );
        }
        let invalid = |what: &str| {
            let error = Error::failed(format!("{}: {what}", path.display()));
            error.hint("make the dump again with this version")
        };
        let manifest = read_json(&path)?;
        if manifest.get("format") != Some(&json!(FORMAT)) {
            return Err(invalid(&format!("not a dump of format {FORMAT}")));
        }
        let manifest: DumpManifest = serde_json::from_value(manifest).map_err(|e| invalid(&e.to_string()))?;
        let DumpManifest { origin, options, .. } = manifest;
        if u32::try_from(options.wrope_position).is_err() {
            return Err(invalid("`wrope_position` is not valid"));
        }
        origin.model.check().map_err(|e| invalid(&e.to_string()))?;
        let tokens = Store::open(&dir.join("tokens.safetensors"))?;
        let n = tokens.bytes("held_out").map_or(0, <[u8]>::len);
        let held_out: Vec<u8> = tokens.read("held_out", &[n])?;
        let blocks = tokens.bytes("block_start").map_or(0, |b| b.len() / 4);
        let block_start: Vec<u32> = tokens.read("block_start", &[blocks])?;
        let ascending = block_start.windows(2).all(|w| w[0] < w[1]);
        if block_start.first() != Some(&0) || block_start.last().map(|l| *l as usize) != Some(n) || !ascending
        {
            return Err(invalid(
                "tokens.safetensors has a `block_start` that does not fit its rows",
            ));
        }
        if origin.calibration.tokens != n {
            return Err(invalid("`calibration.tokens` does not fit tokens.safetensors"));
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            sizes: origin.model.sizes,
            origin,
            n,
            kept: held_out.iter().map(|h| *h == 0).collect(),
            block_start,
            options,
        })
    }

    /// Fails if the dump does not keep the queries.
    pub fn check_queries(&self) -> Result<()> {
        match self.options.queries {
            true => Ok(()),
            false => Err(Error::failed(format!("{} has no queries", self.dir.display()))
                .hint("make the dump with --queries")),
        }
    }

    /// Returns the path of the query moments that were computed while dumping.
    pub fn moments_path(&self) -> PathBuf {
        self.dir.join(MOMENTS)
    }

    /// Opens the states of one layer.
    pub fn layer(&self, layer: usize) -> Result<LayerDump> {
        let path = self.dir.join(layer_file(layer));
        let store = Store::open(&path)?;
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
            Error::failed(format!("the dump has no `{name}`"))
                .hint("make the dump with --queries and --values")
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
                "{}: `{name}` of head {head} has a value that is not finite in row {}",
                self.store.path().display(),
                first + i / self.d
            ))
            .hint("the dump is damaged, or its dtype is too narrow for this model; try --dtype f32"));
        }
        Ok(Array2::from_shape_vec((count, self.d), values)?)
    }
}
