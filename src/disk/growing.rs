//! A file of lines that grows as they come, and goes on after a stop.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::{folder_of, sync_folder, write_all_at};
use crate::error::{Error, Result};

/// A file of lines, of which each is on the disk when it is complete. A program that is killed leaves whole lines and at most
/// a part of another one, which the next one removes. One process at a time can have the file open.
pub struct Growing {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    len: u64,
}

impl Growing {
    /// Opens a file, or makes it, and calls `line` with each of its whole lines; a part of a line at its end is removed.
    ///
    /// # Errors
    /// The file cannot be written, another process has it open, a line is not UTF-8; any error of `line`.
    pub fn open(path: &Path, line: &mut dyn FnMut(&str) -> Result<()>) -> Result<Self> {
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
                let error = Error::failed(format!("{} is open in another process", path.display()));
                return Err(error.hint("wait until it ends, or choose another name for the output"));
            }
            // Some file systems have no locks.
            Err(TryLockError::Error(_)) => {}
        }
        if is_new {
            sync_folder(path);
        }
        let (mut reader, mut text, mut len) = (BufReader::new(&file), String::new(), 0);
        loop {
            text.clear();
            let read = reader
                .read_line(&mut text)
                .map_err(|e| Error::io(path, "read", &e))?;
            match text.strip_suffix('\n') {
                Some(whole) => line(whole)?,
                None => break,
            }
            len += read as u64;
        }
        file.set_len(len).map_err(failed)?;
        Ok(Self {
            path: folder_of(path).join(path.file_name().unwrap_or_default()),
            file,
            len,
        })
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
        let open = || {
            let mut lines = Vec::new();
            let file = Growing::open(&path, &mut |line| {
                lines.push(line.to_owned());
                Ok(())
            });
            file.map(|file| (file, lines))
        };
        let (mut file, lines) = open().unwrap();
        assert!(lines.is_empty());
        file.add("one").unwrap();
        assert!(open().is_err_and(|e| e.to_string().contains("another process")));
        file.add("two").unwrap();
        drop(file);
        let whole = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, whole + "thr").unwrap();
        let (mut file, lines) = open().unwrap();
        assert_eq!(lines, ["one", "two"]);
        file.add("three").unwrap();
        drop(file);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one\ntwo\nthree\n");
    }
}
