//! A folder that one run fills with files.

use std::fs::{File, TryLockError};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use super::{Output, make_folder, remove_file, remove_folder, rename, sync_folder};
use crate::error::{Error, Result};

/// A kind of folder.
#[derive(Debug)]
pub struct FolderKind {
    /// What it is called, such as `dump`.
    pub name: &'static str,
    /// The file that marks the folder as one of this kind.
    pub mark: &'static str,
    /// Tells whether a file of this name can belong to such a folder.
    pub holds: fn(&str) -> bool,
}

/// A folder that one run fills; locked while it is open.
///
/// Its mark lists the files that the run may write. None of these files existed when the run claimed the folder, so a
/// file with one of these names is the run's own. Only these files and the mark are ever removed.
pub struct Folder {
    path: PathBuf,
    kind: &'static FolderKind,
    content: FolderMark,
    /// The locked mark. The lock ends with the process, however that ends.
    lock: File,
}

/// The content of a mark.
#[derive(Serialize)]
struct FolderMark {
    kind: String,
    /// The id of the process that made the folder, for people who find the folder.
    process: u32,
    /// Whether the folder itself was made for the run.
    made: bool,
    files: Vec<String>,
    /// What the run says about itself.
    run: Value,
}

/// Most bytes of a mark that is only shown.
const MOST_OF_MARK: u64 = 1 << 24;

impl FolderMark {
    /// Parses a mark, or the folder's last file if it stands in the mark's place: see [`Folder::complete`].
    fn parse(text: &[u8]) -> Option<Self> {
        let content: Value = serde_json::from_slice(text).ok()?;
        let files = match &content["files"] {
            Value::Array(names) => names
                .iter()
                .map(|name| name.as_str().map(str::to_owned))
                .collect(),
            Value::Object(files) => Some(files.keys().cloned().collect()),
            _ => None,
        };
        Some(Self {
            kind: content["kind"].as_str()?.to_owned(),
            process: 0,
            made: content["made"].as_bool().unwrap_or(false),
            files: files?,
            run: content["run"].clone(),
        })
    }
}

impl Folder {
    /// Lists the files that the mark of a folder of this kind names; `None` if it has no such mark.
    pub fn marked(path: &Path, kind: &FolderKind) -> Option<Vec<String>> {
        let mut text = Vec::new();
        let mark = File::open(path.join(kind.mark)).ok()?;
        mark.take(MOST_OF_MARK).read_to_end(&mut text).ok()?;
        let mark = FolderMark::parse(&text).filter(|mark| mark.kind == kind.name)?;
        Some(mark.files)
    }

    /// Claims a folder for a run that writes `files`, or takes over a folder that has a mark; tells whether the folder
    /// is newly claimed.
    ///
    /// # Errors
    /// Another process uses the folder, the folder holds a file with one of these names that no run wrote, or it cannot
    /// be written.
    pub fn claim(
        path: &Path,
        kind: &'static FolderKind,
        files: Vec<String>,
        run: &Value,
    ) -> Result<(Self, bool)> {
        let made = make_folder(path).map_err(|e| Error::io(path, "make the folder", &e))?;
        let claimed = Self::claim_made(path, kind, &files, run, made);
        if claimed.is_err() && made {
            let _ = remove_folder(path);
        }
        claimed
    }

    /// Claims an existing folder; `made` tells whether it was made for this run.
    fn claim_made(
        path: &Path,
        kind: &'static FolderKind,
        files: &[String],
        run: &Value,
        made: bool,
    ) -> Result<(Self, bool)> {
        // Another process that claims or leaves the folder at this moment will soon be done.
        for _ in 0..3 {
            if let Some(folder) = Self::take_up(path, kind)? {
                return Ok((folder, false));
            }
            if let Some(name) = files
                .iter()
                .find(|name| path.join(name).symlink_metadata().is_ok())
            {
                let what = format!(
                    "{} contains a file `{name}` that does not belong to a {}",
                    path.display(),
                    kind.name
                );
                return Err(Error::usage(what).hint("choose a new or an empty folder"));
            }
            let content = FolderMark {
                kind: kind.name.to_owned(),
                process: std::process::id(),
                made,
                files: files.to_vec(),
                run: run.clone(),
            };
            let mark = path.join(kind.mark);
            match Output::create(&mark)?.persist_new(json!(content).to_string().as_bytes()) {
                Ok(lock) => {
                    let path = path.to_path_buf();
                    #[rustfmt::skip]
                    return Ok((Self { path, kind, content, lock }, true));
                }
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
                Err(e) => return Err(Error::io(&mark, "write", &e)),
            }
        }
        Err(in_use(path))
    }

    /// Takes over a folder that has a mark; `None` if it has none.
    pub(super) fn take_up(path: &Path, kind: &'static FolderKind) -> Result<Option<Self>> {
        let mark = path.join(kind.mark);
        let lock = match File::options().read(true).write(true).open(&mark) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(Error::io(&mark, "open", &e)),
        };
        lock.try_lock().map_err(|e| match e {
            TryLockError::WouldBlock => in_use(path),
            TryLockError::Error(e) => Error::io(&mark, "lock", &e).hint("choose another folder"),
        })?;
        // The run that had the lock may have removed or completed the folder.
        let id = |found: io::Result<std::fs::Metadata>| found.map(|found| (found.dev(), found.ino())).ok();
        if id(lock.metadata()) != id(mark.metadata()) {
            return Ok(None);
        }
        let text = std::fs::read(&mark).map_err(|e| Error::io(&mark, "read", &e))?;
        let content = FolderMark::parse(&text).filter(|content| {
            content.kind == kind.name && content.files.iter().all(|name| (kind.holds)(name))
        });
        let content = content.ok_or_else(|| {
            let error = Error::damaged(format!(
                "{} is damaged or was not written by kvsmith",
                mark.display()
            ));
            error.hint(format!(
                "remove {} if it is an old {}, or choose another folder",
                path.display(),
                kind.name
            ))
        })?;
        let path = path.to_path_buf();
        #[rustfmt::skip]
        return Ok(Some(Self { path, kind, content, lock }));
    }

    /// Returns the path of a file in the folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lists the files that the run may write, in the order in which they are removed.
    pub fn files(&self) -> &[String] {
        &self.content.files
    }

    /// Returns what the run says about itself.
    pub fn run(&self) -> &Value {
        &self.content.run
    }

    /// Removes the files of the run, and then the folder, if that was made for it and nothing else is in it.
    ///
    /// Best effort. The mark is removed after all files, so that a removal that broke off can be resumed at any point.
    pub fn remove(&self) {
        let files = self.content.files.iter().map(String::as_str);
        for name in files.chain([self.kind.mark]) {
            if remove_file(&self.file(name)).is_err() {
                return;
            }
        }
        sync_folder(&self.file(self.kind.mark));
        if self.content.made {
            let _ = remove_folder(&self.path);
        }
    }

    /// Removes a folder that the mark has left: its last file `name` stands in the mark's place. Best effort.
    pub fn remove_completed(&self, name: &str) {
        if remove_file(&self.file(name)).is_ok() {
            let _ = remove_folder(&self.path);
        }
    }

    /// Writes the folder's last file over the mark, then renames the mark to `name`. A process that is killed between
    /// these two steps leaves the last file under the mark's name, so this file must have the members `kind` and
    /// `files` too.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn complete(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let mark = self.file(self.kind.mark);
        let mut output = Output::create(&mark)?;
        io::Write::write_all(&mut output, bytes).map_err(|e| Error::io(&mark, "write", &e))?;
        self.lock = output.persist()?;
        let path = self.file(name);
        rename(&mark, &path).map_err(|e| Error::io(&path, "write", &e))
    }
}

fn in_use(path: &Path) -> Error {
    Error::system(format!("another process is using {}", path.display()))
        .hint("wait until it has finished, or choose another folder")
}
