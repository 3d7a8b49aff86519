//! Folders that appear under their name by one rename, when they are complete.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::output::{TEMP_PREFIX, TEMP_SUFFIX, is_own_disk, owner_of, system};
use super::{Folder, FolderKind, fault, folder_of, make_folder, remove_folder, sync_folder};
use crate::error::{Error, Result};

/// Age from which an empty folder of an attempt was certainly left by a killed process.
const LEFT: Duration = Duration::from_secs(60);

/// Names a folder for an attempt at the folder `dir`: beside it, under a name that no other attempt has. Makes the
/// folder above `dir`, and removes attempts of killed processes.
///
/// # Errors
/// The folder above cannot be written.
pub fn attempt(dir: &Path, kind: &'static FolderKind) -> Result<PathBuf> {
    let above = folder_of(dir);
    make_folder(above).map_err(|e| Error::io(above, "make the folder", &e))?;
    remove_abandoned(above, kind);
    let prefix = format!(
        "{TEMP_PREFIX}{}-{}-",
        system().unwrap_or_default(),
        std::process::id()
    );
    let random = uuid::Builder::from_random_bytes(rand::random())
        .into_uuid()
        .simple()
        .to_string();
    Ok(above.join(format!("{prefix}{}{TEMP_SUFFIX}", &random[..8])))
}

/// Renames a folder such that the new name outlasts a power failure. An empty folder is replaced, no other.
///
/// # Errors
/// There is something else with the new name.
pub fn rename_folder(from: &Path, to: &Path) -> io::Result<()> {
    fault::point(|| {});
    std::fs::rename(from, to)?;
    sync_folder(to);
    Ok(())
}

/// Removes the folders of attempts whose process is certainly dead; see [`super::output`]. Best effort.
fn remove_abandoned(above: &Path, kind: &'static FolderKind) {
    let Some(system) = system() else {
        return;
    };
    let own_disk = is_own_disk(above);
    for entry in std::fs::read_dir(above).into_iter().flatten().flatten() {
        let (name, path) = (entry.file_name(), entry.path());
        let Some(owner) = owner_of(&name) else {
            continue;
        };
        if (owner != system && !own_disk) || !path.is_dir() {
            continue;
        }
        match Folder::take_up(&path, kind) {
            Ok(Some(folder)) => {
                folder.remove();
                let _ = remove_folder(&path);
            }
            // Killed before the folder had its mark, or after it was complete.
            Ok(None) => remove_unmarked(&path, kind),
            Err(_) => {}
        }
    }
}

/// Removes an attempt's folder without a mark, if nobody has changed it for a minute and only files of its kind are in
/// it.
fn remove_unmarked(path: &Path, kind: &'static FolderKind) {
    let age = path.metadata().and_then(|found| found.modified());
    if !age.is_ok_and(|changed| changed.elapsed().is_ok_and(|age| age > LEFT)) {
        return;
    }
    let entries = || std::fs::read_dir(path).into_iter().flatten().flatten();
    let is_own = |name: &str| (kind.holds)(name) || owner_of(name.as_ref()).is_some();
    if entries().all(|entry| entry.file_name().to_str().is_some_and(is_own)) {
        for entry in entries() {
            let _ = super::remove_file(&entry.path());
        }
        let _ = remove_folder(path);
    }
}
