//! GGUF files: a model in one file, with its configuration, tokenizer, chat template and, mostly quantised, weights.
//!
//! The metadata become what the files of a Hugging Face folder hold ([`config`], [`tokenizer`]), and the tensors get the names
//! of a Hugging Face checkpoint ([`tensors`]), so that everything else need not know where a model comes from. The layout is
//! that of version 2 and 3 of the format in ggml's `docs/gguf.md`; all numbers are little-endian.

pub mod config;
pub mod tensors;
pub mod tokenizer;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::error::{Error, Result};
use crate::float::Float;
use crate::mapped::Mapped;
use crate::quant::Quant;
use crate::weight::{Bytes, Shard, Stored};

/// The first bytes of a file.
const MAGIC: &[u8; 4] = b"GGUF";
/// Most elements of all arrays of the metadata together; vocabularies have some 300,000.
const MOST_ELEMENTS: usize = 1 << 23;
/// Most fields of the metadata and most tensors.
const MOST_ENTRIES: u64 = 1 << 20;
/// The hint for a file that contradicts itself.
const DAMAGED: &str = "the file is damaged or its download is incomplete; download it again";

/// An opened GGUF file.
pub struct Gguf {
    path: PathBuf,
    /// The metadata.
    fields: Map<String, Value>,
    tensors: BTreeMap<String, TensorPlace>,
    file: Arc<Shard>,
}

/// Where a tensor is in its file.
#[derive(Clone, Debug)]
struct TensorPlace {
    stored: Stored,
    /// The axes, the last of which is contiguous.
    shape: Vec<usize>,
    /// First byte in the file.
    start: usize,
}

/// Says whether a path is a GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    let mut start = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    path.is_file() && read.is_ok() && &start == MAGIC
}

impl Gguf {
    /// Opens the file at `path`, or returns `None` if that is no GGUF file.
    ///
    /// # Errors
    /// A file that is truncated or contradicts itself; a part of a split model; a type of tensors that is not supported.
    pub fn at(path: &Path) -> Result<Option<Self>> {
        is_gguf(path).then(|| Self::open(path)).transpose()
    }

    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io(path, "open", &e))?;
        let map = Mapped::new(&file, path).map_err(|e| Error::io(path, "map", &e))?;
        let described = Header::read(&map).map_err(|e| e.context(path.display()).or_hint(DAMAGED))?;
        let (fields, tensors) = described;
        Ok(Self {
            path: path.to_path_buf(),
            fields,
            tensors,
            file: Arc::new(Shard {
                path: path.to_path_buf(),
                file: Some(file),
                bytes: Bytes::Mapped(map),
            }),
        })
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns a field of the metadata.
    fn field(&self, name: &str) -> Option<&Value> {
        self.fields.get(name)
    }

    /// Returns a field that is a text.
    fn text(&self, name: &str) -> Option<&str> {
        self.field(name).and_then(Value::as_str)
    }

    /// Makes the error for something that this program does not support.
    fn unsupported(&self, what: impl std::fmt::Display) -> Error {
        Error::damaged(format!("{}: {what}", self.path.display()))
    }
}

/// Reads the part of a file before the tensors.
struct Header<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Array elements that may follow.
    elements: usize,
}

type Described = (Map<String, Value>, BTreeMap<String, TensorPlace>);

impl<'a> Header<'a> {
    fn read(bytes: &'a [u8]) -> Result<Described> {
        let mut header = Self {
            bytes,
            at: MAGIC.len(),
            elements: MOST_ELEMENTS,
        };
        let version = header.u32()?;
        if !(2..=3).contains(&version) {
            let big_endian = version.swap_bytes() <= 3;
            return Err(
                Error::unsupported(format!("GGUF version {version} is not supported")).hint(if big_endian {
                    "the file is big-endian; convert the model on this machine"
                } else {
                    "supported: versions 2 and 3; convert the model with a current llama.cpp"
                }),
            );
        }
        let (n_tensors, n_fields) = (header.u64()?, header.u64()?);
        if n_tensors.max(n_fields) > MOST_ENTRIES {
            return Err(Error::damaged(format!(
                "{n_tensors} tensors and {n_fields} fields are too many"
            )));
        }
        let mut fields = Map::new();
        for _ in 0..n_fields {
            let name = header.text()?;
            let kind = header.u32()?;
            let value = header.value(kind, true).map_err(|e| e.context(&name))?;
            if fields.insert(name.clone(), value).is_some() {
                return Err(Error::damaged(format!("field `{name}` occurs twice")));
            }
        }
        if fields
            .get("split.count")
            .and_then(Value::as_u64)
            .is_some_and(|n| n > 1)
        {
            return Err(Error::unsupported("the file is one of several parts of a model")
                .hint("join the parts with `llama-gguf-split --merge`"));
        }
        let mut places = Vec::new();
        for _ in 0..n_tensors {
            let name = header.text()?;
            let place = header
                .tensor()
                .map_err(|e| e.context(format!("tensor `{name}`")))?;
            places.push((name, place));
        }
        let alignment = fields.get("general.alignment").map_or(Some(32), Value::as_u64);
        let alignment = alignment.filter(|n| n.is_power_of_two() && *n <= 1 << 20);
        let alignment =
            alignment.ok_or_else(|| Error::damaged("`general.alignment` is not a power of two"))?;
        let data = header.at.next_multiple_of(alignment as usize);
        let mut tensors = BTreeMap::new();
        for (name, mut place) in places {
            let values = place.shape.iter().product();
            let end = (place.start as u64)
                .checked_add(data as u64)
                .and_then(|start| start.checked_add(place.stored.bytes(values) as u64));
            if !place.start.is_multiple_of(alignment as usize)
                || end.is_none_or(|end| end > bytes.len() as u64)
            {
                return Err(Error::damaged(format!(
                    "tensor `{name}` is outside the file, which has {} bytes",
                    bytes.len()
                )));
            }
            place.start += data;
            if tensors.insert(name.clone(), place).is_some() {
                return Err(Error::damaged(format!("tensor `{name}` occurs twice")));
            }
        }
        Ok((fields, tensors))
    }

    fn tensor(&mut self) -> Result<TensorPlace> {
        let axes = self.u32()?;
        if !(1..=4).contains(&axes) {
            return Err(Error::damaged(format!("{axes} axes, of which there are 1 to 4")));
        }
        let mut shape = (0..axes)
            .map(|_| self.u64().map(|n| usize::try_from(n).unwrap_or(usize::MAX)))
            .collect::<Result<Vec<usize>>>()?;
        // The first one is contiguous in the file.
        shape.reverse();
        let values = shape.iter().try_fold(1usize, |all, n| all.checked_mul(*n));
        if values.is_none_or(|n| n > 1 << 48) {
            return Err(Error::damaged(format!("shape {shape:?} is too large")));
        }
        let stored = stored(self.u32()?)?;
        let start = self.u64()?;
        let (block, _) = match stored {
            Stored::Quant(quant) => quant.block(),
            Stored::Float(_) => (1, 0),
        };
        let columns = shape.last().copied().unwrap_or_default();
        if !columns.is_multiple_of(block) {
            return Err(Error::damaged(format!(
                "rows of {columns} values are not whole blocks of {}",
                stored.name()
            )));
        }
        Ok(TensorPlace {
            stored,
            shape,
            start: usize::try_from(start).unwrap_or(usize::MAX),
        })
    }

    /// Reads a value of a type; `nests` says whether it may be an array.
    fn value(&mut self, kind: u32, nests: bool) -> Result<Value> {
        Ok(match kind {
            0 => self.take::<1>()?[0].into(),
            1 => i8::from_le_bytes(self.take()?).into(),
            2 => u16::from_le_bytes(self.take()?).into(),
            3 => i16::from_le_bytes(self.take()?).into(),
            4 => self.u32()?.into(),
            5 => i32::from_le_bytes(self.take()?).into(),
            6 => number(f32::from_le_bytes(self.take()?)),
            7 => match self.take::<1>()? {
                [0] => false.into(),
                [1] => true.into(),
                [other] => return Err(Error::damaged(format!("{other} is neither true nor false"))),
            },
            8 => self.text()?.into(),
            9 if nests => {
                let (kind, count) = (self.u32()?, self.u64()?);
                let left = self.elements;
                let count = usize::try_from(count).ok().filter(|n| *n <= left);
                let count = count.ok_or_else(|| {
                    Error::damaged(format!(
                        "the arrays of the metadata have more than {MOST_ELEMENTS} elements"
                    ))
                })?;
                self.elements -= count;
                Value::Array(
                    (0..count)
                        .map(|_| self.value(kind, false))
                        .collect::<Result<_>>()?,
                )
            }
            10 => self.u64()?.into(),
            11 => i64::from_le_bytes(self.take()?).into(),
            12 => f64::from_le_bytes(self.take()?).into(),
            other => {
                return Err(Error::unsupported(format!(
                    "values of type {other} are not supported"
                )));
            }
        })
    }

    fn text(&mut self) -> Result<String> {
        let length = self.u64()?;
        let bytes = self.bytes(length)?;
        let text = std::str::from_utf8(bytes);
        text.map(str::to_owned)
            .map_err(|_| Error::damaged(format!("a text at byte {} is not UTF-8", self.at)))
    }

    fn u32(&mut self) -> Result<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N as u64)?);
        Ok(out)
    }

    fn bytes(&mut self, count: u64) -> Result<&'a [u8]> {
        let rest = &self.bytes[self.at..];
        let count = usize::try_from(count).ok().filter(|n| *n <= rest.len());
        let count = count.ok_or_else(|| Error::damaged("the file ends before its header does"))?;
        self.at += count;
        Ok(&rest[..count])
    }
}

/// Widens a number as it is written: 0.00001 stays that.
fn number(x: f32) -> Value {
    let shortest = x.to_string().parse::<f64>();
    shortest.ok().filter(|x| x.is_finite()).into()
}

/// Returns the type of values with a number.
fn stored(number: u32) -> Result<Stored> {
    let float = match number {
        0 => Some(Float::F32),
        1 => Some(Float::F16),
        30 => Some(Float::Bf16),
        _ => None,
    };
    let quant = || Quant::ALL.iter().find(|(_, own)| *own == number);
    let found = float
        .map(Stored::Float)
        .or_else(|| quant().map(|(quant, _)| Stored::Quant(*quant)));
    found.ok_or_else(|| {
        let names: Vec<&str> = Quant::ALL.iter().map(|(quant, _)| quant.name()).collect();
        let name = match number {
            10 => "Q2_K".to_owned(),
            11 => "Q3_K".to_owned(),
            20 | 23 => "IQ4".to_owned(),
            _ => format!("number {number}"),
        };
        Error::unsupported(format!("its type, {name}, is not supported"))
            .hint(format!("supported: F32, F16, BF16, {}", names.join(", ")))
    })
}
