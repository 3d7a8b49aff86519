//! Every change that the program makes on a disk, in one place: output files that appear when they are complete,
//! and folders that a run fills.
//!
//! In debug builds, tests can make any of these changes fail. `KVSMITH_DISK_FAULT=kill:7` kills the process at the
//! eighth change (with half of it done, if it is a write), and `full:7` fails this change and every later change that
//! needs disk space.

mod attempt;
mod folder;
mod growing;
mod output;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use attempt::{attempt, rename_folder};
pub use folder::{Folder, FolderKind};
pub use growing::Growing;
pub use output::{Output, remove_abandoned};

/// Writes `bytes` from byte `at` of a file on.
///
/// # Errors
/// The disk is full, or fails.
pub fn write_all_at(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    // A planned kill in the middle of a write leaves half of the bytes, or fewer if writing these fails.
    fault::growth(|| drop(file.write_all_at(&bytes[..bytes.len() / 2], at)))?;
    file.write_all_at(bytes, at)
}

/// Sets a file's length and reserves the disk space where the system can.
///
/// # Errors
/// The disk is full, or the file system takes no file of this length.
pub fn reserve(file: &File, len: usize) -> io::Result<()> {
    fault::growth(|| {})?;
    allocate(file, len)
}

#[cfg(target_os = "linux")]
fn allocate(file: &File, len: usize) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    let wanted = libc::off_t::try_from(len).map_err(|_| io::ErrorKind::FileTooLarge)?;
    // SAFETY: the descriptor is open for the duration of the call.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, wanted.max(1)) } {
        // Some file systems cannot reserve space; a full disk is then noticed while writing.
        0 | libc::EOPNOTSUPP | libc::EINVAL => file.set_len(len as u64),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

/// Sets a file's length without reserving space: a full disk is then noticed while writing.
#[cfg(not(target_os = "linux"))]
fn allocate(file: &File, len: usize) -> io::Result<()> {
    file.set_len(len as u64)
}

/// Returns the folder for files that programs can make again: `XDG_CACHE_HOME`, or `.cache` in the home folder.
pub fn user_cache() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let home = || Some(PathBuf::from(variable("HOME")?).join(".cache"));
    variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)
}

/// Makes a folder and its parents; tells whether the folder is new.
///
/// # Errors
/// The folder cannot be made.
pub fn make_folder(path: &Path) -> io::Result<bool> {
    let made = !path.exists();
    fault::growth(|| {})?;
    std::fs::create_dir_all(path)?;
    Ok(made)
}

/// Removes a file that kvsmith wrote, if it exists.
///
/// # Errors
/// The file cannot be removed.
pub fn remove_file(path: &Path) -> io::Result<()> {
    fault::point(|| {});
    match std::fs::remove_file(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Removes a folder that kvsmith made, if it is empty.
fn remove_folder(path: &Path) -> io::Result<()> {
    fault::point(|| {});
    std::fs::remove_dir(path)
}

/// Renames a file such that the new name outlasts a power failure.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fault::point(|| {});
    std::fs::rename(from, to)?;
    sync_folder(to);
    Ok(())
}

/// Makes the new names in the folder of `path` outlast a power failure, where the file system offers that.
fn sync_folder(path: &Path) {
    fault::point(|| {});
    let _ = File::open(folder_of(path)).and_then(|folder| folder.sync_all());
}

/// Returns the folder that a file lies in.
pub fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The faults that tests ask for with `KVSMITH_DISK_FAULT`.
#[cfg(debug_assertions)]
mod fault {
    use std::io;
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// Which fault happens, and at which change.
    struct Plan {
        kill: bool,
        at: u64,
    }

    static PLAN: OnceLock<Option<Plan>> = OnceLock::new();
    static DONE: AtomicU64 = AtomicU64::new(0);

    fn plan() -> Option<&'static Plan> {
        let read = || {
            let text = std::env::var("KVSMITH_DISK_FAULT").ok()?;
            let (kind, at) = text.split_once(':')?;
            let (kill, at) = (kind == "kill", at.parse().ok()?);
            Some(Plan { kill, at })
        };
        PLAN.get_or_init(read).as_ref()
    }

    /// Counts a change. At the planned change it runs `part` and kills the process, or, from that change on, returns
    /// true for a full disk.
    pub fn point(part: impl FnOnce()) -> bool {
        let Some(plan) = plan() else {
            return false;
        };
        let done = DONE.fetch_add(1, Ordering::Relaxed);
        if plan.kill && done == plan.at {
            part();
            // SAFETY: ends this process.
            unsafe { libc::raise(libc::SIGKILL) };
        }
        !plan.kill && done >= plan.at
    }

    /// Counts a change that needs disk space; fails if the disk is to be full.
    pub fn growth(part: impl FnOnce()) -> io::Result<()> {
        if point(part) {
            Err(io::Error::from_raw_os_error(libc::ENOSPC))
        } else {
            Ok(())
        }
    }
}

/// In release builds, there are no faults.
#[cfg(not(debug_assertions))]
mod fault {
    pub fn point(_: impl FnOnce()) {}

    pub fn growth(_: impl FnOnce()) -> std::io::Result<()> {
        Ok(())
    }
}
