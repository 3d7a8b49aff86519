//! The tensors of a checkpoint folder: one safetensors file or an index with shards, memory-mapped.
//!
//! Nothing is expanded to f32 here. A [`Weight`] is a view of the mapped bytes; the kernels convert
//! what they need when they need it, so a layer costs no more memory than its file pages, which
//! [`Checkpoint::release`] hands back.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::{bf16, f16};
use memmap2::{Advice, Mmap, UncheckedAdvice};
use ndarray::ArrayView2;
use rayon::prelude::*;
use safetensors::{Dtype, SafeTensors};
use sha2::{Digest, Sha256};

use super::config::ModelConfig;
use super::fields::read_json;
use crate::error::{Error, Result};

/// Element type of a stored tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Float {
    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Converts `bytes` (little-endian, `out.len()` elements) to f32.
    pub fn read(self, bytes: &[u8], out: &mut [f32]) {
        debug_assert_eq!(bytes.len(), out.len() * self.bytes());
        match self {
            Self::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                }
            }
            Self::Bf16 => widen_bf16(bytes, out),
            Self::F16 => {
                for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
                }
            }
        }
    }

    /// Converts f32 values to little-endian bytes of this type, rounding to nearest even.
    pub fn write(self, values: &[f32], out: &mut Vec<u8>) {
        match self {
            Self::F32 => out.extend(values.iter().flat_map(|v| v.to_le_bytes())),
            Self::F16 => out.extend(values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes())),
            Self::Bf16 => out.extend(values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes())),
        }
    }

    /// The safetensors name of this type.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }

    fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::F32 => Some(Self::F32),
            Dtype::F16 => Some(Self::F16),
            Dtype::BF16 => Some(Self::Bf16),
            _ => None,
        }
    }
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw", "x86_64+avx2"))]
fn widen_bf16(bytes: &[u8], out: &mut [f32]) {
    for (o, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
        *o = f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16);
    }
}

/// A view of a float tensor in a mapped checkpoint file.
#[derive(Clone)]
pub struct Weight {
    file: Arc<Shard>,
    /// First byte of the tensor in its file.
    start: usize,
    dtype: Float,
    rows: usize,
    cols: usize,
    name: Arc<str>,
}

impl Weight {
    /// Values without a checkpoint, in a file that goes with them.
    ///
    /// # Shapes
    /// values `[rows, cols]`.
    ///
    /// # Errors
    /// No room for temporary files.
    pub fn from_values(values: ArrayView2<f32>, dtype: Float) -> Result<Self> {
        let failed = |e: std::io::Error| {
            Error::failed(format!("cannot write a temporary file: {e}"))
                .hint("TMPDIR names another folder for them")
        };
        let mut file = tempfile::tempfile().map_err(failed)?;
        let mut bytes = Vec::new();
        for row in values.rows() {
            bytes.clear();
            dtype.write(&row.to_vec(), &mut bytes);
            file.write_all(&bytes).map_err(failed)?;
        }
        // SAFETY: the mapping is read-only, and no other program knows of the file.
        let map = unsafe { Mmap::map(&file) }.map_err(failed)?;
        Ok(Self {
            file: Arc::new(Shard {
                path: PathBuf::new(),
                file,
                map,
            }),
            start: 0,
            dtype,
            rows: values.nrows(),
            cols: values.ncols(),
            name: "".into(),
        })
    }

    /// Rows (the output channels of a projection); 1 for a vector.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (the input channels of a projection).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Stored element type.
    pub fn dtype(&self) -> Float {
        self.dtype
    }

    /// Name in the checkpoint.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The stored bytes of `count` rows from `first` on.
    pub fn row_bytes(&self, first: usize, count: usize) -> &[u8] {
        let row = self.cols * self.dtype.bytes();
        &self.file.map[self.start + first * row..self.start + (first + count) * row]
    }

    /// All values as f32.
    pub fn to_vec(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        self.dtype.read(self.row_bytes(0, self.rows), &mut out);
        out
    }

    /// Fails at the first NaN or infinite element.
    pub fn check_finite(&self) -> Result<()> {
        let mut row = vec![0.0; self.cols];
        for r in 0..self.rows {
            self.dtype.read(self.row_bytes(r, 1), &mut row);
            if let Some(c) = row.iter().position(|v| !v.is_finite()) {
                return Err(Error::failed(format!(
                    "tensor `{}` has a value that is not finite (element {})",
                    self.name,
                    r * self.cols + c
                ))
                .hint("the checkpoint is damaged; fetch it again"));
            }
        }
        Ok(())
    }
}

struct Shard {
    path: PathBuf,
    file: File,
    map: Mmap,
}

struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    start: usize,
    len: usize,
}

/// All tensors of a checkpoint folder.
pub struct Checkpoint {
    shards: Vec<Arc<Shard>>,
    entries: BTreeMap<String, Entry>,
}

impl Checkpoint {
    /// Maps `model.safetensors`, or every shard that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// A missing or truncated file, a header that does not describe its file, an index that names
    /// a missing shard or tensor.
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let mut checkpoint = Self {
            shards: Vec::new(),
            entries: BTreeMap::new(),
        };
        if single.is_file() {
            checkpoint.add_shard(&single)?;
        } else if index.is_file() {
            checkpoint.add_index(dir, &index)?;
        } else {
            let mut error = Error::failed(format!(
                "{} has neither model.safetensors nor model.safetensors.index.json",
                dir.display()
            ));
            if dir.join("pytorch_model.bin").is_file() {
                error = error.hint("convert pytorch_model.bin to safetensors first");
            }
            return Err(error);
        }
        Ok(checkpoint)
    }

    fn add_index(&mut self, dir: &Path, index: &Path) -> Result<()> {
        let value = read_json(index)?;
        let map = value
            .get("weight_map")
            .and_then(|m| m.as_object())
            .ok_or_else(|| Error::failed(format!("{} has no `weight_map`", index.display())))?;
        let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            let file = file
                .as_str()
                .filter(|f| !f.contains(['/', '\\']))
                .ok_or_else(|| {
                    Error::failed(format!("{}: `{tensor}` has no valid file name", index.display()))
                })?;
            files.entry(file).or_default().push(tensor);
        }
        for (file, tensors) in files {
            let path = dir.join(file);
            if !path.is_file() {
                return Err(
                    Error::failed(format!("{} names {file}, which does not exist", index.display()))
                        .hint("download the missing shard"),
                );
            }
            self.add_shard(&path)?;
            if let Some(missing) = tensors.iter().find(|t| !self.entries.contains_key(**t)) {
                return Err(Error::failed(format!(
                    "{} says that {file} holds `{missing}`, but it does not",
                    index.display()
                )));
            }
        }
        Ok(())
    }

    fn add_shard(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(|e| Error::io(path, "open", &e))?;
        // SAFETY: the mapping is read-only; a file changed by another program while it is mapped
        // changes values we read, which every consumer treats as plain data.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, "map", &e))?;
        let damaged = |what: String| {
            Error::failed(format!("{}: {what}", path.display()))
                .hint("the file is damaged or its download is not complete; fetch it again")
        };
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| damaged(format!("not a valid safetensors file ({e})")))?;
        let data = 8 + header;
        let described = metadata.data_len();
        if map.len() - data != described {
            return Err(damaged(format!(
                "the header describes {described} bytes of tensors, the file has {}",
                map.len() - data
            )));
        }
        let shard = self.shards.len();
        for (name, info) in metadata.tensors() {
            let (a, b) = info.data_offsets;
            let entry = Entry {
                shard,
                dtype: info.dtype,
                shape: info.shape.clone(),
                start: data + a,
                len: b - a,
            };
            if self.entries.insert(name.clone(), entry).is_some() {
                return Err(damaged(format!("tensor `{name}` stands in an earlier shard too")));
            }
        }
        self.shards.push(Arc::new(Shard {
            path: path.to_path_buf(),
            file,
            map,
        }));
        Ok(())
    }

    /// Whether a tensor of this name exists.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> usize {
        self.entries.values().map(|e| e.len).sum()
    }

    /// A view of tensor `name`, which must have exactly `shape` (one or two axes).
    pub fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        let entry = self.entries.get(name).ok_or_else(|| {
            Error::failed(format!("the checkpoint has no tensor `{name}`"))
                .hint("config.json and the weights must belong to the same model")
        })?;
        if entry.shape != shape {
            return Err(Error::failed(format!(
                "tensor `{name}` has shape {:?}, but config.json asks for {shape:?}",
                entry.shape
            ))
            .hint("config.json and the weights must belong to the same model"));
        }
        let dtype = Float::of(entry.dtype).ok_or_else(|| {
            Error::failed(format!("tensor `{name}` has dtype {:?}", entry.dtype))
                .hint("supported: BF16, F16, F32 (quantised checkpoints are not)")
        })?;
        let (rows, cols) = match shape {
            [n] => (1, *n),
            [rows, cols] => (*rows, *cols),
            _ => return Err(Error::failed(format!("tensor `{name}` has {} axes", shape.len()))),
        };
        Ok(Weight {
            file: Arc::clone(&self.shards[entry.shard]),
            start: entry.start,
            dtype,
            rows,
            cols,
            name: Arc::from(name),
        })
    }

    /// The values of a vector `name` of `len` elements: a norm or a bias.
    ///
    /// # Errors
    /// As [`Checkpoint::weight`]; a value that is not finite.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let weight = self.weight(name, &[len])?;
        weight.check_finite()?;
        Ok(weight.to_vec())
    }

    /// Tells the kernel that the pages of `weights` are not needed any more.
    ///
    /// They are re-read from the file if they are touched again.
    pub fn release(weights: &[&Weight]) {
        for w in weights {
            let len = w.rows * w.cols * w.dtype.bytes();
            // SAFETY: the mapping is private, read-only and file-backed: dropped pages come back
            // with the same contents on the next access.
            let advised = unsafe {
                w.file
                    .map
                    .unchecked_advise_range(UncheckedAdvice::DontNeed, w.start, len)
            };
            // Advice that the kernel does not take costs memory, never correctness.
            let _ = advised;
        }
    }

    /// Tells the kernel that `weight` is read at scattered rows, so that it reads no more than asked.
    pub fn scattered(weight: &Weight) {
        let len = weight.rows * weight.cols * weight.dtype.bytes();
        let _ = weight.file.map.advise_range(Advice::Random, weight.start, len);
    }

    /// Identifies the model: sha256 over the config fields that shape the forward pass and, for
    /// every tensor in name order, its name, dtype, shape and 4,096 of its bytes (byte i at
    /// floor(i x len / 4096), all bytes if fewer).
    ///
    /// Config spelling and sharding do not change it.
    pub fn fingerprint(&self, config: &ModelConfig) -> Result<String> {
        const SAMPLES: u128 = 4096;
        let samples: Vec<Result<Vec<u8>>> = self
            .entries
            .par_iter()
            .map(|(_, e)| {
                let shard = &self.shards[e.shard];
                let read = |bytes: &mut [u8], at: usize| {
                    shard
                        .file
                        .read_exact_at(bytes, at as u64)
                        .map_err(|err| Error::io(&shard.path, "read", &err))
                };
                if e.len as u128 <= SAMPLES {
                    let mut bytes = vec![0; e.len];
                    read(&mut bytes, e.start)?;
                    return Ok(bytes);
                }
                let mut bytes = vec![0; SAMPLES as usize];
                for (i, byte) in bytes.iter_mut().enumerate() {
                    let offset = (i as u128 * e.len as u128 / SAMPLES) as usize;
                    read(std::slice::from_mut(byte), e.start + offset)?;
                }
                Ok(bytes)
            })
            .collect();
        let mut hash = Sha256::new();
        hash.update(config.canonical().to_string().as_bytes());
        for ((name, entry), bytes) in self.entries.iter().zip(samples) {
            hash.update(format!("\n{name} {:?} {:?}\n", entry.dtype, entry.shape).as_bytes());
            hash.update(bytes?);
        }
        Ok(hex(&hash.finalize()))
    }
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
