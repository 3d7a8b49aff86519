//! The tensors of a checkpoint, memory-mapped: a folder with one safetensors file, or with an index and shards, or a GGUF file.
//!
//! A [`Weight`] is a view of the mapped bytes; kernels widen its values as they read them. A layer
//! therefore takes no more memory than its file pages, which [`Weight::release`] gives back, unless [`Weight::hold`] copies it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use rayon::prelude::*;
use safetensors::SafeTensors;
use sha2::{Digest, Sha256};

use super::config::ModelConfig;
use super::fields::read_json;
use super::folder;
use super::gguf::Gguf;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::mapped::Mapped;
use crate::store::hex;
use crate::weight::{Bytes, Shard, Stored, Weight, stored_row};

struct Entry {
    shard: usize,
    /// The name of the type of the values.
    kind: String,
    /// How the values are stored, if this program reads them.
    stored: Option<Stored>,
    shape: Vec<usize>,
    start: usize,
    len: usize,
    /// The rows of a head, if the file alternates between the rows of a head's first and second half.
    alternating: Option<usize>,
}

/// The memory-mapped tensors of a checkpoint folder.
#[derive(Default)]
pub struct Checkpoint {
    shards: Vec<Arc<Shard>>,
    entries: BTreeMap<String, Entry>,
}

impl Checkpoint {
    /// Maps `model.safetensors`, or every shard that `model.safetensors.index.json` names, or a GGUF file.
    ///
    /// # Errors
    /// A missing or truncated file; a header that does not describe its file; an index that names a
    /// missing shard or tensor.
    pub fn open(dir: &Path) -> Result<Self> {
        if let Some(gguf) = Gguf::at(dir)? {
            return Self::of_gguf(&gguf);
        }
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let mut checkpoint = Self::default();
        if single.is_file() {
            checkpoint.add_shard(&single)?;
        } else if index.is_file() {
            checkpoint.add_index(dir, &index)?;
        } else {
            let neither = format!(
                "{} has neither model.safetensors nor model.safetensors.index.json",
                dir.display()
            );
            return Err(match folder::foreign(dir) {
                Some((what, hint)) => {
                    Error::not_found(format!("{neither}, but it contains {what}")).hint(hint)
                }
                None => Error::not_found(neither)
                    .hint("give the folder of a Hugging Face checkpoint that contains weights"),
            });
        }
        Ok(checkpoint)
    }

    fn of_gguf(gguf: &Gguf) -> Result<Self> {
        let entries = gguf.named()?.into_iter().map(|tensor| {
            let entry = Entry {
                shard: 0,
                kind: tensor.stored.name().to_owned(),
                stored: Some(tensor.stored),
                len: tensor.stored.bytes(tensor.shape.iter().product()),
                shape: tensor.shape,
                start: tensor.start,
                alternating: tensor.alternating,
            };
            (tensor.name, entry)
        });
        Ok(Self {
            entries: entries.collect(),
            shards: vec![gguf.shard()],
        })
    }

    fn add_index(&mut self, dir: &Path, index: &Path) -> Result<()> {
        let damaged = |what: String| {
            Error::damaged(format!("{}{what}", index.display()))
                .hint("the index is damaged or belongs to another checkpoint; download it again")
        };
        let value = read_json(index)?;
        let map = value["weight_map"]
            .as_object()
            .ok_or_else(|| damaged(" has no `weight_map`".to_owned()))?;
        let mut files: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            let file = file.as_str().filter(|f| !f.contains(['/', '\\']));
            let file = file.ok_or_else(|| damaged(format!(": `{tensor}` has no valid file name")))?;
            files.entry(file).or_default().push(tensor);
        }
        for (file, tensors) in files {
            let path = dir.join(file);
            if !path.is_file() {
                return Err(Error::not_found(format!(
                    "{} names {file}, which does not exist",
                    index.display()
                ))
                .hint("download the missing shard"));
            }
            self.add_shard(&path)?;
            if let Some(missing) = tensors.iter().find(|t| !self.entries.contains_key(**t)) {
                return Err(damaged(format!(
                    " says that {file} contains `{missing}`, but it does not"
                )));
            }
        }
        Ok(())
    }

    fn add_shard(&mut self, path: &Path) -> Result<()> {
        let file = File::open(path).map_err(|e| Error::io(path, "open", &e))?;
        let map = Mapped::new(&file, path).map_err(|e| Error::io(path, "map", &e))?;
        let damaged = |what: String| {
            Error::damaged(format!("{}: {what}", path.display()))
                .hint("the file is damaged or its download is incomplete; download it again")
        };
        let (header, metadata) = SafeTensors::read_metadata(&map)
            .map_err(|e| damaged(format!("not a valid safetensors file ({e})")))?;
        let data = 8 + header;
        let (described, found) = (metadata.data_len(), map.len() - data);
        if found != described {
            let what = format!("the header describes {described} bytes of tensors, but the file has {found}");
            return Err(damaged(what));
        }
        let shard = self.shards.len();
        for (name, info) in metadata.tensors() {
            let (a, b) = info.data_offsets;
            let entry = Entry {
                shard,
                kind: format!("{:?}", info.dtype),
                stored: Float::from_dtype(info.dtype).map(Stored::Float),
                shape: info.shape.clone(),
                start: data + a,
                len: b - a,
                alternating: None,
            };
            if self.entries.insert(name.clone(), entry).is_some() {
                return Err(damaged(format!(
                    "tensor `{name}` also occurs in an earlier shard"
                )));
            }
        }
        self.shards.push(Arc::new(Shard {
            path: path.to_path_buf(),
            file: Some(file),
            bytes: Bytes::Mapped(map),
        }));
        Ok(())
    }

    /// Says whether the checkpoint has a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name)
    }

    /// Returns the bytes of all tensors together.
    pub fn total_bytes(&self) -> usize {
        self.entries.values().map(|e| e.len).sum()
    }

    /// Returns a view of tensor `name`, which must have exactly `shape` (one or two axes).
    pub fn weight(&self, name: &str, shape: &[usize]) -> Result<Weight> {
        let differs = |what: String| {
            Error::mismatch(what).hint("use config.json and weights that belong to the same model")
        };
        let entry = self.entries.get(name);
        let entry = entry.ok_or_else(|| differs(format!("the checkpoint has no tensor `{name}`")))?;
        if entry.shape != shape {
            return Err(differs(format!(
                "tensor `{name}` has shape {:?}, but config.json requires {shape:?}",
                entry.shape
            )));
        }
        let stored = entry.stored.ok_or_else(|| {
            Error::unsupported(format!("tensor `{name}` has dtype {}", entry.kind))
                .hint("supported: BF16, F16, F32, and the quantised types of GGUF files")
        })?;
        let (rows, cols) = match shape {
            [n] => (1, *n),
            [rows, cols] => (*rows, *cols),
            _ => {
                return Err(Error::invalid(format!(
                    "tensor `{name}` has {} axes",
                    shape.len()
                )));
            }
        };
        Ok(Weight {
            file: Arc::clone(&self.shards[entry.shard]),
            start: entry.start,
            stored,
            rows,
            cols,
            // The elements of a vector are not rows.
            alternating: entry.alternating.filter(|_| shape.len() == 2),
            name: Arc::from(name),
        })
    }

    /// Reads a norm's or bias's vector `name` of `len` elements.
    ///
    /// # Errors
    /// Those of [`Checkpoint::weight`]; a value that is not finite.
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>> {
        let weight = self.weight(name, &[len])?;
        weight.check_finite()?;
        let values = weight.to_vec();
        let alternating = self.entries.get(name).and_then(|entry| entry.alternating);
        Ok((0..len).map(|i| values[stored_row(i, alternating)]).collect())
    }

    /// Returns the model's fingerprint: sha256 over the config fields that decide the forward pass and,
    /// for every tensor in the order of names, its name, dtype, shape and 4,096 of its bytes (byte i at
    /// floor(i x len / 4096); all bytes if it has fewer).
    ///
    /// It depends neither on the config's spelling nor on how the checkpoint is sharded.
    pub fn fingerprint(&self, config: &ModelConfig) -> Result<String> {
        let sample = |(_, e): (&String, &Entry)| self.sample(e);
        let samples: Vec<Result<Vec<u8>>> = self.entries.par_iter().map(sample).collect();
        let mut hash = Sha256::new();
        hash.update(config.canonical().to_string().as_bytes());
        for ((name, entry), bytes) in self.entries.iter().zip(samples) {
            hash.update(format!("\n{name} {} {:?}\n", entry.kind, entry.shape).as_bytes());
            hash.update(bytes?);
        }
        Ok(hex(&hash.finalize()))
    }

    /// Reads the bytes of a tensor that the fingerprint takes.
    fn sample(&self, entry: &Entry) -> Result<Vec<u8>> {
        const SAMPLES: usize = 4096;
        // Bytes between samples from which on each sample is read on its own.
        const SPARSE: usize = 4096;
        // Bytes per read where samples are denser.
        const SPAN: usize = 256 << 10;
        let shard = &self.shards[entry.shard];
        let Some(file) = &shard.file else {
            return Err(Error::internal("internal: the fingerprint of a temporary file"));
        };
        let mut samples = vec![0; entry.len.min(SAMPLES)];
        let distance = entry.len / SAMPLES;
        let group = if distance < SPARSE {
            SPAN / (distance + 1)
        } else {
            1
        };
        let offset = |i: usize| (i as u128 * entry.len as u128 / samples.len() as u128) as usize;
        let offsets: Vec<usize> = (0..samples.len()).map(offset).collect();
        let mut span = Vec::new();
        for (samples, offsets) in samples.chunks_mut(group).zip(offsets.chunks(group)) {
            let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
            span.resize(last - first + 1, 0);
            let read = file.read_exact_at(&mut span, (entry.start + first) as u64);
            read.map_err(|err| Error::io(&shard.path, "read", &err))?;
            for (sample, offset) in samples.iter_mut().zip(offsets) {
                *sample = span[offset - first];
            }
        }
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use safetensors::tensor::TensorView;
    use safetensors::{Dtype, serialize_to_file};

    use super::*;
    use crate::testing::numbers;

    /// Tensors whose samples are read at once, in spans and one by one.
    #[test]
    fn the_fingerprint_takes_the_bytes_of_the_definition() {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib-data/model");
        let config = ModelConfig::load(&config).expect("a config");
        let mut next = numbers(1);
        let tensors: BTreeMap<String, Vec<u8>> =
            [0, 1, 4095, 4096, 4097, 300_000, 5_000_001, 16_777_216, 17_000_000]
                .into_iter()
                .map(|n: usize| (format!("of_{n}"), (0..n).map(|_| (next() >> 24) as u8).collect()))
                .collect();
        let views = tensors.iter().map(|(name, bytes)| {
            let view = TensorView::new(Dtype::U8, vec![bytes.len()], bytes);
            (name, view.expect("a tensor"))
        });
        let dir = tempfile::tempdir().expect("a folder");
        serialize_to_file(views, None, &dir.path().join("model.safetensors")).expect("a file");

        let mut hash = Sha256::new();
        hash.update(config.canonical().to_string().as_bytes());
        for (name, bytes) in &tensors {
            hash.update(format!("\n{name} U8 [{}]\n", bytes.len()).as_bytes());
            let n = bytes.len().min(4096);
            let taken: Vec<u8> = (0..n).map(|i| bytes[i * bytes.len() / n]).collect();
            hash.update(taken);
        }
        let checkpoint = Checkpoint::open(dir.path()).expect("a checkpoint");
        let fingerprint = checkpoint.fingerprint(&config).expect("a fingerprint");
        assert_eq!(fingerprint, hex(&hash.finalize()));
    }
}
