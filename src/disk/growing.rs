//! A file of lines that grows as they come, and goes on after a stop.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::{sync_folder, write_all_at};
use crate::error::{Error, Result};

/// A file of lines. A program that is killed leaves whole lines and at most a part of another one, which the next one
/// removes; after a power failure, the last lines may be lost. One process at a time can have the file open.
pub struct Growing {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    len: u64,
}

impl Growing {
    /// Opens a file, or makes it; `keeps` says whether the lines that it has stay.
    ///
    /// # Errors
    /// The file cannot be written, another process has it open.
    pub fn open(path: &Path, keeps: bool) -> Result<Self> {
        let failed = |e: std::io::Error| Error::io(path, "write", &e);
        let is_new = !path.exists();
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let file = file.map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let error = Error::system(format!("{} is open in another process", path.display()));
                return Err(error.hint("wait until it ends, or choose another name for the output"));
            }
            // Some file systems have no locks.
            Err(TryLockError::Error(_)) => {}
        }
        if is_new {
            sync_folder(path);
        }
        if !keeps {
            file.set_len(0).map_err(failed)?;
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            len: 0,
        })
    }

    /// Calls `each` with the lines of the file, and removes a part of a line at its end; called once, before lines are added.
    ///
    /// # Errors
    /// A line is not UTF-8; any error of `each`.
    pub fn read(&mut self, each: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
        let failed = |e: std::io::Error| Error::io(&self.path, "read", &e);
        let (mut reader, mut bytes, mut len) = (BufReader::new(&self.file), Vec::new(), 0);
        loop {
            bytes.clear();
            let read = reader.read_until(b'\n', &mut bytes).map_err(failed)?;
            let Some(whole) = bytes.strip_suffix(b"\n") else {
                break;
            };
            let line = std::str::from_utf8(whole).map_err(|_| {
                let what = format!("{} is not UTF-8 text (after byte {len})", self.path.display());
                Error::invalid(what).hint("the file was changed; choose another name for the output")
            })?;
            each(line)?;
            len += read as u64;
        }
        self.file.set_len(len).map_err(failed)?;
        self.len = len;
        Ok(())
    }

    /// Adds a line.
    ///
    /// # Errors
    /// The disk is full, or fails; the file then has the lines before it.
    pub fn add(&mut self, line: &str) -> Result<()> {
        let bytes = format!("{line}\n").into_bytes();
        write_all_at(&self.file, &bytes, self.len).map_err(|e| {
            // What was written of the line would be in the way of the next one.
            let _ = self.file.set_len(self.len);
            Error::io(&self.path, "write", &e)
        })?;
        self.len += bytes.len() as u64;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_lines_stay_and_parts_go() {
        let folder = tempfile::TempDir::new().unwrap();
        let path = folder.path().join("lines");
        let open = |keeps| {
            let mut lines = Vec::new();
            let mut file = Growing::open(&path, keeps)?;
            file.read(&mut |line| {
                lines.push(line.to_owned());
                Ok(())
            })?;
            Ok::<_, Error>((file, lines))
        };
        let (mut file, lines) = open(true).unwrap();
        assert!(lines.is_empty());
        file.add("one").unwrap();
        assert!(open(false).is_err_and(|e| e.to_string().contains("another process")));
        file.add("z\u{e4}hl zwei").unwrap();
        drop(file);
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole, "one\nz\u{e4}hl zwei\n".as_bytes());
        // A kill may cut a line anywhere, also within a character.
        for cut in 5..whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut file, lines) = open(true).unwrap();
            assert_eq!(lines, ["one"], "{cut}");
            file.add("three").unwrap();
            drop(file);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\nthree\n");
        }
        std::fs::write(&path, b"\xff\xfe\nmore\n").unwrap();
        assert!(open(true).is_err_and(|e| e.to_string().contains("not UTF-8")));
        let (_, lines) = open(false).unwrap();
        assert!(lines.is_empty());
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 0);
    }
}
