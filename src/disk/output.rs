//! An output file, and the removal of unfinished files whose process was killed.

use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use super::{fault, folder_of, sync_folder, write_all_at};
use crate::error::{Error, Result};
use crate::unfinished::{self, Unfinished};

/// Prefix of the names of unfinished files, before the id of the running system and that of the process.
pub const TEMP_PREFIX: &str = ".kvsmith-";
/// Suffix of the names of unfinished files.
pub const TEMP_SUFFIX: &str = ".part";

/// An output file that gets its name only when it is complete.
///
/// It is created before long work starts, so that a path that cannot be written fails at once. Until the file is
/// complete, it has a temporary name and a lock, which ends with the process. The next process that writes to the
/// folder removes files that killed processes left.
pub struct Output {
    /// The path as it was given.
    given: PathBuf,
    path: PathBuf,
    temp: NamedTempFile,
    /// Bytes written so far.
    len: u64,
    /// Whether no file of this name may be replaced.
    is_new: bool,
    /// Removes the file if the program ends without dropping its values.
    unfinished: Unfinished,
}

impl Output {
    /// Creates the temporary file in the folder of `path`.
    ///
    /// # Errors
    /// `path` is a folder, a device or a link to nothing, or its folder cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        // Renaming a file onto a device node would replace the device.
        if path.exists() && !path.is_file() {
            let what = if path.is_dir() {
                "a folder"
            } else {
                "not a regular file"
            };
            let error = Error::invalid(format!("cannot write {}: it is {what}", path.display()));
            return Err(error.hint("choose another name for the output"));
        }
        let given = path.to_owned();
        // The target of a symbolic link is replaced, not the link.
        let path = match path.canonicalize() {
            Ok(path) => path,
            Err(_) if path.is_symlink() => {
                let text = format!(
                    "cannot write {}: it is a symbolic link whose target does not exist",
                    path.display()
                );
                return Err(Error::invalid(text).hint("remove the link, or choose another name"));
            }
            Err(_) => path.to_path_buf(),
        };
        let folder = folder_of(&path);
        if !folder.exists() {
            let error = Error::not_found(format!(
                "cannot write {}: folder {} does not exist",
                path.display(),
                folder.display()
            ));
            return Err(error.hint("create the folder, or choose another name for the output"));
        }
        remove_abandoned(folder);
        let temp = create_temp(folder).map_err(|e| Error::io(&path, "write", &e))?;
        let unfinished = unfinished::list(temp.path());
        Ok(Self {
            given,
            path,
            temp,
            len: 0,
            is_new: false,
            unfinished,
        })
    }

    /// Replaces no file, also none that another process writes in the meantime.
    pub fn only_new(self) -> Self {
        Self { is_new: true, ..self }
    }

    /// Returns the path as it was given, which may be a link to the final one.
    pub fn given(&self) -> &Path {
        &self.given
    }

    /// Returns the final path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the file while it is not complete.
    pub fn unfinished(&self) -> &Path {
        self.temp.path()
    }

    /// Returns the open file.
    pub fn file(&self) -> &File {
        self.temp.as_file()
    }

    /// Writes `bytes` and renames the file to its final name.
    pub fn finish(mut self, bytes: &[u8]) -> Result<()> {
        self.append(bytes)
            .map_err(|e| Error::io(&self.path, "write", &e))?;
        self.persist().map(drop)
    }

    /// Renames the complete file to its final name; returns it open and still locked.
    pub fn persist(self) -> Result<File> {
        let (path, is_new) = (self.path.clone(), self.is_new);
        let failed = |e| Error::io(&path, "write", &e);
        let (temp, _listed) = self.complete().map_err(failed)?;
        fault::point(|| {});
        let persisted = if is_new {
            temp.persist_noclobber(&path)
        } else {
            temp.persist(&path)
        };
        sync_folder(&path);
        match persisted {
            Ok(file) => Ok(file),
            Err(e) if is_new && e.error.kind() == io::ErrorKind::AlreadyExists => beside(e.file, &path),
            Err(e) => Err(failed(e.error)),
        }
    }

    /// Like [`Output::persist`], but fails if there is a file with the final name.
    pub(super) fn persist_new(mut self, bytes: &[u8]) -> io::Result<File> {
        self.append(bytes)?;
        let path = self.path.clone();
        let (temp, _listed) = self.complete()?;
        fault::point(|| {});
        let file = temp.persist_noclobber(&path).map_err(|e| e.error)?;
        sync_folder(&path);
        Ok(file)
    }

    /// Writes the content through to the disk and sets the permissions of the final file.
    fn complete(self) -> io::Result<(NamedTempFile, Unfinished)> {
        let Self {
            path,
            temp,
            unfinished,
            ..
        } = self;
        fault::growth(|| {})?;
        temp.as_file().sync_all()?;
        // Temporary files are private; results get the permissions of the file that they replace, or of any new file.
        let permissions = match path.metadata() {
            Ok(replaced) => replaced.permissions(),
            Err(_) => Permissions::from_mode(0o666 & !umask()),
        };
        temp.as_file().set_permissions(permissions)?;
        Ok((temp, unfinished))
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if !bytes.is_empty() {
            write_all_at(self.temp.as_file(), bytes, self.len)?;
            self.len += bytes.len() as u64;
        }
        Ok(())
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.append(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Keeps a complete file whose name another process has taken, unless both have the same content.
fn beside(temp: NamedTempFile, path: &Path) -> Result<File> {
    let there = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
    if std::fs::read(temp.path()).is_ok_and(|own| own == there) {
        return File::open(path).map_err(|e| Error::io(path, "open", &e));
    }
    let [stem, extension] = [path.file_stem(), path.extension()]
        .map(|part| part.map_or(String::new(), |part| part.to_string_lossy().into_owned()));
    let dot = if extension.is_empty() { "" } else { "." };
    for number in 2..u32::MAX {
        let free = path.with_file_name(format!("{stem}-{number}{dot}{extension}"));
        if temp.path().parent() == free.parent() && !free.exists() {
            let (shown, kept) = (path.display(), free.display());
            temp.persist(&free)
                .map_err(|e| Error::io(&free, "write", &e.error))?;
            return Err(Error::system(format!(
                "another process wrote {shown} in the meantime; this result is in {kept}"
            ))
            .hint("choose different outputs for commands that run at the same time"));
        }
    }
    Err(Error::io(path, "write", &io::ErrorKind::AlreadyExists.into()))
}

/// Creates a locked file whose name states the system and the process that write it.
fn create_temp(folder: &Path) -> io::Result<NamedTempFile> {
    let system = system().unwrap_or_default();
    let prefix = format!("{TEMP_PREFIX}{system}-{}-", std::process::id());
    loop {
        fault::growth(|| {})?;
        let temp = tempfile::Builder::new()
            .prefix(&prefix)
            .suffix(TEMP_SUFFIX)
            .tempfile_in(folder)?;
        // On a file system without locks, no process can prove that the owner is dead, so no process removes the file.
        let unlockable = temp.as_file().lock().is_err();
        // Before the file was locked, another process may have removed it as abandoned.
        if unlockable || temp.as_file().metadata()?.nlink() > 0 {
            return Ok(temp);
        }
    }
}

/// Removes the unfinished files of processes that are certainly dead: no process holds the lock of such a file, and a
/// lock would be visible here, because this system wrote the file since it last started, or because the file lies on a
/// local file system.
///
/// Best effort: a file that stays only costs space. On a system without a boot id, nothing is removed.
pub fn remove_abandoned(folder: &Path) {
    let Some(system) = system() else {
        return;
    };
    let own_disk = is_own_disk(folder);
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let owner = entry.file_name();
        let Some(owner) = owner_of(&owner) else {
            continue;
        };
        if (owner != system && !own_disk) || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let file = File::options().read(true).write(true).open(entry.path());
        if file.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = super::remove_file(&entry.path());
        }
    }
}

/// Returns the id of the system in an unfinished file's name; `None` for other names.
pub(super) fn owner_of(name: &OsStr) -> Option<&str> {
    let name = name.to_str()?.strip_prefix(TEMP_PREFIX)?;
    let mut parts = name.strip_suffix(TEMP_SUFFIX)?.splitn(3, '-');
    let (system, process) = (parts.next()?, parts.next()?);
    process.parse::<u32>().ok()?;
    parts.next().is_some().then_some(system)
}

/// Identifies the running system; another computer has another id, and so has this computer after a restart.
pub(super) fn system() -> Option<String> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.chars().filter(char::is_ascii_hexdigit).take(12).collect())
}

/// Tells whether a folder lies on a file system that no other computer can use.
#[cfg(target_os = "linux")]
pub(super) fn is_own_disk(folder: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;
    // ext2 to ext4, XFS, Btrfs, tmpfs, overlayfs, F2FS, ZFS: include/uapi/linux/magic.h of Linux, and OpenZFS.
    const OWN: [u64; 7] = [
        0xef53,
        0x5846_5342,
        0x9123_683e,
        0x0102_1994,
        0x794c_7630,
        0xf2f5_2010,
        0x2fc1_2fc1,
    ];
    let Ok(path) = std::ffi::CString::new(folder.as_os_str().as_bytes()) else {
        return false;
    };
    // SAFETY: statfs is a plain struct of integers, filled by the call; the path is a valid C string.
    let kind = unsafe {
        let mut stat: libc::statfs = std::mem::zeroed();
        (libc::statfs(path.as_ptr(), &mut stat) == 0).then_some(stat.f_type)
    };
    kind.is_some_and(|kind| OWN.contains(&(kind as u64)))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn is_own_disk(_: &Path) -> bool {
    false
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
