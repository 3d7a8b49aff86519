//! kvsmith's own safetensors files. They are written in one canonical form to a temporary file that is
//! renamed when complete, and every length is checked when they are read.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use half::f16;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::disk::{self, Output};
use crate::error::{Error, Result};
use crate::mapped::Mapped;

/// Key of kvsmith's JSON in `__metadata__`.
pub const METADATA_KEY: &str = "kvsmith";

// Values are copied between memory and files without conversion.
const _: () = assert!(cfg!(target_endian = "little"), "tensors are little-endian");

/// An element type of kvsmith's tensors.
pub trait Element: Pod {
    /// The safetensors type.
    const DTYPE: Dtype;
}

macro_rules! element {
    ($type:ty, $dtype:expr) => {
        impl Element for $type {
            const DTYPE: Dtype = $dtype;
        }
    };
}
element!(u8, Dtype::U8);
element!(u32, Dtype::U32);
element!(u64, Dtype::U64);
element!(f16, Dtype::F16);
element!(f32, Dtype::F32);
element!(f64, Dtype::F64);

/// Converts a slice to little-endian bytes.
pub fn to_bytes<T: Element>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// Name, type and shape of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Spec {
    /// Tensor name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Sizes of its axes.
    pub shape: Vec<usize>,
}

impl Spec {
    /// Describes a tensor of elements `T`.
    pub fn new<T: Element>(name: &str, shape: &[usize]) -> Self {
        Self::with_dtype(name, T::DTYPE, shape)
    }

    /// Describes a tensor whose type is known only at run time.
    pub fn with_dtype(name: &str, dtype: Dtype, shape: &[usize]) -> Self {
        Self {
            name: name.to_string(),
            dtype,
            shape: shape.to_vec(),
        }
    }

    /// Returns the bytes that the data take; `None` if the number overflows.
    pub fn bytes(&self) -> Option<usize> {
        let element = self.dtype.bitsize() / 8;
        let mut axes = self.shape.iter();
        axes.try_fold(element, |product, axis| product.checked_mul(*axis))
    }
}

/// Adds up the bytes of tensors; the largest number if the sum overflows.
pub fn total_bytes<'a>(specs: impl IntoIterator<Item = &'a Spec>) -> usize {
    let bytes = specs.into_iter().map(|s| s.bytes().unwrap_or(usize::MAX));
    bytes.fold(0, usize::saturating_add)
}

/// Builds the canonical header of `specs`: tensors of wider types come first, which keeps all data aligned, and tensors
/// of equally wide types are sorted by name.
///
/// Returns the file's first bytes, the offset in the file of each tensor's data, and the file's length.
fn header(specs: &[Spec], metadata: Option<&str>) -> Result<(Vec<u8>, BTreeMap<String, usize>, usize)> {
    let mut order: Vec<&Spec> = specs.iter().collect();
    order.sort_by_key(|spec| (Reverse(spec.dtype.bitsize()), &spec.name));
    let mut map = BTreeMap::new();
    if let Some(text) = metadata {
        map.insert("__metadata__".to_string(), json!({ METADATA_KEY: text }));
    }
    let mut offsets = BTreeMap::new();
    let mut at = 0usize;
    for spec in order {
        let too_large = || Error::invalid(format!("tensor `{}` {:?} is too large", spec.name, spec.shape));
        let end = spec
            .bytes()
            .and_then(|len| at.checked_add(len))
            .ok_or_else(too_large)?;
        let entry = json!({
            "dtype": format!("{:?}", spec.dtype), "shape": spec.shape, "data_offsets": [at, end],
        });
        map.insert(spec.name.clone(), entry);
        offsets.insert(spec.name.clone(), at);
        at = end;
    }
    let mut text = json!(map).to_string().into_bytes();
    while !text.len().is_multiple_of(8) {
        text.push(b' ');
    }
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text);
    let start = bytes.len();
    offsets.values_mut().for_each(|offset| *offset += start);
    Ok((bytes, offsets, start + at))
}

/// A safetensors file whose tensors are filled in piece by piece.
pub struct Writer {
    output: Output,
    /// The offset in the file of each tensor's data.
    offsets: BTreeMap<String, usize>,
}

impl Writer {
    /// Starts a file of the tensors `specs` in `output` and reserves its whole size on the disk.
    ///
    /// # Errors
    /// The disk has too little space.
    pub fn new(output: Output, specs: &[Spec], metadata: Option<&str>) -> Result<Self> {
        let (bytes, offsets, len) = header(specs, metadata)?;
        let io = |e: std::io::Error| Error::io(output.path(), "write", &e);
        disk::reserve(output.file(), len).map_err(io)?;
        disk::write_all_at(output.file(), &bytes, 0).map_err(io)?;
        Ok(Self { output, offsets })
    }

    /// Writes `bytes` into tensor `name`, from byte `at` of its data on.
    pub fn put(&self, name: &str, at: usize, bytes: &[u8]) -> Result<()> {
        let path = self.output.path();
        let missing = || Error::internal(format!("internal: no tensor `{name}` in {}", path.display()));
        let start = self.offsets.get(name).ok_or_else(missing)?;
        let written = disk::write_all_at(self.output.file(), bytes, (start + at) as u64);
        written.map_err(|e| Error::io(path, "write", &e))
    }

    /// Returns the temporary path that the file has until it is complete.
    pub fn unfinished(&self) -> &Path {
        self.output.unfinished()
    }

    /// Renames the complete file to its final name.
    pub fn finish(self) -> Result<()> {
        self.output.persist().map(drop)
    }

    /// Finishes the file if `check` accepts it under its temporary name.
    ///
    /// # Errors
    /// The check fails; the file is then removed.
    pub fn finish_checked(self, check: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        self.check(check)?;
        self.finish()
    }

    /// Checks the file under its temporary name.
    ///
    /// # Errors
    /// The check fails.
    pub fn check(&self, check: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        check(self.output.unfinished()).map_err(|e| {
            let place = self.output.unfinished().display().to_string();
            let what = e
                .to_string()
                .replace(&place, &self.output.path().display().to_string());
            let error = Error::invalid(format!(
                "the file was not written, because it would be invalid: {what}"
            ));
            error.hint(
                "inspect the model's keys, queries and values with `kvsmith dump`; the fit cannot use them",
            )
        })
    }
}

/// A tensor with its data, ready to be written.
pub struct Tensor {
    /// Name, type and shape.
    pub spec: Spec,
    /// Little-endian data.
    pub bytes: Vec<u8>,
}

impl Tensor {
    /// Makes a tensor from its values, row-major.
    pub fn new<T: Element>(name: &str, shape: &[usize], values: &[T]) -> Self {
        debug_assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        Self {
            spec: Spec::new::<T>(name, shape),
            bytes: to_bytes(values),
        }
    }

    /// Returns the sha256 of the data, in hexadecimal.
    pub fn digest(&self) -> String {
        hex(&Sha256::digest(&self.bytes))
    }
}

/// Writes whole tensors and the metadata into `output` and finishes it.
pub fn write(output: Output, tensors: &[Tensor], metadata: Option<&str>) -> Result<()> {
    fill(output, tensors, metadata)?.finish()
}

/// Writes whole tensors and the metadata into `output`; the caller then finishes the file.
pub fn fill(output: Output, tensors: &[Tensor], metadata: Option<&str>) -> Result<Writer> {
    let specs: Vec<Spec> = tensors.iter().map(|t| t.spec.clone()).collect();
    let writer = Writer::new(output, &specs, metadata)?;
    for t in tensors {
        writer.put(&t.spec.name, 0, &t.bytes)?;
    }
    Ok(writer)
}

/// A memory-mapped safetensors file.
pub struct Store {
    path: PathBuf,
    map: Mapped,
    specs: BTreeMap<String, (Spec, usize, usize)>,
    metadata: Option<String>,
    header_len: usize,
}

impl Store {
    /// Maps a file and checks its header.
    ///
    /// # Errors
    /// A missing file, or a header that does not describe exactly the file's data.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() {
            return Err(Error::invalid(format!("{} is a folder", path.display())).hint("give a file instead"));
        }
        let file = File::open(path).map_err(|e| Error::io(path, "open", &e))?;
        let map = Mapped::new(&file, path).map_err(|e| Error::io(path, "read", &e))?;
        let (header, info) = SafeTensors::read_metadata(&map).map_err(|e| {
            Error::damaged(format!(
                "{} is not a valid safetensors file ({e})",
                path.display()
            ))
            .hint("the file is damaged or of another kind; give another file, or recreate it")
        })?;
        let start = 8 + header;
        let (described, found) = (info.data_len(), map.len() - start);
        if found != described {
            let what = format!("the header describes {described} bytes of tensors, but the file has {found}");
            let error = Error::damaged(what).context(path.display());
            return Err(error.hint("the file is damaged or incomplete; recreate it"));
        }
        let metadata = info
            .metadata()
            .as_ref()
            .and_then(|m| m.get(METADATA_KEY).cloned());
        let tensors = info.tensors().into_iter().map(|(name, t)| {
            let (a, b) = t.data_offsets;
            let spec = Spec::with_dtype(&name, t.dtype, &t.shape);
            (name, (spec, start + a, start + b))
        });
        let specs = tensors.collect();
        Ok(Self {
            path: path.to_path_buf(),
            specs,
            metadata,
            header_len: start,
            map,
        })
    }

    /// Fails unless the header is byte for byte the canonical one of these tensors.
    pub fn check_canonical(&self) -> Result<()> {
        let specs: Vec<Spec> = self.specs.values().map(|(s, ..)| s.clone()).collect();
        let (bytes, ..) = header(&specs, self.metadata.as_deref())?;
        if bytes == self.map[..self.header_len] {
            return Ok(());
        }
        Err(Error::damaged(format!(
            "{}: the header was modified after the file was written",
            self.path.display()
        ))
        .hint("the file is damaged; recreate it"))
    }

    /// Returns the file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file's size in bytes.
    pub fn file_bytes(&self) -> usize {
        self.map.len()
    }

    /// Returns the text of kvsmith's JSON in the header.
    pub fn metadata(&self) -> Option<&str> {
        self.metadata.as_deref()
    }

    /// Parses kvsmith's JSON in the header.
    ///
    /// # Errors
    /// The header has no such JSON, or the JSON is not an object.
    pub fn manifest(&self) -> Result<Value> {
        let text = self.metadata.as_ref().ok_or_else(|| {
            Error::damaged(format!("{} was not written by kvsmith", self.path.display()))
                .hint("give a file made by `kvsmith calibrate`, `pack`, `codebook` or `moments`")
        })?;
        match serde_json::from_str(text) {
            Ok(value @ Value::Object(_)) => Ok(value),
            _ => Err(
                Error::damaged(format!("{}: its manifest is not valid JSON", self.path.display()))
                    .hint("the file is damaged; recreate it"),
            ),
        }
    }

    /// Lists the tensors' names, types and shapes, sorted by name.
    pub fn specs(&self) -> impl Iterator<Item = &Spec> {
        self.specs.values().map(|(s, ..)| s)
    }

    /// Returns the bytes of a tensor's data.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        self.specs.get(name).map(|(_, a, b)| &self.map[*a..*b])
    }

    /// Returns the sha256 of a tensor's data, in hexadecimal.
    pub fn digest(&self, name: &str) -> Option<String> {
        self.bytes(name).map(|data| hex(&Sha256::digest(data)))
    }

    /// Returns the offset in the file of a tensor's data.
    pub fn data_start(&self, name: &str) -> Option<usize> {
        self.specs.get(name).map(|(_, a, _)| *a)
    }

    /// Reads a whole tensor, which must have type `T` and this shape.
    pub fn read<T: Element>(&self, name: &str, shape: &[usize]) -> Result<Vec<T>> {
        let bytes = self.checked(&Spec::new::<T>(name, shape))?;
        Ok(bytemuck::pod_collect_to_vec(bytes))
    }

    /// Returns the data of a tensor, which must have the expected type and shape.
    pub fn checked(&self, expected: &Spec) -> Result<&[u8]> {
        let Spec { name, dtype, shape } = expected;
        const OTHER: &str = "the file is damaged, or of another kind or version; recreate it";
        let missing =
            || Error::damaged(format!("{} has no tensor `{name}`", self.path.display())).hint(OTHER);
        let (spec, a, b) = self.specs.get(name).ok_or_else(missing)?;
        if spec != expected {
            let found = format!(
                "tensor `{name}` has type and shape {:?} {:?}",
                spec.dtype, spec.shape
            );
            let error = Error::mismatch(format!("{found}, expected {dtype:?} {shape:?}"));
            return Err(error.context(self.path.display()).hint(OTHER));
        }
        Ok(&self.map[*a..*b])
    }
}

/// Returns the length of a file and its sha256, in hexadecimal.
///
/// # Errors
/// The file cannot be read.
pub fn file_digest(path: &Path) -> Result<FileDigest> {
    let failed = |e: std::io::Error| Error::io(path, "read", &e);
    let mut file = File::open(path).map_err(failed)?;
    let (mut hash, mut buffer, mut bytes) = (Sha256::new(), vec![0; 1 << 20], 0);
    loop {
        let read = file.read(&mut buffer).map_err(failed)?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        bytes += read as u64;
    }
    let sha256 = hex(&hash.finalize());
    Ok(FileDigest { bytes, sha256 })
}

/// Length and digest of a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileDigest {
    /// Length in bytes.
    pub bytes: u64,
    /// The sha256 of its content, in hexadecimal.
    pub sha256: String,
}

/// Key of a manifest's own digest.
const SEAL: &str = "manifest_sha256";

/// Adds to a JSON object its own digest, which reveals damage and mix-ups.
pub fn seal(manifest: &mut Value) {
    manifest[SEAL] = json!(hex(&Sha256::digest(manifest.to_string().as_bytes())));
}

/// Tells whether a manifest's text has the digest that it states.
///
/// The text itself is hashed, without the member that holds the digest, so that a reader need not write JSON exactly as
/// kvsmith does.
pub fn seal_holds(text: &str, manifest: &Value) -> bool {
    let Some(digest) = manifest.get(SEAL).and_then(Value::as_str) else {
        return false;
    };
    let member = format!("\"{SEAL}\":\"{digest}\",");
    let rest = text.split_once(&member);
    rest.is_some_and(|(before, after)| hex(&Sha256::digest(format!("{before}{after}"))) == digest)
}

/// Returns the sha256 of a text.
pub fn text_digest(text: &str) -> String {
    hex(&Sha256::digest(text.as_bytes()))
}

/// Formats bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
