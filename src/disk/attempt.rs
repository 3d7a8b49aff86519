//! Folders that appear under their name by one rename, when they are complete.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::output::{TEMP_PREFIX, TEMP_SUFFIX, is_own_disk, owner_of, system};
use super::{Folder, FolderKind, fault, folder_of, make_folder, remove_folder, sync_folder};
use crate::error::{Error, Result};

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
                drop(folder);
                // What is left are unfinished files, which the mark does not list.
                remove_unmarked(&path, kind);
            }
            // Killed before the folder had its mark, or after it was complete.
            Ok(None) => remove_unmarked(&path, kind),
            Err(_) => {}
        }
    }
}

/// Removes an attempt's folder without a mark, unless a process holds one of its files or a file of another kind is in
/// it.
fn remove_unmarked(path: &Path, kind: &'static FolderKind) {
    let entries = || std::fs::read_dir(path).into_iter().flatten().flatten();
    let is_left = |entry: std::fs::DirEntry| {
        let name = entry.file_name();
        let is_own = name.to_str().is_some_and(|name| (kind.holds)(name)) || owner_of(&name).is_some();
        let file = File::options().read(true).write(true).open(entry.path());
        is_own && file.is_ok_and(|file| file.try_lock().is_ok())
    };
    if entries().all(is_left) {
        for entry in entries() {
            let _ = super::remove_file(&entry.path());
        }
        let _ = remove_folder(path);
    }
}
