//! kvsmith's own safetensors files. They are written in one canonical form to a temporary file that is
//! renamed when complete, and every length is checked when they are read.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use bytemuck::Pod;
use half::f16;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::error::{Error, Result};
use crate::mapped::Mapped;
use crate::unfinished::{self, Unfinished};

/// Prefix of the names of unfinished files.
pub const TEMP_PREFIX: &str = ".kvsmith-";
/// Suffix of the names of unfinished files.
pub const TEMP_SUFFIX: &str = ".part";
/// Key of kvsmith's JSON in `__metadata__`.
pub const METADATA_KEY: &str = "kvsmith";

// Values are copied between memory and files as they are.
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
        Self::of(name, T::DTYPE, shape)
    }

    /// Describes a tensor whose type is known only at run time.
    pub fn of(name: &str, dtype: Dtype, shape: &[usize]) -> Self {
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

/// Builds the canonical header of `specs`: tensors of wide types first (so that data are aligned), then
/// by name.
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
        let too_large = || Error::failed(format!("tensor `{}` {:?} is too large", spec.name, spec.shape));
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

/// An output file that gets its name only when it is complete.
///
/// It is created before long work starts, so that a path that cannot be written fails at once.
pub struct Output {
    path: PathBuf,
    temp: NamedTempFile,
    _unfinished: Unfinished,
}

impl Output {
    /// Creates the temporary file in the folder of `path`.
    pub fn create(path: &Path) -> Result<Self> {
        // Renaming a file onto a device node would replace the device.
        if path.exists() && !path.is_file() {
            let what = match path.is_dir() {
                true => "a folder",
                false => "not a regular file",
            };
            return Err(Error::failed(format!(
                "cannot write {}: it is {what}",
                path.display()
            )));
        }
        // The target of a symbolic link is replaced, not the link.
        let path = match path.canonicalize() {
            Ok(path) => path,
            Err(_) if path.is_symlink() => {
                let text = format!(
                    "cannot write {}: it is a symbolic link to nothing",
                    path.display()
                );
                return Err(Error::failed(text).hint("remove the link, or choose another name"));
            }
            Err(_) => path.to_path_buf(),
        };
        let folder = match path.parent() {
            Some(p) if !p.as_os_str().is_empty() => p,
            _ => Path::new("."),
        };
        let temp = tempfile::Builder::new()
            .prefix(TEMP_PREFIX)
            .suffix(TEMP_SUFFIX)
            .tempfile_in(folder)
            .map_err(|e| Error::io(&path, "write", &e))?;
        let _unfinished = unfinished::list(temp.path());
        Ok(Self {
            path,
            temp,
            _unfinished,
        })
    }

    /// Writes `bytes` and renames the file to its final name.
    pub fn finish(mut self, bytes: &[u8]) -> Result<()> {
        self.temp
            .write_all(bytes)
            .map_err(|e| Error::io(&self.path, "write", &e))?;
        self.persist()
    }

    fn persist(self) -> Result<()> {
        let Self { path, temp, .. } = self;
        let failed = |e| Error::io(&path, "write", &e);
        temp.as_file().sync_all().map_err(failed)?;
        // Temporary files are private; results get the permissions of the file that they replace, or of any new file.
        let permissions = match path.metadata() {
            Ok(replaced) => replaced.permissions(),
            Err(_) => Permissions::from_mode(0o666 & !umask()),
        };
        temp.as_file().set_permissions(permissions).map_err(failed)?;
        temp.persist(&path).map_err(|e| failed(e.error))?;
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.temp.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.temp.flush()
    }
}

/// Reads the process's file mode mask.
#[allow(clippy::useless_conversion, reason = "mode_t is narrower on other systems")]
fn umask() -> u32 {
    // SAFETY: umask only swaps an integer of the process. It is restored at once, and the program
    // creates files from one thread.
    unsafe {
        let mask = libc::umask(0o022);
        libc::umask(mask);
        mask.into()
    }
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
        let io = |e: std::io::Error| Error::io(&output.path, "write", &e);
        reserve(output.temp.as_file(), len).map_err(io)?;
        output.temp.as_file().write_all_at(&bytes, 0).map_err(io)?;
        Ok(Self { output, offsets })
    }

    /// Writes `bytes` into tensor `name`, from byte `at` of its data on.
    pub fn put(&self, name: &str, at: usize, bytes: &[u8]) -> Result<()> {
        let Output { path, temp, .. } = &self.output;
        let missing = || Error::failed(format!("internal: no tensor `{name}` in {}", path.display()));
        let start = self.offsets.get(name).ok_or_else(missing)?;
        let written = temp.as_file().write_all_at(bytes, (start + at) as u64);
        written.map_err(|e| Error::io(path, "write", &e))
    }

    /// Renames the complete file to its final name.
    pub fn finish(self) -> Result<()> {
        self.output.persist()
    }
}

/// Sets a file's length and reserves the disk space where the system can.
#[cfg(target_os = "linux")]
fn reserve(file: &File, len: usize) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let wanted = libc::off_t::try_from(len).map_err(|_| std::io::ErrorKind::FileTooLarge)?;
    // SAFETY: the descriptor is open for the duration of the call.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, wanted.max(1)) } {
        // Some file systems cannot reserve space; a full disk is then noticed while writing.
        0 | libc::EOPNOTSUPP | libc::EINVAL => file.set_len(len as u64),
        code => Err(std::io::Error::from_raw_os_error(code)),
    }
}

/// Sets a file's length; a full disk is noticed while writing.
#[cfg(not(target_os = "linux"))]
fn reserve(file: &File, len: usize) -> std::io::Result<()> {
    file.set_len(len as u64)
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
    let specs: Vec<Spec> = tensors.iter().map(|t| t.spec.clone()).collect();
    let writer = Writer::new(output, &specs, metadata)?;
    for t in tensors {
        writer.put(&t.spec.name, 0, &t.bytes)?;
    }
    writer.finish()
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
            return Err(Error::failed(format!("{} is a folder", path.display())).hint("give a file"));
        }
        let file = File::open(path).map_err(|e| Error::io(path, "open", &e))?;
        let map = Mapped::new(&file, path).map_err(|e| Error::io(path, "read", &e))?;
        let (header, info) = SafeTensors::read_metadata(&map).map_err(|e| {
            Error::failed(format!(
                "{} is not a valid safetensors file ({e})",
                path.display()
            ))
            .hint("the file is damaged or of another kind")
        })?;
        let start = 8 + header;
        let (described, found) = (info.data_len(), map.len() - start);
        if found != described {
            let what = format!("the header describes {described} bytes of tensors, the file has {found}");
            let error = Error::failed(what).context(path.display());
            return Err(error.hint("the file is damaged or not complete"));
        }
        let metadata = info
            .metadata()
            .as_ref()
            .and_then(|m| m.get(METADATA_KEY).cloned());
        let tensors = info.tensors().into_iter().map(|(name, t)| {
            let (a, b) = t.data_offsets;
            let spec = Spec::of(&name, t.dtype, &t.shape);
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
        Err(
            Error::failed(format!("{}: the header was altered", self.path.display()))
                .hint("the file is damaged; make it again"),
        )
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
    /// The header has no such JSON, or it is not an object.
    pub fn manifest(&self) -> Result<Value> {
        let text = self.metadata.as_ref().ok_or_else(|| {
            Error::failed(format!("{} was not written by kvsmith", self.path.display()))
                .hint("expected a file made by `kvsmith calibrate`, `pack`, `codebook` or `moments`")
        })?;
        match serde_json::from_str(text) {
            Ok(value @ Value::Object(_)) => Ok(value),
            _ => Err(
                Error::failed(format!("{}: its manifest is not valid JSON", self.path.display()))
                    .hint("the file is damaged; make it again"),
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
        let missing = || Error::failed(format!("{} has no tensor `{name}`", self.path.display()));
        let (spec, a, b) = self.specs.get(name).ok_or_else(missing)?;
        if spec != expected {
            let found = format!("tensor `{name}` is {:?} {:?}", spec.dtype, spec.shape);
            let error = Error::failed(format!("{found}, expected {dtype:?} {shape:?}"));
            return Err(error.context(self.path.display()));
        }
        Ok(&self.map[*a..*b])
    }
}

/// Formats bytes in lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
