//! The dump folder: captured states of every layer, the tokens behind them, and query moments.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use ndarray::{Array2, Array3, ArrayView3, Axis};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::artifact::FORMAT;
use crate::capture::Capture;
use crate::compute::device::Device;
use crate::corpus::Corpus;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::model::fields::read_json;
use crate::model::forward::Layers;
use crate::model::rope::{Rope, RopeConfig};
use crate::progress::Log;
use crate::stats::moments::{LayerMoments, Moments, Position};
use crate::store::{self, Output, Spec, Store, Tensor, Writer};

/// Name of the file whose presence says that a dump is complete.
pub const MANIFEST: &str = "manifest.json";
/// Name of the streamed moments.
pub const MOMENTS: &str = "moments.safetensors";

/// What a dump keeps.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Keep `q_pre`.
    pub queries: bool,
    /// Keep `v`.
    pub values: bool,
    /// Element type of the states.
    pub dtype: Float,
    /// Relative position of the query moments.
    pub wrope_position: usize,
}

fn layer_file(layer: usize) -> String {
    format!("layer-{layer:05}.safetensors")
}

/// The tensors of one layer file, with the number of heads of each.
fn layer_specs(model: &Value, n: usize, options: &Options) -> Result<Vec<Spec>> {
    let size = |name: &str| Sizes::field(model, name);
    let (h, g, d) = (size("n_heads")?, size("n_kv_heads")?, size("head_dim")?);
    let dtype = match options.dtype {
        Float::F32 => Dtype::F32,
        Float::F16 => Dtype::F16,
        Float::Bf16 => Dtype::BF16,
    };
    let mut specs = vec![Spec::of("k_pre", dtype, &[g, n, d])];
    if options.queries {
        specs.push(Spec::of("q_pre", dtype, &[h, n, d]));
    }
    if options.values {
        specs.push(Spec::of("v", dtype, &[g, n, d]));
    }
    Ok(specs)
}

/// Sizes of a model as its manifest gives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Decoder layers.
    pub n_layers: usize,
    /// Query heads h.
    pub n_heads: usize,
    /// KV heads g.
    pub n_kv_heads: usize,
    /// Channels per head d.
    pub head_dim: usize,
}

impl Sizes {
    /// Reads the sizes of a manifest's `model` object.
    pub fn of(model: &Value) -> Result<Self> {
        let sizes = Self {
            n_layers: Self::field(model, "n_layers")?,
            n_heads: Self::field(model, "n_heads")?,
            n_kv_heads: Self::field(model, "n_kv_heads")?,
            head_dim: Self::field(model, "head_dim")?,
        };
        if sizes.n_heads.is_multiple_of(sizes.n_kv_heads) {
            Ok(sizes)
        } else {
            Err(Error::failed(
                "the manifest's `n_heads` is not a multiple of `n_kv_heads`",
            ))
        }
    }

    fn field(model: &Value, name: &str) -> Result<usize> {
        match model.get(name).and_then(Value::as_u64) {
            Some(n) if (1..1 << 31).contains(&n) => Ok(n as usize),
            _ => Err(Error::failed(format!("the manifest has no valid `model.{name}`"))),
        }
    }
}

/// Runs the model over the corpus and fills the dump folder.
///
/// # Errors
/// The disk is too small for it, or the model fails.
pub fn write(
    layers: &dyn Layers,
    device: &dyn Device,
    corpus: &Corpus,
    model: &Value,
    mut new: NewDump,
    options: &Options,
    log: Log,
) -> Result<()> {
    let decoder = layers.decoder();
    let c = &decoder.config;
    let n = corpus.n_tokens();
    let specs = layer_specs(model, n, options)?;
    check_space(&new.dir, &specs, c.n_layers)?;
    write_tokens(corpus, new.file("tokens.safetensors")?)?;

    let kept = corpus.kept();
    let mut moments = Moments {
        layers: Vec::with_capacity(c.n_layers),
        position: Position::Windowed(options.wrope_position),
        origin: json!({ "model": model, "calibration": corpus.manifest() }),
    };
    let progress = log.progress((n * c.n_layers) as u64, "tokens x layers");
    let mut capture = Capture::start(layers, corpus)?;
    for i in 0..c.n_layers {
        progress.stage(format!("layer {} of {}", i + 1, c.n_layers));
        let writer = Writer::new(new.file(&layer_file(i))?, specs.clone(), None)?;
        let mut sums = LayerMoments::new(c.n_kv_heads, c.head_dim);
        capture.layer(&progress, &mut |rows, states| {
            let position = Position::Windowed(options.wrope_position);
            let (q_pre, kept) = (states.q_pre.view(), &kept[rows.clone()]);
            sums.add(device, q_pre, kept, &decoder.rope, position)?;
            let put = |name, x: &Array3<f32>| put_rows(&writer, name, x.view(), rows.start, n, options.dtype);
            put("k_pre", &states.k_pre)?;
            if options.queries {
                put("q_pre", &states.q_pre)?;
            }
            if options.values {
                put("v", &states.v)?;
            }
            Ok(())
        })?;
        writer.finish()?;
        moments.layers.push(sums);
    }
    moments.write(new.file(MOMENTS)?)?;
    let manifest = json!({
        "format": FORMAT,
        "kind": "dump",
        "tool_version": env!("CARGO_PKG_VERSION"),
        "device": "cpu",
        "model": model,
        "calibration": corpus.manifest(),
        "dtype": options.dtype.name(),
        "queries": options.queries,
        "values": options.values,
        "wrope_position": options.wrope_position,
    });
    let text = serde_json::to_vec_pretty(&manifest).map_err(|e| Error::failed(e.to_string()))?;
    Output::create(&new.dir.join(MANIFEST))?.finish(&text)?;
    new.files.clear();
    Ok(())
}

/// A dump folder that is not complete yet; what was written goes if it never is.
pub struct NewDump {
    dir: PathBuf,
    /// Whether the folder was not there before.
    made: bool,
    files: Vec<PathBuf>,
}

impl NewDump {
    /// Makes the folder and finds out whether it can be written.
    ///
    /// # Errors
    /// It holds a dump already, or cannot be written.
    pub fn create(dir: &Path) -> Result<Self> {
        if dir.as_os_str().is_empty() {
            return Err(Error::usage("-o needs the name of a folder"));
        }
        if dir.join(MANIFEST).exists() {
            return Err(Error::failed(format!("{} already holds a dump", dir.display()))
                .hint("remove it or choose another folder with -o"));
        }
        let new = Self {
            dir: dir.to_path_buf(),
            made: !dir.exists(),
            files: Vec::new(),
        };
        std::fs::create_dir_all(dir).map_err(|e| Error::io(dir, "make the folder", &e))?;
        Output::create(&dir.join(MANIFEST))?;
        Ok(new)
    }

    /// Begins a file of the folder.
    fn file(&mut self, name: &str) -> Result<Output> {
        let path = self.dir.join(name);
        self.files.push(path.clone());
        Output::create(&path)
    }
}

impl Drop for NewDump {
    fn drop(&mut self) {
        // What cannot be removed is no dump all the same: the manifest is missing.
        for path in &self.files {
            let _ = std::fs::remove_file(path);
        }
        if self.made {
            let _ = std::fs::remove_dir(&self.dir);
        }
    }
}

/// Fails early if the disk cannot hold the dump.
fn check_space(dir: &Path, specs: &[Spec], n_layers: usize) -> Result<()> {
    let per_layer: usize = specs
        .iter()
        .map(|s| s.bytes().unwrap_or(usize::MAX))
        .fold(0, usize::saturating_add);
    let needed = per_layer as u128 * n_layers as u128;
    if let Some(free) = free_bytes(dir)
        && needed > u128::from(free)
    {
        return Err(Error::failed(format!(
            "the dump needs {:.1} GB, but {} has {:.1} GB free",
            needed as f64 / 1e9,
            dir.display(),
            free as f64 / 1e9
        ))
        .hint(
            "use fewer tokens, --dtype bf16, no --queries, or `kvsmith calibrate`, which writes no states",
        ));
    }
    Ok(())
}

/// Bytes that this user can still write on the file system of `dir`, if it tells.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(dir.as_os_str().as_bytes()).ok()?;
    // SAFETY: statvfs is a plain struct of integers, filled by the call; the path is a valid C string.
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(path.as_ptr(), &mut stat) != 0 {
            return None;
        }
        stat
    };
    Some(stat.f_bavail as u64 * stat.f_frsize as u64)
}

fn write_tokens(corpus: &Corpus, output: Output) -> Result<()> {
    let n = corpus.n_tokens();
    let held_out: Vec<u8> = corpus.kept().iter().map(|kept| u8::from(!kept)).collect();
    let tensors = [
        Tensor::new("ids", &[n], &corpus.ids),
        Tensor::new("position", &[n], &corpus.positions()),
        Tensor::new("block_start", &[corpus.block_start.len()], &corpus.block_start),
        Tensor::new("held_out", &[n], &held_out),
    ];
    store::write(output, &tensors, None)
}

/// Writes `[heads, m, d]` into rows `first..first + m` of a `[heads, n, d]` tensor.
fn put_rows(
    writer: &Writer,
    name: &str,
    x: ArrayView3<f32>,
    first: usize,
    n: usize,
    dtype: Float,
) -> Result<()> {
    let (_, m, d) = x.dim();
    let mut bytes = Vec::with_capacity(m * d * dtype.bytes());
    for (head, rows) in x.axis_iter(Axis(0)).enumerate() {
        bytes.clear();
        if let Some(values) = rows.as_slice() {
            dtype.write(values, &mut bytes);
        }
        writer.put(name, (head * n + first) * d * dtype.bytes(), &bytes)?;
    }
    Ok(())
}

/// A complete dump folder, opened for reading.
pub struct Dump {
    dir: PathBuf,
    /// The manifest's `model` object.
    pub model: Value,
    /// The manifest's `calibration` object.
    pub calibration: Value,
    /// Sizes of the model.
    pub sizes: Sizes,
    /// Rows of every state tensor.
    pub n: usize,
    /// Per row: whether it counts in fits.
    pub kept: Vec<bool>,
    /// First row of each block, then the number of rows.
    pub block_start: Vec<u32>,
    /// What the dump keeps.
    pub options: Options,
}

impl Dump {
    /// Opens a dump and checks its manifest and tokens.
    ///
    /// # Errors
    /// No complete dump there, or files that contradict each other.
    pub fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        if !path.is_file() {
            return Err(
                Error::failed(format!("{} does not hold a complete dump", dir.display()))
                    .hint("make one with `kvsmith dump`; an interrupted one has to be made again"),
            );
        }
        let manifest = read_json(&path)?;
        let invalid = |what: &str| Error::failed(format!("{}: {what}", path.display()));
        if manifest.get("format").and_then(Value::as_u64) != Some(FORMAT) {
            return Err(invalid(&format!("not a dump of format {FORMAT}"))
                .hint("make the dump again with this version"));
        }
        let model = manifest["model"].clone();
        let sizes = Sizes::of(&model).map_err(|e| e.context(path.display()))?;
        let flag = |name: &str| manifest.get(name).and_then(Value::as_bool);
        let dtype = match manifest.get("dtype").and_then(Value::as_str) {
            Some("F32") => Float::F32,
            Some("F16") => Float::F16,
            Some("BF16") => Float::Bf16,
            _ => return Err(invalid("`dtype` is not valid")),
        };
        let (Some(queries), Some(values), Some(position)) = (
            flag("queries"),
            flag("values"),
            manifest
                .get("wrope_position")
                .and_then(Value::as_u64)
                .filter(|p| *p <= u64::from(u32::MAX)),
        ) else {
            return Err(invalid("a field is missing"));
        };
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
        if manifest["calibration"].get("tokens").and_then(Value::as_u64) != Some(n as u64) {
            return Err(invalid("`calibration.tokens` does not fit tokens.safetensors"));
        }
        Ok(Self {
            dir: dir.to_path_buf(),
            calibration: manifest["calibration"].clone(),
            model,
            sizes,
            n,
            kept: held_out.iter().map(|h| *h == 0).collect(),
            block_start,
            options: Options {
                queries,
                values,
                dtype,
                wrope_position: position as usize,
            },
        })
    }

    /// The rotary embedding of the model.
    pub fn rope(&self) -> Result<Rope> {
        let config = RopeConfig::from_canonical(&self.model["rope"])?;
        Ok(Rope::new(&config, self.sizes.head_dim))
    }

    /// The sliding window of every layer; `None` = all positions are visible.
    pub fn windows(&self) -> Result<Vec<Option<usize>>> {
        let window = |v: &Value| match (v, v.as_u64()) {
            (Value::Null, _) => Some(None),
            (_, Some(w)) if w > 0 => Some(Some(usize::try_from(w).unwrap_or(usize::MAX))),
            _ => None,
        };
        self.model["windows"]
            .as_array()
            .filter(|all| all.len() == self.sizes.n_layers)
            .and_then(|all| all.iter().map(window).collect())
            .ok_or_else(|| {
                Error::failed(format!(
                    "{}: `model.windows` is not valid",
                    self.dir.join(MANIFEST).display()
                ))
            })
    }

    /// The `moments.safetensors` that was streamed while dumping.
    pub fn moments_path(&self) -> PathBuf {
        self.dir.join(MOMENTS)
    }

    /// Opens the states of one layer.
    pub fn layer(&self, layer: usize) -> Result<LayerDump> {
        let path = self.dir.join(layer_file(layer));
        let store = Store::open(&path)?;
        for spec in layer_specs(&self.model, self.n, &self.options)? {
            store.checked(&spec)?;
        }
        let file = File::open(&path).map_err(|e| Error::io(&path, "open", &e))?;
        let start = |name: &str| store.data_start(name);
        let starts = [start("k_pre"), start("q_pre"), start("v")];
        Ok(LayerDump {
            path,
            file,
            starts,
            n: self.n,
            d: self.sizes.head_dim,
            dtype: self.options.dtype,
        })
    }
}

/// Which state of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Pre-RoPE keys.
    KPre,
    /// Pre-RoPE queries.
    QPre,
    /// Values.
    V,
}

/// The states of one layer; read head by head.
pub struct LayerDump {
    path: PathBuf,
    file: File,
    starts: [Option<usize>; 3],
    n: usize,
    d: usize,
    dtype: Float,
}

impl LayerDump {
    /// Rows `first..first + count` of one head of a state, as f32: `[count, d]`.
    ///
    /// # Errors
    /// The dump does not keep this state; a value that is not finite.
    pub fn read(&self, state: State, head: usize, first: usize, count: usize) -> Result<Array2<f32>> {
        let (name, start) = match state {
            State::KPre => ("k_pre", self.starts[0]),
            State::QPre => ("q_pre", self.starts[1]),
            State::V => ("v", self.starts[2]),
        };
        let start = start.ok_or_else(|| {
            Error::failed(format!("the dump has no `{name}`"))
                .hint("make the dump with --queries and --values")
        })?;
        let row = self.d * self.dtype.bytes();
        let mut bytes = vec![0; count * row];
        self.file
            .read_exact_at(&mut bytes, (start + (head * self.n + first) * row) as u64)
            .map_err(|e| Error::io(&self.path, "read", &e))?;
        let mut values = vec![0.0; count * self.d];
        self.dtype.read(&bytes, &mut values);
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            return Err(Error::failed(format!(
                "{}: `{name}` of head {head} has a value that is not finite in row {}",
                self.path.display(),
                first + i / self.d
            ))
            .hint("the dump is damaged, or its dtype is too narrow for this model; try --dtype f32"));
        }
        Array2::from_shape_vec((count, self.d), values).map_err(|e| Error::failed(e.to_string()))
    }
}
